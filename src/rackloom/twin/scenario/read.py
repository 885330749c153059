"""Reading a scenario file: TOML, strictly, with errors that name the line, the step and what to change."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from rackloom.errors import Refused, why
from rackloom.twin.scenario import cluster_values, site_actions, site_expectations, values, wrong_values
from rackloom.twin.scenario.check import Fault, faults_of
from rackloom.twin.scenario.values import Action, Expectation, Scenario, Step

_HEADER = re.compile(r"^\s*\[\[\s*step\s*\]\]", re.MULTILINE)
_ROOMS = (values, site_actions, site_expectations, cluster_values)


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    seen: str
    faults: values.Faults = "seen"
    racks: int = 1
    profile: str = "gb200-nvl72"
    processes: Literal[1, 2] = 1
    candidates: Literal[1, 2] = 1
    controller: values.Controller = "nmx-c"


def read_scenario(path: Path) -> Scenario:
    """The scenario in a file. Refused when it cannot be read, or says what cannot be."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{path} cannot be read: {why(error)}", nearest_fix="give a scenario file") from error
    return parse(text, path.stem, str(path))


def parse(text: str, name: str, where: str) -> Scenario:
    """The scenario in a text; `where` is how errors call it."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Refused(f"{where} is not TOML: {error}", nearest_fix="correct that line") from error
    tables = content.pop("step", None)
    if not isinstance(tables, list) or not tables:
        raise Refused(f"{where} has no steps", nearest_fix="write one [[step]] for each thing that happens")
    head = _head(content, where)
    place = _Places(text, where, len(tables))
    steps = tuple(_step(table, place.of(number)) for number, table in enumerate(tables, 1))
    scenario = Scenario(
        name=name,
        title=head.title,
        seen=head.seen,
        faults=head.faults,
        racks=head.racks,
        profile=head.profile,
        processes=head.processes,
        candidates=head.candidates,
        controller=head.controller,
        steps=steps,
    )
    for fault in faults_of(scenario):
        raise _refused(fault, place)
    return scenario


class _Places:
    """Where each step stands in the file."""

    def __init__(self, text: str, where: str, steps: int) -> None:
        lines = [text.count("\n", 0, found.end()) + 1 for found in _HEADER.finditer(text)]
        # A text inside of a step may look like a header: then no line is better than a wrong one.
        self._lines = lines if len(lines) == steps else None
        self._where = where

    def of(self, number: int) -> str:
        line = f", line {self._lines[number - 1]}" if self._lines else ""
        return f"{self._where}{line}, step {number}"


def _refused(fault: Fault, place: _Places) -> Refused:
    where = place.of(fault.step) if fault.step else place._where
    return Refused(f"{where}: {fault.reason}", nearest_fix=fault.fix)


def _head(content: Mapping[str, Any], where: str) -> _Head:
    try:
        return msgspec.convert(content, _Head)
    except msgspec.ValidationError as error:
        told = wrong_values.reason(error)
        raise Refused(f"{where}: {told}", nearest_fix=wrong_values.fix(error, _Head)) from error


def _step(table: Any, where: str) -> Step:
    if not isinstance(table, dict) or ("do" in table) == ("expect" in table):
        raise Refused(f"{where} has to say one of `do` and `expect`", nearest_fix='such as do = "heal"')
    key, base = ("do", Action) if "do" in table else ("expect", Expectation)
    kinds = kinds_of(base)
    kind = kinds.get(table[key]) if isinstance(table[key], str) else None
    if kind is None:
        fix = wrong_values.nearest(table[key], kinds)
        raise Refused(f"{where}: {key} = {table[key]!r} is not known", nearest_fix=fix)
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        what = f"{where}, {key} = {table[key]!r}: {wrong_values.reason(error)}"
        raise Refused(what, nearest_fix=wrong_values.fix(error, kind)) from error


def kinds_of(base: type[Step]) -> dict[str, type[Step]]:
    """Every kind of action or of expectation, by the name that files use."""
    members = (one for room in _ROOMS for one in vars(room).values())
    kinds = (one for one in members if isinstance(one, type) and issubclass(one, base))
    kinds = (one for one in kinds if not one.__subclasses__())
    return {str(kind.__struct_config__.tag): kind for kind in kinds}
