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
    """How a clique stands to one more block; less is better."""

    closes: tuple[int, ...]
    """Holes of each size."""
    left: int
    """Members that it could serve before the block."""
    fits: int
    """Blocks like this one that it can take at most."""
    is_exact: bool
    """Else the holes are the least that can be, and it may be that the block does not fit."""


class _CliqueRank(NamedTuple):
    """Less is better."""

    unlike: int
    """Less, the more of the waiting blocks like this one fit."""
    standing: _CliqueFit
    order: int
    clique: str


# Weight bounds over cliques.


class WeightBound:
    """One measure of members and cliques; no clique carries members that weigh more than its strength.

    Blocks are told by their number: those from `first` on wait.
    """

    def __init__(
        self,
        strengths: Mapping[str, int],
        weights: Mapping[MemberNeed, int],
        blocks: Sequence[ColocationGroup],
    ) -> None:
        """`strengths` by clique, `weights` of one member; a need without a weight weighs nothing."""
        self._strengths = strengths
        self._weights = weights
        self._strongest = sorted(strengths, key=lambda clique: -strengths[clique])
        last_first = [self._weight(members_by_need([block])) for block in reversed(blocks)]
        self._together = list(accumulate(last_first))[::-1]
        """What each block weighs with all after it."""
        self._lightest = list(accumulate(last_first, min))[::-1]
        """The lightest of these."""

    def fewest(self) -> int:
        """So many cliques the blocks take at least; one more than there are where all are too weak."""
        totals = accumulate(self._strengths[clique] for clique in self._strongest)
        return 1 + sum(total < self._together[0] for total in totals)

    def is_enough(self, inside: MembersByClique, first: int, may_begin: int) -> bool:
        """Whether the blocks that wait may fit beside who is `inside`, and in so many cliques more."""
        return self._lacking(inside, first, may_begin) <= 0

    def able(self, fresh: Iterable[str], inside: MembersByClique, first: int, may_begin: int) -> list[str]:
        """The `fresh` cliques with which they may, when each is one of the cliques more."""
        lacking = self._lacking(inside, first, may_begin - 1)
        return [clique for clique in fresh if self._strengths[clique] >= lacking]

    def _lacking(self, inside: MembersByClique, first: int, others: int) -> int:
        """What neither cliques in use can carry nor so many others; room too small for a block is lost."""
        left = [self._strengths[clique] - self._weight(wanted) for clique, wanted in inside.items()]
        here = sum([room for room in left if room >= self._lightest[first]])
        strongest = islice((clique for clique in self._strongest if clique not in inside), others)
        return self._together[first] - here - sum([self._strengths[clique] for clique in strongest])

    def _weight(self, wanted: MembersByNeed) -> int:
        return sum([members * self._weights.get(need, 0) for need, members in wanted.items()])


class CliqueRanking:
    """What is known of the cliques while the blocks of one gang come and go."""

    def __init__(
        self, board: TrialPlacement, blocks: Sequence[ColocationGroup], spares: int, effort: SearchBudget
    ) -> None:
        """The board has nobody of the gang yet."""
        self._board = board
        self._shapes = [group_shape(block) for block in blocks]
        self._scales: Sequence[WeightBound] = ()
        self._spares = spares
        self._effort = effort
        ground = board.ground
        by_need = {need: ground.outlooks(need) for need in members_by_need(blocks)}
        self._outlooks = {
            clique: {need: outlooks[clique] for need, outlooks in by_need.items()}
            for clique in ground.cliques
        }
        self._empty = ground.empty
        self.inside: dict[str, MembersByNeed] = {}
        """Who is in each clique that is used."""
        self._order = {clique: order for order, clique in enumerate(ground.cliques)}
        self._known: dict[str, dict[GroupShape, _CliqueFit | None]] = {
            clique: {} for clique in ground.cliques
        }

    def changed(self, clique: str, inside: MembersByNeed) -> None:
        """The clique has these members of the gang now, on the board too."""
        if inside:
            self.inside[clique] = inside
        else:
            del self.inside[clique]
        self._known[clique] = {}

    def counts(self, clique: str, wanted: MembersByNeed) -> bool:
        """Whether counting tells if members fit there, however they are seated."""
        return is_counting_exact(self._outlooks[clique], wanted, self._spares)

    def weigh(self, scales: Sequence[WeightBound]) -> None:
        """From now on cliques that are too weak by one of the scales are left out."""
        self._scales = scales

    def best_first(self, block: int, most: int | None) -> Iterator[str]:
        """The cliques that can take a block; new ones only if all waiting that are alike can sit with them.

        `most` cliques may be used.
        """
        may_begin = (len(self._known) if most is None else most) - len(self.inside)
        if not all(scale.is_enough(self.inside, block, may_begin) for scale in self._scales):
            return
        shape = self._shapes[block]
        waiting = self._shapes[block:].count(shape)
        used = self._ranks(list(self.inside), shape, waiting)
        seats = -sum(rank.unlike for rank in used)
        yield from self._ordered(used, shape)
        if may_begin == 0:
            return
        new = self._ranks(self._fresh(block, may_begin), shape, waiting)
        if seats - sum(sorted(rank.unlike for rank in new)[:may_begin]) >= waiting:
            yield from self._ordered(new, shape)

    def _fresh(self, block: int, may_begin: int) -> list[str]:
        """The cliques that may be begun for a block."""
        fresh = [clique for clique in self._known if clique not in self.inside]
        for scale in self._scales:
            fresh = scale.able(fresh, self.inside, block, may_begin)
        return fresh

    def _ordered(self, ranks: list[_CliqueRank], shape: GroupShape) -> Iterator[str]:
        """Best first. What counting leaves open is looked at when the clique would come next."""
        heapify(ranks)
        while ranks:
            rank = heappop(ranks)
            if rank.standing.is_exact:
                yield rank.clique
                continue
            exact = self._looked_at(rank.clique, shape, rank.standing)
            self._known[rank.clique][shape] = exact
            if exact is not None:
                heappush(ranks, rank._replace(standing=exact))

    def _ranks(self, cliques: Iterable[str], shape: GroupShape, waiting: int) -> list[_CliqueRank]:
        ranks = []
        for clique in cliques:
            known = self._known[clique]
            if shape not in known:
                known[shape] = self._counted(clique, shape)
            if (found := known[shape]) is not None:
                ranks.append(_CliqueRank(-min(found.fits, waiting), found, self._order[clique], clique))
        return ranks

    def _counted(self, clique: str, shape: GroupShape) -> _CliqueFit | None:
        outlooks, inside = self._outlooks[clique], self.inside.get(clique, {})
        many = max_groups_that_fit(outlooks, inside, dict(shape))
        if many <= 0:
            return None
        wanted = add_members(inside, shape)
        trays = min_opened_trays(outlooks, wanted)
        if trays is None:
            return None
        left = self._board.capacity(clique, shape[0][0])
        return _CliqueFit(self._closes(clique, trays), left, many, self.counts(clique, wanted))

    def _looked_at(self, clique: str, shape: GroupShape, counted: _CliqueFit) -> _CliqueFit | None:
        wanted = add_members(self.inside.get(clique, {}), shape)
        answer = joint_assignment(self._board, clique, wanted, self._spares, self._effort)
        if answer is None:
            return None
        closes = counted.closes if answer.loads is None else self._closes(clique, answer.opened)
        return counted._replace(closes=closes, is_exact=True)

    def _closes(self, clique: str, opened: int) -> tuple[int, ...]:
        """`opened`: of the trays that were empty before the gang came."""
        empty = self._board.empty(clique)
        return regions_closed(empty, max(0, opened - (self._empty[clique] - empty)))


# The price of a placement: free regions for later gangs.


REGION_SIZES = (16, 8, 4, 2, 1)
"""Gang sizes in trays that are watched, largest first: the recommended segments (16 of an NVL72's 18)."""


def regions_closed(empty: int, taken: int) -> tuple[int, ...]:
    """Holes of each size that a clique with `empty` trays loses with `taken` of them."""
    return tuple(empty // size - (empty - taken) // size for size in REGION_SIZES)


def fragmentation_price(before: Sequence[int], after: Sequence[int]) -> tuple[FreeRegionCount, ...]:
    """The holes that change, given the empty trays of each clique."""
    counts = (
        FreeRegionCount(size, sum(empty // size for empty in before), sum(empty // size for empty in after))
        for size in REGION_SIZES
    )
    return tuple(hole for hole in counts if hole.before != hole.after)


def weight_bounds(ground: SiteCapacity, blocks: Sequence[ColocationGroup], spares: int) -> list[WeightBound]:
    """One for each need alone, and one for all together; `spares` trays of each clique carry nobody."""
    wanted = members_by_need(blocks)
    alone = list(_bounds_by_need(ground, wanted, blocks)) if len(wanted) > 1 else []
    return alone if len(wanted) > MAX_NEEDS else [*alone, _joint_bound(ground, wanted, blocks, spares)]


def _bounds_by_need(
    ground: SiteCapacity, wanted: MembersByNeed, blocks: Sequence[ColocationGroup]
) -> Iterator[WeightBound]:
    for need in wanted:
        capacities = {clique: outlook.capacity for clique, outlook in ground.outlooks(need).items()}
        yield WeightBound(capacities, {need: 1}, blocks)


def _joint_bound(
    ground: SiteCapacity, wanted: MembersByNeed, blocks: Sequence[ColocationGroup], spares: int
) -> WeightBound:
    needs = ordered_needs(wanted)
    cliques = {clique: ground.vacancies(clique, needs) for clique in ground.cliques}
    alike = frozenset([tray for trays in cliques.values() for tray in trays])
    carried = carry_bound(alike, frozenset(), needs, tuple([wanted[need] for need in needs]))
    heaviest = {clique: [carried.heaviest[tray] for tray in trays] for clique, trays in cliques.items()}
    strengths = {clique: _strength_without_spares(spares, loads) for clique, loads in heaviest.items()}
    return WeightBound(strengths, dict(zip(needs, carried.weights, strict=True)), blocks)


def _strength_without_spares(spares: int, loads: Sequence[int]) -> int:
    """All loads but the lightest ones: a spare carries nobody, but could carry somebody."""
    return sum(sorted([load for load in loads if load])[spares:])
