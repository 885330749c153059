"""REST: the audit log. A provider of the site reads all of it, a tenant the entries that concern it.

The path and the fields are those of upstream. `body` is always null, because a body may hold secrets.
`fields` names the fields that it had. A tenant reads its own requests and the actions of operators on its
objects. For an operator's action it sees the time and the result, but neither the person nor the address.

Pages hold the newest entries first. A page looks at 2,000 entries at most, and its total counts those of
them that match. If there may be more, the header `X-Audit-Continue` has the parameter for the next page.
Filter by object, by user or by time to reach older entries at once.
"""

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import sqlalchemy as sa
from fastapi import Path
from pydantic import AwareDatetime, Field
from starlette.responses import Response

from rackloom.carve.api import routing
from rackloom.carve.api.access import PROVIDERS_ONLY
from rackloom.carve.api.auth import Caller, Role
from rackloom.carve.api.routing import Deps, Params, ProviderReader, Reader, Row
from rackloom.carve.api.wire import Answer, Json, PageQuery, Text, shape
from rackloom.carve.store import audit
from rackloom.carve.store.audit import EntryFilter, EntryPage
from rackloom.carve.store.schema import site
from rackloom.carve.store.values import forbidden, invalid, not_found
from rackloom.carve.tenancy import entitlements

# Query parameters.


class AuditQuery(PageQuery):
    """Filters on the audit log."""

    failed_only: bool = False
    since: AwareDatetime | None = None
    until: AwareDatetime | None = None
    before: UUID | None = None
    after: UUID | None = None
    user_id: Text | None = Field(None, alias="userID")
    object_kind: Text | None = None
    object_id: Text | None = None
    operation_id: Text | None = None
    method: Text | None = None
    status_code: Annotated[int, Field(ge=100, le=599)] | None = None
    channel: Literal["rest", "admin", "site"] | None = Field(None, json_schema_extra=PROVIDERS_ONLY)
    org_name: Text | None = Field(None, json_schema_extra=PROVIDERS_ONLY)


ORDERS = {
    None: False,
    "TIMESTAMP_DESC": False,
    "CREATED_DESC": False,
    "TIMESTAMP_ASC": True,
    "CREATED_ASC": True,
}
"""`orderBy` -> whether the oldest entries come first."""

# Response models.


class AuditEntry(Answer):
    """A request, its caller and its outcome."""

    id: UUID
    endpoint: str | None
    query_params: str | None
    method: str | None
    body: str | None
    status_code: int
    status_message: str | None
    client_ip: str | None = Field(alias="clientIP")
    user_id: str | None = Field(alias="userID")
    user: dict[str, Any] | None
    org_name: str | None
    extra_data: dict[str, Any]
    timestamp: datetime
    duration_ms: int | None
    api_version: str
    request_id: str | None
    operation_id: str
    roles: list[str]
    object_kind: str | None
    object_id: str | None
    object_name: str | None
    fields: list[str]
    requests: int
    first_timestamp: datetime | None
    last_timestamp: datetime | None
    by_site_operator: bool
    channel: str = Field("", json_schema_extra=PROVIDERS_ONLY)
    tenant_org: str | None = Field(None, json_schema_extra=PROVIDERS_ONLY)
    rpc_status: str | None = Field(None, json_schema_extra=PROVIDERS_ONLY)
    reason: str | None = Field(None, json_schema_extra=PROVIDERS_ONLY)


class AuditRetention(Answer):
    """The start of the audit log, and the entries that were removed before it."""

    oldest_entry_id: UUID | None
    oldest_timestamp: datetime | None
    removed_entries: int
    removed_up_to: UUID | None
    removed_until: datetime | None


# From rows to responses.


API_VERSION = "v2"
SOMEBODY = "operator of the site"
"""The user that a tenant sees if an operator made the request."""


def _tenant_entry_shape(row: Row) -> Json:
    """An entry for the tenant that it concerns."""
    if not row.by_operator:
        return _shape(row)
    hidden = dict.fromkeys(("endpoint", "method", "status_message", "client_ip", "request_id"))
    return _shape(row, **hidden, user_id=SOMEBODY, org_name=None, roles=[], fields=[], duration_ms=None)


def _shape(row: Row, **chosen: object) -> Json:
    fields: dict[str, object] = {
        "id": _shown_id(row.id),
        "endpoint": row.path or None,
        "query_params": None,
        "method": row.method or None,
        "body": None,
        "status_code": row.status,
        "status_message": row.message or None,
        "client_ip": row.source or None,
        "user_id": row.subject or None,
        "user": None,
        "org_name": row.org or None,
        "extra_data": {},
        "timestamp": row.created,
        "api_version": API_VERSION,
        "request_id": row.request_id or None,
        "operation_id": row.operation,
        "roles": row.roles.split(),
        "object_kind": row.object_kind or None,
        "object_id": row.object_id or None,
        "object_name": row.object_name or None,
        "first_timestamp": row.first,
        "last_timestamp": row.last,
        "by_site_operator": row.by_operator,
    }
    return shape(AuditEntry, row, **(fields | chosen))


# Routes.


router = routing.Operations()

CONTINUE_HEADER = "X-Audit-Continue"
EntryId = Annotated[UUID, Path(alias="auditEntryId")]


@router.get("/audit", "get-all-audit-entry", list[AuditEntry])
async def list_entries(deps: Deps, caller: Reader, query: Params[AuditQuery]) -> Response:
    """Requests with their callers and outcomes, newest first."""
    if query.order_by not in ORDERS:
        wanted = ", ".join(name for name in ORDERS if name)
        raise invalid("Invalid orderBy value in query", orderBy=f"must be one of {wanted}")
    oldest_first = ORDERS[query.order_by]

    def read(conn: sa.Connection) -> tuple[_Scope, EntryPage]:
        scope = _scope_of(conn, caller)
        start = (query.page_number - 1) * query.page_size
        wanted = _filter_of(query, scope)
        return scope, audit.page_of_entries(
            conn, wanted, start=start, size=query.page_size, oldest_first=oldest_first
        )

    scope, page = await deps.store.read(read)
    response = routing.page_response([scope.shape(row) for row in page.entries], page.total, query)
    if page.stopped_at is not None:
        response.headers[CONTINUE_HEADER] = (
            f"{'after' if oldest_first else 'before'}={_shown_id(page.stopped_at)}"
        )
    return response


@router.get("/audit/retention", "get-audit-retention", AuditRetention)
def read_retention(conn: sa.Connection, caller: ProviderReader) -> Json:
    """The oldest entry that is kept, and the number of entries that were removed before it."""
    if not _scope_of(conn, caller).is_whole_site:
        raise forbidden("Only the provider of the site can read how its audit log is kept")
    kept = audit.kept_entries(conn)
    return shape(
        AuditRetention,
        kept,
        oldest_entry_id=_shown_id(kept.oldest),
        oldest_timestamp=kept.oldest_created,
        removed_entries=kept.removed,
        removed_up_to=_shown_id(kept.removed_up_to),
    )


@router.get("/audit/{auditEntryId}", "get-audit-entry", AuditEntry)
def get_entry(conn: sa.Connection, caller: Reader, entry_id: EntryId) -> Json:
    """One entry."""
    scope = _scope_of(conn, caller)
    row = audit.entry_with_id(conn, _stored_id(entry_id), scope.tenant_org, scope.org)
    if row is None:
        raise not_found(f"Could not find audit entry with ID: {entry_id}")
    return scope.shape(row)


class _Scope(msgspec.Struct, frozen=True):
    """The entries that a caller may read: those of a tenant, those that an organisation caused, or all."""

    tenant_org: str | None = None
    org: str | None = None

    @property
    def is_whole_site(self) -> bool:
        """Whether the caller may read all entries."""
        return self.tenant_org is None and self.org is None

    def shape(self, row: Row) -> Json:
        """An entry as the caller sees it."""
        return (
            _shape(
                row,
                channel=row.channel,
                tenant_org=row.tenant_org,
                rpc_status=row.code or None,
                reason=row.reason or None,
            )
            if self.tenant_org is None
            else _tenant_entry_shape(row)
        )


def _scope_of(conn: sa.Connection, caller: Caller) -> _Scope:
    provider, _ = routing.provider_and_tenant(conn, caller)
    if provider and set(conn.execute(sa.select(site.c.provider_id)).scalars()) == {provider}:
        return _Scope()
    if Role.TENANT_ADMIN in caller.roles:
        return _Scope(tenant_org=caller.org)
    # The records may have sites of other providers too, so each provider reads its own requests.
    entitlements.provider_id_of(conn, caller.org)
    return _Scope(org=caller.org)


def _filter_of(query: AuditQuery, scope: _Scope) -> EntryFilter:
    return EntryFilter(
        tenant_org=scope.tenant_org,
        since=None if query.since is None else query.since.timestamp(),
        until=None if query.until is None else query.until.timestamp(),
        before=None if query.before is None else _stored_id(query.before),
        after=None if query.after is None else _stored_id(query.after),
        subject=query.user_id,
        org=scope.org or query.org_name,
        object_kind=query.object_kind,
        object_id=query.object_id,
        operation=query.operation_id,
        method=query.method,
        channel=query.channel,
        status=query.status_code,
        failed=query.failed_only,
    )


# Ids are positions in the log. Upstream's are uuids, and clients may expect some.


LARGEST_ID = 2**31 - 1


def _shown_id(entry_id: int | None) -> str | None:
    return None if entry_id is None else str(UUID(int=entry_id))


def _stored_id(shown: UUID) -> int:
    return min(shown.int, LARGEST_ID)
