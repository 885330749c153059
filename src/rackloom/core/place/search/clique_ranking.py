"""In which order cliques are tried for a colocation group, and which cannot lead to a solution.

Order: cliques already in use first; then those that fit more of the waiting groups of the same shape,
close fewest free regions, and fit tightest. Free regions count before tightness: two trays taken from 18
leave room for a gang of 16, two taken from 17 do not, although that fit is tighter. The watched sizes are
16, 8, 4, 2 and 1 trays; the recommended segment is 16 of an NVL72's 18 trays. `fragmentation_price`
reports the regions that a plan closes.

Fits are first computed by counting. Where counting is not exact, the joint assignment of a clique is
solved only when that clique would come next (lazy evaluation on a heap).

`WeightBound` prunes the search: a group weighs as much as its members, a clique carries at most its
strength, and no choice works where the cliques in use and the strongest others together are too weak for
all waiting groups. There is one bound per need and one for all needs together. The bounds apply from the
first dead end on.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate, islice
from typing import NamedTuple

from rackloom.core.place.placement_values import FreeRegionCount
from rackloom.core.place.search.joint_assignment import SearchBudget, carry_bound
from rackloom.core.place.search.site_capacity import (
    MAX_NEEDS,
    MemberNeed,
    SiteCapacity,
    is_counting_exact,
    max_groups_that_fit,
    min_opened_trays,
    ordered_needs,
)
from rackloom.core.place.search.tray_assignment import (
    ColocationGroup,
    GroupShape,
    MembersByClique,
    MembersByNeed,
    TrialPlacement,
    add_members,
    group_shape,
    joint_assignment,
    members_by_need,
)


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
        answer = joint_assignment(self._trial, clique, wanted, self._spares, self._budget)
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
