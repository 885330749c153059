"""Write-ahead record of fabric operations, and the partitions that the site owns by name.

An operation is recorded as pending before the controller is asked, with who asked for it and why. The
answer makes it done, refused or unknown. An operation that was never answered becomes unknown once an
observation begins after it. `gpus_maybe_joining` lists the GPUs that an open operation may still put
into a partition; no GPU of these is reported as released. A controller may execute a request up to
`LATE_SECONDS` after its caller gave up.

The name of a new partition is recorded in the same transaction as its create operation. A partition
that is found under a recorded name is therefore ours, even when the answer to the create was lost in a
crash. A partition under any other name is foreign and is left alone.

`update_owned_partitions` takes partition ids from the observation. A name is dropped only when the
partition is known to be gone: it was deleted or its create was refused, no valid reading lists it, and
no create of that name is unanswered. Controllers were seen to omit a partition whose GPUs are all
absent, so omission alone clears the id and keeps the name. After a day without any sight the name is
dropped.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.store.journal import OperatorOrder
from rackloom.carve.store.schema import (
    endpoint,
    logical_partition,
    machine,
    operation,
    owned_partition,
    tenant,
)
from rackloom.carve.store.schema import operation as table
from rackloom.carve.store.values import RELEASED_OWNER, OperationState
from rackloom.core.partitions.domain import (
    AddGpus,
    CreatePartition,
    DeletePartition,
    DomainObservation,
    ObservedPartition,
    OwnedPartition,
    PartitionOperation,
)
from rackloom.core.partitions.partition_layout import is_tray_partition
from rackloom.errors import Refused

# The record of operations.


INTERRUPTED_REASON = "the service stopped before the controller's answer was recorded"
LATE_SECONDS = 30.0
"""A controller may carry a request out after its caller has given up, but not longer than this after."""
ABANDONED_SECONDS = 3600.0
"""No call takes so long: whoever began it has died, and its endpoint need never answer again."""
ASKED_BY_SITE = "site"
"""Who asks for what no tenant asked for, such as the end of the factory default partition."""


def _operation_tag(kind: type[PartitionOperation]) -> str:
    return str(kind.__struct_config__.tag)


# Built once: every pass asks these.
_through_endpoint = table.c.endpoint_id == sa.bindparam("through")
_INSERT_OPERATION = sa.insert(table).returning(table.c.id)
_UPDATE_OPERATION = sa.update(table).where(table.c.id == sa.bindparam("of"))
_through_any_endpoint = table.c.endpoint_id.in_(
    sa.select(endpoint.c.id).where(endpoint.c.domain == sa.bindparam("here"))
)
_unanswered = sa.and_(
    table.c.observed_after.is_(None),
    table.c.state == OperationState.PENDING,
    table.c.started < sa.bindparam("seen"),
)
_CLOSE_AS_UNKNOWN = sa.update(table).values(
    state=OperationState.UNKNOWN, message=INTERRUPTED_REASON, finished=sa.bindparam("now")
)
_CLOSE_INTERRUPTED = _CLOSE_AS_UNKNOWN.where(_through_endpoint, _unanswered)
_CLOSE_ABANDONED = _CLOSE_AS_UNKNOWN.where(_through_any_endpoint, _unanswered)
_CONFIRM_OPERATIONS = (
    sa.update(table)
    .where(_through_endpoint, table.c.observed_after.is_(None), table.c.finished <= sa.bindparam("seen"))
    .values(observed_after=sa.bindparam("seen"))
)
_outcome_open = sa.or_(
    table.c.state == OperationState.PENDING,
    sa.and_(table.c.state == OperationState.UNKNOWN, table.c.finished > sa.bindparam("late")),
    sa.and_(table.c.state == OperationState.DONE, table.c.finished > sa.bindparam("seen")),
)
_OPEN_JOINS = sa.select(table.c.detail).where(
    table.c.domain == sa.bindparam("domain"),
    _outcome_open,
    table.c.kind.in_([_operation_tag(CreatePartition), _operation_tag(AddGpus)]),
)
_LOGICAL_PARTITION_NAME = (
    sa.select(logical_partition.c.name, tenant.c.org)
    .join(tenant, tenant.c.id == logical_partition.c.tenant_id)
    .where(logical_partition.c.id == sa.bindparam("partition"))
)
_OWNER_OF_NAME = (
    sa.select(owned_partition.c.logical_partition_id, table.c.asked_by, table.c.reason)
    .join(table, table.c.id == owned_partition.c.operation_id)
    .where(owned_partition.c.domain == sa.bindparam("domain"), owned_partition.c.name == sa.bindparam("name"))
)


def begin_operation_record(
    conn: sa.Connection,
    endpoint_id: str,
    domain: str,
    operation: PartitionOperation,
    observed_at: float,
    now: float,
) -> int:
    """Record that `operation` is about to be asked for; returns its id."""
    asked_by, reason = _asker_and_reason(conn, domain, operation)
    row = {
        "endpoint_id": endpoint_id,
        "domain": domain,
        "kind": _operation_tag(type(operation)),
        "partition_name": operation.name,
        "asked_by": asked_by,
        "reason": reason,
        "detail": _operation_detail(operation),
        "state": OperationState.PENDING,
        "observed_at": observed_at,
        "started": now,
    }
    new: int = conn.execute(_INSERT_OPERATION, row).scalar_one()
    return new


def record_operator_takeover(
    conn: sa.Connection,
    seen: DomainObservation,
    step: str,
    partition: ObservedPartition,
    order: OperatorOrder,
) -> int:
    """Record that an operator took over a partition that was found; nothing was asked of the fabric."""
    through = sa.select(sa.func.min(endpoint.c.id)).where(endpoint.c.domain == seen.domain)
    row = {
        "endpoint_id": conn.execute(through).scalar_one(),
        "domain": seen.domain,
        "kind": f"{step}-partition",
        "partition_name": partition.name,
        "asked_by": order.by,
        "reason": order.reason,
        "detail": {"guids": [str(guid) for guid in sorted(partition.members)]},
        "state": OperationState.DONE,
        "observed_at": seen.observed_at,
        "started": order.now,
        "finished": order.now,
    }
    new: int = conn.execute(_INSERT_OPERATION, row).scalar_one()
    return new


def finish_operation_record(
    conn: sa.Connection,
    operation_id: int,
    state: OperationState,
    code: str | None,
    message: str | None,
    now: float,
) -> None:
    """Record what the controller answered."""
    outcome = {"state": state, "code": code, "message": message, "finished": now}
    conn.execute(_UPDATE_OPERATION, {"of": operation_id, **outcome})


def close_interrupted_operations(
    conn: sa.Connection, endpoint_id: str, observed_at: float, now: float
) -> None:
    """Mark as unknown what was begun before an observation and never answered: the asker has died."""
    conn.execute(_CLOSE_INTERRUPTED, {"through": endpoint_id, "seen": observed_at, "now": now})


def close_abandoned_operations(conn: sa.Connection, domain: str, observed_at: float, now: float) -> None:
    """As `close_interrupted`, of what was begun long ago through any endpoint of `domain`."""
    conn.execute(_CLOSE_ABANDONED, {"here": domain, "seen": observed_at - ABANDONED_SECONDS, "now": now})


def confirm_operations(conn: sa.Connection, endpoint_id: str, observed_at: float) -> None:
    """Note the first observation that was begun after the answer to each operation."""
    conn.execute(_CONFIRM_OPERATIONS, {"through": endpoint_id, "seen": observed_at})


def hand_over_operations(conn: sa.Connection, endpoint_id: str, successor: str) -> None:
    """Let the observations of another endpoint close what this one left unanswered."""
    open_ones = sa.and_(table.c.endpoint_id == endpoint_id, table.c.state == OperationState.PENDING)
    conn.execute(sa.update(table).where(open_ones).values(endpoint_id=successor))


def gpus_maybe_joining(conn: sa.Connection, domain: str | None, observed_at: float) -> frozenset[int]:
    """Fabric GUIDs that an operation may yet put into a partition, as far as a look at `observed_at` tells.

    Its answer is still out, never came, or came after the look was begun: it need not show what became of it.
    """
    asked = {"domain": domain, "seen": observed_at, "late": observed_at - LATE_SECONDS}
    under_way = conn.execute(_OPEN_JOINS, asked).scalars()
    return frozenset(int(guid) for detail in under_way for guid in detail["guids"])


def _operation_detail(operation: PartitionOperation) -> Any:
    # GUIDs as text: JSON numbers lose the low bits of 64-bit values in most readers.
    detail = msgspec.to_builtins(operation)
    if "guids" in detail:
        detail["guids"] = [str(guid) for guid in detail["guids"]]
    return detail


def _asker_and_reason(conn: sa.Connection, domain: str, operation: PartitionOperation) -> tuple[str, str]:
    if isinstance(operation, CreatePartition):
        partition_id = operation.logical_partition
    else:
        owner = _partition_owner(conn, domain, operation.name)
        if owner is None:
            return ASKED_BY_SITE, f"the site keeps no GPU in partition {operation.name}"
        partition_id = owner.logical_partition_id
        if partition_id == RELEASED_OWNER:
            return owner.asked_by, owner.reason
    if is_tray_partition(partition_id):
        return ASKED_BY_SITE, "GPUs that nobody was given share memory within their tray only"
    found = conn.execute(_LOGICAL_PARTITION_NAME, {"partition": partition_id}).one_or_none()
    if found is None:
        return ASKED_BY_SITE, f"logical partition {partition_id} was deleted"
    return found.org, f"members of logical partition {found.name} changed"


def _partition_owner(conn: sa.Connection, domain: str, name: str) -> sa.Row[Any, Any, Any] | None:
    """For which logical partition the site has the partition, and who asked for that."""
    return conn.execute(_OWNER_OF_NAME, {"domain": domain, "name": name}).one_or_none()


# Owned partitions, by name.


FORGET_NAME_SECONDS = 86400.0
"""Seconds for which a name is remembered that stands for nothing in sight: a create whose outcome was never
learnt, or a partition that a list has omitted and nobody deleted. A controller that shows one later than that
is not known to exist."""


# Built once: every pass asks these.
_owned_in_domain = owned_partition.c.domain == sa.bindparam("here")
_OWNED_IN_DOMAIN = sa.select(owned_partition).where(_owned_in_domain).order_by(owned_partition.c.name)
_OWNED_WITH_OPERATION = (
    sa.select(owned_partition, operation.c.state, operation.c.finished)
    .join(operation, operation.c.id == owned_partition.c.operation_id)
    .where(_owned_in_domain)
)
_UPDATE_OWNED = sa.update(owned_partition).where(
    _owned_in_domain, owned_partition.c.name == sa.bindparam("called")
)
_OMITTED = sa.select(owned_partition.c.name).where(
    _owned_in_domain, owned_partition.c.seen_at.is_not(None), owned_partition.c.partition_id.is_(None)
)


def owned_partitions(conn: sa.Connection, domain: str) -> tuple[OwnedPartition, ...]:
    """The partitions that the site made, or has begun to make, in `domain`."""
    rows = conn.execute(_OWNED_IN_DOMAIN, {"here": domain})
    return tuple(
        OwnedPartition(
            name=row.name, logical_partition=row.logical_partition_id, partition_id=row.partition_id
        )
        for row in rows
    )


def claim_name(
    conn: sa.Connection, domain: str, wanted: CreatePartition, operation_id: int, now: float
) -> None:
    """Record the name of a partition about to be created. Raises Refused if the name means another."""
    same = sa.and_(owned_partition.c.domain == domain, owned_partition.c.name == wanted.name)
    existing = conn.execute(sa.select(owned_partition).where(same)).one_or_none()
    if existing is None:
        row = {"domain": domain, "name": wanted.name, "logical_partition_id": wanted.logical_partition}
        conn.execute(sa.insert(owned_partition).values(**row, operation_id=operation_id, created=now))
    elif existing.logical_partition_id == wanted.logical_partition:
        conn.execute(sa.update(owned_partition).where(same).values(operation_id=operation_id, created=now))
    else:
        raise Refused(f"partition name {wanted.name} already stands for another logical partition")


def take_ownership(
    conn: sa.Connection,
    seen: DomainObservation,
    partition: ObservedPartition,
    owner: str,
    operation_id: int,
    now: float,
) -> None:
    """Take over a partition that was found, for logical partition `owner` or RELEASED."""
    row: dict[str, Any] = {"domain": seen.domain, "name": partition.name, "logical_partition_id": owner}
    row |= {"partition_id": partition.id, "operation_id": operation_id, "seen_at": seen.observed_at}
    conn.execute(sa.insert(owned_partition).values(**row, created=now))


def update_owned_partitions(conn: sa.Connection, shown: Sequence[DomainObservation], now: float) -> None:
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
    for row in conn.execute(_OWNED_WITH_OPERATION, {"here": observation.domain}).all():
        mine = {"here": row.domain, "called": row.name}
        if row.name in seen:
            number, seen_at = seen[row.name]
            found = {"partition_id": number, "seen_at": max(seen_at, row.seen_at or 0.0)}
            conn.execute(_UPDATE_OWNED, {**mine, **found})
        elif _is_known_gone(conn, row, observation, now):
            conn.execute(
                sa.delete(owned_partition).where(
                    owned_partition.c.domain == row.domain, owned_partition.c.name == row.name
                )
            )
        elif row.partition_id is not None and row.seen_at < observation.observed_at:
            conn.execute(_UPDATE_OWNED, {**mine, "partition_id": None})


def omitted_partitions(conn: sa.Connection, domain: str) -> frozenset[str]:
    """Names of partitions that were seen once, that nobody deleted, and that the newest list omits."""
    return frozenset(conn.execute(_OMITTED, {"here": domain}).scalars())


def copy_ownership(conn: sa.Connection, domain: str, successor: str) -> None:
    """Let the names of `domain` be known in `successor` too, where its chassis answer now.

    The names stay in `domain` as long as a machine is there: it may have been split.
    """
    known = set(
        conn.execute(sa.select(owned_partition.c.name).where(owned_partition.c.domain == successor)).scalars()
    )
    rows = conn.execute(sa.select(owned_partition).where(owned_partition.c.domain == domain)).mappings().all()
    new = [{**row, "domain": successor} for row in rows if row["name"] not in known]
    if new:
        conn.execute(sa.insert(owned_partition), new)
    here = sa.select(machine.c.id).where(machine.c.domain == domain).limit(1)
    if conn.execute(here).first() is None:
        conn.execute(sa.delete(owned_partition).where(owned_partition.c.domain == domain))


def _is_known_gone(conn: sa.Connection, row: sa.Row[Any], observation: DomainObservation, now: float) -> bool:
    observed_at = observation.observed_at
    if row.seen_at is not None and row.seen_at >= observed_at:
        return False
    if observation.gpus and max(row.created, row.seen_at or 0.0) + FORGET_NAME_SECONDS < now:
        return True
    refused = row.seen_at is None and row.state == OperationState.REFUSED and row.finished <= observed_at
    return (refused or _was_deleted(conn, row)) and not _create_may_still_run(conn, row, now)


def _create_may_still_run(conn: sa.Connection, row: sa.Row[Any], now: float) -> bool:
    """Whether a create of this name is without an answer: a controller may carry it out after a deletion."""
    unanswered = _operations_on(CreatePartition, row).where(
        operation.c.state.in_((OperationState.UNKNOWN, OperationState.PENDING)),
        operation.c.started > now - FORGET_NAME_SECONDS,
    )
    return conn.execute(unanswered.limit(1)).first() is not None


def _was_deleted(conn: sa.Connection, row: sa.Row[Any]) -> bool:
    """Whether the controller carried out a deletion of the partition after it was last asked for and seen."""
    accepted = _operations_on(DeletePartition, row).where(
        operation.c.state == OperationState.DONE,
        operation.c.started >= row.created,
        # It may have been seen while the deletion was under way.
        operation.c.finished >= (row.seen_at or 0.0),
    )
    return conn.execute(accepted.limit(1)).first() is not None


def _operations_on(kind: type[CreatePartition | DeletePartition], row: sa.Row[Any]) -> sa.Select[tuple[int]]:
    """What was asked of the partition, also when its domain had another uuid."""
    here = sa.select(endpoint.c.id).where(endpoint.c.domain == row.domain)
    return sa.select(operation.c.id).where(
        operation.c.kind == str(kind.__struct_config__.tag),
        operation.c.partition_name == row.name,
        sa.or_(operation.c.domain == row.domain, operation.c.endpoint_id.in_(here)),
    )
