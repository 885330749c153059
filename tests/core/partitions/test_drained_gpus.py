"""GPUs of a drained tray are in no partition of the site, under any policy for free GPUs."""

from typing import Any

import pytest

from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    AddGpus,
    CreatePartition,
    DeletePartition,
    PartitionOperation,
    PartitionPlan,
    RemoveGpus,
)
from rackloom.core.partitions.planner import make_plan
from rackloom.core.partitions.safety import check_plan
from rackloom.errors import Refused

FIRST, SECOND = "tray-C1-0", "tray-C1-1"
TRAY = frozenset((1, 2, 3, 4))
OTHERS = (5, 6, 7, 8)
DEFAULT = "Default Partition"


def planned(case: Any) -> tuple[PartitionOperation, ...]:
    plan = make_plan(case.intent, case.observation)
    check_plan(plan, case.intent, case.observation)
    return plan.operations


def test_they_leave_the_partition_of_their_tray_and_stay_outside(case: Any) -> None:
    case.trays().owns(f"rl-{FIRST}", FIRST).owns(f"rl-{SECOND}", SECOND).want(drained=TRAY)
    case.stands(1, f"rl-{FIRST}", *TRAY).stands(2, f"rl-{SECOND}", *OTHERS)
    assert planned(case) == (DeletePartition(partition_id=1, name=f"rl-{FIRST}"),)
    case.observe(partitions=()).stands(2, f"rl-{SECOND}", *OTHERS)
    assert planned(case) == ()
    case.want(drained=frozenset())
    assert planned(case) == (
        CreatePartition(name=f"rl-{FIRST}", logical_partition=FIRST, guids=tuple(sorted(TRAY))),
    )


def test_they_leave_the_kept_default_partition_and_come_back_after_it(case: Any) -> None:
    case.keep().default(*TRAY, *OTHERS).want(drained=TRAY)
    assert planned(case) == (
        RemoveGpus(partition_id=DEFAULT_PARTITION_ID, name=DEFAULT, guids=tuple(sorted(TRAY))),
    )
    case.observe(partitions=()).default(*OTHERS)
    assert planned(case) == ()
    case.want(drained=frozenset())
    assert planned(case) == (
        AddGpus(partition_id=DEFAULT_PARTITION_ID, name=DEFAULT, guids=tuple(sorted(TRAY))),
    )


@pytest.mark.parametrize("drained", [TRAY, frozenset((1,)), frozenset((2,))], ids=str)
@pytest.mark.parametrize(
    "operation",
    [
        CreatePartition(name=f"rl-{FIRST}", logical_partition=FIRST, guids=(1, 2)),
        AddGpus(partition_id=DEFAULT_PARTITION_ID, name=DEFAULT, guids=(1, 2)),
    ],
)
def test_no_plan_may_join_any_of_them(
    case: Any, operation: PartitionOperation, drained: frozenset[int]
) -> None:
    case.default(*OTHERS).want(drained=drained)
    policy = case.trays if isinstance(operation, CreatePartition) else case.keep
    policy()
    plan = PartitionPlan(
        observation=case.observation,
        intent_revision=case.intent.revision,
        operations=(operation,),
        blocked=(),
    )
    with pytest.raises(Refused, match="drained"):
        check_plan(plan, case.intent, case.observation)
