"""The claims about a GPU that are allowed while the lists of its controller contradict each other."""

import msgspec

from rackloom.core.partitions.domain import (
    DefaultPartitionPolicy,
    DomainLimits,
    DomainObservation,
    ObservedPartition,
    PartitionHealth,
)
from rackloom.core.partitions.status_rules import DomainFacts, holders, why_not_drained, why_not_released

LISTED, ABSENT, DOUBTFUL = 1, 2, 3
FACTS = DomainFacts(
    observation=DomainObservation(
        domain="d", gpus=(), partitions=(), limits=DomainLimits(), observed_at=10.0
    ),
    doubt="",
    owned={},
    lost=frozenset(),
    blocked={},
    tenant_of={},
    managed=frozenset({LISTED, ABSENT, DOUBTFUL}),
    default_partition=DefaultPartitionPolicy.NONE,
    present=frozenset({LISTED, DOUBTFUL}),
)
CONTRADICTORY = msgspec.structs.replace(FACTS, uncertain=frozenset({DOUBTFUL}))


def test_a_gpu_that_a_contradictory_reading_does_not_list_is_not_released() -> None:
    """It may be in a partition that the list omits."""
    assert why_not_released(ABSENT, None, 5.0, FACTS) is None
    for why_not in (
        why_not_released(ABSENT, None, 5.0, CONTRADICTORY),
        why_not_drained(ABSENT, 5.0, CONTRADICTORY),
    ):
        assert "contradicts itself" in (why_not or "")


def test_a_gpu_that_is_listed_and_not_in_doubt_is_released() -> None:
    assert why_not_released(LISTED, None, 5.0, CONTRADICTORY) is None
    assert why_not_released(DOUBTFUL, None, 5.0, CONTRADICTORY) is not None


def test_a_reason_names_some_of_many_partitions() -> None:
    """A broken controller may list a GPU everywhere, and the reason is stored for each GPU."""
    partitions = tuple(
        ObservedPartition(
            id=number,
            name=f"p{number}",
            members=frozenset({LISTED}),
            health=PartitionHealth.HEALTHY,
            guid_based=True,
            multicast_groups=0,
        )
        for number in range(20_000)
    )
    reading = DomainObservation(
        domain="d", gpus=(), partitions=partitions, limits=DomainLimits(), observed_at=10.0
    )
    facts = msgspec.structs.replace(
        FACTS,
        observation=reading,
        holders=holders(reading),
        owned={partition.name: "lp" for partition in partitions},
    )
    reason = why_not_released(LISTED, None, 5.0, facts)
    assert reason == "the GPU is still in partition p0 and p1 and p2 and p3 and 19996 more"
