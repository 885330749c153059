"""The GPU x NIC matrix as rows of text and as an SVG. Pure."""

from collections.abc import Sequence
from html import escape

import msgspec

from rackloom.prove.transfer.values import AlignmentReport, Arm

_LABEL, _CELL, _HIGH, _TOP = 170, 150, 54, 40
_FONT = "font-family='sans-serif' font-size='12'"


class Cell(msgspec.Struct, frozen=True):
    """One GPU over one NIC, each pair alone."""

    gbps: float
    path_class: str | None
    proved: bool


class Grid(msgspec.Struct, frozen=True):
    """GPUs (or host memory) by NICs; None where the pair was not measured."""

    gpus: tuple[str, ...]
    nics: tuple[str, ...]
    cells: tuple[tuple[Cell | None, ...], ...]


def grid(report: AlignmentReport) -> Grid | None:
    """The matrix of the arms that had a device promised and were measured alone; None if there are none."""
    arms = [arm for arm in report.arms if arm.device is not None and not arm.together]
    if not arms:
        return None
    gpus = tuple(dict.fromkeys(_row(arm) for arm in arms))
    nics = tuple(dict.fromkeys(str(arm.device) for arm in arms))
    found = {(_row(arm), arm.device): _cell(arm) for arm in arms}
    cells = tuple(tuple(found.get((gpu, nic)) for nic in nics) for gpu in gpus)
    return Grid(gpus, nics, cells)


def rows(matrix: Grid) -> list[tuple[str, ...]]:
    """A row of text per GPU: its name, then GB/s and class for each NIC."""
    return [
        (gpu, *(_text(cell) for cell in line)) for gpu, line in zip(matrix.gpus, matrix.cells, strict=True)
    ]


def svg(matrix: Grid, title: str) -> str:
    """The matrix as one SVG document: the darker, the faster; a dashed edge where the path is not proved."""
    width = _LABEL + _CELL * len(matrix.nics) + 10
    height = _TOP + 20 + _HIGH * len(matrix.gpus) + 10
    most = max((cell.gbps for line in matrix.cells for cell in line if cell), default=0.0) or 1.0
    heads = [
        _said(_LABEL + _CELL * k + _CELL // 2, _TOP + 10, nic, "middle") for k, nic in enumerate(matrix.nics)
    ]
    body = [part for k in range(len(matrix.gpus)) for part in _drawn(matrix, k, most)]
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' "
        f"height='{height}' role='img'><title>{escape(title)}</title>"
        f"{_said(4, 18, title, 'start')}{''.join([*heads, *body])}</svg>"
    )


def _row(arm: Arm) -> str:
    return arm.gpu if arm.gpu != "cpu" else "host memory"


def _cell(arm: Arm) -> Cell:
    proved = all(run.verified and run.path.verdict == "holds" for run in arm.runs)
    return Cell(arm.mean_GBps, arm.runs[0].path_class, proved)


def _text(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    return " ".join(
        [f"{cell.gbps:.2f}", *([cell.path_class] if cell.path_class else []), *([] if cell.proved else ["?"])]
    )


def _drawn(matrix: Grid, row: int, most: float) -> list[str]:
    top = _TOP + 20 + _HIGH * row
    parts = [_said(4, top + 30, matrix.gpus[row], "start")]
    for column, cell in enumerate(matrix.cells[row]):
        left = _LABEL + _CELL * column
        shade = 0.0 if cell is None else cell.gbps / most
        edge = "" if cell is None or cell.proved else " stroke-dasharray='4'"
        parts.append(
            f"<rect x='{left}' y='{top}' width='{_CELL - 4}' height='{_HIGH - 4}' rx='4' stroke='#345'{edge} "
            f"fill='#2a78d6' fill-opacity='{0.08 + 0.5 * shade:.2f}'/>"
        )
        parts.append(_said(left + _CELL // 2 - 2, top + 30, _said_of(cell), "middle"))
    return parts


def _said_of(cell: Cell | None) -> str:
    return (
        "not measured" if cell is None else f"{_text(cell)} GB/s" if cell.path_class is None else _text(cell)
    )


def _said(x: int, y: int, text: str, anchor: str) -> str:
    return f"<text x='{x}' y='{y}' {_FONT} text-anchor='{anchor}'>{escape(text)}</text>"


def columns_of(matrix: Grid) -> Sequence[str]:
    """Headers for `rows`."""
    return ("GB/s", *matrix.nics)
