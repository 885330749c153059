"""New instances: every rule that a request must pass, then placement, then the records of all or none."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.site import (
    allocations,
    history,
    instances,
    interfaces,
    machines,
    placing,
    sites,
    vpcs,
)
from rackloom.carve.site.problems import Rejected, conflict, forbidden, invalid
from rackloom.carve.site.tables import instance as table
from rackloom.carve.site.tables import machine
from rackloom.carve.site.values import Changed, Ids, InterfaceWish, Status
from rackloom.claim.place.trays import Placement, TrayRequest


class InstanceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """New instances that are alike but for their names; all are made or none."""

    names: tuple[str, ...]
    vpc_id: str
    instance_type_id: str | None
    machine_id: str | None = None
    interfaces: tuple[InterfaceWish, ...] | None = None
    """None: those that the VPC's default asks for."""
    one_domain: bool = True
    allow_unhealthy: bool = False
    description: str | None = None
    extra: Mapping[str, Any] = {}
    """Fields of networks and operating systems, kept and returned, never acted on."""


def check_count(conn: sa.Connection, tenant_id: str, vpc_id: str, count: int) -> None:
    """Refuse a batch larger than the largest NVLink domain of the VPC's site."""
    limit = max(machines.largest_domain(conn, _vpc(conn, tenant_id, vpc_id).site_id), 2)
    if not 2 <= count <= limit:
        raise invalid("Error validating batch", count=f"must be between 2 and {limit}")


def create(
    conn: sa.Connection, tenant: sa.Row[Any], request: InstanceRequest, now: float, ids: Ids
) -> Changed[tuple[str, ...]]:
    """New instances on machines that placement chose; returns their ids in the order of the names."""
    vpc = _vpc(conn, tenant.id, request.vpc_id)
    site = sites.get(conn, vpc.site_id)
    sites.check_registered(site)
    allocations.check_site_access(conn, tenant.id, site.id)
    for name in request.names:
        instances.check_name(conn, tenant.id, site.id, name)
    target = None if request.machine_id is None else _targeted(conn, tenant, site, request.machine_id)
    type_id = request.instance_type_id if target is None else target.instance_type_id
    wishes = interfaces.wishes_for(
        conn, vpc, request.interfaces, instances.nvlink_gpus(conn, site, type_id, request.machine_id)
    )
    if wishes:
        sites.check_nvlink(site)
    placement = _place(conn, tenant, request, type_id, wishes)
    made = tuple(
        _insert(conn, vpc, request, type_id, name, machine_id, placement, wishes, now, ids)
        for name, machine_id in zip(request.names, placement.trays, strict=True)
    )
    return Changed(made, instances.announce(conn, placement.trays, now))


def _vpc(conn: sa.Connection, tenant_id: str, vpc_id: str) -> sa.Row[Any]:
    try:
        vpc = vpcs.get(conn, tenant_id, vpc_id)
    except Rejected as refusal:
        raise invalid(
            "Could not find VPC of Tenant with ID specified in request", vpcId=refusal.reason
        ) from None
    if vpc.status != Status.READY:
        raise invalid("VPC specified in request is not in Ready state")
    return vpc


def _targeted(conn: sa.Connection, tenant: sa.Row[Any], site: sa.Row[Any], machine_id: str) -> sa.Row[Any]:
    if not tenant.targeted_instance_creation:
        raise forbidden("Tenant does not have capability to create Instances on a chosen Machine")
    found = conn.execute(machines.listing().where(machine.c.id == machine_id)).one_or_none()
    if found is None or found.site_id != site.id:
        raise invalid(
            "Could not find Machine with ID specified in request", machineId="does not exist at Site"
        )
    if found.shown_status != Status.READY:
        raise conflict(f"Machine specified in request is not available: it is {found.shown_status}")
    return found


def _place(
    conn: sa.Connection,
    tenant: sa.Row[Any],
    request: InstanceRequest,
    type_id: str | None,
    wishes: Sequence[InterfaceWish],
) -> Placement:
    if request.machine_id is not None:
        return Placement((request.machine_id,), "on the machine that the request names")
    if type_id is None:
        raise invalid(
            "Exactly one of instanceTypeId and machineId must be specified", instanceTypeId="is missing"
        )
    allocations.check_quota(conn, tenant.id, type_id, len(request.names))
    return placing.place(
        conn,
        TrayRequest(len(request.names), request.one_domain),
        type_id=type_id,
        logical_partitions={wish.logical_partition_id for wish in wishes},
        allow_unhealthy=request.allow_unhealthy,
    )


def _insert(
    conn: sa.Connection,
    vpc: sa.Row[Any],
    request: InstanceRequest,
    type_id: str | None,
    name: str,
    machine_id: str,
    placement: Placement,
    wishes: Sequence[InterfaceWish],
    now: float,
    ids: Ids,
) -> str:
    new = ids()
    row = {"id": new, "tenant_id": vpc.tenant_id, "site_id": vpc.site_id, "vpc_id": vpc.id}
    row |= {"instance_type_id": type_id, "machine_id": machine_id, "placement": placement.reason}
    row |= {"name": name, "description": request.description, "extra": dict(request.extra)}
    row |= {"status": Status.PENDING, "intent_at": now, "created": now, "updated": now}
    conn.execute(sa.insert(table).values(**row))
    history.record(conn, new, Status.PENDING, f"Placed {placement.reason}", now)
    interfaces.replace(conn, new, wishes, now, ids)
    return new
