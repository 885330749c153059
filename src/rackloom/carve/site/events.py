"""What a tenant is told as it happens: an outbox, written in the transaction of the change itself.

Numbers grow by one within a tenant. The counter's row is locked until the commit, so a number never becomes
visible before a smaller one: whoever has seen n has been shown everything up to n.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec
import sqlalchemy as sa

from rackloom.carve.site import history
from rackloom.carve.site.tables import event_counter as counter
from rackloom.carve.site.tables import tenant_event as table

KEPT = 10_000
"""Events of a tenant that can be read again."""
DELETED = "Deleted"
"""Status in the last event of an object; no object has it."""


_APPEND = sa.insert(table)
_GROWN = (
    sa.update(counter)
    .where(counter.c.tenant_id == sa.bindparam("tenant"))
    .values(newest=counter.c.newest + sa.bindparam("more"))
    .returning(counter.c.newest)
)


class Kind(StrEnum):
    """What an event is about."""

    LOGICAL_PARTITION = "nvlink-logical-partition"
    INTERFACE = "nvlink-interface"
    INSTANCE = "instance"
    VPC = "vpc"
    ALLOCATION = "allocation"
    DOMAIN = "nvlink-domain"


class Note(msgspec.Struct, frozen=True):
    """What happened to an object."""

    kind: Kind
    object_id: str
    status: str
    message: str | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A note with its number and time."""

    number: int
    note: Note
    created: float


def publish(conn: sa.Connection, tenant_id: str, notes: Sequence[Note], now: float) -> None:
    """Append `notes` to the tenant's events; the oldest ones beyond KEPT are dropped."""
    if not notes:
        return
    newest = _count(conn, tenant_id, len(notes))
    rows = [
        {"tenant_id": tenant_id, "number": number, "created": now, **msgspec.structs.asdict(note)}
        for number, note in enumerate(notes, newest - len(notes) + 1)
    ]
    conn.execute(_APPEND, rows)
    if newest > KEPT:
        conn.execute(sa.delete(table).where(table.c.tenant_id == tenant_id, table.c.number <= newest - KEPT))


def tell(conn: sa.Connection, tenant_id: str, note: Note, now: float) -> None:
    """Write `note` into the history of its object and, when it says something new, into the events."""
    if history.record(conn, note.object_id, note.status, note.message or "", now):
        publish(conn, tenant_id, [note], now)


def tell_new(conn: sa.Connection, tenant_id: str, notes: Sequence[Note], now: float) -> None:
    """As `tell`, for the first `notes` of an object that has just been made."""
    history.begin(conn, [history.Entry(one.object_id, one.status, one.message or "") for one in notes], now)
    publish(conn, tenant_id, notes, now)


def after(conn: sa.Connection, tenant_id: str, number: int, limit: int) -> tuple[Event, ...]:
    """The events after `number`, oldest first, at most `limit`."""
    wanted = sa.select(table).where(table.c.tenant_id == tenant_id, table.c.number > number)
    return tuple(
        Event(
            number=row.number,
            note=Note(Kind(row.kind), row.object_id, row.status, row.message),
            created=row.created,
        )
        for row in conn.execute(wanted.order_by(table.c.number).limit(limit))
    )


def newest(conn: sa.Connection, tenant_id: str) -> int:
    """Number of the tenant's newest event; 0 before the first."""
    found = conn.execute(sa.select(counter.c.newest).where(counter.c.tenant_id == tenant_id))
    return found.scalar_one_or_none() or 0


def _count(conn: sa.Connection, tenant_id: str, more: int) -> int:
    found: int | None = conn.execute(_GROWN, {"tenant": tenant_id, "more": more}).scalar_one_or_none()
    if found is None:
        conn.execute(sa.insert(counter).values(tenant_id=tenant_id, newest=more))
        return more
    return found
