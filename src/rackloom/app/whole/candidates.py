"""Two replicas of Rackloom's controllers in the twin, of which one leads: the election is the real one."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from rackloom.app.leadership import LEASE
from rackloom.app.whole.ground import Chance
from rackloom.app.whole.link import Link
from rackloom.app.whole.ours import Lead, OurControllers
from rackloom.claim.cluster.settings import DEFAULT_NAMESPACE
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.kube.leader import Election


class Candidate:
    """One replica, life after life; each stands for election under a name of its own."""

    def __init__(self, name: str, lead: Lead, api: KubeApi, chance: Chance, board: "Candidates") -> None:
        self.identity = ""
        """As its newest life calls itself in the Lease."""
        self.link = Link(api)
        self.controllers = OurControllers(self._stand, self.link.api)
        self._name = name
        self._lead = lead
        self._chance = chance
        self._board = board
        self._election: Election | None = None

    @property
    def leads(self) -> bool:
        """Whether it believes so."""
        return self._election is not None and self._election.is_leader

    async def _stand(self, api: KubeApi) -> None:
        wall, rng = self._chance.wall, self._chance.rng
        self.identity = f"{self._name}-{self.controllers.ended + 1}"
        self._election = Election(api, DEFAULT_NAMESPACE, LEASE, self.identity, wall=wall, rng=rng)
        await self._election.run(lambda: self._elected(api))

    async def _elected(self, api: KubeApi) -> None:
        with self._board.term(self.identity):
            await self._lead(api)


class Candidates:
    """The replicas, and what happens to the one that leads."""

    def __init__(self, lead: Lead, api: KubeApi, chance: Chance) -> None:
        self.overlaps: list[str] = []
        """Terms that began while another was still at work, in words. There must be none."""
        self._at_work: list[str] = []
        """Whose controllers run, whatever their candidate believes of its lease."""
        self._all = tuple(Candidate(f"replica-{one}", lead, api, chance, self) for one in "ab")

    @property
    def first(self) -> OurControllers:
        """The processes of the first replica."""
        return self._all[0].controllers

    @property
    def leader(self) -> str | None:
        """Who leads, by its name in the Lease; None while nobody does."""
        return next((one.identity for one in self._all if one.leads), None)

    async def run(self) -> None:
        """Stand for election until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for one in self._all:
                tasks.create_task(one.controllers.run())

    async def kill_leader(self, down: float) -> str | None:
        """The leader dies without a word, and stands again `down` seconds later; None where nobody leads."""
        leader = self._leading()
        if leader is not None:
            await leader.controllers.kill(down)
        return None if leader is None else leader.identity

    def cut_off_leader(self) -> str | None:
        """The leader no longer reaches the API server; None where nobody leads."""
        leader = self._leading()
        if leader is not None:
            leader.link.cut()
        return None if leader is None else leader.identity

    def connect(self) -> None:
        """All reach it."""
        for one in self._all:
            one.link.mend()

    @contextmanager
    def term(self, identity: str) -> Iterator[None]:
        """While its controllers are at work."""
        self._at_work.append(identity)
        if len(self._at_work) > 1:
            self.overlaps.append(f"{' and '.join(self._at_work)} led at once")
        try:
            yield
        finally:
            self._at_work.remove(identity)

    def _leading(self) -> Candidate | None:
        return next((one for one in self._all if one.leads), None)
