"""Journals: intent revisions, the site clock, status history, tenant events, operator steps.

Intent revisions: each change of what the site wants of an NVLink domain increments the domain's
revision in the same transaction. A plan names its revision, and is refused when the revision has
changed. On PostgreSQL the increment also notifies the other replicas, when the transaction commits; a second
notification says which traced request changed it.

Clock: whether an observation answers a request is decided by their times. `MonotonicSiteClock` counts
from the start of the process with the monotonic clock, and starts no earlier than the newest recorded
time. A wall clock that is set back can neither make old observations answer new requests, nor keep new
ones from counting.

Status history: the newest 20 entries of an object say what it was, why and when. The same status with
another reason replaces the reason; the same status and reason write nothing.

Tenant events: a transactional outbox, written in the transaction of the change itself. Numbers grow by
one within a tenant, and the row of the counter stays locked until the commit. So a number never becomes
visible before a smaller one. The newest 10,000 events of a tenant are kept.

Operator steps: who did what by hand, to which object, why and when. `OperatorOrder` carries who, why
and when.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

from rackloom.carve.store.prepared import PreparedListing, PreparedStatement, delete_rows
from rackloom.carve.store.schema import (
    domain_revision,
    event_counter,
    instance,
    nvlink_interface,
    observation,
    operation,
    operator_step,
    status_history,
    tenant_event,
)

# Intent revisions.


INTENT_CHANNEL = "rackloom_intent"
"""PostgreSQL notification channel for domains whose intent changed."""
CAUSE_CHANNEL = "rackloom_cause"
"""For `DOMAIN TRACEPARENT`: apart, because replicas of versions without traces read the other."""

_here = domain_revision.c.domain == sa.bindparam("here")
_CURRENT = PreparedStatement(sa.select(domain_revision.c.revision).where(_here))
_INCREMENT = sa.update(domain_revision).where(_here).values(revision=domain_revision.c.revision + 1)


def increment_revisions(conn: sa.Connection, domains: Iterable[str | None]) -> frozenset[str]:
    """Increment the revision of each domain; returns the domains, without None (not yet observed)."""
    known = frozenset(domain for domain in domains if domain is not None)
    for domain in sorted(known):
        if conn.execute(_INCREMENT, {"here": domain}).rowcount == 0:
            conn.execute(sa.insert(domain_revision).values(domain=domain, revision=1))
        # Delivered at the commit, and never for a transaction that is rolled back. SQLite has one process.
        if conn.dialect.name == "postgresql":
            conn.execute(sa.select(sa.func.pg_notify(INTENT_CHANNEL, domain)))
    return known


def notify_cause(conn: sa.Connection, domains: Iterable[str], cause: str) -> None:
    """Tell the replicas on PostgreSQL which traced request changed the intent of `domains`.

    `cause` is its `traceparent`.
    """
    for domain in sorted(domains):
        conn.execute(sa.select(sa.func.pg_notify(CAUSE_CHANNEL, f"{domain} {cause}")))


def current_revision(conn: sa.Connection, domain: str) -> int:
    """The intent revision of `domain`; 0 before the first intent."""
    row = _CURRENT.one_or_none(conn, {"here": domain})
    return 0 if row is None else int(row.revision)


# The clock.


_TIME_COLUMNS = (
    observation.c.observed_at,
    operation.c.started,
    instance.c.intent_at,
    nvlink_interface.c.intent_at,
)


class MonotonicSiteClock:
    """Seconds since the epoch at the start, and since then as `monotonic` counts them.

    `floor` is the newest recorded time: the clock starts no earlier, so records stay in the past.
    """

    def __init__(self, wall: Callable[[], float], monotonic: Callable[[], float], floor: float) -> None:
        self._monotonic = monotonic
        self._offset = max(wall(), floor) - monotonic()

    def __call__(self) -> float:
        """The time."""
        return self._offset + self._monotonic()


def newest_recorded_time(conn: sa.Connection) -> float:
    """The newest recorded time of an intent, an operation or an observation; 0 where there is none."""
    newest = [conn.execute(sa.select(sa.func.max(column))).scalar_one() for column in _TIME_COLUMNS]
    return max(filter(None, newest), default=0.0)


# Status history.


MAX_HISTORY_ENTRIES = 20


class StatusRecord(NamedTuple):
    """A status of an object, since when, and when its reason last changed."""

    object_id: str
    status: str
    message: str
    created: float
    updated: float


class NewestStatus(NamedTuple):
    """The newest entry of an object, and how many it has."""

    id: int
    object_id: str
    status: str
    message: str
    entries: int


def _newest_entries(wanted: sa.ColumnElement[bool]) -> sa.Select[Any]:
    of_objects = sa.select(sa.func.max(status_history.c.id).label("id"), sa.func.count().label("entries"))
    last = of_objects.where(wanted).group_by(status_history.c.object_id).subquery()
    columns = (status_history.c[name] for name in NewestStatus._fields[:-1])
    return sa.select(*columns, last.c.entries).join(last, last.c.id == status_history.c.id)


_NEWEST_ENTRIES = PreparedListing(_newest_entries, status_history.c.object_id)
_entries = sa.select(*(status_history.c[name] for name in StatusRecord._fields)).order_by(
    status_history.c.id.desc()
)
_ENTRIES_OF_OBJECTS = PreparedListing(_entries, status_history.c.object_id)
_of_object = status_history.c.object_id == sa.bindparam("of")
_kept_entries = (
    sa.select(status_history.c.id)
    .where(_of_object)
    .order_by(status_history.c.id.desc())
    .limit(MAX_HISTORY_ENTRIES)
)
_DELETE_OLD_ENTRIES = PreparedStatement(
    sa.delete(status_history).where(_of_object, status_history.c.id.not_in(_kept_entries))
)
_INSERT_ENTRY = PreparedStatement(sa.insert(status_history), *StatusRecord._fields)
_REPLACE_MESSAGE = (
    sa.update(status_history)
    .where(status_history.c.id == sa.bindparam("of"))
    .values(message=sa.bindparam("because"), updated=sa.bindparam("at"))
)


class StatusEntry(msgspec.Struct, frozen=True):
    """An object has a status, and why."""

    object_id: str
    status: str
    message: str


def record_status(conn: sa.Connection, object_id: str, status: str, message: str, now: float) -> bool:
    """Record that the object has `status` because of `message`; False when that is recorded already.

    A new reason alone replaces the old one.
    """
    entry, past = StatusEntry(object_id, status, message), newest_statuses(conn, [object_id])
    if not is_status_change(entry, past.get(object_id)):
        return False
    write_status_entries(conn, [entry], past, now)
    return True


def newest_statuses(conn: sa.Connection, object_ids: Collection[str]) -> dict[str, NewestStatus]:
    """The newest entry of each object that has one."""
    return {
        newest.object_id: newest for newest in _NEWEST_ENTRIES.records(conn, NewestStatus._make, object_ids)
    }


def is_status_change(entry: StatusEntry, past: NewestStatus | None) -> bool:
    """Whether `entry` differs from the newest entry."""
    return past is None or (past.status, past.message) != (entry.status, entry.message)


def write_status_entries(
    conn: sa.Connection, entries: Collection[StatusEntry], past: Mapping[str, NewestStatus], now: float
) -> None:
    """Write entries that are changes, at most one for each object; `past` are their newest entries."""
    same = [
        entry for entry in entries if entry.object_id in past and past[entry.object_id].status == entry.status
    ]
    if same:
        rows = [{"of": past[entry.object_id].id, "because": entry.message, "at": now} for entry in same]
        conn.execute(_REPLACE_MESSAGE, rows)
    if new := [entry for entry in entries if entry not in same]:
        begin_histories(conn, new, now)
        for entry in new:
            if entry.object_id in past and past[entry.object_id].entries >= MAX_HISTORY_ENTRIES:
                _DELETE_OLD_ENTRIES.change(conn, {"of": entry.object_id})


def begin_histories(conn: sa.Connection, entries: Collection[StatusEntry], now: float) -> None:
    """Write the first entries of objects that were just created, oldest first."""
    rows = [{**msgspec.structs.asdict(entry), "created": now, "updated": now} for entry in entries]
    _INSERT_ENTRY.change_each(conn, rows)


def status_histories(conn: sa.Connection, object_ids: Collection[str]) -> dict[str, list[StatusRecord]]:
    """The histories of `object_ids`, each newest first."""
    histories: dict[str, list[StatusRecord]] = defaultdict(list)
    for entry in _ENTRIES_OF_OBJECTS.records(conn, StatusRecord._make, object_ids):
        histories[entry.object_id].append(entry)
    return histories


def delete_histories(conn: sa.Connection, object_ids: Collection[str]) -> None:
    """Delete the histories of objects that no longer exist."""
    if len(object_ids) == 1:
        delete_rows(conn, status_history, object_id=next(iter(object_ids)))
        return
    conn.execute(sa.delete(status_history).where(status_history.c.object_id.in_(object_ids)))


# Tenant events: the outbox.


MAX_TENANT_EVENTS = 10_000
"""Events of a tenant that can be read again."""
EVENT_DELETED = "Deleted"
"""Status in the last event of an object; no object has it."""


# The counter advances last: databases differ in whether the parts of one statement see each other's changes.
_this_tenant = sa.bindparam("of", type_=sa.String)
_more = sa.bindparam("more", type_=sa.Integer)
_counter = sa.select(event_counter.c.newest).where(event_counter.c.tenant_id == _this_tenant)
_newest = sa.func.coalesce(_counter.scalar_subquery(), 0)
_INSERT_EVENT = PreparedStatement(
    sa.insert(tenant_event).values(number=_newest + _more),
    *(column.key for column in tenant_event.c if column.key != "number"),
)
_DELETE_OLD_EVENTS = PreparedStatement(
    sa.delete(tenant_event).where(
        tenant_event.c.tenant_id == _this_tenant,
        tenant_event.c.number <= _newest + _more - MAX_TENANT_EVENTS,
    ),
    is_apart=True,
)
_upsert = sa.insert(event_counter).values(tenant_id=_this_tenant, newest=_more)
# Both databases write this alike, and SQLAlchemy has an insertion of its own for each of them.
_upsert._post_values_clause = sa.text(
    "ON CONFLICT (tenant_id) DO UPDATE SET newest = event_counter.newest + excluded.newest"
)
_ADVANCE_COUNTER = PreparedStatement(_upsert)


class EventKind(StrEnum):
    """What an event is about."""

    LOGICAL_PARTITION = "nvlink-logical-partition"
    INTERFACE = "nvlink-interface"
    INSTANCE = "instance"
    VPC = "vpc"
    ALLOCATION = "allocation"
    DOMAIN = "nvlink-domain"


class EventNote(msgspec.Struct, frozen=True):
    """What happened to an object."""

    kind: EventKind
    object_id: str
    status: str
    message: str | None = None


class TenantEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A note with its number and time."""

    number: int
    note: EventNote
    created: float


def publish_events(conn: sa.Connection, tenant_id: str, notes: Sequence[EventNote], now: float) -> None:
    """Append `notes` to the tenant's events; the oldest beyond `MAX_TENANT_EVENTS` are deleted."""
    if not notes:
        return
    rows = [
        {
            "of": tenant_id,
            "tenant_id": tenant_id,
            "more": more,
            "created": now,
            **msgspec.structs.asdict(note),
        }
        for more, note in enumerate(notes, 1)
    ]
    all_of_them = [{"of": tenant_id, "more": len(notes)}]
    _DELETE_OLD_EVENTS.change_each(conn, all_of_them)
    _INSERT_EVENT.change_each(conn, rows)
    _ADVANCE_COUNTER.change_each(conn, all_of_them)


def record_and_publish(conn: sa.Connection, tenant_id: str, note: EventNote, now: float) -> None:
    """Write `note` into the history of its object and, when it is a change, into the events."""
    if record_status(conn, note.object_id, note.status, note.message or "", now):
        publish_events(conn, tenant_id, [note], now)


def record_and_publish_new(
    conn: sa.Connection, tenant_id: str, notes: Sequence[EventNote], now: float
) -> Sequence[StatusRecord]:
    """As `record_and_publish`, for the first `notes` of an object that was just created.

    Returns its history, newest first.
    """
    entries = [StatusEntry(note.object_id, note.status, note.message or "") for note in notes]
    begin_histories(conn, entries, now)
    publish_events(conn, tenant_id, notes, now)
    return [
        StatusRecord(entry.object_id, entry.status, entry.message, now, now) for entry in reversed(entries)
    ]


def events_after(conn: sa.Connection, tenant_id: str, number: int, limit: int) -> tuple[TenantEvent, ...]:
    """The events after `number`, oldest first, at most `limit`."""
    newer = sa.select(tenant_event).where(
        tenant_event.c.tenant_id == tenant_id, tenant_event.c.number > number
    )
    return tuple(
        TenantEvent(
            number=row.number,
            note=EventNote(EventKind(row.kind), row.object_id, row.status, row.message),
            created=row.created,
        )
        for row in conn.execute(newer.order_by(tenant_event.c.number).limit(limit))
    )


def newest_event_number(conn: sa.Connection, tenant_id: str) -> int:
    """Number of the tenant's newest event; 0 before the first."""
    found = conn.execute(sa.select(event_counter.c.newest).where(event_counter.c.tenant_id == tenant_id))
    return found.scalar_one_or_none() or 0


# Operator steps.


class Step(StrEnum):
    """What an operator can do to a domain, machine, partition or endpoint, or for an organisation."""

    PAUSE = "pause"
    RESUME = "resume"
    CORDON = "cordon"
    UNCORDON = "uncordon"
    DRAIN = "drain"
    END_DRAIN = "end-drain"
    FORCE_DELETE = "force-delete"
    ADOPT = "adopt"
    RELEASE = "release"
    CREATE_ENDPOINT = "create-endpoint"
    UPDATE_ENDPOINT = "update-endpoint"
    DELETE_ENDPOINT = "delete-endpoint"
    SWITCH_POWER = "switch-power"
    UPDATE_FIRMWARE = "update-firmware"
    IMPORT = "import"
    UNDO_IMPORT = "undo-import"
    RESERVE = "reserve"
    CHANGE_RESERVATION = "change-reservation"
    END_RESERVATION = "end-reservation"
    DELETE_MACHINE = "delete-machine"


class OperatorOrder(msgspec.Struct, frozen=True):
    """Who asks, why, and when (seconds since the epoch)."""

    by: str
    reason: str
    now: float
    valid_from: float = 0.0
    """Readings from before are no evidence of what the order is about."""


def record_operator_step(
    conn: sa.Connection, step: Step, subject: str, domain: str | None, order: OperatorOrder
) -> None:
    """Record that `step` was done to `subject`: a domain, machine, partition, chassis or import."""
    row = {"step": step, "subject": subject, "domain": domain, "asked_by": order.by, "reason": order.reason}
    conn.execute(sa.insert(operator_step).values(**row, created=order.now))


_import_steps = operator_step.c.step.in_((Step.IMPORT, Step.UNDO_IMPORT))
_newest_import_steps = (
    sa.select(sa.func.max(operator_step.c.id)).where(_import_steps).group_by(operator_step.c.subject)
)
_IMPORTED = sa.select(operator_step.c.subject).where(
    operator_step.c.id.in_(_newest_import_steps), operator_step.c.step == Step.IMPORT
)


def imported_subjects(conn: sa.Connection) -> frozenset[str]:
    """What imports created and nobody has undone."""
    return frozenset(conn.execute(_IMPORTED).scalars())


def is_imported(conn: sa.Connection, subject: str) -> bool:
    """Whether an import created `subject`, and nobody has undone that."""
    newest = sa.select(operator_step.c.step).where(_import_steps, operator_step.c.subject == subject)
    step = conn.execute(newest.order_by(operator_step.c.id.desc()).limit(1)).scalar_one_or_none()
    return step == Step.IMPORT
