"""The audit log: caller, origin and result of each request. Entries are appended, read, and pruned by age.

An entry belongs to a request that changed something (`audit_trail`), or that was refused. `requests`
is the number of like requests that it stands for. An entry holds identifiers and names: no body, no token, no
secret. Of a body it has the names of the fields. Every text is cut to a limit. Nothing here changes an entry,
and only `remove_oldest` deletes any. `tenant_org` is the tenant that may read the entry, and `by_operator`
means that an operator or provider caused it.

Ids are in the order of the commits, because one transaction writes at a time. `page_of_entries` looks at
`WINDOW` entries at most, along one index (of the object, else of the tenant, else of the subject, else
of the log), and reports the id at which it stopped. So the cost of a page does not depend on the length
of the log. Times become ids by the index of times, give or take `CLOCK_SKEW`. The exact times are
compared afterwards.

Retention removes the oldest entries in small batches. `audit_removal` holds their number and the last id.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from rackloom.carve.store.prepared import PreparedStatement, owned_by
from rackloom.carve.store.schema import audit_entry, audit_removal

# Entries.


TEXT_LIMIT = 256
PATH_LIMIT = 512
MAX_FIELDS = 32
FIELD_LIMIT = 64
MAX_SILENCE = 30 * 24 * 3600.0
"""Seconds. A clock that is later than the newest entry by more than that is taken to be wrong."""
SITE = "site"
"""The channel of entries that the service itself writes."""
REST = "rest"
ADMIN = "admin"


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An entry. A field that does not apply is empty."""

    created: float = 0.0
    """The time of writing: ids and these times have the same order."""
    first: float | None = None
    last: float | None = None
    """The times of the first and the last refused request that the entry stands for."""
    requests: int = 1
    channel: str
    subject: str = ""
    org: str = ""
    """The organisation for which the caller acted, or empty for operators of the admin interface."""
    roles: str = ""
    by_operator: bool = False
    source: str = ""
    """The address of the client."""
    request_id: str = ""
    operation: str = ""
    """The operation of REST, or the RPC."""
    method: str = ""
    path: str = ""
    object_kind: str = ""
    object_id: str = ""
    object_name: str = ""
    tenant_org: str | None = None
    """The tenant that may read the entry."""
    status: int = 200
    """The HTTP status. For gRPC, the status that REST would have given."""
    code: str = ""
    """The gRPC status."""
    message: str = ""
    """The reason of the refusal."""
    reason: str = ""
    """The operator's reason, in the operator's words."""
    fields: tuple[str, ...] = ()
    """Names of the fields of the request."""
    duration_ms: int | None = None
    """From the arrival of the request to the entry."""


_LIMITS = {"path": PATH_LIMIT}
_TEXTS = (
    "subject", "org", "roles", "source", "operation", "path", "object_kind", "object_id", "object_name",
    "message", "reason",
)  # fmt: skip
_INSERT = PreparedStatement(sa.insert(audit_entry), *AuditRecord.__struct_fields__)


def append_entries(conn: sa.Connection, entries: Sequence[AuditRecord]) -> None:
    """Append entries to the log."""
    _INSERT.change_each(conn, [_row(entry) for entry in entries])


def _row(entry: AuditRecord) -> dict[str, Any]:
    row = msgspec.structs.asdict(entry)
    for name in _TEXTS:
        row[name] = stored_text(row[name], _LIMITS.get(name, TEXT_LIMIT))
    row["fields"] = [stored_text(name, FIELD_LIMIT) for name in entry.fields[:MAX_FIELDS]]
    return row


def stored_text(text: str, limit: int) -> str:
    """A text that every database stores: without NUL and unpaired surrogates, cut to `limit`."""
    if len(text) > limit:
        text = f"{text[: limit - 3]}..."
    if text.isascii() and "\x00" not in text:
        return text
    return text.replace("\x00", "").encode(errors="replace").decode()


# Reading.


WINDOW = 2_000
CLOCK_SKEW = 60.0
"""Seconds by which the clocks of replicas may differ: entries are in the order of commits, not of clocks."""


class EntryFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The wanted entries. None lets every entry pass."""

    tenant_org: str | None = None
    """Only those that this tenant may read."""
    since: float | None = None
    until: float | None = None
    before: int | None = None
    after: int | None = None
    """Only entries with smaller, or larger, ids."""
    subject: str | None = None
    org: str | None = None
    object_kind: str | None = None
    object_id: str | None = None
    operation: str | None = None
    method: str | None = None
    channel: str | None = None
    status: int | None = None
    failed: bool = False


class EntryPage(msgspec.Struct, frozen=True):
    """Entries, how many of those searched match, and the last id searched (None if all were searched)."""

    entries: Sequence[sa.Row[Any]]
    total: int
    stopped_at: int | None


def page_of_entries(
    conn: sa.Connection, wanted: EntryFilter, *, start: int, size: int, oldest_first: bool = False
) -> EntryPage:
    """`size` of the wanted entries after the first `start`. Looks at `WINDOW` entries at most."""
    window = _window(conn, wanted, oldest_first).subquery()
    conditions = _conditions(window.c, wanted)
    last_id = sa.func.max(window.c.id) if oldest_first else sa.func.min(window.c.id)
    looked_at, last = conn.execute(sa.select(sa.func.count(), last_id).select_from(window)).one()
    total = conn.execute(sa.select(sa.func.count()).select_from(window).where(*conditions)).scalar_one()
    order = window.c.id.asc() if oldest_first else window.c.id.desc()
    rows = sa.select(window).where(*conditions).order_by(order).limit(size).offset(start)
    return EntryPage(conn.execute(rows).all(), total, last if looked_at == WINDOW else None)


def _window(conn: sa.Connection, wanted: EntryFilter, oldest_first: bool) -> sa.Select[Any]:
    """The entries to look at, by one index."""
    entry = audit_entry.c
    order = entry.id.asc() if oldest_first else entry.id.desc()
    rows = sa.select(audit_entry).order_by(order).limit(WINDOW)
    if wanted.object_id is not None:
        rows = rows.where(entry.object_id == wanted.object_id)
    elif wanted.tenant_org is not None:
        rows = rows.where(owned_by(entry.tenant_org, wanted.tenant_org))
    elif wanted.subject is not None:
        rows = rows.where(entry.subject == wanted.subject)
    if wanted.before is not None:
        rows = rows.where(entry.id < wanted.before)
    if wanted.after is not None:
        rows = rows.where(entry.id > wanted.after)
    return rows.where(*_of_time_span(conn, wanted.since, wanted.until))


def _of_time_span(
    conn: sa.Connection, since: float | None, until: float | None
) -> list[sa.ColumnElement[bool]]:
    """Bounds of ids between which all entries of a time span are, and some others."""
    entry = audit_entry.c
    found: list[sa.ColumnElement[bool]] = []
    if since is not None:
        found.append(entry.id > (_last_id_before(conn, since - CLOCK_SKEW) or 0))
    if until is not None:
        later = (
            sa.select(entry.id).where(entry.created >= until + CLOCK_SKEW).order_by(entry.created).limit(1)
        )
        if (first := conn.execute(later).scalar_one_or_none()) is not None:
            found.append(entry.id < first)
    return found


def _last_id_before(conn: sa.Connection, time: float) -> int | None:
    entry = audit_entry.c
    earlier = sa.select(entry.id).where(entry.created < time).order_by(entry.created.desc()).limit(1)
    found: int | None = conn.execute(earlier).scalar_one_or_none()
    return found


def _conditions(entry: Any, wanted: EntryFilter) -> list[sa.ColumnElement[bool]]:
    equal = ("tenant_org", "subject", "org", "object_kind", "object_id", "operation", "method", "channel",
             "status")  # fmt: skip
    found: list[sa.ColumnElement[bool]] = [
        entry[name] == getattr(wanted, name) for name in equal if getattr(wanted, name) is not None
    ]
    if wanted.tenant_org is not None and (wanted.subject, wanted.method) != (None, None):
        # A filter must not reveal to a tenant the fields of operators' entries that it is not shown.
        found.append(entry.by_operator.is_(False))
    if wanted.since is not None:
        found.append(entry.created >= wanted.since)
    if wanted.until is not None:
        found.append(entry.created < wanted.until)
    if wanted.failed:
        found.append(entry.status >= 400)
    return found


def entry_with_id(
    conn: sa.Connection, entry_id: int, tenant_org: str | None, org: str | None
) -> sa.Row[Any] | None:
    """One entry that this tenant may read and that this organisation caused. None stands for any."""
    query = sa.select(audit_entry).where(audit_entry.c.id == entry_id)
    for column, wanted in ((audit_entry.c.tenant_org, tenant_org), (audit_entry.c.org, org)):
        if wanted is not None:
            query = query.where(column == wanted)
    return conn.execute(query).one_or_none()


def entries_after(
    conn: sa.Connection, after: int, since: float | None, until: float | None, limit: int
) -> Sequence[sa.Row[Any]]:
    """At most `limit` entries after the id `after`, oldest first, in a time span, give or take the skew."""
    rows = sa.select(audit_entry).where(audit_entry.c.id > after, *_of_time_span(conn, since, until))
    return conn.execute(rows.order_by(audit_entry.c.id).limit(limit)).all()


# Retention.


class KeptEntries(msgspec.Struct, frozen=True, kw_only=True):
    """The start of the log: its oldest entry, and the entries that retention removed before it."""

    oldest: int | None
    oldest_created: float | None
    removed: int
    removed_up_to: int | None
    removed_until: float | None
    """The time of writing of the newest removed entry."""


def kept_entries(conn: sa.Connection) -> KeptEntries:
    """The start of the log."""
    first = sa.select(audit_entry.c.id, audit_entry.c.created).order_by(audit_entry.c.id).limit(1)
    oldest, gone = conn.execute(first).first(), conn.execute(sa.select(audit_removal)).first()
    return KeptEntries(
        oldest=oldest.id if oldest else None,
        oldest_created=oldest.created if oldest else None,
        removed=gone.removed if gone else 0,
        removed_up_to=gone.up_to if gone else None,
        removed_until=gone.until if gone else None,
    )


def expired_up_to(conn: sa.Connection, keep_seconds: float, now: float, maximum: int) -> int:
    """The newest id that is to be removed: too old at `now`, or older than the newest `maximum` entries.

    A clock that is far ahead would make all entries old. One that is more than `MAX_SILENCE` later than the
    newest entry is not believed: the age of the others then counts from so long after that one. Nor does an
    entry with a wrong time take younger ones with it: removal for age ends before the first that is to stay.
    """
    entry = audit_entry.c
    surplus = sa.select(entry.id).order_by(entry.id.desc()).limit(1).offset(maximum)
    too_many = conn.execute(surplus).scalar_one_or_none() or 0
    newest = conn.execute(sa.select(entry.created).order_by(entry.id.desc()).limit(1)).scalar_one_or_none()
    if newest is None:
        return 0
    before = min(now, newest + MAX_SILENCE) - keep_seconds
    last_old = _last_id_before(conn, before) or 0
    kept = sa.select(sa.func.min(entry.id)).where(entry.id <= last_old, entry.created >= before)
    first_kept = conn.execute(kept).scalar_one_or_none() or last_old + 1
    too_old = conn.execute(sa.select(sa.func.max(entry.id)).where(entry.id < first_kept)).scalar_one_or_none()
    return max(too_many, too_old or 0)


def remove_oldest(conn: sa.Connection, up_to: int, limit: int) -> int:
    """Remove at most `limit` of the oldest entries up to an id. Return their number. It is recorded."""
    entry = audit_entry.c
    oldest = sa.select(entry.id, entry.created).where(entry.id <= up_to).order_by(entry.id).limit(limit)
    rows = conn.execute(oldest).all()
    if not rows:
        return 0
    last = rows[-1].id
    conn.execute(sa.delete(audit_entry).where(entry.id <= last))
    known = conn.execute(sa.select(audit_removal)).first()
    values = {"removed": len(rows) + (known.removed if known else 0), "up_to": last}
    values["until"] = max(row.created for row in rows)
    if known is None:
        conn.execute(sa.insert(audit_removal).values(id=1, **values))
    else:
        conn.execute(sa.update(audit_removal).values(**values))
    return len(rows)
