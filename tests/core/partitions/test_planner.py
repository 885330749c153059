"""The planner's answer in each situation that it knows, one at a time."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    AddGpus,
    CreatePartition,
    DeletePartition,
    GpuHealth,
    OwnedPartition,
    PartitionPlan,
    RemoveGpus,
)
from rackloom.core.partitions.planner import make_plan, name_flaw, partition_name
from rackloom.core.partitions.safety import apply_operation, check_plan
from rackloom.errors import Refused

DEFAULT = "Default Partition"


def plan_of(case: Any) -> PartitionPlan:
    return make_plan(case.intent, case.observation)


def reasons(case: Any) -> list[tuple[tuple[int, ...], str]]:
    return [(blocked.guids, blocked.reason) for blocked in plan_of(case).blocked]


def test_nothing_wanted_and_nothing_there_needs_nothing(case: Any) -> None:
    plan = plan_of(case)
    assert (plan.operations, plan.blocked) == ((), ())
    assert (plan.observation, plan.intent_revision) == (case.observation, 1)


def test_one_partition_is_created_per_logical_partition(case: Any) -> None:
    case.assign("b", 4, 3).assign("a", 1)
    assert plan_of(case).operations == (
        CreatePartition(name="rl-a", logical_partition="a", guids=(1,)),
        CreatePartition(name="rl-b", logical_partition="b", guids=(3, 4)),
    )


def test_a_recorded_name_is_used_again_after_a_lost_reply(case: Any) -> None:
    case.assign("a", 1).owns("older-name", "a")
    assert plan_of(case).operations == (
        CreatePartition(name="older-name", logical_partition="a", guids=(1,)),
    )


def test_a_standing_partition_is_added_to(case: Any) -> None:
    case.assign("a", 1, 2, 5).owns("rl-a", "a").stands(7, "rl-a", 1)
    assert plan_of(case).operations == (AddGpus(partition_id=7, name="rl-a", guids=(2, 5)),)


def test_a_moving_gpu_is_removed_first_and_added_when_that_was_seen(case: Any) -> None:
    case.assign("a", 1).assign("b", 2, 3)
    case.owns("rl-a", "a").owns("rl-b", "b").stands(1, "rl-a", 1, 2).stands(2, "rl-b", 3)
    (removal,) = plan_of(case).operations
    assert removal == RemoveGpus(partition_id=1, name="rl-a", guids=(2,))
    case.observation = apply_operation(case.observation, removal)
    assert plan_of(case).operations == (AddGpus(partition_id=2, name="rl-b", guids=(2,)),)


def test_while_anything_is_to_be_removed_nothing_is_added(case: Any) -> None:
    case.assign("a", 1).owns("rl-b", "b").stands(2, "rl-b", 3)
    assert plan_of(case).operations == (DeletePartition(partition_id=2, name="rl-b"),)


def test_the_last_member_leaves_by_deletion(case: Any) -> None:
    case.owns("rl-a", "a").stands(1, "rl-a", 1, 2)
    assert plan_of(case).operations == (DeletePartition(partition_id=1, name="rl-a"),)


def test_an_empty_partition_of_ours_is_filled_or_deleted(case: Any) -> None:
    case.owns("rl-a", "a").stands(1, "rl-a")
    assert plan_of(case).operations == (DeletePartition(partition_id=1, name="rl-a"),)
    case.assign("a", 1)
    assert plan_of(case).operations == (AddGpus(partition_id=1, name="rl-a", guids=(1,)),)


def test_foreign_partitions_are_left_alone_and_their_gpus_reported(case: Any) -> None:
    case.assign("a", 1, 2).stands(9, "somebody", 2, 3)
    plan = plan_of(case)
    assert plan.operations == (CreatePartition(name="rl-a", logical_partition="a", guids=(1,)),)
    (blocked,) = plan.blocked
    assert blocked.guids == (2,)
    # A tenant reads it.
    assert "somebody" not in blocked.reason
    assert "the GPU is in partition 9, which the site did not make" in blocked.reason
    assert "adopt" in str(blocked.fix)


def test_adopting_the_foreign_partition_unblocks_its_gpus(case: Any) -> None:
    case.assign("a", 2).stands(9, "somebody", 2, 3).owns("somebody", "a")
    plan = plan_of(case)
    assert plan.operations == (RemoveGpus(partition_id=9, name="somebody", guids=(3,)),)
    assert plan.blocked == ()


def test_the_default_partition_is_deleted_when_none_is_wanted(case: Any) -> None:
    case.assign("a", 1).default(1, 2, 3)
    assert plan_of(case).operations == (DeletePartition(partition_id=DEFAULT_PARTITION_ID, name=DEFAULT),)


def test_the_default_partition_stays_while_it_holds_gpus_of_others(case: Any) -> None:
    case.default(1, 2, 8).unmanaged(8)
    plan = plan_of(case)
    assert plan.operations == (RemoveGpus(partition_id=DEFAULT_PARTITION_ID, name=DEFAULT, guids=(1, 2)),)
    (blocked,) = plan.blocked
    assert (blocked.guids, blocked.reason, blocked.fix) == (
        (8,),
        f"partition {DEFAULT!r} also holds GPUs of no machine that the site knows",
        "register their machines with the site, or take the GPUs out on the switch controller",
    )


def test_a_kept_default_partition_loses_only_what_was_given_away(case: Any) -> None:
    case.keep().default(1, 2, 3).assign("a", 1).assign("b", 2)
    assert plan_of(case).operations == (
        RemoveGpus(partition_id=DEFAULT_PARTITION_ID, name=DEFAULT, guids=(1, 2)),
    )


def test_released_gpus_return_to_a_kept_default_partition(case: Any) -> None:
    case.keep().default(3, 4).assign("a", 1).owns("rl-a", "a").stands(1, "rl-a", 1).ill(8)
    assert plan_of(case).operations == (
        AddGpus(partition_id=DEFAULT_PARTITION_ID, name=DEFAULT, guids=(2, 5, 6, 7)),
    )


def test_no_gpu_returns_to_a_default_partition_that_a_tenants_gpu_is_in(case: Any) -> None:
    case.keep().default(8).assign("a", 8).unmanaged(8)
    assert plan_of(case).operations == ()


def test_gpus_that_the_site_does_not_know_are_never_touched(case: Any) -> None:
    case.assign("a", 1, 2).unmanaged(1, 4).owns("rl-a", "a").stands(1, "rl-a", 4)
    plan = plan_of(case)
    assert plan.operations == ()
    by_gpu = {guid: blocked.reason for blocked in plan.blocked for guid in blocked.guids}
    assert "no machine" in by_gpu[1]
    assert "also holds" in by_gpu[4]
    assert by_gpu[2] == (
        "partition 'rl-a' holds 1 GPUs that do not belong there and that the site may not take out"
    )


@pytest.mark.parametrize("health", [GpuHealth.UNKNOWN, GpuHealth.DEGRADED, GpuHealth.DEGRADED_BANDWIDTH])
def test_a_gpu_that_is_less_than_healthy_still_joins(case: Any, health: GpuHealth) -> None:
    case.assign("a", 1).ill(1, health)
    assert len(plan_of(case).operations) == 1


def test_a_gpu_without_nvlink_waits_and_the_others_do_not(case: Any) -> None:
    case.assign("a", 1, 2).ill(1)
    assert plan_of(case).operations == (CreatePartition(name="rl-a", logical_partition="a", guids=(2,)),)
    assert [(guids, "NO_NVLINK" in reason) for guids, reason in reasons(case)] == [((1,), True)]


def test_a_member_that_lost_nvlink_is_served_already(case: Any) -> None:
    case.assign("a", 1).ill(1).owns("rl-a", "a").stands(1, "rl-a", 1)
    plan = plan_of(case)
    assert (plan.operations, plan.blocked) == ((), ())


def test_a_missing_tray_blocks_its_own_gpus_only(case: Any) -> None:
    case.assign("a", 1, 2, 3).absent(1, 2).owns("rl-a", "a").stands(1, "rl-a", 2)
    assert plan_of(case).operations == (AddGpus(partition_id=1, name="rl-a", guids=(3,)),)
    assert [(guids, "does not list" in reason) for guids, reason in reasons(case)] == [((1, 2), True)]


def test_the_names_of_a_swapped_tray_make_room_for_its_successor(case: Any) -> None:
    # Found by simulation: the GUIDs of a removed tray stay in a GUID-based partition forever.
    case.assign("a", 1, 2).owns("rl-a", "a").stands(1, "rl-a", 1, 70).unmanaged(70)
    (removal,) = plan_of(case).operations
    assert removal == RemoveGpus(partition_id=1, name="rl-a", guids=(70,))
    check_plan(plan_of(case), case.intent, case.observation)
    case.observation = apply_operation(case.observation, removal)
    assert plan_of(case).operations == (AddGpus(partition_id=1, name="rl-a", guids=(2,)),)


def test_nothing_is_taken_out_of_a_partition_of_others_because_it_is_not_listed(case: Any) -> None:
    case.stands(1, "theirs", 70).default(71).unmanaged(70, 71)
    assert plan_of(case).operations == ()


def test_more_partitions_than_the_domain_holds_are_not_attempted(case: Any) -> None:
    case.assign("a", 1).assign("b", 2).assign("c", 3).stands(9, "somebody", 8).limit(2)
    plan = plan_of(case)
    assert plan.operations == (CreatePartition(name="rl-a", logical_partition="a", guids=(1,)),)
    assert [(blocked.guids, blocked.reason) for blocked in plan.blocked] == [
        ((2, 3), "the domain has 2 partitions of at most 2")
    ]


def test_members_that_nobody_assigned_are_taken_out_of_our_partition(case: Any) -> None:
    case.assign("a", 1).owns("rl-a", "a").stands(1, "rl-a", 1, 6)
    assert plan_of(case).operations == (RemoveGpus(partition_id=1, name="rl-a", guids=(6,)),)


def test_of_two_partitions_under_our_name_the_fuller_stays(case: Any) -> None:
    case.assign("a", 1, 2, 3).owns("rl-a", "a").stands(1, "rl-a", 1).stands(2, "rl-a", 2, 3)
    plan = plan_of(case)
    check_plan(plan, case.intent, case.observation)
    (removal,) = plan.operations
    assert removal == DeletePartition(partition_id=1, name="rl-a")
    case.observation = apply_operation(case.observation, removal)
    assert plan_of(case).operations == (AddGpus(partition_id=2, name="rl-a", guids=(1,)),)


def test_of_two_partitions_equally_full_the_older_number_stays(case: Any) -> None:
    case.assign("a", 1, 2).owns("rl-a", "a").stands(2, "rl-a", 2).stands(1, "rl-a", 1)
    assert plan_of(case).operations == (DeletePartition(partition_id=2, name="rl-a"),)


def test_a_location_based_partition_under_our_name_is_left_to_the_operator(case: Any) -> None:
    case.assign("a", 1, 2).owns("rl-a", "a").stands(1, "rl-a", 1, guid_based=False)
    plan = plan_of(case)
    assert plan.operations == ()
    by_gpu = {guid: blocked for blocked in plan.blocked for guid in blocked.guids}
    assert by_gpu[1].reason == (
        "partition 'rl-a' is location-based, and the site only makes GUID-based ones: "
        "another hand made it, and NMX-C fixes the type at creation"
    )
    assert "stands already" in by_gpu[2].reason


def test_a_name_that_somebody_else_took_is_not_tried(case: Any) -> None:
    case.assign("a", 1).stands(4, "rl-a", 8)
    assert plan_of(case).operations == ()
    assert reasons(case) == [((1,), "partition 'rl-a' stands already, and is not one that the site can use")]


def test_a_logical_partition_of_two_tenants_gains_and_loses_nothing(case: Any) -> None:
    case.assign("a", 1, tenant="one").assign("a", 2, tenant="two").owns("rl-a", "a").stands(1, "rl-a", 1)
    plan = plan_of(case)
    assert plan.operations == ()
    assert [(blocked.guids, "several tenants" in blocked.reason) for blocked in plan.blocked] == [
        ((1, 2), True)
    ]


def test_a_gpu_promised_twice_is_left_where_it_is(case: Any) -> None:
    case.assign("a", 1, 2).assign("b", 1).owns("rl-a", "a").stands(1, "rl-a", 1)
    plan = plan_of(case)
    assert plan.operations == ()
    assert {blocked.guids for blocked in plan.blocked} == {(1,), (2,)}
    assert ((1,), "assigned to logical partitions a, b at once") in reasons(case)


def test_a_name_no_controller_takes_is_said_so(case: Any) -> None:
    case.assign("x" * 300, 1).assign("é", 2)
    assert plan_of(case).operations == ()
    assert all("printable ASCII" in reason for _, reason in reasons(case))


def test_intent_and_observation_must_be_of_one_domain(case: Any) -> None:
    other = msgspec.structs.replace(case.intent, domain="another")
    with pytest.raises(Refused, match="another") as refusal:
        make_plan(other, case.observation)
    assert refusal.value.nearest_fix == "read the intent of the domain that the controller names"


def test_the_recorded_id_does_not_decide_ownership(case: Any) -> None:
    """Controllers reuse ids. A foreign partition stays foreign even if it gets the id of our partition."""
    stale = OwnedPartition(name="rl-a", logical_partition="a", partition_id=9)
    case.want(owned=(stale,)).stands(9, "somebody", 1)
    assert plan_of(case).operations == ()


FAILED = "find out why on the switch controller; it is asked again in the next pass"


def test_what_a_controller_refused_is_not_planned_again_and_said(case: Any) -> None:
    case.assign("a", 1, 2).assign("b", 3)
    refused, other = plan_of(case).operations
    plan = make_plan(case.intent, case.observation, {refused: "RESOURCE_IN_USE"})
    assert plan.operations == (other,)
    assert [(blocked.guids, blocked.reason, blocked.fix) for blocked in plan.blocked] == [
        (
            (1, 2),
            "the switch controller refused create-partition on partition 'rl-a': RESOURCE_IN_USE",
            FAILED,
        )
    ]


def test_a_failed_deletion_blocks_its_members_and_names_the_number_alone(case: Any) -> None:
    # A tenant reads it, and the name would show the owner of the partition.
    case.owns("rl-b", "b").stands(7, "rl-b", 3, 4).assign("a", 3, 5)
    (deletion,) = plan_of(case).operations
    plan = make_plan(case.intent, case.observation, {deletion: None})
    assert plan.operations == (CreatePartition(name="rl-a", logical_partition="a", guids=(5,)),)
    unknown = (
        "the outcome of delete-partition on partition 7 is unknown: "
        "the switch controller gave no valid answer"
    )
    assert [(blocked.guids, blocked.reason, blocked.fix) for blocked in plan.blocked] == [
        ((3, 4), unknown, FAILED)
    ]


def test_a_deletion_that_failed_and_took_place_all_the_same_blocks_nothing(case: Any) -> None:
    failed = {DeletePartition(partition_id=7, name="rl-b"): "INTERNAL"}
    assert make_plan(case.intent, case.observation, failed).blocked == ()


def test_names_are_derived_unique_and_acceptable() -> None:
    assert partition_name("a") != partition_name("b")
    assert name_flaw(partition_name("0f8fad5b-d9cb-469f-a165-70867728950e")) is None
    assert name_flaw(DEFAULT) is not None
    assert name_flaw("") is not None


def _release(case: Any) -> None:
    (foreign,) = case.observation.partitions
    case.observe(partitions=(msgspec.structs.replace(foreign, members=foreign.members - {1}),))


def _reassign(case: Any) -> None:
    case.want(assignments=()).assign("a", 1)


FIXES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "register its machine with the site": (
        lambda case: case.unmanaged(1),
        lambda case: case.want(managed=case.intent.managed | {1}),
    ),
    "bring the tray back, or move the instance to another machine": (
        lambda case: case.absent(1),
        lambda case: case.present(1),
    ),
    "repair the tray, or move the instance": (
        lambda case: case.ill(1),
        lambda case: case.ill(1, GpuHealth.HEALTHY),
    ),
    "adopt the partition, or release the GPU from it on the switch controller": (
        lambda case: case.stands(9, "somebody", 1, 2),
        _release,
    ),
    "delete that partition on the switch controller": (
        lambda case: case.owns("rl-a", "a").stands(1, "rl-a", 1, guid_based=False),
        lambda case: case.observe(partitions=()),
    ),
    "adopt that partition, or delete it on the switch controller": (
        lambda case: case.stands(1, "rl-a", 8),
        lambda case: case.observe(partitions=()),
    ),
    "assign the GPU to one logical partition of one tenant": (lambda case: case.assign("b", 1), _reassign),
    "delete a logical partition that has GPUs in this domain": (
        lambda case: case.limit(1).assign("0", 8).owns("rl-0", "0").stands(1, "rl-0", 8),
        lambda case: case.want(assignments=(), owned=()).observe(partitions=()).assign("a", 1),
    ),
    "take those GPUs out on the switch controller, or correct their assignment": (
        lambda case: case.owns("rl-a", "a").stands(1, "rl-a", 8).unmanaged(8),
        lambda case: case.observe(partitions=()),
    ),
}


@pytest.mark.parametrize("fix", FIXES)
def test_each_fix_that_is_named_serves_the_wish(case: Any, fix: str) -> None:
    spoil, apply_fix = FIXES[fix]
    case.assign("a", 1)
    spoil(case)
    blocked = [blocked for blocked in plan_of(case).blocked if 1 in blocked.guids]
    assert blocked[0].fix == fix
    apply_fix(case)
    assert not [blocked for blocked in plan_of(case).blocked if 1 in blocked.guids]
    joining = [
        operation
        for operation in plan_of(case).operations
        if isinstance(operation, CreatePartition | AddGpus)
    ]
    assert [blocked.guids for blocked in joining] == [(1,)]


def test_a_paused_domain_says_what_waits_and_does_nothing(case: Any) -> None:
    case.assign("a", 1).owns("rl-b", "b").stands(1, "rl-b", 7, 8).want(paused="switch firmware")
    plan = plan_of(case)
    assert plan.operations == ()
    (waiting,) = plan.blocked
    assert (waiting.guids, waiting.reason, waiting.fix) == (
        (7, 8),
        "the domain is paused: switch firmware",
        "resume the domain",
    )
    case.want(paused=None)
    assert plan_of(case).operations == (DeletePartition(partition_id=1, name="rl-b"),)


def test_a_paused_domain_names_all_gpus_that_wait(case: Any) -> None:
    case.want(paused="switch firmware").assign("a", 1).assign("b", 2)
    assert [blocked.guids for blocked in plan_of(case).blocked] == [(1, 2)]
    case.want(assignments=()).owns("rl-c", "c").owns("rl-d", "d").stands(1, "rl-c", 3).stands(2, "rl-d", 4)
    assert [blocked.guids for blocked in plan_of(case).blocked] == [(3, 4)]
