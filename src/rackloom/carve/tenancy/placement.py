"""Placement of new instances on free machines, and the free capacity of each NVLink domain.

`place_instances` builds the input of the placement search: for each domain, the empty machines of the type
that are in service. Not in service are machines that are cordoned, missing, not Ready, or in a domain that
is paused or has a conflict. Trays with GPUs in a partition that the site did not make, or with GPUs that
their controller does not list, are shut (`shut_trays`). Few machines are unhealthy or shut, so only these
are named. The others are counted in the database, also for each reservation, and stand in the search as
interchangeable slots. After the search each slot becomes the next machine in rack, chassis and
slot order. A request that the site cannot place is refused as a conflict, with the nearest fix.
`choose_unreserved_trays` chooses trays for a new reservation by the same rules.

`capacity_of_domains` counts free, reserved, unhealthy, foreign, unlisted and closed trays, and the largest
batch that one request can get. Fragmentation is the share of free trays that no single request can get. Of
other tenants it shows only numbers of trays, and to operators for whom trays are reserved.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from rackloom.carve.observation import latest
from rackloom.carve.observation.latest import LatestObservation
from rackloom.carve.partitions import ownership
from rackloom.carve.partitions.ownership import ForeignTray
from rackloom.carve.store.schema import (
    domain_dispute,
    domain_pause,
    instance,
    machine,
    machine_gpu,
    nvlink_interface,
    reserved_tray,
)
from rackloom.carve.store.values import RefusalKind, Rejected, Status
from rackloom.carve.tenancy import catalog
from rackloom.carve.tenancy.interfaces import partition_members
from rackloom.carve.tenancy.withheld_trays import (
    ReservedTray,
    is_in_reservations,
    is_shut,
    reservations_in_force,
    reserved_trays,
    shut_trays,
    unlisted_gpus,
)
from rackloom.core.partitions.domain import GpuHealth
from rackloom.core.place.instance_trays import (
    DomainFreeTrays,
    FreeTray,
    TrayChoice,
    TrayId,
    TrayRequest,
    choose_trays,
)
from rackloom.core.place.promises import AllocationUse, Reservation, owners_of_trays
from rackloom.errors import Refused

# Placement.


UNHEALTHY_STATES = (GpuHealth.DEGRADED, GpuHealth.NO_NVLINK, GpuHealth.DEGRADED_BANDWIDTH)


# Built once: every new instance runs these.
_unhealthy_param: sa.BindParameter[str] = sa.bindparam("unhealthy", expanding=True)
_closed_domains = sa.union_all(sa.select(domain_pause.c.domain), sa.select(domain_dispute.c.domain))
is_in_service = sa.and_(
    machine.c.status == Status.READY,
    machine.c.missing_since.is_(None),
    sa.or_(machine.c.domain.is_(None), machine.c.domain.not_in(_closed_domains)),
    ~catalog.is_cordoned,
)
"""Machines that may get an instance when empty: not those of a domain that is paused or in conflict."""
_empty_and_in_service = sa.and_(
    machine.c.instance_type_id == sa.bindparam("type"),
    is_in_service,
    machine.c.id.not_in(sa.select(instance.c.machine_id)),
)
"""Empty machines of a type that are in service: healthy or not, shut or not."""
_empty_and_healthy = sa.and_(_empty_and_in_service, machine.c.id.not_in(_unhealthy_param))
_rack_order = (machine.c.rack, machine.c.chassis_serial, machine.c.slot)
_HEALTHY_BY_DOMAIN = (
    sa.select(machine.c.domain, sa.func.count()).where(_empty_and_healthy).group_by(machine.c.domain)
)
_UNHEALTHY_MACHINES = (
    sa.select(machine.c.id, machine.c.domain)
    .where(_empty_and_in_service, machine.c.id.in_(_unhealthy_param))
    .order_by(*_rack_order)
)
_SHUT_MACHINES = (
    sa.select(machine.c.id, machine.c.domain).where(_empty_and_in_service, is_shut).order_by(*_rack_order)
)
_RESERVED_BY_DOMAIN = (
    sa.select(machine.c.domain, reserved_tray.c.reservation_id, sa.func.count())
    .join(reserved_tray, reserved_tray.c.machine_id == machine.c.id)
    .where(_empty_and_healthy, ~is_shut, is_in_reservations)
    .group_by(machine.c.domain, reserved_tray.c.reservation_id)
)
_EMPTY_AND_USABLE = (
    sa.select(machine.c.id, machine.c.domain).where(_empty_and_healthy, ~is_shut).order_by(*_rack_order)
)
_UNRESERVED = _EMPTY_AND_USABLE.where(~is_in_reservations)
_FIRST_MACHINES = {
    (reserved, known): alike.where(
        machine.c.domain == sa.bindparam("domain") if known else machine.c.domain.is_(None)
    ).limit(sa.bindparam("most", type_=sa.Integer))
    for reserved, alike in ((False, _UNRESERVED), (True, _EMPTY_AND_USABLE.where(is_in_reservations)))
    for known in (False, True)
}
"""By whether the machines are reserved, and whether their domain is known."""


class MachineSlot(NamedTuple):
    """Any healthy machine of `domain`. These are interchangeable, so the search needs only their number."""

    domain: str | None
    reservation_id: str | None = None
    """The reservation that keeps it now."""


MachineOrSlot = str | MachineSlot
"""An unhealthy or shut machine by its id, or a slot for any other."""


def place_instances(
    conn: sa.Connection,
    request: TrayRequest,
    *,
    type_id: str,
    logical_partitions: Collection[str],
    now: float,
) -> TrayChoice[str]:
    """Machines of the type for `request`; refused as a conflict when the site has no room."""
    placed_by_domain = Counter[str]()
    for in_domain in partition_members(conn, logical_partitions).values():
        placed_by_domain.update(in_domain)
    # Few machines are unhealthy: only these are passed to the database by id, and the others are counted.
    unhealthy = unhealthy_gpus(conn, None)
    reservations = reservations_in_force(conn, now)
    rooms = domain_rooms(conn, type_id, placed_by_domain, unhealthy, reservations)
    chosen = _choose_or_reject(conn, request, rooms)
    machines = _machines_of_slots(conn, type_id, chosen.trays, unhealthy, reservations)
    return TrayChoice(machines, chosen.reason)


def choose_unreserved_trays(
    conn: sa.Connection,
    request: TrayRequest,
    *,
    type_id: str,
    domain: str | None,
    rack: str | None,
    now: float,
) -> TrayChoice[str]:
    """Healthy empty machines that no reservation keeps, in `domain` and `rack` where they are given."""
    unreserved = _UNRESERVED
    for column, wanted in ((machine.c.domain, domain), (machine.c.rack, rack)):
        if wanted is not None:
            unreserved = unreserved.where(column == wanted)
    parameters = {
        "type": type_id,
        "unhealthy": list(unhealthy_gpus(conn, None)),
        "reservations": list(reservations_in_force(conn, now)),
    }
    by_domain: dict[str | None, list[FreeTray[str]]] = defaultdict(list)
    for row in conn.execute(unreserved, parameters):
        by_domain[row.domain].append(FreeTray(row.id))
    rooms = [DomainFreeTrays(name, tuple(trays), 0) for name, trays in by_domain.items()]
    return _choose_or_reject(conn, request, rooms)


def _choose_or_reject(
    conn: sa.Connection, request: TrayRequest, rooms: Sequence[DomainFreeTrays[TrayId]]
) -> TrayChoice[TrayId]:
    try:
        return choose_trays(request, rooms)
    except Refused as refusal:
        trays = [tray for room in rooms for tray in room.trays if tray.is_open_to(request.tenant)]
        shut = [str(tray.tray) for tray in trays if tray.shut is not None]
        fixes = sorted({tray.fix for tray in shut_trays(conn, shut).values()}) if shut else []
        fix = refusal.nearest_fix or " and ".join(fixes) or None
        raise Rejected(RefusalKind.CONFLICT, refusal.reason, nearest_fix=fix) from None


def domain_rooms(
    conn: sa.Connection,
    type_id: str,
    members: Mapping[str, int],
    unhealthy: Mapping[str, str],
    reservations: Mapping[str, Reservation],
) -> list[DomainFreeTrays[MachineOrSlot]]:
    """The empty machines of a type by domain: a slot for each, but unhealthy and shut ones by id.

    A domain with members is listed even without room: where a request must join the members of its logical
    partitions, no other domain will do.
    """
    parameters = {"type": type_id, "unhealthy": list(unhealthy)}
    shut = shut_trays(conn, None)
    shut_machines = conn.execute(_SHUT_MACHINES, {"type": type_id}).all() if shut else ()
    unhealthy_machines = conn.execute(_UNHEALTHY_MACHINES, parameters).all() if unhealthy else ()
    # For whom the named machines are kept.
    owners: dict[str, str] = {}
    if reservations and (named := [row.id for row in (*shut_machines, *unhealthy_machines)]):
        kept = sa.select(reserved_tray).where(reserved_tray.c.machine_id.in_(named))
        owners = owners_of_trays(reservations, dict(map(tuple, conn.execute(kept))))
    # To subtract the few shut ones costs less than to look each machine up in their table.
    special = Counter(domain for machine_id, domain in shut_machines if machine_id not in unhealthy)
    listed: dict[str | None, list[FreeTray[MachineOrSlot]]] = defaultdict(list)
    reserved = {**parameters, "reservations": list(reservations)}
    for domain, reservation_id, count in conn.execute(_RESERVED_BY_DOMAIN, reserved) if reservations else ():
        special[domain] += count
        slot = MachineSlot(domain, reservation_id)
        listed[domain].append(FreeTray(slot, owner=reservations[reservation_id].owner, count=count))
    for machine_id, domain in unhealthy_machines:
        if machine_id not in shut:
            listed[domain].append(FreeTray(machine_id, unhealthy[machine_id], owner=owners.get(machine_id)))
    for machine_id, domain in shut_machines:
        why = shut[machine_id].why
        listed[domain].append(FreeTray(machine_id, shut=why, owner=owners.get(machine_id)))
    for domain, count in conn.execute(_HEALTHY_BY_DOMAIN, parameters):
        listed[domain].insert(0, FreeTray(MachineSlot(domain), count=count - special[domain]))
    return [
        DomainFreeTrays(domain, tuple(listed.get(domain, ())), members.get(domain, 0) if domain else 0)
        for domain in dict.fromkeys((*members, *listed))
    ]


def _machines_of_slots(
    conn: sa.Connection,
    type_id: str,
    trays: Sequence[MachineOrSlot],
    unhealthy: Collection[str],
    reservations: Collection[str],
) -> tuple[str, ...]:
    """The machines for the chosen slots: in each domain and reservation the first ones in rack order."""
    found = {}
    for slot, most in Counter(tray for tray in trays if isinstance(tray, MachineSlot)).items():
        domain, reservation_id = slot
        parameters: dict[str, Any] = {
            "type": type_id,
            "unhealthy": list(unhealthy),
            "reservations": list(reservations) if reservation_id is None else [reservation_id],
            "most": most,
        }
        if domain is not None:
            parameters["domain"] = domain
        first = _FIRST_MACHINES[reservation_id is not None, domain is not None]
        found[slot] = iter(conn.execute(first, parameters).scalars().all())
    return tuple(next(found[tray]) if isinstance(tray, MachineSlot) else tray for tray in trays)


def unhealthy_gpus(conn: sa.Connection, machine_ids: Collection[str] | None) -> dict[str, str]:
    """Machine -> its unhealthy GPUs as the switch controllers report them; of all machines where None."""
    wanted = sa.select(machine_gpu).where(machine_gpu.c.health.in_(UNHEALTHY_STATES))
    if machine_ids is not None:
        wanted = wanted.where(machine_gpu.c.machine_id.in_(machine_ids))
    found: dict[str, list[str]] = defaultdict(list)
    for row in conn.execute(wanted.order_by(machine_gpu.c.machine_id, machine_gpu.c.module_id)):
        health = GpuHealth(row.health).name.lower().replace("_", " ")
        found[row.machine_id].append(f"gpu-{row.module_id - 1} {health}")
    return {machine_id: ", ".join(reasons) for machine_id, reasons in found.items()}


# Capacity.


class InstanceTypeCapacity(msgspec.Struct, frozen=True):
    """Room for machines of one instance type."""

    instance_type_id: str
    free: int
    largest_batch: int
    """Within the tenant's quota."""


class DomainCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a domain, its free capacity, and what the viewer has in it."""

    domain: str
    site_id: str | None
    known: LatestObservation
    pause_reason: str | None
    trays: int
    free: int
    unhealthy: int
    """Empty, and not used because of unhealthy GPUs."""
    foreign: tuple[ForeignTray, ...]
    """Empty, and not used because a partition that the site did not make holds GPUs of theirs. A tray in
    several such partitions is listed with each of them."""
    unlisted: Mapping[str, Collection[int]]
    """Empty, not foreign, and not used because their controller does not list these device instances."""
    reserved: tuple[ReservedTray, ...]
    """Empty and in service, and reserved for other organisations than the viewer's."""
    own_reserved: int
    """Free, and reserved for the viewer."""
    closed: int
    """Empty, and not in service: cordoned, missing, in maintenance, or in a paused or conflicting domain."""
    types: tuple[InstanceTypeCapacity, ...]
    own_instances: int
    own_gpus: Mapping[str, int]
    """GPUs by logical partition of the viewer."""

    @property
    def foreign_count(self) -> int:
        """Trays that are not used because of partitions that the site did not make."""
        return len({tray.machine_id for tray in self.foreign})

    @property
    def largest_batch(self) -> int:
        """The most machines that one request can have in this domain."""
        return max((type_.largest_batch for type_ in self.types), default=0)

    @property
    def fragmentation(self) -> float:
        """Share of the free trays that no single request can have: of other types, or above the quota."""
        return 1 - self.largest_batch / self.free if self.free else 0.0


def capacity_of_domains(
    conn: sa.Connection,
    domains: Collection[str],
    tenant_id: str,
    quota: Mapping[str, AllocationUse] | None,
    now: float,
    valid_from: float = 0.0,
) -> dict[str, DomainCapacity]:
    """The room in `domains` now for a tenant with `quota` (by instance type; None: a provider).

    Readings from before `valid_from` do not count.
    """
    by_domain: dict[str, list[sa.Row[Any]]] = defaultdict(list)
    listed = catalog.machine_listing().add_columns(is_in_service.label("in_service"))
    for row in conn.execute(listed.where(machine.c.domain.in_(domains)).order_by(machine.c.id)):
        by_domain[row.domain].append(row)
    machine_ids = [row.id for rows in by_domain.values() for row in rows]
    unhealthy = unhealthy_gpus(conn, machine_ids)
    held = ownership.foreign_trays(conn, machine_ids)
    unlisted = unlisted_gpus(conn, machine_ids)
    reserved = reserved_trays(conn, now, machine_ids)
    others = {tray.machine_id for tray in reserved.values() if tray.tenant_id != tenant_id}
    known = latest.latest_of_domains(conn, domains, valid_from)
    pauses = {row.domain: row.reason for row in conn.execute(sa.select(domain_pause))}
    own = _gpus_of_tenant(conn, domains, tenant_id)
    allocated = {type_id for type_id, use in (quota or {}).items() if use.allocated is not None}
    capacities = {}
    for domain in domains:
        rows = by_domain[domain]
        # From all trays to those that a request can have: empty, in service, of an allocated type, not shut,
        # not kept for others, healthy. Each number of the result counts the trays that one step leaves out.
        empty = [row for row in rows if row.instance_id is None]
        open_trays = [row for row in empty if row.in_service]
        allowed = [row for row in open_trays if quota is None or row.instance_type_id in allocated]
        unshut = [row for row in allowed if row.id not in held and row.id not in unlisted]
        usable = [row for row in unshut if row.id not in others]
        healthy = [row for row in usable if row.id not in unhealthy and row.instance_type_id]
        # A tenant learns nothing of a tray that is kept for others; a provider learns of its partition.
        unkept = [row for row in allowed if quota is None or row.id not in others]
        free = Counter(row.instance_type_id for row in healthy)
        own_reserved = Counter(row.instance_type_id for row in healthy if row.id in reserved)
        capacities[domain] = DomainCapacity(
            domain=domain,
            site_id=min((row.site_id for row in rows), default=None),
            known=known[domain],
            pause_reason=pauses.get(domain),
            trays=len(rows),
            free=free.total(),
            unhealthy=sum(row.id in unhealthy for row in usable),
            foreign=tuple(tray for row in unkept for tray in held.get(row.id, ())),
            unlisted={
                row.id: unlisted[row.id] for row in unkept if row.id in unlisted and row.id not in held
            },
            reserved=tuple(reserved[row.id] for row in unshut if row.id in others),
            own_reserved=own_reserved.total(),
            closed=len(empty) - len(open_trays),
            types=tuple(
                InstanceTypeCapacity(
                    type_id,
                    count,
                    count if quota is None else quota[type_id].largest_request(count, own_reserved[type_id]),
                )
                for type_id, count in sorted(free.items())
            ),
            own_instances=sum(row.tenant_id == tenant_id for row in rows),
            own_gpus=own[domain],
        )
    return capacities


def _gpus_of_tenant(
    conn: sa.Connection, domains: Collection[str], tenant_id: str
) -> dict[str, dict[str, int]]:
    partition = nvlink_interface.c.logical_partition_id
    counted = (
        sa.select(machine.c.domain, partition, sa.func.count().label("gpus"))
        .select_from(nvlink_interface)
        .join(instance, instance.c.id == nvlink_interface.c.instance_id)
        .join(machine, machine.c.id == instance.c.machine_id)
        .where(
            instance.c.tenant_id == tenant_id,
            machine.c.domain.in_(domains),
            nvlink_interface.c.status != Status.DELETING,
        )
        .group_by(machine.c.domain, partition)
        .order_by(partition)
    )
    found: dict[str, dict[str, int]] = {domain: {} for domain in domains}
    for row in conn.execute(counted):
        found[row.domain][row.logical_partition_id] = row.gpus
    return found
