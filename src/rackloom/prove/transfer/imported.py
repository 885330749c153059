"""Reads what nvbandwidth and nccl-tests printed, as evidence beside a measurement of our own."""

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from rackloom.errors import Refused

_ROW = re.compile(r"\s*\d+\s+\d+\s+\w+\s+\w+\s+-?\d+\s+(?P<figures>[\d.\sN/A]+)")
"""nccl-tests: size, count, type, redop, root; then time, algbw, busbw, #wrong out of place and in place."""
_AVERAGE = re.compile(r"#\s*Avg bus bandwidth\s*:\s*([\d.]+)")
_OUT_OF_BOUNDS = re.compile(r"#\s*Out of bounds values\s*:\s*(\d+)")


class Figure(msgspec.Struct, frozen=True):
    """One number of another tool, with its matrix where it has one."""

    name: str
    value: float
    unit: str = "GB/s"
    matrix: tuple[tuple[float | None, ...], ...] = ()
    """Rows and columns as the tool prints them, GPUs in CUDA's order; None where it measured nothing."""


class Evidence(msgspec.Struct, frozen=True):
    """The output of another tool."""

    tool: Literal["nvbandwidth", "nccl-tests"]
    file: str
    correct: bool | None
    """Whether the tool says that its data were right, or its tests passed; None if it says neither."""
    figures: tuple[Figure, ...]


def read_nvbandwidth(text: str, file: str) -> Evidence:
    """`nvbandwidth -j` output; lines that MPI or the shell printed around the document are passed over.

    Raises:
        Refused: there is no such document in it.
    """
    try:
        document = json.loads(text[text.index("{") : text.rindex("}") + 1])["nvbandwidth"]
        cases = [case for case in document["testcases"] if case.get("status") != "Waived"]
        figures = tuple(_figure(case) for case in cases if "bandwidth_matrix" in case)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(
            f"{file} is not the output of nvbandwidth -j: {error!r}", nearest_fix="save what -j prints"
        ) from error
    if not figures:
        raise Refused(f"{file} holds no bandwidth of nvbandwidth", nearest_fix="run at least one copy test")
    return Evidence("nvbandwidth", file, all(case.get("status") == "Passed" for case in cases), figures)


def read_nccl(text: str, file: str) -> Evidence:
    """What a program of nccl-tests printed.

    Raises:
        Refused: there is no row of its table in it.
    """
    rows = tuple(_rows(text))
    if not rows:
        raise Refused(
            f"{file} holds no row of nccl-tests", nearest_fix="save what such as all_reduce_perf prints"
        )
    average = _AVERAGE.search(text)
    wrong = _OUT_OF_BOUNDS.search(text)
    figures = (Figure("average bus bandwidth", float(average[1])), *rows) if average else rows
    return Evidence("nccl-tests", file, None if wrong is None else wrong[1] == "0", figures)


def _figure(case: dict[str, Any]) -> Figure:
    matrix = tuple(tuple(_number(cell) for cell in row) for row in case["bandwidth_matrix"])
    known = [cell for row in matrix for cell in row if cell is not None]
    unit = "ns" if "latency" in case["name"] else "GB/s"
    return Figure(case["name"], sum(known) / len(known) if known else 0.0, unit, matrix)


def _number(cell: object) -> float | None:
    """Cells are numbers written as strings, or N/A."""
    return None if cell in (None, "N/A", "") else float(str(cell))


def _rows(text: str) -> Iterator[Figure]:
    for line in text.splitlines():
        if (row := _ROW.match(line)) and len(figures := row["figures"].split()) >= 3:
            yield Figure(f"bus bandwidth at {int(line.split()[0])} bytes", float(figures[2]))
