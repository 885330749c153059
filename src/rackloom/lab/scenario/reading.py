"""Reading scenario files: strict TOML, with errors that name the line, the step and the fix.

The steps of the setup that its head names come before its own. Keys
and values are converted to the steps that they name. Last, each step is checked against the whole
scenario: the checks that its parameters carry, times that go backwards, steps that the scenario's
controller or number of candidates rules out, and an end without an expectation. The first problem is
refused with its nearest fix.
"""

import re
import types
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

import msgspec

from rackloom.errors import Refused, Undecodable, file_error_text
from rackloom.lab.scenario import (  # noqa: F401 (a step is known once its module is imported)
    cluster_expectations,
    model,
    site_expectations,
    tenants,
)
from rackloom.lab.scenario.every_layer import invariants
from rackloom.lab.scenario.files import SCENARIO_DIRECTORY, scenario_files
from rackloom.lab.scenario.model import ACTIONS, EXPECTATIONS, Expectation, Scenario, Step, StepKind
from rackloom.lab.scenario.parameters import FileSoFar, Gpu, InstanceGpu, Nic, Rack, Tray
from rackloom.lab.scenario.stage import racks_of
from rackloom.lab.switches.fabric import MOST_RACKS, SeededNames
from rackloom.runtime.foreign_text import decode_toml
from rackloom.topology import profiles
from rackloom.topology.part_names import PartName
from rackloom.topology.rack import RackSite, build_site


def shipped_scenarios() -> list[Scenario]:
    """All that ship with Rackloom, by name."""
    return [read_scenario(file) for file in scenario_files()]


class ScenarioHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys above the steps of a file."""

    title: str
    seen: str
    faults: model.FaultVisibility = "seen"
    racks: int = 1
    profile: str = "gb200-nvl72"
    processes: Literal[1, 2] = 1
    candidates: Literal[1, 2] = 1
    controller: model.Controller = "nmx-c"
    setup: str = ""
    """The setup with steps that come before those of the file."""


def read_scenario(path: Path) -> Scenario:
    """The scenario in a file. Refused if it cannot be read, or has a step that cannot be."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(
            f"{path} cannot be read: {file_error_text(error)}", nearest_fix="give a scenario file"
        ) from error
    return parse_scenario(text, path.stem, str(path))


KnownNames = Mapping[str, Iterable[str]]
"""Names that steps may use before any step of a file made them, by the kind of thing they name."""


def parse_scenario(
    text: str,
    name: str,
    where: str,
    *,
    known: KnownNames = MappingProxyType({}),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Scenario:
    """The scenario in a text, which errors call `where`.

    `known` are the names from before its first step, `defaults` the keys above the steps that it leaves out.
    """
    content = {**defaults, **_parse_toml(text, where)}
    tables = content.pop("step", None)
    if not isinstance(tables, list) or not tables:
        raise Refused(f"{where} has no steps", nearest_fix="write one [[step]] for each thing that happens")
    head = _convert(content, ScenarioHead, where)
    placed = [*_setup_tables(head.setup, where), *_placed(tables, text, where)]
    steps = tuple(read_step(table, place) for table, place in placed)
    fields = msgspec.structs.asdict(head)
    del fields["setup"]
    scenario = Scenario(name=name, steps=steps, **fields)
    for problem in scenario_problems(scenario, known):
        place = placed[problem.step - 1][1] if problem.step else where
        raise Refused(f"{place}: {problem.reason}", nearest_fix=problem.fix)
    return scenario


def _parse_toml(text: str, where: str) -> dict[str, Any]:
    try:
        return decode_toml(text, where)
    except Undecodable as error:
        raise Refused(f"{where} is not TOML: {error.reason}", nearest_fix="correct that line") from error


_STEP_HEADER = re.compile(r"^\s*\[\[\s*step\s*\]\]", re.MULTILINE)


_Placed = list[tuple[Any, str]]
"""The tables of steps, each with how errors call it: file, line and number."""


def _setup_tables(name: str, where: str) -> _Placed:
    """The steps of a setup, after those of the setup that it names itself."""
    if not name:
        return []
    files = {file.stem: file for file in (SCENARIO_DIRECTORY / "setups").glob("*.toml")}
    if name not in files:
        raise Refused(f"{where}: there is no setup {name!r}", nearest_fix=nearest_words(name, files))
    text, file = files[name].read_text(), str(files[name])
    content = _parse_toml(text, file)
    return [*_setup_tables(content.get("setup", ""), file), *_placed(content["step"], text, file)]


def _placed(tables: list[Any], text: str, where: str) -> _Placed:
    lines = [text.count("\n", 0, found.end()) + 1 for found in _STEP_HEADER.finditer(text)]
    # A text inside of a step may look like a header: then no line is better than a wrong one.
    places = [f", line {line}" for line in lines] if len(lines) == len(tables) else [""] * len(tables)
    return [
        (table, f"{where}{place}, step {number}")
        for number, (table, place) in enumerate(zip(tables, places, strict=True), 1)
    ]


def read_step(table: Any, where: str) -> Step:
    """The step in a table, which errors call `where`. Refused if it is no step."""
    if not isinstance(table, dict) or ("do" in table) == ("expect" in table):
        raise Refused(f"{where} has to say one of `do` and `expect`", nearest_fix='such as do = "heal"')
    key, kinds = ("do", ACTIONS) if "do" in table else ("expect", EXPECTATIONS)
    kind = kinds.get(table[key]) if isinstance(table[key], str) else None
    if kind is None:
        fix = nearest_words(table[key], kinds)
        raise Refused(f"{where}: {key} = {table[key]!r} is not known", nearest_fix=fix)
    return cast(Step, _convert(table, kind.struct, f"{where}, {key} = {table[key]!r}"))


# Checks of a whole scenario.


class ScenarioProblem(msgspec.Struct, frozen=True):
    """The error of a step (0: of the whole), and its fix."""

    step: int
    reason: str
    fix: str


def file_so_far(site: RackSite, known: KnownNames = MappingProxyType({})) -> FileSoFar:
    """The facts that are known before the first step of a scenario on such a site."""
    trays = [tray for domain in site.domains for tray in domain.trays]
    parts = tuple(str(PartName(tray.rack, tray.slot)) for tray in trays)
    file = FileSoFar(racks=racks_of(site), trays=parts, gpus=len(trays[0].gpus))
    for what, names in known.items():
        file.made[what].update(names)
    return file


def step_problems(step: Step, file: FileSoFar) -> Iterator[tuple[str, str]]:
    """The problems of a step that is played alone, each with its fix."""
    yield from _check_values(step, file)
    if step.step_kind.needs == "election":
        yield _NEEDS["election"]


def scenario_problems(
    scenario: Scenario, known: KnownNames = MappingProxyType({})
) -> Iterator[ScenarioProblem]:
    """Everything that cannot be, in order of the steps."""
    try:
        site = build_site(profiles.load_rack(scenario.profile), scenario.racks, SeededNames(""))
    except Refused as refused:
        yield ScenarioProblem(0, refused.reason, refused.nearest_fix or "name a rack profile")
        return
    if scenario.faults == "none" and scenario.without_faults != scenario:
        yield ScenarioProblem(0, 'something breaks, and faults = "none" is said', "leave that out")
    if scenario.racks > MOST_RACKS:
        yield ScenarioProblem(
            0, f"{scenario.racks} racks are too many for one process", f"use up to {MOST_RACKS}"
        )
    if not isinstance(scenario.steps[-1], Expectation):
        fix = f"end with what must be seen, such as expect = {invariants.name!r}"
        yield ScenarioProblem(len(scenario.steps), "nothing is expected after this step", fix)
    file = file_so_far(site, known)
    clock = 0.0
    for number, step in enumerate(scenario.steps, 1):
        found = [
            *_check_time(step, clock),
            *_check_values(step, file),
            *_check_needs(step.step_kind, scenario),
        ]
        yield from (ScenarioProblem(number, reason, fix) for reason, fix in found)
        clock = step.at if step.at is not None else clock


def _check_time(step: Step, clock: float) -> Iterator[tuple[str, str]]:
    if step.at is not None and step.at < 0:
        yield f"at = {step.at:g} is before the site answers", "seconds from 0 up"
    elif step.at is not None and step.at < clock:
        yield f"at = {step.at:g} is before the step above", f"at least {clock:g}, or put it further up"


def _check_values(step: Step, file: FileSoFar) -> Iterator[tuple[str, str]]:
    """The checks that the step's parameters carry. A check also notes the names that the step makes."""
    file.step = step
    for name, (key, checks) in step.step_kind.checks.items():
        value = getattr(step, name)
        for check in checks if value is not None else ():
            yield from check(value, key, file)


_NEEDS = {
    "nmx-c": ("this cannot happen to an NMX-M", 'leave out controller = "nmx-m"'),
    "election": ("nobody is elected here", "write candidates = 2 above the steps"),
    "single process": (
        "there are two, of which one leads",
        "a step about the leader, or leave out candidates = 2",
    ),
}
"""The error of a step that lacks a needed part, and the fix."""


def _check_needs(kind: StepKind, scenario: Scenario) -> Iterator[tuple[str, str]]:
    has = {
        scenario.controller,
        "election" if scenario.candidates > 1 else "single process",
    }
    if kind.needs and kind.needs not in has:
        yield _NEEDS[kind.needs]


# The problem of a value of a file, in words.


_ERROR_PATH = re.compile(r" - at `\$\.([\w-]+)")
_TYPE_TEXTS: Mapping[Any, str] = {
    Rack: 'a rack, such as "rack-01"',
    Tray: 'a tray, such as "rack-01/slot-2"',
    Gpu: 'a GPU, such as "rack-01/slot-2/gpu-0"',
    Nic: 'a NIC, such as "rack-01/slot-2/nic-0"',
    InstanceGpu: 'a GPU of the instance, such as "gpu-0"',
    int: "a whole number, such as 1",
    float: "a number, such as 2.5",
    str: "a text in quotes",
    bool: "true or false",
}


T = TypeVar("T", bound=msgspec.Struct)


def _convert(content: Mapping[str, Any], kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise Refused(f"{where}: {error_reason(error)}", nearest_fix=error_fix(error, kind)) from error


def error_reason(error: msgspec.ValidationError) -> str:
    """The text of the error, in words for a reader of the file."""
    text = str(error).replace("Object missing required field", "it lacks the key")
    text = text.replace("Object contains unknown field", "it has the unknown key")
    return text.replace(" - at `$.", " at `")


def error_fix(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> str:
    """The values that the wrong key takes, or the keys that there are if a key is wrong."""
    found = _ERROR_PATH.search(str(error))
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    if found and found[1] in fields:
        return f"{found[1]} is {_type_text(fields[found[1]].type)}"
    keys = (name if field.required else f"{name} (optional)" for name, field in fields.items())
    return f"its keys are {', '.join(keys)}"


def nearest_words(word: object, known: Iterable[str]) -> str:
    """The words that there are, before them the one that was perhaps meant."""
    words = sorted(known)
    close = get_close_matches(str(word), words, n=1)
    return f"{close[0]}, or one of {', '.join(words)}" if close else f"one of {', '.join(words)}"


def _type_text(kind: Any) -> str:
    if kind in _TYPE_TEXTS:
        return _TYPE_TEXTS[kind]
    if get_origin(kind) is Annotated:
        return _type_text(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        first, *others = get_args(kind)
        size = "" if others == [Ellipsis] else f" of {1 + len(others)}"
        return f"a list{size}, each of it {_type_text(first)}"
    # The rest are unions, such as with None.
    return " or ".join(_type_text(arg) for arg in get_args(kind) if arg is not types.NoneType)
