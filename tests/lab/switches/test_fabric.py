"""The simulated controller's state: never two partitions for a GPU, and the same answers as the model."""

from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from rackloom.core.partitions.domain import (
    DEFAULT_PARTITION_ID,
    AddGpus,
    CreatePartition,
    DeletePartition,
    DomainLimits,
    DomainObservation,
    GpuHealth,
    ObservedGpu,
    ObservedPartition,
    PartitionOperation,
    RemoveGpus,
)
from rackloom.core.partitions.safety import apply_operation
from rackloom.errors import Refused
from rackloom.lab.switches.fabric import (
    FabricGpu,
    FabricLimits,
    FabricPartition,
    FabricRefusal,
    FabricSnapshot,
    SimulatedFabric,
)

DOMAIN = "00000000-0000-4000-8000-00000000d001"
FIRST = 2**63
GUIDS = st.integers(FIRST, FIRST + 7)
STRANGE = st.integers(FIRST, FIRST + 9)
NAMES = st.sampled_from(("one", "two", "three", "Default Partition"))
IDS = st.sampled_from((1, 2, 3, DEFAULT_PARTITION_ID))


def fresh(**limits: int) -> SimulatedFabric:
    gpus = (
        FabricGpu(
            guid=FIRST + number,
            chassis_serial="C",
            chassis_id=0,
            slot=number // 4,
            host_id=number // 4 + 1,
            tray_index=number // 4,
            module_id=number % 4 + 1,
        )
        for number in range(8)
    )
    return SimulatedFabric(DOMAIN, gpus, FabricLimits(**limits))


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(FabricRefusal) as refused:
        action()
    return refused.value.code


class Switch(RuleBasedStateMachine):
    """Any calls in any order, with listeners."""

    def __init__(self) -> None:
        super().__init__()
        self.fabric = fresh(max_partitions=3)
        self.heard: list[FabricSnapshot] = []
        self.fabric.on_change(self.heard.append)

    def attempt(self, action: Callable[[], object]) -> None:
        """A refused call changes nothing. An accepted one is reported once, with the resulting fabric."""
        before, heard = self.fabric.snapshot(), len(self.heard)
        try:
            action()
        except FabricRefusal:
            assert self.fabric.snapshot() == before
            assert len(self.heard) == heard
        else:
            assert self.heard[heard:] == [self.fabric.snapshot()]

    @rule(name=NAMES, guids=st.lists(STRANGE, max_size=4), groups=st.sampled_from((0, 3, 16)))
    def create(self, name: str, guids: list[int], groups: int) -> None:
        self.attempt(lambda: self.fabric.create(name, guids, multicast_groups=groups))

    @rule(number=IDS, name=NAMES | st.just(""))
    def delete(self, number: int, name: str) -> None:
        self.attempt(lambda: self.fabric.delete(number, name))

    @rule(number=IDS, guids=st.lists(STRANGE, max_size=4))
    def add(self, number: int, guids: list[int]) -> None:
        self.attempt(lambda: self.fabric.add(number, guids))

    @rule(number=IDS, guids=st.lists(STRANGE, max_size=4))
    def remove(self, number: int, guids: list[int]) -> None:
        self.attempt(lambda: self.fabric.remove(number, guids))

    @rule(number=st.integers(1, 3), guids=st.sets(GUIDS, max_size=4))
    def another_hand(self, number: int, guids: set[int]) -> None:
        foreign = FabricPartition(id=number, name=f"foreign-{number}", guids=tuple(sorted(guids)))
        self.attempt(lambda: self.fabric.put(foreign))

    @rule()
    def restart(self) -> None:
        kept = msgspec.json.decode(msgspec.json.encode(self.fabric.snapshot()), type=FabricSnapshot)
        again = fresh(max_partitions=3)
        again.restore(kept)
        assert again.snapshot() == self.fabric.snapshot()
        again.on_change(self.heard.append)
        self.fabric = again

    @invariant()
    def a_gpu_is_in_at_most_one_partition(self) -> None:
        held = Counter(guid for partition in self.fabric.partitions.values() for guid in partition.guids)
        assert set(held.values()) <= {1}
        assert held.keys() <= self.fabric.gpus.keys()

    @invariant()
    def names_are_unique(self) -> None:
        names = [partition.name for partition in self.fabric.partitions.values()]
        assert len(names) == len(set(names))


@pytest.mark.slow
def test_any_calls_in_any_order() -> None:
    run_state_machine_as_test(Switch, settings=settings(max_examples=60, stateful_step_count=30))


def observation_of(fabric: SimulatedFabric) -> DomainObservation:
    return DomainObservation(
        domain=fabric.domain,
        gpus=tuple(
            ObservedGpu(
                guid=gpu.guid,
                chassis_serial=gpu.chassis_serial,
                slot=gpu.slot,
                tray_index=gpu.tray_index,
                module_id=gpu.module_id,
                health=gpu.health,
            )
            for gpu in fabric.gpus.values()
        ),
        partitions=tuple(
            ObservedPartition(
                id=partition.id,
                name=partition.name,
                members=frozenset(partition.guids),
                health=partition.health,
                guid_based=partition.guid_based,
                multicast_groups=partition.multicast_groups,
            )
            for partition in fabric.partitions.values()
        ),
        limits=DomainLimits(),
        observed_at=0.0,
    )


def execute(fabric: SimulatedFabric, operation: PartitionOperation) -> None:
    match operation:
        case CreatePartition():
            fabric.create(operation.name, operation.guids)
        case DeletePartition():
            fabric.delete(operation.partition_id, operation.name)
        case AddGpus():
            fabric.add(operation.partition_id, operation.guids, operation.name)
        case RemoveGpus():
            fabric.remove(operation.partition_id, operation.guids, operation.name)


_some_guids = st.lists(STRANGE, max_size=3).map(tuple)
_names = st.sampled_from(("one", "two"))
_ids = st.integers(1, 3)
OPERATIONS = st.one_of(
    st.builds(CreatePartition, name=_names, logical_partition=st.just("a"), guids=_some_guids),
    st.builds(DeletePartition, partition_id=_ids, name=_names),
    st.builds(AddGpus, partition_id=_ids, name=_names, guids=_some_guids),
    st.builds(RemoveGpus, partition_id=_ids, name=_names, guids=_some_guids),
)


@given(st.lists(OPERATIONS, max_size=12))
def test_the_planners_model_agrees_with_the_simulated_controller(
    operations: list[PartitionOperation],
) -> None:
    fabric = fresh()
    fabric.delete(DEFAULT_PARTITION_ID)
    model = observation_of(fabric)
    for operation in operations:
        try:
            model = apply_operation(model, operation)
        except Refused:
            # Only the model refuses a removal that names the same GPU twice.
            if isinstance(operation, RemoveGpus) and len(set(operation.guids)) < len(operation.guids):
                continue
            refusal(lambda operation=operation: execute(fabric, operation))
        else:
            execute(fabric, operation)
        assert model.facts == observation_of(fabric).facts


def test_first_boot_has_one_partition_with_everything_in_it() -> None:
    fabric = fresh()
    (only,) = fabric.snapshot().partitions
    assert (only.id, only.name, only.guids) == (32766, "Default Partition", tuple(range(FIRST, FIRST + 8)))
    assert only.multicast_groups == fabric.limits.max_multicast_groups


def test_each_refusal_has_its_code() -> None:
    fabric = fresh(max_partitions=3, max_multicast_groups=16)
    assert refusal(lambda: fabric.create("a", [FIRST])) == "RESOURCE_IN_USE"
    fabric.delete(DEFAULT_PARTITION_ID)
    assert fabric.create("a", [FIRST], multicast_groups=16) == 1
    assert refusal(lambda: fabric.create("a", [FIRST + 1])) == "PARTITION_NAME_IN_USE"
    assert refusal(lambda: fabric.create("b", [FIRST + 1], multicast_groups=4)) == "RESOURCE_EXHAUSTED"
    assert refusal(lambda: fabric.create("b", [FIRST + 1], multicast_groups=3)) == "BADPARAM"
    assert refusal(lambda: fabric.create("b", [FIRST + 1], partition_id=1)) == "PARTITION_ID_IN_USE"
    assert refusal(lambda: fabric.create("b", [FIRST + 1], partition_id=32766)) == "BADPARAM"
    assert refusal(lambda: fabric.create("b", [])) == "BADPARAM"
    assert refusal(lambda: fabric.create("b", [5])) == "RESOURCE_BAD"
    assert refusal(lambda: fabric.create("b" * 256, [FIRST + 1])) == "BADPARAM"
    assert refusal(lambda: fabric.create("é", [FIRST + 1])) == "BADPARAM"
    assert refusal(lambda: fabric.add(2, [FIRST + 1])) == "PARTITION_ID_NOT_IN_USE"
    assert refusal(lambda: fabric.add(0, [FIRST + 1], "b")) == "PARTITION_NAME_NOT_IN_USE"
    assert refusal(lambda: fabric.add(1, [FIRST + 1], "b")) == "PARTITION_ID_NAME_MISMATCH"
    assert refusal(lambda: fabric.add(1, [FIRST])) == "RESOURCE_IN_USE"
    assert refusal(lambda: fabric.remove(1, [FIRST + 1])) == "RESOURCE_NOT_IN_USE"
    fabric.put(FabricPartition(id=9, name="by-seat", guids=(FIRST + 2,), guid_based=False))
    assert refusal(lambda: fabric.add(9, [FIRST + 1])) == "BADPARAM"
    assert fabric.create("b", [FIRST + 1]) == 2
    assert refusal(lambda: fabric.create("c", [FIRST + 3])) == "RESOURCE_EXHAUSTED"


def test_a_partition_can_be_found_by_name_alone() -> None:
    fabric = fresh()
    assert fabric.delete(0, "Default Partition") == DEFAULT_PARTITION_ID


def test_pulled_trays_come_back_where_they_were() -> None:
    fabric = fresh()
    away = [fabric.gpus[FIRST], fabric.gpus[FIRST + 1]]
    fabric.remove_gpus([gpu.guid for gpu in away])
    assert FIRST not in fabric.gpus
    assert fabric.partition_of(FIRST) == DEFAULT_PARTITION_ID
    fabric.insert_gpus(away)
    assert fabric.snapshot() == fresh().snapshot()


def test_health_survives_a_restart() -> None:
    fabric = fresh()
    fabric.set_health(FIRST, GpuHealth.NO_NVLINK)
    again = fresh()
    again.restore(fabric.snapshot())
    assert again.gpus[FIRST].health is GpuHealth.NO_NVLINK


def test_a_factory_reset_forgets_all_partitions() -> None:
    fabric = fresh()
    fabric.delete(DEFAULT_PARTITION_ID)
    fabric.create("a", [FIRST])
    fabric.factory_reset()
    assert fabric.snapshot() == fresh().snapshot()


def test_a_snapshot_of_another_domain_is_refused() -> None:
    other = msgspec.structs.replace(fresh().snapshot(), domain="another")
    with pytest.raises(Refused, match="another"):
        fresh().restore(other)
