"""The number of multicast groups in use in a domain, and the cases in which it is unknown."""

import msgspec
import pytest

from rackloom.core.partitions.domain import (
    DomainLimits,
    DomainObservation,
    ObservedPartition,
    PartitionHealth,
)

EMPTY = DomainObservation(domain="d", gpus=(), partitions=(), limits=DomainLimits(), observed_at=1.0)


def partition(number: int, groups: int) -> ObservedPartition:
    return ObservedPartition(
        id=number,
        name=f"p{number}",
        members=frozenset(),
        health=PartitionHealth.HEALTHY,
        guid_based=True,
        multicast_groups=groups,
    )


@pytest.mark.parametrize(
    ("limit", "free", "held", "used"),
    [
        (1024, 1024, (), 0),
        (1024, 992, (16, 16), 32),
        # The controller knows of groups that no listed partition has.
        (1024, 1000, (16,), 24),
        (1024, 0, (1008, 16), 1024),
        # 0 also stands for an unreported number, and the partitions contradict it.
        (1024, 0, (16,), None),
        (1024, 0, (), None),
        (1024, None, (16,), None),
        (None, 1000, (16,), None),
        (16, 1024, (), None),
    ],
)
def test_used_groups_are_known_or_not(
    limit: int | None, free: int | None, held: tuple[int, ...], used: int | None
) -> None:
    observation = msgspec.structs.replace(
        EMPTY,
        limits=DomainLimits(max_multicast_groups=limit, free_multicast_groups=free),
        partitions=tuple(partition(number, groups) for number, groups in enumerate(held, start=1)),
    )
    assert observation.used_multicast_groups == used
