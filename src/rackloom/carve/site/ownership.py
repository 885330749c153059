"""Which partitions of a domain the site made: known by name, recorded before the fabric is asked.

A partition found under a recorded name is ours even if the process died before the answer came; one found
under any other name is nobody's, and is left alone.
"""

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from rackloom.carve.plan.values import (
    CreatePartition,
    DeletePartition,
    Observation,
    ObservedPartition,
    OwnedPartition,
)
from rackloom.carve.site.operations import OperationState
from rackloom.carve.site.tables import endpoint, machine, operation
from rackloom.carve.site.tables import owned_partition as table
from rackloom.errors import Refused

FORGET_AFTER = 86400.0
"""Seconds for which a name is remembered that stands for nothing in sight: a create whose outcome was never
learnt, or a partition that a list has omitted and nobody deleted. A controller that shows one later than that
is not known to exist."""


# Built once: every pass asks these.
_here = table.c.domain == sa.bindparam("here")
_MADE = sa.select(table).where(_here).order_by(table.c.name)
_ASKED_FOR = (
    sa.select(table, operation.c.state, operation.c.finished)
    .join(operation, operation.c.id == table.c.operation_id)
    .where(_here)
)
_SEEN = sa.update(table).where(_here, table.c.name == sa.bindparam("called"))
_LOST = sa.select(table.c.name).where(_here, table.c.seen_at.is_not(None), table.c.partition_id.is_(None))


def of_domain(conn: sa.Connection, domain: str) -> tuple[OwnedPartition, ...]:
    """The partitions that the site made, or has begun to make, in `domain`."""
    rows = conn.execute(_MADE, {"here": domain})
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


def recognise(conn: sa.Connection, shown: Sequence[Observation], now: float) -> None:
    """Take ids from what is seen under our names, and drop the names of what is known to be gone.

    `shown` is one at least, the newest first; what any of them lists is there. A partition that all lists
    omit need not be gone: controllers were seen to leave out one whose GPUs are all away. It has no id until
    it is listed again, and its name stays ours. A reading without any GPU may be of a standby, so no name
    grows old by it.
    """
    observation = shown[0]
    seen = {
        partition.name: (partition.id, one.observed_at)
        for one in reversed(shown)
        for partition in one.partitions
    }
    for row in conn.execute(_ASKED_FOR, {"here": observation.domain}).all():
        mine = {"here": row.domain, "called": row.name}
        if row.name in seen:
            number, seen_at = seen[row.name]
            found = {"partition_id": number, "seen_at": max(seen_at, row.seen_at or 0.0)}
            conn.execute(_SEEN, {**mine, **found})
        elif _is_gone(conn, row, observation, now):
            conn.execute(sa.delete(table).where(table.c.domain == row.domain, table.c.name == row.name))
        elif row.partition_id is not None and row.seen_at < observation.observed_at:
            conn.execute(_SEEN, {**mine, "partition_id": None})


def lost(conn: sa.Connection, domain: str) -> frozenset[str]:
    """Names of partitions that were seen once, that nobody deleted, and that the newest list omits."""
    return frozenset(conn.execute(_LOST, {"here": domain}).scalars())


def follow(conn: sa.Connection, domain: str, successor: str) -> None:
    """Let the names of `domain` be known in `successor` too, where its chassis answer now.

    The names stay in `domain` as long as a machine is there: it may have been split.
    """
    known = set(conn.execute(sa.select(table.c.name).where(table.c.domain == successor)).scalars())
    rows = conn.execute(sa.select(table).where(table.c.domain == domain)).mappings().all()
    new = [{**row, "domain": successor} for row in rows if row["name"] not in known]
    if new:
        conn.execute(sa.insert(table), new)
    here = sa.select(machine.c.id).where(machine.c.domain == domain).limit(1)
    if conn.execute(here).first() is None:
        conn.execute(sa.delete(table).where(table.c.domain == domain))


def _is_gone(conn: sa.Connection, row: sa.Row[Any], observation: Observation, now: float) -> bool:
    observed_at = observation.observed_at
    if row.seen_at is not None and row.seen_at >= observed_at:
        return False
    if observation.gpus and max(row.created, row.seen_at or 0.0) + FORGET_AFTER < now:
        return True
    refused = row.seen_at is None and row.state == OperationState.REFUSED and row.finished <= observed_at
    return (refused or _was_deleted(conn, row)) and not _may_still_be_made(conn, row, now)


def _may_still_be_made(conn: sa.Connection, row: sa.Row[Any], now: float) -> bool:
    """Whether a create of this name is without an answer: a controller may carry it out after a deletion."""
    unanswered = _asked(CreatePartition, row).where(
        operation.c.state.in_((OperationState.UNKNOWN, OperationState.PENDING)),
        operation.c.started > now - FORGET_AFTER,
    )
    return conn.execute(unanswered.limit(1)).first() is not None


def _was_deleted(conn: sa.Connection, row: sa.Row[Any]) -> bool:
    """Whether the controller carried out a deletion of the partition after it was last asked for and seen."""
    accepted = _asked(DeletePartition, row).where(
        operation.c.state == OperationState.DONE,
        operation.c.started >= row.created,
        # It may have been seen while the deletion was under way.
        operation.c.finished >= (row.seen_at or 0.0),
    )
    return conn.execute(accepted.limit(1)).first() is not None


def _asked(kind: type[CreatePartition | DeletePartition], row: sa.Row[Any]) -> sa.Select[tuple[int]]:
    """What was asked of the partition, also when its domain had another uuid."""
    here = sa.select(endpoint.c.id).where(endpoint.c.domain == row.domain)
    return sa.select(operation.c.id).where(
        operation.c.kind == str(kind.__struct_config__.tag),
        operation.c.partition_name == row.name,
        sa.or_(operation.c.domain == row.domain, operation.c.endpoint_id.in_(here)),
    )
