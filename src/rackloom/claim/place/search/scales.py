"""What blocks weigh against what cliques carry at most: it tells without a search what cannot come out.

No choice of cliques is enough where even the strongest ones are too weak together for the blocks that wait.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice

from rackloom.claim.place.search.blocks import Block, Inside, Wanted, wanted_by
from rackloom.claim.place.search.bound import carried_by
from rackloom.claim.place.search.ground import Ground
from rackloom.claim.place.search.loads import NEEDS, Need, in_order


class Scale:
    """One measure of members and cliques; no clique carries members that weigh more than its strength.

    Blocks are told by their number: those from `first` on wait.
    """

    def __init__(
        self, strengths: Mapping[str, int], weights: Mapping[Need, int], blocks: Sequence[Block]
    ) -> None:
        """`strengths` by clique, `weights` of one member; a need without a weight weighs nothing."""
        self._strengths = strengths
        self._weights = weights
        self._strongest = sorted(strengths, key=lambda clique: -strengths[clique])
        last_first = [self._weight(wanted_by([block])) for block in reversed(blocks)]
        self._together = list(accumulate(last_first))[::-1]
        """What each block weighs with all after it."""
        self._lightest = list(accumulate(last_first, min))[::-1]
        """The lightest of these."""

    def fewest(self) -> int:
        """So many cliques the blocks take at least; one more than there are where all are too weak."""
        totals = accumulate(self._strengths[clique] for clique in self._strongest)
        return 1 + sum(total < self._together[0] for total in totals)

    def is_enough(self, inside: Inside, first: int, may_begin: int) -> bool:
        """Whether the blocks that wait may fit beside who is `inside`, and in so many cliques more."""
        return self._lacking(inside, first, may_begin) <= 0

    def able(self, fresh: Iterable[str], inside: Inside, first: int, may_begin: int) -> list[str]:
        """The `fresh` cliques with which they may, when each is one of the cliques more."""
        lacking = self._lacking(inside, first, may_begin - 1)
        return [clique for clique in fresh if self._strengths[clique] >= lacking]

    def _lacking(self, inside: Inside, first: int, others: int) -> int:
        """What neither cliques in use can carry nor so many others; room too small for a block is lost."""
        left = [self._strengths[clique] - self._weight(wanted) for clique, wanted in inside.items()]
        here = sum([room for room in left if room >= self._lightest[first]])
        strongest = islice((clique for clique in self._strongest if clique not in inside), others)
        return self._together[first] - here - sum([self._strengths[clique] for clique in strongest])

    def _weight(self, wanted: Wanted) -> int:
        return sum([members * self._weights.get(need, 0) for need, members in wanted.items()])


def scales_of(ground: Ground, blocks: Sequence[Block], spares: int) -> list[Scale]:
    """One for each need alone, and one for all together; `spares` trays of each clique carry nobody."""
    wanted = wanted_by(blocks)
    alone = list(_by_need(ground, wanted, blocks)) if len(wanted) > 1 else []
    return alone if len(wanted) > NEEDS else [*alone, _together(ground, wanted, blocks, spares)]


def _by_need(ground: Ground, wanted: Wanted, blocks: Sequence[Block]) -> Iterator[Scale]:
    for need in wanted:
        capacities = {clique: outlook.capacity for clique, outlook in ground.outlooks(need).items()}
        yield Scale(capacities, {need: 1}, blocks)


def _together(ground: Ground, wanted: Wanted, blocks: Sequence[Block], spares: int) -> Scale:
    needs = in_order(wanted)
    cliques = {clique: ground.vacancies(clique, needs) for clique in ground.cliques}
    alike = frozenset([tray for trays in cliques.values() for tray in trays])
    carried = carried_by(alike, frozenset(), needs, tuple([wanted[need] for need in needs]))
    heaviest = {clique: [carried.heaviest[tray] for tray in trays] for clique, trays in cliques.items()}
    strengths = {clique: _besides(spares, loads) for clique, loads in heaviest.items()}
    return Scale(strengths, dict(zip(needs, carried.weights, strict=True)), blocks)


def _besides(spares: int, loads: Sequence[int]) -> int:
    """All loads but the lightest ones: a spare carries nobody, but could carry somebody."""
    return sum(sorted([load for load in loads if load])[spares:])
