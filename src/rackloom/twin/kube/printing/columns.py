"""What a column is, and those that most types have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rackloom.claim.kube.api import Object

NONE, UNKNOWN = "<none>", "<unknown>"
_MINUTE, _HOUR, _DAY, _YEAR = 60, 3600, 86_400, 31_536_000

Cell = Callable[[Object, float], Any]
"""The value of an object's cell, now (seconds since 1970)."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `priority` above 0: only `-o wide` shows it."""

    name: str
    cell: Cell
    type: str = "string"
    format: str = ""
    priority: int = 0


def text(name: str, *path: str, without: str = "") -> Column:
    """The value at a path, or what stands where there is none."""
    return Column(name, lambda obj, now: at(obj, *path) or without)


def wide(column: Column) -> Column:
    """The column, shown only by `-o wide`."""
    return Column(column.name, column.cell, column.type, column.format, 1)


def at(obj: Any, *path: str) -> Any:
    """The value at a path of names; None where there is none."""
    for name in path:
        obj = obj.get(name) if isinstance(obj, Mapping) else None
    return obj


def since(time: str | None, now: float) -> str:
    """How long ago a time (RFC 3339) was, as kubectl's columns say it."""
    return duration(now - seconds_of(time)) if time else UNKNOWN


def seconds_of(time: str) -> float:
    """Seconds since 1970 of a time (RFC 3339)."""
    return datetime.fromisoformat(time).timestamp()


def duration(seconds: float) -> str:
    """A length of time in two units at most: the rounding is that of k8s.io/apimachinery's HumanDuration."""
    whole = max(0, int(seconds))
    for limit, step, fine in _STEPS:
        if whole < limit:
            return _in_units(whole, step, fine)
    return _in_units(whole, _YEAR, 0)


_LETTERS = {1: "s", _MINUTE: "m", _HOUR: "h", _DAY: "d", _YEAR: "y"}
_STEPS = (
    (2 * _MINUTE, 1, 0),
    (10 * _MINUTE, _MINUTE, 1),
    (3 * _HOUR, _MINUTE, 0),
    (8 * _HOUR, _HOUR, _MINUTE),
    (2 * _DAY, _HOUR, 0),
    (8 * _DAY, _DAY, _HOUR),
    (2 * _YEAR, _DAY, 0),
    (8 * _YEAR, _YEAR, _DAY),
)
"""Below how many seconds which unit is told, and with which finer one (0: with none)."""


def _in_units(seconds: int, step: int, fine: int) -> str:
    told, left = divmod(seconds, step)
    rest = left // fine if fine else 0
    return f"{told}{_LETTERS[step]}" + (f"{rest}{_LETTERS[fine]}" if rest else "")


def _name(obj: Object, now: float) -> str:
    return str(obj["metadata"]["name"])


def _age(obj: Object, now: float) -> str:
    return since(obj["metadata"].get("creationTimestamp"), now)


def labels(found: Mapping[str, str] | None) -> str:
    """Labels or a selector in one cell."""
    return ",".join(f"{key}={value}" for key, value in sorted((found or {}).items())) or NONE


NAME = Column("Name", _name, format="name")
AGE = Column("Age", _age)
