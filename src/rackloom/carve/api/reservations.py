"""REST: reservations of trays that a provider made, or that are for a tenant.

A tenant sees the number of trays in its reservation, their NVLink domains and the end. It sees no trays of a
reservation that has ended: they may serve others by then. Only the operator of the machines sees them, their
states and the reason.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal, Self
from uuid import UUID

import sqlalchemy as sa
from fastapi import Path
from pydantic import AwareDatetime, Field, StrictInt, model_validator

from rackloom.carve.api import access, routing, wire
from rackloom.carve.api.auth import Caller
from rackloom.carve.api.routing import (
    AnySelect,
    Deps,
    Page,
    Params,
    ProviderAdmin,
    Reader,
    Row,
    Rows,
)
from rackloom.carve.api.wire import Json
from rackloom.carve.partitions import ownership
from rackloom.carve.store.journal import OperatorOrder
from rackloom.carve.store.prepared import require
from rackloom.carve.store.schema import machine, site, tenant, tray_reservation
from rackloom.carve.store.values import Status
from rackloom.carve.tenancy import catalog, entitlements, placement, reservations
from rackloom.carve.tenancy.placement import unlisted_gpus
from rackloom.carve.tenancy.reservations import MAX_TRAYS, ReservationRequest
from rackloom.core.place.instance_trays import Reservation, in_force

# Request models.


MachineIds = Annotated[list[wire.Text], Field(min_length=1, max_length=MAX_TRAYS)]
TrayCount = Annotated[StrictInt, Field(ge=1, le=MAX_TRAYS)]


class TrayReservationCreate(wire.Because):
    """Trays to reserve for a tenant: those in `machineIds`, or `count` of an instance type."""

    tenant_id: UUID
    until: AwareDatetime
    machine_ids: MachineIds | None = None
    instance_type_id: UUID | None = None
    count: TrayCount = 1
    nvlink_domain_id: Annotated[wire.Text | None, Field(alias="nvLinkDomainId")] = None
    rack: wire.Text | None = None
    topology_optimized: bool = True
    """Whether all trays must be in one NVLink domain."""

    @model_validator(mode="after")
    def _machines_or_number(self) -> Self:
        search = {"instance_type_id", "count", "nvlink_domain_id", "rack", "topology_optimized"}
        if self.machine_ids is not None and self.model_fields_set & search:
            raise ValueError("machineIds names the trays: no field for their choice goes with it")
        return self


class TrayReservationUpdate(wire.Because):
    """A new end, other trays, or fewer trays. Omitted fields stay unchanged."""

    until: AwareDatetime | None = None
    machine_ids: MachineIds | None = None
    count: TrayCount | None = None

    @model_validator(mode="after")
    def _machines_or_number(self) -> Self:
        if self.machine_ids is not None and self.count is not None:
            raise ValueError("machineIds and count exclude each other")
        return self


# Query parameters.


class TrayReservationQuery(wire.PageQuery):
    """Filters on reservations."""

    site_id: UUID | None = None
    tenant_id: wire.UuidFilter = []
    instance_type_id: wire.UuidFilter = []
    is_active: bool | None = None


# Response models.


class ReservedMachine(wire.Answer):
    """A tray of a reservation. `state` is `Ready`, or the reason why it cannot take a new instance."""

    machine_id: str
    nvlink_domain_id: Annotated[str | None, Field(alias="nvLinkDomainId")]
    rack: str
    state: str


class TrayReservation(wire.Timed):
    """Trays that are reserved for a tenant until a time."""

    id: UUID
    tenant_id: UUID
    site_id: UUID
    instance_type_id: UUID
    status: Literal["Active", "Ended"]
    until: datetime
    trays: int
    ready_trays: int
    """The number of trays that a new instance of the tenant can get."""
    in_use_trays: int
    nvlink_domain_ids: Annotated[list[str], Field(alias="nvLinkDomainIds")]
    org: Annotated[str | None, Field(json_schema_extra=access.PROVIDERS_ONLY)]
    reason: Annotated[str | None, Field(json_schema_extra=access.PROVIDERS_ONLY)]
    asked_by: Annotated[str | None, Field(json_schema_extra=access.PROVIDERS_ONLY)]
    machines: Annotated[list[ReservedMachine] | None, Field(json_schema_extra=access.PROVIDERS_ONLY)]


# From rows to responses.


def _shapes(conn: sa.Connection, rows: Rows, now: float) -> list[Json]:
    ids = [row.id for row in rows]
    trays = reservations.trays_of_reservations(conn, ids)
    machines, users = _machines(conn, [machine_id for held in trays.values() for machine_id in held])
    active = in_force((Reservation(row.id, row.tenant_id, row.until) for row in rows), now)
    return [_shape(row, [machines[name] for name in trays[row.id]], users, row.id in active) for row in rows]


def _machines(conn: sa.Connection, machine_ids: list[str]) -> tuple[dict[str, Json], dict[str, str]]:
    """The machines as shown, and the tenant that uses each."""
    listed = catalog.machine_listing().add_columns(placement.is_in_service.label("in_service"))
    held = ownership.foreign_trays(conn, machine_ids)
    unlisted = unlisted_gpus(conn, machine_ids)
    unhealthy = placement.unhealthy_gpus(conn, machine_ids)

    def state(row: Row) -> str:
        if row.shown_status == Status.UNKNOWN and row.missing_since is not None:
            return "Missing"
        if row.shown_status != Status.READY:
            return str(row.shown_status)
        if not row.in_service:
            return "DomainClosed"
        states = (("Foreign", held), ("Unlisted", unlisted), ("Unhealthy", unhealthy))
        return next((name for name, trays in states if row.id in trays), Status.READY)

    rows = conn.execute(listed.where(machine.c.id.in_(machine_ids))).all()
    shown = {
        row.id: {"machineId": row.id, "nvLinkDomainId": row.domain, "rack": row.rack, "state": state(row)}
        for row in rows
    }
    return shown, {row.id: row.tenant_id for row in rows if row.tenant_id is not None}


def _shape(row: Row, machines: list[Json], users: Mapping[str, str], is_active: bool) -> Json:
    # After the end the trays are free for others, so the former owner may not see their use.
    counted = machines if is_active or row.is_provided else []
    domains = {shown["nvLinkDomainId"] for shown in counted} - {None}
    return wire.shape(
        TrayReservation,
        row,
        status="Active" if is_active else "Ended",
        trays=len(counted),
        ready_trays=sum(shown["state"] == Status.READY for shown in counted),
        in_use_trays=sum(users.get(shown["machineId"]) == row.tenant_id for shown in counted),
        nvlink_domain_ids=sorted(domains),
        org=row.org if row.is_provided else None,
        reason=row.reason if row.is_provided else None,
        asked_by=row.asked_by if row.is_provided else None,
        machines=machines if row.is_provided else None,
    )


# Routes.


router = routing.Operations()

ONE = "/tray-reservation/{trayReservationId}"
ReservationId = Annotated[UUID, Path(alias="trayReservationId")]


@router.page("/tray-reservation", "get-all-tray-reservation", list[TrayReservation])
def list_reservations(
    conn: sa.Connection, deps: Deps, caller: Reader, query: Params[TrayReservationQuery]
) -> Page:
    """The reservations that the caller made or that are for it, past ones too."""
    now, visible = deps.clock(), _visible(conn, caller)
    if query.is_active is not None:
        # The same as `in_force`, for all of the caller's reservations.
        visible = visible.where((tray_reservation.c.until > now) == query.is_active)
    listing = routing.Listing(
        shapes=lambda conn, rows, _query: _shapes(conn, rows, now),
        order={**routing.order_of(tray_reservation), "UNTIL": tray_reservation.c.until},
        filters={name: tray_reservation.c[name] for name in ("site_id", "tenant_id", "instance_type_id")},
    )
    return listing.page(conn, visible, query)


@router.create("/tray-reservation", "create-tray-reservation", TrayReservation)
def create(conn: sa.Connection, deps: Deps, caller: ProviderAdmin, body: TrayReservationCreate) -> Json:
    """Reserve trays for a tenant until a time."""
    request = ReservationRequest(
        tenant_id=str(body.tenant_id),
        until=body.until.timestamp(),
        machine_ids=None if body.machine_ids is None else tuple(body.machine_ids),
        type_id=None if body.instance_type_id is None else str(body.instance_type_id),
        count=body.count,
        domain=body.nvlink_domain_id,
        rack=body.rack,
        one_domain=body.topology_optimized,
    )
    provider_id = entitlements.provider_id_of(conn, caller.org)
    order = routing.operator_order(deps, caller, body)
    new = reservations.create_reservation(conn, provider_id, request, order, deps.ids)
    return get(conn, deps, caller, UUID(new))


@router.get(ONE, "get-tray-reservation", TrayReservation)
def get(conn: sa.Connection, deps: Deps, caller: Reader, reservation_id: ReservationId) -> Json:
    """One reservation."""
    mine = _visible(conn, caller).where(tray_reservation.c.id == str(reservation_id))
    row = require(conn.execute(mine).one_or_none(), "Could not find Tray Reservation with specified ID")
    return _shapes(conn, [row], deps.clock())[0]


@router.patch(ONE, "update-tray-reservation", TrayReservation)
def update(
    conn: sa.Connection,
    deps: Deps,
    caller: ProviderAdmin,
    reservation_id: ReservationId,
    body: TrayReservationUpdate,
) -> Json:
    """Extend or shorten a reservation, or change its trays."""
    reservations.update_reservation(
        conn,
        entitlements.provider_id_of(conn, caller.org),
        str(reservation_id),
        until=None if body.until is None else body.until.timestamp(),
        machine_ids=body.machine_ids,
        count=body.count,
        order=routing.operator_order(deps, caller, body),
    )
    return get(conn, deps, caller, reservation_id)


@router.delete(ONE, "delete-tray-reservation")
def delete(conn: sa.Connection, deps: Deps, caller: ProviderAdmin, reservation_id: ReservationId) -> None:
    """End a reservation now. Instances on its trays stay."""
    provider_id = entitlements.provider_id_of(conn, caller.org)
    order = OperatorOrder(caller.subject, "reservation deleted", deps.clock())
    reservations.delete_reservation(conn, provider_id, str(reservation_id), order)


def _visible(conn: sa.Connection, caller: Caller) -> AnySelect:
    """The reservations that the caller may see, and whether it provides the trays of each."""
    provider_id, tenant_id = routing.provider_and_tenant(conn, caller)
    return (
        sa.select(tray_reservation, tenant.c.org, (site.c.provider_id == provider_id).label("is_provided"))
        .join(site, site.c.id == tray_reservation.c.site_id)
        .join(tenant, tenant.c.id == tray_reservation.c.tenant_id)
        .where(routing.of_caller(provider_id, tenant_id, tray_reservation))
    )
