"""One process: endpoints of one domain take turns, and no change is requested after the lease ran out."""

import asyncio
import itertools
import math
import time
from contextlib import AsyncExitStack, suppress

import msgspec
import pytest
import sqlalchemy as sa

from rackloom.carve.fabric.nmxc.driver import NmxcDriver
from rackloom.carve.inventory import endpoints
from rackloom.carve.inventory.enrolment import seed_embedded_site
from rackloom.carve.reconcile import leases
from rackloom.carve.reconcile.domain_pass import LEASE_ENDED_REASON, DomainPass, DomainTurns, LeaseGuard
from rackloom.carve.reconcile.loop import Reconciler
from rackloom.carve.reconcile.records import Lease
from rackloom.carve.store import schema
from rackloom.carve.store.database import Store
from rackloom.lab.switches.fabric import SeededNames, fabrics_of
from rackloom.lab.switches.faults import NmxcFault
from rackloom.lab.switches.servers import NmxcServer
from rackloom.topology import profiles
from rackloom.topology.rack import build_site

PROFILE = profiles.load_rack("gb200-nvl72")
LEASE = Lease("endpoint", "me", 1)
_numbers = itertools.count(1)


def new_id():
    return f"00000000-0000-4000-8000-{next(_numbers):012}"


async def seeded(stack, controllers=1):
    """A store and a number of controllers of the same rack, each with a separate endpoint."""
    site = build_site(PROFILE, 1, SeededNames("test"))
    (fabric,) = fabrics_of(site, "test")
    servers = [await stack.enter_async_context(NmxcServer(fabric)) for _ in range(controllers)]
    store = Store.inline()
    stack.push_async_callback(store.close)
    urls = {fabric.domain: servers[0].url}
    await store.run(seed_embedded_site, site, PROFILE, urls, now=time.time(), ids=new_id)
    for number, server in enumerate(servers[1:]):
        await store.run(endpoints.register_endpoint, server.url, [f"OTHER{number}"], time.time(), new_id)
    return store, servers


async def operations(store):
    return await store.read(
        lambda conn: conn.execute(sa.select(schema.operation).order_by(schema.operation.c.id)).all()
    )


class Watched(NmxcDriver):
    """Counts who is at work on the fabric at the same time."""

    at_work = 0
    most = 0

    async def execute(self, operation):
        Watched.at_work += 1
        Watched.most = max(Watched.most, Watched.at_work)
        try:
            return await super().execute(operation)
        finally:
            Watched.at_work -= 1


def test_two_endpoints_of_one_domain_never_act_at_the_same_time(monkeypatch):
    monkeypatch.setattr(Watched, "most", 0)

    async def main():
        async with AsyncExitStack() as stack:
            store, servers = await seeded(stack, controllers=2)
            for server in servers:
                server.faults.next("DeletePartition", NmxcFault(delay=0.2))
            reconciler = Reconciler(store, lambda endpoint: Watched(endpoint.url, clock=time.time), time.time)
            running = asyncio.create_task(reconciler.run())
            await reconciler.first_passes()
            assert len(reconciler.loops) == 2
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            assert servers[0].fabric.partitions == {}
            # Both looked before either acted. The second one looked again and found it done.
            assert [row.state for row in await operations(store)] == ["done"]
            assert Watched.most == 1

    asyncio.run(main())


def test_nothing_is_asked_for_when_the_process_slept_through_the_end_of_its_lease():
    async def main():
        async with AsyncExitStack() as stack:
            store, (server,) = await seeded(stack)
            (held,) = await store.run(leases.take_share, "me", time.time(), math.inf)
            driver = NmxcDriver(server.url, clock=time.time)
            stack.push_async_callback(driver.close)
            guard = LeaseGuard(held.lease, asyncio.get_running_loop().time())
            work = DomainPass(held.endpoint, guard, driver, store, time.time, DomainTurns())
            assert await work.run() is False
            assert [(row.state, row.message) for row in await operations(store)] == [
                ("refused", LEASE_ENDED_REASON)
            ]
            assert len(server.fabric.partitions) == 1
            guard.extend(math.inf)
            assert await work.run() is True
            assert server.fabric.partitions == {}

    asyncio.run(main())


def test_an_endpoint_that_no_driver_takes_does_not_stop_the_others():
    async def main():
        async with AsyncExitStack() as stack:
            store, (server,) = await seeded(stack)
            await store.run(endpoints.register_endpoint, "ftp://nonsense", ["OTHER"], time.time(), new_id)
            reconciler = Reconciler(
                store, lambda endpoint: NmxcDriver(endpoint.url, clock=time.time), time.time
            )
            running = asyncio.create_task(reconciler.run())
            await reconciler.first_passes()
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            assert server.fabric.partitions == {}

    asyncio.run(main())


def test_work_under_a_hold_ends_at_its_deadline_unless_that_is_moved():
    async def main():
        loop = asyncio.get_running_loop()
        task = asyncio.create_task(asyncio.Event().wait())
        guard = LeaseGuard(LEASE, loop.time() + 3600)
        guard.protect(task)
        guard.extend(loop.time() + 7200)
        await asyncio.sleep(0)
        assert not guard.has_ended()
        assert not task.done()
        guard.extend(loop.time())
        assert guard.has_ended()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_hold_ends_while_the_machine_is_suspended():
    """The event loop's clock stands still then."""

    async def main():
        elapsed = 100.0
        guard = LeaseGuard(LEASE, 105.0, lambda: elapsed)
        task = asyncio.create_task(asyncio.Event().wait())
        guard.protect(task)
        assert not guard.has_ended()
        elapsed = 200.0
        assert guard.has_ended()
        guard.extend(elapsed)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_hold_without_end_never_ends():
    async def main():
        guard = LeaseGuard(msgspec.structs.replace(LEASE, epoch=2), math.inf)
        task = asyncio.create_task(asyncio.sleep(0.01, "finished"))
        guard.protect(task)
        assert await task == "finished"
        assert not guard.has_ended()

    asyncio.run(main())


def test_a_look_is_stale_once_somebody_acted_after_it_and_only_in_that_domain():
    async def main():
        turns = DomainTurns()
        before = turns.before_observing()
        async with turns.act("other", before) as is_current:
            assert is_current
        async with turns.act("d", before) as is_current:
            assert is_current
        async with turns.act("d", before) as is_current:
            assert not is_current
        async with turns.act("d", turns.before_observing()) as is_current:
            assert is_current

    asyncio.run(main())


def test_a_look_taken_while_somebody_acts_is_stale():
    async def main():
        turns, inside, go_on = DomainTurns(), asyncio.Event(), asyncio.Event()

        async def act():
            async with turns.act("d", turns.before_observing()):
                inside.set()
                await go_on.wait()

        acting = asyncio.create_task(act())
        await inside.wait()
        before = turns.before_observing()
        go_on.set()
        async with turns.act("d", before) as is_current:
            assert not is_current
        await acting

    asyncio.run(main())
