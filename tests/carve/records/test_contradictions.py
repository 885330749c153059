"""The differences between two readings, in words, and those that don't count."""

import msgspec
import pytest

from rackloom.carve.observation.conflicts import ControllerReading, compare_readings
from rackloom.core.partitions.domain import (
    DomainLimits,
    DomainObservation,
    GpuHealth,
    ObservedGpu,
    ObservedPartition,
    PartitionHealth,
)

SAID = "switch controllers a and b contradict one another: "
ONE_EACH = "partition 1 has 1 and 1 members"


def partition(number: int, *members: int, name: str = "p") -> ObservedPartition:
    return ObservedPartition(
        id=number,
        name=name,
        members=frozenset(members),
        health=PartitionHealth.HEALTHY,
        guid_based=True,
        multicast_groups=0,
    )


def shown(*partitions: ObservedPartition, gpus: int = 4, at: float = 10.0) -> DomainObservation:
    return DomainObservation(
        domain="d",
        gpus=tuple(
            ObservedGpu(
                guid=guid,
                chassis_serial="C",
                slot=0,
                tray_index=0,
                module_id=guid,
                health=GpuHealth.HEALTHY,
            )
            for guid in range(1, gpus + 1)
        ),
        partitions=partitions,
        limits=DomainLimits(),
        observed_at=at,
    )


def between(first: DomainObservation, second: DomainObservation, changed_at: float = 0.0) -> str | None:
    return compare_readings(ControllerReading("a", first), ControllerReading("b", second), changed_at)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (shown(gpus=4), shown(gpus=1), "only a lists 3 of the GPUs"),
        (shown(gpus=2), shown(gpus=3), "only b lists 1 of the GPUs"),
        (shown(partition(1, 1)), shown(), "partition 1 has 1 and 0 members"),
        (shown(partition(1, 1)), shown(partition(1, 1, 2)), "partition 1 has 1 and 2 members"),
        (shown(partition(1, 1)), shown(partition(1, 2)), f"{ONE_EACH}, of which some differ"),
        (shown(partition(1, 1)), shown(partition(1, 1, name="q")), f"{ONE_EACH} and two names"),
        (
            shown(*(partition(number) for number in range(1, 6)), gpus=1),
            shown(gpus=1),
            "; ".join(f"partition {number} has 0 and 0 members" for number in (1, 2, 3))
            + "; 2 more partitions differ",
        ),
    ],
)  # fmt: skip
def test_it_is_told_who_shows_what(first: DomainObservation, second: DomainObservation, reason: str) -> None:
    assert between(first, second) == SAID + reason


def test_measurements_and_order_are_no_difference() -> None:
    first = shown(partition(1, 1), partition(2, 2))
    gpus = tuple(msgspec.structs.replace(gpu, health=GpuHealth.DEGRADED) for gpu in reversed(first.gpus))
    sick = tuple(
        msgspec.structs.replace(part, health=PartitionHealth.UNHEALTHY, multicast_groups=7)
        for part in reversed(first.partitions)
    )
    other = msgspec.structs.replace(
        first, gpus=gpus, partitions=sick, limits=DomainLimits(max_partitions=1), observed_at=11.0
    )
    assert between(first, other) is None


@pytest.mark.parametrize("at", [(9.0, 12.0), (12.0, 9.0), (9.0, 9.0)])
def test_partitions_are_compared_after_the_last_change_and_hardware_always(at: tuple[float, float]) -> None:
    first, other = shown(partition(1, 1), at=at[0]), shown(at=at[1])
    assert between(first, other, changed_at=10.0) is None
    assert between(first, other, changed_at=8.0) is not None
    assert between(first, shown(gpus=1, at=at[1]), changed_at=10.0) == SAID + "only a lists 3 of the GPUs"


def test_one_that_lists_no_gpu_contradicts_nobody() -> None:
    first, other = shown(partition(1, 1)), shown(gpus=0)
    assert between(first, other) is None
    assert between(other, first) is None
