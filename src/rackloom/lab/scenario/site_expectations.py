"""The expectations on a scenario's site: by REST, on the true fabrics, or by the doctor.

An expectation compares REST's statuses and messages, domain UUIDs and the time of the last reading, or the
true partitions (together, alone, how many, untouched), or the doctor's findings, with the check and the
object that a finding must name.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from rackloom.core.diagnosis.findings import CheckState, Finding
from rackloom.lab.scenario.model import NotObserved, expectation, require
from rackloom.lab.scenario.parameters import (
    FIRST_RACK,
    Count,
    DoctorCheck,
    ForeignPartition,
    Group,
    Groups,
    Instance,
    InstanceGpu,
    LogicalPartition,
    OperationKind,
    Rack,
    Rpc,
    Tray,
)
from rackloom.lab.scenario.rest_client import FIRST_FAILURE, Json
from rackloom.lab.scenario.stage import Stage

# REST.


@expectation()
async def instances(stage: Stage, *, group: Group, status: str, because: str = "") -> str:
    """REST shows this status of every instance of a group. `because` is a part of its newest message."""
    members = stage.rest.groups[group]
    for number, member in enumerate(members, 1):
        shown, why = _status_and_reason(await stage.rest.shown(member))
        require(shown == status and because in why, f"{group}/{number} is {shown}: {why}")
    return f"{len(members)} of {len(members)} {status}: {why}"


@expectation()
async def released(stage: Stage, *, group: Group) -> str:
    """REST no longer knows the instances of a group."""
    members = stage.rest.groups[group]
    left = [member for member in members if await stage.rest.shown(member) is not None]
    require(not left, f"{len(left)} of {len(members)} are still there")
    return f"{len(members)} instances are gone"


@expectation()
async def interface(
    stage: Stage, *, instance: Instance, gpu: InstanceGpu, status: str, because: str = ""
) -> str:
    """REST shows this status of one GPU of an instance. `because` is a part of its newest message."""
    shown = await stage.rest.shown(stage.rest.instance(instance))
    listed = shown["nvLinkInterfaces"] if shown else ()
    found = next((listed_gpu for listed_gpu in listed if f"gpu-{listed_gpu['deviceInstance']}" == gpu), None)
    now, why = _status_and_reason(found)
    return require(now == status and because in why, f"{gpu} of {instance} is {now}: {why}")


@expectation()
async def history(stage: Stage, *, group: Group, status: str, because: str) -> str:
    """Every instance of a group once had this status, `because` being a part of its message then."""
    members = stage.rest.groups[group]
    for number, member in enumerate(members, 1):
        shown = await stage.rest.shown(member)
        past = [(entry["status"], entry["message"]) for entry in (shown or {}).get("statusHistory") or ()]
        was = any(status == past_status and because in message for past_status, message in past)
        text = ", ".join(past_status for past_status, _ in reversed(past)) or "gone"
        require(was, f"{group}/{number} was {text}, and never {status} because {because!r}")
    return f"{len(members)} of {len(members)} were {status} because {because!r}"


@expectation()
async def logical_partition(stage: Stage, *, name: LogicalPartition, status: str) -> str:
    """REST shows this status of a logical partition."""
    made = stage.rest.partitions[name]
    now, why = _status_and_reason(await stage.rest.shown(made, "nvlink-logical-partition"))
    require(now == status, f"{name} is {now}: {why}")
    return f"{name} is {now}"


@expectation()
async def domain(stage: Stage, *, group: Group, changed: bool = False) -> str:
    """REST names, for every GPU of a group, the domain UUID that its controller reports now.

    `changed`: another than the last such step saw.
    """
    actual = set()
    for member in stage.rest.groups[group]:
        uuid = stage.truth.locate(member.machine)[0].fabric.domain
        actual.add(uuid)
        shown = await stage.rest.shown(member)
        named = {gpu["nvLinkDomainId"] for gpu in shown["nvLinkInterfaces"]} if shown else set()
        require(named == {uuid}, f"{member.machine} is in {uuid}, REST says {named}")
    key = "domain", group
    before = stage.previous(key) or stage.at_first_check(key, frozenset(actual))
    text = f"every GPU of {group} is in domain {', '.join(sorted(actual))}"
    require(not changed or not actual & before, f"{text}, as before")
    stage.record(key, frozenset(actual))
    return text


@expectation()
async def read_again(stage: Stage, *, rack: Rack = FIRST_RACK) -> str:
    """The service has read the controller of a rack again since this step began."""
    serials = {gpu.chassis_serial for gpu in stage.truth.rack(rack).fabric.gpus.values()}
    answer = await stage.site.rest(None, "GET", "nvlink-nmxc-endpoint")
    if answer is None or answer.status >= FIRST_FAILURE:
        raise NotObserved("the service does not tell when it read its controllers")
    at = next(endpoint["observedAt"] for endpoint in answer.body if endpoint["chassisSerial"] in serials)
    first = stage.at_first_check("read-again", at)
    require(at != first, f"the newest reading is that of {first}")
    return f"the controller of {rack} was read at {at}"


@expectation()
async def operation(
    stage: Stage, *, kind: OperationKind, state: Literal["done", "refused", "unknown"], count: Count
) -> str:
    """So many operations of one kind were recorded with this outcome."""
    answer = await stage.site.rest(None, "GET", "nvlink-operation?pageSize=100")
    if answer is None or answer.status >= FIRST_FAILURE:
        raise NotObserved("the service does not tell which operations it requested")
    found = sum((row["kind"], row["state"]) == (kind, state) for row in answer.body)
    return require(found == count, f"{found} operations {kind} are recorded as {state}")


@expectation()
async def service_ended(stage: Stage, *, count: Count) -> str:
    """So many lives of the site service have ended."""
    return require(stage.site.ended == count, f"{stage.site.ended} lives of the service have ended")


@expectation(needs="nmx-c")
async def switch_calls(stage: Stage, *, rpc: Rpc, count: Count, rack: Rack = FIRST_RACK) -> str:
    """So many calls of one RPC have arrived at the controller of a rack."""
    calls = stage.truth.rack(rack).faults.calls[rpc]
    require(calls == count, f"{calls} calls of {rpc} have arrived at {rack}")
    return f"{calls} calls of {rpc} have arrived at {rack}"


def _status_and_reason(shown: Json | None) -> tuple[str, str]:
    if shown is None:
        return "gone", "REST answers 404"
    history = shown.get("statusHistory") or [{"message": ""}]
    return shown["status"], history[0]["message"]


# The true fabrics.


@expectation()
async def together(stage: Stage, *, groups: Groups) -> str:
    """On the true fabric, the GPUs of these groups are one partition, without any other GPU."""
    wanted = _guids(stage, groups)
    for switch in stage.truth.switches:
        for partition in switch.fabric.partitions.values():
            if wanted & set(partition.guids):
                present = set(partition.guids) & switch.fabric.gpus.keys()
                text = f"{partition.name!r} holds {len(present)} GPUs, not {len(wanted)}"
                require(present == wanted, text)
                return (
                    f"partition {partition.id} {partition.name!r} holds these {len(wanted)} GPUs and no other"
                )
    raise NotObserved(f"no partition holds any of the {len(wanted)} GPUs")


@expectation()
async def alone(stage: Stage, *, group: Group) -> str:
    """On the true fabric, no GPU of a group shares a partition with a GPU outside the group."""
    own = _guids(stage, [group])
    for switch in stage.truth.switches:
        for partition in switch.fabric.partitions.values():
            others = set(partition.guids) & switch.fabric.gpus.keys() - own
            is_shared = others and own & set(partition.guids)
            require(not is_shared, f"{partition.name!r} also holds {len(others)} GPUs of others")
    return f"{len(own)} GPUs share no partition with others"


@expectation()
async def partitions(stage: Stage, *, count: Count, rack: Rack = FIRST_RACK) -> str:
    """So many partitions of a true fabric hold GPUs."""
    fabric = stage.truth.rack(rack).fabric
    held = [
        f"{partition.name!r} of {len(partition.guids)}"
        for partition in fabric.partitions.values()
        if set(partition.guids) & fabric.gpus.keys()
    ]
    return require(len(held) == count, f"{rack} holds {', '.join(held) or 'none'}")


@expectation()
async def untouched(stage: Stage, *, name: ForeignPartition) -> str:
    """A partition that was made by hand is unchanged."""
    switch, made = stage.truth.invariants.foreign[name]
    now = switch.fabric.partitions.get(made.id)
    require(now == made, f"it is {'gone' if now is None else f'{len(now.guids)} GPUs, {now.name!r}'}")
    return f"partition {made.id} {made.name!r} still holds its {len(made.guids)} GPUs"


def _guids(stage: Stage, groups: Iterable[str]) -> set[int]:
    members = [member for group in groups for member in stage.rest.groups[group]]
    return {gpu.guid for member in members for gpu in stage.truth.locate(member.machine)[1]}


# The doctor.


FINDINGS_SHOWN = 3
"""Findings that a transcript shows in full."""


@expectation(layer="doctor")
async def finding(
    stage: Stage,
    *,
    check: DoctorCheck,
    subject: str = "",
    instance: Instance = "",
    tray: Tray | None = None,
    rack: Rack | None = None,
) -> str:
    """The doctor finds it by this check, and names an instance's machine, a tray, or (without one) a rack.

    `subject` is a part of the finding's own.
    """
    findings = await _findings(stage)
    named: tuple[str, ...] = ("",)
    if instance or tray is not None:
        machine = stage.truth.machine(tray) if tray is not None else stage.rest.instance(instance).machine
        named = machine, stage.truth.tray_of(machine)
    elif rack is not None:
        named = (stage.truth.rack(rack).fabric.domain,)
    for found in findings:
        if (
            found.check == check
            and subject in found.subject
            and any(_names_object(found, name) for name in named)
        ):
            return f"{found.check} of {found.subject}: {found.message}"
    of = f", and nothing of {check} that names {' or '.join(named)}" if any(named) else ""
    raise NotObserved(f"the doctor finds {_findings_text(findings)}{of}")


@expectation(layer="doctor")
async def no_finding(stage: Stage, *, check: DoctorCheck = "") -> str:
    """The doctor finds nothing, or nothing of one check."""
    found = [found for found in await _findings(stage) if not check or _reports_check(check, found)]
    require(not found, f"the doctor finds {_findings_text(found)}")
    return f"the doctor finds nothing{f' of {check}' if check else ''}"


async def _findings(stage: Stage) -> list[Finding]:
    return [found for found in await stage.site.findings() if found.state is not CheckState.HOLDS]


def _reports_check(check: str, found: Finding) -> bool:
    """Whether the check fails, as a cause or as an effect of another."""
    return check == found.check or any(text.startswith(f"{check}: ") for text in found.consequences)


def _names_object(found: Finding, name: str) -> bool:
    """Whether a machine, tray or domain is the subject of a finding, or is among its places."""
    is_subject = re.search(rf"{re.escape(name)}(?![\w-])", found.subject)
    return bool(is_subject) or any(place.endswith(f" {name}") for place in found.where)


def _findings_text(findings: Sequence[Finding]) -> str:
    texts = [f"{found.check} of {found.subject}: {found.message}" for found in findings[:FINDINGS_SHOWN]]
    if len(findings) > FINDINGS_SHOWN:
        texts.append(f"{len(findings) - FINDINGS_SHOWN} more")
    return "; ".join(texts) or "nothing"
