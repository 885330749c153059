"""REST: machines of a provider, and those that carry a tenant's instances. Also GPU statistics.

`include_metadata` adds the place of a machine in the NVLink fabric: domain, chassis serial, and for each
GPU the module id, GUID, the source of the GUID, and health.
"""

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Annotated, Literal
from uuid import UUID

import sqlalchemy as sa
from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from rackloom.carve.api import access, routing, wire
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.instance_types import Capability, CapabilityType
from rackloom.carve.api.routing import AnySelect, ApiDeps, Deps, Page, Params, Reader, Row, Rows
from rackloom.carve.api.wire import Json
from rackloom.carve.partitions import ownership
from rackloom.carve.store import journal
from rackloom.carve.store.prepared import require
from rackloom.carve.store.schema import instance, instance_type, machine, machine_gpu, site
from rackloom.carve.store.values import Status, invalid
from rackloom.carve.tenancy import catalog
from rackloom.carve.tenancy.outdated import shown_gpu_healths
from rackloom.carve.tenancy.placement import reserved_trays, shut_trays
from rackloom.core.partitions.domain import GpuHealth

# Query parameters.


MachineStatus = Literal[
    "Initializing", "Ready", "Reset", "Maintenance", "InUse", "Error", "Decommissioned", "Unknown"
]


class MachineIncludes(wire.RelationQuery):
    """Details to add to a machine."""

    include_metadata: Annotated[bool, Field(json_schema_extra=access.PROVIDERS_ONLY)] = False


class CapabilityQuery(wire.PageQuery):
    """Filters on the capabilities of machines."""

    site_id: UUID | None = None
    type: CapabilityType | None = None
    name: wire.TextFilter = []


class MachineQuery(wire.PageQuery, MachineIncludes):
    """Filters on machines."""

    site_id: UUID | None = None
    id: wire.TextFilter = []
    instance_type_id: wire.UuidFilter = []
    tenant_id: wire.UuidFilter = []
    has_instance_type: bool | None = None
    has_instance: bool | None = None
    is_missing_on_site: bool | None = None
    status: list[MachineStatus] = []
    capability_type: CapabilityType | None = None
    capability_name: wire.TextFilter = []
    hw_sku_device_type: wire.TextFilter = []
    query: wire.Text | None = None


class GpuStatsQuery(BaseModel):
    """The site of the machines, or all sites."""

    model_config = ConfigDict(alias_generator=to_camel)

    site_id: UUID | None = None


# Response models.


class NVLinkGpu(wire.Answer):
    """A GPU of a machine, as a switch controller named it."""

    device_instance: int
    module_id: int
    slot_id: int
    tray_index: int
    guid: str | None
    source: str | None
    health: str


class NVLinkInfo(wire.Answer):
    """The place of a machine in the NVLink fabric."""

    domain_uuid: str | None
    chassis_serial: str
    gpus: list[NVLinkGpu]


class MachineMetadata(wire.Answer):
    """The known hardware of a machine."""

    nvlink_info: NVLinkInfo = Field(alias="nvLinkInfo")
    rack: str


class MachineReservation(wire.Answer):
    """The organisation for which a machine is reserved, and the end of the reservation."""

    reservation_id: UUID
    tenant_id: UUID
    org: str
    until: datetime


class Machine(wire.Timed):
    """A machine."""

    id: str
    infrastructure_provider_id: UUID
    site_id: UUID
    instance_type_id: UUID | None
    instance_id: UUID | None
    tenant_id: UUID | None
    controller_machine_id: str
    hw_sku_device_type: Literal["gpu"] | None
    serial_number: str | None
    machine_capabilities: list[Capability]
    maintenance_message: str | None
    is_missing_on_site: bool
    is_usable_by_tenant: bool
    foreign_partition_ids: list[int]
    """Partitions that hold GPUs of the machine and that the site did not make. It then gets no instance."""
    status: MachineStatus
    status_history: list[wire.StatusDetail]
    labels: Annotated[dict[str, str] | None, Field(json_schema_extra=access.PROVIDERS_ONLY)]
    reservation: Annotated[MachineReservation | None, Field(json_schema_extra=access.PROVIDERS_ONLY)] = None
    metadata: Annotated[MachineMetadata | None, Field(json_schema_extra=access.PROVIDERS_ONLY)] = None


class GpuStats(wire.Answer):
    """GPUs of one product."""

    name: str
    gpus: int
    machines: int


# From rows to responses.


GPU_SKU_TYPE = "gpu"
"""The only device type of hardware SKUs that is known here: a machine with GPUs."""


def _machine_shapes(conn: sa.Connection, rows: Rows, query: MachineIncludes, deps: ApiDeps) -> list[Json]:
    ids = [row.id for row in rows]
    histories = journal.status_histories(conn, ids)
    gpus = catalog.gpus_of_machines(conn, ids)
    held = ownership.foreign_trays(conn, ids)
    shut = shut_trays(conn, ids)
    types = sa.select(instance_type).where(instance_type.c.id.in_({row.instance_type_id for row in rows}))
    capabilities = {row.id: row.capabilities for row in conn.execute(types)}
    shapes = [
        wire.shape(
            Machine,
            row,
            infrastructure_provider_id=row.provider_id,
            controller_machine_id=row.id,
            hw_sku_device_type=GPU_SKU_TYPE if gpus[row.id] else None,
            serial_number=None,
            machine_capabilities=capabilities.get(row.instance_type_id, []),
            maintenance_message=row.cordon_reason,
            is_missing_on_site=row.missing_since is not None,
            is_usable_by_tenant=row.shown_status == Status.READY and row.id not in shut,
            foreign_partition_ids=[tray.partition_id for tray in held.get(row.id, ())],
            labels=row.labels if row.is_provided else None,
            status=row.shown_status,
            status_history=routing.status_history_shape(histories[row.id]),
        )
        for row in rows
    ]
    kept = reserved_trays(conn, deps.clock(), ids)
    for shape, row in zip(shapes, rows, strict=True):
        if row.is_provided:
            tray = kept.get(row.id)
            shape["reservation"] = None if tray is None else wire.shape(MachineReservation, tray)
    if query.include_metadata:
        healths = shown_gpu_healths(conn, rows, deps.valid_from())
        for shape, row in zip(shapes, rows, strict=True):
            if not row.is_provided:
                continue
            info = nvlink_info_shape(row, gpus[row.id], healths[row.id])
            shape["metadata"] = {"nvLinkInfo": info, "rack": row.rack}
    routing.add_relations(conn, shapes, query.relations("InfrastructureProvider", "Site", "InstanceType"))
    return shapes


def nvlink_info_shape(row: Row, gpus: Rows, healths: Mapping[int, GpuHealth]) -> Json:
    """The place of a machine in the NVLink fabric. `healths` are those of its GPUs by module id."""
    return {
        "domainUuid": row.domain,
        "chassisSerial": row.chassis_serial,
        "gpus": [
            {
                "deviceInstance": gpu.module_id - 1,
                "moduleId": gpu.module_id,
                "slotId": row.slot,
                "trayIndex": row.tray_index,
                "guid": gpu.guid,
                "source": gpu.source,
                "health": healths[gpu.module_id].name.lower(),
            }
            for gpu in gpus
        ],
    }


# Routes.


router = routing.Operations()

MachineId = Annotated[str, Path(alias="machineId", max_length=64, pattern=wire.NO_NUL)]


@router.page("/machine", "get-all-machine", list[Machine])
def list_machines(conn: sa.Connection, deps: Deps, caller: Reader, query: Params[MachineQuery]) -> Page:
    """The machines that the caller may see."""
    provider_id, tenant_id = routing.provider_and_tenant(conn, caller)
    visible = _machines(provider_id, tenant_id)
    has_gpu = sa.exists().where(machine_gpu.c.machine_id == machine.c.id)
    wanted = (
        (query.has_instance_type, machine.c.instance_type_id.is_not(None) == query.has_instance_type),
        (query.has_instance, instance.c.id.is_not(None) == query.has_instance),
        (query.is_missing_on_site, machine.c.missing_since.is_not(None) == query.is_missing_on_site),
        (
            query.hw_sku_device_type or None,
            has_gpu if GPU_SKU_TYPE in query.hw_sku_device_type else sa.false(),
        ),
    )
    for value, condition in wanted:
        if value is not None:
            visible = visible.where(condition)
    if query.capability_type is not None or query.capability_name:
        visible = visible.where(machine.c.instance_type_id.in_(_types_with(conn, query)))
    # A tenant may not find out the place of a machine by searching either.
    places = (
        sa.case((site.c.provider_id == provider_id, column), else_="")
        for column in (machine.c.chassis_serial, machine.c.rack)
    )
    listing = routing.Listing(
        order=ORDER,
        filters=FILTERS,
        shapes=partial(_machine_shapes, deps=deps),
        searched=(machine.c.id, catalog.shown_machine_status, *places),
    )
    return listing.page(conn, visible, query)


@router.page("/machine-capability", "get-all-machine-capabilities", list[Capability])
def list_capabilities(conn: sa.Connection, caller: Reader, query: Params[CapabilityQuery]) -> list[Json]:
    """The different capabilities of the machines that the caller may see, by type and name."""
    if query.order_by is not None:
        raise invalid("Invalid orderBy value in query", orderBy="capabilities have one order")
    visible = routing.filter_rows(
        _machines(*routing.provider_and_tenant(conn, caller)), (machine.c.site_id, query.site_id)
    ).subquery()
    types = sa.select(instance_type.c.capabilities).where(
        instance_type.c.id.in_(sa.select(visible.c.instance_type_id))
    )
    found = [
        capability
        for row in conn.execute(types.order_by(instance_type.c.created))
        for capability in row.capabilities
        if query.type in (None, capability["type"]) and (not query.name or capability["name"] in query.name)
    ]
    different = [capability for at, capability in enumerate(found) if capability not in found[:at]]
    return sorted(different, key=lambda capability: (capability["type"], capability["name"]))


# Before `/machine/{machineId}`, or "gpu" would be read as an id.
@router.get("/machine/gpu/stats", "get-machine-gpu-stats", list[GpuStats])
def gpu_stats(conn: sa.Connection, caller: Reader, query: Params[GpuStatsQuery]) -> list[Json]:
    """GPUs by product, of the machines that the caller may see."""
    return gpu_stats_shapes(conn, caller, None if query.site_id is None else str(query.site_id))


def gpu_stats_shapes(conn: sa.Connection, caller: Caller, site_id: str | None) -> list[Json]:
    """GPUs by product, of the machines that the caller may see, at one site or at all sites."""
    visible = _machines(*routing.provider_and_tenant(conn, caller)).subquery()
    counted = (
        sa.select(instance_type.c.capabilities, sa.func.count().label("machines"))
        .join(visible, visible.c.instance_type_id == instance_type.c.id)
        .group_by(instance_type.c.id)
    )
    if site_id is not None:
        counted = counted.where(instance_type.c.site_id == site_id)
    gpus, having = Counter[str](), Counter[str]()
    for row in conn.execute(counted):
        for capability in row.capabilities:
            if capability["type"] == "GPU":
                gpus[capability["name"]] += row.machines * int(capability.get("count") or 0)
                having[capability["name"]] += row.machines
    return [{"name": name, "gpus": gpus[name], "machines": having[name]} for name in sorted(having)]


@router.get("/machine/{machineId}", "get-machine", Machine)
def get_machine(
    conn: sa.Connection,
    deps: Deps,
    caller: Reader,
    machine_id: MachineId,
    query: Params[MachineIncludes],
) -> Json:
    """One machine."""
    return _machine_shapes(conn, [_row(conn, caller, machine_id)], query, deps)[0]


@router.page("/machine/{machineId}/status-history", "get-machine-status-history", list[wire.StatusDetail])
def get_history(
    conn: sa.Connection, caller: Reader, machine_id: MachineId, query: Params[wire.PageQuery]
) -> list[Json]:
    """The actions of operators on the machine, newest first."""
    return routing.history(conn, _row(conn, caller, machine_id).id)


def _machines(provider_id: str, tenant_id: str) -> AnySelect:
    """The visible machines, and whether the reader provides each."""
    return (
        catalog.machine_listing()
        .add_columns(site.c.provider_id, (site.c.provider_id == provider_id).label("is_provided"))
        .join(site, site.c.id == machine.c.site_id)
        .where(routing.of_caller(provider_id, tenant_id, instance))
    )


def _types_with(conn: sa.Connection, query: MachineQuery) -> list[str]:
    """Instance types that have the capability. Types are few, and their capabilities are JSON."""
    types = conn.execute(sa.select(instance_type.c.id, instance_type.c.capabilities))
    return [
        row.id
        for row in types
        if any(
            query.capability_type in (None, capability["type"])
            and (not query.capability_name or capability["name"] in query.capability_name)
            for capability in row.capabilities
        )
    ]


def _row(conn: sa.Connection, caller: Caller, machine_id: str) -> Row:
    visible = _machines(*routing.provider_and_tenant(conn, caller))
    row = conn.execute(visible.where(machine.c.id == machine_id)).one_or_none()
    return require(row, "Could not find Machine with specified ID")


ORDER = routing.order_of(machine, "id", "status")
FILTERS = {
    "site_id": machine.c.site_id,
    "id": machine.c.id,
    "instance_type_id": machine.c.instance_type_id,
    "tenant_id": instance.c.tenant_id,
    "status": catalog.shown_machine_status,
}
