"""The `tray` policy: free GPUs share memory within their tray only, and never with another owner's GPUs."""

from typing import Any

import msgspec
import pytest

from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    AddGpus,
    CreatePartition,
    DeletePartition,
    GpuHealth,
    PartitionOperation,
    PartitionPlan,
    RemoveGpus,
    is_tray_partition,
    tray_partition_of,
)
from rackloom.core.partitions.planner import make_plan
from rackloom.core.partitions.safety import check_plan
from rackloom.errors import Refused

FIRST, SECOND = "tray-C1-0", "tray-C1-1"
DEFAULT = DeletePartition(partition_id=DEFAULT_PARTITION_ID, name="Default Partition")


def create(tray: str, *guids: int) -> CreatePartition:
    return CreatePartition(name=f"rl-{tray}", logical_partition=tray, guids=guids)


def planned(case: Any) -> tuple[PartitionOperation, ...]:
    plan = make_plan(case.intent, case.observation)
    check_plan(plan, case.intent, case.observation)
    return plan.operations


def refused(case: Any, operation: PartitionOperation) -> str:
    plan = PartitionPlan(
        observation=case.observation,
        intent_revision=case.intent.revision,
        operations=(operation,),
        blocked=(),
    )
    with pytest.raises(Refused) as refusal:
        check_plan(plan, case.intent, case.observation)
    return refusal.value.reason


def test_the_factory_default_goes_and_each_tray_gets_its_own(case: Any) -> None:
    assert planned(case.trays().default(1, 2, 3, 4, 5, 6, 7, 8)) == (DEFAULT,)
    case.observe(partitions=())
    assert planned(case) == (create(FIRST, 1, 2, 3, 4), create(SECOND, 5, 6, 7, 8))


def test_a_given_gpu_leaves_its_tray_first_and_comes_back(case: Any) -> None:
    case.trays().owns(f"rl-{FIRST}", FIRST).owns(f"rl-{SECOND}", SECOND).owns("rl-a", "a")
    case.stands(1, f"rl-{FIRST}", 1, 2, 3, 4).stands(2, f"rl-{SECOND}", 5, 6, 7, 8).assign("a", 1, 2)
    assert planned(case) == (RemoveGpus(partition_id=1, name=f"rl-{FIRST}", guids=(1, 2)),)
    case.observe(partitions=()).stands(1, f"rl-{FIRST}", 3, 4).stands(2, f"rl-{SECOND}", 5, 6, 7, 8)
    assert planned(case) == (CreatePartition(name="rl-a", logical_partition="a", guids=(1, 2)),)
    case.stands(3, "rl-a", 1, 2)
    assert planned(case) == ()
    case.want(assignments=())
    assert planned(case) == (DeletePartition(partition_id=3, name="rl-a"),)
    case.observe(partitions=case.observation.partitions[:2])
    assert planned(case) == (AddGpus(partition_id=1, name=f"rl-{FIRST}", guids=(1, 2)),)


def test_a_tray_that_is_given_away_whole_has_no_partition(case: Any) -> None:
    case.trays().owns(f"rl-{FIRST}", FIRST).stands(1, f"rl-{FIRST}", 1, 2, 3, 4)
    case.assign("a", 1, 2, 3, 4)
    assert planned(case) == (DeletePartition(partition_id=1, name=f"rl-{FIRST}"),)


def test_a_tray_whose_machine_was_removed_keeps_no_partition(case: Any) -> None:
    case.trays().owns(f"rl-{FIRST}", FIRST).stands(1, f"rl-{FIRST}", 1, 2, 3, 4).unmanaged(1, 2, 3, 4)
    assert planned(case) == (DeletePartition(partition_id=1, name=f"rl-{FIRST}"),)
    case.observe(partitions=())
    assert planned(case) == (create(SECOND, 5, 6, 7, 8),)


def test_an_unknown_gpu_of_another_tray_is_not_taken_out(case: Any) -> None:
    case.trays().owns(f"rl-{FIRST}", FIRST).stands(1, f"rl-{FIRST}", 1, 2, 5).unmanaged(1, 2, 5)
    plan = make_plan(case.intent, case.observation)
    assert plan.operations == (RemoveGpus(partition_id=1, name=f"rl-{FIRST}", guids=(1, 2)),)
    assert [blocked.guids for blocked in plan.blocked] == [(5,)]
    assert "no machine of the site" in refused(
        case, RemoveGpus(partition_id=1, name=f"rl-{FIRST}", guids=(5,))
    )


def test_under_another_policy_tray_partitions_are_taken_apart(case: Any) -> None:
    case.owns(f"rl-{FIRST}", FIRST).stands(1, f"rl-{FIRST}", 1, 2, 3, 4)
    assert planned(case) == (DeletePartition(partition_id=1, name=f"rl-{FIRST}"),)


def test_a_foreign_partition_of_that_name_is_left_alone(case: Any) -> None:
    case.trays().stands(9, f"rl-{FIRST}", 1)
    plan = make_plan(case.intent, case.observation)
    assert plan.operations == (create(SECOND, 5, 6, 7, 8),)
    assert "stands already" in plan.blocked[0].reason


def test_free_gpus_elsewhere_unmanaged_or_without_nvlink_are_not_moved(case: Any) -> None:
    case.trays().stands(9, "maintenance", 1).unmanaged(2).ill(3)
    plan = make_plan(case.intent, case.observation)
    assert plan.operations == (create(FIRST, 4), create(SECOND, 5, 6, 7, 8))
    assert plan.blocked == ()


def test_a_gpu_that_loses_its_nvlink_stays_in_its_tray(case: Any) -> None:
    case.trays().owns(f"rl-{FIRST}", FIRST).stands(1, f"rl-{FIRST}", 1, 2, 3, 4).ill(3)
    assert planned(case) == (create(SECOND, 5, 6, 7, 8),)


def test_a_tray_that_is_pulled_leaves_no_name_behind(case: Any) -> None:
    case.trays().owns(f"rl-{FIRST}", FIRST).stands(1, f"rl-{FIRST}", 1, 2, 3, 4).absent(1, 2, 3, 4)
    assert planned(case) == (DeletePartition(partition_id=1, name=f"rl-{FIRST}"),)


def test_tenants_come_before_trays_where_partitions_are_few(case: Any) -> None:
    case.trays().owns(f"rl-{FIRST}", FIRST).owns(f"rl-{SECOND}", SECOND).limit(2)
    case.stands(1, f"rl-{FIRST}", 1, 2, 3, 4).stands(2, f"rl-{SECOND}", 5, 6, 7, 8).assign("a", 1)
    assert planned(case) == (
        RemoveGpus(partition_id=1, name=f"rl-{FIRST}", guids=(1,)),
        DeletePartition(partition_id=2, name=f"rl-{SECOND}"),
    )
    case.observe(partitions=()).stands(1, f"rl-{FIRST}", 2, 3, 4)
    assert planned(case) == (CreatePartition(name="rl-a", logical_partition="a", guids=(1,)),)
    case.owns("rl-a", "a").stands(2, "rl-a", 1)
    assert planned(case) == ()


def test_no_tray_has_a_partition_where_tenants_take_all(case: Any) -> None:
    case.trays().limit(1).assign("a", 1)
    assert planned(case) == (CreatePartition(name="rl-a", logical_partition="a", guids=(1,)),)
    case.owns("rl-a", "a").stands(1, "rl-a", 1)
    plan = make_plan(case.intent, case.observation)
    assert (plan.operations, plan.blocked) == ((), ())


def test_partitions_of_others_leave_less_room_for_trays(case: Any) -> None:
    case.trays().limit(2).stands(1, "theirs")
    assert planned(case) == (create(FIRST, 1, 2, 3, 4),)
    plan = make_plan(case.intent, case.observation)
    assert plan.blocked == (), "a tray without a partition waits for nothing"


def test_a_health_that_is_only_degraded_does_not_keep_a_gpu_out(case: Any) -> None:
    assert create(FIRST, 1, 2, 3, 4) in planned(case.trays().ill(1, GpuHealth.DEGRADED))


@pytest.mark.parametrize("serial", ["", "x" * 49, "\N{SNOWMAN}", "a\nb"])
def test_a_tray_whose_chassis_is_not_named_well_has_no_partition(case: Any, serial: str) -> None:
    gpu = msgspec.structs.replace(case.observation.gpus[0], chassis_serial=serial)
    assert tray_partition_of(gpu) is None
    case.trays().observe(gpus=(gpu, *case.observation.gpus[1:]))
    assert planned(case)[0] == create(FIRST, 2, 3, 4)


def test_the_longest_serial_of_a_chassis_names_a_partition(case: Any) -> None:
    gpu = msgspec.structs.replace(case.observation.gpus[0], chassis_serial="x" * 48, slot=7)
    assert tray_partition_of(gpu) == f"tray-{'x' * 48}-7"


def test_no_two_trays_have_one_name(case: Any) -> None:
    gpu = case.observation.gpus[0]
    seats = (("A", 11), ("A-1", 1), ("A1", 1), ("A", 1))
    names = {
        tray_partition_of(msgspec.structs.replace(gpu, chassis_serial=serial, slot=slot))
        for serial, slot in seats
    }
    assert len(names) == len(seats)
    assert all(is_tray_partition(name) for name in names if name)
    assert not is_tray_partition("00000000-0000-4000-8000-000000000001")


def test_a_plan_that_mixes_trays_is_refused(case: Any) -> None:
    assert "several trays" in refused(case.trays(), create(FIRST, 1, 5))
    case.owns(f"rl-{FIRST}", FIRST).stands(1, f"rl-{FIRST}", 1)
    joining = AddGpus(partition_id=1, name=f"rl-{FIRST}", guids=(5,))
    assert "several trays" in refused(case, joining)


def test_a_plan_that_brings_a_given_gpu_into_a_tray_is_refused(case: Any) -> None:
    assert "a tenant was given" in refused(case.trays().assign("a", 1), create(FIRST, 1, 2))


def test_a_plan_that_makes_trays_under_another_policy_is_refused(case: Any) -> None:
    of_their_own = "trays have partitions of their own only if that is the site's policy"
    assert refused(case, create(FIRST, 1, 2)) == of_their_own
    assert refused(case.keep(), create(FIRST, 1, 2)) == of_their_own
