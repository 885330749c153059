"""Switch controller endpoints: a URL, its registered chassis, and the domain that it last reported.

Operators register one URL for each chassis serial. `register_endpoint` assigns chassis to a URL: a
controller that moved keeps its row and its history. An endpoint that is left without chassis is
retired. Retiring deletes its reading, hands its open operations to the successor or closes them as
unknown, and withdraws the state that rested on the reading. The row stays for the audit.
"""

from collections.abc import Collection
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.fabric import controller
from rackloom.carve.inventory import sync
from rackloom.carve.observation.latest import READING_COLUMNS
from rackloom.carve.partitions import ownership
from rackloom.carve.store import journal
from rackloom.carve.store.journal import OperatorOrder, Step
from rackloom.carve.store.prepared import delete_rows, find_row, has_row, insert_row, require, update_rows
from rackloom.carve.store.schema import endpoint, endpoint_chassis, observation
from rackloom.carve.store.values import Changed, IdFactory, conflict, invalid
from rackloom.carve.tenancy import status
from rackloom.errors import Refused

# Endpoint records.


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A switch controller that the site uses."""

    id: str
    url: str
    chassis_serials: tuple[str, ...]
    domain: str | None
    """Domain uuid that it last answered with, or None until it has answered."""


def all_endpoints(conn: sa.Connection) -> tuple[Endpoint, ...]:
    """All endpoints that are registered for a chassis, by URL."""
    serials: dict[str, list[str]] = {}
    for row in conn.execute(sa.select(endpoint_chassis).order_by(endpoint_chassis.c.chassis_serial)).all():
        serials.setdefault(row.endpoint_id, []).append(row.chassis_serial)
    return tuple(
        Endpoint(id=row.id, url=row.url, chassis_serials=tuple(serials[row.id]), domain=row.domain)
        for row in conn.execute(sa.select(endpoint).order_by(endpoint.c.url)).all()
        if row.id in serials
    )


def register_endpoint(
    conn: sa.Connection, url: str, chassis_serials: Collection[str], now: float, ids: IdFactory
) -> None:
    """Make `url` the endpoint of these chassis, even if they had another one.

    A controller that moved keeps its row, and with it its history. An endpoint that is left without any
    chassis is no longer used.
    """
    emptied = [known for known in all_endpoints(conn) if set(known.chassis_serials) <= set(chassis_serials)]
    existing = find_row(conn, endpoint, url=url)
    if existing is not None:
        chosen = existing.id
    elif emptied:
        # The controller moved to another address: it keeps its row, and with it its last reading.
        chosen = emptied[0].id
        update_rows(conn, endpoint, {"id": chosen}, url=url, updated=now)
    else:
        chosen = ids()
        insert_row(conn, endpoint, id=chosen, url=url, created=now, updated=now)
    moved = endpoint_chassis.c.chassis_serial.in_(chassis_serials)
    conn.execute(sa.delete(endpoint_chassis).where(moved))
    rows = [{"chassis_serial": serial, "endpoint_id": chosen} for serial in sorted(chassis_serials)]
    conn.execute(sa.insert(endpoint_chassis), rows)
    for left in emptied:
        if left.id != chosen:
            retire_endpoint(conn, left.id, left.domain, chosen, now)


def retire_endpoint(
    conn: sa.Connection, endpoint_id: str, domain: str | None, successor: str | None, now: float
) -> None:
    """Delete the reading of an endpoint, which reported `domain`. Its row stays for the audit.

    Observations through its successor close its open operations. Without one they become unknown here.
    """
    if successor is None:
        ownership.close_interrupted_operations(conn, endpoint_id, now, now)
    else:
        ownership.hand_over_operations(conn, endpoint_id, successor)
    delete_rows(conn, observation, endpoint_id=endpoint_id)
    update_rows(conn, endpoint, {"id": endpoint_id}, domain=None, updated=now)
    if domain is None:
        status.update_statuses(conn, None, now)
    else:
        sync.withdraw_reading(conn, domain, now)


# Registration by operators, one URL for each chassis.


ENDPOINT_STATE_COLUMNS = frozenset({"observed_at", "unknown_since", "unknown_reason"})


def chassis_endpoint_listing() -> sa.Select[Any]:
    """Chassis serials with their endpoint and the state of its reading.

    The parameter `valid_from` is the time before which a reading counts as lost.
    """
    joined = endpoint_chassis.join(endpoint, endpoint.c.id == endpoint_chassis.c.endpoint_id)
    joined = joined.join(observation, observation.c.endpoint_id == endpoint.c.id, isouter=True)
    state = (column for column in READING_COLUMNS if column.name in ENDPOINT_STATE_COLUMNS)
    return sa.select(endpoint_chassis.c.chassis_serial, *endpoint.c, *state).select_from(joined)


def get_chassis_endpoint(conn: sa.Connection, chassis_serial: str, valid_from: float = 0.0) -> sa.Row[Any]:
    """The endpoint of a chassis. Raises Rejected (not found)."""
    mine = chassis_endpoint_listing().where(endpoint_chassis.c.chassis_serial == chassis_serial)
    row = conn.execute(mine, {"valid_from": valid_from}).one_or_none()
    return require(row, "Could not find an NMX-C endpoint of chassis with specified serial")


def create_chassis_endpoint(
    conn: sa.Connection, chassis_serial: str, url: str, order: OperatorOrder, ids: IdFactory
) -> Changed[None]:
    """Register the controller of a chassis that has none yet."""
    if not chassis_serial.strip() or not chassis_serial.isprintable():
        raise invalid("Error validating endpoint", chassisSerial="must be printable and not empty")
    _check_controller_url(url)
    if existing := find_row(conn, endpoint_chassis, chassis_serial=chassis_serial):
        message = "Chassis with specified serial already has an NMX-C endpoint"
        raise conflict(message, id=existing.endpoint_id)
    register_endpoint(conn, url, [chassis_serial], order.now, ids)
    journal.record_operator_step(conn, Step.CREATE_ENDPOINT, chassis_serial, None, order)
    return Changed(None, frozenset())


def update_chassis_endpoint(
    conn: sa.Connection, chassis_serial: str, url: str, order: OperatorOrder, ids: IdFactory
) -> Changed[None]:
    """Register another URL for a chassis that has an endpoint."""
    before = get_chassis_endpoint(conn, chassis_serial)
    _check_controller_url(url)
    register_endpoint(conn, url, [chassis_serial], order.now, ids)
    journal.record_operator_step(conn, Step.UPDATE_ENDPOINT, chassis_serial, before.domain, order)
    return Changed(None, _domains_to_wake(before))


def delete_chassis_endpoint(conn: sa.Connection, chassis_serial: str, order: OperatorOrder) -> Changed[None]:
    """Delete the endpoint of a chassis. Statuses that rested on its controller become unknown."""
    before = get_chassis_endpoint(conn, chassis_serial)
    delete_rows(conn, endpoint_chassis, chassis_serial=chassis_serial)
    if not has_row(conn, endpoint_chassis, endpoint_id=before.id):
        retire_endpoint(conn, before.id, before.domain, None, order.now)
    journal.record_operator_step(conn, Step.DELETE_ENDPOINT, chassis_serial, before.domain, order)
    return Changed(None, _domains_to_wake(before))


def _domains_to_wake(row: sa.Row[Any]) -> frozenset[str]:
    return frozenset() if row.domain is None else frozenset((row.domain,))


def _check_controller_url(url: str) -> None:
    try:
        controller.parse_controller_url(url)
    except Refused as refusal:
        text = refusal.nearest_fix or refusal.reason
        raise invalid("Error validating endpoint", endpoint=text) from refusal
