"""Which partitions of a domain the site made: known by name, recorded before the fabric is asked.

A partition found under a recorded name is ours even if the process died before the answer came; one found
under any other name is nobody's, and is left alone.
"""

from typing import Any

import sqlalchemy as sa

from rackloom.carve.plan.values import CreatePartition, Observation, ObservedPartition, OwnedPartition
from rackloom.carve.site.tables import operation
from rackloom.carve.site.tables import owned_partition as table
from rackloom.errors import Refused

FORGET_AFTER = 86400.0
"""Seconds for which the name of a create whose outcome was never learnt is remembered. A controller that
carries one out later than that is not known to exist."""


def of_domain(conn: sa.Connection, domain: str) -> tuple[OwnedPartition, ...]:
    """The partitions that the site made, or has begun to make, in `domain`."""
    rows = conn.execute(sa.select(table).where(table.c.domain == domain).order_by(table.c.name))
    return tuple(
        OwnedPartition(
            name=row.name, logical_partition=row.logical_partition_id, partition_id=row.partition_id
        )
        for row in rows
    )


def claim(conn: sa.Connection, domain: str, wanted: CreatePartition, operation_id: int, now: float) -> None:
    """Record the name of a partition about to be created. Raises Refused if the name means another."""
    same = sa.and_(table.c.domain == domain, table.c.name == wanted.name)
    existing = conn.execute(sa.select(table).where(same)).one_or_none()
    if existing is None:
        row = {"domain": domain, "name": wanted.name, "logical_partition_id": wanted.logical_partition}
        conn.execute(sa.insert(table).values(**row, operation_id=operation_id, created=now))
    elif existing.logical_partition_id == wanted.logical_partition:
        conn.execute(sa.update(table).where(same).values(operation_id=operation_id, created=now))
    else:
        raise Refused(f"partition name {wanted.name} already stands for another logical partition")


def adopt(
    conn: sa.Connection,
    seen: Observation,
    partition: ObservedPartition,
    owner: str,
    operation_id: int,
    now: float,
) -> None:
    """Take over a partition that was found, for logical partition `owner` or RELEASED."""
    row: dict[str, Any] = {"domain": seen.domain, "name": partition.name, "logical_partition_id": owner}
    row |= {"partition_id": partition.id, "operation_id": operation_id, "seen_at": seen.observed_at}
    conn.execute(sa.insert(table).values(**row, created=now))


def recognise(conn: sa.Connection, observation: Observation, now: float) -> None:
    """Take ids from what is seen under our names, and drop the names of what is known to be gone."""
    seen = {partition.name: partition.id for partition in observation.partitions}
    rows = conn.execute(
        sa.select(table, operation.c.state, operation.c.finished)
        .join(operation, operation.c.id == table.c.operation_id)
        .where(table.c.domain == observation.domain)
    ).all()
    for row in rows:
        mine = sa.and_(table.c.domain == row.domain, table.c.name == row.name)
        if row.name in seen:
            found = {"partition_id": seen[row.name], "seen_at": observation.observed_at}
            conn.execute(sa.update(table).where(mine).values(**found))
        elif _is_gone(row, observation.observed_at, now):
            conn.execute(sa.delete(table).where(mine))


def _is_gone(row: sa.Row[tuple[object, ...]], observed_at: float, now: float) -> bool:
    if row.seen_at is not None:
        return bool(row.seen_at < observed_at)
    if row.state == "refused":
        return bool(row.finished <= observed_at)
    return bool(row.created + FORGET_AFTER < now)
