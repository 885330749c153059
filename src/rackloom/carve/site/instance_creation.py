"""New instances: every rule that a request must pass, then placement, then the records of all or none."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.site import (
    allocations,
    cautions,
    events,
    instances,
    interfaces,
    machines,
    placing,
    sites,
    vpcs,
)
from rackloom.carve.site.cautions import Caution
from rackloom.carve.site.events import Kind as Event
from rackloom.carve.site.events import Note
from rackloom.carve.site.problems import Kind, Rejected, conflict, forbidden, invalid
from rackloom.carve.site.tables import instance as table
from rackloom.carve.site.tables import machine
from rackloom.carve.site.values import Changed, Ids, InterfaceWish, Status
from rackloom.claim.place.instances import Placement, TrayRequest


class InstanceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """New instances that are alike but for their names; all are made or none."""

    names: tuple[str, ...]
    vpc_id: str
    instance_type_id: str | None
    machine_id: str | None = None
    interfaces: tuple[InterfaceWish, ...] | None = None
    """None: those that the VPC's default asks for."""
    one_domain: bool = True
    same_domain: bool = False
    """All in one domain, one where their logical partitions have members already, if they have any."""
    allow_unhealthy: bool = False
    description: str | None = None
    extra: Mapping[str, Any] = {}
    """Fields of networks and operating systems, kept and returned, never acted on."""


def check_count(conn: sa.Connection, tenant_id: str, vpc_id: str, count: int) -> None:
    """Refuse a batch larger than the largest NVLink domain of the VPC's site."""
    limit = max(machines.largest_domain(conn, _vpc(conn, tenant_id, vpc_id).site_id), 2)
    if not 2 <= count <= limit:
        raise invalid("Error validating batch", count=f"must be between 2 and {limit}")


class Seat(msgspec.Struct, frozen=True):
    """A new instance and its machine."""

    name: str
    machine_id: str
    domain: str | None


class CreationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What would be made; nothing is until it is carried out in the same transaction."""

    request: InstanceRequest
    tenant_id: str
    site_id: str
    type_id: str | None
    seats: tuple[Seat, ...]
    reason: str
    wishes: tuple[InterfaceWish, ...]
    cautions: tuple[Caution, ...]


def create(
    conn: sa.Connection, tenant: sa.Row[Any], request: InstanceRequest, now: float, ids: Ids
) -> Changed[tuple[str, ...]]:
    """New instances on machines that placement chose; returns their ids in the order of the names."""
    return carry_out(conn, plan(conn, tenant, request), now, ids)


def plan(conn: sa.Connection, tenant: sa.Row[Any], request: InstanceRequest) -> CreationPlan:
    """Every rule that `request` must pass, and the machines that it would get."""
    vpc = _vpc(conn, tenant.id, request.vpc_id)
    site = sites.get(conn, vpc.site_id)
    sites.check_registered(site)
    allocations.check_site_access(conn, tenant.id, site.id)
    for name in request.names:
        instances.check_name(conn, tenant.id, site.id, name)
    target = None if request.machine_id is None else _targeted(conn, tenant, site, request)
    type_id = request.instance_type_id if target is None else target.instance_type_id
    gpus = instances.nvlink_gpus(conn, site, type_id, request.machine_id)
    wishes = interfaces.wishes_for(conn, vpc, request.interfaces, gpus)
    if wishes:
        sites.check_nvlink(site)
    placement = _place(conn, tenant, request, type_id, wishes)
    domains = machines.domains_of(conn, placement.trays)
    if target is not None and request.same_domain:
        _check_same_domain(conn, target, wishes)
    return CreationPlan(
        request=request,
        tenant_id=tenant.id,
        site_id=site.id,
        type_id=type_id,
        seats=tuple(
            Seat(name, machine_id, domains[machine_id])
            for name, machine_id in zip(request.names, placement.trays, strict=True)
        ),
        reason=placement.reason,
        wishes=wishes,
        cautions=cautions.foresee(conn, wishes, set(domains.values()), gpus),
    )


def carry_out(conn: sa.Connection, planned: CreationPlan, now: float, ids: Ids) -> Changed[tuple[str, ...]]:
    """Make what was planned in this transaction; returns the ids in the order of the seats."""
    made = tuple(_insert(conn, planned, seat, now, ids) for seat in planned.seats)
    return Changed(made, instances.announce(conn, [seat.machine_id for seat in planned.seats], now))


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


def _targeted(
    conn: sa.Connection, tenant: sa.Row[Any], site: sa.Row[Any], request: InstanceRequest
) -> sa.Row[Any]:
    if not tenant.targeted_instance_creation:
        raise forbidden("Tenant does not have capability to create Instances on a chosen Machine")
    found = conn.execute(machines.listing().where(machine.c.id == request.machine_id)).one_or_none()
    if found is None or found.site_id != site.id:
        raise invalid(
            "Could not find Machine with ID specified in request", machineId="does not exist at Site"
        )
    if found.shown_status != Status.READY:
        raise conflict(f"Machine specified in request is not available: it is {found.shown_status}")
    sick = placing.sick_gpus(conn, [found.id]).get(found.id)
    if sick is not None and not request.allow_unhealthy:
        raise Rejected(
            Kind.CONFLICT,
            f"Machine specified in request is unhealthy: {sick}",
            nearest_fix="set allowUnhealthyMachine to true, or choose another machine",
        )
    return found


def _check_same_domain(conn: sa.Connection, target: sa.Row[Any], wishes: Sequence[InterfaceWish]) -> None:
    standing = placing.members(conn, {wish.logical_partition_id for wish in wishes})
    for partition, in_domain in sorted(standing.items()):
        if target.domain not in in_domain:
            raise Rejected(
                Kind.CONFLICT,
                f"requireSameDomain: NVLink Logical Partition {partition} lives in NVLink domain"
                f" {', '.join(sorted(in_domain))}, the machine is in {target.domain or 'none yet observed'}",
                nearest_fix="choose a machine in that domain, or set requireSameDomain to false",
            )


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
        TrayRequest(
            len(request.names),
            request.one_domain,
            beside_members=request.same_domain,
            allow_sick=request.allow_unhealthy,
        ),
        type_id=type_id,
        logical_partitions={wish.logical_partition_id for wish in wishes},
    )


def _insert(conn: sa.Connection, planned: CreationPlan, seat: Seat, now: float, ids: Ids) -> str:
    new, asked = ids(), planned.request
    row: dict[str, Any] = {
        "id": new,
        "tenant_id": planned.tenant_id,
        "site_id": planned.site_id,
        "vpc_id": asked.vpc_id,
    }
    row |= {"instance_type_id": planned.type_id, "machine_id": seat.machine_id, "placement": planned.reason}
    row |= {"name": seat.name, "description": asked.description, "extra": dict(asked.extra)}
    row |= {"status": Status.PENDING, "intent_at": now, "created": now, "updated": now}
    conn.execute(sa.insert(table).values(**row))
    note = Note(Event.INSTANCE, new, Status.PENDING, f"Placed {planned.reason}")
    events.tell(conn, planned.tenant_id, note, now)
    interfaces.replace(conn, new, planned.wishes, now, ids)
    return new
