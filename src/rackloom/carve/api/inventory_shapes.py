"""Sites, instance types, machines and allocations as the wire shows them."""

import sqlalchemy as sa

from rackloom.carve.api.queries import InstanceTypeIncludes, MachineIncludes, Query
from rackloom.carve.api.respond import Json
from rackloom.carve.api.shapes import Row, Rows, relate, status_history, times
from rackloom.carve.plan.values import GpuHealth
from rackloom.carve.site import allocations as site_allocations
from rackloom.carve.site import history, tenants
from rackloom.carve.site import instance_types as site_types
from rackloom.carve.site import machines as site_machines
from rackloom.carve.site.instance_types import TypeStats
from rackloom.carve.site.sites import CAPABILITIES
from rackloom.carve.site.tables import instance_type, machine
from rackloom.carve.site.values import Status


def sites(conn: sa.Connection, rows: Rows) -> list[Json]:
    """Sites, with every capability as true or false."""
    histories = history.of(conn, [row.id for row in rows])
    orgs = tenants.provider_orgs(conn, {row.provider_id for row in rows})
    return [
        {
            **row.extra,
            "id": row.id,
            "name": row.name,
            "description": row.description,
            "org": orgs[row.provider_id],
            "infrastructureProviderId": row.provider_id,
            "isOnline": row.status == Status.REGISTERED,
            "capabilities": {name: bool(row.capabilities.get(name)) for name in CAPABILITIES},
            "status": row.status,
            "statusHistory": status_history(histories[row.id]),
            **times(row),
        }
        for row in rows
    ]


def instance_types(conn: sa.Connection, rows: Rows, query: InstanceTypeIncludes) -> list[Json]:
    """Instance types (rows with provider_id), with the machines and the numbers of each when wanted."""
    histories = history.of(conn, [row.id for row in rows])
    shapes: dict[str, Json] = {
        row.id: {
            "id": row.id,
            "name": row.name,
            "description": row.description,
            "siteId": row.site_id,
            "infrastructureProviderId": row.provider_id,
            "labels": row.labels,
            "machineCapabilities": row.capabilities,
            "status": row.status,
            "statusHistory": status_history(histories[row.id]),
            **times(row),
        }
        for row in rows
    }
    if query.include_machine_assignment:
        _add_machines(conn, shapes)
    if query.include_allocation_stats:
        for type_id, stats in site_types.stats(conn, list(shapes)).items():
            shapes[type_id]["allocationStats"] = _stats(stats)
    found = list(shapes.values())
    relate(conn, found, query.relations("InfrastructureProvider", "Site"))
    return found


def machines(conn: sa.Connection, rows: Rows, query: MachineIncludes) -> list[Json]:
    """Machines (rows of machines.listing with provider_id)."""
    ids = [row.id for row in rows]
    histories = history.of(conn, ids)
    gpus = site_machines.gpus_of(conn, ids)
    types = sa.select(instance_type).where(instance_type.c.id.in_({row.instance_type_id for row in rows}))
    capabilities = {row.id: row.capabilities for row in conn.execute(types)}
    shapes = [
        {
            "id": row.id,
            "infrastructureProviderId": row.provider_id,
            "siteId": row.site_id,
            "instanceTypeId": row.instance_type_id,
            "instanceId": row.instance_id,
            "tenantId": row.tenant_id,
            "controllerMachineId": row.id,
            "hwSkuDeviceType": "gpu" if gpus[row.id] else None,
            "serialNumber": None,
            "machineCapabilities": capabilities.get(row.instance_type_id, []),
            "maintenanceMessage": row.cordon_reason,
            "isMissingOnSite": row.missing_since is not None,
            "isUsableByTenant": row.shown_status == Status.READY and row.missing_since is None,
            "status": row.shown_status,
            "statusHistory": status_history(histories[row.id]),
            **times(row),
        }
        for row in rows
    ]
    if query.include_metadata:
        for shape, row in zip(shapes, rows, strict=True):
            shape["metadata"] = {"nvLinkInfo": nvlink_info(row, gpus[row.id]), "rack": row.rack}
    relate(conn, shapes, query.relations("InfrastructureProvider", "Site", "InstanceType"))
    return shapes


def allocations(conn: sa.Connection, rows: Rows, query: Query) -> list[Json]:
    """Allocations (rows with provider_id) with their constraints."""
    ids = [row.id for row in rows]
    histories = history.of(conn, ids)
    shapes: dict[str, Json] = {
        row.id: {
            "id": row.id,
            "name": row.name,
            "description": row.description,
            "infrastructureProviderId": row.provider_id,
            "tenantId": row.tenant_id,
            "siteId": row.site_id,
            "allocationConstraints": [],
            "status": row.status,
            "statusHistory": status_history(histories[row.id]),
            **times(row),
        }
        for row in rows
    }
    for row in site_allocations.constraints_of(conn, ids):
        shapes[row.allocation_id]["allocationConstraints"].append(constraint(row))
    found = list(shapes.values())
    relate(conn, found, query.relations("InfrastructureProvider", "Tenant", "Site"))
    return found


def association(row: Row) -> Json:
    """A machine of an instance type."""
    return {"id": row.id, "machineId": row.id, "instanceTypeId": row.instance_type_id, **times(row)}


def _add_machines(conn: sa.Connection, shapes: dict[str, Json]) -> None:
    for shape in shapes.values():
        shape["machineInstanceTypes"] = []
    wanted = sa.select(machine).where(machine.c.instance_type_id.in_(shapes)).order_by(machine.c.id)
    for row in conn.execute(wanted):
        shapes[row.instance_type_id]["machineInstanceTypes"].append(association(row))


def _stats(stats: TypeStats) -> Json:
    return {
        "assigned": stats.machines,
        "total": stats.allocated,
        "used": stats.used,
        "unused": stats.allocated - stats.used,
        "unusedUsable": min(stats.allocated - stats.used, stats.usable),
        "maxAllocatable": max(0, stats.machines - stats.allocated),
    }


def nvlink_info(row: Row, gpus: Rows) -> Json:
    """Where a machine sits in the NVLink fabric."""
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
                "health": GpuHealth(gpu.health).name.lower(),
            }
            for gpu in gpus
        ],
    }


def constraint(row: Row) -> Json:
    """So many machines of a type."""
    return {
        "id": row.id,
        "allocationId": row.allocation_id,
        "resourceType": "InstanceType",
        "resourceTypeId": row.instance_type_id,
        "constraintType": "Reserved",
        "constraintValue": row.value,
        **times(row),
    }
