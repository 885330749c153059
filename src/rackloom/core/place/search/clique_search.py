"""Choose a clique for each colocation group: depth-first backtracking, bounds, and nogood recording.

`choose_cliques` minimises lexicographically: fewest cliques, then fewest free regions closed, then
tightest fit. After a first solution the search is repeated with one clique less, until it fails or reaches
the lower bound of the weight bounds. `can_choose_cliques` stops at the first solution.

Order of candidates (`CliqueRanking`): cliques already in use first; then those that fit more of the waiting
groups of the same shape, close fewest free regions, and fit tightest. Free regions count before tightness:
two trays taken from 18 leave room for a gang of 16, two taken from 17 do not, although that fit is tighter.
The watched sizes are 16, 8, 4, 2 and 1 trays; the recommended segment is 16 of an NVL72's 18 trays.
`fragmentation_price` reports the regions that a plan closes. Fits are first computed by counting. Where
counting is not exact, the joint assignment of a clique is solved only when that clique would come next
(lazy evaluation on a heap).

`WeightBound` prunes: a group weighs as much as its members, a clique carries at most its strength, and no
choice works where the cliques in use and the strongest others together are too weak for all waiting groups.
There is one bound per need and one for all needs together. The bounds apply from the first dead end on.

`NogoodTable` records choices that led nowhere. Whether the remaining groups fit depends only on who is in
which clique, and neither equal groups nor equal cliques are told apart, so one record covers all
symmetric choices. A choice is encoded as one integer with a digit per possible clique content, which is
updated incrementally.

When groups in one clique compete for trays, all of them are assigned anew and jointly; where that search
gives up, they are assigned in turn. Each search may run into 400 dead ends; further ones are charged to the
budget of the gang. A search that exhausts both ends without a solution, although there may be one.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate, islice
from typing import NamedTuple

from rackloom.core.place.placement_values import FreeRegionCount
from rackloom.core.place.search.site_capacity import (
    MAX_NEEDS,
    ColocationGroup,
    GroupShape,
    MemberNeed,
    MembersByClique,
    MembersByNeed,
    SiteCapacity,
    add_members,
    group_shape,
    is_counting_exact,
    max_groups_that_fit,
    members_by_need,
    min_opened_trays,
    ordered_needs,
)
from rackloom.core.place.search.tray_assignment import (
    SearchBudget,
    TrayAssignments,
    TrialPlacement,
    assign,
    assign_best_fit,
    assign_jointly,
    carry_bound,
    solve_jointly,
    spare_trays,
    unassign,
)

# Weight bounds over cliques.


class WeightBound:
    """A weight for members and a strength for cliques: no clique carries members that weigh more than it can.

    Subgroups are named by their number: those from `first` on wait for a clique.
    """

    def __init__(
        self,
        strengths: Mapping[str, int],
        weights: Mapping[MemberNeed, int],
        subgroups: Sequence[ColocationGroup],
    ) -> None:
        """`strengths` by clique, `weights` of one member; a need without a weight weighs nothing."""
        self._strengths = strengths
        self._weights = weights
        self._strongest = sorted(strengths, key=lambda clique: -strengths[clique])
        last_first = [self._weight(members_by_need([subgroup])) for subgroup in reversed(subgroups)]
        self._waiting = list(accumulate(last_first))[::-1]
        """By number: the weight of the subgroup and of all after it."""
        self._lightest = list(accumulate(last_first, min))[::-1]
        """By number: the lightest of these."""

    def min_cliques(self) -> int:
        """A lower bound for the cliques that all subgroups take; more than exist where all are too weak."""
        totals = accumulate(self._strengths[clique] for clique in self._strongest)
        return 1 + sum(total < self._waiting[0] for total in totals)

    def allows(self, inside: MembersByClique, first: int, may_open: int) -> bool:
        """Whether the waiting subgroups may fit beside those `inside` when so many cliques are opened."""
        return self._missing(inside, first, may_open) <= 0

    def able(self, unused: Iterable[str], inside: MembersByClique, first: int, may_open: int) -> list[str]:
        """The `unused` cliques of which one may be opened now, with others to come."""
        missing = self._missing(inside, first, may_open - 1)
        return [clique for clique in unused if self._strengths[clique] >= missing]

    def _missing(self, inside: MembersByClique, first: int, others: int) -> int:
        """The weight that neither the cliques in use nor the strongest `others` can carry.

        Room in a used clique that is too small for the lightest waiting subgroup does not count.
        """
        left = [self._strengths[clique] - self._weight(members) for clique, members in inside.items()]
        usable = sum([room for room in left if room >= self._lightest[first]])
        strongest = islice((clique for clique in self._strongest if clique not in inside), others)
        return self._waiting[first] - usable - sum([self._strengths[clique] for clique in strongest])

    def _weight(self, wanted: MembersByNeed) -> int:
        return sum([members * self._weights.get(need, 0) for need, members in wanted.items()])


def weight_bounds(
    capacity: SiteCapacity, subgroups: Sequence[ColocationGroup], spares: int
) -> list[WeightBound]:
    """One for each need alone, and one for all together; `spares` trays of each clique carry nothing."""
    wanted = members_by_need(subgroups)
    bounds = []
    if len(wanted) > 1:
        for need in wanted:
            strengths = {clique: bound.capacity for clique, bound in capacity.bounds(need).items()}
            bounds.append(WeightBound(strengths, {need: 1}, subgroups))
    if len(wanted) > MAX_NEEDS:
        return bounds
    needs = ordered_needs(wanted)
    cliques = {clique: capacity.vacancies(clique, needs) for clique in capacity.cliques}
    kinds = frozenset([tray for trays in cliques.values() for tray in trays])
    carried = carry_bound(kinds, frozenset(), needs, tuple([wanted[need] for need in needs]))
    # The lightest loads are left out: a spare carries nothing now, but has to be able to carry something.
    strengths = {
        clique: sum(sorted(load for tray in trays if (load := carried.heaviest[tray]))[spares:])
        for clique, trays in cliques.items()
    }
    return [*bounds, WeightBound(strengths, dict(zip(needs, carried.weights, strict=True)), subgroups)]


# The search.


FREE_DEAD_ENDS = 400
"""Dead ends that each search has for itself: subgroups of unlike sizes can be packed in exponentially many
ways."""


class CliqueChoice(NamedTuple):
    """One subgroup in its clique."""

    subgroup: ColocationGroup
    clique: str
    assignments: TrayAssignments


def choose_cliques(
    trial: TrialPlacement, subgroups: Sequence[ColocationGroup], spares: int, budget: SearchBudget
) -> list[CliqueChoice] | None:
    """A clique for each subgroup, in their order; None, and nothing is assigned, where none was found."""
    search = CliqueSearch(trial, subgroups, spares, budget)
    best = search.run()
    # Equal subgroups fill the fewest cliques at once, so the loop mostly ends at its first condition.
    while best is not None and (cliques := len({choice.clique for choice in best})) > 1:
        if cliques <= search.min_cliques():
            break
        fewer = search.run(most=cliques - 1)
        if fewer is None:
            for choice in best:
                assign(trial, choice.assignments)
            break
        best = fewer
    return best


def can_choose_cliques(
    trial: TrialPlacement, subgroups: Sequence[ColocationGroup], spares: int, budget: SearchBudget
) -> bool:
    """Whether there is a clique for each subgroup; the solution stays in the trial."""
    return CliqueSearch(trial, subgroups, spares, budget).run() is not None


class _CliqueContent(NamedTuple):
    """What a search has put into one clique."""

    subgroups: tuple[ColocationGroup, ...] = ()
    assignments: tuple[TrayAssignments, ...] = ()
    """One for each subgroup."""


class CliqueSearch:
    """A depth-first search with a bounded number of dead ends; its solution stays in the trial."""

    def __init__(
        self, trial: TrialPlacement, subgroups: Sequence[ColocationGroup], spares: int, budget: SearchBudget
    ) -> None:
        """No member of the gang is assigned yet."""
        self._trial = trial
        self._subgroups = subgroups
        self._spares = spares
        self._budget = budget
        self._ranking = CliqueRanking(trial, subgroups, spares, budget)
        self._nogoods = NogoodTable(trial.capacity, members_by_need(subgroups))
        self._inside: dict[str, _CliqueContent] = {}
        self._steps: list[tuple[str, _CliqueContent]] = []
        """The clique of each subgroup so far, and what was in it before."""

    def min_cliques(self) -> int:
        """A lower bound for the cliques that the subgroups take."""
        return max([bound.min_cliques() for bound in self._bounds])

    def run(self, most: int | None = None) -> list[CliqueChoice] | None:
        """A clique for each subgroup, in their order; None where none was found.

        `most` cliques may be used, fewer than in a run before, whose solution is undone. The nogoods of that
        run hold here too: what failed with more cliques fails with fewer.
        """
        self._undo_all()
        # Invariant: the trial, the ranking and the nogood table all have the choices of `_steps`, and
        # candidates[n] yields the cliques not yet tried for subgroup n, given the choices before it.
        candidates: list[Iterator[str]] = []
        dead_ends = 0
        while len(self._steps) < len(self._subgroups):
            if len(candidates) == len(self._steps):
                candidates.append(self._ranking.best_first(len(self._steps), most))
            if self._advance(candidates[-1]):
                continue
            dead_ends += 1
            if not self._steps or (
                dead_ends > FREE_DEAD_ENDS and not self._budget.charge_dead_end(len(self._ranking.inside))
            ):
                self._undo_all()
                return None
            # Every clique failed for the next subgroup, so nothing follows from the choices that stand.
            self._nogoods.add()
            self._ranking.prune_by(self._bounds)
            candidates.pop()
            self._undo()
        assignments = {clique: iter(inside.assignments) for clique, inside in self._inside.items()}
        return [
            CliqueChoice(subgroup, clique, next(assignments[clique]))
            for subgroup, (clique, _) in zip(self._subgroups, self._steps, strict=True)
        ]

    @cached_property
    def _bounds(self) -> list[WeightBound]:
        """Computed at the first dead end: mostly the first choices fit, and no bound is needed."""
        return weight_bounds(self._trial.capacity, self._subgroups, self._spares)

    def _advance(self, cliques: Iterator[str]) -> bool:
        """Put the next subgroup into the first of the cliques that takes it."""
        subgroup = self._subgroups[len(self._steps)]
        shape = [(part.need, part.members) for part in subgroup]
        for clique in cliques:
            inside = self._ranking.inside.get(clique, {})
            if self._nogoods and self._nogoods.has(clique, add_members(inside, shape)):
                continue
            before = self._inside.get(clique, _CliqueContent())
            assignments = self._add_to_clique(clique, before, subgroup)
            if assignments is not None:
                self._steps.append((clique, before))
                self._set(clique, _CliqueContent((*before.subgroups, subgroup), assignments))
                return True
        return False

    def _add_to_clique(
        self, clique: str, before: _CliqueContent, subgroup: ColocationGroup
    ) -> tuple[TrayAssignments, ...] | None:
        """Assign one more subgroup in a clique; None, and nothing changes, where it does not fit."""
        subgroups = (*before.subgroups, subgroup)
        wanted = members_by_need(subgroups)
        if self._ranking.is_counting_exact(clique, wanted):
            beside = assign_best_fit(self._trial, clique, subgroup)
            if beside is not None:
                return (*before.assignments, beside)
        answer = solve_jointly(self._trial, clique, wanted, self._spares, self._budget)
        if answer is not None and answer.loads is not None:
            for assignments in before.assignments:
                unassign(self._trial, assignments)
            return assign_jointly(self._trial, clique, subgroups, answer.loads)
        # The joint search gave up or found nothing. Assigning in turn may miss a solution, but makes no
        # wrong one.
        beside = assign_best_fit(self._trial, clique, subgroup)
        if beside is None:
            return None
        found = (*before.assignments, beside)
        if self._spares and len(spare_trays(self._trial, clique, found)) < self._spares:
            unassign(self._trial, beside)
            return None
        return found

    def _undo_all(self) -> None:
        while self._steps:
            self._undo()

    def _undo(self) -> None:
        """Take back the newest choice, and what a joint assignment moved of earlier members."""
        clique, before = self._steps.pop()
        for assignments in self._inside[clique].assignments:
            unassign(self._trial, assignments)
        for assignments in before.assignments:
            assign(self._trial, assignments)
        self._set(clique, before)

    def _set(self, clique: str, inside: _CliqueContent) -> None:
        self._inside[clique] = inside
        wanted = members_by_need(inside.subgroups)
        self._ranking.changed(clique, wanted)
        self._nogoods.changed(clique, wanted)


# Recorded dead ends.


class NogoodTable:
    """Choices for the first subgroups after which the others could not be placed.

    A choice is a number with one digit for each pair of a kind of clique and a content: how many cliques of
    that kind have that content. Cliques whose trays have equal vacancies are of one kind. So choices that
    differ only in which of equal cliques has which of equal subgroups have the same number, and a step
    changes the digits of one clique only.
    """

    def __init__(self, capacity: SiteCapacity, wanted: MembersByNeed) -> None:
        """No nogood yet, and no member in a clique; the gang has the members `wanted`."""
        self._capacity = capacity
        self._needs = ordered_needs(wanted)
        self._bits = len(capacity.cliques).bit_length()
        """Of a digit: it counts up to all cliques, so it never carries over."""
        self._ones: dict[Hashable, int] = {}
        """A one in each digit."""
        self._counted: dict[str, int] = {}
        """What each clique adds to the choice."""
        self._changed: dict[str, MembersByNeed] = {}
        """What is not counted yet: most searches come to no dead end."""
        self._choice = 0
        self._nogoods: set[int] = set()

    def __len__(self) -> int:
        return len(self._nogoods)

    def changed(self, clique: str, inside: MembersByNeed) -> None:
        """The clique has these members of the gang now."""
        self._changed[clique] = inside

    def add(self) -> None:
        """Record that the present choice leads nowhere."""
        self._count()
        self._nogoods.add(self._choice)

    def has(self, clique: str, inside: MembersByNeed) -> bool:
        """Whether the present choice with these members in a clique instead is recorded."""
        if not self._nogoods:
            return False
        self._count()
        added = self._ones.get(self._digit(clique, inside))
        return added is not None and self._choice - self._counted.get(clique, 0) + added in self._nogoods

    def _count(self) -> None:
        for clique, inside in self._changed.items():
            added = 0
            if inside:
                added = self._ones.setdefault(self._digit(clique, inside), 1 << self._bits * len(self._ones))
            self._choice += added - self._counted.get(clique, 0)
            self._counted[clique] = added
        self._changed.clear()

    def _digit(self, clique: str, inside: MembersByNeed) -> Hashable:
        return self._kinds[clique], frozenset(inside.items())

    @cached_property
    def _kinds(self) -> dict[str, int]:
        """A number for each clique, the same where their trays have equal vacancies."""
        numbers: dict[Hashable, int] = {}
        return {
            clique: numbers.setdefault(
                tuple(sorted(self._capacity.vacancies(clique, self._needs))), len(numbers)
            )
            for clique in self._capacity.cliques
        }


# In which order cliques are tried.


class _CliqueFit(NamedTuple):
    """How well a clique takes one more subgroup; less is better."""

    closes: tuple[int, ...]
    """Free regions of each size."""
    left: int
    """Members that it could serve before the subgroup."""
    fits: int
    """Equal subgroups that it can take at most."""
    is_exact: bool
    """Else `closes` is a lower bound, and the subgroup may not fit."""


class _CliqueRank(NamedTuple):
    """Less is better. `order` breaks ties, so that equal inputs give equal plans."""

    negative_fits: int
    """Less, the more of the waiting subgroups of this shape fit."""
    fit: _CliqueFit
    order: int
    clique: str


class CliqueRanking:
    """The candidates for the next subgroup, while a search assigns subgroups and takes them back."""

    def __init__(
        self, trial: TrialPlacement, subgroups: Sequence[ColocationGroup], spares: int, budget: SearchBudget
    ) -> None:
        """No member of the gang is assigned yet."""
        self._trial = trial
        self._shapes = [group_shape(subgroup) for subgroup in subgroups]
        self._weight_bounds: Sequence[WeightBound] = ()
        self._spares = spares
        self._budget = budget
        capacity = trial.capacity
        by_need = {need: capacity.bounds(need) for need in members_by_need(subgroups)}
        self._bounds = {
            clique: {need: bounds[clique] for need, bounds in by_need.items()} for clique in capacity.cliques
        }
        self._empty = capacity.empty
        self.inside: dict[str, MembersByNeed] = {}
        """The members in each clique that is used."""
        self._order = {clique: order for order, clique in enumerate(capacity.cliques)}
        self._fits: dict[str, dict[GroupShape, _CliqueFit | None]] = {
            clique: {} for clique in capacity.cliques
        }
        """Computed fits. A fit depends on the clique alone, so only a change there discards it."""

    def changed(self, clique: str, inside: MembersByNeed) -> None:
        """The clique has these members of the gang now, in the trial too."""
        if inside:
            self.inside[clique] = inside
        else:
            del self.inside[clique]
        self._fits[clique] = {}

    def is_counting_exact(self, clique: str, wanted: MembersByNeed) -> bool:
        """Whether counting tells if members fit there."""
        return is_counting_exact(self._bounds[clique], wanted, self._spares)

    def prune_by(self, bounds: Sequence[WeightBound]) -> None:
        """From now on cliques that are too weak by one of the bounds are left out."""
        self._weight_bounds = bounds

    def best_first(self, number: int, most: int | None) -> Iterator[str]:
        """The cliques that can take a subgroup, of `most` that may be used.

        Unused ones follow only if all waiting subgroups of this shape fit into the cliques then open.
        """
        may_open = (len(self._fits) if most is None else most) - len(self.inside)
        if not all(bound.allows(self.inside, number, may_open) for bound in self._weight_bounds):
            return
        shape = self._shapes[number]
        waiting = self._shapes[number:].count(shape)
        # Cliques in use come before all others, whatever they close: fewest cliques is the first aim.
        used = self._ranks(list(self.inside), shape, waiting)
        fits = -sum(rank.negative_fits for rank in used)
        yield from self._ordered(used, shape)
        if may_open == 0:
            return
        unused = [clique for clique in self._fits if clique not in self.inside]
        for bound in self._weight_bounds:
            unused = bound.able(unused, self.inside, number, may_open)
        # If all cliques that may still be opened cannot take the waiting subgroups of this shape together,
        # opening one of them only leads to a later dead end.
        new = self._ranks(unused, shape, waiting)
        if fits - sum(sorted(rank.negative_fits for rank in new)[:may_open]) >= waiting:
            yield from self._ordered(new, shape)

    def _ordered(self, ranks: list[_CliqueRank], shape: GroupShape) -> Iterator[str]:
        """Best first. An inexact fit is a lower bound, so its clique is solved only when it comes first.

        It goes back onto the heap with its exact fit, which is never better: the order stays right.
        """
        heapify(ranks)
        while ranks:
            rank = heappop(ranks)
            if rank.fit.is_exact:
                yield rank.clique
                continue
            exact = self._solved_fit(rank.clique, shape, rank.fit)
            self._fits[rank.clique][shape] = exact
            if exact is not None:
                heappush(ranks, rank._replace(fit=exact))

    def _ranks(self, cliques: Iterable[str], shape: GroupShape, waiting: int) -> list[_CliqueRank]:
        ranks = []
        for clique in cliques:
            fits = self._fits[clique]
            if shape not in fits:
                fits[shape] = self._counted_fit(clique, shape)
            if (fit := fits[shape]) is not None:
                ranks.append(_CliqueRank(-min(fit.fits, waiting), fit, self._order[clique], clique))
        return ranks

    def _counted_fit(self, clique: str, shape: GroupShape) -> _CliqueFit | None:
        bounds, inside = self._bounds[clique], self.inside.get(clique, {})
        fits = max_groups_that_fit(bounds, inside, dict(shape))
        if fits <= 0:
            return None
        wanted = add_members(inside, shape)
        trays = min_opened_trays(bounds, wanted)
        if trays is None:
            return None
        # Tightness: among cliques that close equally many regions, the one with least room is taken.
        left = self._trial.clique_slots(clique, shape[0][0])
        return _CliqueFit(self._closes(clique, trays), left, fits, self.is_counting_exact(clique, wanted))

    def _solved_fit(self, clique: str, shape: GroupShape, counted: _CliqueFit) -> _CliqueFit | None:
        wanted = add_members(self.inside.get(clique, {}), shape)
        answer = solve_jointly(self._trial, clique, wanted, self._spares, self._budget)
        if answer is None:
            return None
        closes = counted.closes if answer.loads is None else self._closes(clique, answer.opened)
        return counted._replace(closes=closes, is_exact=True)

    def _closes(self, clique: str, opened: int) -> tuple[int, ...]:
        """`opened`: of the trays that were empty before the gang came."""
        empty = self._trial.empty(clique)
        return regions_closed(empty, max(0, opened - (self._empty[clique] - empty)))


# The price of a placement: free regions for later gangs.


REGION_SIZES = (16, 8, 4, 2, 1)
"""Gang sizes in trays that are watched, largest first: the recommended segments (16 of an NVL72's 18)."""


def regions_closed(empty: int, taken: int) -> tuple[int, ...]:
    """Free regions of each size that a clique with `empty` trays loses with `taken` of them."""
    return tuple(empty // size - (empty - taken) // size for size in REGION_SIZES)


def fragmentation_price(before: Sequence[int], after: Sequence[int]) -> tuple[FreeRegionCount, ...]:
    """The counts of free regions that change, given the empty trays of each clique."""
    counts = (
        FreeRegionCount(size, sum(empty // size for empty in before), sum(empty // size for empty in after))
        for size in REGION_SIZES
    )
    return tuple(count for count in counts if count.before != count.after)
