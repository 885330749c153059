"""A paused domain: nothing is planned for it, and no plan is let through."""

from typing import Any

import msgspec
import pytest

from rackloom.carve.plan.check import check
from rackloom.carve.plan.planner import make_plan
from rackloom.carve.plan.values import (
    Assignment,
    DefaultPartition,
    GpuHealth,
    Intent,
    Limits,
    Observation,
    ObservedGpu,
    ObservedPartition,
    PartitionHealth,
)
from rackloom.errors import Refused

GUIDS = (11, 12, 13, 14)


@pytest.fixture
def observation() -> Observation:
    gpus = tuple(
        ObservedGpu(
            guid=guid, chassis_serial="C", slot=0, tray_index=0, module_id=module, health=GpuHealth.HEALTHY
        )
        for module, guid in enumerate(GUIDS, 1)
    )
    default = ObservedPartition(
        id=32766,
        name="Default Partition",
        members=frozenset(GUIDS[:2]),
        health=PartitionHealth.HEALTHY,
        guid_based=True,
        multicast_groups=0,
    )
    return Observation(domain="d", gpus=gpus, partitions=(default,), limits=Limits(), observed_at=1.0)


@pytest.fixture
def intent() -> Intent:
    return Intent(
        domain="d",
        assignments=(Assignment(guid=13, logical_partition="lp", tenant="t"),),
        owned=(),
        managed=frozenset(GUIDS),
        default_partition=DefaultPartition.NONE,
        revision=3,
    )


def test_a_paused_domain_gets_no_operations_and_says_why(intent: Any, observation: Any) -> None:
    assert make_plan(intent, observation).operations
    paused = msgspec.structs.replace(intent, paused="new switch firmware")
    plan = make_plan(paused, observation)
    assert plan.operations == ()
    (blocked,) = plan.blocked
    assert blocked.guids == (11, 12)
    assert (blocked.reason, blocked.fix) == (
        "the domain is paused: new switch firmware",
        "resume the domain",
    )
    check(plan, paused, observation)


def test_a_plan_from_before_the_pause_is_refused(intent: Any, observation: Any) -> None:
    plan = make_plan(intent, observation)
    with pytest.raises(Refused, match="the domain is paused: x; resume the domain"):
        check(plan, msgspec.structs.replace(intent, paused="x"), observation)


def test_a_paused_domain_with_nothing_to_do_blocks_nothing(intent: Any, observation: Any) -> None:
    idle = msgspec.structs.replace(intent, assignments=(), paused="x")
    empty = msgspec.structs.replace(observation, partitions=())
    assert make_plan(idle, empty).blocked == ()
