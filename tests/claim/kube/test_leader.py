"""Elections: never two leaders, and soon one again after any fault of theirs or of the API server."""

import asyncio
import random
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.kube.leader import LeaderElection, LeaseTimings
from rackloom.core.cluster.objects import LEASE
from rackloom.errors import Refused
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.faults import RequestFault
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual import event_loop


class Candidates:
    """Processes that want to lead, and those that do."""

    def __init__(self, kube: FakeKube) -> None:
        self._kube = kube
        self.leading: set[str] = set()
        self.history: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, name: str, *, skew: float = 0.0) -> None:
        loop = asyncio.get_running_loop()
        election = LeaderElection(
            DirectApi(self._kube, name),
            "kube-system",
            "rackloom",
            name,
            wall=lambda: 1e9 + skew + loop.time(),
            rng=random.Random(name),
        )

        async def lead() -> None:
            assert not self.leading, f"{name} leads beside {self.leading}"
            self.leading.add(name)
            self.history.append(name)
            try:
                await asyncio.sleep(1e6)
            finally:
                self.leading.discard(name)

        self.tasks[name] = asyncio.create_task(election.run(lead))

    async def stop(self, name: str) -> None:
        task = self.tasks.pop(name)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def stop_all(self) -> None:
        for name in list(self.tasks):
            await self.stop(name)


def test_one_leads_and_hands_over_at_once() -> None:
    async def run() -> None:
        kube = FakeKube()
        candidates = Candidates(kube)
        candidates.start("a")
        await asyncio.sleep(1)
        candidates.start("b", skew=-5000.0)
        await asyncio.sleep(100)
        assert candidates.history == ["a"]
        await candidates.stop("a")
        await asyncio.sleep(3)
        assert candidates.history == ["a", "b"]
        lease = await DirectApi(kube, "test").get(LEASE, "rackloom", "kube-system")
        assert lease["spec"]["holderIdentity"] == "b"
        assert lease["spec"]["leaseTransitions"] == 1
        assert lease["spec"]["leaseDurationSeconds"] == 15
        await candidates.stop_all()

    event_loop.run_simulation(0, run)


def test_a_leader_that_cannot_renew_stops_before_its_lease_ends() -> None:
    async def run() -> None:
        kube = FakeKube()
        candidates, loop = Candidates(kube), asyncio.get_running_loop()
        candidates.start("a")
        await asyncio.sleep(5)
        candidates.start("b")
        await asyncio.sleep(1)
        kube.faults.add(RequestFault(user="a"))
        cut = loop.time()
        while candidates.leading:
            await asyncio.sleep(0.1)
        assert 8.0 <= loop.time() - cut <= 10.2
        while not candidates.leading:
            await asyncio.sleep(0.1)
        assert candidates.leading == {"b"}
        assert 13.0 <= loop.time() - cut <= 20.0
        await candidates.stop_all()

    event_loop.run_simulation(0, run)


def test_a_server_that_hangs_does_not_keep_a_leader() -> None:
    async def run() -> None:
        kube = FakeKube()
        candidates = Candidates(kube)
        candidates.start("a")
        await asyncio.sleep(5)
        kube.faults.delay(3600.0)
        await asyncio.sleep(11)
        assert not candidates.leading
        await candidates.stop_all()

    event_loop.run_simulation(0, run)


def test_work_that_ends_ends_the_election_and_a_defect_is_told() -> None:
    async def run() -> None:
        api = DirectApi(FakeKube(), "a")

        def election() -> LeaderElection:
            return LeaderElection(api, "kube-system", "x", "a", wall=lambda: 1e9, rng=random.Random(0))

        async def fine() -> None:
            await asyncio.sleep(1)

        async def broken() -> None:
            raise ZeroDivisionError

        await election().run(fine)
        assert (await api.get(LEASE, "x", "kube-system"))["spec"]["holderIdentity"] == ""
        with pytest.raises(ZeroDivisionError):
            await election().run(broken)
        assert (await api.get(LEASE, "x", "kube-system"))["spec"]["holderIdentity"] == ""

    event_loop.run_simulation(0, run)


@given(
    seed=st.integers(0, 10_000),
    skews=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=4),
    events=st.lists(
        st.tuples(
            st.sampled_from(["cut", "lose", "mend", "restart", "slow"]), st.integers(0, 3), st.floats(0, 30)
        ),
        max_size=12,
    ),
)
def test_never_two_and_then_one(seed: int, skews: list[float], events: list[tuple[str, int, float]]) -> None:
    async def run() -> None:
        kube = FakeKube(seed=seed)
        candidates = Candidates(kube)
        names = [f"c{number}" for number in range(len(skews))]
        for name, skew in zip(names, skews, strict=True):
            candidates.start(name, skew=skew)
        for what, number, seconds in events:
            name = names[number % len(names)]
            match what:
                case "cut":
                    kube.faults.add(RequestFault(user=name))
                case "lose":
                    kube.faults.add(RequestFault(user=name, rate=0.5, lost="reply"))
                case "slow":
                    kube.faults.delay(0.0, 8.0)
                case "restart":
                    await candidates.stop(name)
                    candidates.start(name)
                case _:
                    kube.faults.clear()
            await asyncio.sleep(seconds)
        kube.faults.clear()
        kube.faults.delay(0.01)
        await asyncio.sleep(60)
        assert len(candidates.leading) == 1
        assert not any(task.done() for task in candidates.tasks.values())
        await candidates.stop_all()

    event_loop.run_simulation(seed, run)


def test_terms_that_cannot_work_are_refused() -> None:
    with pytest.raises(Refused, match="lease > renew > retry"):
        LeaseTimings(lease=10.0, renew=10.0)
