"""What a scenario cannot say: steps about things that no step makes, racks and GPUs that are not there."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from rackloom.claim.domain.names import IMEX_DRIVER
from rackloom.claim.node.gpu.settings import GPU_DRIVER
from rackloom.claim.node.nic.plugin import DRIVER as NIC_DRIVER
from rackloom.errors import Refused
from rackloom.prove.doctor import names
from rackloom.topology import profiles
from rackloom.topology.rack import RackProfile
from rackloom.twin.scenario import cluster_values, values
from rackloom.twin.scenario import site_actions as actions
from rackloom.twin.scenario import site_expectations as expectations
from rackloom.twin.scenario.cluster_objects import kind_named, objects_of
from rackloom.twin.scenario.values import Scenario, Step
from rackloom.twin.switches.nmxc_service import RPCS
from rackloom.twin.switches.racks import MOST_RACKS

_MADE: dict[type[Step], tuple[str, str]] = {
    actions.MakeLogicalPartition: ("logical partition", "name"),
    actions.MakeVpc: ("VPC", "name"),
    actions.MakeInstances: ("group", "group"),
    actions.PartitionByHand: ("partition by hand", "name"),
    actions.ListReadByHand: ("list read by hand", "name"),
}
"""Which step makes which kind of thing, and the field that names it."""
_MAKERS = {kind: f'with do = "{step.__struct_config__.tag}"' for step, (kind, _) in _MADE.items()}
_MAKERS["instance"] = _MAKERS["group"]

_USED: dict[tuple[type[Step] | None, str], str] = {
    (None, "logical_partition"): "logical partition",
    (None, "logical_partitions"): "logical partition",
    (expectations.ExpectLogicalPartition, "name"): "logical partition",
    (None, "vpc"): "VPC",
    (None, "group"): "group",
    (None, "groups"): "group",
    (None, "instance"): "instance",
    (actions.HandLetsGo, "name"): "partition by hand",
    (actions.ListWrittenByHand, "name"): "list read by hand",
    (expectations.ExpectUntouched, "name"): "partition by hand",
}
"""Which field names which kind of thing; None: of any step."""


_DRIVERS = (GPU_DRIVER, IMEX_DRIVER, NIC_DRIVER)
"""Those whose devices the nodes of a scenario publish."""
_OF_KIND = (
    cluster_values.DeleteObject,
    cluster_values.ExpectObject,
    cluster_values.ExpectCondition,
    cluster_values.ExpectGone,
)
_OF_LEADERS = (cluster_values.LeaderAction, cluster_values.ExpectLeader)
_OF_ONE_PROCESS = (cluster_values.SoleAction, cluster_values.ExpectControllersEnded)
_CHECKS = {told for name, told in vars(names).items() if name.isupper() and isinstance(told, str)}


class Fault(msgspec.Struct, frozen=True):
    """What is wrong with a step (0: with the whole), and what would make it right."""

    step: int
    reason: str
    fix: str


def faults_of(scenario: Scenario) -> Iterator[Fault]:
    """Everything that cannot be, in order of the steps."""
    try:
        profile = profiles.load_rack(scenario.profile)
    except Refused as refused:
        yield Fault(0, refused.reason, refused.nearest_fix or "name a rack profile")
        return
    yield from _whole(scenario)
    made: dict[str, set[str]] = {}
    clock = 0.0
    for number, step in enumerate(scenario.steps, 1):
        found = [
            *_timing(step, clock),
            *_seats(step, scenario, profile),
            *_names(step, made),
            *_words(step),
            *_drivers(step),
            *_unheard_of(step, made),
            *_controller(step, scenario),
            *_candidates(step, scenario),
        ]
        yield from (Fault(number, reason, fix) for reason, fix in found)
        clock = step.at if step.at is not None else clock
        _remember(step, made)


def _whole(scenario: Scenario) -> Iterator[Fault]:
    if scenario.faults == "none" and scenario.without_faults != scenario:
        yield Fault(0, 'something breaks, and faults = "none" is said', "leave that out")
    if scenario.racks > MOST_RACKS:
        yield Fault(0, f"{scenario.racks} racks are too many for one process", f"use up to {MOST_RACKS}")
    if not isinstance(scenario.steps[-1], values.Expectation):
        fix = "end with what must be seen, such as expect = 'invariants'"
        yield Fault(len(scenario.steps), "nothing is expected after this step", fix)


def _timing(step: Step, clock: float) -> Iterator[tuple[str, str]]:
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


def _seats(step: Step, scenario: Scenario, profile: RackProfile) -> Iterator[tuple[str, str]]:
    trays, gpus = profile.trays_per_domain, profile.gpus_per_tray
    limits = {"rack": scenario.racks, "domain_of": scenario.racks, "tray": trays, "gpu": gpus}
    if isinstance(step, actions.MakeInstances):
        limits["count"] = trays
    for name, most in limits.items():
        number = getattr(step, name, None)
        if isinstance(number, int) and not 1 <= number <= most:
            more = ", or write more racks above the steps" if name in ("rack", "domain_of") else ""
            yield f"{_key(name)} = {number} is not there", f"a number from 1 to {most}{more}"
    if not 0 <= getattr(step, "rate", 0.0) <= 1:
        yield "rate is not a part of all", "a number from 0 to 1"
    for number in getattr(step, "trays", ()):
        if not 1 <= number <= trays:
            yield f"tray {number} is not there", f"numbers from 1 to {trays}"
    for number in getattr(step, "gpus", ()):
        if not 1 <= number <= gpus:
            yield f"GPU {number} is not there", f"numbers from 1 to {gpus}"
    if isinstance(step, actions.SetInterfaces) and len(step.logical_partitions) != gpus:
        yield f"a tray has {gpus} GPUs, named are {len(step.logical_partitions)}", f"name {gpus}"


def _names(step: Step, made: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    for field in msgspec.structs.fields(step):
        kind = _USED.get((type(step), field.name)) or _USED.get((None, field.name))
        if kind is None or _makes(step, field.name):
            continue
        for name in _each(getattr(step, field.name)):
            known = made.get(kind, set())
            if name and name not in known:
                fix = f"one of {', '.join(sorted(known))}" if known else f"make it before, {_MAKERS[kind]}"
                yield f"{field.encode_name}: there is no {kind} {name!r} yet", fix


def _words(step: Step) -> Iterator[tuple[str, str]]:
    """Words that mean nothing to whom they are said: such a step would do nothing, or find nothing, ever."""
    if isinstance(step, expectations.ExpectFinding | expectations.ExpectNoFinding) and step.check not in (
        "",
        *_CHECKS,
    ):
        yield f"there is no check {step.check!r}", f"one of {', '.join(sorted(_CHECKS))}"
    if isinstance(step, actions.SwitchMistreats) and step.rpc not in RPCS:
        yield f"there is no RPC {step.rpc!r}", f"one of {', '.join(sorted(RPCS))}"
    if isinstance(step, actions.SwitchClaimsDomain) and step.domain_of == step.rack:
        yield f"rack {step.rack} is its own domain already", "another rack in domain-of"
    try:
        _objects(step)
    except Refused as refused:
        yield refused.reason, refused.nearest_fix or "name another"


def _drivers(step: Step) -> Iterator[tuple[str, str]]:
    if isinstance(step, cluster_values.ExpectDevices) and step.driver not in _DRIVERS:
        yield f"there is no driver {step.driver!r}", f"one of {', '.join(_DRIVERS)}"


def _unheard_of(step: Step, made: dict[str, set[str]]) -> Iterator[tuple[str, str]]:
    """An object that nobody ever made is gone from the start: expecting that could not fail."""
    known = made.get("object", set())
    if isinstance(step, cluster_values.ExpectGone) and step.name not in known:
        yield f"no step before names an object {step.name!r}", "submit it, or expect it as an object, before"


def _controller(step: Step, scenario: Scenario) -> Iterator[tuple[str, str]]:
    if scenario.controller == "nmx-m" and isinstance(step, actions.NmxcAction):
        yield "this cannot happen to an NMX-M", 'leave out controller = "nmx-m"'


def _candidates(step: Step, scenario: Scenario) -> Iterator[tuple[str, str]]:
    is_elected = scenario.candidates > 1
    if isinstance(step, _OF_LEADERS) and not is_elected:
        yield "nobody is elected here", "write candidates = 2 above the steps"
    if isinstance(step, _OF_ONE_PROCESS) and is_elected:
        yield "there are two, of which one leads", "a step about the leader, or leave out candidates = 2"


def _objects(step: Step) -> None:
    """Refused for a manifest or a kind that the API server would not know."""
    if isinstance(step, cluster_values.Submit) and not list(objects_of(step.manifest, step.namespace)):
        raise Refused("the manifest holds no object", nearest_fix="write at least one")
    if isinstance(step, _OF_KIND):
        kind_named(step.kind)


def _remember(step: Step, made: dict[str, set[str]]) -> None:
    if type(step) in _MADE:
        kind, field = _MADE[type(step)]
        made.setdefault(kind, set()).add(getattr(step, field))
    if isinstance(step, cluster_values.ExpectObject):
        made.setdefault("object", set()).add(step.name)
    if isinstance(step, cluster_values.Submit):
        made.setdefault("object", set()).update(_submitted(step))
    if isinstance(step, actions.MakeInstances):
        numbered = (f"{step.group}/{number}" for number in range(1, step.count + 1))
        made.setdefault("instance", set()).update(numbered)


def _submitted(step: cluster_values.Submit) -> Iterator[str]:
    """All texts of a manifest: it names its objects, and those that controllers shall make of them."""
    try:
        for _, one in objects_of(step.manifest, step.namespace):
            yield from _texts(one)
    except Refused:
        return  # Said of this step by `_words`.


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _makes(step: Step, field: str) -> bool:
    return type(step) in _MADE and _MADE[type(step)][1] == field


def _each(value: Any) -> Iterable[str]:
    return (value,) if isinstance(value, str) else value


def _key(field: str) -> str:
    return field.replace("_", "-")
