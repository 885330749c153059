"""Operators' steps as the planner and the reconciler see them."""

from typing import Any

import pytest
import sqlalchemy as sa

from rackloom.carve.inventory import maintenance
from rackloom.carve.partitions import found, intent
from rackloom.carve.reconcile import records
from rackloom.carve.store import schema
from rackloom.carve.store.journal import OperatorOrder
from rackloom.core.partitions.domain import DefaultPartitionPolicy, DeletePartition
from rackloom.core.partitions.planner import make_plan
from rackloom.errors import Refused


def order(site: Any) -> OperatorOrder:
    return OperatorOrder("ops", "because", site.tick())


def test_a_paused_domain_is_refused_its_operations_even_late(small_site: Any, demo: Any) -> None:
    small_site.observe_all()
    partition = demo.partition()
    domain, slot = demo.where(demo.instance([(partition, 0)]))
    before = small_site.read(records.load_intent, domain).revision
    small_site.run(intent.pause_domain, domain, order(small_site))
    paused = small_site.read(records.load_intent, domain)
    assert (paused.paused, paused.revision > before) == ("because", True)
    guid = frozenset((small_site.guid(domain, slot, 0),))
    with pytest.raises(Refused, match="is paused: because"):
        small_site.begin_create(domain, partition, "rl-x", guid)
    small_site.run(intent.resume_domain, domain, order(small_site))
    assert small_site.read(records.load_intent, domain).paused is None
    small_site.begin_create(domain, partition, "rl-x", guid)


def test_a_drain_withdraws_the_wishes_of_its_tray_only(small_site: Any, demo: Any) -> None:
    small_site.observe_all()
    partition = demo.partition()
    first, second = (demo.instance([(partition, 0)]) for _ in range(2))
    domain, slot = demo.where(first)
    machine = f"chassis{list(small_site.partitions).index(domain)}-{slot}"
    small_site.run(maintenance.drain_machine, machine, order(small_site), small_site.ids)
    wanted = small_site.read(records.load_intent, domain).assignments
    assert [assignment.guid for assignment in wanted] == [small_site.guid(domain, demo.where(second)[1], 0)]
    assert demo.status(first) == "Repairing"
    small_site.converge()
    assert demo.status(second) == "Ready"
    small_site.run(maintenance.end_machine_drain, machine, order(small_site))
    assert len(small_site.read(records.load_intent, domain).assignments) == 2
    small_site.converge()
    assert (demo.status(first), demo.status(second)) == ("Ready", "Ready")


@pytest.mark.parametrize("policy", [DefaultPartitionPolicy.KEEP, DefaultPartitionPolicy.TRAY])
def test_a_tray_is_drained_when_its_gpus_are_in_no_partition_of_the_site(
    small_site: Any, policy: DefaultPartitionPolicy
) -> None:
    domain = next(iter(small_site.partitions))
    gpus = frozenset(small_site.guid(domain, 0, device) for device in range(4))
    where = {
        DefaultPartitionPolicy.KEEP: "Default Partition",
        DefaultPartitionPolicy.TRAY: "rl-tray-CHASSIS0-0",
    }[policy]
    small_site.run(lambda conn: conn.execute(sa.update(schema.site).values(default_partition=policy)))
    small_site.observe_all()
    if policy is DefaultPartitionPolicy.TRAY:
        small_site.finish(small_site.begin_create(domain, "tray-CHASSIS0-0", where, gpus))
    small_site.partitions[domain][where] = gpus
    small_site.observe_all()
    small_site.run(maintenance.drain_machine, "chassis0-0", order(small_site), small_site.ids)
    assert small_site.read(records.load_intent, domain).drained == gpus
    small_site.observe_all()
    assert small_site.read(_drain) == (None, f"the GPU is still in partition {where}")
    for last in gpus:
        small_site.partitions[domain][where] = frozenset((last,))
        small_site.observe_all()
        assert small_site.read(_drain) == (None, f"the GPU is still in partition {where}")
    small_site.partitions[domain] = {}
    small_site.observe_all()
    drained, message = small_site.read(_drain)
    assert (drained is not None, message) == (True, intent.DRAINED_MESSAGE)
    small_site.run(maintenance.end_machine_drain, "chassis0-0", order(small_site))
    assert small_site.read(records.load_intent, domain).drained == frozenset()


def _drain(conn: sa.Connection) -> tuple[float | None, str]:
    row = conn.execute(sa.select(schema.drain)).one()
    return row.drained, row.message


def test_a_released_partition_is_deleted_by_the_next_plan(small_site: Any) -> None:
    domain = next(iter(small_site.partitions))
    small_site.partitions[domain]["legacy"] = frozenset((small_site.guid(domain, 0, 0),))
    small_site.observe_all()
    untouched = make_plan(small_site.read(records.load_intent, domain), small_site.observation(domain))
    assert untouched.operations == ()
    small_site.run(found.release_partition, domain, "legacy", order(small_site))
    plan = make_plan(small_site.read(records.load_intent, domain), small_site.observation(domain))
    assert [type(operation) for operation in plan.operations] == [DeletePartition]
    assert plan.operations[0].name == "legacy"
