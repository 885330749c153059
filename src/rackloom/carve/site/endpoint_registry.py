"""Which switch controller speaks for which chassis, as operators register it: one URL for each serial."""

from typing import Any

import sqlalchemy as sa

from rackloom.carve.site import controllers, endpoints, operator_steps
from rackloom.carve.site.operator_steps import Order, Step
from rackloom.carve.site.problems import conflict, invalid, not_found
from rackloom.carve.site.tables import endpoint, endpoint_chassis, observation
from rackloom.carve.site.values import Changed, Ids
from rackloom.errors import Refused


def listing() -> sa.Select[Any]:
    """Chassis serials with the URL of their controller and what is known of its domain."""
    told = (observation.c.observed_at, observation.c.unknown_since, observation.c.unknown_reason)
    joined = endpoint_chassis.join(endpoint, endpoint.c.id == endpoint_chassis.c.endpoint_id)
    joined = joined.join(observation, observation.c.endpoint_id == endpoint.c.id, isouter=True)
    return sa.select(
        endpoint_chassis.c.chassis_serial,
        endpoint.c.url,
        endpoint.c.domain,
        endpoint.c.id,
        endpoint.c.created,
        endpoint.c.updated,
        *told,
    ).select_from(joined)


def get(conn: sa.Connection, chassis_serial: str) -> sa.Row[Any]:
    """The endpoint of a chassis; refused when it has none."""
    mine = listing().where(endpoint_chassis.c.chassis_serial == chassis_serial)
    found = conn.execute(mine).one_or_none()
    if found is None:
        raise not_found("Could not find an NMX-C endpoint of chassis with specified serial")
    return found


def create(conn: sa.Connection, chassis_serial: str, url: str, order: Order, ids: Ids) -> Changed[None]:
    """Register the controller of a chassis that has none yet."""
    _check_serial(chassis_serial)
    _check_url(url)
    mine = endpoint_chassis.c.chassis_serial == chassis_serial
    existing = conn.execute(sa.select(endpoint_chassis.c.endpoint_id).where(mine)).scalar_one_or_none()
    if existing is not None:
        raise conflict("Chassis with specified serial already has an NMX-C endpoint", id=existing)
    endpoints.register(conn, url, [chassis_serial], order.now, ids)
    operator_steps.record(conn, Step.CREATE_ENDPOINT, chassis_serial, None, order)
    return Changed(None, frozenset())


def update(conn: sa.Connection, chassis_serial: str, url: str, order: Order, ids: Ids) -> Changed[None]:
    """Let another URL speak for a chassis that has an endpoint."""
    before = get(conn, chassis_serial)
    _check_url(url)
    endpoints.register(conn, url, [chassis_serial], order.now, ids)
    operator_steps.record(conn, Step.UPDATE_ENDPOINT, chassis_serial, before.domain, order)
    return Changed(None, _domains(before))


def delete(conn: sa.Connection, chassis_serial: str, order: Order) -> Changed[None]:
    """Speak for a chassis no more; statuses that rested on its controller become unknown."""
    before = get(conn, chassis_serial)
    conn.execute(sa.delete(endpoint_chassis).where(endpoint_chassis.c.chassis_serial == chassis_serial))
    left = sa.select(endpoint_chassis.c.chassis_serial).where(endpoint_chassis.c.endpoint_id == before.id)
    if conn.execute(left).first() is None:
        endpoints.retire(conn, before.id, before.domain, None, order.now)
    operator_steps.record(conn, Step.DELETE_ENDPOINT, chassis_serial, before.domain, order)
    return Changed(None, _domains(before))


def _domains(row: sa.Row[Any]) -> frozenset[str]:
    return frozenset() if row.domain is None else frozenset((row.domain,))


def _check_serial(chassis_serial: str) -> None:
    if not chassis_serial.strip() or not chassis_serial.isprintable():
        raise invalid("Error validating endpoint", chassisSerial="must be printable and not empty")


def _check_url(url: str) -> None:
    try:
        controllers.parse(url)
    except Refused as refusal:
        told = refusal.nearest_fix or refusal.reason
        raise invalid("Error validating endpoint", endpoint=told) from refusal
