"""Several replicas on one PostgreSQL: shared work, takeovers, and nothing ever done by two."""

import asyncio
from collections import Counter

import pytest

from rackloom.carve.inventory import endpoints
from rackloom.carve.inventory.endpoints import register_endpoint
from rackloom.lab.switches.faults import NmxcFault

pytestmark = pytest.mark.slow


async def check_nothing_was_done_twice(site, store):
    """In the fabric, in the calls to it, and in the records."""
    made = Counter(site.made)
    assert set(made.values()) == {1}, made
    asked = Counter((url, repr(operation)) for _, url, operation in site.asked)
    assert set(asked.values()) == {1}, asked
    rows = await site.audit(store)
    assert {row.state for row in rows} <= {"done", "unknown"}, rows
    assert set(Counter((row.domain, row.kind, row.partition_name) for row in rows).values()) == {1}, rows


def test_the_domains_are_shared_between_replicas_and_shared_again_when_one_leaves(racks, eventually):
    async def main():
        async with racks(3) as site:
            first = await site.replica("one")
            assert first.domains() == site.domains
            two = await site.replica("two")
            await eventually(lambda: first.domains() | two.domains() == site.domains and two.domains())
            assert not first.domains() & two.domains()
            assert {len(first.domains()), len(two.domains())} == {1, 2}
            await first.stop()
            await eventually(lambda: two.domains() == site.domains)

    asyncio.run(main())


def test_a_change_on_one_replica_wakes_the_other_that_holds_the_domain(racks, eventually):
    async def main():
        async with racks(1) as site:
            holder, other = await site.replica("holder"), await site.replica("other")
            assert (holder.domains(), other.domains()) == (site.domains, set())
            await site.order(other.store, 2)
            await eventually(lambda: site.all_ready(other.store))
            assert {replica for replica, _, _ in site.asked} == {"holder"}
            await check_nothing_was_done_twice(site, other.store)

    asyncio.run(main())


def test_a_killed_replica_is_replaced_and_nothing_is_done_twice(racks, eventually):
    async def main():
        async with racks(2) as site:
            victim = await site.replica("victim")
            heir = await site.replica("heir")
            await eventually(lambda: heir.domains() and victim.domains())
            mine = next(server for server in site.servers if server.fabric.domain in victim.domains())
            # It dies while the controller carries out its request.
            mine.faults.next("CreatePartition", NmxcFault(delay=0.3))
            await site.order(heir.store, 36)
            await eventually(lambda: any(replica == "victim" for replica, _, _ in site.asked))
            await victim.kill()
            await eventually(lambda: heir.domains() == site.domains)
            await eventually(lambda: site.all_ready(heir.store))
            await check_nothing_was_done_twice(site, heir.store)

    asyncio.run(main())


def test_a_replica_that_is_cut_off_from_the_database_stops_by_itself(racks, eventually):
    async def main():
        async with racks(2) as site:
            lost, heir = await site.replica("lost"), await site.replica("heir")
            await eventually(lambda: heir.domains() and lost.domains())
            lost.backend.cut_off = True
            await eventually(lambda: heir.domains() == site.domains)
            await eventually(lambda: not lost.reconciler.loops)
            await site.order(heir.store, 36)
            await eventually(lambda: site.all_ready(heir.store))
            assert {replica for replica, _, _ in site.asked[-2:]} == {"heir"}
            lost.backend.cut_off = False
            await eventually(lambda: lost.domains() | heir.domains() == site.domains and lost.domains())
            await check_nothing_was_done_twice(site, heir.store)

    asyncio.run(main())


def test_a_controller_that_moved_is_followed(racks, eventually):
    async def main():
        async with racks(2) as site:
            replica = await site.replica("only")
            (first, *_), seen = await replica.store.read(endpoints.all_endpoints), len(site.asked)
            server = next(endpoint for endpoint in site.servers if endpoint.url == first.url)
            other = type(server)(server.fabric)
            async with other:
                await server.go_away()
                await replica.store.run(
                    register_endpoint, other.url, first.chassis_serials, 1.0, lambda: "unused"
                )
                await site.order(replica.store, 36)
                await eventually(lambda: site.all_ready(replica.store))
            others = {endpoint.url for endpoint in site.servers if endpoint is not server}
            assert {url for _, url, _ in site.asked[seen:]} == {other.url, *others}

    asyncio.run(main())
