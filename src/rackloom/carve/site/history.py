"""The status history of an object: what it was, why, and when, newest 20."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from rackloom.carve.site.tables import status_history as table

KEPT = 20


class Past(NamedTuple):
    """What an object was, since when, and when the reason was last changed."""

    object_id: str
    status: str
    message: str
    created: float
    updated: float


_mine = table.c.object_id.in_(sa.bindparam("objects", expanding=True))
_last = sa.select(sa.func.max(table.c.id)).where(_mine).group_by(table.c.object_id)
_NEWEST = sa.select(table).where(table.c.id.in_(_last))
_ALL = sa.select(*(table.c[name] for name in Past._fields)).where(_mine).order_by(table.c.id.desc())
_FULL = sa.select(table.c.object_id).where(_mine).group_by(table.c.object_id).having(sa.func.count() > KEPT)
_BEGIN = sa.insert(table)
_REPLACE = (
    sa.update(table)
    .where(table.c.id == sa.bindparam("of"))
    .values(message=sa.bindparam("because"), updated=sa.bindparam("at"))
)


class Entry(msgspec.Struct, frozen=True):
    """An object has a status, and why."""

    object_id: str
    status: str
    message: str


def record(conn: sa.Connection, object_id: str, status: str, message: str, now: float) -> bool:
    """Note that the object has `status` because of `message`; False when that was known.

    A new reason alone replaces the old.
    """
    entry, past = Entry(object_id, status, message), newest(conn, [object_id])
    if not is_news(entry, past.get(object_id)):
        return False
    write(conn, [entry], past, now)
    return True


def newest(conn: sa.Connection, object_ids: Collection[str]) -> dict[str, sa.Row[Any]]:
    """The newest entry of each object that has one."""
    return {row.object_id: row for row in conn.execute(_NEWEST, {"objects": list(object_ids)})}


def is_news(entry: Entry, past: sa.Row[Any] | None) -> bool:
    """Whether `entry` says what the newest entry does not."""
    return past is None or (past.status, past.message) != (entry.status, entry.message)


def write(
    conn: sa.Connection, entries: Collection[Entry], past: Mapping[str, sa.Row[Any]], now: float
) -> None:
    """Write entries that are news, one an object at most; `past` are the newest of these objects so far."""
    same = [one for one in entries if one.object_id in past and past[one.object_id].status == one.status]
    if same:
        rows = [{"of": past[one.object_id].id, "because": one.message, "at": now} for one in same]
        conn.execute(_REPLACE, rows)
    if new := [one for one in entries if one not in same]:
        begin(conn, new, now)
        _prune(conn, [one.object_id for one in new])


def begin(conn: sa.Connection, entries: Collection[Entry], now: float) -> None:
    """Write the first entries of objects that have just been made, oldest first."""
    rows = [{**msgspec.structs.asdict(one), "created": now, "updated": now} for one in entries]
    conn.execute(_BEGIN, rows)


def of(conn: sa.Connection, object_ids: Collection[str]) -> dict[str, list[Past]]:
    """The histories of `object_ids`, each newest first."""
    histories: dict[str, list[Past]] = defaultdict(list)
    for one in map(Past._make, conn.execute(_ALL, {"objects": list(object_ids)}).all()):
        histories[one.object_id].append(one)
    return histories


def forget(conn: sa.Connection, object_ids: Collection[str]) -> None:
    """Drop the histories of objects that no longer exist."""
    conn.execute(sa.delete(table).where(table.c.object_id.in_(object_ids)))


def _prune(conn: sa.Connection, object_ids: Collection[str]) -> None:
    for object_id in conn.execute(_FULL, {"objects": list(object_ids)}).scalars().all():
        kept = sa.select(table.c.id).where(table.c.object_id == object_id)
        kept = kept.order_by(table.c.id.desc()).limit(KEPT)
        conn.execute(sa.delete(table).where(table.c.object_id == object_id, table.c.id.not_in(kept)))
