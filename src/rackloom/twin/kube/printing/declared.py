"""The columns that a CustomResourceDefinition declares: `additionalPrinterColumns`."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from rackloom.claim.kube.api import Kind, Object
from rackloom.twin.kube.printing.columns import NAME, Cell, Column, at, since

_STEP = re.compile(
    r"""\.(?P<name>(?:[^.\[\]\\]|\\.)+)"""
    r"""|\[\?\(@\.(?P<key>\w+)\s*==\s*"(?P<value>[^"]*)"\)\]"""
)
"""A field, whose dots are escaped, or the elements of a list whose field is a text."""


def columns_of(crds: Iterable[Object]) -> Mapping[Kind, tuple[Column, ...]]:
    """The columns of each version of each type that these definitions declare any for."""
    return {
        _kind(crd, version["name"]): (NAME, *(_column(one) for one in version["additionalPrinterColumns"]))
        for crd in crds
        for version in crd["spec"]["versions"]
        if version.get("additionalPrinterColumns")
    }


def _kind(crd: Object, version: str) -> Kind:
    spec, names = crd["spec"], crd["spec"]["names"]
    is_namespaced = spec["scope"] == "Namespaced"
    return Kind(spec["group"], version, names["kind"], names["plural"], namespaced=is_namespaced)


def _column(told: Mapping[str, Any]) -> Column:
    cell = _cell(told["jsonPath"], is_date=told["type"] == "date")
    return Column(told["name"], cell, told["type"], told.get("format", ""), told.get("priority", 0))


def _cell(path: str, *, is_date: bool) -> Cell:
    steps = tuple(_STEP.finditer(path))
    if "".join(one[0] for one in steps) != path:
        raise ValueError(f"cannot follow the JSON path {path}")

    def cell(obj: Object, now: float) -> Any:
        found: Any = obj
        for step in steps:
            found = _step(found, step)
        return since(found, now) if is_date and found else found

    return cell


def _step(found: Any, step: re.Match[str]) -> Any:
    if step["name"]:
        return at(found, re.sub(r"\\(.)", r"\1", step["name"]))
    elements = found if isinstance(found, list) else ()
    return next((one for one in elements if at(one, step["key"]) == step["value"]), None)
