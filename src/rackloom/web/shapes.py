"""Where things stand in the drawing of a rack: plain numbers for the template.

A rack is as wide as its widest tray; compute trays, then the switches, then compute trays again.
"""

from collections.abc import Sequence
from itertools import groupby

import msgspec

from rackloom.web.colouring import State
from rackloom.web.racks import Cell, Rack, Tray

ROW = 20
"""From one compute tray to the next."""
CELL = 27
"""From one GPU to the next."""
LEFT = 26
"""Where the first GPU stands: slots are written left of it."""
NIC = 8
SWITCH = 7
BADGE = 16


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One tray and its height in the drawing."""

    y: int
    index: int
    tray: Tray
    letters: tuple[tuple[str, str, str], ...]
    """Tone, the x of each letter, and the letters: one text element carries those of all GPUs of a tone."""
    nics: tuple[tuple[str, str], ...]
    """How NICs are wired, and the path that marks all NICs of a tray that are wired so."""


class Outline(msgspec.Struct, frozen=True):
    """The frame of a ComputeDomain around trays that stand together."""

    y: int
    height: int
    badge: int
    name: str


class Drawing(msgspec.Struct, frozen=True, kw_only=True):
    """One rack, ready to be written down."""

    rack: Rack
    lines: tuple[Line, ...]
    outlines: tuple[Outline, ...]
    switches: tuple[int, ...]
    """The y of each switch tray."""
    width: int
    height: int
    nics_at: int


def drawing(rack: Rack, switch_trays: int) -> Drawing:
    """Where everything of a rack stands. Without a known number of switch trays one stands for them all."""
    widest = max((len(tray.cells) for tray in rack.trays), default=1)
    middle = ROW * len(rack.above) + 2
    switches = tuple(middle + SWITCH * number for number in range(max(1, switch_trays)))
    under = switches[-1] + SWITCH + 3
    nics_at = LEFT + CELL * widest + 3
    heights = [2 + ROW * n for n in range(len(rack.above))] + [
        under + ROW * n for n in range(len(rack.below))
    ]
    lines = tuple(
        _line(y, n, tray, nics_at) for n, (y, tray) in enumerate(zip(heights, rack.trays, strict=True))
    )
    return Drawing(
        rack=rack,
        lines=lines,
        outlines=_outlines(lines),
        switches=switches,
        width=nics_at + NIC * widest + BADGE,
        height=under + ROW * len(rack.below) + 2,
        nics_at=nics_at,
    )


def _line(y: int, index: int, tray: Tray, nics_at: int) -> Line:
    return Line(y=y, index=index, tray=tray, letters=_letters(tray.cells), nics=_nics(tray.cells, nics_at))


def _letters(cells: Sequence[Cell]) -> tuple[tuple[str, str, str], ...]:
    found: dict[str, list[tuple[str, str]]] = {}
    for number, cell in enumerate(cells):
        if mark := "!" if cell.sick else cell.letter:
            found.setdefault(_tone(cell), []).append((str(LEFT + CELL * number + 12), mark))
    return tuple(
        (tone, " ".join(x for x, _ in marks), "".join(m for _, m in marks)) for tone, marks in found.items()
    )


def _tone(cell: Cell) -> str:
    """On a colour, letters have to be read against it; elsewhere they may tell something themselves."""
    if cell.state is State.GROUP:
        return "on"
    return "bad" if cell.sick else "dim"


_STROKES = {
    "aligned": "M{x} 5v7",
    "astray": "M{x} 5l3 3.5l-3 3.5l-3 -3.5z",
    "down": "M{left} 5.5l6 6m0 -6l-6 6",
    "slow": "M{x} 9v3",
    "unknown": "M{left} 8.5h5",
    "none": "M{left} 11.5h5",
}
"""A shape for each way a NIC can be wired, so that nobody needs its colour."""


def _nics(cells: Sequence[Cell], at: int) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for number, cell in enumerate(cells):
        if stroke := _STROKES.get(cell.nic):
            x = at + NIC * number + 3
            found[cell.nic] = found.get(cell.nic, "") + stroke.format(x=x, left=x - 3)
    return tuple(found.items())


def _outlines(lines: Sequence[Line]) -> tuple[Outline, ...]:
    """One frame for trays of one ComputeDomain that follow one another, across the switches too."""
    found = []
    for badge, run in groupby(lines, key=lambda line: line.tray.badge):
        if badge is not None:
            rows = list(run)
            name = rows[0].tray.laid_over
            found.append(Outline(rows[0].y - 1, rows[-1].y - rows[0].y + ROW - 1, badge, name))
    return tuple(found)
