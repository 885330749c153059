"""The members of one block on the trays of one clique."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from rackloom.claim.place.blocks import Block, Part
from rackloom.claim.place.board import Board, Need, Use
from rackloom.claim.place.values import Seat


class Sitting(NamedTuple):
    """Who sits where, and how to take it back."""

    seats: tuple[Seat, ...]
    undo: tuple[tuple[int, Use], ...]


def sit(board: Board, clique: str, block: Block) -> Sitting | None:
    """Put a block on the board, members with most GPUs first; None, and nothing put, if it does not fit.

    Trays of which a part is in use are filled up before an empty one is begun.
    """
    seats: list[Seat] = []
    undo: list[tuple[int, Use]] = []
    for part in sorted(block, key=lambda one: one.group.gpus, reverse=True):
        if not _sit_part(board, clique, part, seats, undo):
            stand_up(board, tuple(undo))
            return None
    return Sitting(tuple(seats), tuple(undo))


def stand_up(board: Board, undo: tuple[tuple[int, Use], ...]) -> None:
    """Take back what `sit` put on the board."""
    for at, before in reversed(undo):
        board.put_back(at, before)


def spares_for(board: Board, clique: str, block: Block, seats: Iterable[Seat]) -> list[str]:
    """Trays of the clique that could take over all members of any tray of `seats`, the last ones first."""
    heaviest = Need.of(max(block, key=lambda part: part.group.gpus).group)
    together = max(Counter(seat.tray for seat in seats).values())
    return [
        board.trays[at].name
        for at in reversed(board.positions(clique))
        if not board.members(at) and board.slots(at, heaviest) >= together
    ]


def _sit_part(board: Board, clique: str, part: Part, seats: list[Seat], undo: list[tuple[int, Use]]) -> bool:
    need = Need.of(part.group)
    if board.capacity(clique, need) < part.members:
        return False
    number, last = part.first, part.first + part.members
    for at in sorted(board.positions(clique), key=board.free):
        here = min(board.slots(at, need), last - number)
        if here:
            undo.append((at, board.take(at, need, here)))
            name = board.trays[at].name
            seats += [Seat(part.group.name, member, name) for member in range(number, number + here)]
            number += here
    return number == last
