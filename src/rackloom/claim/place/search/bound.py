"""What trays could carry at most, by weight: it tells without a search what is too much for them.

Members of one need weigh the less, the more of them the best tray carries; no tray carries more than its
heaviest load, and no trays together more than all of theirs.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import NamedTuple

from rackloom.claim.place.search.blocks import Wanted
from rackloom.claim.place.search.ground import Ground
from rackloom.claim.place.search.loads import NEEDS, Load, Need, Vacancy, in_order, largest, loads_of

REMEMBERED = 1024
"""Mixtures of trays whose loads are remembered: cliques differ more in how many they have of each."""


class Carried(NamedTuple):
    """What trays carry while some are kept free, by their likeness."""

    loads: Mapping[Vacancy, tuple[Load, ...]]
    """Those to which nobody can be added."""
    heaviest: Mapping[Vacancy, int]
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


def fewest_cliques(ground: Ground, wanted: Wanted) -> int:
    """So many cliques the members take at least: by each need alone, and by what they weigh together."""
    by_need = [
        _how_many([outlook.capacity for outlook in ground.outlooks(need).values()], asked)
        for need, asked in wanted.items()
    ]
    return max(by_need if len(wanted) > NEEDS else [*by_need, _by_weight(ground, wanted)])


def _by_weight(ground: Ground, wanted: Wanted) -> int:
    needs = in_order(wanted)
    cliques = [ground.vacancies(clique, needs) for clique in ground.cliques]
    alike = frozenset([tray for trays in cliques for tray in trays])
    carried = carried_by(alike, frozenset(), needs, tuple([wanted[need] for need in needs]))
    return _how_many([sum([carried.heaviest[tray] for tray in trays]) for trays in cliques], carried.asked)


def _how_many(numbers: Iterable[int], asked: int) -> int:
    """So many of the numbers, the largest ones, make up what is asked; one more where all are too few."""
    return 1 + sum(total < asked for total in accumulate(sorted(numbers, reverse=True)))


def _weighed(loads: Mapping[Vacancy, Sequence[Load]], members: Load) -> tuple[dict[Vacancy, int], int]:
    """The heaviest load of each tray, and what the members weigh."""
    most = [max(column) for column in zip(*(load for some in loads.values() for load in some), strict=True)]
    if not most or not all(most):
        return dict.fromkeys(loads, 0), 1
    weights = [prod(most) // here for here in most]
    heaviest = {one: max((_weight(load, weights) for load in some), default=0) for one, some in loads.items()}
    return heaviest, _weight(members, weights)


def _weight(load: Load, weights: Sequence[int]) -> int:
    return sum([members * weight for members, weight in zip(load, weights, strict=True)])
