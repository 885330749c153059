"""Assign unlike members to the trays of one clique jointly, opening as few empty trays as possible.

Unlike members compete for trays: assigned group after group, the first may take the only tray that the
second can use. `solve_jointly` therefore searches all ways by dynamic programming over the trays. A state
is the number of empty trays used and of members assigned per need, the last need excepted, of which each
state keeps the most. With spares, every choice of spare trays that differs is tried (200 at most); a
spare must be able to take over the load of any tray that is used.

Before the search, a weight bound (`CarryBound`) rejects what cannot fit: members of a need weigh less,
the more of them the best tray carries, and no set of trays carries more than the sum of its heaviest
loads.

Only maximal loads are tried. The search of one clique gives up after 200,000 steps; the answer then has
no loads. All searches for one gang, those for its fixes included, share a `SearchBudget`, counted in
steps and dead ends instead of seconds, so that answers do not depend on the machine. Answers are cached
per process; a remembered answer costs the same budget as a new one.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from math import prod
from operator import add
from typing import NamedTuple

from rackloom.core.place.search.site_capacity import (
    MAX_NEEDS,
    MemberNeed,
    TrayLoad,
    TrayVacancy,
    maximal_loads,
    tray_loads,
)

# The budget of all searches for one gang.


MAX_GANG_STEPS = 1_000_000
"""Loads of a tray that are tried on a state: some seconds."""
MAX_GANG_DEAD_ENDS = 20_000
"""Cliques in use when a choice of them led nowhere, beyond the dead ends that each search has for itself:
about as long with few cliques as with many."""
MIN_CLIQUES_CHARGED = 10
"""Fewer cliques than these count as so many: what else a dead end costs does not depend on them."""


class SearchBudget:
    """What is left of it. Whoever plans a gang makes one, and hands it to all that search for it."""

    def __init__(self, steps: int = MAX_GANG_STEPS, dead_ends: int = MAX_GANG_DEAD_ENDS) -> None:
        self._left = steps
        self._dead_ends = dead_ends
        self._paid: set[Hashable] = set()

    def allows(self, question: Hashable) -> bool:
        """Whether the answer may be looked for: it was paid for before, or something is left."""
        return question in self._paid or self._left > 0

    def pay(self, question: Hashable, steps: int) -> None:
        """Take what the answer cost; nothing the second time, whoever remembered it."""
        if question not in self._paid:
            self._paid.add(question)
            self._left -= steps

    def bears_dead_end(self, cliques: int) -> bool:
        """Whether one more is left with so many cliques in use; it is taken."""
        self._dead_ends -= max(MIN_CLIQUES_CHARGED, cliques)
        return self._dead_ends >= 0


# The weight bound.


CACHED_BOUNDS = 1024
"""Mixtures of trays whose loads are remembered: cliques differ more in how many they have of each."""


class CarryBound(NamedTuple):
    """What trays carry while some are kept free, by their likeness."""

    loads: Mapping[TrayVacancy, tuple[TrayLoad, ...]]
    """Those to which nobody can be added."""
    heaviest: Mapping[TrayVacancy, int]
    weights: TrayLoad
    """Of one member of each need."""
    asked: int
    """What all members weigh."""

    def could_be(self, trays: Iterable[TrayVacancy]) -> bool:
        """False where the members are too many for the trays."""
        return sum([self.heaviest[tray] for tray in trays]) >= self.asked


@lru_cache(CACHED_BOUNDS)
def carry_bound(
    trays: frozenset[TrayVacancy],
    kept: frozenset[TrayVacancy],
    needs: tuple[MemberNeed, ...],
    members: TrayLoad,
) -> CarryBound:
    """Only loads that each of the trays `kept` can take over."""
    spared = [tray_loads(vacancy, needs, members) for vacancy in kept]
    loads = {
        vacancy: maximal_loads(tray_loads(vacancy, needs, members).intersection(*spared)) for vacancy in trays
    }
    return CarryBound(loads, *_weigh_loads(loads, members))


def _weigh_loads(
    loads: Mapping[TrayVacancy, Sequence[TrayLoad]], members: TrayLoad
) -> tuple[dict[TrayVacancy, int], TrayLoad, int]:
    """The heaviest load of each tray, what one member of each need weighs, and what all members do."""
    most = [max(column) for column in zip(*(load for some in loads.values() for load in some), strict=True)]
    if not most or not all(most):
        return dict.fromkeys(loads, 0), (1,) * len(members), 1
    weights = tuple([prod(most) // here for here in most])
    heaviest = {
        one: max((_load_weight(load, weights) for load in some), default=0) for one, some in loads.items()
    }
    return heaviest, weights, _load_weight(members, weights)


def _load_weight(load: TrayLoad, weights: Sequence[int]) -> int:
    return sum([members * weight for members, weight in zip(load, weights, strict=True)])


# The dynamic program.


MAX_CLIQUE_STEPS = 200_000
"""Loads that are tried on states before the search of a clique gives up: many unlike groups can be mixed in
exponentially many ways."""
MAX_SPARE_CHOICES = 200
"""Choices of spare trays that are tried; trays that are alike count once."""
CACHED_ANSWERS = 1024
"""Cliques whose answer is remembered: those of a site are mostly alike, and fixes ask again."""


class _Predecessor(NamedTuple):
    """How a state was reached."""

    last: int
    """Members of the last need that are seated: the most for the state."""
    load: TrayLoad
    """Of the newest tray."""
    before: tuple[int, ...]
    """The state before it."""


_StateLayer = dict[tuple[int, ...], _Predecessor]
"""By the empty trays that are used, and the members of each need but the last that are seated."""


class JointAssignment(NamedTuple):
    """How members are seated."""

    opened: int
    """Empty trays that are used, or kept as spares."""
    loads: tuple[TrayLoad, ...] | None
    """By tray, some perhaps with room for more members than there are; None: the search gave up."""


class _StepCounter:
    """What is left to the search of one clique."""

    def __init__(self, steps: int) -> None:
        self.taken = 0
        self._most = steps

    def take(self, steps: int) -> bool:
        """Whether so many more are allowed; they count only if they are."""
        if self.taken + steps > self._most:
            return False
        self.taken += steps
        return True


def solve_jointly(
    vacancies: tuple[TrayVacancy, ...],
    needs: tuple[MemberNeed, ...],
    members: TrayLoad,
    spares: int,
    effort: SearchBudget,
) -> JointAssignment | None:
    """Seats for `members` of each need on the trays of one clique; None where there are none.

    So many trays stay unused as `spares`, each of which can take over the load of any that is used.
    The search gives up where `effort`, that for the gang, is spent.
    """
    question = (vacancies, needs, members, spares)
    if not effort.allows(question):
        return JointAssignment(len(vacancies), None)
    answer, steps = solve_and_count(*question)
    effort.pay(question, steps)
    return answer


@lru_cache(CACHED_ANSWERS)
def solve_and_count(
    vacancies: tuple[TrayVacancy, ...], needs: tuple[MemberNeed, ...], members: TrayLoad, spares: int
) -> tuple[JointAssignment | None, int]:
    """The answer, and the steps that it takes to find."""
    if len(needs) > MAX_NEEDS:
        return JointAssignment(len(vacancies), None), 0
    if not carry_bound(frozenset(vacancies), frozenset(), needs, members).could_be(vacancies):
        return None, 0
    steps = _StepCounter(MAX_CLIQUE_STEPS)
    choices = islice(_spare_choices(vacancies, spares), MAX_SPARE_CHOICES)
    answers = [_solve_with_spares(vacancies, needs, members, kept, steps) for kept in choices]
    found = (answer for answer in answers if answer is not None)
    return min(found, key=lambda one: one.opened, default=None), steps.taken


def _spare_choices(vacancies: Sequence[TrayVacancy], count: int) -> Iterator[tuple[int, ...]]:
    """Trays to keep, the last ones of each likeness."""
    alike: dict[TrayVacancy, list[int]] = {}
    for at, vacancy in reversed(list(enumerate(vacancies))):
        alike.setdefault(vacancy, []).append(at)
    return _choices_by_kind(tuple(alike.values()), len(vacancies), count)


def _choices_by_kind(kinds: Sequence[Sequence[int]], trays: int, count: int) -> Iterator[tuple[int, ...]]:
    """Ways to take `count` of the trays of all `kinds`: how many of each kind, its first ones."""
    if count > trays:
        return
    if not kinds:
        yield ()
        return
    first, rest = kinds[0], kinds[1:]
    for here in range(min(count, len(first)), -1, -1):
        for others in _choices_by_kind(rest, trays - len(first), count - here):
            yield (*first[:here], *others)


def _solve_with_spares(
    vacancies: Sequence[TrayVacancy],
    needs: tuple[MemberNeed, ...],
    members: TrayLoad,
    kept: Collection[int],
    steps: _StepCounter,
) -> JointAssignment | None:
    """The answer with nothing on the trays `kept`."""
    trays = [at for at in range(len(vacancies)) if at not in kept]
    alike = frozenset([vacancies[at] for at in trays])
    carried = carry_bound(alike, frozenset([vacancies[at] for at in kept]), needs, members)
    if not carried.could_be([vacancies[at] for at in trays]):
        return None
    trays.sort(key=lambda at: vacancies[at])
    layers = _state_layers([vacancies[at] for at in trays], carried.loads, members, steps)
    if layers is None:
        return JointAssignment(len(vacancies), None)
    end = _complete_state(layers[-1], members)
    if end is None:
        return None
    by_tray = dict(zip(trays, _traced_loads(layers, end), strict=False))
    seated = tuple([by_tray.get(at, (0,) * len(members)) for at in range(len(vacancies))])
    return JointAssignment(end[0] + sum([vacancies[at].is_empty for at in kept]), seated)


def _state_layers(
    trays: Sequence[TrayVacancy],
    loads: Mapping[TrayVacancy, Sequence[TrayLoad]],
    members: TrayLoad,
    steps: _StepCounter,
) -> list[_StateLayer] | None:
    """The states before the first tray, and after each until everybody has a seat; None: too many steps."""
    # Where empty trays are alike, it does not matter which of them are used.
    choosy = sum([vacancy.is_empty for vacancy in loads]) > 1
    layers: list[_StateLayer] = [{(0,) * len(members): _Predecessor(0, (), ())}]
    for tray in trays:
        if not choosy and _complete_state(layers[-1], members) is not None:
            break
        if not steps.take(len(layers[-1]) * len(loads[tray])):
            return None
        layers.append(_next_layer(layers[-1], loads[tray], members, tray.is_empty, choosy))
    return layers


def _next_layer(
    layer: _StateLayer, loads: Sequence[TrayLoad], members: TrayLoad, is_empty: bool, choosy: bool
) -> _StateLayer:
    """The states when one more tray has one of the loads; an empty one may stay so."""
    after: _StateLayer = {}
    nobody = (0,) * len(members)
    options = [(load, is_empty and load != nobody) for load in loads]
    if is_empty and choosy:
        options.append((nobody, False))
    for state, way in layer.items():
        opened, *seated = state
        for load, opens in options:
            then = (opened + opens, *map(min, map(add, seated, load), members))
            last = min(way.last + load[-1], members[-1])
            if then not in after or last > after[then].last:
                after[then] = _Predecessor(last, load, state)
    return after


def _complete_state(layer: _StateLayer, members: TrayLoad) -> tuple[int, ...] | None:
    """The state with everybody seated that uses fewest empty trays."""
    last = members[-1]
    done = [state for state, way in layer.items() if way.last == last and state[1:] == members[:-1]]
    return min(done, default=None)


def _traced_loads(layers: Sequence[_StateLayer], end: tuple[int, ...]) -> list[TrayLoad]:
    """The load of each tray that was looked at, the first one first."""
    loads = list[TrayLoad]()
    for layer in reversed(layers[1:]):
        way = layer[end]
        loads.append(way.load)
        end = way.before
    return loads[::-1]
