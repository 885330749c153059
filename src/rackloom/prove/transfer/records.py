"""A measurement kept in a file: what was measured, where, and what other tools said of the same machine."""

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from rackloom.errors import Refused, Retry
from rackloom.prove.transfer.imported import Evidence
from rackloom.prove.transfer.report import single
from rackloom.prove.transfer.values import AlignmentReport, TransferReport, TransferSpec
from rackloom.topology.machine import Machine


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One file. `report` carries the environment of every run."""

    format: Literal["rackloom-transfer/1"] = "rackloom-transfer/1"
    recorded_at: str
    """UTC, ISO 8601."""
    spec: TransferSpec
    report: AlignmentReport
    machine: Machine | None = None
    """The initiator's host as it was discovered; None where links were emulated or nothing could be read."""
    evidence: tuple[Evidence, ...] = ()
    incomplete: str | None = None
    """Why runs are missing, or None."""


def discovered(discover: Callable[[], Machine]) -> Machine | None:
    """The machine, or None where its kernel and driver do not tell."""
    with suppress(Refused, Retry):
        return discover()
    return None


def partial(runs: Sequence[TransferReport], reason: str) -> AlignmentReport:
    """The runs that were complete when the next one failed (at least one)."""
    return msgspec.structs.replace(
        single("partial", list(runs), f"incomplete: {reason}"), emulated=runs[0].emulated, proved=False
    )


def save(record: Record, file: Path) -> None:
    """Write the record whole or not at all; a file of that name stays as it was if it cannot be written.

    Raises:
        Refused: the disk is full, or the place cannot be written to.
    """
    write_whole(msgspec.json.format(msgspec.json.encode(record), indent=1), file)


def write_whole(content: bytes, file: Path) -> None:
    """Put `content` beside `file`, then in its place.

    Raises:
        Refused: the disk is full, or the place cannot be written to.
    """
    beside = ""
    try:
        handle, beside = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        Path(beside).chmod(0o644)  # a record holds no secret, and mkstemp gives it to its owner alone
        Path(beside).replace(file)
    except OSError as error:
        with suppress(OSError):
            Path(beside).unlink()
        raise Refused(
            f"{file} could not be written: {error.strerror}",
            nearest_fix="name a place with room for it; the RESULT lines above are the runs",
        ) from error


def load(file: Path) -> Record:
    """The record in `file`.

    Raises:
        Refused: there is none.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=Record)
    except OSError as error:
        raise Refused(f"{file}: {error.strerror}", nearest_fix="name a file that can be read") from error
    except msgspec.DecodeError as error:
        raise Refused(
            f"{file} is no transfer record: {error}", nearest_fix="save one with `transfer run --save`"
        ) from error
