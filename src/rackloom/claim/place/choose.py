"""Which clique takes each block: fewest cliques, then fewest holes closed, then the tightest fit."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rackloom.claim.place.blocks import Block, Shape, shape_of
from rackloom.claim.place.board import Board
from rackloom.claim.place.holes import closed
from rackloom.claim.place.sit import Sitting, sit, spares_for, stand_up

DEAD_ENDS = 400
"""After so many the search gives up: blocks of unlike sizes can be packed in exponentially many ways."""


class Chosen(NamedTuple):
    """One block in its clique."""

    block: Block
    clique: str
    sitting: Sitting


class Standing(NamedTuple):
    """How a clique stands to a block; less is better."""

    fits: int
    """Blocks like this one that it can take."""
    closes: tuple[int, ...]
    """Holes of each size."""
    left: int
    """Members that it could serve before the block."""


def choose(board: Board, blocks: Sequence[Block], spares: int) -> list[Chosen] | None:
    """A clique for each block, in the order of the blocks; None, and nothing put, where none was found.

    Blocks that are alike fill as few cliques as can be at once; for others, fewer cliques are tried for.
    """
    best = Choice(board, blocks, spares).run()
    unlike = len({shape_of(block) for block in blocks}) > 1
    while best is not None and unlike and (cliques := len({one.clique for one in best})) > 1:
        for one in reversed(best):
            stand_up(board, one.sitting.undo)
        fewer = Choice(board, blocks, spares, most=cliques - 1).run()
        if fewer is None:
            return [_again(board, one) for one in best]
        best = fewer
    return best


class Choice:
    """A search that takes back its choices a bounded number of times; what it found stays on the board."""

    def __init__(self, board: Board, blocks: Sequence[Block], spares: int, most: int | None = None) -> None:
        """`most`: cliques that may be used."""
        self._board = board
        self._most = most
        self._blocks = blocks
        self._spares = spares
        self._chosen: list[Chosen] = []
        self._standings: dict[str, dict[Shape, Standing | None]] = {one: {} for one in board.cliques}

    def run(self) -> list[Chosen] | None:
        """A clique for each block, in the order of the blocks; None where none was found."""
        open_choices: list[Iterator[str]] = []
        dead_ends = 0
        while len(self._chosen) < len(self._blocks):
            if len(open_choices) == len(self._chosen):
                open_choices.append(iter(self._ranked()))
            if self._advance(open_choices[-1]):
                continue
            dead_ends += 1
            if dead_ends > DEAD_ENDS or not self._chosen:
                while self._chosen:
                    self._take_back()
                return None
            open_choices.pop()
            self._take_back()
        return self._chosen

    def _advance(self, cliques: Iterator[str]) -> bool:
        block = self._blocks[len(self._chosen)]
        for clique in cliques:
            sitting = sit(self._board, clique, block)
            if sitting is None:
                continue
            self._chosen.append(Chosen(block, clique, sitting))
            self._standings[clique] = {}
            if len(spares_in(self._board, clique, self._chosen)) >= self._spares:
                return True
            self._take_back()
        return False

    def _take_back(self) -> None:
        last = self._chosen.pop()
        stand_up(self._board, last.sitting.undo)
        self._standings[last.clique] = {}

    def _ranked(self) -> list[str]:
        """The cliques that may take the next block, best first."""
        block = self._blocks[len(self._chosen)]
        shape = shape_of(block)
        waiting = sum(shape_of(one) == shape for one in self._blocks[len(self._chosen) :])
        used = {one.clique for one in self._chosen}
        keys = []
        only_used = self._most is not None and len(used) >= self._most
        for order, (clique, known) in enumerate(self._standings.items()):
            if only_used and clique not in used:
                continue
            if shape not in known:
                known[shape] = self._standing(clique, shape, clique in used)
            found = known[shape]
            if found is not None:
                unlike = -min(found.fits, waiting)
                keys.append((clique not in used, unlike, found.closes, found.left, order, clique))
        return [key[-1] for key in sorted(keys)]

    def _standing(self, clique: str, shape: Shape, used: bool) -> Standing | None:
        """None where the block does not fit, by the count of each part alone."""
        board = self._board
        fits = min(board.capacity(clique, need) // members for need, members in shape)
        if not fits:
            return None
        trays = 0 if used else self._spares
        for need, members in shape:
            # Exact where the trays of the clique are alike.
            trays += -(-members * board.serving(clique, need) // board.capacity(clique, need))
        need = shape[0][0]
        empty = board.empty(clique)
        in_part = board.serving(clique, need) - empty
        return Standing(
            fits, closed(empty, max(0, min(trays - in_part, empty))), board.capacity(clique, need)
        )


def _again(board: Board, one: Chosen) -> Chosen:
    """What was found before, on a board that is as it was then."""
    sitting = sit(board, one.clique, one.block)
    if sitting is None:
        raise RuntimeError("a board that was put back did not take what it had taken before")
    return Chosen(one.block, one.clique, sitting)


def spares_in(board: Board, clique: str, chosen: Sequence[Chosen]) -> list[str]:
    """Trays of the clique that could stand in for any that the chosen blocks use there."""
    here = [one for one in chosen if one.clique == clique]
    parts = tuple(part for one in here for part in one.block)
    return spares_for(board, clique, parts, [seat for one in here for seat in one.sitting.seats])
