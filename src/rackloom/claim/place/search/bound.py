"""What trays could carry at most, by weight: it tells without a search what is too much for them.

Members of one need weigh the less, the more of them the best tray carries; no tray carries more than its
heaviest load, and no trays together more than all of theirs.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from rackloom.claim.place.search.loads import Load, Need, Vacancy, largest, loads_of

REMEMBERED = 1024
"""Mixtures of trays whose loads are remembered: cliques differ more in how many they have of each."""


class Carried(NamedTuple):
    """What trays carry while some are kept free, by their likeness."""

    loads: Mapping[Vacancy, tuple[Load, ...]]
    """Those to which nobody can be added."""
    heaviest: Mapping[Vacancy, int]
    weights: Load
    """Of one member of each need."""
    asked: int
    """What all members weigh."""

    def could_be(self, trays: Iterable[Vacancy]) -> bool:
        """False where the members are too many for the trays."""
        return sum([self.heaviest[tray] for tray in trays]) >= self.asked


@lru_cache(REMEMBERED)
def carried_by(
    trays: frozenset[Vacancy], kept: frozenset[Vacancy], needs: tuple[Need, ...], members: Load
) -> Carried:
    """Only loads that each of the trays `kept` can take over."""
    spared = [loads_of(vacancy, needs, members) for vacancy in kept]
    loads = {vacancy: largest(loads_of(vacancy, needs, members).intersection(*spared)) for vacancy in trays}
    return Carried(loads, *_weighed(loads, members))


def _weighed(loads: Mapping[Vacancy, Sequence[Load]], members: Load) -> tuple[dict[Vacancy, int], Load, int]:
    """The heaviest load of each tray, what one member of each need weighs, and what all members do."""
    most = [max(column) for column in zip(*(load for some in loads.values() for load in some), strict=True)]
    if not most or not all(most):
        return dict.fromkeys(loads, 0), (1,) * len(members), 1
    weights = tuple([prod(most) // here for here in most])
    heaviest = {one: max((_weight(load, weights) for load in some), default=0) for one, some in loads.items()}
    return heaviest, weights, _weight(members, weights)


def _weight(load: Load, weights: Sequence[int]) -> int:
    return sum([members * weight for members, weight in zip(load, weights, strict=True)])
