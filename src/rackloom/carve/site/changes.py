"""What settling a domain changes: collected while it is worked out, written in a few statements."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import sqlalchemy as sa

from rackloom.carve.site import events, history
from rackloom.carve.site.events import Kind, Note
from rackloom.carve.site.tables import instance, nvlink_interface

_interfaces = (
    sa.update(nvlink_interface)
    .where(nvlink_interface.c.id == sa.bindparam("of"))
    .values(status=sa.bindparam("to"), reason=sa.bindparam("because"), updated=sa.bindparam("at"))
)
_instances = (
    sa.update(instance)
    .where(instance.c.id == sa.bindparam("of"))
    .values(status=sa.bindparam("to"), updated=sa.bindparam("at"))
)


class Changes:
    """Changes of the statuses of instances and their interfaces. `past`: the newest history entry of each."""

    def __init__(self, past: Mapping[str, sa.Row[Any]], now: float) -> None:
        self._past = past
        self._now = now
        self._interfaces: list[dict[str, object]] = []
        self._instances: list[dict[str, object]] = []
        self._entries: list[history.Entry] = []
        self._left: list[str] = []
        self._gone: list[str] = []
        self._news: defaultdict[str, list[Note]] = defaultdict(list)
        """What each tenant is to be told, in the order in which it was found."""

    def interface(self, tenant_id: str, interface_id: str, status: str, reason: str | None) -> None:
        """An interface has another status, or the same for another reason."""
        self._interfaces.append({"of": interface_id, "to": status, "because": reason, "at": self._now})
        self._news[tenant_id].append(Note(Kind.INTERFACE, interface_id, status, reason))

    def interface_left(self, tenant_id: str, interface_id: str) -> None:
        """The GPU of an interface was seen to have left."""
        self._left.append(interface_id)
        self._news[tenant_id].append(Note(Kind.INTERFACE, interface_id, events.DELETED))

    def instance_status(self, instance_id: str, status: str) -> None:
        """An instance has another status."""
        self._instances.append({"of": instance_id, "to": status, "at": self._now})

    def instance_says(self, tenant_id: str, instance_id: str, status: str, message: str) -> None:
        """An instance has `status` because of `message`, which may be known."""
        entry = history.Entry(instance_id, status, message)
        if history.is_news(entry, self._past.get(instance_id)):
            self._entries.append(entry)
            self._news[tenant_id].append(Note(Kind.INSTANCE, instance_id, status, message))

    def instance_gone(self, tenant_id: str, instance_id: str) -> None:
        """Every GPU of an instance that was released was seen to be free."""
        self._gone.append(instance_id)
        self._news[tenant_id].append(Note(Kind.INSTANCE, instance_id, events.DELETED))

    def write(self, conn: sa.Connection) -> None:
        """Put everything into the records, and tell the tenants."""
        if self._interfaces:
            conn.execute(_interfaces, self._interfaces)
        if self._instances:
            conn.execute(_instances, self._instances)
        history.write(conn, self._entries, self._past, self._now)
        _delete(conn, nvlink_interface, nvlink_interface.c.id, self._left)
        _delete(conn, nvlink_interface, nvlink_interface.c.instance_id, self._gone)
        _delete(conn, instance, instance.c.id, self._gone)
        if self._gone:
            history.forget(conn, self._gone)
        for tenant_id, notes in self._news.items():
            events.publish(conn, tenant_id, notes, self._now)


def _delete(conn: sa.Connection, table: sa.Table, key: sa.Column[Any], ids: Collection[str]) -> None:
    if ids:
        conn.execute(sa.delete(table).where(key.in_(ids)))
