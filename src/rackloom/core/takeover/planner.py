"""The plan of a takeover: which records of NICo are created here, and which partitions are adopted.

`plan_takeover` is a pure function of two readings. It decides in this order, so that each step finds the
records that it refers to: pauses of domains, tenants, instance types, allocations, logical partitions,
VPCs, types of machines, cordons, instances, adoptions, ends of the pauses. Every record keeps its id. A
record that is here already under its id is not created again, so a second plan is empty.

A machine of NICo is found here by its place, by its id, or by the GUIDs of its GPUs, and all evidence must
agree. An instance is imported if NICo does not call it terminating, its machine is known and free, and our
controller lists the GUIDs that NICo knows. The machine of an instance that is not imported
is cordoned, because NICo still uses it. Placement itself uses no machine with GPUs in a foreign partition.

NICo names a partition with the id of its logical partition and then the GUIDs of its first members. The
name only determines the logical partition to compare: a partition is adopted if its GPUs are exactly those
that the imported instances want in this domain, and NICo's own records, if they were read, do not
contradict. Everything else on the fabric is left as it is, with the reason.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from rackloom.core.takeover.machines import MachineFinder
from rackloom.core.takeover.records import (
    PLAN_VERSION,
    AdoptPartition,
    AssignMachineType,
    CordonMachine,
    CreateAllocation,
    CreateInstance,
    CreateInstanceType,
    CreateLogicalPartition,
    CreateTenant,
    CreateVpc,
    LeftAlone,
    NicoInstance,
    NicoInterface,
    NicoReading,
    NicoSite,
    OwnedRecord,
    PauseDomain,
    PlannedInterface,
    RecordedStep,
    SettleDomain,
    ShownPartition,
    SiteMachine,
    SiteReading,
    Step,
    TakeoverPlan,
    digest_of_readings,
    kind_of_step,
    seal_plan,
    subject_of_step,
)
from rackloom.topology.part_names import PartName

T = TypeVar("T", bound=msgspec.Struct)
FOREIGN = "foreign"
READY = "Ready"
DELETING = "Deleting"
_NICO_NAME = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_NICO_TRAY = "tray_partition_"
_SHOWN_GPUS = 4


def plan_takeover(nico: NicoReading, site: SiteReading) -> TakeoverPlan:
    """The plan that brings the records of NICo into our site without touching the fabric."""
    planner = _Planner(nico, site)
    planner.plan()
    return seal_plan(
        TakeoverPlan(
            version=PLAN_VERSION,
            nico_site=nico.site,
            site=NicoSite(id=site.id, name=site.name),
            orgs=tuple(tenant.org for tenant in nico.tenants),
            made_from=digest_of_readings(nico, site),
            steps=_with_pauses(planner.steps, {machine.id: machine for machine in site.machines}),
            present=tuple(planner.present),
            left_alone=tuple(planner.left_alone),
            notes=tuple(planner.notes),
        )
    )


def logical_partition_in_name(name: str) -> str | None:
    """The id of the logical partition for which NICo made the partition `name`, or None for other names."""
    found = _NICO_NAME.match(name)
    return None if found is None else found[0]


def _with_pauses(steps: Sequence[RecordedStep], machines: dict[str, SiteMachine]) -> tuple[Step, ...]:
    """The steps, with a pause first for every domain in which they involve GPUs."""
    domains = {step.domain for step in steps if isinstance(step, AdoptPartition)}
    domains |= {
        domain
        for step in steps
        if isinstance(step, CreateInstance) and (domain := machines[step.machine].domain) is not None
    }
    return (
        *(PauseDomain(domain=domain) for domain in sorted(domains)),
        *steps,
        *(SettleDomain(domain=domain) for domain in sorted(domains)),
    )


class _Planner:
    """Collects the steps. The methods run in the order of the steps."""

    def __init__(self, nico: NicoReading, site: SiteReading) -> None:
        self._nico = nico
        self._site = site
        self.steps: list[RecordedStep] = []
        self.present: list[str] = []
        self.left_alone: list[LeftAlone] = []
        self.notes: list[str] = []
        self._orgs: set[str] = set()
        """Organisations that are, or will be, tenants here."""
        self._with_access = {allocation.org for allocation in site.allocations}
        self._types = set(site.types)
        self._logical_partitions: set[tuple[str, str]] = set()
        """(organisation, id) of each logical partition of NICo that is here or will be."""
        self._vpcs: set[tuple[str, str]] = set()
        self._machines = MachineFinder(nico, site)
        self._busy = {machine.id for machine in site.machines if machine.instance is not None}
        self._wanted: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        """(logical partition, domain) -> GUIDs that instances here want, including those of the plan."""

    def plan(self) -> None:
        """Collect everything."""
        if self._nico.site.id != self._site.id:
            self.notes.append(
                f"site {self._nico.site.name!r} of NICo has id {self._nico.site.id}; here it is"
                f" {self._site.id} ({self._site.name!r})"
            )
        self._plan_tenants()
        self._plan_types()
        self._plan_allocations()
        # The name of a logical partition is unique for its tenant, here as in NICo.
        for partition in self._nico.logical_partitions:
            creation = _step_of(CreateLogicalPartition, partition)
            refusal = self._why_not_ready(partition.status) or self._why_no_access(partition.org)
            if self._add_record(creation, self._site.logical_partitions, refusal):
                self._logical_partitions.add((partition.org, partition.id))
        for vpc in self._nico.vpcs:
            step = _step_of(CreateVpc, vpc)
            refusal = self._why_not_ready(vpc.status) or self._why_no_access(vpc.org)
            default = vpc.logical_partition
            if default is not None and (vpc.org, default) not in self._logical_partitions:
                refusal = refusal or f"its default logical partition {default} is not imported"
            if self._add_record(step, self._site.vpcs, refusal):
                self._vpcs.add((vpc.org, vpc.id))
        instances = self._instances()
        adoptions = self._adoptions()
        self._plan_machine_types(instances)
        self._plan_cordons(instances)
        self.steps += [*instances, *adoptions]

    # Records.

    def _plan_tenants(self) -> None:
        owners = {tenant_id: org for org, tenant_id in self._site.tenants.items()}
        for tenant in self._nico.tenants:
            here = self._site.tenants.get(tenant.org)
            if here is None and tenant.id in owners:
                self._leave("tenant", tenant.id, tenant.org, f"its id is that of {owners[tenant.id]} here")
                continue
            self._orgs.add(tenant.org)
            step = _step_of(CreateTenant, tenant)
            if here is None:
                self.steps.append(step)
            elif here == tenant.id:
                self.present.append(subject_of_step(step))
            else:
                self.notes.append(f"organisation {tenant.org} has tenant id {tenant.id} in NICo, {here} here")

    def _plan_types(self) -> None:
        names = {name: type_id for type_id, name in self._site.types.items()}
        for kind in self._nico.types:
            step = _step_of(CreateInstanceType, kind)
            if kind.id in self._site.types:
                self.present.append(subject_of_step(step))
            elif kind.name in names:
                reason = f"instance type {names[kind.name]} has this name here"
                self._leave("instance-type", kind.id, kind.name, reason, "rename that instance type")
            else:
                self._types.add(kind.id)
                self.steps.append(step)

    def _plan_allocations(self) -> None:
        for allocation in self._nico.allocations:
            missing = sorted({quota.type_id for quota in allocation.quotas} - self._types)
            refusal = f"instance type {missing[0]} is not here" if missing else None
            step = _step_of(CreateAllocation, allocation)
            if self._add_record(step, self._site.allocations, refusal):
                self._with_access.add(allocation.org)

    def _add_record(
        self,
        step: CreateAllocation | CreateLogicalPartition | CreateVpc,
        here: Iterable[OwnedRecord],
        refusal: str | None,
    ) -> bool:
        """Plan to create a tenant's record. Returns False if it is left alone."""
        subject = subject_of_step(step)
        same_id = next((record for record in here if record.id == step.id), None)
        if same_id is not None and same_id.org == step.org:
            self.present.append(subject)
            return True
        refusal = self._why_no_owner(step.org) or refusal
        if same_id is not None:
            refusal = f"{same_id.org} has a record with this id here"
        elif any((record.org, record.name) == (step.org, step.name) for record in here):
            refusal = refusal or "another record of the organisation has this name here"
        if refusal is not None:
            self._leave(kind_of_step(step), step.id, step.name, refusal)
            return False
        self.steps.append(step)
        return True

    def _why_no_owner(self, org: str) -> str | None:
        return None if org in self._orgs else f"organisation {org} is not imported"

    def _why_no_access(self, org: str) -> str | None:
        return None if org in self._with_access else f"organisation {org} has no allocation at the site"

    def _why_not_ready(self, status: str) -> str | None:
        return None if status == READY else f"it is {status} in NICo"

    # Machines and instances.

    def _plan_machine_types(self, instances: Sequence[CreateInstance]) -> None:
        machines = {machine.id: machine for machine in self._site.machines}
        wanted = {step.machine: step.type_id for step in instances if step.type_id is not None}
        for known in self._nico.machines:
            here = self._machines.candidates(known.id)
            if len(here) == 1 and known.type_id is not None:
                wanted.setdefault(here[0].id, known.type_id)
        for machine_id, type_id in sorted(wanted.items()):
            recorded = machines[machine_id].type_id
            step = AssignMachineType(machine=machine_id, type_id=type_id)
            if recorded == type_id:
                self.present.append(subject_of_step(step))
            elif recorded is None and type_id in self._types:
                self.steps.append(step)
            elif recorded is not None:
                self.notes.append(
                    f"machine {machine_id} keeps instance type {recorded}; in NICo it has {type_id}"
                )

    def _instances(self) -> list[CreateInstance]:
        here = {instance.id: instance for instance in self._site.instances}
        machines = {machine.id: machine for machine in self._site.machines}
        for instance in here.values():
            carrier = machines[instance.machine]
            for device, partition in instance.interfaces.items():
                guid = carrier.gpus.get(device + 1)
                if carrier.domain is not None and guid is not None:
                    self._wanted[partition, carrier.domain].add(guid)
        planned = []
        for known in self._nico.instances:
            if known.id in here:
                self.present.append(f"instance/{known.id}")
                self._note_differences(known)
                continue
            machine, refusal = self._machines.find_of_instance(known)
            step = None if machine is None else _instance_step(known, machine)
            refusal = refusal or self._why_instance_stays(known, machine)
            if refusal is None and step is not None and machine is not None:
                planned.append(step)
                self._busy.add(step.machine)
                for interface in step.interfaces:
                    self._wanted[interface.logical_partition, str(machine.domain)].add(interface.guid)
            else:
                self._leave("instance", known.id, known.name, str(refusal))
        return planned

    def _note_differences(self, known: NicoInstance) -> None:
        here = next(instance for instance in self._site.instances if instance.id == known.id)
        in_nico = {entry.device: entry.logical_partition for entry in _kept_interfaces(known)}
        if here.interfaces != in_nico:
            self.notes.append(f"instance {known.name} is here with other interfaces than in NICo")

    def _why_instance_stays(self, known: NicoInstance, machine: SiteMachine | None) -> str | None:
        """Why an instance is not imported, with its machine found here."""
        if (refusal := self._why_no_owner(known.org)) or machine is None:
            return refusal
        if (known.org, known.vpc) not in self._vpcs:
            return f"its VPC {known.vpc} is not imported"
        if known.type_id is not None and known.type_id not in self._types:
            return f"its instance type {known.type_id} is not here"
        if machine.id in self._busy:
            return f"machine {machine.id} has an instance here already"
        if any((other.org, other.name) == (known.org, known.name) for other in self._site.instances):
            return "another instance of the organisation has this name here"
        return self._why_interfaces_stay(known, machine)

    def _why_interfaces_stay(self, known: NicoInstance, machine: SiteMachine) -> str | None:
        interfaces = _kept_interfaces(known)
        repeated = [
            device for device, count in Counter(entry.device for entry in interfaces).items() if count > 1
        ]
        if repeated:
            return f"NICo has several interfaces of its gpu-{repeated[0]}"
        for entry in interfaces:
            guid = machine.gpus.get(entry.device + 1)
            if (known.org, entry.logical_partition) not in self._logical_partitions:
                return f"logical partition {entry.logical_partition} is not imported"
            if machine.domain is None or guid is None:
                return f"no controller here lists {PartName(machine.id, gpu=entry.device)}"
            if entry.guid not in (None, guid):
                return (
                    f"{PartName(machine.id, gpu=entry.device)} is {_hex(str(entry.guid))} in NICo,"
                    f" and {_hex(guid)} here"
                )
        return None

    def _plan_cordons(self, instances: Sequence[CreateInstance]) -> None:
        """Keep new instances off machines that NICo uses for instances that are not imported."""
        used = {step.machine for step in instances}
        reasons = self._machines_used_by_nico()
        free = {
            machine.id: machine
            for machine in self._site.machines
            if machine.instance is None and machine.id not in used
        }
        for machine_id in sorted(reasons.keys() & free.keys()):
            step = CordonMachine(machine=machine_id, why=reasons[machine_id])
            if free[machine_id].is_cordoned:
                self.present.append(subject_of_step(step))
            else:
                self.steps.append(step)

    def _machines_used_by_nico(self) -> dict[str, str]:
        """Machine id -> the reason why it is not free, as far as NICo shows."""
        reasons: dict[str, str] = {}
        for known in self._nico.instances:
            for machine in self._machines.candidates_of_instance(known):
                reasons.setdefault(machine.id, f"instance {known.name} of {known.org} is in NICo only")
        for known_machine in self._nico.machines:
            if known_machine.is_used:
                for machine in self._machines.candidates(known_machine.id):
                    reasons.setdefault(machine.id, "an instance that was not read is in NICo only")
        return reasons

    # Adoption.

    def _adoptions(self) -> list[AdoptPartition]:
        adoptions = []
        for domain in self._site.unreadable:
            unread = "no controller of it can be read, so nothing in it can be compared"
            fix = "make its switch controller reachable, then plan again"
            self._leave("domain", domain, domain, unread, fix)
        for partition in self._site.partitions:
            if partition.owner == FOREIGN:
                reason = self._why_not_adopted(partition)
                if reason is None:
                    adoptions.append(
                        AdoptPartition(
                            domain=partition.domain,
                            name=partition.name,
                            logical_partition=str(logical_partition_in_name(partition.name)),
                            guids=partition.guids,
                        )
                    )
                else:
                    self._leave("partition", f"{partition.domain}/{partition.number}", partition.name, reason)

        return adoptions

    def _why_not_adopted(self, partition: ShownPartition) -> str | None:
        named = logical_partition_in_name(partition.name)
        if partition.name.startswith(_NICO_TRAY):
            return "NICo made it for the free GPUs of a tray, which no logical partition wants"
        if named is None:
            return "NICo did not name it: it was made by hand or by another program"
        if all(named != partition_id for _, partition_id in self._logical_partitions):
            return f"logical partition {named} in its name is not imported"
        if not partition.is_guid_based:
            return "it is location-based, and the site only works on GUID-based partitions"
        if any(
            (other.domain, other.logical_partition) == (partition.domain, named)
            for other in self._site.partitions
        ):
            return "its logical partition has a partition in this domain already"
        return self._why_unequal(partition, named) or self._why_contradicted(partition, named)

    def _why_unequal(self, partition: ShownPartition, named: str) -> str | None:
        wanted, held = self._wanted[named, partition.domain], set(partition.guids)
        if not held:
            return "it holds no GPU"
        parts = []
        if surplus := held - wanted:
            parts.append(f"{_gpu_list(surplus)} in it that no imported instance wants there")
        if missing := wanted - held:
            parts.append(f"{_gpu_list(missing)} missing in it that imported instances want there")
        return "; ".join(parts) or None

    def _why_contradicted(self, partition: ShownPartition, named: str) -> str | None:
        if self._nico.fabric is None:
            return None
        recorded = [
            entry.logical_partition
            for entry in self._nico.fabric
            if (entry.domain, entry.number) == (partition.domain, str(partition.number))
        ]
        return None if recorded == [named] else "NICo's own records do not have it for this logical partition"

    def _leave(self, kind: str, id_: str, name: str, reason: str, fix: str | None = None) -> None:
        self.left_alone.append(LeftAlone(kind=kind, id=id_, name=name, reason=reason, fix=fix))


def _kept_interfaces(known: NicoInstance) -> list[NicoInterface]:
    return [entry for entry in known.interfaces if entry.status != DELETING]


def _instance_step(known: NicoInstance, machine: SiteMachine) -> CreateInstance:
    interfaces = tuple(
        PlannedInterface(
            id=entry.id,
            device=entry.device,
            logical_partition=entry.logical_partition,
            guid=machine.gpus.get(entry.device + 1) or "",
        )
        for entry in _kept_interfaces(known)
    )
    return _step_of(CreateInstance, known, machine=machine.id, interfaces=interfaces)


def _step_of(kind: type[T], record: msgspec.Struct, **others: object) -> T:
    """The step that creates a record of NICo, from the fields that both have."""
    fields = msgspec.structs.asdict(record) | others
    return kind(**{name: fields[name] for name in kind.__struct_fields__})


def _gpu_list(guids: Iterable[str]) -> str:
    shown = sorted(map(int, guids))
    more = len(shown) - _SHOWN_GPUS
    names = ", ".join(f"{guid:#x}" for guid in shown[:_SHOWN_GPUS])
    return f"{len(shown)} GPUs ({names}{f' and {more} more' if more > 0 else ''})"


def _hex(guid: str) -> str:
    return f"{int(guid):#x}"
