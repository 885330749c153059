"""What must be observed of a scenario's site: by REST, on the true fabrics, or by the doctor.

Each expectation is a step type and a method that looks once. A look compares REST's statuses and
messages, domain UUIDs and the time of the last reading; the true partitions (together, alone, how many,
untouched); the invariants since the start (S1, S2, S4 on fabrics, S10 on acknowledged instances); or
the doctor's findings, with the check and the object that a finding must name.

Some steps compare with what the previous step of the same kind saw. A step looks many times, so what it
compares with is fixed at its first look.
"""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from rackloom.core.diagnosis.findings import CheckState, Finding
from rackloom.lab.scenario.model import Expectation, Layer, NotObserved
from rackloom.lab.scenario.stage import FabricTruth, Json, SiteControl
from rackloom.lab.scenario.tenants import MadeInstance, ScenarioTenants
from rackloom.lab.switches.fabric import SimulatedFabric


class ExpectInstances(Expectation, frozen=True, kw_only=True, tag="instances"):
    """REST says this status of every instance of a group, `because` being a part of its newest message."""

    group: str
    status: str
    because: str = ""


class ExpectReleased(Expectation, frozen=True, kw_only=True, tag="released"):
    """REST no longer knows the instances of a group."""

    group: str


class ExpectInterface(Expectation, frozen=True, kw_only=True, tag="interface"):
    """REST says this status of one GPU of an instance, `because` being a part of its newest message."""

    instance: str
    gpu: int
    status: str
    because: str = ""


class ExpectLogicalPartition(Expectation, frozen=True, kw_only=True, tag="logical-partition"):
    """REST says this status of a logical partition."""

    name: str
    status: str


class ExpectDomain(Expectation, frozen=True, kw_only=True, tag="domain"):
    """REST names, for every GPU of a group, the uuid that its controller says; `changed`: a new one.

    New is what the last such step of the group did not see.
    """

    group: str
    changed: bool = False


class ExpectReadAgain(Expectation, frozen=True, kw_only=True, tag="read-again"):
    """The service has read the controller of a rack anew since this step began."""

    rack: int = 1


class ExpectTogether(Expectation, frozen=True, kw_only=True, tag="together"):
    """On the true fabric, the GPUs of these groups are one partition, and nobody else is in it."""

    groups: tuple[str, ...]


class ExpectAlone(Expectation, frozen=True, kw_only=True, tag="alone"):
    """On the true fabric, no GPU of a group shares a partition with a GPU of anybody else."""

    group: str


class ExpectPartitions(Expectation, frozen=True, kw_only=True, tag="partitions"):
    """So many partitions of a true fabric hold GPUs."""

    count: int
    rack: int = 1


class ExpectUntouched(Expectation, frozen=True, kw_only=True, tag="untouched"):
    """A partition that somebody made by hand is as they made it."""

    name: str


class ExpectInvariants(Expectation, frozen=True, kw_only=True, tag="invariants"):
    """S1, S2 and S4 held at every change of a fabric so far; what was acknowledged is there (S10)."""


class ExpectFinding(Expectation, frozen=True, kw_only=True, tag="finding"):
    """The doctor finds it by this check, and names an instance's machine, a tray, or (without one) a rack."""

    check: str
    subject: str = ""
    instance: str = ""
    tray: int | None = None
    rack: int | None = None
    layer: ClassVar[Layer] = "doctor"


class ExpectNoFinding(Expectation, frozen=True, kw_only=True, tag="no-finding"):
    """The doctor finds nothing; or nothing of one check."""

    check: str = ""
    layer: ClassVar[Layer] = "doctor"


# The probes. A look changes nothing.


FINDINGS_SHOWN = 3
"""Findings that a transcript tells in full."""


class SiteProbes:
    """Eyes on a site. Each returns what was seen, and raises NotSeen with what was seen instead."""

    def __init__(self, site: SiteControl, ground: FabricTruth, tenants: ScenarioTenants) -> None:
        self._site = site
        self._ground = ground
        self._tenants = tenants
        self._read_at: dict[int, str | None] = {}
        self._domains: dict[str, frozenset[str]] = {}
        """By group, the uuids that a `domain` step saw last."""
        self._domains_before: dict[int, frozenset[str]] = {}
        """By step, those of the one before it."""

    async def instances(self, step: ExpectInstances) -> str:
        """REST's status of each."""
        members = self._tenants.groups[step.group]
        for number, member in enumerate(members, 1):
            shown = await self._tenants.shown(member)
            status, why = _status_and_reason(shown)
            if status != step.status or step.because not in why:
                raise NotObserved(f"{step.group}/{number} is {status}: {why}")
        return f"{len(members)} of {len(members)} {step.status}: {why}"

    async def released(self, step: ExpectReleased) -> str:
        """REST knows none of them."""
        members = self._tenants.groups[step.group]
        left = [member for member in members if await self._tenants.shown(member) is not None]
        _require(not left, f"{len(left)} of {len(members)} are still there")
        return f"{len(members)} instances are gone"

    async def interface(self, step: ExpectInterface) -> str:
        """REST's status of one GPU."""
        shown = await self._tenants.shown(self._tenants.instance(step.instance))
        listed = shown["nvLinkInterfaces"] if shown else ()
        one = next((one for one in listed if one["deviceInstance"] == step.gpu - 1), None)
        status, why = _status_and_reason(one)
        told = f"GPU {step.gpu} of {step.instance} is {status}: {why}"
        _require(status == step.status and step.because in why, told)
        return told

    async def partition(self, step: ExpectLogicalPartition) -> str:
        """REST's status of a logical partition."""
        status, why = _status_and_reason(await self._tenants.shown_partition(step.name))
        _require(status == step.status, f"{step.name} is {status}: {why}")
        return f"{step.name} is {status}"

    async def domain(self, step: ExpectDomain) -> str:
        """REST's domain uuid of each GPU, against the controller's."""
        trues = set()
        for group in self._tenants.groups[step.group]:
            true = self._ground.seat(group.machine)[0].fabric.domain
            trues.add(true)
            shown = await self._tenants.shown(group)
            told = {gpu["nvLinkDomainId"] for gpu in shown["nvLinkInterfaces"]} if shown else set()
            _require(told == {true}, f"{group.machine} is in {true}, REST says {told}")
        before = self._domains_before.setdefault(id(step), self._domains.get(step.group, frozenset(trues)))
        seen = f"every GPU of {step.group} is in domain {', '.join(sorted(trues))}"
        _require(not step.changed or not trues & before, f"{seen}, as before")
        self._domains[step.group] = frozenset(trues)
        return seen

    async def read_again(self, step: ExpectReadAgain) -> str:
        """A reading that is not the one of the first look."""
        serials = {gpu.chassis_serial for gpu in self._ground.rack(step.rack).fabric.gpus.values()}
        answer = await self._site.operate("GET", "nvlink-nmxc-endpoint")
        if answer is None or answer.status >= 300:
            raise NotObserved("the service does not tell when it read its controllers")
        at = next(one["observedAt"] for one in answer.body if one["chassisSerial"] in serials)
        first = self._read_at.setdefault(id(step), at)
        _require(at != first, f"the newest reading is that of {first}")
        return f"the controller of rack {step.rack} was read at {at}"

    async def together(self, step: ExpectTogether) -> str:
        """One true partition, and nobody else in it."""
        wanted = self._guids(step.groups)
        for switch in self._ground.switches:
            for partition in switch.fabric.partitions.values():
                if wanted & set(partition.guids):
                    present = set(partition.guids) & switch.fabric.gpus.keys()
                    _require(
                        present == wanted, f"{partition.name!r} holds {len(present)} GPUs, not {len(wanted)}"
                    )
                    return f"partition {partition.id} {partition.name!r} holds these {len(wanted)} GPUs and no other"
        raise NotObserved(f"no partition holds any of the {len(wanted)} GPUs")

    async def alone(self, step: ExpectAlone) -> str:
        """No partition holds GPUs of the group beside others."""
        wanted = self._guids([step.group])
        for fabric in self._fabrics():
            for partition in fabric.partitions.values():
                others = set(partition.guids) & fabric.gpus.keys() - wanted
                if others and wanted & set(partition.guids):
                    raise NotObserved(f"{partition.name!r} also holds {len(others)} GPUs of others")
        return f"{len(wanted)} GPUs share no partition with others"

    async def partitions(self, step: ExpectPartitions) -> str:
        """How many partitions of a true fabric hold GPUs."""
        fabric = self._ground.rack(step.rack).fabric
        held = [
            partition for partition in fabric.partitions.values() if set(partition.guids) & fabric.gpus.keys()
        ]
        told = ", ".join(f"{one.name!r} of {len(one.guids)}" for one in held) or "none"
        _require(len(held) == step.count, f"rack {step.rack} holds {told}")
        return f"rack {step.rack} holds {told}"

    async def untouched(self, step: ExpectUntouched) -> str:
        """What somebody made is as they made it."""
        fabric, made = self._ground.by_hand[step.name]
        now = fabric.partitions.get(made.id)
        _require(now == made, f"it is {'gone' if now is None else f'{len(now.guids)} GPUs, {now.name!r}'}")
        return f"partition {made.id} {made.name!r} still holds its {len(made.guids)} GPUs"

    async def invariants(self, _: ExpectInvariants) -> str:
        """No promise was broken since the start."""
        broken = [*self._ground.broken, *await self._lost()]
        _require(not broken, "; ".join(broken))
        kept = len(list(self._tenants.kept()))
        return f"S1, S2, S4 at {self._ground.judged} changes of fabrics; S10 of {kept} instances"

    async def finding(self, step: ExpectFinding) -> str:
        """The doctor finds it."""
        findings = [one for one in await self._site.findings() if one.state is not CheckState.HOLDS]
        object_ = self._object(step)
        for one in findings:
            if one.check == step.check and step.subject in one.subject and _names_object(one, object_):
                return f"{one.check} of {one.subject}: {one.message}"
        of = f", and nothing of {step.check} that names {object_}" if object_ else ""
        raise NotObserved(f"the doctor finds {_findings_text(findings)}{of}")

    def _object(self, step: ExpectFinding) -> str:
        """The machine or domain that a finding has to name; empty: any."""
        if step.instance:
            return self._tenants.instance(step.instance).machine
        if step.tray is not None:
            return self._ground.machine(step.rack or 1, step.tray)
        return "" if step.rack is None else self._ground.rack(step.rack).fabric.domain

    async def no_finding(self, step: ExpectNoFinding) -> str:
        """The doctor finds nothing (of that kind)."""
        found = [finding for finding in await self._site.findings() if finding.state is not CheckState.HOLDS]
        found = [one for one in found if not step.check or _reports_check(step.check, one)]
        _require(not found, f"the doctor finds {_findings_text(found)}")
        return f"the doctor finds nothing{f' of {step.check}' if step.check else ''}"

    async def _lost(self) -> list[str]:
        """S10: what was acknowledged is there, on the machine that was told."""
        lost = []
        for one in self._tenants.kept():
            shown = await self._tenants.shown(one)
            if shown is None:
                lost.append(f"S10: instance {one.id} was acknowledged, and is gone")
            elif shown["machineId"] != one.machine:
                lost.append(f"S10: instance {one.id} moved from {one.machine} to {shown['machineId']}")
        return lost

    def _guids(self, groups: Iterable[str]) -> set[int]:
        members: list[MadeInstance] = [one for group in groups for one in self._tenants.groups[group]]
        seats = [self._ground.seat(member.machine) for member in members]
        return {gpu.guid for _, gpus in seats for gpu in gpus}

    def _fabrics(self) -> list[SimulatedFabric]:
        return [switch.fabric for switch in self._ground.switches]


def _status_and_reason(shown: Json | None) -> tuple[str, str]:
    if shown is None:
        return "gone", "REST answers 404"
    history = shown.get("statusHistory") or [{"message": ""}]
    return shown["status"], history[0]["message"]


def _reports_check(check: str, finding: Finding) -> bool:
    """Whether the check fails, by itself or as what follows from another."""
    return check == finding.check or any(told.startswith(f"{check}: ") for told in finding.consequences)


def _names_object(finding: Finding, object_: str) -> bool:
    """Whether a finding is about a machine or domain, or says that it concerns it."""
    return object_ in finding.subject or any(place.endswith(f" {object_}") for place in finding.where)


def _findings_text(findings: Sequence[Finding]) -> str:
    told = [
        f"{finding.check} of {finding.subject}: {finding.message}" for finding in findings[:FINDINGS_SHOWN]
    ]
    more = [f"{len(findings) - FINDINGS_SHOWN} more"] if len(findings) > FINDINGS_SHOWN else []
    return "; ".join([*told, *more]) or "nothing"


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise NotObserved(otherwise)
