"""Write-ahead record of fabric operations, and the partitions that the site owns by name.

An operation is recorded as pending before the controller is called, with its author and reason. The
answer makes it done or refused. An answer that is lost makes it unknown at once. If the process was
killed before any answer, the operation becomes unknown once an observation begins after it.
`gpus_maybe_joining` lists the GPUs that an open operation may still put into a partition. No GPU of these
is reported as released. A controller may execute a request up to `LATE_SECONDS` after its caller gave up.

The name of a new partition is recorded in the same transaction as its create operation. A partition
that is found under a recorded name is therefore the site's, even when the answer to the create was lost in a
crash. A partition under any other name is foreign and is left alone.

`update_owned_partitions` takes partition ids from the observation. A name is dropped only when the
partition is known to be gone: it was deleted or its create was refused, no valid reading lists it, and
no create of that name is unanswered. Controllers were seen to omit a partition while all of its GPUs are
absent, so omission alone clears the id and keeps the name. After a day without any sight the name is
dropped.

Trays with GPUs in foreign partitions: recorded with each observation, and left out of placement.

A partition that the site did not make holds its GPUs until an operator adopts or releases it. An instance
on such a tray would wait for as long, so placement uses none. A tray is foreign if a valid reading of its
domain lists one of its GPUs in a partition with a name that the records do not have (or in a location-based
partition, which is never the site's). It is the planner's own rule, `foreign_partitions`, that decides.
So a restored backup needs no special rule: partitions that were made after the backup are not in its
records, and the first observation shows their trays as foreign.

`update_foreign_trays` records the trays of one domain. It runs when an observation is applied and when
an operator adopts or releases a partition. Placement reads only the table: observations of a large site
are too many to decode for each request, and foreign trays are few. While a domain cannot be read, its
trays stay as they were last seen.
"""

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.store.journal import OperatorOrder
from rackloom.carve.store.prepared import (
    PreparedStatement,
    delete_rows,
    find_row,
    has_row,
    insert_row,
    update_rows,
)
from rackloom.carve.store.schema import (
    endpoint,
    foreign_tray,
    logical_partition,
    machine,
    machine_gpu,
    operation,
    owned_partition,
    tenant,
)
from rackloom.carve.store.values import RELEASED_OWNER, OperationState, conflict
from rackloom.core.partitions.domain import (
    AddGpus,
    CreatePartition,
    DeletePartition,
    DomainObservation,
    ObservedPartition,
    OwnedPartition,
    PartitionOperation,
    RemoveGpus,
    foreign_partitions,
    is_tray_partition,
)
from rackloom.errors import Refused

# The record of operations.


INTERRUPTED_REASON = "the service stopped before the controller's answer was recorded"
LATE_SECONDS = 30.0
"""A controller may execute a request after its caller has given up, but not later than this."""
ABANDONED_SECONDS = 3600.0
"""No call takes so long: its process has died, and its endpoint may never answer again."""
ASKED_BY_SITE = "site"
"""The requester of operations that no tenant caused, such as the deletion of the default partition."""


def _operation_tag(kind: type[PartitionOperation]) -> str:
    return str(kind.__struct_config__.tag)


# Built once: every pass runs these.
_through_endpoint = operation.c.endpoint_id == sa.bindparam("through")
_INSERT_OPERATION = sa.insert(operation).returning(operation.c.id)
_UPDATE_OPERATION = sa.update(operation).where(operation.c.id == sa.bindparam("of"))
_through_any_endpoint = operation.c.endpoint_id.in_(
    sa.select(endpoint.c.id).where(endpoint.c.domain == sa.bindparam("here"))
)
_unanswered = sa.and_(
    operation.c.observed_after.is_(None),
    operation.c.state == OperationState.PENDING,
    operation.c.started < sa.bindparam("reading_at"),
)
_CLOSE_AS_UNKNOWN = sa.update(operation).values(
    state=OperationState.UNKNOWN, message=INTERRUPTED_REASON, finished=sa.bindparam("now")
)
_CLOSE_INTERRUPTED = _CLOSE_AS_UNKNOWN.where(_through_endpoint, _unanswered)
_CLOSE_ABANDONED = _CLOSE_AS_UNKNOWN.where(_through_any_endpoint, _unanswered)
_CONFIRM_OPERATIONS = (
    sa.update(operation)
    .where(
        _through_endpoint,
        operation.c.observed_after.is_(None),
        operation.c.finished <= sa.bindparam("reading_at"),
    )
    .values(observed_after=sa.bindparam("reading_at"))
)
_outcome_open = sa.or_(
    operation.c.state == OperationState.PENDING,
    sa.and_(operation.c.state == OperationState.UNKNOWN, operation.c.finished > sa.bindparam("late")),
    sa.and_(operation.c.state == OperationState.DONE, operation.c.finished > sa.bindparam("reading_at")),
)
_OPEN_JOINS = sa.select(operation.c.detail).where(
    operation.c.domain == sa.bindparam("domain"),
    _outcome_open,
    operation.c.kind.in_([_operation_tag(CreatePartition), _operation_tag(AddGpus)]),
)
_LOGICAL_PARTITION_NAME = (
    sa.select(logical_partition.c.name, tenant.c.org)
    .join(tenant, tenant.c.id == logical_partition.c.tenant_id)
    .where(logical_partition.c.id == sa.bindparam("partition"))
)
_OWNER_OF_NAME = (
    sa.select(owned_partition.c.logical_partition_id, operation.c.asked_by, operation.c.reason)
    .join(operation, operation.c.id == owned_partition.c.operation_id)
    .where(owned_partition.c.domain == sa.bindparam("domain"), owned_partition.c.name == sa.bindparam("name"))
)


def begin_operation_record(
    conn: sa.Connection,
    endpoint_id: str,
    domain: str,
    requested: PartitionOperation,
    observed_at: float,
    now: float,
) -> int:
    """Record that `requested` is about to be sent to the controller. Return its id."""
    asked_by, reason = _asker_and_reason(conn, domain, requested)
    row = {
        "endpoint_id": endpoint_id,
        "domain": domain,
        "kind": _operation_tag(type(requested)),
        "partition_name": requested.name,
        "asked_by": asked_by,
        "reason": reason,
        "detail": _operation_detail(requested),
        "state": OperationState.PENDING,
        "observed_at": observed_at,
        "started": now,
    }
    return int(conn.execute(_INSERT_OPERATION, row).scalar_one())


def record_operator_takeover(
    conn: sa.Connection,
    observation: DomainObservation,
    step: str,
    partition: ObservedPartition,
    order: OperatorOrder,
) -> int:
    """Record that an operator took over a found partition. Nothing is requested from the fabric."""
    through = sa.select(sa.func.min(endpoint.c.id)).where(endpoint.c.domain == observation.domain)
    row = {
        "endpoint_id": conn.execute(through).scalar_one(),
        "domain": observation.domain,
        "kind": f"{step}-partition",
        "partition_name": partition.name,
        "asked_by": order.by,
        "reason": order.reason,
        "detail": {"guids": [str(guid) for guid in sorted(partition.members)]},
        "state": OperationState.DONE,
        "observed_at": observation.observed_at,
        "started": order.now,
        "finished": order.now,
    }
    return int(conn.execute(_INSERT_OPERATION, row).scalar_one())


def finish_operation_record(
    conn: sa.Connection,
    operation_id: int,
    state: OperationState,
    code: str | None,
    message: str | None,
    now: float,
) -> None:
    """Record the controller's answer."""
    outcome = {"state": state, "code": code, "message": message, "finished": now}
    conn.execute(_UPDATE_OPERATION, {"of": operation_id, **outcome})


def close_interrupted_operations(
    conn: sa.Connection, endpoint_id: str, observed_at: float, now: float
) -> None:
    """Mark unanswered operations from before an observation as unknown: their process died.

    Passes over an endpoint run one after another, so no answer can still arrive.
    """
    conn.execute(_CLOSE_INTERRUPTED, {"through": endpoint_id, "reading_at": observed_at, "now": now})


def close_abandoned_operations(conn: sa.Connection, domain: str, observed_at: float, now: float) -> None:
    """As `close_interrupted_operations`, for operations begun long ago through any endpoint of `domain`."""
    conn.execute(
        _CLOSE_ABANDONED, {"here": domain, "reading_at": observed_at - ABANDONED_SECONDS, "now": now}
    )


def confirm_operations(conn: sa.Connection, endpoint_id: str, observed_at: float) -> None:
    """Record the first observation that began after the answer to each operation."""
    conn.execute(_CONFIRM_OPERATIONS, {"through": endpoint_id, "reading_at": observed_at})


def hand_over_operations(conn: sa.Connection, endpoint_id: str, successor: str) -> None:
    """Let observations through another endpoint close the unanswered operations of this one."""
    pending = {"endpoint_id": endpoint_id, "state": OperationState.PENDING}
    update_rows(conn, operation, pending, endpoint_id=successor)


def gpus_maybe_joining(conn: sa.Connection, domain: str | None, observed_at: float) -> frozenset[int]:
    """Fabric GUIDs that an operation may still put into a partition, as of an observation at `observed_at`.

    The answer is outstanding, never came, or came after the observation began. In each case the observation
    need not show the effect, so these GPUs may be in a partition that it does not list.
    """
    parameters = {"domain": domain, "reading_at": observed_at, "late": observed_at - LATE_SECONDS}
    details = conn.execute(_OPEN_JOINS, parameters).scalars()
    return frozenset(int(guid) for detail in details for guid in detail["guids"])


def _operation_detail(requested: PartitionOperation) -> Any:
    # GUIDs as text: JSON numbers lose the low bits of 64-bit values in most readers.
    detail = msgspec.to_builtins(requested)
    if "guids" in detail:
        detail["guids"] = [str(guid) for guid in detail["guids"]]
    return detail


def _asker_and_reason(conn: sa.Connection, domain: str, requested: PartitionOperation) -> tuple[str, str]:
    """The author and the reason, as tenants and operators read them in the audit."""
    if isinstance(requested, CreatePartition):
        partition_id = requested.logical_partition
    else:
        owner = conn.execute(_OWNER_OF_NAME, {"domain": domain, "name": requested.name}).one_or_none()
        if owner is None:
            return ASKED_BY_SITE, f"the site keeps no GPU in partition {requested.name}"
        partition_id = owner.logical_partition_id
        if partition_id == RELEASED_OWNER:
            return owner.asked_by, owner.reason
    if is_tray_partition(partition_id):
        return ASKED_BY_SITE, "GPUs that nobody was given share memory within their tray only"
    found = conn.execute(_LOGICAL_PARTITION_NAME, {"partition": partition_id}).one_or_none()
    if found is None:
        return ASKED_BY_SITE, f"logical partition {partition_id} was deleted"
    return found.org, f"members of logical partition {found.name} changed"


# Owned partitions, by name.


FORGET_NAME_SECONDS = 86400.0
"""Seconds for which a name is kept that no reading lists: a create without a known outcome, or a
partition that a list omits and that was not deleted. No controller is known to list one again after that."""


# Built once: every pass runs these.
_owned_in_domain = owned_partition.c.domain == sa.bindparam("here")
_OWNED_IN_DOMAIN = PreparedStatement(
    sa.select(owned_partition.c.name, owned_partition.c.logical_partition_id, owned_partition.c.partition_id)
    .where(_owned_in_domain)
    .order_by(owned_partition.c.name)
)
_OWNED_WITH_OPERATION = (
    sa.select(owned_partition, operation.c.state, operation.c.finished)
    .join(operation, operation.c.id == owned_partition.c.operation_id)
    .where(_owned_in_domain)
)
_OMITTED = sa.select(owned_partition.c.name).where(
    _owned_in_domain, owned_partition.c.seen_at.is_not(None), owned_partition.c.partition_id.is_(None)
)


def owned_partitions(conn: sa.Connection, domain: str) -> tuple[OwnedPartition, ...]:
    """The partitions that the site created or adopted in `domain`, and those that it has begun to create."""
    return tuple(_OWNED_IN_DOMAIN.records(conn, _owned_of, {"here": domain}))


def _owned_of(row: tuple[str, str, int | None]) -> OwnedPartition:
    name, logical_partition, partition_id = row
    return OwnedPartition(name=name, logical_partition=logical_partition, partition_id=partition_id)


def claim_name(
    conn: sa.Connection, domain: str, wanted: CreatePartition, operation_id: int, now: float
) -> None:
    """Record the name of a partition that is about to be created, before the controller is called.

    This makes a partition the site's: even if the answer is lost, a partition that is found under a
    recorded name was created here. Raises Refused if the name belongs to another logical partition.
    """
    name = {"domain": domain, "name": wanted.name}
    existing = find_row(conn, owned_partition, **name)
    claim = {"operation_id": operation_id, "created": now}
    if existing is None:
        insert_row(conn, owned_partition, **name, logical_partition_id=wanted.logical_partition, **claim)
    elif existing.logical_partition_id == wanted.logical_partition:
        update_rows(conn, owned_partition, name, **claim)
    else:
        raise Refused(f"partition name {wanted.name} already stands for another logical partition")


def take_ownership(
    conn: sa.Connection,
    observation: DomainObservation,
    partition: ObservedPartition,
    owner: str,
    operation_id: int,
    now: float,
) -> None:
    """Own a partition that was found, for the logical partition `owner` or for RELEASED_OWNER."""
    row: dict[str, Any] = {"domain": observation.domain, "name": partition.name, "partition_id": partition.id}
    row |= {"logical_partition_id": owner, "operation_id": operation_id, "seen_at": observation.observed_at}
    insert_row(conn, owned_partition, **row, created=now)


def give_up_ownership(conn: sa.Connection, domain: str, name: str) -> None:
    """Own an adopted partition no more: it is foreign again, and keeps its GPUs.

    Refused while the outcome of an operation on it is open, because its members are not known then.
    """
    open_operation = sa.exists().where(
        operation.c.domain == domain,
        operation.c.partition_name == name,
        operation.c.kind.in_(
            [_operation_tag(kind) for kind in (CreatePartition, AddGpus, RemoveGpus, DeletePartition)]
        ),
        operation.c.observed_after.is_(None),
    )
    if _is_any(conn, open_operation):
        raise conflict(f"an operation on partition {name} is not confirmed by an observation yet")
    delete_rows(conn, owned_partition, domain=domain, name=name)


def update_owned_partitions(conn: sa.Connection, readings: Sequence[DomainObservation], now: float) -> None:
    """Take partition ids from the valid readings, and drop the names of partitions that are known to be gone.

    `readings` has at least one, the newest first. A partition that any of them lists exists. A partition
    that none of them lists need not be gone, because controllers were seen to omit one while all of its GPUs
    are absent. It has no id until it is listed again, and its name stays the site's.

    Invariant: a name is dropped only when no partition of this name can appear later, or it would be taken
    for a foreign one and keep its GPUs for ever.
    """
    newest = readings[0]
    listed = {
        partition.name: (partition.id, reading.observed_at)
        for reading in reversed(readings)
        for partition in reading.partitions
    }
    for row in conn.execute(_OWNED_WITH_OPERATION, {"here": newest.domain}).all():
        name = {"domain": row.domain, "name": row.name}
        if row.name in listed:
            number, seen_at = listed[row.name]
            seen_at = max(seen_at, row.seen_at or seen_at)
            update_rows(conn, owned_partition, name, partition_id=number, seen_at=seen_at)
        elif _is_known_gone(conn, row, newest, now):
            delete_rows(conn, owned_partition, **name)
        elif row.partition_id is not None and row.seen_at < newest.observed_at:
            update_rows(conn, owned_partition, name, partition_id=None)


def omitted_partitions(conn: sa.Connection, domain: str) -> frozenset[str]:
    """Names of partitions that were listed once and not deleted, and that the newest reading omits."""
    return frozenset(conn.execute(_OMITTED, {"here": domain}).scalars())


def copy_ownership(conn: sa.Connection, domain: str, successor: str) -> None:
    """Own the partitions of `domain` also in `successor`, the domain uuid that its chassis report now.

    The names stay in `domain` as long as a machine is there: the domain may have been split.
    """
    known = set(
        conn.execute(sa.select(owned_partition.c.name).where(owned_partition.c.domain == successor)).scalars()
    )
    rows = conn.execute(sa.select(owned_partition).where(owned_partition.c.domain == domain)).mappings().all()
    new = [{**row, "domain": successor} for row in rows if row["name"] not in known]
    if new:
        conn.execute(sa.insert(owned_partition), new)
    if not has_row(conn, machine, domain=domain):
        delete_rows(conn, owned_partition, domain=domain)


def _is_known_gone(conn: sa.Connection, row: sa.Row[Any], newest: DomainObservation, now: float) -> bool:
    if row.seen_at is not None and row.seen_at >= newest.observed_at:
        return False
    # A reading without GPUs may be that of a standby, so names do not expire by it.
    if newest.gpus and max(row.created, row.seen_at or row.created) + FORGET_NAME_SECONDS < now:
        return True
    refused = (
        row.seen_at is None and row.state == OperationState.REFUSED and row.finished <= newest.observed_at
    )
    return (refused or _was_deleted(conn, row)) and not _create_may_still_run(conn, row, now)


def _create_may_still_run(conn: sa.Connection, row: sa.Row[Any], now: float) -> bool:
    """Whether a create of this name has no answer: the controller may execute it after a deletion."""
    unanswered = _operations_on(CreatePartition, row).where(
        operation.c.state.in_((OperationState.UNKNOWN, OperationState.PENDING)),
        operation.c.started > now - FORGET_NAME_SECONDS,
    )
    return _is_any(conn, unanswered)


def _was_deleted(conn: sa.Connection, row: sa.Row[Any]) -> bool:
    """Whether the controller deleted the partition after it was last requested and last listed."""
    accepted = _operations_on(DeletePartition, row).where(
        operation.c.state == OperationState.DONE,
        operation.c.started >= row.created,
        # A reading may have listed it while the deletion was running.
        operation.c.finished >= (row.seen_at or row.created),
    )
    return _is_any(conn, accepted)


def _operations_on(kind: type[CreatePartition | DeletePartition], row: sa.Row[Any]) -> sa.Exists:
    """Operations of this kind on the partition, also from when its domain had another uuid."""
    here = sa.select(endpoint.c.id).where(endpoint.c.domain == row.domain)
    return sa.exists().where(
        operation.c.kind == _operation_tag(kind),
        operation.c.partition_name == row.name,
        sa.or_(operation.c.domain == row.domain, operation.c.endpoint_id.in_(here)),
    )


def _is_any(conn: sa.Connection, operations: sa.Exists) -> bool:
    return bool(conn.execute(sa.select(operations)).scalar_one())


# Trays with GPUs in foreign partitions.


class ForeignTray(msgspec.Struct, frozen=True, order=True):
    """A tray with GPUs in a partition that the site did not make."""

    machine_id: str
    partition_id: int
    name: str
    """The name of the partition. It may reveal the owner: for operators only."""


# Built once: every new instance, and every pass that applies an observation, runs these.
is_in_foreign_partition = machine.c.id.in_(sa.select(foreign_tray.c.machine_id))
"""Whether a row of the machine table is a foreign tray."""
_ALL = sa.select(foreign_tray.c.machine_id, foreign_tray.c.partition_id, foreign_tray.c.name).order_by(
    foreign_tray.c.machine_id, foreign_tray.c.partition_id
)
_RECORDED_IN_DOMAIN = _ALL.join(machine, machine.c.id == foreign_tray.c.machine_id).where(
    machine.c.domain == sa.bindparam("domain")
)
_MACHINES_OF_GPUS = (
    sa.select(machine_gpu.c.guid, machine_gpu.c.machine_id)
    .join(machine, machine.c.id == machine_gpu.c.machine_id)
    .where(
        machine.c.domain == sa.bindparam("domain"),
        machine_gpu.c.guid.in_(sa.bindparam("guids", expanding=True)),
    )
)


def update_foreign_trays(conn: sa.Connection, domain: str, readings: Sequence[DomainObservation]) -> None:
    """Record the foreign trays of `domain`, as its valid readings show them.

    A reading that contradicts itself may omit a partition: it adds trays, and removes none.
    """
    names = {owned.name for owned in owned_partitions(conn, domain)}
    holders = [
        (str(guid), partition)
        for reading in readings
        for guid, partition in foreign_partitions(names, reading).items()
    ]
    parameters = {"domain": domain, "guids": sorted({guid for guid, _ in holders})}
    located = dict(map(tuple, conn.execute(_MACHINES_OF_GPUS, parameters))) if holders else {}
    # One row for each partition of a tray, with the name in the newest reading. PostgreSQL takes no NUL.
    by_key = {
        (located[guid], partition.id): partition.name.replace("\0", "\ufffd")
        for guid, partition in reversed(holders)
        if guid in located
    }
    trays = {ForeignTray(*key, name) for key, name in by_key.items()}
    recorded = set(foreign_trays_in_domain(conn, domain))
    is_certain = not any(reading.uncertain for reading in readings)
    for tray in sorted(recorded - trays):
        if not is_certain and (tray.machine_id, tray.partition_id) not in by_key:
            continue
        delete_rows(conn, foreign_tray, machine_id=tray.machine_id, partition_id=tray.partition_id)
    if new := sorted(trays - recorded):
        conn.execute(sa.insert(foreign_tray), [msgspec.structs.asdict(tray) for tray in new])


def foreign_trays(conn: sa.Connection, machine_ids: Collection[str] | None) -> dict[str, list[ForeignTray]]:
    """Foreign trays with the partitions that hold their GPUs, by number. None stands for all machines."""
    wanted = _ALL if machine_ids is None else _ALL.where(foreign_tray.c.machine_id.in_(machine_ids))
    found: dict[str, list[ForeignTray]] = {}
    for machine_id, partition_id, name in conn.execute(wanted):
        found.setdefault(machine_id, []).append(ForeignTray(machine_id, partition_id, name))
    return found


def foreign_trays_in_domain(conn: sa.Connection, domain: str) -> list[ForeignTray]:
    """The foreign trays of `domain`, by machine. One in several partitions is listed with each."""
    return [ForeignTray(*row) for row in conn.execute(_RECORDED_IN_DOMAIN, {"domain": domain})]


def foreign_partition_text(numbers: Collection[int]) -> str:
    """The reason why a tray is not free. By number: tenants read it, and a name would reveal the owner."""
    listed = " and ".join(map(str, sorted(numbers)))
    return f"in partition {listed}, which the site did not make"
