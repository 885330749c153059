"""The audit of everything that was asked of the fabric: what, for whom, why, and what came of it."""

from enum import StrEnum
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.plan.trays import is_tray
from rackloom.carve.plan.values import AddGpus, CreatePartition, Observation, ObservedPartition, Operation
from rackloom.carve.site.operator_steps import Order
from rackloom.carve.site.tables import endpoint, logical_partition, owned_partition, tenant
from rackloom.carve.site.tables import operation as table
from rackloom.carve.site.values import RELEASED


class OperationState(StrEnum):
    """Whether the controller carried it out."""

    PENDING = "pending"
    DONE = "done"
    REFUSED = "refused"
    UNKNOWN = "unknown"


INTERRUPTED = "the service stopped before the controller's answer was recorded"
LATE_SECONDS = 30.0
"""A controller may carry a request out after its caller has given up, but not longer than this after."""
GIVEN_UP_SECONDS = 3600.0
"""No call takes so long: whoever began it has died, and its endpoint need never answer again."""
SITE = "site"
"""Who asks for what no tenant asked for, such as the end of the factory default partition."""


def _tag(kind: type[Operation]) -> str:
    return str(kind.__struct_config__.tag)


# Built once: every pass asks these.
_through = table.c.endpoint_id == sa.bindparam("through")
_BEGIN = sa.insert(table).returning(table.c.id)
_CHANGE = sa.update(table).where(table.c.id == sa.bindparam("of"))
_through_any = table.c.endpoint_id.in_(
    sa.select(endpoint.c.id).where(endpoint.c.domain == sa.bindparam("here"))
)
_unanswered = sa.and_(
    table.c.observed_after.is_(None),
    table.c.state == OperationState.PENDING,
    table.c.started < sa.bindparam("seen"),
)
_CLOSE_AS_UNKNOWN = sa.update(table).values(
    state=OperationState.UNKNOWN, message=INTERRUPTED, finished=sa.bindparam("now")
)
_CLOSE = _CLOSE_AS_UNKNOWN.where(_through, _unanswered)
_CLOSE_GIVEN_UP = _CLOSE_AS_UNKNOWN.where(_through_any, _unanswered)
_CONFIRM = (
    sa.update(table)
    .where(_through, table.c.observed_after.is_(None), table.c.finished <= sa.bindparam("seen"))
    .values(observed_after=sa.bindparam("seen"))
)
_outcome_open = sa.or_(
    table.c.state == OperationState.PENDING,
    sa.and_(table.c.state == OperationState.UNKNOWN, table.c.finished > sa.bindparam("late")),
    sa.and_(table.c.state == OperationState.DONE, table.c.finished > sa.bindparam("seen")),
)
_JOINING = sa.select(table.c.detail).where(
    table.c.domain == sa.bindparam("domain"),
    _outcome_open,
    table.c.kind.in_([_tag(CreatePartition), _tag(AddGpus)]),
)
_NAMED = (
    sa.select(logical_partition.c.name, tenant.c.org)
    .join(tenant, tenant.c.id == logical_partition.c.tenant_id)
    .where(logical_partition.c.id == sa.bindparam("partition"))
)
_OWNER = (
    sa.select(owned_partition.c.logical_partition_id, table.c.asked_by, table.c.reason)
    .join(table, table.c.id == owned_partition.c.operation_id)
    .where(owned_partition.c.domain == sa.bindparam("domain"), owned_partition.c.name == sa.bindparam("name"))
)


def begin(
    conn: sa.Connection, endpoint_id: str, domain: str, operation: Operation, observed_at: float, now: float
) -> int:
    """Record that `operation` is about to be asked for; returns its id."""
    asked_by, reason = _why(conn, domain, operation)
    row = {
        "endpoint_id": endpoint_id,
        "domain": domain,
        "kind": _tag(type(operation)),
        "partition_name": operation.name,
        "asked_by": asked_by,
        "reason": reason,
        "detail": _detail(operation),
        "state": OperationState.PENDING,
        "observed_at": observed_at,
        "started": now,
    }
    new: int = conn.execute(_BEGIN, row).scalar_one()
    return new


def note_by_hand(
    conn: sa.Connection, seen: Observation, step: str, partition: ObservedPartition, order: Order
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
    new: int = conn.execute(_BEGIN, row).scalar_one()
    return new


def finish(
    conn: sa.Connection,
    operation_id: int,
    state: OperationState,
    code: str | None,
    message: str | None,
    now: float,
) -> None:
    """Record what the controller answered."""
    outcome = {"state": state, "code": code, "message": message, "finished": now}
    conn.execute(_CHANGE, {"of": operation_id, **outcome})


def close_interrupted(conn: sa.Connection, endpoint_id: str, observed_at: float, now: float) -> None:
    """Mark as unknown what was begun before an observation and never answered: the asker has died."""
    conn.execute(_CLOSE, {"through": endpoint_id, "seen": observed_at, "now": now})


def close_given_up(conn: sa.Connection, domain: str, observed_at: float, now: float) -> None:
    """As `close_interrupted`, of what was begun long ago through any endpoint of `domain`."""
    conn.execute(_CLOSE_GIVEN_UP, {"here": domain, "seen": observed_at - GIVEN_UP_SECONDS, "now": now})


def confirm(conn: sa.Connection, endpoint_id: str, observed_at: float) -> None:
    """Note the first observation that was begun after the answer to each operation."""
    conn.execute(_CONFIRM, {"through": endpoint_id, "seen": observed_at})


def hand_over(conn: sa.Connection, endpoint_id: str, successor: str) -> None:
    """Let the observations of another endpoint close what this one left unanswered."""
    open_ones = sa.and_(table.c.endpoint_id == endpoint_id, table.c.state == OperationState.PENDING)
    conn.execute(sa.update(table).where(open_ones).values(endpoint_id=successor))


def joining(conn: sa.Connection, domain: str | None, observed_at: float) -> frozenset[int]:
    """Fabric GUIDs that an operation may yet put into a partition, as far as a look at `observed_at` tells.

    Its answer is still out, never came, or came after the look was begun: it need not show what became of it.
    """
    asked = {"domain": domain, "seen": observed_at, "late": observed_at - LATE_SECONDS}
    under_way = conn.execute(_JOINING, asked).scalars()
    return frozenset(int(guid) for detail in under_way for guid in detail["guids"])


def _detail(operation: Operation) -> Any:
    # GUIDs as text: JSON numbers lose the low bits of 64-bit values in most readers.
    detail = msgspec.to_builtins(operation)
    if "guids" in detail:
        detail["guids"] = [str(guid) for guid in detail["guids"]]
    return detail


def _why(conn: sa.Connection, domain: str, operation: Operation) -> tuple[str, str]:
    if isinstance(operation, CreatePartition):
        partition_id = operation.logical_partition
    else:
        owner = _owner(conn, domain, operation.name)
        if owner is None:
            return SITE, f"the site keeps no GPU in partition {operation.name}"
        partition_id = owner.logical_partition_id
        if partition_id == RELEASED:
            return owner.asked_by, owner.reason
    if is_tray(partition_id):
        return SITE, "GPUs that nobody was given share memory within their tray only"
    found = conn.execute(_NAMED, {"partition": partition_id}).one_or_none()
    if found is None:
        return SITE, f"logical partition {partition_id} was deleted"
    return found.org, f"members of logical partition {found.name} changed"


def _owner(conn: sa.Connection, domain: str, name: str) -> sa.Row[Any, Any, Any] | None:
    """For which logical partition the site has the partition, and who asked for that."""
    return conn.execute(_OWNER, {"domain": domain, "name": name}).one_or_none()
