"""A reading that is in doubt is repeated, and the most complete one is kept."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from rackloom.carve.fabric.controller import FabricUnavailable, read_again_in_doubt
from rackloom.core.partitions.domain import DomainLimits, DomainObservation
from rackloom.lab.virtual.event_loop import run_simulation

CERTAIN = DomainObservation(domain="d", gpus=(), partitions=(), limits=DomainLimits(), observed_at=1.0)
DOUBTFUL = msgspec.structs.replace(CERTAIN, uncertain=frozenset({1}))
LOST = FabricUnavailable("no answer")


class Driver:
    """Gives these results, one after another."""

    def __init__(self, *results: DomainObservation | FabricUnavailable) -> None:
        self.results: Iterator[Any] = iter(results)

    async def observe(self) -> DomainObservation:
        result = next(self.results)
        if isinstance(result, FabricUnavailable):
            raise result
        return result


def read(*results: DomainObservation | FabricUnavailable) -> DomainObservation:
    return run_simulation(1, lambda: read_again_in_doubt(Driver(*results)))  # type: ignore[arg-type]


@pytest.mark.parametrize("first", [DOUBTFUL, LOST])
def test_a_certain_reading_ends_the_attempts(first: Any) -> None:
    assert read(CERTAIN) is CERTAIN
    assert read(first, CERTAIN) is CERTAIN
    assert read(first, first, CERTAIN) is CERTAIN


@pytest.mark.parametrize("results", [(DOUBTFUL, LOST, LOST), (LOST, DOUBTFUL, LOST), (LOST, LOST, DOUBTFUL)])
def test_a_doubtful_reading_is_more_than_none(results: Any) -> None:
    assert read(*results) is DOUBTFUL


def test_a_controller_that_never_answers_is_lost() -> None:
    with pytest.raises(FabricUnavailable, match="no answer"):
        read(LOST, LOST, LOST)
