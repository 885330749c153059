"""GPUs about which the lists of a controller contradict each other, and outcomes that are unknown."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.carve.fabric.controller import contradicted_gpus
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


def observed(
    *partitions: ObservedPartition,
    uncertain: frozenset[int] = frozenset(),
    no_nvlink: frozenset[int] = frozenset(),
) -> DomainObservation:
    gpus = [
        ObservedGpu(
            guid=guid,
            chassis_serial="C",
            slot=guid // 4,
            tray_index=0,
            module_id=guid,
            health=GpuHealth.NO_NVLINK if guid in no_nvlink else GpuHealth.HEALTHY,
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


def test_a_gpu_that_two_partitions_list_is_uncertain_with_all_that_they_hold() -> None:
    partitions = [partition(1, 1, 2), partition(2, 2, 3), partition(3, 4)]
    assert contradicted_gpus({1: 1, 2: 1, 3: 2, 4: 3, 5: 0}, partitions) == {1, 2, 3}
    assert contradicted_gpus({}, partitions) == {1, 2, 3}


def wanting(assignments: dict[int, str], *owned: tuple[int, str], policy: str = "none") -> DomainIntent:
    """An intent of GPUs -> logical partitions that want them. `owned` has the numbers of their partitions."""
    return DomainIntent(
        domain="d",
        assignments=tuple(
            GpuAssignment(guid=guid, logical_partition=name, tenant=f"tenant of {name}")
            for guid, name in assignments.items()
        ),
        owned=tuple(
            OwnedPartition(name=f"p{number}", logical_partition=name, partition_id=number)
            for number, name in owned
        ),
        managed=frozenset(GUIDS),
        default_partition=DefaultPartitionPolicy(policy),
        revision=1,
    )


def test_a_contradiction_stops_no_other_tenant() -> None:
    """This holds even while the contradicted partition has GPUs to lose, which wait too."""
    seen = observed(partition(1, 1, 2), partition(2, 3), uncertain=frozenset({1, 2}))
    intent = wanting({1: "doubtful", 3: "other", 4: "other", 5: "new"}, (1, "doubtful"), (2, "other"))
    plan = make_plan(intent, seen)
    check_plan(plan, intent, seen)
    assert plan.operations == (
        CreatePartition(name="rl-new", logical_partition="new", guids=(5,)),
        AddGpus(partition_id=2, name="p2", guids=(4,)),
    )
    assert [(blocked.guids, blocked.reason) for blocked in plan.blocked] == [((1, 2), UNCERTAIN_REASON)]


def test_what_may_share_memory_with_an_uncertain_gpu_waits() -> None:
    """It joins no affected partition, no partition without members, and no new one that may already exist."""
    seen = observed(partition(1, 1, 2), partition(2), uncertain=frozenset({1, 2, 3}))
    intent = wanting(
        {1: "doubtful", 2: "doubtful", 4: "doubtful", 5: "empty", 3: "hidden", 6: "hidden"},
        (1, "doubtful"),
        (2, "empty"),
    )
    plan = make_plan(intent, seen)
    assert plan.operations == ()
    assert {(blocked.guids, blocked.reason) for blocked in plan.blocked} == {
        ((1, 2, 3), UNCERTAIN_REASON),
        ((4, 5, 6), NO_CERTAIN_READING.reason),
    }
    certain = msgspec.structs.replace(seen, uncertain=frozenset())
    for guids in ({1: "doubtful", 4: "doubtful"}, {5: "empty"}, {3: "hidden", 6: "hidden"}):
        part = wanting({2: "doubtful", **guids}, (1, "doubtful"), (2, "empty"))
        wanted = make_plan(part, certain)
        for step in wanted.operations:
            alone = msgspec.structs.replace(wanted, observation=seen, operations=(step,))
            with pytest.raises(Refused, match="contradicts itself about 0x1, 0x2, 0x3") as refusal:
                check_plan(alone, part, seen)
            assert refusal.value.nearest_fix == PLAN_AGAIN


@given(
    st.dictionaries(st.sampled_from(GUIDS), st.sampled_from(["a", "b", "c"]), max_size=8),
    st.dictionaries(st.sampled_from(GUIDS), st.integers(1, 3), max_size=8),
    st.dictionaries(st.sampled_from(GUIDS), st.integers(1, 4), max_size=8),
    st.sampled_from(["none", "tray", "keep"]),
    st.frozensets(st.sampled_from(GUIDS)),
    st.frozensets(st.integers(1, 3)),
)
def test_a_plan_is_safe_and_leaves_every_uncertain_gpu_alone(
    assignments: dict[int, str],
    listed: dict[int, int],
    claims: dict[int, int],
    policy: str,
    no_nvlink: frozenset[int],
    foreign: frozenset[int],
) -> None:
    partitions = [
        partition(number, *(guid for guid, holder in listed.items() if holder == number))
        for number in (1, 2, 3)
    ]
    uncertain = contradicted_gpus(claims, partitions)
    seen = observed(*partitions, uncertain=uncertain, no_nvlink=no_nvlink)
    ours = [(1, "a"), (2, "b"), (3, "tray-C-0")]
    intent = wanting(assignments, *(own for own in ours if own[0] not in foreign), policy=policy)
    plan = make_plan(intent, seen)
    check_plan(plan, intent, seen)
    members = {held.id: held.members for held in partitions}
    for step in plan.operations:
        if not isinstance(step, CreatePartition):
            assert members[step.partition_id].isdisjoint(uncertain)
        if not isinstance(step, DeletePartition):
            assert uncertain.isdisjoint(step.guids)


@pytest.mark.parametrize(
    ("partitions", "no_nvlink"),
    [((), frozenset({1})), ((partition(7, 1),), frozenset())],
    ids=["without NVLink", "in a foreign partition"],
)
def test_a_tray_with_an_uncertain_gpu_that_cannot_join_stops_no_tenant(
    partitions: tuple[ObservedPartition, ...], no_nvlink: frozenset[int]
) -> None:
    """GPUs 1 to 3 are in one tray. Its partition waits, and the others are made."""
    seen = observed(*partitions, uncertain=frozenset({1}), no_nvlink=no_nvlink)
    intent = wanting({4: "lp"}, policy="tray")
    plan = make_plan(intent, seen)
    check_plan(plan, intent, seen)
    made = [step.logical_partition for step in plan.operations if isinstance(step, CreatePartition)]
    assert made == ["lp", "tray-C-1", "tray-C-2"]
    waiting = [blocked.guids for blocked in plan.blocked if blocked.reason == NO_CERTAIN_READING.reason]
    assert waiting == [(2, 3)]


def test_gpus_are_removed_where_the_contradiction_does_not_concern_the_partition() -> None:
    intent = wanting({}, (1, "lp"), (2, "lp"), (3, "lp"))
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
