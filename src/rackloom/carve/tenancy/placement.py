"""Placement of new instances on free machines, and the trays that it withholds.

`place_instances` builds the input of the placement search: for each domain, the empty machines of the type
that are in service. Not in service are machines that are cordoned, missing, not Ready, or in a domain that
is paused or has a conflict. Few machines are unhealthy or shut, so only these are named. The others are
counted in the database, also for each reservation, and stand in the search as interchangeable slots. After
the search each slot becomes the next machine in rack, chassis and slot order. A request that the site cannot
place is refused as a conflict, with the nearest fix. `choose_unreserved_trays` chooses trays for a new
reservation by the same rules.

Two kinds of trays are withheld:

- A reserved tray waits for one organisation only, so it has one row. `in_force` decides whether its
  reservation counts, when it is read, with the site's clock. So all replicas agree, and
  nothing has to run when a reservation ends. Reservations are few. Their trays may be many, and are read only
  for the machines in question. `reservations` makes and changes them.
- A tray is shut if its GPUs could not join a partition now. A partition that the site did not make holds a
  GPU of it (`partitions.ownership`), or the newest valid reading of its domain lists GPUs of the tray, but
  not all that are recorded there. The inventory sync marks an unlisted GPU in place of its last health, which
  means nothing any more. A tray without any listed GPU is missing, and its machine shows that. While a
  domain cannot be read, its trays stay as they were last seen.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from rackloom.carve.observation.latest import rfc3339
from rackloom.carve.partitions import ownership
from rackloom.carve.partitions.ownership import foreign_partition_text, is_in_foreign_partition
from rackloom.carve.store.prepared import owned_by
from rackloom.carve.store.schema import (
    cordon,
    domain_dispute,
    domain_pause,
    instance,
    machine,
    machine_gpu,
    nvlink_interface,
    reserved_tray,
    tenant,
    tray_reservation,
)
from rackloom.carve.store.values import RefusalKind, Rejected, Status, conflict
from rackloom.core.partitions.domain import GpuHealth
from rackloom.core.place.instance_trays import (
    DomainFreeTrays,
    FreeTray,
    Reservation,
    TrayChoice,
    TrayId,
    TrayRequest,
    choose_trays,
    in_force,
    owners_of_trays,
)
from rackloom.errors import Refused
from rackloom.topology.part_names import PartName

# Reserved trays.


# Built once: every new instance runs these.
_RESERVATIONS = sa.select(tray_reservation.c.id, tray_reservation.c.tenant_id, tray_reservation.c.until)
is_in_reservations = machine.c.id.in_(
    sa.select(reserved_tray.c.machine_id).where(
        reserved_tray.c.reservation_id.in_(sa.bindparam("reservations", expanding=True))
    )
)
"""Whether a row of the machine table is in one of the reservations of the parameter."""
_TRAYS = (
    sa.select(
        reserved_tray.c.machine_id,
        tray_reservation.c.id,
        tray_reservation.c.tenant_id,
        tenant.c.org,
        tray_reservation.c.until,
    )
    .join(tray_reservation, tray_reservation.c.id == reserved_tray.c.reservation_id)
    .join(tenant, tenant.c.id == tray_reservation.c.tenant_id)
    .order_by(reserved_tray.c.machine_id)
)


class ReservedTray(msgspec.Struct, frozen=True):
    """A tray that is kept for an organisation."""

    machine_id: str
    reservation_id: str
    tenant_id: str
    org: str
    until: float

    def text(self) -> str:
        """For operators: tenants do not learn of other tenants."""
        return f"reserved for {self.org} until {rfc3339(self.until)}"


def reservations_in_force(conn: sa.Connection, now: float) -> dict[str, Reservation]:
    """The reservations that count now, by id."""
    return in_force((Reservation(*row) for row in conn.execute(_RESERVATIONS)), now)


def reserved_trays(
    conn: sa.Connection, now: float, machine_ids: Collection[str] | None
) -> dict[str, ReservedTray]:
    """The trays of `machine_ids` that are reserved now, by machine. None stands for all machines."""
    wanted = _TRAYS if machine_ids is None else _TRAYS.where(reserved_tray.c.machine_id.in_(machine_ids))
    kept = [ReservedTray(*row) for row in conn.execute(wanted)]
    counting = in_force((Reservation(tray.reservation_id, tray.tenant_id, tray.until) for tray in kept), now)
    return {tray.machine_id: tray for tray in kept if tray.reservation_id in counting}


def count_reserved_trays(conn: sa.Connection, tenant_id: str, now: float) -> int:
    """The number of trays that are reserved for the tenant now."""
    return _of_tenant(conn, tenant_id, now, sa.true()).total()


def idle_reserved_machines(conn: sa.Connection, tenant_id: str, now: float) -> Mapping[str, int]:
    """Instance type -> machines that are reserved for the tenant now and carry none of its instances."""
    own = sa.select(instance.c.machine_id).where(owned_by(instance.c.tenant_id, tenant_id))
    return _of_tenant(conn, tenant_id, now, machine.c.id.not_in(own))


def check_unreserved(conn: sa.Connection, machine_ids: Collection[str], now: float) -> None:
    """Refuse a change of machines that are reserved: it would take them from the reservation."""
    for tray in reserved_trays(conn, now, machine_ids).values():
        raise conflict(
            f"Machine {tray.machine_id} is {tray.text()}",
            nearest_fix=f"remove it from reservation {tray.reservation_id} first",
        )


def _of_tenant(
    conn: sa.Connection, tenant_id: str, now: float, condition: sa.ColumnElement[bool]
) -> Counter[str]:
    owned = conn.execute(_RESERVATIONS.where(owned_by(tray_reservation.c.tenant_id, tenant_id)))
    if not (mine := list(in_force((Reservation(*row) for row in owned), now))):
        return Counter()
    counted: sa.Select[Any] = (
        sa.select(machine.c.instance_type_id, sa.func.count())
        .where(is_in_reservations, condition)
        .group_by(machine.c.instance_type_id)
    )
    return Counter(dict(map(tuple, conn.execute(counted, {"reservations": mine}))))


# Trays that are shut.


UNLISTED = -1
"""Recorded as the health of a GPU that the controller does not list. No `GpuHealth` has this number."""

# Built once: every new instance runs these.
_is_unlisted = machine_gpu.c.health == UNLISTED
is_shut = sa.or_(
    is_in_foreign_partition, machine.c.id.in_(sa.select(machine_gpu.c.machine_id).where(_is_unlisted))
)
"""Whether a row of the machine table is a tray that is shut."""
_UNLISTED_GPUS = (
    sa.select(machine_gpu.c.machine_id, machine_gpu.c.module_id, machine.c.rack, machine.c.slot)
    .join(machine, machine.c.id == machine_gpu.c.machine_id)
    .where(_is_unlisted)
    .order_by(machine_gpu.c.machine_id, machine_gpu.c.module_id)
)

FOREIGN_FIX = "have the operator of the site adopt or release the partitions that it did not make"
UNLISTED_FIX = "have the operator of the site find out why switch controllers do not list all GPUs"


class ShutTray(msgspec.Struct, frozen=True):
    """The reason why a tray is shut, and the remedy. Tenants read both."""

    why: str
    fix: str


def shut_trays(conn: sa.Connection, machine_ids: Collection[str] | None) -> dict[str, ShutTray]:
    """The trays of `machine_ids` that are shut. None stands for all machines."""
    found = {
        machine_id: ShutTray(foreign_partition_text([tray.partition_id for tray in trays]), FOREIGN_FIX)
        for machine_id, trays in ownership.foreign_trays(conn, machine_ids).items()
    }
    for machine_id, gpus in unlisted_gpus(conn, machine_ids).items():
        found.setdefault(machine_id, ShutTray(unlisted_text(gpus), UNLISTED_FIX))
    return found


def unlisted_gpus(conn: sa.Connection, machine_ids: Collection[str] | None) -> dict[str, dict[int, PartName]]:
    """Machine -> device instance and name of its unlisted GPUs. None stands for all machines."""
    wanted = _UNLISTED_GPUS
    if machine_ids is not None:
        wanted = wanted.where(machine_gpu.c.machine_id.in_(machine_ids))
    found: dict[str, dict[int, PartName]] = defaultdict(dict)
    for machine_id, module_id, rack, slot in conn.execute(wanted):
        found[machine_id][module_id - 1] = PartName(rack, slot, gpu=module_id - 1)
    return dict(found)


def unlisted_text(gpus: Iterable[int]) -> str:
    """The reason why a tray with unlisted GPUs is not free. Tenants know its machine, and not its rack."""
    return f"{' and '.join(f'gpu-{number}' for number in gpus)} not listed by the switch controller"


# Placement.


UNHEALTHY_STATES = (GpuHealth.DEGRADED, GpuHealth.NO_NVLINK, GpuHealth.DEGRADED_BANDWIDTH)


# Built once: every new instance runs these.
_unhealthy_param: sa.BindParameter[str] = sa.bindparam("unhealthy", expanding=True)
_closed_domains = sa.union_all(sa.select(domain_pause.c.domain), sa.select(domain_dispute.c.domain))
_cordon_alias = cordon.alias()
is_cordoned = sa.exists().where(_cordon_alias.c.machine_id == machine.c.id)
is_in_service = sa.and_(
    machine.c.status == Status.READY,
    machine.c.missing_since.is_(None),
    sa.or_(machine.c.domain.is_(None), machine.c.domain.not_in(_closed_domains)),
    ~is_cordoned,
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


def partition_members(conn: sa.Connection, logical_partitions: Collection[str]) -> dict[str, dict[str, int]]:
    """Logical partition -> domain -> how many GPUs are, or shall be, in it."""
    partition = nvlink_interface.c.logical_partition_id
    counted = (
        sa.select(partition, machine.c.domain, sa.func.count().label("members"))
        .select_from(nvlink_interface)
        .join(instance, instance.c.id == nvlink_interface.c.instance_id)
        .join(machine, machine.c.id == instance.c.machine_id)
        .where(
            partition.in_(logical_partitions),
            nvlink_interface.c.status != Status.DELETING,
            instance.c.status != Status.TERMINATING,
            machine.c.domain.is_not(None),
        )
        .group_by(partition, machine.c.domain)
    )
    found: dict[str, dict[str, int]] = {}
    for row in conn.execute(counted):
        found.setdefault(row.logical_partition_id, {})[row.domain] = row.members
    return found


def place_instances(
    conn: sa.Connection,
    request: TrayRequest,
    *,
    type_id: str,
    logical_partitions: Collection[str],
    now: float,
) -> TrayChoice[str]:
    """Machines of the type for `request`. Refused as a conflict if the site has no room."""
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
    # The tenants that the named machines are kept for.
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
    """Machine -> its unhealthy GPUs as the switch controllers report them. None stands for all machines."""
    wanted = sa.select(machine_gpu).where(machine_gpu.c.health.in_(UNHEALTHY_STATES))
    if machine_ids is not None:
        wanted = wanted.where(machine_gpu.c.machine_id.in_(machine_ids))
    found: dict[str, list[str]] = defaultdict(list)
    for row in conn.execute(wanted.order_by(machine_gpu.c.machine_id, machine_gpu.c.module_id)):
        health = GpuHealth(row.health).name.lower().replace("_", " ")
        found[row.machine_id].append(f"gpu-{row.module_id - 1} {health}")
    return {machine_id: ", ".join(reasons) for machine_id, reasons in found.items()}
