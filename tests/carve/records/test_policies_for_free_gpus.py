"""What the records allow and report if free GPUs have a place: the kept default partition, or their tray."""

from typing import Any

import pytest
import sqlalchemy as sa

from rackloom.carve.partitions import found
from rackloom.carve.reconcile import records
from rackloom.carve.store import schema
from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    AddGpus,
    CreatePartition,
    DefaultPartitionPolicy,
    PartitionOperation,
)
from rackloom.errors import Refused

FIRST, SECOND = "tray-CHASSIS0-0", "tray-CHASSIS0-1"


def set_policy(site: Any, policy: DefaultPartitionPolicy) -> None:
    site.run(lambda conn: conn.execute(schema.site.update().values(default_partition=policy)))


def begin(site: Any, domain: str, operation: PartitionOperation) -> str:
    begun: str = site.run(records.begin_operation, site.lease(domain), operation, site.now, site.tick())
    return begun


def tray(site: Any, domain: str, slot: int) -> frozenset[int]:
    return frozenset(site.guid(domain, slot, device) for device in range(4))


def make_tray(site: Any, domain: str, slot: int) -> None:
    name = f"tray-CHASSIS0-{slot}"
    guids = tuple(sorted(tray(site, domain, slot)))
    site.finish(begin(site, domain, CreatePartition(name=f"rl-{name}", logical_partition=name, guids=guids)))
    site.partitions[domain][f"rl-{name}"] = frozenset(guids)


@pytest.fixture
def domain(small_site: Any, demo: Any) -> str:
    """A domain with an instance in its tray 0 that joins a logical partition with its GPU 0."""
    small_site.observe_all()
    partition = demo.partition()
    instance = demo.instance([(partition, 0)])
    small_site.converge()
    where, slot = demo.where(instance)
    assert slot == 0
    return str(where)


def test_free_gpus_may_join_the_kept_default_partition_and_given_ones_may_not(
    small_site: Any, domain: str
) -> None:
    set_policy(small_site, DefaultPartitionPolicy.KEEP)
    free, given = small_site.guid(domain, 1, 0), small_site.guid(domain, 0, 0)

    def joining(guid: int) -> AddGpus:
        return AddGpus(partition_id=DEFAULT_PARTITION_ID, name="Default Partition", guids=(guid,))

    begin(small_site, domain, joining(free))
    with pytest.raises(Refused, match="no longer wanted"):
        begin(small_site, domain, joining(given))
    with pytest.raises(Refused, match="no longer wanted"):
        begin(small_site, domain, joining(0xBAD))


def test_a_tray_gets_free_gpus_only(small_site: Any, domain: str) -> None:
    set_policy(small_site, DefaultPartitionPolicy.TRAY)
    with pytest.raises(Refused, match="no longer wanted"):
        make_tray(small_site, domain, 0)
    make_tray(small_site, domain, 1)
    small_site.observe(domain)
    shown = {
        partition.partition.name: (partition.owner.value, partition.logical_partition)
        for partition in small_site.read(found.partitions_of_domains, [domain])
    }
    assert shown[f"rl-{SECOND}"] == ("tray", None)
    row = small_site.read(
        lambda conn: conn.execute(
            sa.select(schema.operation).where(schema.operation.c.partition_name == f"rl-{SECOND}")
        ).one()
    )
    assert (row.asked_by, row.reason) == (
        "site",
        "GPUs that nobody was given share memory within their tray only",
    )


def test_a_gpu_with_its_tray_is_isolated_unless_somebody_else_is_there(
    small_site: Any, demo: Any, rival: Any
) -> None:
    set_policy(small_site, DefaultPartitionPolicy.TRAY)
    small_site.observe_all()
    instance, other = demo.instance(), rival.instance()
    (domain, slot), (place, neighbour) = demo.where(instance), rival.where(other)
    assert place == domain
    make_tray(small_site, domain, slot)
    small_site.observe(domain)
    assert demo.status(instance) == "Ready"
    mixed = tray(small_site, domain, slot) | {small_site.guid(domain, neighbour, 0)}
    small_site.partitions[domain][f"rl-tray-CHASSIS0-{slot}"] = mixed
    small_site.observe(domain)
    assert demo.status(instance) == rival.status(other) == "Configuring"


def test_a_gpu_that_is_back_with_its_tray_is_released(small_site: Any, demo: Any, domain: str) -> None:
    set_policy(small_site, DefaultPartitionPolicy.TRAY)
    instance = small_site.read(lambda conn: conn.execute(sa.select(schema.instance.c.id)).scalar_one())
    demo.release(instance)
    small_site.partitions[domain] = {}
    make_tray(small_site, domain, 0)
    small_site.observe(domain)
    assert demo.status(instance) is None
