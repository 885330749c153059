"""Values of a takeover: a reading of NICo, a reading of our site, and the steps of a plan.

All values are plain, so that a plan can be written to a file and read by people. Fabric GUIDs are decimal
text in files, because most JSON readers lose the low bits of 64-bit numbers. No value holds a credential.

Each step is one transaction of the site. `subject_of_step` is the name under which the journal records that a
step was done or undone. The import did a step only if the journal records it, so a rollback removes nothing
that another writer created.
"""

import hashlib
from enum import StrEnum
from typing import Any, TypeAlias

import msgspec


class OwnedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A record of a tenant: a logical partition, a VPC, an allocation or an instance."""

    id: str
    org: str
    name: str


class DescribedRecord(OwnedRecord, frozen=True, kw_only=True):
    """A record of a tenant with its description."""

    description: str | None


# A reading of NICo.


class NicoSite(msgspec.Struct, frozen=True, kw_only=True):
    """The NICo site that is taken over."""

    id: str
    name: str


class NicoTenant(msgspec.Struct, frozen=True, kw_only=True):
    """An organisation as tenant."""

    id: str
    org: str


class NicoInstanceType(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of machine."""

    id: str
    name: str
    description: str | None
    labels: dict[str, str]
    capabilities: list[dict[str, Any]]


class NicoQuota(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint of an allocation: a number of machines of one type."""

    id: str
    type_id: str
    machines: int


class NicoAllocation(DescribedRecord, frozen=True, kw_only=True):
    """The resources that an organisation may use."""

    quotas: tuple[NicoQuota, ...]


class NicoLogicalPartition(DescribedRecord, frozen=True, kw_only=True):
    """A logical partition of an organisation."""

    status: str


class NicoVpc(DescribedRecord, frozen=True, kw_only=True):
    """A VPC of an organisation. `extra` has the fields that the site stores and does not act on."""

    status: str
    logical_partition: str | None
    extra: dict[str, Any]


class NicoInterface(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of an instance (0-based), the logical partition that it joins, and the GUID if NICo has it."""

    id: str
    device: int
    logical_partition: str
    status: str
    guid: str | None


class NicoInstance(DescribedRecord, frozen=True, kw_only=True):
    """An instance of an organisation. `extra` has the same meaning as for a VPC."""

    status: str
    vpc: str
    type_id: str | None
    machine: str | None
    interfaces: tuple[NicoInterface, ...]
    extra: dict[str, Any]


class NicoMachine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine: its type and user as REST shows them to a provider, its place as the admin gRPC does."""

    id: str
    type_id: str | None = None
    is_used: bool = False
    chassis_serial: str | None = None
    slot: int | None = None


class NicoFabricPartition(msgspec.Struct, frozen=True, kw_only=True):
    """A physical partition in NICo's own records."""

    domain: str
    number: str
    logical_partition: str


class NicoReading(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of NICo. `fabric` is None if its admin gRPC was not read."""

    site: NicoSite
    tenants: tuple[NicoTenant, ...]
    types: tuple[NicoInstanceType, ...]
    allocations: tuple[NicoAllocation, ...]
    logical_partitions: tuple[NicoLogicalPartition, ...]
    vpcs: tuple[NicoVpc, ...]
    instances: tuple[NicoInstance, ...]
    machines: tuple[NicoMachine, ...] = ()
    fabric: tuple[NicoFabricPartition, ...] | None = None


# A reading of our site.


class SiteInstance(OwnedRecord, frozen=True, kw_only=True):
    """An instance at our site. `interfaces` maps a GPU (0-based) to its logical partition."""

    vpc: str
    machine: str
    interfaces: dict[int, str]


class SiteMachine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine at our site. `gpus` maps module ids to the GUIDs that its controller listed."""

    id: str
    domain: str | None
    chassis_serial: str
    slot: int
    type_id: str | None
    instance: str | None
    is_cordoned: bool
    gpus: dict[int, str | None]


class ShownPartition(msgspec.Struct, frozen=True, kw_only=True):
    """A partition in the newest observation of its domain. `owner` is one of `Owner` in carve."""

    domain: str
    name: str
    number: int
    owner: str
    logical_partition: str | None
    is_guid_based: bool
    guids: tuple[str, ...]


class SiteReading(msgspec.Struct, frozen=True, kw_only=True):
    """The state of our site: its records, its machines, and the partitions that its controllers show."""

    id: str
    name: str
    tenants: dict[str, str]
    """Organisation to tenant id."""
    types: dict[str, str]
    """Instance type id to its name."""
    allocations: tuple[OwnedRecord, ...]
    logical_partitions: tuple[OwnedRecord, ...]
    vpcs: tuple[OwnedRecord, ...]
    instances: tuple[SiteInstance, ...]
    machines: tuple[SiteMachine, ...]
    partitions: tuple[ShownPartition, ...]
    unreadable: tuple[str, ...]
    """Domains of unknown state, because their newest observation does not count."""
    imported: frozenset[str]
    """Subjects of the steps that an import has done and that were not undone."""


# Steps of a plan, in the order of their kinds.


class PauseDomain(msgspec.Struct, frozen=True, kw_only=True, tag="pause-domain"):
    """Begin no operation in a domain until the end of the import."""

    domain: str


class CreateTenant(NicoTenant, frozen=True, kw_only=True, tag="tenant"):
    """Create an organisation as tenant."""


class CreateInstanceType(NicoInstanceType, frozen=True, kw_only=True, tag="instance-type"):
    """Create a kind of machine."""


class CreateAllocation(NicoAllocation, frozen=True, kw_only=True, tag="allocation"):
    """Let an organisation use machines."""


class CreateLogicalPartition(DescribedRecord, frozen=True, kw_only=True, tag="logical-partition"):
    """Create the record of a logical partition."""


class CreateVpc(DescribedRecord, frozen=True, kw_only=True, tag="vpc"):
    """Create a VPC."""

    logical_partition: str | None
    extra: dict[str, Any]


class AssignMachineType(msgspec.Struct, frozen=True, kw_only=True, tag="machine-type"):
    """Assign a machine without a type to one."""

    machine: str
    type_id: str


class CordonMachine(msgspec.Struct, frozen=True, kw_only=True, tag="cordon"):
    """Place nothing on a machine that NICo uses for an instance that is not imported."""

    machine: str
    why: str


class PlannedInterface(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of an imported instance, its logical partition, and the GUID that our controller lists there."""

    id: str
    device: int
    logical_partition: str
    guid: str


class CreateInstance(DescribedRecord, frozen=True, kw_only=True, tag="instance"):
    """Create the record of an instance on its machine."""

    vpc: str
    type_id: str | None
    machine: str
    interfaces: tuple[PlannedInterface, ...]
    extra: dict[str, Any]


class AdoptPartition(msgspec.Struct, frozen=True, kw_only=True, tag="adopt"):
    """Own a partition that holds exactly the GPUs of its logical partition in the domain."""

    domain: str
    name: str
    logical_partition: str
    guids: tuple[str, ...]


class SettleDomain(msgspec.Struct, frozen=True, kw_only=True, tag="settle-domain"):
    """End the pause of the import, if the site would do nothing to the domain then."""

    domain: str


RecordedStep: TypeAlias = (
    CreateTenant
    | CreateInstanceType
    | CreateAllocation
    | CreateLogicalPartition
    | CreateVpc
    | AssignMachineType
    | CordonMachine
    | CreateInstance
    | AdoptPartition
)
"""A step that leaves something behind, which the journal records and a rollback removes."""
Step: TypeAlias = PauseDomain | RecordedStep | SettleDomain


def kind_of_step(step: Step) -> str:
    """The name of a kind of steps, in plan files and for people."""
    return str(step.__struct_config__.tag)


def subject_of_step(step: RecordedStep) -> str:
    """The journal's name for the object that a step creates."""
    match step:
        case AssignMachineType():
            return f"machine-type/{step.machine}"
        case CordonMachine():
            return f"cordon/{step.machine}"
        case AdoptPartition():
            return f"adopt/{step.domain}/{step.name}"
        case _:
            return f"{kind_of_step(step)}/{step.id}"


class StepState(StrEnum):
    """The outcome of a step."""

    DONE = "done"
    ALREADY = "already done"
    KEPT = "left as it is"
    """The message gives the reason and an operator's remedy."""


# The plan.


class LeftAlone(msgspec.Struct, frozen=True, kw_only=True):
    """Something of NICo or on the fabric that the plan does not touch, with the reason and a remedy."""

    kind: str
    id: str
    name: str
    reason: str
    fix: str | None = None


class TakeoverPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of an import, in their order, and everything that it leaves as it is."""

    version: int
    nico_site: NicoSite
    site: NicoSite
    orgs: tuple[str, ...]
    made_from: str
    """SHA-256 of both readings."""
    steps: tuple[Step, ...]
    present: tuple[str, ...]
    """Subjects that the site has already under the same id."""
    left_alone: tuple[LeftAlone, ...]
    notes: tuple[str, ...]
    digest: str = ""
    """SHA-256 of all other fields. `apply` refuses a plan that was edited."""


PLAN_VERSION = 1
_encoder = msgspec.json.Encoder(order="deterministic")


def seal_plan(plan: TakeoverPlan) -> TakeoverPlan:
    """The plan with its digest."""
    return msgspec.structs.replace(plan, digest=_plan_digest(plan))


def is_sealed(plan: TakeoverPlan) -> bool:
    """Whether the plan is as it was sealed."""
    return plan.digest == _plan_digest(plan)


def digest_of_readings(nico: NicoReading, site: SiteReading) -> str:
    """SHA-256 of the readings that a plan is made from."""
    return _digest([nico, site])


def _plan_digest(plan: TakeoverPlan) -> str:
    return _digest(msgspec.structs.replace(plan, digest=""))


def _digest(value: object) -> str:
    plain = msgspec.to_builtins(value, str_keys=True)
    return hashlib.sha256(_encoder.encode(plain)).hexdigest()
