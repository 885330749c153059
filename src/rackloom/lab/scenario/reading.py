"""Reading scenario files: strict TOML, with errors that name the line, the step and the fix.

A file is read in three passes. First its keys and values are checked against the step types. Then each
step is checked against the whole scenario: times that go backwards, racks, trays and GPUs that the
profile does not have, names that no earlier step makes, unknown checks, RPCs, drivers or kinds, steps
that the scenario's controller or number of candidates rules out, and an end without an expectation. The
first problem is refused with its nearest fix.

`scenario_files` lists the shipped scenarios, which lie in `lab/scenarios` beside this package.
"""

import math
import re
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from rackloom.claim.node.gpu.plugin import GPU_DRIVER
from rackloom.claim.node.nic.plugin import NIC_DRIVER
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.domains.names import IMEX_DRIVER
from rackloom.errors import Refused, file_error_text
from rackloom.lab.scenario import (
    cluster_actions,
    cluster_expectations,
    control_plane,
    model,
    site_expectations,
    site_faults,
    stage,
    switch_leaders,
    tenants,
)
from rackloom.lab.scenario.cluster_actions import kind_named, manifest_objects
from rackloom.lab.scenario.model import Action, Expectation, Scenario, Step
from rackloom.lab.switches.fabric import MOST_RACKS
from rackloom.lab.switches.nmxc import NMXC_RPCS
from rackloom.topology import profiles
from rackloom.topology.rack import RackProfile

# The scenarios that ship with Rackloom.


SCENARIO_DIRECTORY = Path(__file__).resolve().parents[1] / "scenarios"


def scenario_files() -> list[Path]:
    """Their files, by name."""
    return sorted(SCENARIO_DIRECTORY.glob("*.toml"))


def shipped_scenarios() -> list[Scenario]:
    """All of them, by name."""
    return [read_scenario(file) for file in scenario_files()]


def find_scenario(file: Path) -> Path:
    """The file of that path, or of a shipped scenario of that name."""
    if file.exists():
        return file
    named = SCENARIO_DIRECTORY / f"{file}.toml"
    if file.parent == Path() and named.exists():
        return named
    names = ", ".join(scenario_file.stem for scenario_file in scenario_files())
    raise Refused(f"there is no scenario {file}", nearest_fix=f"give a file, or one of {names}")


_STEP_HEADER = re.compile(r"^\s*\[\[\s*step\s*\]\]", re.MULTILINE)
_STEP_MODULES = (
    model,
    stage,
    tenants,
    site_faults,
    switch_leaders,
    site_expectations,
    cluster_actions,
    control_plane,
    cluster_expectations,
)


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    seen: str
    faults: model.FaultVisibility = "seen"
    racks: int = 1
    profile: str = "gb200-nvl72"
    processes: Literal[1, 2] = 1
    candidates: Literal[1, 2] = 1
    controller: model.Controller = "nmx-c"


def read_scenario(path: Path) -> Scenario:
    """The scenario in a file. Refused when it cannot be read, or says what cannot be."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(
            f"{path} cannot be read: {file_error_text(error)}", nearest_fix="give a scenario file"
        ) from error
    return parse_scenario(text, path.stem, str(path))


def parse_scenario(text: str, name: str, where: str) -> Scenario:
    """The scenario in a text; `where` is how errors call it."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Refused(f"{where} is not TOML: {error}", nearest_fix="correct that line") from error
    tables = content.pop("step", None)
    if not isinstance(tables, list) or not tables:
        raise Refused(f"{where} has no steps", nearest_fix="write one [[step]] for each thing that happens")
    head = _read_head(content, where)
    place = _StepLines(text, where, len(tables))
    steps = tuple(_read_step(table, place.of(number)) for number, table in enumerate(tables, 1))
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
    for fault in scenario_problems(scenario):
        raise _problem_refusal(fault, place)
    return scenario


class _StepLines:
    """Where each step stands in the file."""

    def __init__(self, text: str, where: str, steps: int) -> None:
        lines = [text.count("\n", 0, found.end()) + 1 for found in _STEP_HEADER.finditer(text)]
        # A text inside of a step may look like a header: then no line is better than a wrong one.
        self._lines = lines if len(lines) == steps else None
        self._where = where

    def of(self, number: int) -> str:
        line = f", line {self._lines[number - 1]}" if self._lines else ""
        return f"{self._where}{line}, step {number}"


# Checks of a whole scenario.


class ScenarioProblem(msgspec.Struct, frozen=True):
    """What is wrong with a step (0: with the whole), and what would make it right."""

    step: int
    reason: str
    fix: str


def _problem_refusal(fault: ScenarioProblem, place: _StepLines) -> Refused:
    where = place.of(fault.step) if fault.step else place._where
    return Refused(f"{where}: {fault.reason}", nearest_fix=fault.fix)


def _read_head(content: Mapping[str, Any], where: str) -> _Head:
    try:
        return msgspec.convert(content, _Head)
    except msgspec.ValidationError as error:
        told = error_reason(error)
        raise Refused(f"{where}: {told}", nearest_fix=error_fix(error, _Head)) from error


def _read_step(table: Any, where: str) -> Step:
    if not isinstance(table, dict) or ("do" in table) == ("expect" in table):
        raise Refused(f"{where} has to say one of `do` and `expect`", nearest_fix='such as do = "heal"')
    key, base = ("do", Action) if "do" in table else ("expect", Expectation)
    kinds = step_types(base)
    kind = kinds.get(table[key]) if isinstance(table[key], str) else None
    if kind is None:
        fix = nearest_words(table[key], kinds)
        raise Refused(f"{where}: {key} = {table[key]!r} is not known", nearest_fix=fix)
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        what = f"{where}, {key} = {table[key]!r}: {error_reason(error)}"
        raise Refused(what, nearest_fix=error_fix(error, kind)) from error


def step_types(base: type[Step]) -> dict[str, type[Step]]:
    """Every kind of action or of expectation, by the name that files use."""
    members = (var for room in _STEP_MODULES for var in vars(room).values())
    kinds = (member for member in members if isinstance(member, type) and issubclass(member, base))
    kinds = (one for one in kinds if not one.__subclasses__())
    return {str(kind.__struct_config__.tag): kind for kind in kinds}


_NAMED_BY: dict[type[Step], tuple[str, str]] = {
    tenants.MakeLogicalPartition: ("logical partition", "name"),
    tenants.MakeVpc: ("VPC", "name"),
    tenants.MakeInstances: ("group", "group"),
    site_faults.PartitionByHand: ("partition by hand", "name"),
    site_faults.ListReadByHand: ("list read by hand", "name"),
}
"""Which step makes which kind of thing, and the field that names it."""
_HOW_TO_MAKE = {kind: f'with do = "{step.__struct_config__.tag}"' for step, (kind, _) in _NAMED_BY.items()}
_HOW_TO_MAKE["instance"] = _HOW_TO_MAKE["group"]

_REFERS_TO: dict[tuple[type[Step] | None, str], str] = {
    (None, "logical_partition"): "logical partition",
    (None, "logical_partitions"): "logical partition",
    (site_expectations.ExpectLogicalPartition, "name"): "logical partition",
    (None, "vpc"): "VPC",
    (None, "group"): "group",
    (None, "groups"): "group",
    (None, "instance"): "instance",
    (site_faults.HandLetsGo, "name"): "partition by hand",
    (site_faults.ListWrittenByHand, "name"): "list read by hand",
    (site_expectations.ExpectUntouched, "name"): "partition by hand",
}
"""Which field names which kind of thing; None: of any step."""


_PUBLISHED_DRIVERS = (GPU_DRIVER, IMEX_DRIVER, NIC_DRIVER)
"""Those whose devices the nodes of a scenario publish."""
_STEPS_WITH_KIND = (
    cluster_actions.DeleteObject,
    cluster_expectations.ExpectObject,
    cluster_expectations.ExpectCondition,
    cluster_expectations.ExpectGone,
)
_LEADER_STEPS = (model.LeaderAction, control_plane.ExpectLeader)
_SOLE_PROCESS_STEPS = (model.SoleAction, control_plane.ExpectControllersEnded)
_DOCTOR_CHECKS = frozenset(Check)


def scenario_problems(scenario: Scenario) -> Iterator[ScenarioProblem]:
    """Everything that cannot be, in order of the steps."""
    try:
        profile = profiles.load_rack(scenario.profile)
    except Refused as refused:
        yield ScenarioProblem(0, refused.reason, refused.nearest_fix or "name a rack profile")
        return
    yield from _check_whole(scenario)
    made: dict[str, set[str]] = {}
    clock = 0.0
    for number, step in enumerate(scenario.steps, 1):
        found = [
            *_check_timing(step, clock),
            *_check_numbers(step, scenario, profile),
            *_check_names(step, made),
            *_check_words(step),
            *_check_drivers(step),
            *_check_gone_objects(step, made),
            *_check_controller(step, scenario),
            *_check_candidates(step, scenario),
        ]
        yield from (ScenarioProblem(number, reason, fix) for reason, fix in found)
        clock = step.at if step.at is not None else clock
        _remember_names(step, made)


def _check_whole(scenario: Scenario) -> Iterator[ScenarioProblem]:
    if scenario.faults == "none" and scenario.without_faults != scenario:
        yield ScenarioProblem(0, 'something breaks, and faults = "none" is said', "leave that out")
    if scenario.racks > MOST_RACKS:
        yield ScenarioProblem(
            0, f"{scenario.racks} racks are too many for one process", f"use up to {MOST_RACKS}"
        )
    if not isinstance(scenario.steps[-1], model.Expectation):
        fix = "end with what must be seen, such as expect = 'invariants'"
        yield ScenarioProblem(len(scenario.steps), "nothing is expected after this step", fix)


def _check_timing(step: Step, clock: float) -> Iterator[tuple[str, str]]:
    for field in msgspec.structs.fields(step):
        value = getattr(step, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{field.encode_name} = {value} is no number to reckon with", "a finite number"
    if step.at is not None and step.at < 0:
        yield f"at = {step.at:g} is before the site answers", "seconds from 0 up"
    elif step.at is not None and step.at < clock:
        yield f"at = {step.at:g} is before the step above", f"at least {clock:g}, or put it further up"
    for name in ("within", "stays", "down", "seconds"):
        if getattr(step, name, 0.0) < 0:
            yield f"{name} is negative", "give seconds from 0 up"
    for name, least in (("point", 1), ("lives", 1), ("times", 1), ("lists", 1), ("xid", 1), ("count", 0)):
        if getattr(step, name, least) < least:
            yield f"{name} = {getattr(step, name)} is too small", f"a number from {least} up"


def _check_numbers(step: Step, scenario: Scenario, profile: RackProfile) -> Iterator[tuple[str, str]]:
    trays, gpus = profile.trays_per_domain, profile.gpus_per_tray
    limits = {"rack": scenario.racks, "domain_of": scenario.racks, "tray": trays, "gpu": gpus}
    if isinstance(step, tenants.MakeInstances):
        limits["count"] = trays
    for name, most in limits.items():
        number = getattr(step, name, None)
        if isinstance(number, int) and not 1 <= number <= most:
            more = ", or write more racks above the steps" if name in ("rack", "domain_of") else ""
            yield f"{_file_key(name)} = {number} is not there", f"a number from 1 to {most}{more}"
    if not 0 <= getattr(step, "rate", 0.0) <= 1:
        yield "rate is not a part of all", "a number from 0 to 1"
    for number in getattr(step, "trays", ()):
        if not 1 <= number <= trays:
            yield f"tray {number} is not there", f"numbers from 1 to {trays}"
    for number in getattr(step, "gpus", ()):
        if not 1 <= number <= gpus:
            yield f"GPU {number} is not there", f"numbers from 1 to {gpus}"
    if isinstance(step, tenants.SetInterfaces) and len(step.logical_partitions) != gpus:
        yield f"a tray has {gpus} GPUs, named are {len(step.logical_partitions)}", f"name {gpus}"


def _check_names(step: Step, made: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    for field in msgspec.structs.fields(step):
        kind = _REFERS_TO.get((type(step), field.name)) or _REFERS_TO.get((None, field.name))
        if kind is None or _makes_name(step, field.name):
            continue
        for name in _name_list(getattr(step, field.name)):
            known = made.get(kind, set())
            if name and name not in known:
                fix = (
                    f"one of {', '.join(sorted(known))}" if known else f"make it before, {_HOW_TO_MAKE[kind]}"
                )
                yield f"{field.encode_name}: there is no {kind} {name!r} yet", fix


def _check_words(step: Step) -> Iterator[tuple[str, str]]:
    """Words that mean nothing to whom they are said: such a step would do nothing, or find nothing, ever."""
    if isinstance(
        step, site_expectations.ExpectFinding | site_expectations.ExpectNoFinding
    ) and step.check not in (
        "",
        *_DOCTOR_CHECKS,
    ):
        yield f"there is no check {step.check!r}", f"one of {', '.join(sorted(_DOCTOR_CHECKS))}"
    if isinstance(step, site_faults.SwitchMistreats) and step.rpc not in NMXC_RPCS:
        yield f"there is no RPC {step.rpc!r}", f"one of {', '.join(sorted(NMXC_RPCS))}"
    if isinstance(step, site_faults.SwitchClaimsDomain) and step.domain_of == step.rack:
        yield f"rack {step.rack} is its own domain already", "another rack in domain-of"
    try:
        _check_objects(step)
    except Refused as refused:
        yield refused.reason, refused.nearest_fix or "name another"


def _check_drivers(step: Step) -> Iterator[tuple[str, str]]:
    if isinstance(step, cluster_expectations.ExpectDevices) and step.driver not in _PUBLISHED_DRIVERS:
        yield f"there is no driver {step.driver!r}", f"one of {', '.join(_PUBLISHED_DRIVERS)}"


def _check_gone_objects(step: Step, made: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """An object that nobody ever made is gone from the start: expecting that could not fail."""
    known = made.get("object", set())
    if isinstance(step, cluster_expectations.ExpectGone) and step.name not in known:
        yield f"no step before names an object {step.name!r}", "submit it, or expect it as an object, before"


def _check_controller(step: Step, scenario: Scenario) -> Iterator[tuple[str, str]]:
    if scenario.controller == "nmx-m" and isinstance(step, model.NmxcAction):
        yield "this cannot happen to an NMX-M", 'leave out controller = "nmx-m"'


def _check_candidates(step: Step, scenario: Scenario) -> Iterator[tuple[str, str]]:
    is_elected = scenario.candidates > 1
    if isinstance(step, _LEADER_STEPS) and not is_elected:
        yield "nobody is elected here", "write candidates = 2 above the steps"
    if isinstance(step, _SOLE_PROCESS_STEPS) and is_elected:
        yield "there are two, of which one leads", "a step about the leader, or leave out candidates = 2"


def _check_objects(step: Step) -> None:
    """Refused for a manifest or a kind that the API server would not know."""
    if isinstance(step, cluster_actions.Submit) and not list(manifest_objects(step.manifest, step.namespace)):
        raise Refused("the manifest holds no object", nearest_fix="write at least one")
    if isinstance(step, _STEPS_WITH_KIND):
        kind_named(step.kind)


def _remember_names(step: Step, made: dict[str, set[str]]) -> None:
    if type(step) in _NAMED_BY:
        kind, field = _NAMED_BY[type(step)]
        made.setdefault(kind, set()).add(getattr(step, field))
    if isinstance(step, cluster_expectations.ExpectObject):
        made.setdefault("object", set()).add(step.name)
    if isinstance(step, cluster_actions.Submit):
        made.setdefault("object", set()).update(_submitted_names(step))
    if isinstance(step, tenants.MakeInstances):
        numbered = (f"{step.group}/{number}" for number in range(1, step.count + 1))
        made.setdefault("instance", set()).update(numbered)


def _submitted_names(step: cluster_actions.Submit) -> Iterator[str]:
    """All texts of a manifest: it names its objects, and those that controllers shall make of them."""
    try:
        for _, one in manifest_objects(step.manifest, step.namespace):
            yield from _all_texts(one)
    except Refused:
        return  # Said of this step by `_words`.


def _all_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _all_texts(inner)


def _makes_name(step: Step, field: str) -> bool:
    return type(step) in _NAMED_BY and _NAMED_BY[type(step)][1] == field


def _name_list(value: Any) -> Iterable[str]:
    return (value,) if isinstance(value, str) else value


def _file_key(field: str) -> str:
    return field.replace("_", "-")


# What is wrong with a value of a file, in words.


_ERROR_PATH = re.compile(r" - at `\$\.([\w-]+)")
_PLAIN_TYPES = {
    int: "a whole number, such as 1",
    float: "a number, such as 2.5",
    str: "a text in quotes",
    bool: "true or false",
}


def error_reason(error: msgspec.ValidationError) -> str:
    """What it says, as a reader of the file would."""
    told = str(error).replace("Object missing required field", "it lacks the key")
    told = told.replace("Object contains unknown field", "it has the unknown key")
    return told.replace(" - at `$.", " at `")


def error_fix(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> str:
    """What the key takes whose value is wrong; where keys are wrong, which there are."""
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
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        first, *others = get_args(kind)
        size = "" if others == [Ellipsis] else f" of {1 + len(others)}"
        return f"a list{size}, each of it {_type_text(first)}"
    if get_origin(kind) is types.UnionType:
        return " or ".join(_type_text(arg) for arg in get_args(kind) if arg is not types.NoneType)
    return _PLAIN_TYPES[kind]
