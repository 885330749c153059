"""Recorded drains: the GPUs of a tray leave all partitions of the site, so that the tray can be worked on.

A drain is the only way in which a running instance's GPUs are moved without its tenant asking. The instance
keeps its machine and its wishes, and is joined again when the drain ends.
"""

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from rackloom.carve.site.tables import drain as table
from rackloom.carve.site.tables import machine, machine_gpu
from rackloom.carve.site.verdicts import DomainFacts, why_not_drained

DONE = "every GPU was seen outside the partitions of the site"

_UNFINISHED = (
    sa.select(table, machine_gpu.c.guid)
    .join(machine, machine.c.id == table.c.machine_id)
    .join(machine_gpu, machine_gpu.c.machine_id == machine.c.id, isouter=True)
    .where(table.c.ended.is_(None), table.c.drained.is_(None))
    .order_by(table.c.id)
)
_UNFINISHED_HERE = _UNFINISHED.where(machine.c.domain == sa.bindparam("domain"))
_UNFINISHED_NOWHERE = _UNFINISHED.where(machine.c.domain.is_(None))


_GPUS = (
    sa.select(machine_gpu.c.guid)
    .join(machine, machine.c.id == machine_gpu.c.machine_id)
    .join(table, sa.and_(table.c.machine_id == machine.c.id, table.c.ended.is_(None)))
    .where(machine.c.domain == sa.bindparam("domain"), machine_gpu.c.guid.is_not(None))
)


def active(conn: sa.Connection, machine_ids: Collection[str]) -> dict[str, sa.Row[Any]]:
    """The drains under way or done but not ended, by machine."""
    found = sa.select(table).where(table.c.machine_id.in_(machine_ids), table.c.ended.is_(None))
    return {row.machine_id: row for row in conn.execute(found)}


def reason_of(machine_id: sa.Column[str]) -> sa.ScalarSelect[str]:
    """Why a machine is drained, for a query over machines; NULL when it is not."""
    mine = sa.select(table.c.reason).where(table.c.machine_id == machine_id, table.c.ended.is_(None))
    return mine.limit(1).scalar_subquery()


def drained_machines() -> sa.Select[tuple[str]]:
    """Ids of the machines whose GPUs shall be in no partition."""
    return sa.select(table.c.machine_id).where(table.c.ended.is_(None))


def gpus(conn: sa.Connection, domain: str) -> frozenset[int]:
    """Fabric GUIDs in `domain` that shall be in no partition."""
    return frozenset(int(guid) for guid in conn.execute(_GPUS, {"domain": domain}).scalars())


def unfinished(conn: sa.Connection, domain: str | None) -> dict[sa.Row[Any], list[int | None]]:
    """The drains in `domain` of which the end was not yet observed, with the GUIDs of their GPUs."""
    asked = _UNFINISHED_NOWHERE if domain is None else _UNFINISHED_HERE
    rows = conn.execute(asked, {} if domain is None else {"domain": domain})
    found: dict[str, tuple[sa.Row[Any], list[int | None]]] = {}
    for row in rows:
        found.setdefault(row.id, (row, []))[1].append(None if row.guid is None else int(row.guid))
    return dict(found.values())


def settle(
    conn: sa.Connection, open_drains: dict[sa.Row[Any], list[int | None]], facts: DomainFacts, now: float
) -> None:
    """Say of each drain what the newest observation supports."""
    for row, guids in open_drains.items():
        reasons = [why_not_drained(guid, row.started, facts) for guid in guids]
        waiting = list(dict.fromkeys(reason for reason in reasons if reason))
        outcome = {"message": "; ".join(waiting)} if waiting else {"message": DONE, "drained": now}
        if outcome != {"message": row.message}:
            conn.execute(sa.update(table).where(table.c.id == row.id).values(**outcome))
