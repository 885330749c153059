"""Properties of every domain, however strange: safety at each instant, convergence, determinism."""

import random
from collections import Counter
from collections.abc import Iterator

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    AddGpus,
    CreatePartition,
    DefaultPartitionPolicy,
    DomainIntent,
    DomainLimits,
    DomainObservation,
    GpuAssignment,
    GpuHealth,
    ObservedGpu,
    ObservedPartition,
    OwnedPartition,
    PartitionHealth,
    tray_partition_of,
)
from rackloom.core.partitions.planner import make_plan, partition_name
from rackloom.core.partitions.safety import apply_operation, check_plan

DOMAIN = "00000000-0000-4000-8000-00000000d001"
LOGICAL = ("lp0", "lp1", "lp2", "lp3")
TRAYS = ("tray-C-0", "tray-C-1", "tray-gone-7")
MAX_ROUNDS = 4
"""Removals, additions, the round that finds nothing to do, and a spare one."""

World = tuple[DomainIntent, DomainObservation]


@st.composite
def worlds(draw: st.DrawFn) -> World:
    guids = draw(st.lists(st.integers(1, 2**64 - 1), min_size=1, max_size=14, unique=True))
    present = draw(st.sets(st.sampled_from(guids)))
    tenants = draw(st.lists(st.sampled_from(("t0", "t1", "t2")), min_size=4, max_size=4))
    assignments = [
        GpuAssignment(guid=guid, logical_partition=LOGICAL[index], tenant=tenants[index])
        for guid, index in draw(
            st.dictionaries(st.sampled_from(guids), st.integers(0, 3), max_size=14)
        ).items()
    ]
    if draw(st.integers(0, 9)) == 0:
        assignments.append(GpuAssignment(guid=guids[0], logical_partition="lp0", tenant="t-other"))
    owned = draw(_owned())
    observation = DomainObservation(
        domain=DOMAIN,
        gpus=tuple(_gpu(guid, draw(_health), draw(st.integers(0, 2))) for guid in guids if guid in present),
        partitions=draw(_partitions(guids, [partition.name for partition in owned])),
        limits=DomainLimits(max_partitions=draw(st.none() | st.integers(0, 9))),
        observed_at=0.0,
    )
    intent = DomainIntent(
        domain=DOMAIN,
        assignments=tuple(assignments),
        owned=owned,
        managed=frozenset(guids) - draw(st.sets(st.sampled_from(guids), max_size=2)),
        default_partition=draw(st.sampled_from(DefaultPartitionPolicy)),
        revision=1,
    )
    return intent, observation


_health = st.sampled_from([GpuHealth.HEALTHY] * 6 + list(GpuHealth))


@st.composite
def _owned(draw: st.DrawFn) -> tuple[OwnedPartition, ...]:
    names = [*(partition_name(owner) for owner in (*LOGICAL, *TRAYS)), "older", "adopted"]
    chosen = draw(st.dictionaries(st.sampled_from(names), st.sampled_from(LOGICAL), max_size=4))
    return tuple(
        OwnedPartition(
            name=name,
            logical_partition=name.removeprefix("rl-") if name.startswith("rl-") else logical,
            partition_id=draw(st.none() | st.integers(1, 9)),
        )
        for name, logical in chosen.items()
    )


@st.composite
def _partitions(draw: st.DrawFn, guids: list[int], owned: list[str]) -> tuple[ObservedPartition, ...]:
    """Up to five partitions, ours, others' and the default one, with every GPU in at most one of them."""
    places = draw(st.lists(st.integers(0, 5), min_size=len(guids), max_size=len(guids)))
    names = st.sampled_from([*owned, *owned, *owned, "foreign", "rl-lp3"])
    made = [
        ObservedPartition(
            id=number,
            name=draw(names),
            members=frozenset(guid for guid, place in zip(guids, places, strict=True) if place == number),
            health=PartitionHealth.HEALTHY,
            guid_based=draw(st.sampled_from((True, True, True, False))),
            multicast_groups=0,
        )
        for number in range(1, 1 + draw(st.integers(0, 4)))
    ]
    if draw(st.booleans()):
        inside = frozenset(guid for guid, place in zip(guids, places, strict=True) if place == 5)
        made.append(
            msgspec.structs.replace(_EMPTY_DEFAULT, members=inside),
        )
    return tuple(made)


_EMPTY_DEFAULT = ObservedPartition(
    id=DEFAULT_PARTITION_ID,
    name="Default Partition",
    members=frozenset(),
    health=PartitionHealth.HEALTHY,
    guid_based=True,
    multicast_groups=0,
)


def _gpu(guid: int, health: GpuHealth, slot: int) -> ObservedGpu:
    return ObservedGpu(guid=guid, chassis_serial="C", slot=slot, tray_index=slot, module_id=1, health=health)


def play(world: World) -> Iterator[tuple[DomainIntent, DomainObservation, frozenset[str]]]:
    """The world after every single operation of a reconciler, and the names of partitions it changed.

    Names are recorded before they are requested, as the reconciler does. Ends at the fixpoint.
    """
    intent, observation = world
    changed: frozenset[str] = frozenset()
    for _ in range(MAX_ROUNDS):
        plan = make_plan(intent, observation)
        check_plan(plan, intent, observation)
        if not plan.operations:
            return
        for operation in plan.operations:
            if isinstance(operation, CreatePartition):
                intent = _recorded(intent, operation)
            observation = apply_operation(observation, operation)
            if isinstance(operation, CreatePartition | AddGpus):
                changed |= {operation.name}
            yield intent, observation, changed
    raise AssertionError(f"no fixpoint after {MAX_ROUNDS} rounds")


def _recorded(intent: DomainIntent, operation: CreatePartition) -> DomainIntent:
    if any(partition.name == operation.name for partition in intent.owned):
        return intent
    mine = OwnedPartition(
        name=operation.name, logical_partition=operation.logical_partition, partition_id=None
    )
    return msgspec.structs.replace(intent, owned=(*intent.owned, mine), revision=intent.revision + 1)


def last(world: World) -> World:
    steps = [world, *((intent, observation) for intent, observation, _ in play(world))]
    return steps[-1]


@given(worlds())
def test_s1_a_gpu_is_in_at_most_one_partition(world: World) -> None:
    for _, observation, _ in play(world):
        held = Counter(guid for partition in observation.partitions for guid in partition.members)
        assert not [guid for guid, times in held.items() if times > 1]


@given(worlds())
def test_s2_a_partition_that_we_filled_has_gpus_of_one_tenant_and_nobody_else(world: World) -> None:
    tenant_of = {assignment.guid: assignment.tenant for assignment in world[0].assignments}
    slots = {gpu.guid: gpu.slot for gpu in world[1].gpus}
    for _, observation, changed in play(world):
        for partition in observation.partitions:
            if partition.id == DEFAULT_PARTITION_ID:
                if partition.name in changed:
                    assert not partition.members & tenant_of.keys()
            elif partition.name in changed and partition.name.startswith("rl-tray-"):
                assert not partition.members & tenant_of.keys()
                assert len({slots[guid] for guid in partition.members}) == 1
            elif partition.name in changed and partition.guid_based:
                assert len({tenant_of.get(guid) for guid in partition.members} - {None}) == 1
                assert partition.members <= tenant_of.keys()


@given(worlds())
def test_s4_what_is_not_ours_stays_as_it_was(world: World) -> None:
    intent, before = world
    recorded = {partition.name for partition in intent.owned}
    foreign = {
        partition.id: partition
        for partition in before.partitions
        if partition.id != DEFAULT_PARTITION_ID
        and (partition.name not in recorded or not partition.guid_based)
    }
    # A member of our partition that the controller does not list is a name without hardware.
    listed = {gpu.guid: tray_partition_of(gpu) for gpu in before.gpus}
    # A partition that the site made for a tray goes with the machine of the tray.
    owner_of = {owned.name: owned.logical_partition for owned in intent.owned}
    unmanaged = {
        guid: partition.id
        for partition in before.partitions
        for guid in partition.members
        if guid not in intent.managed
        and (
            partition.name not in recorded
            or listed.get(guid, owner_of[partition.name]) != owner_of[partition.name]
        )
    }
    for _, observation, _ in play(world):
        standing = {partition.id: partition for partition in observation.partitions}
        assert all(standing.get(number) == members for number, members in foreign.items())
        assert all(guid in standing[number].members for guid, number in unmanaged.items())


@given(worlds())
def test_a_plan_removes_or_adds_and_what_it_says_is_blocked_is_not_touched(world: World) -> None:
    intent, observation = world
    for _ in range(MAX_ROUNDS):
        plan = make_plan(intent, observation)
        directions = {isinstance(operation, CreatePartition | AddGpus) for operation in plan.operations}
        assert len(directions) <= 1
        added = {
            guid
            for operation in plan.operations
            if isinstance(operation, CreatePartition | AddGpus)
            for guid in operation.guids
        }
        assert not added & {guid for blocked in plan.blocked for guid in blocked.guids}
        for operation in plan.operations:
            if isinstance(operation, CreatePartition):
                intent = _recorded(intent, operation)
            observation = apply_operation(observation, operation)


@given(worlds())
def test_every_wish_ends_served_or_explained(world: World) -> None:
    intent, observation = last(world)
    plan = make_plan(intent, observation)
    explained = {guid for blocked in plan.blocked for guid in blocked.guids}
    owner = {partition.name: partition.logical_partition for partition in intent.owned}
    at = {
        guid: owner.get(partition.name) for partition in observation.partitions for guid in partition.members
    }
    for assignment in intent.assignments:
        assert at.get(assignment.guid) == assignment.logical_partition or assignment.guid in explained
    for blocked in plan.blocked:
        assert blocked.reason
        assert blocked.guids


@given(worlds())
def test_what_nobody_was_given_ends_in_no_partition_of_a_tenant(world: World) -> None:
    intent, observation = last(world)
    given_away = {assignment.guid for assignment in intent.assignments}
    recorded = {partition.name for partition in intent.owned}
    keep = intent.default_partition is DefaultPartitionPolicy.KEEP
    trays = intent.default_partition is DefaultPartitionPolicy.TRAY
    for partition in observation.partitions:
        idle = partition.members & intent.managed - given_away
        if partition.id == DEFAULT_PARTITION_ID:
            assert keep or partition.members - intent.managed, (
                "only GPUs of others hold the default partition"
            )
            assert not partition.members & intent.managed & (given_away if keep else intent.managed)
        elif partition.name in recorded and partition.guid_based:
            assert not idle or (trays and partition.name.startswith("rl-tray-"))


@given(worlds())
def test_with_room_every_free_gpu_ends_with_its_tray(world: World) -> None:
    intent, observation = world
    intent = msgspec.structs.replace(intent, default_partition=DefaultPartitionPolicy.TRAY)
    intent, observation = last((intent, msgspec.structs.replace(observation, limits=DomainLimits())))
    given_away = {assignment.guid for assignment in intent.assignments}
    owner = {partition.name: partition.logical_partition for partition in intent.owned}
    at = {guid: partition for partition in observation.partitions for guid in partition.members}
    names = {partition.name for partition in observation.partitions}
    for gpu in observation.gpus:
        tray = f"tray-C-{gpu.slot}"
        if gpu.guid in given_away or gpu.guid not in intent.managed or gpu.health is GpuHealth.NO_NVLINK:
            continue
        holder = at.get(gpu.guid)
        if holder is None:
            # A foreign partition has its name, or the partition holds GPUs that may not be moved.
            assert f"rl-{tray}" in names
        elif holder.guid_based and holder.name in owner:
            assert owner[holder.name] == tray


@given(worlds(), st.randoms(use_true_random=False))
def test_the_order_of_the_inputs_does_not_matter(world: World, shuffled: random.Random) -> None:
    intent, observation = world
    again = msgspec.structs.replace(
        intent,
        assignments=tuple(shuffled.sample(intent.assignments, len(intent.assignments))),
        owned=tuple(shuffled.sample(intent.owned, len(intent.owned))),
    )
    seen = msgspec.structs.replace(
        observation,
        gpus=tuple(shuffled.sample(observation.gpus, len(observation.gpus))),
        partitions=tuple(shuffled.sample(observation.partitions, len(observation.partitions))),
        observed_at=7.0,
    )
    plan, other = make_plan(intent, observation), make_plan(again, seen)
    assert (plan.operations, plan.blocked) == (other.operations, other.blocked)
    check_plan(plan, again, seen)


@given(worlds())
@settings(max_examples=50)
def test_the_fixpoint_needs_nothing(world: World) -> None:
    intent, observation = last(world)
    assert make_plan(intent, observation).operations == ()
