"""GPUs about which the lists of a controller contradict each other, and outcomes that are unknown."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.partitions.domain import (
    UNCERTAIN_REASON,
    AddGpus,
    CreatePartition,
    DefaultPartitionPolicy,
    DeletePartition,
    DomainIntent,
    DomainLimits,
    DomainObservation,
    GpuAssignment,
    GpuHealth,
    ObservedGpu,
    ObservedPartition,
    OwnedPartition,
    PartitionHealth,
    RemoveGpus,
    contradicted_gpus,
    is_carried_out,
)
from rackloom.core.partitions.planner import NO_CERTAIN_READING, make_plan
from rackloom.core.partitions.safety import PLAN_AGAIN, check_plan
from rackloom.errors import Refused

GUIDS = range(1, 9)


def partition(number: int, *guids: int) -> ObservedPartition:
    return ObservedPartition(
        id=number,
        name=f"p{number}",
        members=frozenset(guids),
        health=PartitionHealth.HEALTHY,
        guid_based=True,
        multicast_groups=0,
    )


def observed(*partitions: ObservedPartition, uncertain: frozenset[int] = frozenset()) -> DomainObservation:
    gpus = [
        ObservedGpu(
            guid=guid,
            chassis_serial="C",
            slot=guid // 4,
            tray_index=0,
            module_id=guid,
            health=GpuHealth.HEALTHY,
        )
        for guid in GUIDS
    ]
    return DomainObservation(
        domain="d",
        gpus=tuple(gpus),
        partitions=partitions,
        limits=DomainLimits(),
        observed_at=0.0,
        uncertain=uncertain,
    )


holders = st.dictionaries(st.sampled_from(GUIDS), st.integers(1, 4), max_size=8)


@given(holders, holders)
def test_no_certain_gpu_shares_a_partition_with_one_that_is_denied(
    claims: dict[int, int], listed: dict[int, int]
) -> None:
    partitions = [
        partition(number, *(guid for guid, holder in listed.items() if holder == number))
        for number in sorted(set(listed.values()))
    ]
    uncertain = contradicted_gpus(claims, partitions)
    denied = {guid for guid, number in claims.items() if listed.get(guid) != number}
    assert denied <= uncertain
    assert bool(denied) == bool(uncertain)
    for number in range(1, 5):
        together = {guid for guid in GUIDS if number in (claims.get(guid), listed.get(guid))}
        if together & denied:
            assert together <= uncertain


def test_nothing_is_added_while_a_list_contradicts_itself() -> None:
    seen = observed(partition(1, 1, 2), uncertain=frozenset({1, 2}))
    intent = DomainIntent(
        domain="d",
        assignments=(GpuAssignment(guid=5, logical_partition="lp", tenant="t"),),
        owned=(),
        managed=frozenset(GUIDS),
        default_partition=DefaultPartitionPolicy.NONE,
        revision=1,
    )
    plan = make_plan(intent, seen)
    assert plan.operations == ()
    assert {(blocked.guids, blocked.reason) for blocked in plan.blocked} == {
        ((1, 2), UNCERTAIN_REASON),
        ((5,), NO_CERTAIN_READING.reason),
    }
    certain = msgspec.structs.replace(seen, uncertain=frozenset())
    wanted = make_plan(intent, certain)
    assert len(wanted.operations) == 1
    with pytest.raises(Refused, match="contradicts itself about 0x1, 0x2") as refusal:
        check_plan(msgspec.structs.replace(wanted, observation=seen), intent, seen)
    assert refusal.value.nearest_fix == PLAN_AGAIN


def test_gpus_are_removed_where_the_contradiction_does_not_concern_the_partition() -> None:
    intent = DomainIntent(
        domain="d",
        assignments=(),
        owned=tuple(
            OwnedPartition(name=f"p{number}", logical_partition="lp", partition_id=number)
            for number in (1, 2, 3)
        ),
        managed=frozenset(GUIDS),
        default_partition=DefaultPartitionPolicy.NONE,
        revision=1,
    )
    seen = observed(partition(1, 1, 2), partition(2, 5, 6), partition(3), uncertain=frozenset({1, 2}))
    plan = make_plan(intent, seen)
    check_plan(plan, intent, seen)
    assert [(type(step), step.partition_id) for step in plan.operations] == [(DeletePartition, 2)]  # type: ignore[union-attr]
    everything = make_plan(intent, msgspec.structs.replace(seen, uncertain=frozenset()))
    assert len(everything.operations) > 1
    for step in everything.operations:
        alone = msgspec.structs.replace(everything, observation=seen, operations=(step,))
        if step in plan.operations:
            check_plan(alone, intent, seen)
        else:
            with pytest.raises(Refused, match="contradicts itself"):
                check_plan(alone, intent, seen)


@pytest.mark.parametrize(
    ("operation", "before", "after"),
    [
        (CreatePartition(name="p1", logical_partition="lp", guids=(1, 2)), [], [partition(1, 1, 2)]),
        (AddGpus(partition_id=1, name="p1", guids=(2,)), [partition(1, 1)], [partition(1, 1, 2)]),
        (RemoveGpus(partition_id=1, name="p1", guids=(2,)), [partition(1, 1, 2)], [partition(1, 1)]),
        (RemoveGpus(partition_id=1, name="p1", guids=(2,)), [partition(1, 1, 2)], []),
        (DeletePartition(partition_id=1, name="p1"), [partition(1, 1)], []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_observation_shows_whether_an_operation_was_carried_out(
    operation: AddGpus | CreatePartition | DeletePartition | RemoveGpus,
    before: list[ObservedPartition],
    after: list[ObservedPartition],
) -> None:
    assert not is_carried_out(operation, observed(*before))
    assert is_carried_out(operation, observed(*after))
