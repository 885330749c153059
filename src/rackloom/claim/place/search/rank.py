"""In which order the cliques are tried for a block: one in use first, fewest holes closed, tightest fit."""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from rackloom.claim.place.search.blocks import Block, Shape, Wanted, both, shape_of, wanted_by
from rackloom.claim.place.search.board import Board
from rackloom.claim.place.search.effort import Effort
from rackloom.claim.place.search.holes import closed
from rackloom.claim.place.search.outlook import count_that_fit, is_exact, opened
from rackloom.claim.place.search.scales import Scale
from rackloom.claim.place.search.sit import ways_together


class _Standing(NamedTuple):
    """How a clique stands to one more block; less is better."""

    closes: tuple[int, ...]
    """Holes of each size."""
    left: int
    """Members that it could serve before the block."""
    fits: int
    """Blocks like this one that it can take at most."""
    is_exact: bool
    """Else the holes are the least that can be, and it may be that the block does not fit."""


class _Rank(NamedTuple):
    """Less is better."""

    unlike: int
    """Less, the more of the waiting blocks like this one fit."""
    standing: _Standing
    order: int
    clique: str


class Ranking:
    """What is known of the cliques while the blocks of one gang come and go."""

    def __init__(self, board: Board, blocks: Sequence[Block], spares: int, effort: Effort) -> None:
        """The board has nobody of the gang yet."""
        self._board = board
        self._shapes = [shape_of(block) for block in blocks]
        self._scales: Sequence[Scale] = ()
        self._spares = spares
        self._effort = effort
        ground = board.ground
        by_need = {need: ground.outlooks(need) for need in wanted_by(blocks)}
        self._outlooks = {
            clique: {need: outlooks[clique] for need, outlooks in by_need.items()}
            for clique in ground.cliques
        }
        self._empty = ground.empty
        self.inside: dict[str, Wanted] = {}
        """Who is in each clique that is used."""
        self._order = {clique: order for order, clique in enumerate(ground.cliques)}
        self._known: dict[str, dict[Shape, _Standing | None]] = {clique: {} for clique in ground.cliques}

    def changed(self, clique: str, inside: Wanted) -> None:
        """The clique has these members of the gang now, on the board too."""
        if inside:
            self.inside[clique] = inside
        else:
            del self.inside[clique]
        self._known[clique] = {}

    def counts(self, clique: str, wanted: Wanted) -> bool:
        """Whether counting tells if members fit there, however they are seated."""
        return is_exact(self._outlooks[clique], wanted, self._spares)

    def weigh(self, scales: Sequence[Scale]) -> None:
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

    def _ordered(self, ranks: list[_Rank], shape: Shape) -> Iterator[str]:
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

    def _ranks(self, cliques: Iterable[str], shape: Shape, waiting: int) -> list[_Rank]:
        ranks = []
        for clique in cliques:
            known = self._known[clique]
            if shape not in known:
                known[shape] = self._counted(clique, shape)
            if (found := known[shape]) is not None:
                ranks.append(_Rank(-min(found.fits, waiting), found, self._order[clique], clique))
        return ranks

    def _counted(self, clique: str, shape: Shape) -> _Standing | None:
        outlooks, inside = self._outlooks[clique], self.inside.get(clique, {})
        many = count_that_fit(outlooks, inside, dict(shape))
        if many <= 0:
            return None
        wanted = both(inside, shape)
        trays = opened(outlooks, wanted)
        if trays is None:
            return None
        left = self._board.capacity(clique, shape[0][0])
        return _Standing(self._closes(clique, trays), left, many, self.counts(clique, wanted))

    def _looked_at(self, clique: str, shape: Shape, counted: _Standing) -> _Standing | None:
        wanted = both(self.inside.get(clique, {}), shape)
        answer = ways_together(self._board, clique, wanted, self._spares, self._effort)
        if answer is None:
            return None
        closes = counted.closes if answer.loads is None else self._closes(clique, answer.opened)
        return counted._replace(closes=closes, is_exact=True)

    def _closes(self, clique: str, opened: int) -> tuple[int, ...]:
        """`opened`: of the trays that were empty before the gang came."""
        empty = self._board.empty(clique)
        return closed(empty, max(0, opened - (self._empty[clique] - empty)))
