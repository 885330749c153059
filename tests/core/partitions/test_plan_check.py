"""Plans that the planner would never make are refused, each for a separate reason."""

from typing import Any

import msgspec
import pytest

from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    AddGpus,
    CreatePartition,
    DeletePartition,
    ObservedPartition,
    PartitionHealth,
    PartitionOperation,
    PartitionPlan,
    RemoveGpus,
)
from rackloom.core.partitions.planner import make_plan
from rackloom.core.partitions.safety import PLAN_AGAIN, apply_operation, check_plan
from rackloom.errors import Refused

DEFAULT = "Default Partition"


def refused(case: Any, *operations: PartitionOperation) -> str:
    plan = PartitionPlan(
        observation=case.observation,
        intent_revision=case.intent.revision,
        operations=operations,
        blocked=(),
    )
    with pytest.raises(Refused) as refusal:
        check_plan(plan, case.intent, case.observation)
    return refusal.value.reason


def create(name: str, logical_partition: str, *guids: int) -> CreatePartition:
    return CreatePartition(name=name, logical_partition=logical_partition, guids=guids)


def test_a_plan_holds_for_the_same_facts_observed_later(case: Any) -> None:
    plan = make_plan(case.assign("a", 1).intent, case.observation)
    check_plan(plan, case.intent, msgspec.structs.replace(case.observation, observed_at=99.0))


def test_a_plan_is_stale_when_a_fact_changed(case: Any) -> None:
    plan = make_plan(case.assign("a", 1).intent, case.observation)
    case.stands(5, "somebody", 8)
    with pytest.raises(Refused, match=r"^the fabric is no longer as the plan found it;") as refusal:
        check_plan(plan, case.intent, case.observation)
    assert refusal.value.nearest_fix == PLAN_AGAIN
    check_plan(make_plan(case.intent, case.observation), case.intent, case.observation)


def test_a_plan_is_stale_when_the_intent_changed(case: Any) -> None:
    plan = make_plan(case.assign("a", 1).intent, case.observation)
    case.want(revision=2)
    with pytest.raises(Refused, match="which is now 2") as refusal:
        check_plan(plan, case.intent, case.observation)
    assert refusal.value.nearest_fix == PLAN_AGAIN


def test_a_plan_for_another_domain_is_refused(case: Any) -> None:
    plan = make_plan(case.intent, case.observation)
    with pytest.raises(Refused, match="intent is for domain"):
        check_plan(plan, msgspec.structs.replace(case.intent, domain="another"), case.observation)


def test_removals_and_additions_do_not_mix(case: Any) -> None:
    case.assign("a", 2).owns("rl-b", "b").stands(1, "rl-b", 1)
    both = (DeletePartition(partition_id=1, name="rl-b"), create("rl-a", "a", 2))
    together = "the plan both removes and adds: additions wait until removals were seen done"
    assert refused(case, *both) == together
    assert refused(case, *reversed(both)) == together


def test_two_tenants_never_meet(case: Any) -> None:
    case.assign("a", 1).assign("b", 2)
    assert "not of its tenant" in refused(case, create("rl-a", "a", 1, 2))
    case.owns("rl-a", "a").stands(1, "rl-a", 1)
    assert "not of its tenant" in refused(case, AddGpus(partition_id=1, name="rl-a", guids=(2,)))


def test_nobody_joins_a_member_that_nobody_knows(case: Any) -> None:
    case.assign("a", 1, 2).owns("rl-a", "a").stands(1, "rl-a", 1, 8)
    assert "0x8" in refused(case, AddGpus(partition_id=1, name="rl-a", guids=(2,)))


def test_a_logical_partition_of_two_tenants_grows_in_no_way(case: Any) -> None:
    case.assign("a", 1, tenant="one").assign("a", 2, tenant="two")
    assert "several tenants" in refused(case, create("rl-a", "a", 1))


@pytest.mark.parametrize("tenant", ["same", None], ids=["one tenant", "two tenants"])
def test_a_gpu_that_is_wanted_in_two_partitions_joins_neither(case: Any, tenant: str | None) -> None:
    case.assign("a", 1, 2, tenant=tenant).assign("b", 2, 3, tenant=tenant)
    assert "not of its tenant" in refused(case, create("rl-a", "a", 2))
    assert "not of its tenant" in refused(case, create("rl-b", "b", 2, 3))
    case.owns("rl-a", "a").stands(1, "rl-a", 1)
    assert "0x2, not of its tenant" in refused(case, AddGpus(partition_id=1, name="rl-a", guids=(2,)))


def test_what_we_do_not_own_is_neither_deleted_nor_changed(case: Any) -> None:
    case.assign("a", 2).stands(1, "somebody", 1, 3)
    assert "not one that the site made" in refused(case, DeletePartition(partition_id=1, name="somebody"))
    shrink = RemoveGpus(partition_id=1, name="somebody", guids=(1,))
    assert "not one that the site made" in refused(case, shrink)
    grow = AddGpus(partition_id=1, name="somebody", guids=(2,))
    assert "not one that the site made" in refused(case, grow)


def test_a_location_based_partition_is_not_ours_to_change(case: Any) -> None:
    case.owns("rl-a", "a").stands(1, "rl-a", 1, guid_based=False)
    assert "not one that the site made" in refused(case, DeletePartition(partition_id=1, name="rl-a"))


def test_no_gpu_leaves_the_partition_it_is_wanted_in(case: Any) -> None:
    case.assign("a", 1).owns("rl-a", "a").stands(1, "rl-a", 1)
    assert "where it is wanted" in refused(case, DeletePartition(partition_id=1, name="rl-a"))
    case.owns("rl-b", "b").stands(2, "rl-b", 2).stands(3, "somebody", 3)
    assert "where it is wanted" in refused(case, DeletePartition(partition_id=1, name="rl-a"))


def test_gpus_of_no_machine_of_ours_are_out_of_reach(case: Any) -> None:
    case.unmanaged(1).default(1, 2).owns("rl-a", "a").assign("a", 3)
    assert "no machine" in refused(case, DeletePartition(partition_id=DEFAULT_PARTITION_ID, name=DEFAULT))
    assert "no machine" in refused(
        case, RemoveGpus(partition_id=DEFAULT_PARTITION_ID, name=DEFAULT, guids=(1,))
    )
    case.unmanaged(3)
    assert "no machine" in refused(case, create("rl-a", "a", 3))


def test_the_default_partition_follows_the_policy(case: Any) -> None:
    case.assign("a", 1, 2).default(2, 3)
    into = AddGpus(partition_id=DEFAULT_PARTITION_ID, name=DEFAULT, guids=(1,))
    assert refused(case, into) == "no GPU joins the default partition unless it is to be kept"
    case.keep()
    assert "0x1, which a tenant was given" in refused(case, into)
    deletion = DeletePartition(partition_id=DEFAULT_PARTITION_ID, name=DEFAULT)
    assert refused(case, deletion) == "the default partition is to be kept"
    out = RemoveGpus(partition_id=DEFAULT_PARTITION_ID, name=DEFAULT, guids=(3,))
    assert "nobody was given it" in refused(case, out)


def test_names_and_limits_are_the_controllers(case: Any) -> None:
    case.assign("a", 1).limit(1)
    assert "cannot name" in refused(case, create(DEFAULT, "a", 1))
    assert "recorded for another" in refused(case.owns("rl-b", "b"), create("rl-b", "a", 1))
    case.stands(1, "somebody", 8)
    assert "2 partitions of at most 1" in refused(case, create("rl-a", "a", 1))


def test_what_a_controller_would_refuse_is_refused_here(case: Any) -> None:
    case.assign("a", 1, 2).owns("rl-a", "a").stands(1, "rl-a", 1).stands(2, "taken", 8).absent(7)
    assert "already in partition" in refused(case, AddGpus(partition_id=1, name="rl-a", guids=(1,)))
    for number in (2, 3):
        elsewhere = AddGpus(partition_id=number, name="rl-a", guids=(2,))
        assert refused(case, elsewhere) == f"no partition {number} is named 'rl-a'"
    assert "stands already" in refused(case, create("taken", "a", 2))
    assert "does not list" in refused(case, AddGpus(partition_id=1, name="rl-a", guids=(7,)))
    twice = refused(case, AddGpus(partition_id=1, name="rl-a", guids=(2, 2)))
    assert twice == "an operation names at least one GPU, and each of them once"
    assert "not in partition" in refused(case, RemoveGpus(partition_id=1, name="rl-a", guids=(2,)))
    assert "at least one" in refused(case, RemoveGpus(partition_id=1, name="rl-a", guids=()))


def test_nothing_is_done_in_a_paused_domain(case: Any) -> None:
    case.assign("a", 1).want(paused="switch firmware")
    assert "paused" in refused(case, create("rl-a", "a", 1))
    check_plan(make_plan(case.intent, case.observation), case.intent, case.observation)


def test_the_model_gives_a_new_partition_the_lowest_free_number(case: Any) -> None:
    observed = case.stands(2, "two", 5).observation
    for number in (1, 3):
        observed = apply_operation(observed, create(f"rl-{number}", "a", number))
        assert observed.partitions[-1] == ObservedPartition(
            id=number,
            name=f"rl-{number}",
            members=frozenset((number,)),
            health=PartitionHealth.HEALTHY,
            guid_based=True,
            multicast_groups=0,
        )
