"""Two controllers of one domain on real sockets: a claim of only one of them changes nothing."""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import sqlalchemy as sa
from msgspec.structs import replace

from rackloom.carve.fabric.controller import FabricUnavailable
from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.carve.inventory import endpoints
from rackloom.carve.inventory.enrolment import seed_embedded_site
from rackloom.carve.observation import conflicts, latest
from rackloom.carve.observation.conflicts import ControllerConflict
from rackloom.carve.reconcile import leases, records
from rackloom.carve.reconcile.domain_pass import (
    NO_HOOKS,
    DomainPass,
    DomainTurns,
    LeaseGuard,
    ReconcileHooks,
    StandbyController,
)
from rackloom.carve.reconcile.loop import Reconciler
from rackloom.carve.store import journal, schema
from rackloom.carve.store.database import Store
from rackloom.carve.store.journal import OperatorOrder
from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    DefaultPartitionPolicy,
    DomainObservation,
    PartitionOperation,
    PartitionPlan,
)
from rackloom.core.partitions.planner import make_plan
from rackloom.lab.switches.fabric import SeededNames, SimulatedFabric, fabrics_of
from rackloom.lab.switches.servers import NmxcServer
from rackloom.topology import profiles
from rackloom.topology.rack import build_site

PROFILE = profiles.load_rack("gb200-nvl72")
NEVER = 36000.0
"""Interval of the timer: what happens in a test was woken by something else."""
Waiting = Callable[[Callable[[], Any]], Awaitable[None]]
_numbers = itertools.count(1)


def new_id() -> str:
    return f"00000000-0000-4000-8000-{next(_numbers):012}"


def with_a_tray_less(fabric: SimulatedFabric) -> SimulatedFabric:
    """Another fabric that claims to be the same domain."""
    gpus = [gpu for gpu in fabric.gpus.values() if gpu.host_id > 1]
    return SimulatedFabric(fabric.domain, gpus, fabric.limits)


async def dispute_of(store: Store, domain: str) -> ControllerConflict | None:
    return await store.read(conflicts.conflict_of_domain, domain)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_nothing_is_asked_of_either_until_one_is_repaired(
    racks: Any, eventually: Waiting, replicas: int
) -> None:
    async def main() -> None:
        async with racks(1) as site:
            (server,) = site.servers
            domain = server.fabric.domain
            started = [await site.replica(f"replica-{number}") for number in range(replicas)]
            store = started[0].store
            await site.order(store, 2)
            await eventually(lambda: site.all_ready(store))
            async with NmxcServer(with_a_tray_less(server.fabric)) as liar:
                await store.run(endpoints.register_endpoint, liar.url, ["SECOND"], time.time(), new_id)
                await eventually(lambda: dispute_of(store, domain))
                began, asked = await dispute_of(store, domain), len(site.asked)
                await store.run(wish_for_trays, domain)
                ordered = time.time()
                await eventually(lambda: both_were_read_after(store, ordered))
                assert await dispute_of(store, domain) == began
                assert len(site.asked) == asked
                assert not await site.all_ready(store)
            # At the same address there is one now that serves the fabric as it is.
            async with NmxcServer(server.fabric, port=urlsplit(liar.url).port or 0):
                await eventually(lambda: site.all_ready(store))
                assert await dispute_of(store, domain) is None
                await eventually(lambda: len(site.asked) > asked)

    asyncio.run(main())


@pytest.mark.slow
def test_hardware_under_two_uuids_is_left_alone_until_one_endpoint_is_deleted(
    racks: Any, eventually: Waiting
) -> None:
    async def main() -> None:
        async with racks(1) as site:
            (server,) = site.servers
            domain, copy = server.fabric.domain, new_id()
            store = (await site.replica("replica")).store
            await site.order(store, 2)
            await eventually(lambda: site.all_ready(store))
            twice = SimulatedFabric(copy, server.fabric.gpus.values(), server.fabric.limits)
            async with NmxcServer(twice) as liar:
                await store.run(endpoints.register_endpoint, liar.url, ["SECOND"], time.time(), new_id)
                await eventually(lambda: dispute_of(store, domain))
                conflict, asked = await dispute_of(store, copy), len(site.asked)
                assert conflict is not None
                assert conflict.rival == domain
                await store.run(wish_for_trays, domain)
                ordered = time.time()
                await eventually(lambda: both_were_read_after(store, ordered))
                assert len(site.asked) == asked
                assert not await site.all_ready(store)
                assert set(twice.partitions) == {DEFAULT_PARTITION_ID}
                gone = OperatorOrder("an operator", "it lies", time.time())
                await store.run(endpoints.delete_chassis_endpoint, "SECOND", gone)
                await eventually(lambda: site.all_ready(store))
                await eventually(lambda: len(site.asked) > asked)

    asyncio.run(main())


def wish_for_trays(conn: sa.Connection, domain: str) -> None:
    conn.execute(sa.update(schema.site).values(default_partition=DefaultPartitionPolicy.TRAY))
    journal.increment_revisions(conn, [domain])


async def both_were_read_after(store: Store, moment: float) -> bool:
    times = await store.read(
        lambda conn: conn.execute(sa.select(schema.observation.c.observed_at)).scalars().all()
    )
    return len(times) == 2 and min(times) > moment


class Deaf(NmxcDriver):
    """Hears no notification."""

    async def notifications(self) -> AsyncIterator[None]:
        await asyncio.Event().wait()
        yield


class InOneProcess:
    """Records in memory, and two controllers of one rack."""

    def __init__(self, store: Store, servers: list[NmxcServer]) -> None:
        self.store = store
        self.servers = servers
        self.domain = servers[0].fabric.domain

    def reconciler(
        self, drivers: dict[str, type[NmxcDriver]], hooks: ReconcileHooks = NO_HOOKS
    ) -> Reconciler:
        return Reconciler(
            self.store,
            lambda endpoint: drivers.get(endpoint.url, NmxcDriver)(endpoint.url, clock=time.time),
            time.time,
            NEVER,
            hooks=hooks,
        )

    async def known(self) -> latest.LatestObservation:
        return await self.store.read(latest.latest_of_domain, self.domain)


@asynccontextmanager
async def in_one_process() -> AsyncIterator[InOneProcess]:
    site = build_site(PROFILE, 1, SeededNames("test"))
    (fabric,) = fabrics_of(site, "test")
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(NmxcServer(fabric)) for _ in range(2)]
        store = Store.inline()
        stack.push_async_callback(store.close)
        urls = {fabric.domain: servers[0].url}
        await store.run(seed_embedded_site, site, PROFILE, urls, now=time.time(), ids=new_id)
        await store.run(endpoints.register_endpoint, servers[1].url, ["SECOND"], time.time(), new_id)
        yield InOneProcess(store, servers)


@asynccontextmanager
async def running(reconciler: Reconciler) -> AsyncIterator[None]:
    task = asyncio.create_task(reconciler.run())
    await reconciler.first_passes()
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.slow
def test_a_change_that_only_one_was_told_of_is_looked_at_through_both(eventually: Waiting) -> None:
    async def main() -> None:
        async with in_one_process() as site:
            first, second = site.servers
            async with running(site.reconciler({second.url: Deaf})):
                fabric, before = first.fabric, time.time()
                await eventually(lambda: both_were_read_after(site.store, 0.0))
                fabric.remove_gpus([gpu.guid for gpu in fabric.gpus.values() if gpu.host_id == 1])
                # The second one's client got no notice, and no timer runs.
                await eventually(lambda: both_were_read_after(site.store, before))

                async def agreed() -> bool:
                    seen = (await site.known()).observation
                    return seen is not None and len(seen.gpus) == 68

                await eventually(agreed)

    asyncio.run(main())


class OfStandby(NmxcDriver):
    """Answers for the domain, and lists nothing."""

    async def observe(self) -> DomainObservation:
        return msgspec.structs.replace(await super().observe(), gpus=(), partitions=())


class Silent(NmxcDriver):
    """Driver to an unreachable controller."""

    async def observe(self) -> DomainObservation:
        raise FabricUnavailable("Hello: UNAVAILABLE: no route")


class SilentOnceChanged(NmxcDriver):
    """Answers until it gets its first change."""

    has_changed = False

    async def observe(self) -> DomainObservation:
        if self.has_changed:
            raise FabricUnavailable("Hello: UNAVAILABLE: no route")
        return await super().observe()

    async def execute(self, operation: PartitionOperation) -> int:
        self.has_changed = True
        return await super().execute(operation)


async def plan_for_trays(site: InOneProcess) -> PartitionPlan:
    await site.store.run(wish_for_trays, site.domain)
    seen = (await site.known()).observation
    assert seen is not None
    return make_plan(await site.store.read(records.load_intent, site.domain), seen)


def test_a_plan_is_not_begun_where_nobody_can_be_read() -> None:
    async def main() -> None:
        async with in_one_process() as site:
            async with running(site.reconciler({}, replace(NO_HOOKS, read_only=True))):
                plan = await plan_for_trays(site)
            silent: dict[str, type[NmxcDriver]] = {server.url: Silent for server in site.servers}
            reconciler = site.reconciler(silent, replace(NO_HOOKS, read_only=True))
            async with running(reconciler):
                with pytest.raises(FabricUnavailable, match="no route"):
                    await reconciler.apply(plan)
            only_a_standby = {**silent, site.servers[0].url: OfStandby}
            reconciler = site.reconciler(only_a_standby, replace(NO_HOOKS, read_only=True))
            async with running(reconciler):
                with pytest.raises(StandbyController):
                    await reconciler.apply(plan)

    asyncio.run(main())


def test_where_all_list_nothing_nothing_is_known_and_nothing_is_asked_for(eventually: Waiting) -> None:
    async def main() -> None:
        async with in_one_process() as site:
            async with running(site.reconciler({}, replace(NO_HOOKS, read_only=True))):
                await plan_for_trays(site)
            before = [server.fabric.snapshot() for server in site.servers]
            async with running(site.reconciler({server.url: OfStandby for server in site.servers})):

                async def doubted() -> bool:
                    return (await site.known()).operators_doubt.endswith("lists no GPU where 72 are recorded")

                await eventually(doubted)
            assert [server.fabric.snapshot() for server in site.servers] == before

    asyncio.run(main())


def test_what_became_of_a_plan_is_told_also_where_nobody_can_look_again() -> None:
    async def main() -> None:
        async with in_one_process() as site:
            drivers: dict[str, type[NmxcDriver]] = {server.url: SilentOnceChanged for server in site.servers}
            reconciler = site.reconciler(drivers, replace(NO_HOOKS, read_only=True))
            async with running(reconciler):
                plan = await plan_for_trays(site)
                outcomes = await reconciler.apply(plan)
                assert [outcome.state for outcome in outcomes] == ["done"] * len(plan.operations) != []
                rows = await site.store.read(lambda conn: conn.execute(sa.select(schema.observation)).all())
                # The controller that did it no longer answers, and the other one got no second request.
                assert sorted(row.unknown_reason or "" for row in rows) == [
                    "",
                    "Hello: UNAVAILABLE: no route",
                ]
                assert (
                    len(await site.store.read(lambda conn: conn.execute(sa.select(schema.operation)).all()))
                    == 1
                )

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("unable", [OfStandby, Silent])
@pytest.mark.parametrize("which", [0, 1])
def test_an_operators_plan_is_carried_out_through_the_controller_that_leads(
    which: int, unable: type[NmxcDriver]
) -> None:
    async def main() -> None:
        async with in_one_process() as site:
            drivers = {site.servers[which].url: unable}
            reconciler = site.reconciler(drivers, replace(NO_HOOKS, read_only=True))
            async with running(reconciler):
                plan = await plan_for_trays(site)
                outcomes = await reconciler.apply(plan)
                assert [outcome.state for outcome in outcomes] == ["done"] * len(plan.operations) != []

    asyncio.run(main())


class Lied(NmxcDriver):
    """While its third operation is under way, the other controller is read, and contradicts."""

    asked = 0

    def __init__(self, site: InOneProcess) -> None:
        super().__init__(site.servers[0].url, clock=time.time)
        self._site = site

    async def execute(self, operation: PartitionOperation) -> int:
        Lied.asked += 1
        done = await super().execute(operation)
        if Lied.asked == 3:
            await self._lie()
        return done

    async def _lie(self) -> None:
        store, url = self._site.store, self._site.servers[1].url
        seen = await NmxcDriver(url, clock=time.time).observe()
        lying = msgspec.structs.replace(seen, gpus=seen.gpus[4:])
        second = next(
            endpoint.id for endpoint in await store.read(endpoints.all_endpoints) if endpoint.url == url
        )
        assert await store.run(records.record_observation, second, lying, time.time()) is not None


def test_a_plan_stops_between_two_operations_when_the_other_contradicts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Lied, "asked", 0)

    async def main() -> None:
        async with in_one_process() as site:
            trays = sa.update(schema.site).values(default_partition=DefaultPartitionPolicy.TRAY)
            await site.store.run(lambda conn: conn.execute(trays))
            share = await site.store.run(leases.take_share, "me", time.time(), math.inf)
            (mine,) = (held for held in share if held.endpoint.url == site.servers[0].url)
            driver, hold = Lied(site), LeaseGuard(mine.lease, math.inf)
            work = DomainPass(mine.endpoint, hold, driver, site.store, time.time, DomainTurns())
            assert await work.run() is False
            await driver.close()
            rows = await site.store.read(lambda conn: conn.execute(sa.select(schema.operation)).all())
            assert (Lied.asked, [row.state for row in rows]) == (3, ["done"] * 3)
            # The fabric has every change requested so far, each complete.
            assert len(site.servers[0].fabric.partitions) == 2

    asyncio.run(main())
