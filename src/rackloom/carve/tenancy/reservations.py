"""Reservations of trays: a provider keeps trays of its site for an organisation until a time.

A reservation holds certain trays of one instance type. The provider names them, or a number of them: then
the placement search chooses among healthy empty trays that no reservation keeps, all in one NVLink domain
unless the order allows several. A tray is in one reservation that counts at most. One that carries another
organisation's instance cannot be reserved, and the refusal names the organisation. A tray stays reserved when
it goes into maintenance, becomes foreign or gets sick: it is not replaced, but the reservation shows it.

Allocations limit how many machines of a type a tenant may use. Reservations keep certain ones for it. So the
trays that a tenant uses and those that wait for it may together not exceed its allocations. The
quota `reservedTrays` limits how much of a site waits for one organisation.

A reservation ends at its time without a write (`reserved_trays`). It can be ended earlier, but a past one
cannot be extended, because its trays may be in use by others. Each order is recorded as an operator step of
each tray.
"""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.observation.latest import rfc3339
from rackloom.carve.store import journal
from rackloom.carve.store.journal import OperatorOrder, Step
from rackloom.carve.store.prepared import delete_rows, has_row, insert_row, require, update_rows
from rackloom.carve.store.schema import instance, machine, reserved_tray, site, tenant, tray_reservation
from rackloom.carve.store.values import IdFactory, conflict, invalid
from rackloom.carve.tenancy import catalog, entitlements, placement
from rackloom.core.place.instance_trays import TrayRequest, given_up

MAX_SECONDS = 366 * 86_400.0
"""The longest time ahead: a forgotten reservation ends within a year."""

MAX_TRAYS = 4096
"""The most trays of one reservation."""


class ReservationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Trays to keep for a tenant: either those of `machine_ids`, or `count` of an instance type."""

    tenant_id: str
    until: float
    machine_ids: tuple[str, ...] | None = None
    type_id: str | None = None
    count: int = 0
    domain: str | None = None
    """Only trays of this NVLink domain."""
    rack: str | None = None
    one_domain: bool = True


def create_reservation(
    conn: sa.Connection, provider_id: str, request: ReservationRequest, order: OperatorOrder, ids: IdFactory
) -> str:
    """Keep trays for a tenant. Return the id of the reservation."""
    _check_end(request.until, order.now)
    if not has_row(conn, tenant, id=request.tenant_id):
        raise invalid("Could not find Tenant with ID specified in request", tenantId="does not exist")
    machine_ids = _wanted_machines(conn, provider_id, request, order.now)
    type_id = _type_of_machines(conn, provider_id, machine_ids)
    _check_machines(conn, request.tenant_id, machine_ids, order.now)
    _check_room(conn, request.tenant_id, type_id, machine_ids, order.now)
    new = ids()
    insert_row(
        conn,
        tray_reservation,
        id=new,
        tenant_id=request.tenant_id,
        site_id=catalog.get_instance_type(conn, type_id).site_id,
        instance_type_id=type_id,
        reason=order.reason,
        asked_by=order.by,
        until=request.until,
        created=order.now,
        updated=order.now,
    )
    _insert_trays(conn, new, machine_ids)
    _record_step(conn, Step.RESERVE, machine_ids, order)
    return new


def update_reservation(
    conn: sa.Connection,
    provider_id: str,
    reservation_id: str,
    *,
    until: float | None,
    machine_ids: Sequence[str] | None,
    count: int | None,
    order: OperatorOrder,
) -> None:
    """Change the end, the trays, or their number. None leaves it. Unused trays are given up first."""
    row = get_reservation(conn, provider_id, reservation_id)
    if reservation_id not in placement.reservations_in_force(conn, order.now):
        raise conflict(f"Reservation ended at {rfc3339(row.until)}", nearest_fix="make a new reservation")
    before = trays_of_reservations(conn, [reservation_id])[reservation_id]
    if count is not None:
        if count > len(before):
            raise invalid(
                f"Reservation holds {len(before)} trays",
                nearest_fix="name the trays in machineIds, or make another reservation for more",
            )
        machine_ids = sorted(set(before) - set(given_up(before, _carrying(conn, before), count)))
    if machine_ids is not None:
        added, removed = sorted(set(machine_ids) - set(before)), sorted(set(before) - set(machine_ids))
        # Remove trays first: they must no longer count when the room for new ones is checked.
        if removed:
            of_this = reserved_tray.c.reservation_id == reservation_id
            conn.execute(sa.delete(reserved_tray).where(of_this, reserved_tray.c.machine_id.in_(removed)))
        if added:
            if _type_of_machines(conn, provider_id, added) != row.instance_type_id:
                raise invalid(
                    "Error validating Tray Reservation",
                    machineIds="must be of the reservation's Instance Type",
                )
            _check_machines(conn, row.tenant_id, added, order.now)
            _check_room(conn, row.tenant_id, row.instance_type_id, added, order.now)
            _insert_trays(conn, reservation_id, added)
    if until is not None:
        _check_end(until, order.now)
        update_rows(conn, tray_reservation, {"id": reservation_id}, until=until)
    update_rows(conn, tray_reservation, {"id": reservation_id}, updated=order.now)
    _record_step(conn, Step.CHANGE_RESERVATION, sorted({*before, *(machine_ids or ())}), order)


def delete_reservation(
    conn: sa.Connection, provider_id: str, reservation_id: str, order: OperatorOrder
) -> None:
    """Free the trays of a reservation. Instances on them stay."""
    get_reservation(conn, provider_id, reservation_id)
    machine_ids = trays_of_reservations(conn, [reservation_id])[reservation_id]
    delete_rows(conn, reserved_tray, reservation_id=reservation_id)
    delete_rows(conn, tray_reservation, id=reservation_id)
    _record_step(conn, Step.END_RESERVATION, machine_ids, order)


def get_reservation(conn: sa.Connection, provider_id: str, reservation_id: str) -> sa.Row[Any]:
    """A reservation at a site of the provider. Raises Rejected (not found)."""
    mine = (
        sa.select(tray_reservation)
        .join(site, site.c.id == tray_reservation.c.site_id)
        .where(tray_reservation.c.id == reservation_id, site.c.provider_id == provider_id)
    )
    return require(conn.execute(mine).one_or_none(), "Could not find Tray Reservation with specified ID")


def trays_of_reservations(conn: sa.Connection, reservation_ids: Collection[str]) -> dict[str, list[str]]:
    """The machines of each reservation, in rack order."""
    rows = conn.execute(
        sa.select(reserved_tray)
        .join(machine, machine.c.id == reserved_tray.c.machine_id)
        .where(reserved_tray.c.reservation_id.in_(reservation_ids))
        .order_by(machine.c.rack, machine.c.chassis_serial, machine.c.slot)
    )
    found: dict[str, list[str]] = {reservation_id: [] for reservation_id in reservation_ids}
    for row in rows:
        found[row.reservation_id].append(row.machine_id)
    return found


# Rules.


def _check_end(until: float, now: float) -> None:
    if not now < until <= now + MAX_SECONDS:
        raise invalid(
            "Error validating Tray Reservation", until=f"must be after {rfc3339(now)}, within 366 days"
        )


def _wanted_machines(
    conn: sa.Connection, provider_id: str, request: ReservationRequest, now: float
) -> Sequence[str]:
    """The machines that the request names, or those that the search chooses."""
    if max(request.count, len(request.machine_ids or ())) > MAX_TRAYS:
        raise invalid("Error validating Tray Reservation", count=f"must be at most {MAX_TRAYS}")
    if request.machine_ids is not None:
        return sorted(set(request.machine_ids))
    if request.type_id is None:
        raise invalid(
            "Exactly one of instanceTypeId and machineIds must be specified", instanceTypeId="is missing"
        )
    catalog.instance_type_of_provider(conn, provider_id, request.type_id)
    return placement.choose_unreserved_trays(
        conn,
        TrayRequest(request.count, request.one_domain),
        type_id=request.type_id,
        domain=request.domain,
        rack=request.rack,
        now=now,
    ).trays


def _type_of_machines(conn: sa.Connection, provider_id: str, machine_ids: Collection[str]) -> str:
    """The instance type of the machines, which must be the provider's and of one type."""
    rows = conn.execute(
        sa.select(machine.c.id, machine.c.instance_type_id).where(
            machine.c.id.in_(machine_ids), entitlements.operates_machine(provider_id)
        )
    ).all()
    if missing := sorted(set(machine_ids) - {row.id for row in rows}):
        raise invalid("Could not find Machines with IDs specified in request", machineIds=", ".join(missing))
    types = {row.instance_type_id for row in rows}
    if len(types) != 1 or None in types:
        raise invalid("Error validating Tray Reservation", machineIds="must all be of the same Instance Type")
    return str(types.pop())


def _check_machines(conn: sa.Connection, tenant_id: str, machine_ids: Collection[str], now: float) -> None:
    """Refuse machines that are reserved already, or carry an instance of another tenant."""
    placement.check_unreserved(conn, machine_ids, now)
    used = conn.execute(
        sa.select(instance.c.machine_id, instance.c.id, tenant.c.org)
        .join(tenant, tenant.c.id == instance.c.tenant_id)
        .where(instance.c.machine_id.in_(machine_ids), instance.c.tenant_id != tenant_id)
        .order_by(instance.c.machine_id)
    )
    for row in used:
        raise conflict(
            f"Machine {row.machine_id} carries Instance {row.id} of {row.org}",
            nearest_fix="choose another machine, or reserve it when the instance is gone",
        )


def _check_room(
    conn: sa.Connection, tenant_id: str, type_id: str, machine_ids: Collection[str], now: float
) -> None:
    """Refuse more trays than the tenant's allocations or its quota of reserved trays leave room for."""
    uses = entitlements.allocation_uses(conn, tenant_id, now)
    left = max(0, uses[type_id].unreserved) if type_id in uses else 0
    idle = len(machine_ids) - len(_carrying(conn, machine_ids))
    if idle > left:
        raise conflict(
            f"Allocations of the Tenant leave room for {left} more machines of the Instance Type, requested"
            f" {idle}",
            nearest_fix="allocate more machines of the Instance Type to the Tenant first",
        )
    entitlements.check_object_quota(
        conn, tenant_id, entitlements.QuotaKind.RESERVED_TRAYS, len(machine_ids), now
    )


def _insert_trays(conn: sa.Connection, reservation_id: str, machine_ids: Collection[str]) -> None:
    # Rows of reservations that have ended give way.
    conn.execute(sa.delete(reserved_tray).where(reserved_tray.c.machine_id.in_(machine_ids)))
    conn.execute(
        sa.insert(reserved_tray),
        [{"machine_id": machine_id, "reservation_id": reservation_id} for machine_id in machine_ids],
    )


def _carrying(conn: sa.Connection, machine_ids: Collection[str]) -> set[str]:
    carrying = sa.select(instance.c.machine_id).where(instance.c.machine_id.in_(machine_ids))
    return set(conn.execute(carrying).scalars())


def _record_step(conn: sa.Connection, step: Step, machine_ids: Collection[str], order: OperatorOrder) -> None:
    # By tray: its operator reads its steps.
    for machine_id, domain in sorted(catalog.domains_of_machines(conn, machine_ids).items()):
        journal.record_operator_step(conn, step, machine_id, domain, order)
