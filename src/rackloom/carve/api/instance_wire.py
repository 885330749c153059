"""Wire format of instances and NVLink interfaces: models, and conversion of rows.

`INSTANCE_LISTING` selects the columns of `InstanceRow`, in order. `instance_shapes` converts rows with
their interfaces and histories in a fixed number of queries. Fields of networks and operating systems
are returned as the request sent them, or with the defaults that clients of the wider API expect.
Network interfaces are only stored, so they are always shown as Pending.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, NamedTuple, Self
from uuid import UUID, uuid5

import sqlalchemy as sa
from pydantic import Field, StrictBool, StrictInt, StringConstraints
from pydantic import model_validator as validator

from rackloom.carve.api import routing, wire
from rackloom.carve.api.routing import Row, Rows
from rackloom.carve.api.wire import Json, shape
from rackloom.carve.observation.latest import LatestObservation
from rackloom.carve.store import journal
from rackloom.carve.store.journal import StatusRecord
from rackloom.carve.store.schema import instance as table
from rackloom.carve.store.schema import site
from rackloom.carve.store.values import InterfaceSpec, Status
from rackloom.carve.tenancy import instances, outdated
from rackloom.carve.tenancy.instance_creation import CreationPlan, InstanceWarning
from rackloom.carve.tenancy.instances import InterfaceRow
from rackloom.carve.tenancy.outdated import OutdatedDomains

# Request models.


class InterfaceBody(wire.Body):
    """One GPU and the logical partition that it shall join."""

    nvlink_logical_partition_id: UUID = Field(alias="nvLinkLogicalPartitionId")
    device_instance: StrictInt


NVLinkInterfaces = Annotated[list[InterfaceBody], Field(max_length=1024)]


# Response models.


class InterfaceSummary(wire.Answer):
    """An NVLink interface in one line."""

    id: UUID
    instance_id: UUID
    nvlink_logical_partition_id: UUID = Field(alias="nvLinkLogicalPartitionId")
    device_instance: int
    status: wire.InterfaceStatus


class NVLinkInterface(InterfaceSummary, wire.Timed):
    """An NVLink interface, with the observation of its GPU."""

    site_id: UUID
    nvlink_domain_id: str | None = Field(alias="nvLinkDomainId")
    gpu_guid: Annotated[str, Field(pattern=r"^\d+$")] | None
    status_message: str | None
    site: wire.SiteSummary | None = None
    instance: wire.Summary | None = None
    nvlink_logical_partition: wire.Summary | None = Field(None, alias="nvLinkLogicalPartition")


def interface_summary(row: Row | InterfaceRow) -> Json:
    """An NVLink interface in one line."""
    return shape(InterfaceSummary, row, nvlink_logical_partition_id=row.logical_partition_id)


def interface_shape(row: InterfaceRow) -> Json:
    """An interface, with the observation of its GPU. `statusMessage` is the reason if it is not Ready."""
    return shape(
        NVLinkInterface,
        row,
        nvlink_logical_partition_id=row.logical_partition_id,
        nvlink_domain_id=row.domain,
        gpu_guid=row.guid,
        status_message=row.reason,
    )


def interface_specs(bodies: Sequence[InterfaceBody] | None) -> tuple[InterfaceSpec, ...] | None:
    """The interfaces that a request names, or None if it has no list of them."""
    if bodies is None:
        return None
    return tuple(
        InterfaceSpec(str(body.nvlink_logical_partition_id), body.device_instance) for body in bodies
    )


class _Labelled(wire.OpenBody):
    """Labels are checked, and stored with the fields that have no meaning here."""

    labels: wire.Labels | None = None

    @property
    def extra(self) -> dict[str, Any]:
        return super().extra | ({} if self.labels is None else {"labels": self.labels})


class _Networked(_Labelled):
    """Network interfaces are stored. Any index of a virtual function that either contract allows is valid."""

    @validator(mode="after")
    def _virtual_functions_exist(self) -> Self:
        for interface in _network_interfaces(self):
            index = interface.get("virtualFunctionId")
            if index is not None and (type(index) is not int or not 0 <= index <= LAST_VIRTUAL_FUNCTION):
                raise ValueError(f"virtualFunctionId must be an integer from 0 to {LAST_VIRTUAL_FUNCTION}")
        return self


LAST_VIRTUAL_FUNCTION = 16
"""Contract 1.6.0 counts virtual functions from 1 to 16, and 2.0.0 from 0 to 15."""


def _network_interfaces(body: wire.OpenBody) -> list[Json]:
    kept = body.extra.get("interfaces")
    return [entry for entry in kept if isinstance(entry, dict)] if isinstance(kept, list) else []


class _InstanceBase(_Networked):
    vpc_id: UUID
    instance_type_id: UUID | None = None
    description: wire.Description | None = None
    nvlink_interfaces: NVLinkInterfaces | None = Field(None, alias="nvLinkInterfaces")
    allow_unhealthy_machine: StrictBool = False
    require_same_domain: StrictBool = False


class InstanceCreate(_InstanceBase):
    """A new instance, of a type or on a chosen machine."""

    name: wire.Name
    machine_id: Annotated[str, StringConstraints(strict=True, min_length=1)] | None = None

    @validator(mode="after")
    def _one_choice(self) -> Self:
        if (self.instance_type_id is None) == (self.machine_id is None):
            raise ValueError("exactly one of instanceTypeId and machineId must be specified")
        return self


class InstanceBatchCreate(_InstanceBase):
    """Several new instances: all or none."""

    instance_type_id: UUID
    name_prefix: wire.NamePrefix
    count: StrictInt
    topology_optimized: StrictBool = True

    @validator(mode="after")
    def _no_single_address(self) -> Self:
        if any(interface.get("ipAddress") is not None for interface in _network_interfaces(self)):
            raise ValueError("interfaces must name no ipAddress: one address cannot serve several instances")
        return self


class InstanceUpdate(_Networked):
    """Changes of an instance. A list of interfaces replaces the present one."""

    name: wire.Name | None = None
    description: wire.Description | None = None
    nvlink_interfaces: NVLinkInterfaces | None = Field(None, alias="nvLinkInterfaces")


# Query parameters.


InstanceStatus = Literal[
    "Pending", "Provisioning", "Configuring", "Ready", "Updating", "Repairing", "Rebooting",
    "Terminating", "Error",
]  # fmt: skip


class CautionAnswer(wire.Answer):
    """A warning: the request is allowed, but its effect may be unintended."""

    type: Literal["LogicalPartitionSpansDomains", "TraySplit", "ForeignPartition"]
    message: str


class Instance(wire.Timed):
    """An instance."""

    id: UUID
    name: str
    description: str | None
    tenant_id: UUID
    infrastructure_provider_id: UUID
    site_id: UUID
    instance_type_id: UUID | None
    vpc_id: UUID
    machine_id: str
    controller_instance_id: UUID
    nvlink_interfaces: list[NVLinkInterface] = Field(alias="nvLinkInterfaces")
    is_update_pending: bool
    placement_reason: str
    status: InstanceStatus
    unknown_since: datetime | None
    status_history: list[wire.StatusDetail]
    warnings: list[CautionAnswer] = []


class PlannedInterface(wire.Answer):
    """A GPU and the logical partition that it would join."""

    nvlink_logical_partition_id: UUID = Field(alias="nvLinkLogicalPartitionId")
    device_instance: int


class PlannedInstance(wire.Answer):
    """An instance that would be made."""

    name: str
    machine_id: str
    nvlink_domain_id: str | None = Field(alias="nvLinkDomainId")
    nvlink_interfaces: list[PlannedInterface] = Field(alias="nvLinkInterfaces")


class InstancePlan(wire.Answer):
    """The instances that a request would make. Nothing was changed."""

    dry_run: Literal[True]
    plan_id: str
    reason: str
    nvlink_domain_ids: list[str | None] = Field(alias="nvLinkDomainIds")
    instances: list[PlannedInstance]
    warnings: list[CautionAnswer]


class KeptInterface(wire.Timed):
    """A network interface of an instance, as it was requested. Nothing acts on it."""

    id: UUID
    instance_id: UUID
    status: wire.InterfaceStatus


class KeptInterfaceQuery(wire.PageQuery, wire.RelationQuery):
    """Filters on the network interfaces of an instance."""

    status: list[wire.InterfaceStatus] = []


# From rows to responses.


INSTANCE_RELATIONS = (
    "Site", "Tenant", "InfrastructureProvider", "InstanceType", "Vpc", "VPC", "Machine",
    "Allocation", "OperatingSystem", "NetworkSecurityGroup",
)  # fmt: skip

KEPT_DEFAULTS: Json = {
    "operatingSystemId": None,
    "ipxeScript": None,
    "userData": None,
    "phoneHomeEnabled": False,
    "alwaysBootWithCustomIpxe": False,
    "networkSecurityGroupId": None,
    "labels": {},
    "sshKeyGroupIds": [],
    "interfaces": [],
    "infinibandInterfaces": [],
    "serialConsoleUrl": None,
}
"""Defaults of fields that clients of the wider API expect, if the request did not have them."""

SETTLED_STATUSES = (Status.READY, Status.UNKNOWN)


class InstanceRow(NamedTuple):
    """The columns of `INSTANCE_LISTING`, in their order."""

    id: str
    name: str
    description: str | None
    tenant_id: str
    provider_id: str
    site_id: str
    instance_type_id: str | None
    vpc_id: str
    machine_id: str
    placement: str
    status: str
    extra: Json
    created: float
    updated: float


_instance_columns = {column.name: column for column in (*table.c, site.c.provider_id)}
INSTANCE_LISTING: sa.Select[Any] = sa.select(*(_instance_columns[name] for name in InstanceRow._fields)).join(
    site, site.c.id == table.c.site_id
)


def instance_shapes(
    conn: sa.Connection, rows: Rows, query: wire.RelationQuery, domains: OutdatedDomains
) -> list[Json]:
    """Instances (rows of `INSTANCE_LISTING`) with their interfaces and histories.

    The recorded statuses of `domains` are outdated.
    """
    ids = [row.id for row in rows]
    histories = journal.status_histories(conn, ids)
    attached = instances.interfaces_by_instance(conn, ids)
    doubts = outdated.machine_doubts(conn, [row.machine_id for row in rows], domains)
    shapes = [
        _shown_instance_shape(row, attached[row.id], histories[row.id], doubts.get(row.machine_id), domains)
        for row in map(InstanceRow._make, rows)
    ]
    routing.add_relations(conn, shapes, query.relations(*INSTANCE_RELATIONS))
    return shapes


def _shown_instance_shape(
    row: InstanceRow,
    nvlink: Sequence[InterfaceRow],
    past: Sequence[StatusRecord],
    doubt: LatestObservation | None,
    domains: OutdatedDomains,
) -> Json:
    if doubt is None:
        return _instance_shape(row, nvlink, past)
    return _instance_shape(
        row._replace(status=outdated.shown_status(row.status, doubt)),
        [outdated.shown_interface(interface, domains) for interface in nvlink],
        outdated.shown_history(row.id, row.status, past, doubt),
    )


def _instance_shape(row: InstanceRow, nvlink: Sequence[InterfaceRow], past: Sequence[StatusRecord]) -> Json:
    return {
        **KEPT_DEFAULTS,
        **row.extra,
        **shape(
            Instance,
            row,
            infrastructure_provider_id=row.provider_id,
            controller_instance_id=row.id,
            nvlink_interfaces=[interface_shape(interface) for interface in nvlink],
            is_update_pending=row.status not in SETTLED_STATUSES,
            placement_reason=row.placement,
            status=routing.shown_instance_status(row.status),
            unknown_since=past[0].created if row.status == Status.UNKNOWN else None,
            status_history=routing.status_history_shape(past),
        ),
    }


def warning_shapes(found: Sequence[InstanceWarning]) -> list[Json]:
    """The warnings of a response."""
    return [shape(CautionAnswer, warning, type=warning.kind) for warning in found]


def plan_shape(planned: CreationPlan) -> Json:
    """The plan of a dry run."""
    interfaces = [
        shape(PlannedInterface, spec, nvlink_logical_partition_id=spec.logical_partition_id)
        for spec in planned.interfaces
    ]
    return {
        "dryRun": True,
        "planId": planned.id,
        "reason": planned.reason,
        "nvLinkDomainIds": list(dict.fromkeys(assignment.domain for assignment in planned.assignments)),
        "instances": [
            shape(
                PlannedInstance, assignment, nvlink_domain_id=assignment.domain, nvlink_interfaces=interfaces
            )
            for assignment in planned.assignments
        ],
        "warnings": warning_shapes(planned.warnings),
    }


KEPT_INTERFACE_RELATIONS = {
    "interfaces": ("Instance", "Subnet", "VpcPrefix"),
    "infinibandInterfaces": ("Instance", "Site", "InfiniBandPartition"),
}
"""Field of the request -> the relations of its interfaces."""


def kept_interface_shapes(conn: sa.Connection, row: Row, field: str, query: KeptInterfaceQuery) -> list[Json]:
    """The network interfaces as the request named them, always Pending."""
    relations = query.relations(*KEPT_INTERFACE_RELATIONS[field])
    kept = row.extra.get(field)
    if not isinstance(kept, list) or (query.status and Status.PENDING not in query.status):
        return []
    shapes = [
        {
            **(interface if isinstance(interface, dict) else {}),
            **shape(
                KeptInterface,
                row,
                id=str(uuid5(UUID(row.id), f"{field}/{position}")),
                instance_id=row.id,
                status=Status.PENDING,
            ),
        }
        for position, interface in enumerate(kept)
    ]
    routing.add_relations(conn, shapes, relations)
    return shapes
