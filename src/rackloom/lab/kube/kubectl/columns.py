"""Columns of server-side tables: how a cell is computed, and the columns that a CRD declares.

kubectl does not compute columns; the server does (meta.k8s.io/v1 Table). A `Column` has a name, a type,
a priority (above 0 it shows only with `-o wide`) and a function of the object and the time. Ages are
rounded as HumanDuration of k8s.io/apimachinery rounds them.

`columns_of` compiles `additionalPrinterColumns`. It supports the JSON paths that our CRDs use: fields
with escaped dots, and the first list element whose field equals a text.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rackloom.core.kubernetes.objects import Object, ResourceKind

NONE, UNKNOWN = "<none>", "<unknown>"
_MINUTE, _HOUR, _DAY, _YEAR = 60, 3600, 86_400, 31_536_000

CellFunction = Callable[[Object, float], Any]
"""The value of an object's cell, now (seconds since 1970)."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `priority` above 0: only `-o wide` shows it."""

    name: str
    cell: CellFunction
    type: str = "string"
    format: str = ""
    priority: int = 0


def text_column(name: str, *path: str, without: str = "") -> Column:
    """The value at a path, or what stands where there is none."""
    return Column(name, lambda obj, now: value_at(obj, *path) or without)


def wide_column(column: Column) -> Column:
    """The column, shown only by `-o wide`."""
    return Column(column.name, column.cell, column.type, column.format, 1)


def value_at(obj: Any, *path: str) -> Any:
    """The value at a path of names; None where there is none."""
    for name in path:
        obj = obj.get(name) if isinstance(obj, Mapping) else None
    return obj


def age_since(time: str | None, now: float) -> str:
    """How long ago a time (RFC 3339) was, as kubectl's columns say it."""
    return human_duration(now - epoch_seconds(time)) if time else UNKNOWN


def epoch_seconds(time: str) -> float:
    """Seconds since 1970 of a time (RFC 3339)."""
    return datetime.fromisoformat(time).timestamp()


def human_duration(seconds: float) -> str:
    """A length of time in two units at most: the rounding is that of k8s.io/apimachinery's HumanDuration."""
    whole = max(0, int(seconds))
    for limit, step, fine in _DURATION_STEPS:
        if whole < limit:
            return _in_units(whole, step, fine)
    return _in_units(whole, _YEAR, 0)


_UNIT_LETTERS = {1: "s", _MINUTE: "m", _HOUR: "h", _DAY: "d", _YEAR: "y"}
_DURATION_STEPS = (
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
    return f"{told}{_UNIT_LETTERS[step]}" + (f"{rest}{_UNIT_LETTERS[fine]}" if rest else "")


def _object_name(obj: Object, now: float) -> str:
    return str(obj["metadata"]["name"])


def _object_age(obj: Object, now: float) -> str:
    return age_since(obj["metadata"].get("creationTimestamp"), now)


def labels_text(found: Mapping[str, str] | None) -> str:
    """Labels or a selector in one cell."""
    return ",".join(f"{key}={value}" for key, value in sorted((found or {}).items())) or NONE


NAME = Column("Name", _object_name, format="name")
AGE = Column("Age", _object_age)


# Columns that a CustomResourceDefinition declares.


_PATH_STEP = re.compile(
    r"""\.(?P<name>(?:[^.\[\]\\]|\\.)+)"""
    r"""|\[\?\(@\.(?P<key>\w+)\s*==\s*"(?P<value>[^"]*)"\)\]"""
)
"""A field, whose dots are escaped, or the elements of a list whose field is a text."""


def declared_columns(crds: Iterable[Object]) -> Mapping[ResourceKind, tuple[Column, ...]]:
    """The columns of each version of each type that these definitions declare any for."""
    return {
        _declared_kind(crd, version["name"]): (
            NAME,
            *(_declared_column(column) for column in version["additionalPrinterColumns"]),
        )
        for crd in crds
        for version in crd["spec"]["versions"]
        if version.get("additionalPrinterColumns")
    }


def _declared_kind(crd: Object, version: str) -> ResourceKind:
    spec, names = crd["spec"], crd["spec"]["names"]
    is_namespaced = spec["scope"] == "Namespaced"
    return ResourceKind(spec["group"], version, names["kind"], names["plural"], namespaced=is_namespaced)


def _declared_column(told: Mapping[str, Any]) -> Column:
    cell = _path_cell(told["jsonPath"], is_date=told["type"] == "date")
    return Column(told["name"], cell, told["type"], told.get("format", ""), told.get("priority", 0))


def _path_cell(path: str, *, is_date: bool) -> CellFunction:
    steps = tuple(_PATH_STEP.finditer(path))
    if "".join(step[0] for step in steps) != path:
        raise ValueError(f"cannot follow the JSON path {path}")

    def cell(obj: Object, now: float) -> Any:
        found: Any = obj
        for step in steps:
            found = _follow_path(found, step)
        return age_since(found, now) if is_date and found else found

    return cell


def _follow_path(found: Any, step: re.Match[str]) -> Any:
    if step["name"]:
        return value_at(found, re.sub(r"\\(.)", r"\1", step["name"]))
    elements = found if isinstance(found, list) else ()
    return next((element for element in elements if value_at(element, step["key"]) == step["value"]), None)
