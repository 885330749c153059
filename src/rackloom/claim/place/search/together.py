"""Members that are unlike on the trays of one clique, so that no other way opens fewer empty trays.

Unlike members compete for trays: seated one group after another, the first may take the trays that only the
second could not do without. All ways are looked through, by dynamic programming over the trays.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from operator import add
from typing import NamedTuple

from rackloom.claim.place.search.bound import carried_by
from rackloom.claim.place.search.effort import Effort
from rackloom.claim.place.search.loads import NEEDS, Load, Need, Vacancy

STEPS = 200_000
"""Loads that are tried on states before the search of a clique gives up: many unlike groups can be mixed in
exponentially many ways."""
CHOICES = 200
"""Choices of spare trays that are tried; trays that are alike count once."""
REMEMBERED = 1024
"""Cliques whose answer is remembered: those of a site are mostly alike, and fixes ask again."""


class _Way(NamedTuple):
    """How a state was reached."""

    last: int
    """Members of the last need that are seated: the most for the state."""
    load: Load
    """Of the newest tray."""
    before: tuple[int, ...]
    """The state before it."""


_Layer = dict[tuple[int, ...], _Way]
"""By the empty trays that are used, and the members of each need but the last that are seated."""


class Answer(NamedTuple):
    """How members are seated."""

    opened: int
    """Empty trays that are used, or kept as spares."""
    loads: tuple[Load, ...] | None
    """By tray, some perhaps with room for more members than there are; None: the search gave up."""


class _Steps:
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


def seated_together(
    vacancies: tuple[Vacancy, ...], needs: tuple[Need, ...], members: Load, spares: int, effort: Effort
) -> Answer | None:
    """Seats for `members` of each need on the trays of one clique; None where there are none.

    So many trays stay unused as `spares`, each of which can take over the load of any that is used.
    The search gives up where `effort`, that for the gang, is spent.
    """
    question = (vacancies, needs, members, spares)
    if not effort.allows(question):
        return Answer(len(vacancies), None)
    answer, steps = sought(*question)
    effort.pay(question, steps)
    return answer


@lru_cache(REMEMBERED)
def sought(
    vacancies: tuple[Vacancy, ...], needs: tuple[Need, ...], members: Load, spares: int
) -> tuple[Answer | None, int]:
    """The answer, and the steps that it takes to find."""
    if len(needs) > NEEDS:
        return Answer(len(vacancies), None), 0
    if not carried_by(frozenset(vacancies), frozenset(), needs, members).could_be(vacancies):
        return None, 0
    steps = _Steps(STEPS)
    choices = islice(_spares(vacancies, spares), CHOICES)
    answers = [_filled(vacancies, needs, members, kept, steps) for kept in choices]
    found = (one for one in answers if one is not None)
    return min(found, key=lambda one: one.opened, default=None), steps.taken


def _spares(vacancies: Sequence[Vacancy], count: int) -> Iterator[tuple[int, ...]]:
    """Trays to keep, the last ones of each likeness."""
    alike: dict[Vacancy, list[int]] = {}
    for at, vacancy in reversed(list(enumerate(vacancies))):
        alike.setdefault(vacancy, []).append(at)
    return _some(tuple(alike.values()), len(vacancies), count)


def _some(kinds: Sequence[Sequence[int]], trays: int, count: int) -> Iterator[tuple[int, ...]]:
    """Ways to take `count` of the trays of all `kinds`: how many of each kind, its first ones."""
    if count > trays:
        return
    if not kinds:
        yield ()
        return
    first, rest = kinds[0], kinds[1:]
    for here in range(min(count, len(first)), -1, -1):
        for others in _some(rest, trays - len(first), count - here):
            yield (*first[:here], *others)


def _filled(
    vacancies: Sequence[Vacancy], needs: tuple[Need, ...], members: Load, kept: Collection[int], steps: _Steps
) -> Answer | None:
    """The answer with nothing on the trays `kept`."""
    trays = [at for at in range(len(vacancies)) if at not in kept]
    alike = frozenset([vacancies[at] for at in trays])
    carried = carried_by(alike, frozenset([vacancies[at] for at in kept]), needs, members)
    if not carried.could_be([vacancies[at] for at in trays]):
        return None
    trays.sort(key=lambda at: vacancies[at])
    layers = _layers([vacancies[at] for at in trays], carried.loads, members, steps)
    if layers is None:
        return Answer(len(vacancies), None)
    end = _end(layers[-1], members)
    if end is None:
        return None
    by_tray = dict(zip(trays, _traced(layers, end), strict=False))
    seated = tuple([by_tray.get(at, (0,) * len(members)) for at in range(len(vacancies))])
    return Answer(end[0] + sum([vacancies[at].is_empty for at in kept]), seated)


def _layers(
    trays: Sequence[Vacancy], loads: Mapping[Vacancy, Sequence[Load]], members: Load, steps: _Steps
) -> list[_Layer] | None:
    """The states before the first tray, and after each until everybody has a seat; None: too many steps."""
    # Where empty trays are alike, it does not matter which of them are used.
    choosy = sum([vacancy.is_empty for vacancy in loads]) > 1
    layers: list[_Layer] = [{(0,) * len(members): _Way(0, (), ())}]
    for tray in trays:
        if not choosy and _end(layers[-1], members) is not None:
            break
        if not steps.take(len(layers[-1]) * len(loads[tray])):
            return None
        layers.append(_with_tray(layers[-1], loads[tray], members, tray.is_empty, choosy))
    return layers


def _with_tray(layer: _Layer, loads: Sequence[Load], members: Load, is_empty: bool, choosy: bool) -> _Layer:
    """The states when one more tray has one of the loads; an empty one may stay so."""
    after: _Layer = {}
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
                after[then] = _Way(last, load, state)
    return after


def _end(layer: _Layer, members: Load) -> tuple[int, ...] | None:
    """The state with everybody seated that uses fewest empty trays."""
    last = members[-1]
    done = [state for state, way in layer.items() if way.last == last and state[1:] == members[:-1]]
    return min(done, default=None)


def _traced(layers: Sequence[_Layer], end: tuple[int, ...]) -> list[Load]:
    """The load of each tray that was looked at, the first one first."""
    loads = list[Load]()
    for layer in reversed(layers[1:]):
        way = layer[end]
        loads.append(way.load)
        end = way.before
    return loads[::-1]
