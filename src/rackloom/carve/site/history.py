"""The status history of an object: what it was, why, and when, newest 20."""

from collections import defaultdict
from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from rackloom.carve.site.tables import status_history as table

KEPT = 20


def record(conn: sa.Connection, object_id: str, status: str, message: str, now: float) -> bool:
    """Note that the object has `status` because of `message`; False when that was known.

    A new reason alone replaces the old.
    """
    newest = conn.execute(
        sa.select(table).where(table.c.object_id == object_id).order_by(table.c.id.desc()).limit(1)
    ).one_or_none()
    if newest is None or newest.status != status:
        row = {"object_id": object_id, "status": status, "message": message, "created": now, "updated": now}
        conn.execute(sa.insert(table).values(**row))
        _prune(conn, object_id)
        return True
    if newest.message != message:
        conn.execute(sa.update(table).where(table.c.id == newest.id).values(message=message, updated=now))
        return True
    return False


def of(conn: sa.Connection, object_ids: Collection[str]) -> dict[str, list[sa.Row[Any]]]:
    """The histories of `object_ids`, each newest first."""
    histories: dict[str, list[sa.Row[Any]]] = defaultdict(list)
    rows = conn.execute(sa.select(table).where(table.c.object_id.in_(object_ids)).order_by(table.c.id.desc()))
    for row in rows:
        histories[row.object_id].append(row)
    return histories


def forget(conn: sa.Connection, object_ids: Collection[str]) -> None:
    """Drop the histories of objects that no longer exist."""
    conn.execute(sa.delete(table).where(table.c.object_id.in_(object_ids)))


def _prune(conn: sa.Connection, object_id: str) -> None:
    kept = sa.select(table.c.id).where(table.c.object_id == object_id).order_by(table.c.id.desc()).limit(KEPT)
    conn.execute(sa.delete(table).where(table.c.object_id == object_id, table.c.id.not_in(kept)))
