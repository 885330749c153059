"""RPCs about reserved trays: the trays that each organisation has reserved, and until when.

The rules are those of REST, in `carve.tenancy.reservations`. An operator acts for the provider of the site
and names organisations instead of tenants.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rackloom.carve.admin import operator_pb2 as pb
from rackloom.carve.admin.deps import AdminDeps, timestamp
from rackloom.carve.store.schema import site, tenant, tray_reservation
from rackloom.carve.store.values import invalid, not_found
from rackloom.carve.tenancy import reservations
from rackloom.carve.tenancy.placement import reservations_in_force
from rackloom.carve.tenancy.reservations import ReservationRequest


async def list_all(deps: AdminDeps, request: pb.TrayReservationsRequest) -> pb.TrayReservationList:
    """The reservations for one organisation or all, by their end. Past reservations are included."""

    def read(conn: sa.Connection) -> list[pb.TrayReservation]:
        rows = _rows()
        if request.tenant_organization_id:
            rows = rows.where(tenant.c.org == request.tenant_organization_id.lower())
        return _messages(conn, conn.execute(rows).all(), deps.clock())

    return pb.TrayReservationList(reservations=await deps.store.read(read))


async def create(deps: AdminDeps, request: pb.TrayReservationOrder) -> pb.TrayReservation:
    """Keep trays for an organisation until a time."""
    org = request.tenant_organization_id.lower()
    choice = (request.instance_type_id, request.count, request.domain, request.rack, request.may_span_domains)
    if request.machine_ids and any(choice):
        raise invalid("machine_ids names the trays: no field for their choice goes with it")

    def create(conn: sa.Connection) -> sa.Row[Any]:
        tenant_id = conn.execute(sa.select(tenant.c.id).where(tenant.c.org == org)).scalar_one_or_none()
        if tenant_id is None:
            raise not_found(f"there is no organisation {org}")
        order = deps.order(request.reason)
        wanted = ReservationRequest(
            tenant_id=tenant_id,
            until=request.until.ToMicroseconds() / 1e6,
            machine_ids=tuple(request.machine_ids) or None,
            type_id=request.instance_type_id or None,
            count=request.count or 1,
            domain=request.domain or None,
            rack=request.rack or None,
            one_domain=not request.may_span_domains,
        )
        new = reservations.create_reservation(conn, _provider_id(conn), wanted, order, deps.ids)
        return conn.execute(_rows().where(tray_reservation.c.id == new)).one()

    row = await deps.store.run(create)
    (made,) = await deps.store.read(lambda conn: _messages(conn, [row], deps.clock()))
    return made


async def delete(deps: AdminDeps, request: pb.TrayReservationDeletion) -> pb.Done:
    """Free the trays of a reservation now. Instances on them stay."""
    await deps.store.run(
        lambda conn: reservations.delete_reservation(
            conn, _provider_id(conn), request.id, deps.order(request.reason)
        )
    )
    return pb.Done(message=f"reservation {request.id} is deleted")


def _provider_id(conn: sa.Connection) -> str:
    return str(conn.execute(sa.select(site.c.provider_id)).scalar_one())


def _rows() -> sa.Select[Any]:
    rows = sa.select(tray_reservation, tenant.c.org)
    return rows.join(tenant, tenant.c.id == tray_reservation.c.tenant_id).order_by(
        tray_reservation.c.until, tray_reservation.c.id
    )


def _messages(conn: sa.Connection, rows: Sequence[sa.Row[Any]], now: float) -> list[pb.TrayReservation]:
    trays = reservations.trays_of_reservations(conn, [row.id for row in rows])
    active = reservations_in_force(conn, now)
    return [
        pb.TrayReservation(
            id=row.id,
            tenant_organization_id=row.org,
            instance_type_id=row.instance_type_id,
            until=timestamp(row.until),
            is_active=row.id in active,
            reason=row.reason,
            asked_by=row.asked_by,
            machine_ids=trays[row.id],
        )
        for row in rows
    ]
