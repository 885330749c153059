"""Which clique takes each block: fewest cliques, then fewest holes closed, then the tightest fit."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from rackloom.claim.place.search.blocks import Block, both, wanted_by
from rackloom.claim.place.search.board import Board
from rackloom.claim.place.search.dead_ends import DeadEnds
from rackloom.claim.place.search.effort import Effort
from rackloom.claim.place.search.rank import Ranking
from rackloom.claim.place.search.scales import Scale, scales_of
from rackloom.claim.place.search.sit import Sitting, lift, put, sit, sit_together, spares_for, ways_together

DEAD_ENDS = 400
"""So many each search has: blocks of unlike sizes can be packed in exponentially many ways."""


class Chosen(NamedTuple):
    """One block in its clique."""

    block: Block
    clique: str
    sitting: Sitting


def choose(board: Board, blocks: Sequence[Block], spares: int, effort: Effort) -> list[Chosen] | None:
    """A clique for each block, in the order of the blocks; None, and nothing put, where none was found.

    Blocks that are alike fill as few cliques as can be at once; for others, fewer cliques are tried for.
    """
    choice = Choice(board, blocks, spares, effort)
    best = choice.run()
    if best is None or _cliques(best) == 1:
        return best
    fewest = choice.fewest()
    while (cliques := _cliques(best)) > fewest:
        fewer = choice.run(most=cliques - 1)
        if fewer is None:
            for one in best:
                put(board, one.sitting)
            break
        best = fewer
    return best


def can_be_chosen(board: Board, blocks: Sequence[Block], spares: int, effort: Effort) -> bool:
    """Whether there is a clique for each block, in however many; what was found stays on the board."""
    return Choice(board, blocks, spares, effort).run() is not None


def _cliques(chosen: Sequence[Chosen]) -> int:
    return len({one.clique for one in chosen})


class _Inside(NamedTuple):
    """What a search has put into one clique."""

    blocks: tuple[Block, ...] = ()
    sittings: tuple[Sitting, ...] = ()


class Choice:
    """A search that takes back its choices a bounded number of times; what it found stays on the board."""

    def __init__(self, board: Board, blocks: Sequence[Block], spares: int, effort: Effort) -> None:
        """The board has nobody of the gang yet."""
        self._board = board
        self._blocks = blocks
        self._spares = spares
        self._effort = effort
        self._ranking = Ranking(board, blocks, spares, effort)
        self._dead_ends = DeadEnds(board.ground, wanted_by(blocks))
        self._inside: dict[str, _Inside] = {}
        self._steps: list[tuple[str, _Inside]] = []
        """The clique of each block so far, and what was in it before."""

    def fewest(self) -> int:
        """So many cliques the blocks take at least."""
        return max([scale.fewest() for scale in self._scales])

    def run(self, most: int | None = None) -> list[Chosen] | None:
        """A clique for each block, in the order of the blocks; None where none was found.

        `most` cliques may be used, fewer than in a run before. What that found is taken off the board.
        """
        self._take_all_back()
        open_choices: list[Iterator[str]] = []
        dead_ends = 0
        while len(self._steps) < len(self._blocks):
            if len(open_choices) == len(self._steps):
                open_choices.append(self._ranking.best_first(len(self._steps), most))
            if self._advance(open_choices[-1]):
                continue
            dead_ends += 1
            if not self._steps or (dead_ends > DEAD_ENDS and not self._bears_dead_end()):
                self._take_all_back()
                return None
            self._dead_ends.add()
            self._ranking.weigh(self._scales)
            open_choices.pop()
            self._take_back()
        return self._chosen()

    def _bears_dead_end(self) -> bool:
        return self._effort.bears_dead_end(len(self._ranking.inside))

    @cached_property
    def _scales(self) -> list[Scale]:
        """Mostly there is room for everybody at once, and nothing needs to be weighed."""
        return scales_of(self._board.ground, self._blocks, self._spares)

    def _chosen(self) -> list[Chosen]:
        sittings = {clique: iter(inside.sittings) for clique, inside in self._inside.items()}
        return [
            Chosen(block, clique, next(sittings[clique]))
            for block, (clique, _) in zip(self._blocks, self._steps, strict=True)
        ]

    def _advance(self, cliques: Iterator[str]) -> bool:
        block = self._blocks[len(self._steps)]
        for clique in cliques:
            before = self._inside.get(clique, _Inside())
            if self._leads_nowhere(clique, block):
                continue
            sittings = self._joined(clique, before, block)
            if sittings is not None:
                self._steps.append((clique, before))
                self._set(clique, _Inside((*before.blocks, block), sittings))
                return True
        return False

    def _leads_nowhere(self, clique: str, block: Block) -> bool:
        if not self._dead_ends:
            return False
        inside = self._ranking.inside.get(clique, {})
        return self._dead_ends.has(clique, both(inside, ((part.need, part.members) for part in block)))

    def _joined(self, clique: str, before: _Inside, block: Block) -> tuple[Sitting, ...] | None:
        """Put one more block into a clique; None, and nothing changed, where it cannot be.

        Members that compete for trays are seated anew, all of them together.
        """
        blocks = (*before.blocks, block)
        wanted = wanted_by(blocks)
        if self._ranking.counts(clique, wanted) and (beside := sit(self._board, clique, block)) is not None:
            return (*before.sittings, beside)
        answer = ways_together(self._board, clique, wanted, self._spares, self._effort)
        if answer is not None and answer.loads is not None:
            for sitting in before.sittings:
                lift(self._board, sitting)
            return sit_together(self._board, clique, blocks, answer.loads)
        return self._in_turn(clique, before, block)

    def _in_turn(self, clique: str, before: _Inside, block: Block) -> tuple[Sitting, ...] | None:
        beside = sit(self._board, clique, block)
        if beside is None:
            return None
        sittings = (*before.sittings, beside)
        if self._spares and len(spares_for(self._board, clique, sittings)) < self._spares:
            lift(self._board, beside)
            return None
        return sittings

    def _take_all_back(self) -> None:
        while self._steps:
            self._take_back()

    def _take_back(self) -> None:
        clique, before = self._steps.pop()
        for sitting in self._inside[clique].sittings:
            lift(self._board, sitting)
        for sitting in before.sittings:
            put(self._board, sitting)
        self._set(clique, before)

    def _set(self, clique: str, inside: _Inside) -> None:
        self._inside[clique] = inside
        wanted = wanted_by(inside.blocks)
        self._ranking.changed(clique, wanted)
        self._dead_ends.changed(clique, wanted)
