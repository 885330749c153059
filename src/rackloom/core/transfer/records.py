"""The record of a measurement and of its machine, with the output of other tools.

A `TransferRecord` holds the request, the report with the circumstances of every run, the discovered
machine of the initiator, and the output of nvbandwidth or nccl-tests if the user added it. If a run
fails after others were complete, the record keeps those and the reason why it is incomplete. `prove.transfer`
reads and writes the files.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from rackloom.core.transfer.report import single_report
from rackloom.core.transfer.values import AlignmentReport, TransferReport, TransferSpec
from rackloom.errors import Refused
from rackloom.runtime.foreign_text import decode_json
from rackloom.topology.machine import Machine

# Output of other tools.


_NCCL_ROW = re.compile(r"\s*\d+\s+\d+\s+\w+\s+\w+\s+-?\d+\s+(?P<figures>[\d.\sN/A]+)")
"""nccl-tests: size, count, type, redop, root, then time, algbw, busbw, #wrong out of place and in place."""
_NCCL_AVERAGE = re.compile(r"#\s*Avg bus bandwidth\s*:\s*([\d.]+)")
_NCCL_OUT_OF_BOUNDS = re.compile(r"#\s*Out of bounds values\s*:\s*(\d+)")


class ToolFigure(msgspec.Struct, frozen=True):
    """One number of another tool, with its matrix if it has one."""

    name: str
    value: float
    unit: str = "GB/s"
    matrix: tuple[tuple[float | None, ...], ...] = ()
    """Rows and columns as the tool prints them, GPUs in CUDA's order. None in unmeasured cells."""


class ToolOutput(msgspec.Struct, frozen=True):
    """The output of another tool."""

    tool: Literal["nvbandwidth", "nccl-tests"]
    file: str
    correct: bool | None
    """Whether the tool reports correct data or passed tests, or None if it reports neither."""
    figures: tuple[ToolFigure, ...]


def read_nvbandwidth(text: str, file: str) -> ToolOutput:
    """`nvbandwidth -j` output. Lines that MPI or the shell printed around the document are skipped.

    Raises:
        Refused: the text has no such document.
    """
    try:
        document = decode_json(text[text.index("{") : text.rindex("}") + 1], file)["nvbandwidth"]
        cases = [case for case in document["testcases"] if case.get("status") != "Waived"]
        figures = tuple(_test_case_figure(case) for case in cases if "bandwidth_matrix" in case)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(
            f"{file} is not the output of nvbandwidth -j: {error!r}", nearest_fix="save what -j prints"
        ) from error
    if not figures:
        raise Refused(f"{file} holds no bandwidth of nvbandwidth", nearest_fix="run at least one copy test")
    return ToolOutput("nvbandwidth", file, all(case.get("status") == "Passed" for case in cases), figures)


def read_nccl(text: str, file: str) -> ToolOutput:
    """The output of a program of nccl-tests.

    Raises:
        Refused: the text has no row of the program's table.
    """
    rows = tuple(_nccl_rows(text))
    if not rows:
        raise Refused(
            f"{file} holds no row of nccl-tests", nearest_fix="save what such as all_reduce_perf prints"
        )
    average = _NCCL_AVERAGE.search(text)
    wrong = _NCCL_OUT_OF_BOUNDS.search(text)
    figures = (ToolFigure("average bus bandwidth", float(average[1])), *rows) if average else rows
    return ToolOutput("nccl-tests", file, None if wrong is None else wrong[1] == "0", figures)


def _test_case_figure(case: dict[str, Any]) -> ToolFigure:
    matrix = tuple(tuple(_matrix_cell(cell) for cell in row) for row in case["bandwidth_matrix"])
    known = [cell for row in matrix for cell in row if cell is not None]
    unit = "ns" if "latency" in case["name"] else "GB/s"
    return ToolFigure(case["name"], sum(known) / len(known) if known else 0.0, unit, matrix)


def _matrix_cell(cell: object) -> float | None:
    """Cells are numbers written as strings, or N/A."""
    return None if cell in (None, "N/A", "") else float(str(cell))


def _nccl_rows(text: str) -> Iterator[ToolFigure]:
    for line in text.splitlines():
        if (row := _NCCL_ROW.match(line)) and len(figures := row["figures"].split()) >= 3:
            yield ToolFigure(f"bus bandwidth at {int(line.split()[0])} bytes", float(figures[2]))


# Records.


class TransferRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one file. `report` has the environment of every run."""

    format: Literal["rackloom-transfer/1"] = "rackloom-transfer/1"
    recorded_at: str
    """UTC, ISO 8601."""
    spec: TransferSpec
    report: AlignmentReport
    machine: Machine | None = None
    """The initiator's host as discovered, or None if links were emulated or nothing could be read."""
    evidence: tuple[ToolOutput, ...] = ()
    incomplete: str | None = None
    """Why runs are missing, or None."""


def partial_report(runs: Sequence[TransferReport], reason: str) -> AlignmentReport:
    """The runs that were complete when the next one failed (at least one)."""
    return msgspec.structs.replace(
        single_report("partial", list(runs), f"incomplete: {reason}"), emulated=runs[0].emulated, proved=False
    )
