"""The members of blocks on the trays of one clique."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import NamedTuple

from rackloom.claim.place.search.blocks import Block, Part, Wanted, wanted_by
from rackloom.claim.place.search.board import Board
from rackloom.claim.place.search.effort import Effort
from rackloom.claim.place.search.loads import Load, Need, in_order, loads_of
from rackloom.claim.place.search.together import Answer, seated_together


class Place(NamedTuple):
    """Consecutive members of one group on one tray."""

    at: int
    """Position of the tray on the board."""
    part: Part
    first: int
    members: int


Sitting = tuple[Place, ...]
"""All members of a block."""


def put(board: Board, sitting: Sitting) -> None:
    """Put members on the board where they are known to fit."""
    for place in sitting:
        board.take(place.at, place.part.need, place.members)


def lift(board: Board, sitting: Sitting) -> None:
    """Take members off the board."""
    for place in sitting:
        board.put_back(place.at, place.part.need, place.members)


def sit(board: Board, clique: str, block: Block) -> Sitting | None:
    """Put a block on the board, members with most GPUs first; None, and nothing put, if it does not fit.

    Trays of which a part is in use are filled up before an empty one is begun.
    """
    sitting: Sitting = ()
    for part in sorted(block, key=lambda one: one.group.gpus, reverse=True):
        places = tuple(_places(board, clique, part))
        if sum(place.members for place in places) < part.members:
            lift(board, sitting)
            return None
        put(board, places)
        sitting += places
    return sitting


def ways_together(board: Board, clique: str, wanted: Wanted, spares: int, effort: Effort) -> Answer | None:
    """How members sit in a clique where the gang has nobody else, and so many trays are kept."""
    needs = in_order(wanted)
    vacancies = board.ground.vacancies(clique, needs)
    return seated_together(vacancies, needs, tuple(wanted[need] for need in needs), spares, effort)


def sit_together(
    board: Board, clique: str, blocks: Sequence[Block], loads: Sequence[Load]
) -> tuple[Sitting, ...]:
    """Put blocks on the board with these loads of the trays of a clique."""
    positions = board.ground.cliques[clique]
    seats = {
        need: iter([at for at, here in zip(positions, column, strict=True) for _ in range(here)])
        for need, column in zip(in_order(wanted_by(blocks)), zip(*loads, strict=True), strict=True)
    }
    sittings = tuple(tuple(place for part in block for place in _seated(part, seats)) for block in blocks)
    for sitting in sittings:
        put(board, sitting)
    return sittings


def spares_for(board: Board, clique: str, sittings: Iterable[Sitting]) -> list[int]:
    """Trays of the clique that could take over all members of any tray of `sittings`.

    Trays of which a part is in use come first, then the last ones.
    """
    carried: dict[int, Counter[Need]] = {}
    for place in (place for sitting in sittings for place in sitting):
        carried.setdefault(place.at, Counter())[place.part.need] += place.members
    needs = tuple({need: None for load in carried.values() for need in load})
    loads = {tuple(load[need] for need in needs) for load in carried.values()}
    most = tuple(map(max, zip(*loads, strict=True)))
    ground = board.ground
    trays = list(zip(ground.cliques[clique], ground.vacancies(clique, needs), strict=True))
    able = [
        at
        for at, vacancy in reversed(trays)
        if not board.members(at) and loads <= loads_of(vacancy, needs, most)
    ]
    return sorted(able, key=board.is_empty)


def _places(board: Board, clique: str, part: Part) -> Iterator[Place]:
    """For as many members of a part as the clique takes, the trays with least room first."""
    need = part.need
    number, last = part.first, part.first + part.members
    if board.capacity(clique, need) < part.members:
        return
    for at in sorted(
        board.ground.cliques[clique],
        key=lambda at: (board.slots(at, need), board.is_empty(at), board.free(at)),
    ):
        here = min(board.slots(at, need), last - number)
        if here:
            yield Place(at, part, number, here)
            number += here


def _seated(part: Part, seats: dict[Need, Iterator[int]]) -> Iterator[Place]:
    """The members of a part on the next seats for their need."""
    first = part.first
    for at, same in groupby(islice(seats[part.need], part.members)):
        members = len(list(same))
        yield Place(at, part, first, members)
        first += members
