"""Put the members of colocation groups onto the trays of one clique, by best fit or jointly.

`TrialPlacement` is the site while one gang is being placed: members are assigned and unassigned, and only
trays that the gang uses differ from `SiteCapacity`. Claims of two kinds are not mixed on a tray.

`assign_best_fit` assigns a subgroup member by member, those with most GPUs first, each to the tray with the
least room that fits (best fit decreasing). Partly used trays are filled before an empty one is opened. It
assigns all members or none.

Unlike members compete for trays: assigned group after group, the first may take the only tray that the
second can use. `solve_jointly` therefore searches all ways by dynamic programming over the trays, opening
as few empty trays as possible. `assign_jointly` assigns by its answer. A state is the number of empty trays
used and of members assigned per need, the last need excepted, of which each state keeps the most. Only
maximal loads are tried. Before the search, a weight bound (`CarryBound`) rejects members that cannot fit:
members of a need weigh less, the more of them the best tray carries, and no set of trays carries more than
the sum of its heaviest loads.

Spares: a tray may be a spare if it could take over all members of any used tray (`trays_that_carry`). Among
interchangeable trays `in_spare_order` prefers some. `spare_trays` lists the unused trays that qualify, partly
used ones first. The joint search keeps trays unused while it searches: every choice of spare trays that
differs is tried (200 at most, `_spare_choices`), the choice that opens fewest empty trays wins, and
`carry_bound` keeps only loads that each spare can take over. To qualify spares by a stricter rule, change
`trays_that_carry` and `carry_bound` together, or a plan gets fewer spares than the search promised.

The joint search of one clique gives up after 200,000 steps. The answer then has no loads. All searches for
one gang, those for its fixes included, share a `SearchBudget`, counted in steps and dead ends instead of
seconds, so that answers do not depend on the machine. Answers are cached per process. A cached answer costs
the same budget as a new one.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby, islice
from math import prod
from operator import add, mul
from typing import NamedTuple, TypeVar

from rackloom.core.place.search.gang_needs import (
    MAX_NEEDS,
    ColocationGroup,
    MemberNeed,
    MemberRange,
    MembersByNeed,
    TrayLoad,
    TrayVacancy,
    maximal_loads,
    members_by_need,
    ordered_needs,
    tray_loads,
)
from rackloom.core.place.search.site_view import SiteCapacity, TrayPosition

T = TypeVar("T")

# The budget of all searches for one gang.


MAX_GANG_STEPS = 1_000_000
"""Pairs of a state and a load that are tried: some seconds."""
MAX_GANG_DEAD_ENDS = 20_000
"""Cliques in use, summed over the dead ends beyond those that each search has for itself. Undoing a choice
takes time in proportion to the cliques in use, so this takes about as long with few cliques as with many."""
MIN_CLIQUES_CHARGED = 10
"""Fewer cliques are charged as this number: the rest of a dead end's cost does not depend on them."""


class SearchBudget:
    """The remaining budget of all searches for one gang. The gang's planner makes one and passes it on."""

    def __init__(self, steps: int = MAX_GANG_STEPS, dead_ends: int = MAX_GANG_DEAD_ENDS) -> None:
        self._left = steps
        self._dead_ends = dead_ends
        self._paid: set[Hashable] = set()

    def allows(self, problem: Hashable) -> bool:
        """Whether the problem may be solved: it was paid for before, or something is left."""
        return problem in self._paid or self._left > 0

    def pay(self, problem: Hashable, steps: int) -> None:
        """Charge the steps of a solution once, whether it was computed now or taken from the cache.

        The result of a plan must not depend on the contents of this process's cache.
        """
        if problem not in self._paid:
            self._paid.add(problem)
            self._left -= steps

    def charge_dead_end(self, cliques: int) -> bool:
        """Charge a dead end with this number of cliques in use. Returns whether the budget covers it."""
        self._dead_ends -= max(MIN_CLIQUES_CHARGED, cliques)
        return self._dead_ends >= 0


# The site while one gang is being placed.


class _TrayUse(NamedTuple):
    """The use of a tray by the gang."""

    gpus: int
    devices: str | None
    members: int


_UNUSED = _TrayUse(0, None, 0)


class TrialPlacement:
    """The site with the members that are assigned so far.

    Only the trays that the gang uses differ from `capacity`. Undoing all assignments restores the initial
    state, so a search can backtrack without a copy.
    """

    def __init__(self, capacity: SiteCapacity) -> None:
        """No member is assigned yet."""
        self.capacity = capacity
        self._uses: dict[str, dict[int, _TrayUse]] = {}
        """By clique, then by tray."""
        self._with_terms: dict[TrayPosition, Counter[MemberNeed]] = {}
        """Members with terms, by tray."""

    def clique_slots(self, clique: str, need: MemberNeed) -> int:
        """Members that the clique can serve."""
        state = self.capacity.cliques[clique]
        # The bound of the untouched clique, corrected on the few trays that the gang uses.
        total = state.shape.bounds(need).capacity
        if uses := self._uses.get(clique):
            slots = state.slots(need)
            for number, use in uses.items():
                total += self._slots_beside(clique, number, use, need, slots[number]) - slots[number]
        return total

    def empty(self, clique: str) -> int:
        """Open trays of the clique on which nothing is in use."""
        state, uses = self.capacity.cliques[clique], self._uses.get(clique, {})
        opened = [state.states[number].is_empty and use.gpus > 0 for number, use in uses.items()]
        return state.shape.empty - sum(opened)

    def is_empty(self, at: TrayPosition) -> bool:
        """Whether nothing is in use on the tray, and it is open."""
        return self.capacity.state(at).is_empty and not self._use(at).gpus

    def _slots_beside(self, clique: str, number: int, use: _TrayUse, need: MemberNeed, most: int) -> int:
        """Of the `most` members that the tray could serve at first, those that it can serve beside a use."""
        if not use.members:
            return most
        # The allocator counts each kind of claims alone, so two kinds share no tray.
        if use.devices != need.devices:
            return 0
        # Nor does a member go beside one that it bars. A count of 0 stays behind when a member is put back.
        if need.terms is not None:
            here = self._with_terms.get(TrayPosition(clique, number), Counter())
            if any(members and need.bars(present) for present, members in here.items()):
                return 0
        tray = self.capacity.cliques[clique].states[number]
        if need.gpus and (left := (tray.free - use.gpus) // need.gpus) < most:
            most = left
        return most if need.devices is None else min(most, need.device_slots(tray) - use.members)

    def members(self, at: TrayPosition) -> int:
        """Members of this gang on the tray."""
        return self._use(at).members

    def least_room_first(self, clique: str, need: MemberNeed) -> list[tuple[int, TrayPosition]]:
        """Trays of the clique that can serve such a member, each after its number of slots, least room first.

        Partly used trays come before empty ones, then those with least free GPUs, then by position.
        """
        state, uses = self.capacity.cliques[clique], self._uses.get(clique, {})
        ranked = []
        for number, (slots, tray) in enumerate(zip(state.slots(need), state.states, strict=True)):
            if not slots:
                continue
            # Trays without a use of this gang, nearly all of them, need no further look.
            use = uses.get(number)
            if use is None:
                ranked.append((slots, tray.is_empty, tray.free, number))
            elif left := self._slots_beside(clique, number, use, need, slots):
                ranked.append((left, tray.is_empty and not use.gpus, tray.free - use.gpus, number))
        ranked.sort()
        return [(slots, TrayPosition(clique, number)) for slots, _, _, number in ranked]

    def take(self, at: TrayPosition, need: MemberNeed, members: int) -> None:
        """Put members on a tray on which they are known to fit."""
        use = self._use(at)
        now = _TrayUse(use.gpus + members * need.gpus, need.devices, use.members + members)
        self._uses.setdefault(at.clique, {})[at.number] = now
        if need.terms is not None:
            self._with_terms.setdefault(at, Counter())[need] += members

    def put_back(self, at: TrayPosition, need: MemberNeed, members: int) -> None:
        """Undo a `take`."""
        use, uses = self._use(at), self._uses[at.clique]
        if use.members > members:
            uses[at.number] = _TrayUse(use.gpus - members * need.gpus, use.devices, use.members - members)
        else:
            del uses[at.number]
        if need.terms is not None:
            self._with_terms[at][need] -= members

    def _use(self, at: TrayPosition) -> _TrayUse:
        return self._uses.get(at.clique, {}).get(at.number, _UNUSED)


# Assignment within one clique.


class TrayAssignment(NamedTuple):
    """Consecutive members of one group on one tray."""

    at: TrayPosition
    part: MemberRange
    first: int
    members: int


TrayAssignments = tuple[TrayAssignment, ...]
"""All members of a subgroup."""


def assign(trial: TrialPlacement, assignments: Iterable[TrayAssignment]) -> None:
    """Assign members to trays on which they are known to fit."""
    for assignment in assignments:
        trial.take(assignment.at, assignment.part.need, assignment.members)


def unassign(trial: TrialPlacement, assignments: TrayAssignments) -> None:
    """Undo an `assign`."""
    for assignment in assignments:
        trial.put_back(assignment.at, assignment.part.need, assignment.members)


def assign_best_fit(trial: TrialPlacement, clique: str, subgroup: ColocationGroup) -> TrayAssignments | None:
    """Assign a subgroup by best fit decreasing. If it does not fit, return None and assign nothing."""
    assignments: TrayAssignments = ()
    # Large members fit on fewer trays, so they choose first.
    for part in sorted(subgroup, key=lambda part: part.group.gpus, reverse=True):
        trays = trial.least_room_first(clique, part.need)
        if sum([slots for slots, _ in trays]) < part.members:
            unassign(trial, assignments)
            return None
        added, number, end = list[TrayAssignment](), part.first, part.first + part.members
        for slots, at in trays:
            if number == end:
                break
            here = min(slots, end - number)
            added.append(TrayAssignment(at, part, number, here))
            number += here
        # The trial has to have this part before the next one looks for room.
        assign(trial, added)
        assignments += tuple(added)
    return assignments


def assign_jointly(
    trial: TrialPlacement, clique: str, subgroups: Sequence[ColocationGroup], loads: Sequence[TrayLoad]
) -> tuple[TrayAssignments, ...]:
    """Assign subgroups to the trays of a clique by these loads."""
    positions = _positions(trial.capacity, clique)
    # For each need, the position of a tray for each of its members.
    slots = {
        need: iter([at for at, here in zip(positions, column, strict=True) for _ in range(here)])
        for need, column in zip(
            ordered_needs(members_by_need(subgroups)), zip(*loads, strict=True), strict=True
        )
    }
    found: list[TrayAssignments] = []
    for subgroup in subgroups:
        assignments: list[TrayAssignment] = []
        for part in subgroup:
            # Members take the slots of their need in order. Runs on one tray become one assignment.
            first = part.first
            for at, same in groupby(islice(slots[part.need], part.members)):
                members = len(list(same))
                assignments.append(TrayAssignment(at, part, first, members))
                first += members
        assign(trial, assignments)
        found.append(tuple(assignments))
    return tuple(found)


def spare_trays(
    trial: TrialPlacement, clique: str, assigned: Iterable[TrayAssignments]
) -> list[TrayPosition]:
    """Trays of the clique that could take over all members of any tray of `assigned`, the preferred first.

    Trays of which a part is in use come first, then those that `in_spare_order` prefers.
    """
    by_tray: dict[TrayPosition, Counter[MemberNeed]] = {}
    for assignments in assigned:
        for assignment in assignments:
            by_tray.setdefault(assignment.at, Counter())[assignment.part.need] += assignment.members
    able = trays_that_carry(trial.capacity, clique, list(by_tray.values()))
    return sorted((at for at in in_spare_order(able) if not trial.members(at)), key=trial.is_empty)


def in_spare_order(trays: Sequence[T]) -> Iterator[T]:
    """Interchangeable trays (given in site order) as they become spares: the last first.

    Members fill the first trays, so spares are together at the end of a clique.
    """
    return reversed(trays)


def trays_that_carry(
    capacity: SiteCapacity, clique: str, loads: Collection[Mapping[MemberNeed, int]]
) -> list[TrayPosition]:
    """Trays of the clique, in site order, that can carry each of these loads, without the gang's members.

    This is the rule for spares. The joint search has it in `carry_bound`.
    """
    needs = tuple({need: None for load in loads for need in load})
    if not needs:
        return _positions(capacity, clique)
    # A spare replaces one lost tray, whichever it is: each load has to fit, not all of them together.
    wanted = {tuple(load.get(need, 0) for need in needs) for load in loads}
    most = tuple(map(max, zip(*wanted, strict=True)))
    trays = zip(_positions(capacity, clique), capacity.cliques[clique].vacancies(needs), strict=True)
    return [at for at, vacancy in trays if wanted <= tray_loads(vacancy, needs, most)]


def _positions(capacity: SiteCapacity, clique: str) -> list[TrayPosition]:
    """The trays of a clique, in site order."""
    return [TrayPosition(clique, number) for number in range(len(capacity.cliques[clique].states))]


# The weight bound of the joint search.


CACHED_BOUNDS = 1024
"""Mixtures of trays for which the loads are cached: most cliques differ in how many they have of each."""


class CarryBound(NamedTuple):
    """Loads that trays carry while some are kept as spares, by their vacancy."""

    loads: Mapping[TrayVacancy, tuple[TrayLoad, ...]]
    """Maximal ones."""
    heaviest: Mapping[TrayVacancy, int]
    weights: TrayLoad
    """Of one member of each need."""
    demand: int
    """The weight of all members."""

    def allows(self, trays: Iterable[TrayVacancy]) -> bool:
        """False if the members are too many for the trays, however they are assigned."""
        return sum([self.heaviest[tray] for tray in trays]) >= self.demand


@lru_cache(CACHED_BOUNDS)
def carry_bound(
    trays: frozenset[TrayVacancy],
    spares: frozenset[TrayVacancy],
    needs: tuple[MemberNeed, ...],
    members: TrayLoad,
) -> CarryBound:
    """The bound over loads that each of the `spares` can take over.

    A member of a need weighs prod(most) / most[need], where most[need] is the largest number of such members
    in any load. Integers keep the bound exact. Any weights would be valid, because the members fit only if
    the trays carry their total weight. These make a full load of each need weigh the same.
    """
    # A tray may carry only loads that every spare could take over, so intersect the spares' loads first.
    by_spare = [tray_loads(vacancy, needs, members) for vacancy in spares]
    loads = {
        vacancy: maximal_loads(tray_loads(vacancy, needs, members).intersection(*by_spare))
        for vacancy in trays
    }
    most = [max(column) for column in zip(*(load for found in loads.values() for load in found), strict=True)]
    if not most or not all(most):
        # Some need fits on no tray: nothing fits.
        return CarryBound(loads, dict.fromkeys(loads, 0), (1,) * len(members), 1)
    weights = tuple([prod(most) // here for here in most])
    heaviest = {
        vacancy: max([sum(map(mul, load, weights)) for load in found], default=0)
        for vacancy, found in loads.items()
    }
    return CarryBound(loads, heaviest, weights, sum(map(mul, members, weights)))


# The dynamic program.


MAX_CLIQUE_STEPS = 200_000
"""Pairs of a state and a load that are tried before the search of a clique gives up: many unlike groups can
be mixed in exponentially many ways."""
MAX_SPARE_CHOICES = 200
"""Choices of spare trays that are tried. Interchangeable trays count once."""
CACHED_ANSWERS = 1024
"""Cliques with a cached answer: those of a site are mostly alike, and fixes repeat the search."""


class _Predecessor(NamedTuple):
    """How a state was reached."""

    last: int
    """Members of the last need that are assigned: the most for the state."""
    load: TrayLoad
    """Of the newest tray."""
    before: tuple[int, ...]
    """The state before it."""


_StateLayer = dict[tuple[int, ...], _Predecessor]
"""By the empty trays that are used, and the members of each need but the last that are assigned."""


class JointAssignment(NamedTuple):
    """How the members of a clique are assigned."""

    opened: int
    """Empty trays that are used, or kept as spares."""
    loads: tuple[TrayLoad, ...] | None
    """By tray, some perhaps with room for more members than there are. None if the search gave up."""


class _StepCounter:
    """The steps of one search. `allows` refuses steps beyond the limit, and does not count them."""

    taken = 0

    def allows(self, steps: int) -> bool:
        if self.taken + steps > MAX_CLIQUE_STEPS:
            return False
        self.taken += steps
        return True


def solve_jointly(
    trial: TrialPlacement, clique: str, wanted: MembersByNeed, spares: int, budget: SearchBudget
) -> JointAssignment | None:
    """Assign `wanted` in a clique without other members of the gang, or return None if they do not fit.

    `spares` trays stay unused. Each of them can take over the load of any tray that is used.
    """
    needs = ordered_needs(wanted)
    vacancies = trial.capacity.cliques[clique].vacancies(needs)
    # Without spares the answer is the same for trays in any order, so cliques of one shape share it.
    order = [] if spares else sorted(range(len(vacancies)), key=vacancies.__getitem__)
    trays = vacancies if spares else tuple([vacancies[at] for at in order])
    problem = (trays, needs, tuple([wanted[need] for need in needs]), spares)
    # Without budget the answer is that of a search that gave up: no loads, and perhaps all trays.
    if not budget.allows(problem):
        return JointAssignment(len(vacancies), None)
    answer, steps = solve_and_count(*problem)
    budget.pay(problem, steps)
    if spares or answer is None or answer.loads is None:
        return answer
    # Back from the sorted order to the trays of this clique.
    loads = dict(zip(order, answer.loads, strict=True))
    return JointAssignment(answer.opened, tuple([loads[at] for at in range(len(vacancies))]))


@lru_cache(CACHED_ANSWERS)
def solve_and_count(
    vacancies: tuple[TrayVacancy, ...], needs: tuple[MemberNeed, ...], members: TrayLoad, spares: int
) -> tuple[JointAssignment | None, int]:
    """The answer, and the steps that it takes to find."""
    if len(needs) > MAX_NEEDS:
        return JointAssignment(len(vacancies), None), 0
    if not carry_bound(frozenset(vacancies), frozenset(), needs, members).allows(vacancies):
        return None, 0
    # All choices are solved, with one limit of steps for all: a later one may open fewer trays.
    steps = _StepCounter()
    choices = islice(_spare_choices(vacancies, spares), MAX_SPARE_CHOICES)
    answers = [_solve_with_spares(vacancies, needs, members, kept, steps) for kept in choices]
    found = (answer for answer in answers if answer is not None)
    return min(found, key=lambda answer: answer.opened, default=None), steps.taken


def _spare_choices(vacancies: Sequence[TrayVacancy], count: int) -> Iterator[tuple[int, ...]]:
    """Choices of spare trays. Of interchangeable trays, those that `in_spare_order` prefers."""
    kinds: dict[TrayVacancy, list[int]] = {}
    for at, vacancy in in_spare_order(list(enumerate(vacancies))):
        kinds.setdefault(vacancy, []).append(at)
    return _choices_by_kind(tuple(kinds.values()), len(vacancies), count)


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
    spares: Collection[int],
    steps: _StepCounter,
) -> JointAssignment | None:
    """The answer with nothing on the trays `spares`."""
    # Sorted, so that equal trays are neighbours and partly used ones come first: False < True.
    trays = sorted((at for at in range(len(vacancies)) if at not in spares), key=lambda at: vacancies[at])
    usable = [vacancies[at] for at in trays]
    bound = carry_bound(frozenset(usable), frozenset([vacancies[at] for at in spares]), needs, members)
    if not bound.allows(usable):
        return None
    layers = _state_layers(usable, bound.loads, members, steps)
    if layers is None:
        return JointAssignment(len(vacancies), None)
    state = _complete_state(layers[-1], members)
    if state is None:
        return None
    # Walk back from the last layer: each state names the load of its newest tray and the state before it.
    opened, loads = state[0], list[TrayLoad]()
    for layer in reversed(layers[1:]):
        loads.append(layer[state].load)
        state = layer[state].before
    # The search may have ended before the last trays. They, and the spares, carry nothing.
    by_tray = dict(zip(trays, reversed(loads), strict=False))
    assigned = tuple([by_tray.get(at, (0,) * len(members)) for at in range(len(vacancies))])
    return JointAssignment(opened + sum([vacancies[at].is_empty for at in spares]), assigned)


def _state_layers(
    trays: Sequence[TrayVacancy],
    loads: Mapping[TrayVacancy, Sequence[TrayLoad]],
    members: TrayLoad,
    steps: _StepCounter,
) -> list[_StateLayer] | None:
    """The states before the first tray and after each further one, or None after too many steps.

    Invariant: a layer has, for each number of opened trays and of members of all needs but the last, the
    largest number of members of the last need. A state that has fewer of these can never lead to more, so
    dropping it loses no solution.
    """
    # If all empty trays are alike, it does not matter which of them are used. Each tray then takes a load
    # in turn, and the first complete layer is the best. Else every empty tray may also stay empty.
    choosy = sum([vacancy.is_empty for vacancy in loads]) > 1
    nothing = (0,) * len(members)
    layers: list[_StateLayer] = [{nothing: _Predecessor(0, (), ())}]
    for tray in trays:
        layer, after = layers[-1], _StateLayer()
        if not choosy and _complete_state(layer, members) is not None:
            break
        if not steps.allows(len(layer) * len(loads[tray])):
            return None
        # The loads of the tray, each with whether it opens the tray.
        options = [(load, tray.is_empty and load != nothing) for load in loads[tray]]
        if tray.is_empty and choosy:
            options.append((nothing, False))
        for state, reached in layer.items():
            opened, *assigned = state
            for load, opens in options:
                # Counts are capped at the demand: maximal loads may have room for more than all members.
                then = (opened + opens, *map(min, map(add, assigned, load), members))
                last = min(reached.last + load[-1], members[-1])
                if then not in after or last > after[then].last:
                    after[then] = _Predecessor(last, load, state)
        layers.append(after)
    return layers


def _complete_state(layer: _StateLayer, members: TrayLoad) -> tuple[int, ...] | None:
    """The state with all members assigned that uses fewest empty trays."""
    done = [state for state, way in layer.items() if way.last == members[-1] and state[1:] == members[:-1]]
    return min(done, default=None)
