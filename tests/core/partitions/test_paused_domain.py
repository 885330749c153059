"""A paused domain: nothing is planned for it, and every plan is refused."""

from typing import Any

import msgspec
import pytest

from rackloom.core.partitions.domain import (
    DefaultPartitionPolicy,
    DomainIntent,
    DomainLimits,
    DomainObservation,
    GpuAssignment,
    GpuHealth,
    ObservedGpu,
    ObservedPartition,
    PartitionHealth,
)
from rackloom.core.partitions.planner import make_plan
from rackloom.core.partitions.safety import check_plan
from rackloom.errors import Refused

GUIDS = (11, 12, 13, 14)


@pytest.fixture
def observation() -> DomainObservation:
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
    return DomainObservation(
        domain="d", gpus=gpus, partitions=(default,), limits=DomainLimits(), observed_at=1.0
    )


@pytest.fixture
def intent() -> DomainIntent:
    return DomainIntent(
        domain="d",
        assignments=(GpuAssignment(guid=13, logical_partition="lp", tenant="t"),),
        owned=(),
        managed=frozenset(GUIDS),
        default_partition=DefaultPartitionPolicy.NONE,
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
    check_plan(plan, paused, observation)


def test_a_plan_from_before_the_pause_is_refused(intent: Any, observation: Any) -> None:
    plan = make_plan(intent, observation)
    with pytest.raises(Refused, match="the domain is paused: x; resume the domain"):
        check_plan(plan, msgspec.structs.replace(intent, paused="x"), observation)


def test_a_paused_domain_with_nothing_to_do_blocks_nothing(intent: Any, observation: Any) -> None:
    idle = msgspec.structs.replace(intent, assignments=(), paused="x")
    empty = msgspec.structs.replace(observation, partitions=())
    assert make_plan(idle, empty).blocked == ()
