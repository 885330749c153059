"""The counts of the records at the moment of a scrape."""

import asyncio
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.app.site.record_counts import count_site_records
from rackloom.carve.inventory import endpoints
from rackloom.carve.observation import latest
from rackloom.carve.partitions import ownership
from rackloom.carve.reconcile import records
from rackloom.carve.store.database import Store
from rackloom.carve.store.schema import domain_dispute, endpoint, owned_partition
from rackloom.core.partitions.domain import (
    CreatePartition,
    DomainLimits,
    DomainObservation,
    GpuHealth,
    ObservedGpu,
    ObservedPartition,
    PartitionHealth,
)


def _fill(conn: sa.Connection) -> None:
    conn.execute(sa.insert(endpoint).values(id="e", url="http://switch", created=1.0, updated=1.0))
    for name, number in (("asked-for", None), ("seen", 1), ("seen-too", 2)):
        wanted = CreatePartition(name=name, logical_partition=name, guids=(1,))
        asked = ownership.begin_operation_record(conn, "e", "d", wanted, 1.0, 1.0)
        row: dict[str, Any] = {"domain": "d", "name": name, "logical_partition_id": name, "created": 1.0}
        row |= {"partition_id": number, "operation_id": asked}
        conn.execute(sa.insert(owned_partition).values(**row))


def test_a_partition_counts_once_it_was_seen():
    async def scenario():
        store = Store.inline()
        await store.run(_fill)
        counted = await store.read(count_site_records, 0)
        await store.close()
        return counted.physical_partitions

    assert asyncio.run(scenario()) == 2


def test_domains_in_dispute_are_counted():
    async def scenario():
        store = Store.inline()
        before = await store.read(count_site_records, 0)
        row = {"domain": "d", "reason": "they differ", "since": 1.0}
        await store.run(lambda conn: conn.execute(sa.insert(domain_dispute).values(**row)))
        after = await store.read(count_site_records, 0)
        await store.close()
        return before.disputed_domains, after.disputed_domains

    assert asyncio.run(scenario()) == (0, 1)


def _reading(at: float, *gpus: int) -> DomainObservation:
    listed = (
        ObservedGpu(
            guid=guid, chassis_serial="c", slot=1, tray_index=0, module_id=guid, health=GpuHealth.HEALTHY
        )
        for guid in gpus
    )
    return DomainObservation(
        domain="d", gpus=tuple(listed), partitions=(), limits=DomainLimits(), observed_at=at
    )


def _leader_and_standby(conn: sa.Connection) -> None:
    for key, reading in (("leader", _reading(5.0, 1, 2)), ("standby", _reading(9.0))):
        endpoints.register_endpoint(conn, f"http://{key}", [key], 1.0, lambda key=key: key)
        latest.save_reading(conn, key, reading)
        records.set_endpoint_domain(conn, key, "d", 9.0)


def test_a_standby_hides_nothing_and_what_a_lost_controller_showed_is_not_counted_as_there():
    async def scenario():
        store = Store.inline()
        await store.run(_leader_and_standby)
        (both,) = (await store.read(count_site_records, 0)).domains
        await store.run(latest.mark_unreadable, "leader", "UNAVAILABLE", 10.0, 0.0)
        (lost,) = (await store.read(count_site_records, 0)).domains
        await store.close()
        return both, lost

    both, lost = asyncio.run(scenario())
    assert (both.uuid, both.observed_at, both.gpus, both.nodes) == ("d", 5.0, {"healthy": 2}, {"healthy": 1})
    assert (lost.observed_at, lost.gpus, lost.nodes, lost.partitions) == (5.0, {}, {}, {})


def test_a_reading_that_is_outdated_counts_as_lost():
    async def scenario():
        store = Store.inline()
        await store.run(_leader_and_standby)
        counts = [await store.read(count_site_records, 0, valid_from) for valid_from in (5.0, 5.1)]
        await store.close()
        return counts

    valid, outdated = asyncio.run(scenario())
    assert (valid.endpoints["known"], valid.domains[0].gpus) == (2, {"healthy": 2})
    assert (outdated.endpoints["known"], outdated.domains[0].gpus) == (1, {})
    assert outdated.domains[0].observed_at == 5.0


def test_multicast_groups_that_are_not_known_are_left_out():
    async def scenario():
        store, found = Store.inline(), []
        await store.run(_leader_and_standby)
        for at, limits in enumerate(
            (
                DomainLimits(max_multicast_groups=1024, free_multicast_groups=1000),
                DomainLimits(max_multicast_groups=1024),
                DomainLimits(),
            ),
            start=11,
        ):
            reading = msgspec.structs.replace(_reading(float(at), 1, 2), limits=limits)
            await store.run(latest.save_reading, "leader", reading)
            (counted,) = (await store.read(count_site_records, 0)).domains
            found.append(counted.multicast_groups)
        (lost,) = (await store.read(count_site_records, 0, 100.0)).domains
        await store.close()
        return found, lost.multicast_groups

    assert asyncio.run(scenario()) == ([{"limit": 1024, "used": 24}, {"limit": 1024}, {}], {})


def test_a_partition_with_an_uncertain_gpu_has_unknown_health():
    async def scenario():
        store = Store.inline()
        await store.run(_leader_and_standby)
        certain, doubtful = (
            ObservedPartition(
                id=number,
                name=f"p{number}",
                members=frozenset({number}),
                health=PartitionHealth.HEALTHY,
                guid_based=True,
                multicast_groups=0,
            )
            for number in (1, 2)
        )
        reading = msgspec.structs.replace(
            _reading(11.0, 1, 2), partitions=(certain, doubtful), uncertain=frozenset({2})
        )
        await store.run(latest.save_reading, "leader", reading)
        (counted,) = (await store.read(count_site_records, 0)).domains
        await store.close()
        return counted

    assert asyncio.run(scenario()).partitions == {"healthy": 1, "unknown": 1}
