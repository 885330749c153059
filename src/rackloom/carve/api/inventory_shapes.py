"""Sites, instance types, machines and allocations as the wire shows them."""

import sqlalchemy as sa

from rackloom.carve.api.respond import Json
from rackloom.carve.api.shapes import Row, Rows, status_history, times
from rackloom.carve.plan.values import GpuHealth
from rackloom.carve.site import allocations as site_allocations
from rackloom.carve.site import history
from rackloom.carve.site import machines as site_machines
from rackloom.carve.site.sites import CAPABILITIES
from rackloom.carve.site.tables import instance_type, machine


def sites(conn: sa.Connection, rows: Rows) -> list[Json]:
    """Sites, with every capability as true or false."""
    histories = history.of(conn, [row.id for row in rows])
    return [
        {
            "id": row.id,
            "name": row.name,
            "description": row.description,
            "infrastructureProviderId": row.provider_id,
            "capabilities": {name: bool(row.capabilities.get(name)) for name in CAPABILITIES},
            "status": row.status,
            "statusHistory": status_history(histories[row.id]),
            **times(row),
        }
        for row in rows
    ]


def instance_types(conn: sa.Connection, rows: Rows, *, with_machines: bool) -> list[Json]:
    """Instance types (rows with provider_id), with the machines of each when wanted."""
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
    if with_machines:
        _add_machines(conn, shapes)
    return list(shapes.values())


def machines(conn: sa.Connection, rows: Rows, *, with_metadata: bool) -> list[Json]:
    """Machines (rows with instance_id, tenant_id, provider_id, shown_status)."""
    capabilities = {
        row.id: row.capabilities
        for row in conn.execute(
            sa.select(instance_type).where(instance_type.c.id.in_({row.instance_type_id for row in rows}))
        )
    }
    shapes = [
        {
            "id": row.id,
            "infrastructureProviderId": row.provider_id,
            "siteId": row.site_id,
            "instanceTypeId": row.instance_type_id,
            "instanceId": row.instance_id,
            "tenantId": row.tenant_id,
            "machineCapabilities": capabilities.get(row.instance_type_id, []),
            "status": row.shown_status,
            **times(row),
        }
        for row in rows
    ]
    if with_metadata:
        gpus = site_machines.gpus_of(conn, [row.id for row in rows])
        for shape, row in zip(shapes, rows, strict=True):
            shape["metadata"] = {"nvLinkInfo": _nvlink_info(row, gpus[row.id]), "rack": row.rack}
    return shapes


def allocations(conn: sa.Connection, rows: Rows) -> list[Json]:
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
        shapes[row.allocation_id]["allocationConstraints"].append(_constraint(row))
    return list(shapes.values())


def _add_machines(conn: sa.Connection, shapes: dict[str, Json]) -> None:
    for shape in shapes.values():
        shape["machineInstanceTypes"] = []
    wanted = sa.select(machine.c.id, machine.c.instance_type_id).order_by(machine.c.id)
    for row in conn.execute(wanted.where(machine.c.instance_type_id.in_(shapes))):
        about = {"machineId": row.id, "instanceTypeId": row.instance_type_id}
        shapes[row.instance_type_id]["machineInstanceTypes"].append(about)


def _nvlink_info(row: Row, gpus: Rows) -> Json:
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


def _constraint(row: Row) -> Json:
    return {
        "id": row.id,
        "allocationId": row.allocation_id,
        "resourceType": "InstanceType",
        "resourceTypeId": row.instance_type_id,
        "constraintType": "Reserved",
        "constraintValue": row.value,
        **times(row),
    }
