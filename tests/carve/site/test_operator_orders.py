"""Operators' steps as the planner and the reconciler see them."""

from typing import Any

import pytest

from rackloom.carve.plan.planner import make_plan
from rackloom.carve.plan.values import DeletePartition
from rackloom.carve.site import adoption, fabric_book, pauses, tray_steps
from rackloom.carve.site.operator_steps import Order
from rackloom.errors import Refused


def order(site: Any) -> Order:
    return Order("ops", "because", site.tick())


def test_a_paused_domain_is_refused_its_operations_even_late(small_site: Any, demo: Any) -> None:
    small_site.observe_all()
    partition = demo.partition()
    domain, slot = demo.where(demo.instance([(partition, 0)]))
    before = small_site.read(fabric_book.intent, domain).revision
    small_site.run(pauses.pause, domain, order(small_site))
    paused = small_site.read(fabric_book.intent, domain)
    assert (paused.paused, paused.revision > before) == ("because", True)
    guid = frozenset((small_site.guid(domain, slot, 0),))
    with pytest.raises(Refused, match="is paused: because"):
        small_site.begin_create(domain, partition, "rl-x", guid)
    small_site.run(pauses.resume, domain, order(small_site))
    assert small_site.read(fabric_book.intent, domain).paused is None
    small_site.begin_create(domain, partition, "rl-x", guid)


def test_a_drain_withdraws_the_wishes_of_its_tray_only(small_site: Any, demo: Any) -> None:
    small_site.observe_all()
    partition = demo.partition()
    first, second = (demo.instance([(partition, 0)]) for _ in range(2))
    domain, slot = demo.where(first)
    machine = f"chassis{list(small_site.partitions).index(domain)}-{slot}"
    small_site.run(tray_steps.drain, machine, order(small_site), small_site.ids)
    wanted = small_site.read(fabric_book.intent, domain).assignments
    assert [one.guid for one in wanted] == [small_site.guid(domain, demo.where(second)[1], 0)]
    assert demo.status(first) == "Repairing"
    small_site.converge()
    assert demo.status(second) == "Ready"
    small_site.run(tray_steps.end_drain, machine, order(small_site))
    assert len(small_site.read(fabric_book.intent, domain).assignments) == 2
    small_site.converge()
    assert (demo.status(first), demo.status(second)) == ("Ready", "Ready")


def test_a_released_partition_is_deleted_by_the_next_plan(small_site: Any) -> None:
    domain = next(iter(small_site.partitions))
    small_site.partitions[domain]["legacy"] = frozenset((small_site.guid(domain, 0, 0),))
    small_site.observe_all()
    untouched = make_plan(small_site.read(fabric_book.intent, domain), small_site.observation(domain))
    assert untouched.operations == ()
    small_site.run(adoption.release, domain, "legacy", order(small_site))
    plan = make_plan(small_site.read(fabric_book.intent, domain), small_site.observation(domain))
    assert [type(one) for one in plan.operations] == [DeletePartition]
    assert plan.operations[0].name == "legacy"
