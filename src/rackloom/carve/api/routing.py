"""What routes share: dependencies and callers, pages, filters, related objects, histories, responses.

`Deps` and the caller types (`TenantAdmin`, `ProviderAdmin`, `ProviderReader`, `Reader`, `AnyCaller`)
are FastAPI dependencies; a route declares the role that it needs. `ApiDeps.change` runs a change in a
write transaction and then wakes the reconciler of the affected domains. The work reads the clock inside
the transaction: an intent dated before its commit would seem to be answered by an observation that
began before anyone knew of it. With `auto_tenant`, an organization becomes a tenant at its first
request, with every machine allocated.

`fetch_page` returns the rows of one page and the total. The order may name only known fields, and the
id breaks ties. Page data go into the `X-Pagination` header. `add_relations` adds related objects with
one query per kind, not per row. There is one error body.

The wire has no Unknown status for instances: it is shown as Configuring, which claims nothing. Clients
generated from the published description reject a whole response for an unknown status value.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Annotated, Any, Protocol, TypeAlias, TypeVar
from uuid import UUID

import msgspec
import sqlalchemy as sa
from fastapi import Depends
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from rackloom.carve.api.auth import Caller, Role, TokenVerifier
from rackloom.carve.api.wire import Because, PageQuery, PageRequest
from rackloom.carve.observation.latest import rfc3339
from rackloom.carve.store import journal, schema
from rackloom.carve.store.database import Store
from rackloom.carve.store.journal import OperatorOrder, StatusRecord
from rackloom.carve.store.values import Changed, IdFactory, Status, invalid
from rackloom.carve.tenancy import entitlements

# Dependencies of routes.


T = TypeVar("T")


class ApiDeps(msgspec.Struct, frozen=True, kw_only=True):
    """What the API needs from its service."""

    store: Store
    clock: Callable[[], float]
    """Seconds since the epoch."""
    ids: IdFactory
    wake: Callable[[frozenset[str]], None]
    """Called after a commit with the NVLink domains whose intent changed; empty when none is known yet."""
    verifier: TokenVerifier
    auto_tenant: bool = False
    """An org with a valid token becomes a tenant at first use, with every machine of every type allocated."""

    async def change(self, work: Callable[[sa.Connection], Changed[T]]) -> T:
        """Run `work` in a write transaction, then wake the reconciler of the domains that it touched.

        `work` reads the clock inside the transaction: an observation that began before the intent was known
        must not seem to answer it.
        """
        changed = await self.store.run(work)
        self.wake(changed.domains)
        return changed.value


async def _request_deps(request: Request) -> ApiDeps:
    deps: ApiDeps = request.app.state.deps
    return deps


async def _request_caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


Deps = Annotated[ApiDeps, Depends(_request_deps)]
AnyCaller = Annotated[Caller, Depends(_request_caller)]


async def _tenant_admin(request: Request, deps: Deps, caller: AnyCaller) -> Caller:
    caller.require(Role.TENANT_ADMIN)
    await _ensure_tenant(request, deps, caller)
    return caller


async def _provider_admin(caller: AnyCaller) -> Caller:
    caller.require(Role.PROVIDER_ADMIN)
    return caller


async def _provider_reader(caller: AnyCaller) -> Caller:
    caller.require(Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER)
    return caller


async def _reader(request: Request, deps: Deps, caller: AnyCaller) -> Caller:
    caller.require(Role.TENANT_ADMIN, Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER)
    if Role.TENANT_ADMIN in caller.roles:
        await _ensure_tenant(request, deps, caller)
    return caller


TenantAdmin = Annotated[Caller, Depends(_tenant_admin)]
ProviderAdmin = Annotated[Caller, Depends(_provider_admin)]
ProviderReader = Annotated[Caller, Depends(_provider_reader)]
Reader = Annotated[Caller, Depends(_reader)]


async def _ensure_tenant(request: Request, deps: ApiDeps, caller: Caller) -> None:
    # Tenants are never removed, so each org is looked up once.
    known: set[str] = request.app.state.tenants_seen
    if deps.auto_tenant and caller.org not in known:
        await deps.store.run(_create_tenant, caller.org, deps.clock(), deps.ids)
        known.add(caller.org)


def _create_tenant(conn: sa.Connection, org: str, now: float, ids: IdFactory) -> None:
    if entitlements.find_tenant(conn, org) is None:
        tenant = entitlements.ensure_tenant(conn, org, now, ids)
        entitlements.grant_everything(conn, tenant.id, now, ids)


# For whom a caller reads: as provider, as tenant, or both.


AnySelect: TypeAlias = sa.Select[Any]
Row = sa.Row[Any]
Rows = Sequence[Row]


def provider_and_tenant(conn: sa.Connection, caller: Caller) -> tuple[str, str]:
    """The provider id and tenant id of the caller, as far as its roles go.

    Empty where it has none: no record has an empty id, whereas None would match null columns.
    """
    provider = entitlements.find_provider(conn, caller.org)
    tenant = entitlements.find_tenant(conn, caller.org)
    provides = not caller.roles.isdisjoint((Role.PROVIDER_ADMIN, Role.PROVIDER_VIEWER))
    return (
        provider.id if provider and provides else "",
        tenant.id if tenant and Role.TENANT_ADMIN in caller.roles else "",
    )


# Operator orders.


def operator_order(deps: ApiDeps, caller: Caller, body: Because) -> OperatorOrder:
    """The order that the caller gives with this body."""
    return OperatorOrder(caller.subject, body.reason, deps.clock())


# Responses.


Json = dict[str, Any]

ERROR_SOURCE = "nico"
SLICE_ORDER_FIELDS = ("STATUS", "CREATED", "UPDATED")


def json_response(
    value: object, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> Response:
    """`value` as JSON."""
    return Response(msgspec.json.encode(value), status, dict(headers or {}), "application/json")


def created_response(value: object) -> Response:
    """A new object, or several."""
    return json_response(value, HTTPStatus.CREATED)


def page_response(values: Sequence[Json], total: int, page: PageRequest) -> Response:
    """A page as a bare array; the X-Pagination header describes it."""
    page_info = {"pageNumber": page.number, "pageSize": page.size, "total": total, "orderBy": page.order_by}
    return json_response(values, headers={"X-Pagination": msgspec.json.encode(page_info).decode()})


def sliced_response(values: Sequence[Json], page: PageRequest) -> Response:
    """One page of a complete list, in its present order unless the request names another."""
    first = (page.number - 1) * page.size
    return page_response(_sort_values(values, page.order_by)[first : first + page.size], len(values), page)


def _sort_values(values: Sequence[Json], order_by: str | None) -> Sequence[Json]:
    if order_by is None:
        return values
    field, _, direction = order_by.rpartition("_")
    if field not in SLICE_ORDER_FIELDS:
        wanted = ", ".join(f"{name}_ASC, {name}_DESC" for name in SLICE_ORDER_FIELDS)
        raise invalid("Invalid orderBy value in query", orderBy=f"must be one of {wanted}")
    return sorted(values, key=lambda value: str(value[field.lower()]), reverse=direction == "DESC")


def deletion_response() -> Response:
    """The response to a deletion: plain text, not JSON, as clients of this API expect."""
    return PlainTextResponse("Deletion request was accepted", HTTPStatus.ACCEPTED)


def problem_response(
    status: int, message: str, data: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """An error; all errors have this body."""
    body = {"source": ERROR_SOURCE, "message": message, "data": data}
    return Response(msgspec.json.encode(body), status, dict(headers or {}), "application/json")


# Pages.


TIE_BREAKER = ""
"""Key of the column that decides between equals in an order; no caller can name it."""


def fetch_page(
    conn: sa.Connection,
    listing: sa.Select[Any],
    page: PageRequest,
    order: Mapping[str, sa.ColumnElement[Any]],
    **parameters: object,
) -> tuple[Rows, int]:
    """Rows of `page` and the total. `order` maps names to columns and holds CREATED and TIE_BREAKER.

    A `listing` with parameters, whose values are `parameters`, can be built once for all callers.
    """
    field, direction = _parse_order(page.order_by, order)
    counted, ordered = _page_queries(listing, order[field], direction, order[TIE_BREAKER])
    total = conn.execute(counted, parameters).scalar_one()
    part = {"page_size": page.size, "page_start": (page.number - 1) * page.size}
    return conn.execute(ordered, {**parameters, **part}).all(), total


@lru_cache(maxsize=64)
def _page_queries(
    listing: sa.Select[Any], by: sa.ColumnElement[Any], direction: str, tie: sa.ColumnElement[Any]
) -> tuple[sa.Select[Any], sa.Select[Any]]:
    """The queries of the count and of a page. Cached for listings that are the same object each time."""
    counted = sa.select(sa.func.count()).select_from(listing.order_by(None).subquery())
    ordered = listing.order_by(by.desc() if direction == "DESC" else by.asc(), tie.asc())
    size, start = (sa.bindparam(name, type_=sa.Integer) for name in ("page_size", "page_start"))
    return counted, ordered.limit(size).offset(start)


def _parse_order(order_by: str | None, order: Mapping[str, sa.ColumnElement[Any]]) -> tuple[str, str]:
    field, _, direction = (order_by or "CREATED_ASC").rpartition("_")
    if not field or field not in order or direction not in ("ASC", "DESC"):
        wanted = ", ".join(f"{name}_ASC, {name}_DESC" for name in order if name)
        raise invalid("Invalid orderBy value in query", orderBy=f"must be one of {wanted}")
    return field, direction


def order_of(table: sa.Table, *fields: str) -> dict[str, sa.ColumnElement[Any]]:
    """The usual order: `fields` and CREATED, UPDATED, with the id as the tie-breaker."""
    named = {name.upper(): table.c[name] for name in (*fields, "created", "updated")}
    return {**named, TIE_BREAKER: table.c.id}


def order_by_creation(
    created: sa.ColumnElement[Any], tie_breaker: sa.ColumnElement[Any]
) -> dict[str, sa.ColumnElement[Any]]:
    """The order of records that are never updated."""
    return {"CREATED": created, TIE_BREAKER: tie_breaker}


# Filters.


def search_rows(listing: AnySelect, text: str | None, *columns: sa.ColumnElement[Any]) -> AnySelect:
    """The rows that hold `text` in one of `columns`, whatever its case; all rows without a text."""
    if not text:
        return listing
    return listing.where(sa.or_(*(column.icontains(text.strip(), autoescape=True) for column in columns)))


def filter_rows(listing: AnySelect, *wanted: tuple[sa.ColumnElement[Any], object]) -> AnySelect:
    """The rows that have the wanted value, or one of a list of them, in each column.

    None and an empty list let every row pass. Ids are stored as text.
    """
    for column, wanted_values in wanted:
        values = wanted_values if isinstance(wanted_values, list) else [wanted_values]
        stored = [str(value) if isinstance(value, UUID) else value for value in values if value is not None]
        if stored:
            listing = listing.where(column.in_(stored))
    return listing


# Shapes that several resources share.


class TimedRow(Protocol):
    """A record with the times of its creation and last change."""

    @property
    def created(self) -> float:
        """Seconds since the epoch."""

    @property
    def updated(self) -> float:
        """Seconds since the epoch."""


def times_shape(row: Row | TimedRow) -> Json:
    """The times of creation and of the last change."""
    return {"created": rfc3339(row.created), "updated": rfc3339(row.updated)}


def status_history_shape(past: Sequence[StatusRecord]) -> list[Json]:
    """A status history, newest first."""
    return [{"status": entry.status, "message": entry.message, **times_shape(entry)} for entry in past]


def summary_shape(row: Row) -> Json:
    """A logical partition, VPC or instance type in one line."""
    return {"id": row.id, "name": row.name, "siteId": row.site_id, "status": row.status}


class Relation(msgspec.Struct, frozen=True):
    """How the response of an object includes another that it refers to."""

    key: str
    """Field with the id of the related object."""
    shown_as: str
    table: sa.Table
    summary: Callable[[Row], Json]


def _site_shape(row: Row) -> Json:
    return {"id": row.id, "name": row.name, "infrastructureProviderId": row.provider_id, "status": row.status}


def org_shape(row: Row) -> Json:
    """A tenant or an infrastructure provider."""
    return {"id": row.id, "org": row.org, **times_shape(row)}


def shown_instance_status(status: str) -> str:
    """The status of an instance on this wire, which has no unknown; Configuring claims nothing.

    Clients generated from the published description reject a whole answer for a status that is not in it.
    """
    return Status.CONFIGURING if status == Status.UNKNOWN else status


def _instance_shape(row: Row) -> Json:
    return {**summary_shape(row), "status": shown_instance_status(row.status)}


def _machine_shape(row: Row) -> Json:
    return {"id": row.id, "controllerMachineId": row.id, "status": row.status}


RELATIONS: Mapping[str, Relation] = {
    "Site": Relation("siteId", "site", schema.site, _site_shape),
    "Tenant": Relation("tenantId", "tenant", schema.tenant, org_shape),
    "InfrastructureProvider": Relation(
        "infrastructureProviderId", "infrastructureProvider", schema.provider, org_shape
    ),
    "Instance": Relation("instanceId", "instance", schema.instance, _instance_shape),
    "InstanceType": Relation("instanceTypeId", "instanceType", schema.instance_type, summary_shape),
    "Vpc": Relation("vpcId", "vpc", schema.vpc, summary_shape),
    "VPC": Relation("vpcId", "vpc", schema.vpc, summary_shape),
    "Machine": Relation("machineId", "machine", schema.machine, _machine_shape),
    "NVLinkLogicalPartition": Relation(
        "nvLinkLogicalPartitionId", "nvLinkLogicalPartition", schema.logical_partition, summary_shape
    ),
}


def add_relations(conn: sa.Connection, objects: Sequence[Json], wanted: Collection[str]) -> None:
    """Add the related objects `wanted` to each of `objects`: one query for each kind, not for each row.

    Objects of kinds that do not exist here (security groups, operating systems) have nothing to show.
    """
    for name in sorted(RELATIONS.keys() & wanted):
        relation = RELATIONS[name]
        referring = [shape for shape in objects if shape.get(relation.key) is not None]
        if referring:
            ids = {shape[relation.key] for shape in referring}
            rows = conn.execute(sa.select(relation.table).where(relation.table.c.id.in_(ids)))
            summaries = {row.id: relation.summary(row) for row in rows}
            for shape in referring:
                shape[relation.shown_as] = summaries.get(shape[relation.key])


def optional_time(seconds: float | None) -> str | None:
    """Format a time as RFC 3339, or keep None."""
    return None if seconds is None else rfc3339(seconds)


# Status histories.


async def history_response(
    deps: ApiDeps, query: PageQuery, object_id: str, check: Callable[[sa.Connection], object]
) -> Response:
    """The history of an object, newest first. `check` refuses a caller that may not see the object."""

    def read(conn: sa.Connection) -> list[Json]:
        check(conn)
        return status_history_shape(journal.status_histories(conn, [object_id])[object_id])

    return sliced_response(await deps.store.read(read), query.page)
