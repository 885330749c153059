"""Shared parts of routes: operations, dependencies and callers, pages, filters, related objects, responses.

A module declares its routes with `Operations`. Most of them are plain functions of a connection: the route
runs the function in one transaction and responds with its value.

`Deps` and the caller types (`TenantAdmin`, `ProviderAdmin`, `ProviderReader`, `Reader`, `Administrator`,
`AnyCaller`) are FastAPI dependencies. A route declares the roles that it needs by the type of its caller, and
`access` enforces them. `ApiDeps.change` runs a change in a write transaction and then wakes the reconciler of
the affected domains. The work reads the clock inside the transaction: an intent dated before its commit would
seem to be answered by an observation that began before the intent was known. With `auto_tenant`, an
organization becomes a tenant at its first request, with every machine allocated.

Each kind of object has one `Listing`: its filters, searched columns, orders, and its conversion to the
wire. `Listing.page` applies it to the rows that the caller may see. The order may name only known
fields, and the id breaks ties. Page data go into the `X-Pagination` header. `add_relations` adds related
objects with one query per kind, not per row. There is one error body.

The wire has no Unknown status for instances: it is shown as Configuring, which claims nothing. Clients
generated from the published description reject a whole response for an unknown status value.
"""

import secrets
from collections import namedtuple
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from http import HTTPStatus
from inspect import Parameter, Signature, iscoroutinefunction, signature
from typing import Annotated, Any, TypeAlias, TypeVar, get_origin
from uuid import UUID

import msgspec
import sqlalchemy as sa
from fastapi import APIRouter, Depends, Path
from fastapi import Query as QueryParam
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from rackloom.carve.api import access, wire
from rackloom.carve.api.audit_middleware import begin_trail, complete_trail
from rackloom.carve.api.auth import Caller, Role, TokenVerifier
from rackloom.carve.api.domain_operations import DomainOperations
from rackloom.carve.api.operation import OperationRoute
from rackloom.carve.api.wire import Because, Json, PageQuery, shape
from rackloom.carve.store import journal, schema
from rackloom.carve.store.audit_trail import AuditTrail, RequestAudit
from rackloom.carve.store.database import Store
from rackloom.carve.store.journal import OperatorOrder, StatusRecord
from rackloom.carve.store.prepared import PreparedStatement, owned_by
from rackloom.carve.store.values import Changed, IdFactory, Status, invalid
from rackloom.carve.tenancy import entitlements
from rackloom.core.partitions.status_rules import DEFAULT_VALID_SECONDS
from rackloom.runtime.traces import NO_TRACES, Traces

# Operations.


Page = tuple[Sequence[Json], int]
"""The objects of a page, and the number of objects on all pages."""

# The body of each is `wire.Problem`, which `complete_openapi` adds: a model named here would be built again
# for each status of each of a hundred routes, at every start.
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request contradicts itself or a record that it names"},
    401: {"description": "The caller did not prove who it is"},
    403: {"description": "The caller may not do this"},
    404: {"description": "The thing named in the path does not exist"},
    408: {"description": "The body took too long"},
    409: {"description": "The state of the site is against it"},
    413: {"description": "The body is too large"},
    415: {"description": "The body is not JSON"},
    429: {"description": "Too many requests of the org wait already: see Retry-After"},
    503: {"description": "Nothing was decided: try again"},
}


T = TypeVar("T")
Work = TypeVar("Work", bound=Callable[..., object])
Params: TypeAlias = Annotated[T, QueryParam()]
"""The query of an operation, by its model."""


class Operations:
    """Operations below an organisation. Their paths begin with `prefix` there.

    A plain function does its operation in one transaction: a read for GET, a write for all other methods. It
    takes the connection as `conn`, the parameters of the request, and `deps` if it needs them. It returns the
    value of the response. A function that changes the intent of domains returns `Changed`. One that takes the
    `directory` and writes changes roles or keys. A coroutine function runs its transactions and makes its
    response itself.
    """

    def __init__(self, prefix: str = "") -> None:
        self._router = APIRouter(prefix=access.BASE + prefix, responses=ERRORS, route_class=OperationRoute)
        self.routes: Sequence[BaseRoute] = self._router.routes

    def get(self, path: str, operation_id: str, model: Any, **described: Any) -> Callable[[Work], Work]:
        """Read an object."""
        return self._add("GET", json_response, path, operation_id, response_model=model, **described)

    def page(self, path: str, operation_id: str, model: Any) -> Callable[[Work], Work]:
        """Read a page of objects. The function takes `query`, and returns a page or the complete list."""
        return self._add("GET", _listed_response, path, operation_id, response_model=model)

    def create(
        self, path: str, operation_id: str, model: Any, plan: type[wire.Answer] | None = None
    ) -> Callable[[Work], Work]:
        """Create an object. With `dryRun`, the response is a `plan`."""
        dry_run = {"model": plan, "description": "With dryRun: what would be made"}
        responses: dict[int | str, dict[str, Any]] = {} if plan is None else {200: dry_run}
        described = {"response_model": model, "status_code": 201, "responses": responses}
        return self._add("POST", created_response, path, operation_id, **described)

    def post(self, path: str, operation_id: str, model: Any) -> Callable[[Work], Work]:
        """Do something with an object."""
        return self._add("POST", json_response, path, operation_id, response_model=model)

    def patch(self, path: str, operation_id: str, model: Any, **described: Any) -> Callable[[Work], Work]:
        """Change an object."""
        return self._add("PATCH", json_response, path, operation_id, response_model=model, **described)

    def delete(self, path: str, operation_id: str) -> Callable[[Work], Work]:
        """Delete an object."""
        described = {"response_model": wire.Message, "status_code": 202}
        return self._add("DELETE", lambda _: deletion_response(), path, operation_id, **described)

    def _add(
        self, method: str, respond: Callable[..., Response], path: str, operation_id: str, **described: Any
    ) -> Callable[[Work], Work]:
        def add(work: Work) -> Work:
            call = work if iscoroutinefunction(work) else _in_transaction(work, method, respond)
            self._router.add_api_route(path, call, methods=[method], operation_id=operation_id, **described)
            return work

        return add


def _in_transaction(
    work: Callable[..., Any], method: str, respond: Callable[..., Response]
) -> Callable[..., Awaitable[Response]]:
    """The operation that runs `work` in a transaction. It has the parameters of `work` but the connection."""
    declared = signature(work)
    changes_domains = get_origin(declared.return_annotation) is Changed

    async def operation(deps: ApiDeps, **values: Any) -> Response:
        if "deps" in declared.parameters:
            values["deps"] = deps

        def bound(conn: sa.Connection) -> Any:
            return work(conn, **values)

        if method == "GET":
            value = await deps.store.read(bound)
        else:
            value = await (deps.change(bound) if changes_domains else deps.store.run(bound))
            if "directory" in values:
                # The roles and keys that this process knows are from before the change.
                values["directory"].forget()
        return respond(value, values["query"]) if respond is _listed_response else respond(value)

    # The framework runs dependencies in this order: the audit log begins before the caller is refused.
    annotations = {"deps": Deps} | {
        name: parameter.annotation for name, parameter in declared.parameters.items() if name != "conn"
    }
    parameters = [Parameter(name, Parameter.KEYWORD_ONLY, annotation=a) for name, a in annotations.items()]
    operation.__signature__ = Signature(parameters, return_annotation=Response)  # type: ignore[attr-defined]
    operation.__name__, operation.__doc__ = work.__name__, work.__doc__
    return operation


# Dependencies of routes.


class ApiDeps(msgspec.Struct, frozen=True, kw_only=True):
    """The dependencies of the API on its service."""

    store: Store
    clock: Callable[[], float]
    """Seconds since the epoch."""
    ids: IdFactory
    wake: Callable[[frozenset[str], str], None]
    """Called after a commit with the NVLink domains that have a new intent (empty if none is known yet), and
    the organisation that changed it."""
    verifier: TokenVerifier
    auto_tenant: bool = False
    """An org with a valid token becomes a tenant at first use, with every machine of every type allocated."""
    valid_seconds: float = DEFAULT_VALID_SECONDS
    """The age in seconds at which a reading of a switch controller is outdated."""
    secret: Callable[[], str] = secrets.token_urlsafe
    """A new secret of 256 random bits."""
    domain_operations: DomainOperations | None = None
    """The program that switches power and installs firmware. Without one, such requests are refused."""
    org: str = ""
    """The organisation that sent the request."""
    audit: RequestAudit = msgspec.field(default_factory=RequestAudit)
    traces: Traces = NO_TRACES

    def on_behalf_of(self, org: str) -> "ApiDeps":
        """The dependencies of a request of `org`, which waits in turns with other organisations."""
        return msgspec.structs.replace(self, org=org, store=self.store.on_behalf_of(org))

    def recorded_by(self, trail: AuditTrail) -> "ApiDeps":
        """The dependencies of a request, with its changes entered into the audit log."""
        return msgspec.structs.replace(self, store=self.store.recorded_by(trail.record))

    def valid_from(self) -> float:
        """The time before which a reading is outdated for a request that is answered now."""
        return self.clock() - self.valid_seconds

    async def change(self, work: Callable[[sa.Connection], Changed[T]]) -> T:
        """Run `work` in a write transaction, then wake the reconciler of the domains that it touched.

        `work` reads the clock inside the transaction: an observation that began before the intent was known
        must not seem to answer it.
        """
        cause = self.traces.current()

        def work_and_cause(conn: sa.Connection) -> Changed[T]:
            changed = work(conn)
            if cause is not None and self.store.is_shared:
                journal.notify_cause(conn, changed.domains, cause)
            return changed

        changed = await self.store.run(work_and_cause)
        self.wake(changed.domains, self.org)
        return changed.value


async def _request_deps(request: Request) -> ApiDeps:
    deps: ApiDeps = request.app.state.deps
    caller: Caller = request.state.caller
    deps = deps.on_behalf_of(caller.org)
    trail: AuditTrail | None = getattr(request.state, "audit", None)
    if trail is None:
        return deps
    route = request.scope["route"]
    roles, permission = roles_of(route), access.permission_of(route.path, request.method)
    # A custom role of the provider's side makes an operator too.
    await complete_trail(request, trail, roles, access.acting(caller, roles, permission))
    return deps.recorded_by(trail)


Deps = Annotated[ApiDeps, Depends(_request_deps)]
Org = Annotated[str, Path(alias="org", description="The organisation for which the caller acts")]


class CallerWith:
    """A dependency: the caller, if it has one of `roles`. Without roles it may be any member of the org."""

    def __init__(self, *roles: Role) -> None:
        self.roles = roles

    async def __call__(self, request: Request, _org: Org) -> Caller:
        """The caller. Refused as `access.check_call` decides."""
        # `AuthenticationMiddleware` has verified it, for the org of the path.
        route: OperationRoute = request.scope["route"]
        permission = access.permission_of(route.path, request.method)
        caller = access.check_call(
            request.state.caller, self.roles, permission, route.query_rules, request.query_params
        )
        if Role.TENANT_ADMIN in caller.roles and Role.TENANT_ADMIN in self.roles:
            # Tenants are never removed, so each org is looked up once.
            known: set[str] = request.app.state.tenants_seen
            deps: ApiDeps = request.app.state.deps
            if deps.auto_tenant and caller.org not in known:
                deps = deps.on_behalf_of(caller.org)
                # Read first: if the database takes no writes, existing tenants can still read.
                if await deps.store.read(entitlements.find_tenant, caller.org) is None:
                    await make_tenant(request, deps, caller.org, entitled=True)
                known.add(caller.org)
        return caller


Administrator = Annotated[Caller, Depends(CallerWith(Role.TENANT_ADMIN, Role.PROVIDER_ADMIN))]
AnyCaller = Annotated[Caller, Depends(CallerWith())]
TenantAdmin = Annotated[Caller, Depends(CallerWith(Role.TENANT_ADMIN))]
ProviderAdmin = Annotated[Caller, Depends(CallerWith(Role.PROVIDER_ADMIN))]
ProviderReader = Annotated[Caller, Depends(CallerWith(*access.PROVIDER_ROLES))]
Reader = Annotated[Caller, Depends(CallerWith(*Role))]


def roles_of(route: APIRoute) -> Sequence[Role]:
    """The roles that an operation declares by the type of its caller. An operation must have exactly one."""
    (guard,) = (
        dependency.call
        for dependency in route.dependant.dependencies
        if isinstance(dependency.call, CallerWith)
    )
    return guard.roles


async def make_tenant(request: Request, deps: ApiDeps, org: str, *, entitled: bool) -> sa.Row[Any]:
    """The tenant of `org`, made now if there is none, `entitled` to every machine. It is entered as made."""

    def work(conn: sa.Connection) -> sa.Row[Any]:
        now = deps.clock()
        if (found := entitlements.find_tenant(conn, org)) is not None:
            return found
        trail = begin_trail(request.scope)
        made = {"object_kind": "tenant", "object_name": org, "tenant_org": org, "by_operator": False}
        trail.know(operation="create-tenant", **made)
        return trail.record(conn, lambda conn: _make_tenant(conn, org, now, deps.ids, entitled=entitled))

    return await deps.store.run(work)


def _make_tenant(conn: sa.Connection, org: str, now: float, ids: IdFactory, *, entitled: bool) -> sa.Row[Any]:
    tenant = entitlements.ensure_tenant(conn, org, now, ids)
    if entitled:
        entitlements.grant_everything(conn, tenant.id, now, ids)
    return tenant


# The sides on which a caller reads: as provider, as tenant, or both.


AnySelect: TypeAlias = sa.Select[Any]
Row = sa.Row[Any]
Rows = Sequence[Row]


def provider_and_tenant(conn: sa.Connection, caller: Caller) -> tuple[str, str]:
    """The provider id and tenant id of the caller, as far as its roles go.

    An id is empty if it has none: no record has an empty id, but None would match null columns.
    """
    provider = entitlements.find_provider(conn, caller.org)
    tenant = entitlements.find_tenant(conn, caller.org)
    provides = not caller.roles.isdisjoint(access.PROVIDER_ROLES)
    return (
        provider.id if provider and provides else "",
        tenant.id if tenant and Role.TENANT_ADMIN in caller.roles else "",
    )


def of_caller(provider_id: str, tenant_id: str, table: sa.Table) -> sa.ColumnElement[bool]:
    """Rows at the sites of the provider, and those of `table` that the tenant owns."""
    owned = owned_by(table.c.tenant_id, tenant_id)
    # A tenant that provides nothing has one condition: databases answer an OR of two tables with a scan.
    return sa.or_(schema.site.c.provider_id == provider_id, owned) if provider_id else owned


# Dry runs.


DryRun = Annotated[bool, QueryParam(alias="dryRun")]
"""Whether to return the plan of the change without making it."""


# Operator orders.


def operator_order(deps: ApiDeps, caller: Caller, body: Because) -> OperatorOrder:
    """The order that the caller gives with this body."""
    return OperatorOrder(caller.subject, body.reason, deps.clock(), deps.valid_from())


# Responses.


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


def page_response(values: Sequence[Json], total: int, query: PageQuery) -> Response:
    """A page as a bare array. The X-Pagination header describes it."""
    numbers = {"pageNumber": query.page_number, "pageSize": query.page_size, "total": total}
    header = msgspec.json.encode({**numbers, "orderBy": query.order_by}).decode()
    return json_response(values, headers={"X-Pagination": header})


def _listed_response(found: Page | Sequence[Json], query: PageQuery) -> Response:
    if not isinstance(found, tuple):
        return sliced_response(found, query)
    objects, total = found
    return page_response(objects, total, query)


def sliced_response(values: Sequence[Json], query: PageQuery) -> Response:
    """One page of a complete list, in its present order unless the request names another."""
    first = (query.page_number - 1) * query.page_size
    part = _sort_values(values, query.order_by)[first : first + query.page_size]
    return page_response(part, len(values), query)


def _sort_values(values: Sequence[Json], order_by: str | None) -> Sequence[Json]:
    if order_by is None:
        return values
    field, _, direction = order_by.rpartition("_")
    if field not in SLICE_ORDER_FIELDS:
        wanted = ", ".join(f"{name}_ASC, {name}_DESC" for name in SLICE_ORDER_FIELDS)
        raise invalid("Invalid orderBy value in query", orderBy=f"must be one of {wanted}")
    return sorted(values, key=lambda value: str(value[field.lower()]), reverse=direction == "DESC")


def deletion_response() -> Response:
    """The response to a deletion. Clients of contract 2.0.0 read this body, those of 1.6.0 none."""
    return json_response({"message": "Deletion request was accepted"}, HTTPStatus.ACCEPTED)


def problem_response(
    status: int, message: str, data: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """An error response. All errors have this body."""
    body = {"source": ERROR_SOURCE, "message": message, "data": data}
    return Response(msgspec.json.encode(body), status, dict(headers or {}), "application/json")


# Pages.


Order = Mapping[str, sa.ColumnElement[Any]]
"""Name of an order -> the column to sort by. Includes CREATED and TIE_BREAKER."""
TIE_BREAKER = ""
"""Key of the column that decides between equals in an order. No caller can name it."""


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """The filters, searched columns, orders and conversion of one kind of object."""

    shapes: Callable[[sa.Connection, Rows, Any], list[Json]]
    """Converts rows, with the related objects that the query names."""
    order: Order
    filters: Mapping[str, sa.ColumnElement[Any]] = {}
    """Field of the query -> the column that must have its value, or one of its values."""
    searched: Sequence[sa.ColumnElement[Any]] = ()
    """Columns in which the `query` of a request is searched."""

    def by(self, shown: sa.ColumnElement[Any], *, instead_of: sa.ColumnElement[Any]) -> "Listing":
        """The same, searched and ordered by the column `shown`, if that may differ from the recorded one."""
        if shown is instead_of:
            return self
        order = {name: shown if column is instead_of else column for name, column in self.order.items()}
        searched = [shown if column is instead_of else column for column in self.searched]
        return msgspec.structs.replace(self, order=order, searched=searched)

    def page(
        self,
        conn: sa.Connection,
        visible: AnySelect,
        query: PageQuery,
        total: Callable[[], int] | None = None,
        **parameters: object,
    ) -> Page:
        """The wanted page of the `visible` rows.

        A select that takes `parameters` can be built once for all callers. If it is, `total` gives the
        number of visible rows without counting them, and the pages are prepared.
        """
        rows = filter_rows(
            visible, *((column, getattr(query, name)) for name, column in self.filters.items())
        )
        if self.searched and (text := query.query):  # type: ignore[attr-defined]
            found = (column.icontains(text.strip(), autoescape=True) for column in self.searched)
            rows = rows.where(sa.or_(*found))
        field, direction = _parse_order(query.order_by, self.order)
        order = (self.order[field], direction, self.order[TIE_BREAKER])
        pages: _Pages | _PreparedPages
        if total is not None and rows is visible:
            pages, count = _prepared_pages(rows, *order), total()
        else:
            counted = sa.select(sa.func.count()).select_from(rows.order_by(None).subquery())
            pages, count = _Pages(rows, *order), conn.execute(counted, parameters).scalar_one()
        return self.shapes(conn, _page_rows(conn, pages, query, count, parameters), query), count


class _Pages:
    """Parts of some rows in an order: from the first row on, and from the last one back."""

    def __init__(
        self, rows: AnySelect, by: sa.ColumnElement[Any], direction: str, tie: sa.ColumnElement[Any]
    ) -> None:
        size, start = (sa.bindparam(name, type_=sa.Integer) for name in ("page_size", "page_start"))
        first, last = (by.desc(), by.asc()) if direction == "DESC" else (by.asc(), by.desc())
        self.forwards = rows.order_by(first, tie.asc()).limit(size).offset(start)
        self.backwards = rows.order_by(last, tie.desc()).limit(size).offset(start)

    def read(self, conn: sa.Connection, parameters: Mapping[str, object], *, backwards: bool) -> Rows:
        """The rows of a part, which the parameters describe."""
        return conn.execute(self.backwards if backwards else self.forwards, parameters).all()


class _PreparedPages:
    """The same, prepared. Rows are named tuples."""

    def __init__(self, pages: _Pages) -> None:
        self._forwards, self._backwards = (
            PreparedStatement(pages.forwards),
            PreparedStatement(pages.backwards),
        )
        names = pages.forwards.exported_columns.keys()
        self._make: Callable[[Any], Any] = namedtuple("PageRow", names)._make  # type: ignore[attr-defined]

    def read(self, conn: sa.Connection, parameters: Mapping[str, object], *, backwards: bool) -> Rows:
        """The rows of a part, which the parameters describe."""
        statement = self._backwards if backwards else self._forwards
        return statement.records(conn, self._make, parameters)


@lru_cache(maxsize=64)
def _prepared_pages(
    rows: AnySelect, by: sa.ColumnElement[Any], direction: str, tie: sa.ColumnElement[Any]
) -> _PreparedPages:
    """Only for selects that are the same object each time."""
    return _PreparedPages(_Pages(rows, by, direction, tie))


def _page_rows(
    conn: sa.Connection,
    pages: _Pages | _PreparedPages,
    query: PageQuery,
    count: int,
    parameters: Mapping[str, object],
) -> Rows:
    """The rows of a page. Databases walk over the rows before it, so begin at the nearer end."""
    start = min((query.page_number - 1) * query.page_size, count)
    size = min(query.page_size, count - start)
    after = count - start - size
    if start <= after:
        return pages.read(conn, {**parameters, "page_size": size, "page_start": start}, backwards=False)
    rows = pages.read(conn, {**parameters, "page_size": size, "page_start": after}, backwards=True)
    return rows[::-1]


def _parse_order(order_by: str | None, order: Order) -> tuple[str, str]:
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


NO_QUERY = wire.RelationQuery()
"""The query of a response without one: no related objects."""


# Filters.


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


def status_history_shape(past: Sequence[StatusRecord]) -> list[Json]:
    """A status history, newest first."""
    return [shape(wire.StatusDetail, entry) for entry in past]


class Relation(msgspec.Struct, frozen=True):
    """How the response of an object includes another that it refers to."""

    key: str
    """Field with the id of the related object."""
    shown_as: str
    table: sa.Table
    summary: Callable[[Row], Json]


def shown_instance_status(status: str) -> str:
    """The status of an instance on this wire. Unknown becomes Configuring, which claims nothing.

    Clients generated from the published description reject a whole response with a status that is not in it.
    """
    return Status.CONFIGURING if status == Status.UNKNOWN else status


summary_shape, org_shape = partial(shape, wire.Summary), partial(shape, wire.Org)
"""A logical partition, VPC or instance type in one line, and a tenant or an infrastructure provider."""


def _site_summary(row: Row) -> Json:
    return shape(wire.SiteSummary, row, infrastructure_provider_id=row.provider_id)


def _instance_summary(row: Row) -> Json:
    return shape(wire.Summary, row, status=shown_instance_status(row.status))


def _machine_summary(row: Row) -> Json:
    return {"id": row.id, "controllerMachineId": row.id, "status": row.status}


RELATIONS: Mapping[str, Relation] = {
    "Site": Relation("siteId", "site", schema.site, _site_summary),
    "Tenant": Relation("tenantId", "tenant", schema.tenant, org_shape),
    "InfrastructureProvider": Relation(
        "infrastructureProviderId", "infrastructureProvider", schema.provider, org_shape
    ),
    "Instance": Relation("instanceId", "instance", schema.instance, _instance_summary),
    "InstanceType": Relation("instanceTypeId", "instanceType", schema.instance_type, summary_shape),
    "Vpc": Relation("vpcId", "vpc", schema.vpc, summary_shape),
    "VPC": Relation("vpcId", "vpc", schema.vpc, summary_shape),
    "Machine": Relation("machineId", "machine", schema.machine, _machine_summary),
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
        referring = [referrer for referrer in objects if referrer.get(relation.key) is not None]
        if referring:
            ids = {referrer[relation.key] for referrer in referring}
            rows = conn.execute(sa.select(relation.table).where(relation.table.c.id.in_(ids)))
            summaries = {row.id: relation.summary(row) for row in rows}
            for referrer in referring:
                referrer[relation.shown_as] = summaries.get(referrer[relation.key])


# Status histories.


def history(conn: sa.Connection, object_id: str) -> list[Json]:
    """The status history of an object, newest first."""
    return status_history_shape(journal.status_histories(conn, [object_id])[object_id])
