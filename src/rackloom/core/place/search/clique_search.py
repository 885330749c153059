"""The one search of trays: choose a clique for each colocation group of a request.

Gangs, instances of tenants, batches, moves of running jobs and the map's advice all end here. They differ in
the values of their request and of the cliques that it meets:

| difference | value |
|---|---|
| empty trays only, each taken whole | `exclusive` of the capacity (`site_view`) |
| claims, the IMEX channel, trays that only some members may use | `MemberNeed` (`gang_needs`) |
| several domains are allowed | one colocation group for each part that shares a domain |
| no two groups share a clique | `CliqueRequest.apart` |
| spare trays | `CliqueRequest.spares` |
| domains that hold the tenant's members first | `CliquePreference.first` (`site_view`) |
| its reserved trays, and the tightest fit, before free regions | `CliquePreference.then` |
| trays that are reserved, closed or unhealthy | they are closed, or the capacity lacks them |
| whether there is a choice at all | `CliqueRequest.fewest` is false: the first solution counts |

`choose_cliques` minimises lexicographically: fewest cliques, then fewest free regions closed, then
tightest fit. After a first solution the search is repeated with one clique less, until it fails or reaches
the lower bound of the weight bounds. Depth-first backtracking finds each solution, with bounds and recorded
dead ends.

Order of candidates (`CliqueRanking`): cliques already in use first, then those that are nearest, that fit
more of the waiting groups of the same shape, close fewest free regions, and fit tightest. Free regions count
before tightness: two trays taken from 18 leave room for a gang of 16, two taken from 17 do not, although that
fit is tighter. The watched sizes are 16, 8, 4, 2 and 1 trays. The recommended segment is 16 of an NVL72's 18
trays. `fragmentation_price` reports the regions that a plan closes. Fits are first computed by counting.
If counting is not exact, the joint assignment of a clique is solved only when that clique would come next
(lazy evaluation on a heap).

`WeightBound` prunes: a group weighs as much as its members, a clique carries at most its strength, and no
choice works if the cliques in use and the strongest others together are too weak for all waiting groups.
There is one bound per need and one for all needs together. The bounds apply from the first dead end on.

`NogoodTable` records choices that led nowhere. Whether the remaining groups fit depends only on the groups
in each clique, and equal groups and equal cliques are interchangeable, so one record covers all symmetric
choices. A choice is encoded as one integer with a digit per possible clique content, which is updated
incrementally.

When groups in one clique compete for trays, all of them are assigned again, jointly. If that search gives
up, they are assigned in turn. Each search may run into 400 dead ends. Further ones are charged to the budget
of the gang. A search that exhausts both ends without a solution, although there may be one.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from rackloom.core.cluster.trays import REGION_SIZES, FreeRegionCount
from rackloom.core.place.search.gang_needs import (
    MAX_NEEDS,
    BoundsByNeed,
    ColocationGroup,
    GroupShape,
    MemberNeed,
    MembersByClique,
    MembersByNeed,
    add_members,
    group_shape,
    is_counting_exact,
    max_groups_that_fit,
    members_by_need,
    min_opened_trays,
    ordered_needs,
)
from rackloom.core.place.search.site_view import CliqueShape, ShapeMembers, SiteCapacity, remembered
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
        capacity: SiteCapacity,
        strengths: Mapping[Hashable, int],
        weights: Mapping[MemberNeed, int],
        subgroups: Sequence[ColocationGroup],
    ) -> None:
        """`strengths` by key of a shape, `weights` of one member. Other needs weigh nothing."""
        self._capacity = capacity
        self._weights = weights
        self._strengths = strengths
        self._strongest = sorted(
            ((strengths[key], len(alike.orders), key) for key, alike in capacity.states.shapes.items()),
            key=lambda entry: -entry[0],
        )
        """Strength, cliques and key of each shape."""
        # A search takes the subgroups in order, so those that wait are always a tail of them.
        last_first = [self._weight(members_by_need([subgroup])) for subgroup in reversed(subgroups)]
        self._waiting = list(accumulate(last_first))[::-1]
        """By number: the weight of the subgroup and of all after it."""
        self._lightest = list(accumulate(last_first, min))[::-1]
        """By number: the lightest of these."""

    def min_cliques(self) -> int:
        """A lower bound for the cliques that all subgroups take: more than exist if all are too weak."""
        cliques, left = 1, self._waiting[0]
        for strength, count, _ in self._strongest:
            if left <= 0:
                break
            # As many as leave something over.
            weak = min(count, -(-left // strength) - 1) if strength > 0 else count
            cliques, left = cliques + weak, left - weak * strength
            if weak < count:
                break
        return cliques

    def allows(self, inside: MembersByClique, first: int, may_open: int) -> bool:
        """Whether the waiting subgroups may fit beside those `inside` when `may_open` cliques are opened."""
        return self._missing(inside, first, may_open) <= 0

    def able(
        self, unused: Iterable[ShapeMembers], inside: MembersByClique, first: int, may_open: int
    ) -> list[ShapeMembers]:
        """The shapes of `unused` cliques of which one may be opened now, with others to come."""
        missing = self._missing(inside, first, may_open - 1)
        return [alike for alike in unused if self._strengths[alike.shape.key] >= missing]

    def _missing(self, inside: MembersByClique, first: int, others: int) -> int:
        """The weight that neither the cliques in use nor the strongest `others` can carry.

        Room in a used clique that is too small for the lightest waiting subgroup does not count.
        """
        used = {clique: self._capacity.shape(clique).key for clique in inside}
        left = [self._strengths[used[clique]] - self._weight(members) for clique, members in inside.items()]
        missing = self._waiting[first] - sum([room for room in left if room >= self._lightest[first]])
        # The strongest unused cliques bound the weight that any choice of `others` cliques can carry.
        taken = Counter[Hashable](used.values())
        for strength, count, key in self._strongest:
            if others <= 0:
                break
            opened = min(others, count - taken[key])
            missing, others = missing - opened * strength, others - opened
        return missing

    def _weight(self, wanted: MembersByNeed) -> int:
        return sum([members * self._weights.get(need, 0) for need, members in wanted.items()])


def weight_bounds(
    capacity: SiteCapacity, subgroups: Sequence[ColocationGroup], spares: int
) -> list[WeightBound]:
    """One for each need alone, and one for all together. `spares` trays of each clique carry nothing."""
    wanted, shapes = members_by_need(subgroups), capacity.states.shapes
    bounds = []
    # One need alone can fail although the mix of all looks light enough. A single need has one bound.
    for need in wanted if len(wanted) > 1 else ():
        counted = {key: alike.shape.bounds(need).capacity for key, alike in shapes.items()}
        bounds.append(WeightBound(capacity, counted, {need: 1}, subgroups))
    if len(wanted) > MAX_NEEDS:
        return bounds
    needs = ordered_needs(wanted)
    kinds = frozenset([tray for alike in shapes.values() for tray, _ in alike.shape.vacancies(needs)])
    carried = carry_bound(kinds, frozenset(), needs, tuple([wanted[need] for need in needs]))
    strengths = {}
    for key, alike in shapes.items():
        # The lightest loads are left out: a spare carries nothing now, but has to be able to carry something.
        loads = [(load, n) for tray, n in alike.shape.vacancies(needs) if (load := carried.heaviest[tray])]
        strengths[key] = sum(sorted([load for load, count in loads for _ in range(count)])[spares:])
    weights = dict(zip(needs, carried.weights, strict=True))
    return [*bounds, WeightBound(capacity, strengths, weights, subgroups)]


# The search.


FREE_DEAD_ENDS = 400
"""Dead ends that each search has for itself: subgroups of unlike sizes can be packed in exponentially many
ways."""


class CliqueChoice(NamedTuple):
    """One subgroup in its clique."""

    subgroup: ColocationGroup
    clique: str
    assignments: TrayAssignments


class CliqueRequest(NamedTuple):
    """The subgroups for which one search chooses cliques, and the rules of the choice."""

    subgroups: Sequence[ColocationGroup]
    spares: int = 0
    """Trays to leave free in each clique that is used."""
    apart: bool = False
    """No two subgroups are in one clique."""
    fewest: bool = True
    """If false, the first solution is taken: to know if there is one, or because near cliques come first."""


def choose_cliques(
    trial: TrialPlacement, request: CliqueRequest, budget: SearchBudget
) -> list[CliqueChoice] | None:
    """A clique for each subgroup, in their order. None if none was found: then nothing is assigned."""
    search = CliqueSearch(trial, request, budget)
    best = search.run()
    # Equal subgroups fill the fewest cliques at once, so the loop mostly ends at its first condition.
    while best is not None and (cliques := len({choice.clique for choice in best})) > 1:
        if not request.fewest or request.apart or search.needs(cliques):
            break
        fewer = search.run(most=cliques - 1)
        if fewer is None:
            # The failed run has undone everything, and the caller builds its plan from the trial.
            for choice in best:
                assign(trial, choice.assignments)
            break
        best = fewer
    return best


def fitting_cliques(capacity: SiteCapacity, subgroup: ColocationGroup) -> Iterator[str]:
    """Each clique that takes a subgroup, in the order in which the search would choose them."""
    ranking = CliqueRanking(TrialPlacement(capacity), CliqueRequest([subgroup]), SearchBudget())
    return ranking.best_first(0, None)


class _CliqueContent(NamedTuple):
    """The subgroups that a search has put into one clique."""

    subgroups: tuple[ColocationGroup, ...] = ()
    assignments: tuple[TrayAssignments, ...] = ()
    """One for each subgroup."""


class CliqueSearch:
    """A depth-first search with a bounded number of dead ends. Its solution stays in the trial."""

    def __init__(self, trial: TrialPlacement, request: CliqueRequest, budget: SearchBudget) -> None:
        """No member of the gang is assigned yet."""
        self._trial = trial
        self._subgroups, self._spares = request.subgroups, request.spares
        self._budget = budget
        self._ranking = CliqueRanking(trial, request, budget)
        self._nogoods = NogoodTable(trial.capacity, members_by_need(request.subgroups))
        self._inside: dict[str, _CliqueContent] = {}
        self._steps: list[tuple[str, _CliqueContent]] = []
        """The clique of each subgroup so far, and its content before."""

    def needs(self, cliques: int) -> bool:
        """Whether it is known, without a search, that no fewer cliques take the subgroups."""
        # Counting comes first. The weight bounds cost more, and a search without a dead end has none yet.
        if self._ranking.min_cliques() >= cliques:
            return True
        return max([bound.min_cliques() for bound in self._bounds]) >= cliques

    def run(self, most: int | None = None) -> list[CliqueChoice] | None:
        """A clique for each subgroup, in their order, or None if the search found none.

        `most` cliques may be used, fewer than in a run before. The solution of that run is undone, but its
        nogoods hold here too: a choice that failed with more cliques fails with fewer.
        """
        self._undo_all()
        # Invariant: the trial, the ranking and the nogood table all have the choices of `_steps`, and
        # candidates[n] yields the cliques not yet tried for subgroup n, given the choices before it.
        candidates: list[Iterator[str]] = []
        dead_ends = 0
        while len(self._steps) < len(self._subgroups):
            subgroup = self._subgroups[len(self._steps)]
            # After a step back the iterator of this subgroup is still there, and goes on where it stopped.
            if len(candidates) == len(self._steps):
                candidates.append(self._ranking.best_first(len(self._steps), most))
            # Advance: the first clique that takes the subgroup and leads to no recorded dead end.
            for clique in candidates[-1]:
                shape = [(part.need, part.members) for part in subgroup]
                inside = self._ranking.inside.get(clique, {})
                if self._nogoods and self._nogoods.has(clique, add_members(inside, shape)):
                    continue
                before = self._inside.get(clique, _CliqueContent())
                assigned = self._add_to_clique(clique, before, subgroup)
                if assigned is not None:
                    self._steps.append((clique, before))
                    self._set(clique, _CliqueContent((*before.subgroups, subgroup), assigned))
                    break
            else:
                # Every clique failed for this subgroup, so nothing follows from the choices that stand.
                dead_ends += 1
                if not self._steps or (
                    dead_ends > FREE_DEAD_ENDS and not self._budget.charge_dead_end(len(self._ranking.inside))
                ):
                    self._undo_all()
                    return None
                self._nogoods.add()
                # One dead end shows that the case is tight, so from now on the weight bounds are worth it.
                self._ranking.weight_bounds = self._bounds
                candidates.pop()
                self._undo()
        # A later subgroup may have moved earlier ones of its clique, so only the last contents count.
        assignments = {clique: iter(inside.assignments) for clique, inside in self._inside.items()}
        return [
            CliqueChoice(subgroup, clique, next(assignments[clique]))
            for subgroup, (clique, _) in zip(self._subgroups, self._steps, strict=True)
        ]

    @cached_property
    def _bounds(self) -> list[WeightBound]:
        """Computed at the first dead end: mostly the first choices fit, and no bound is needed."""
        return weight_bounds(self._trial.capacity, self._subgroups, self._spares)

    def _add_to_clique(
        self, clique: str, before: _CliqueContent, subgroup: ColocationGroup
    ) -> tuple[TrayAssignments, ...] | None:
        """Assign one more subgroup in a clique. If it does not fit, return None and change nothing."""
        subgroups = (*before.subgroups, subgroup)
        wanted = members_by_need(subgroups)
        # If counting is exact, best fit beside the others loses nothing, and costs no joint search.
        if self._ranking.is_counting_exact(clique, wanted):
            beside = assign_best_fit(self._trial, clique, subgroup)
            if beside is not None:
                return (*before.assignments, beside)
        answer = solve_jointly(self._trial, clique, wanted, self._spares, self._budget)
        if answer is not None and answer.loads is not None:
            # The joint answer may use other trays for the members that are here already, so all start again.
            for assignments in before.assignments:
                unassign(self._trial, assignments)
            return assign_jointly(self._trial, clique, subgroups, answer.loads)
        # The joint search gave up or found nothing. Assigning in turn may miss a solution, but makes no
        # wrong one.
        beside = assign_best_fit(self._trial, clique, subgroup)
        if beside is None:
            return None
        found = (*before.assignments, beside)
        # Best fit knows nothing of spares. It may have taken the trays that were to stay free.
        if self._spares and len(spare_trays(self._trial, clique, found)) < self._spares:
            unassign(self._trial, beside)
            return None
        return found

    def _undo_all(self) -> None:
        while self._steps:
            self._undo()

    def _undo(self) -> None:
        """Take back the newest choice, and put earlier members back that a joint assignment moved."""
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
    that kind have that content. Cliques are of one kind if their trays have equal vacancies. So choices that
    differ only in which of equal cliques has which of equal subgroups have the same number, and a step
    changes the digits of one clique only.
    """

    def __init__(self, capacity: SiteCapacity, wanted: MembersByNeed) -> None:
        """No nogood yet, and no member in a clique. The gang has the members `wanted`."""
        self._capacity = capacity
        self._needs = ordered_needs(wanted)
        self._bits = len(capacity.cliques).bit_length()
        """Of a digit: it counts up to all cliques, so it never carries over."""
        self._ones: dict[Hashable, int] = {}
        """A one in each digit."""
        self._counted: dict[str, int] = {}
        """The number that each clique adds to the choice."""
        self._changed: dict[str, MembersByNeed] = {}
        """Contents that are not counted yet: most searches come to no dead end."""
        self._choice = 0
        self._nogoods: set[int] = set()
        self._kinds: dict[Hashable, int] = {}
        """By key of a shape."""
        self._numbers: dict[Hashable, int] = {}
        """By vacancies."""

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
        self._count()
        # A content that no choice has had yet has no digit, so it is in no recorded choice.
        added = self._ones.get(self._digit(clique, inside))
        return added is not None and self._choice - self._counted.get(clique, 0) + added in self._nogoods

    def _count(self) -> None:
        for clique, inside in self._changed.items():
            # A clique that a search has left again adds nothing, like one that it never used.
            added = 0
            if inside:
                added = self._ones.setdefault(self._digit(clique, inside), 1 << self._bits * len(self._ones))
            # The clique's former content leaves the number, and the new one enters it.
            self._choice += added - self._counted.get(clique, 0)
            self._counted[clique] = added
        self._changed.clear()

    def _digit(self, clique: str, inside: MembersByNeed) -> Hashable:
        shape = self._capacity.shape(clique)
        kind = self._kinds.get(shape.key)
        if kind is None:
            # Two shapes are of one kind if their trays have equal vacancies for this gang.
            vacancies = shape.vacancies(self._needs)
            kind = self._kinds[shape.key] = self._numbers.setdefault(vacancies, len(self._numbers))
        return kind, frozenset(inside.items())


# In which order cliques are tried.


class _CliqueFit(NamedTuple):
    """How well a clique takes one more subgroup. Less is better."""

    closes: tuple[int, ...]
    """Free regions of each size."""
    left: int
    """Members that it could serve before the subgroup."""
    fits: int
    """Equal subgroups that it can take at most."""
    is_exact: bool
    """If false, `closes` is a lower bound, and the subgroup may not fit."""


class _CliqueRank(NamedTuple):
    """Less is better. `order` breaks ties, so that equal inputs give equal plans."""

    first: tuple[int, ...]
    negative_fits: int
    """Less, the more of the waiting subgroups of this shape fit."""
    then: tuple[int, ...]
    fit: _CliqueFit
    order: int
    """The position of the clique. Of several equal cliques, the first that is not tried yet."""


class CliqueRanking:
    """The candidates for the next subgroup, while a search assigns subgroups and takes them back.

    Unused cliques of one shape are ranked together. A clique in use is ranked alone.
    """

    def __init__(self, trial: TrialPlacement, request: CliqueRequest, budget: SearchBudget) -> None:
        """No member of the gang is assigned yet."""
        self._trial = trial
        self._capacity = trial.capacity
        self._groups = [group_shape(subgroup) for subgroup in request.subgroups]
        seen = Counter[GroupShape]()
        self._waiting: list[int] = []
        """By number: how many of this subgroup and those after it have its shape."""
        for group in reversed(self._groups):
            seen[group] += 1
            self._waiting.append(seen[group])
        self._waiting.reverse()
        self._needs = tuple(members_by_need(request.subgroups))
        self.weight_bounds: Sequence[WeightBound] = ()
        """Cliques that are too weak by one of these are left out."""
        self._spares = request.spares
        self._apart = request.apart
        self._budget = budget
        self.inside: dict[str, MembersByNeed] = {}
        """The members in each clique that is used."""
        self._used_fits: dict[str, dict[GroupShape, _CliqueFit | None]] = {}
        """Of cliques in use. A fit depends on the clique alone, so only a change there discards it."""
        self._solved_fits: dict[tuple[Hashable, GroupShape], _CliqueFit | None] = {}
        """Exact fits of unused cliques, by key of their shape."""

    def changed(self, clique: str, inside: MembersByNeed) -> None:
        """The clique has these members of the gang now, in the trial too."""
        if inside:
            self.inside[clique] = inside
        else:
            del self.inside[clique]
        self._used_fits[clique] = {}

    def is_counting_exact(self, clique: str, wanted: MembersByNeed) -> bool:
        """Whether counting decides if members fit there."""
        return is_counting_exact(self._bounds(self._capacity.shape(clique)), wanted, self._spares)

    def min_cliques(self) -> int:
        """A lower bound for the cliques that the subgroups of the first one's shape take, by counting."""
        group, waiting = self._groups[0], self._waiting[0]
        unused = self._capacity.states.shapes.values()
        found = [
            (fit.fits, len(orders)) for shape, orders in unused if (fit := self._unused_fit(shape, group))
        ]
        # The cliques that take most come first: no other order needs fewer.
        cliques = 0
        for fits, count in sorted(found, reverse=True):
            opened = min(count, -(-waiting // fits))
            cliques, waiting = cliques + opened, waiting - opened * fits
            if waiting <= 0:
                break
        return cliques

    def best_first(self, number: int, most: int | None) -> Iterator[str]:
        """The cliques that can take a subgroup, of `most` that may be used.

        Unused ones follow only if all waiting subgroups of this shape fit into the cliques then open.
        """
        may_open = (len(self._capacity.cliques) if most is None else most) - len(self.inside)
        if not all(bound.allows(self.inside, number, may_open) for bound in self.weight_bounds):
            return
        group, waiting = self._groups[number], self._waiting[number]
        # Cliques in use come before all others, even if they close more: fewest cliques is the first aim.
        used: list[_RankedCliques] = []
        for clique in () if self._apart else self.inside:
            # A fit of a clique in use holds until its members change (`changed`).
            counted, shape = self._used_fits[clique], self._capacity.shape(clique)
            if group not in counted:
                counted[group] = self._counted_fit(shape, group, clique)
            if (fit := counted[group]) is not None:
                order = self._capacity.view.order(clique)
                used.append((self._rank(shape, fit, waiting, order), (order,)))
        fits = -sum(rank.negative_fits for rank, _ in used)
        yield from self._ordered(used, group)
        if may_open == 0:
            return
        unused = list(self._capacity.states.shapes.values())
        for bound in self.weight_bounds:
            unused = bound.able(unused, self.inside, number, may_open)
        new = self._unused_ranks(unused, group, waiting)
        # If all cliques that may still be opened cannot take the waiting subgroups of this shape together,
        # opening one of them only leads to a later dead end.
        for rank, cliques in sorted(new, key=lambda entry: entry[0].negative_fits):
            opened = min(may_open, len(cliques))
            fits, may_open = fits - opened * rank.negative_fits, may_open - opened
        if fits >= waiting:
            yield from self._ordered(new, group)

    def _ordered(self, ranks: "list[_RankedCliques]", group: GroupShape) -> Iterator[str]:
        """Best first. An inexact fit is a lower bound, so it is solved only when its cliques come first.

        They go back onto the heap with their exact fit, which is never better: the order stays right.
        """
        # The second entry of a tuple distinguishes equal ranks. No two have one order.
        heap = [(rank, 0, cliques) for rank, cliques in ranks]
        heapify(heap)
        while heap:
            rank, at, cliques = heappop(heap)
            clique = self._capacity.view.clique_named(cliques[at])
            if rank.fit.is_exact:
                yield clique
                if at + 1 < len(cliques):
                    heappush(heap, (rank._replace(order=cliques[at + 1]), at + 1, cliques))
                continue
            exact = self._solved_fit(clique, group, rank.fit)
            if exact is not None:
                heappush(heap, (rank._replace(fit=exact), at, cliques))

    def _unused_ranks(
        self, unused: Iterable[ShapeMembers], group: GroupShape, waiting: int
    ) -> "list[_RankedCliques]":
        # The index of shapes is the site's, so the cliques that this search uses still count as unused.
        in_use: dict[Hashable, set[int]] = {}
        for clique in self.inside:
            order = self._capacity.view.order(clique)
            in_use.setdefault(self._capacity.shape(clique).key, set()).add(order)
        ranks = []
        for shape, orders in unused:
            if (fit := self._unused_fit(shape, group)) is None:
                continue
            # Copy the positions only if some are in use: a shape may have thousands of cliques.
            if taken := in_use.get(shape.key):
                orders = [order for order in orders if order not in taken]
            if orders:
                ranks.append((self._rank(shape, fit, waiting, orders[0]), orders))
        return ranks

    def _rank(self, shape: CliqueShape, fit: _CliqueFit, waiting: int, order: int) -> _CliqueRank:
        first, then = shape.preference
        return _CliqueRank(first, -1 if self._apart else -min(fit.fits, waiting), then, fit, order)

    def _unused_fit(self, shape: CliqueShape, group: GroupShape) -> _CliqueFit | None:
        if (shape.key, group) in self._solved_fits:
            return self._solved_fits[shape.key, group]
        # By counting, the fit is the same for every gang, so the shape keeps it beyond this search.
        key = (group, self._spares)
        fit: _CliqueFit | None = remembered(shape.fits, key, lambda: self._counted_fit(shape, group, None))
        return fit

    def _counted_fit(self, shape: CliqueShape, group: GroupShape, clique: str | None) -> _CliqueFit | None:
        """The fit in a clique of a shape. `clique` is None for one that has no members yet."""
        inside: MembersByNeed = {} if clique is None else self.inside[clique]
        bounds = self._bounds(shape)
        fits = max_groups_that_fit(bounds, inside, dict(group))
        if fits <= 0:
            return None
        wanted = add_members(inside, group)
        trays = min_opened_trays(bounds, wanted)
        if trays is None:
            return None
        # Tightness: among cliques that close equally many regions, the one with least room is taken.
        need = group[0][0]
        left = bounds[need].capacity if clique is None else self._trial.clique_slots(clique, need)
        empty = shape.empty if clique is None else self._trial.empty(clique)
        closes = _regions_closed_by(shape, empty, trays)
        return _CliqueFit(closes, left, fits, is_counting_exact(bounds, wanted, self._spares))

    def _solved_fit(self, clique: str, group: GroupShape, counted: _CliqueFit) -> _CliqueFit | None:
        shape = self._capacity.shape(clique)
        wanted = add_members(self.inside.get(clique, {}), group)
        answer = solve_jointly(self._trial, clique, wanted, self._spares, self._budget)
        fit = None
        if answer is not None:
            # An answer without loads means that the search gave up. The counted fit is then final.
            closes = counted.closes
            if answer.loads is not None:
                closes = _regions_closed_by(shape, self._trial.empty(clique), answer.opened)
            fit = counted._replace(closes=closes, is_exact=True)
        # Unused cliques of one shape share the answer. It depends on this search's budget, so it stays here.
        if clique in self.inside:
            self._used_fits[clique][group] = fit
        else:
            self._solved_fits[shape.key, group] = fit
        return fit

    def _bounds(self, shape: CliqueShape) -> BoundsByNeed:
        return {need: shape.bounds(need) for need in self._needs}


_RankedCliques = tuple[_CliqueRank, Sequence[int]]
"""Cliques of one rank by position, ascending."""


def _regions_closed_by(shape: CliqueShape, empty: int, opened: int) -> tuple[int, ...]:
    """Free regions that a clique loses that has `empty` trays now, and uses `opened` of those that it had."""
    return regions_closed(empty, max(0, opened - (shape.empty - empty)))


# The price of a placement: free regions for later gangs.


def regions_closed(empty: int, taken: int) -> tuple[int, ...]:
    """Free regions of each size that a clique with `empty` trays loses with `taken` of them."""
    return tuple(empty // size - (empty - taken) // size for size in REGION_SIZES)


def fragmentation_price(before: Sequence[int], after: Sequence[int]) -> tuple[FreeRegionCount, ...]:
    """The counts of free regions that change, given those of each of REGION_SIZES."""
    counts = map(FreeRegionCount, REGION_SIZES, before, after)
    return tuple(count for count in counts if count.before != count.after)
