"""The REST application: middleware, error mapping, OpenAPI description, and the order of routes.

A request passes `AuthenticationMiddleware` first: every path below an organization needs a verified
token before routing, so a route that forgets to require a role cannot be reached without a token, and no
body is parsed without one. `AuditMiddleware` begins its entry in the audit log. `BodyLimitMiddleware`
admits at most `MAX_BODY` bytes of JSON, received within `BODY_SECONDS`. `RequestLimitMiddleware` then
lets it wait for its organisation's turn, if the service has limits.

The error handlers are the only place where refusals become HTTP status codes. Every error has the same
JSON body, with the nearest fix in `data`. Routes are matched in their order: instance types come before
instances, or `/instance/type` would be read as an instance id. `RouteIndex` finds the few that can match.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rackloom.carve.api import (
    access,
    allocations,
    audit,
    custom_roles,
    domain_inventory,
    domains,
    events,
    fabric,
    instance_types,
    instances,
    interfaces,
    logical_partitions,
    machine_changes,
    machines,
    maintenance,
    organizations,
    quotas,
    reservations,
    routing,
    service_accounts,
    sites,
    statistics,
    vpcs,
)
from rackloom.carve.api.audit_middleware import AuditMiddleware, unauthenticated_reason
from rackloom.carve.api.auth import Role, TokenVerifier, UnauthenticatedCaller
from rackloom.carve.api.directory import Directory, sent_key
from rackloom.carve.api.docs_page import docs_routes
from rackloom.carve.api.limits import CallerLimits, RequestLimitMiddleware, announced_length, has_body
from rackloom.carve.api.operation import RouteIndex
from rackloom.carve.api.renames import CONTRACTS, UNSERVED, describe_renames
from rackloom.carve.api.routing import ApiDeps
from rackloom.carve.api.trace_middleware import TraceMiddleware
from rackloom.carve.api.wire import PATTERN_RULES, Problem
from rackloom.carve.store.values import RefusalKind, Rejected
from rackloom.errors import Refused, Retry, Unknown
from rackloom.runtime.traces import NO_TRACES

# Size and time limits of bodies.


MAX_BODY = 1 << 20
"""Bytes. The largest useful body names every GPU of a domain, which is some 100 KiB."""

BODY_SECONDS = 20.0
"""A body of `MAX_BODY` bytes takes about a second on a slow link."""
NOT_JSON_MESSAGE = "Request body is not JSON: send it with Content-Type: application/json"
TOO_LARGE_MESSAGE = f"Request body is larger than {MAX_BODY} bytes"


class BodyLimitMiddleware:
    """ASGI middleware: at most MAX_BODY bytes of JSON, all of them within BODY_SECONDS."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif announced_length(scope) > MAX_BODY:
            await routing.problem_response(413, TOO_LARGE_MESSAGE)(scope, receive, send)
        elif has_body(scope) and not _is_json(scope):
            await routing.problem_response(415, NOT_JSON_MESSAGE)(scope, receive, send)
        else:
            await self.app(scope, _LimitedReceive(receive), send)


def _is_json(scope: Scope) -> bool:
    kind, _, _ = Headers(scope=scope).get("content-type", "").partition(";")
    main, _, sub = kind.strip().lower().partition("/")
    return main == "application" and (sub == "json" or sub.endswith("+json"))


class _LimitedReceive:
    """Receives the messages of one request, as long as they keep the limits."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.size = 0
        self.complete = False
        self.until = asyncio.get_running_loop().time() + BODY_SECONDS

    async def __call__(self) -> Message:
        if self.complete:
            # The next message is the end of the connection, which may come at any time.
            return await self.receive()
        try:
            async with asyncio.timeout_at(self.until):
                message = await self.receive()
        except TimeoutError:
            raise HTTPException(408, f"Request body took over {BODY_SECONDS:g} seconds") from None
        self.complete = message["type"] != "http.request" or not message.get("more_body", False)
        self.size += len(message.get("body", b""))
        if self.size > MAX_BODY:
            raise HTTPException(413, TOO_LARGE_MESSAGE)
        return message


# Errors.


STATUS_OF_REFUSAL = {
    RefusalKind.INVALID: 400,
    RefusalKind.FORBIDDEN: 403,
    RefusalKind.NOT_FOUND: 404,
    RefusalKind.CONFLICT: 409,
}


def install_error_handlers(app: FastAPI) -> None:
    """Answer every error with the error body of this API."""
    app.exception_handler(RequestValidationError)(_on_invalid_request)
    app.exception_handler(HTTPException)(_on_http_error)
    app.exception_handler(Refused)(_on_refused)
    app.exception_handler(Retry)(_on_undecided)
    app.exception_handler(Unknown)(_on_undecided)
    app.exception_handler(Exception)(_on_defect)


def refusal_response(error: Refused) -> Response:
    """The response to a refusal, with the nearest fix in `data`."""
    kind = error.kind if isinstance(error, Rejected) else RefusalKind.CONFLICT
    data: Mapping[str, str] = (error.data if isinstance(error, Rejected) else None) or {}
    if error.nearest_fix is not None:
        data = {**data, "nearestFix": error.nearest_fix}
    return routing.problem_response(STATUS_OF_REFUSAL[kind], error.reason, data or None)


async def _on_refused(_request: Request, error: Refused) -> Response:
    return refusal_response(error)


async def _on_invalid_request(_request: Request, error: RequestValidationError) -> Response:
    problems = error.errors()
    if any(problem["type"] == "json_invalid" for problem in problems):
        return routing.problem_response(400, "Failed to parse request data, potentially invalid structure")
    fields = {_field_path(problem): _field_message(problem) for problem in problems}
    return routing.problem_response(400, "Error validating request data", fields)


def _field_path(problem: Mapping[str, Any]) -> str:
    """The path of a field, such as `nvLinkInterfaces.0.deviceInstance`.

    The whole body is `body`, and all parameters together are `query`. A repeated parameter is one field.
    """
    if problem["loc"][0] == "query" and len(problem["loc"]) > 1:
        return str(problem["loc"][1])
    return ".".join(str(part) for part in problem["loc"][1:]) or str(problem["loc"][0])


def _field_message(problem: Mapping[str, Any]) -> str:
    """The message of a problem, with the rule in words if the problem names only a pattern."""
    rule = PATTERN_RULES.get(problem.get("ctx", {}).get("pattern", ""))
    return rule or str(problem["msg"])


async def _on_http_error(_request: Request, error: HTTPException) -> Response:
    message = "The requested path was not found" if error.status_code == 404 else str(error.detail)
    return routing.problem_response(error.status_code, message, headers=error.headers)


def undecided_response(error: Retry | Unknown) -> Response:
    """The response to a request that was not decided."""
    headers = {"Retry-After": str(max(1, round(error.after)))} if isinstance(error, Retry) else None
    return routing.problem_response(503, error.reason, headers=headers)


async def _on_undecided(_request: Request, error: Retry | Unknown) -> Response:
    return undecided_response(error)


async def _on_defect(_request: Request, _error: Exception) -> Response:
    return routing.problem_response(500, "Internal error: nothing was changed")


# Authentication.


ORG_PREFIX = "/v2/org/"


class AuthenticationMiddleware:
    """ASGI middleware that sets `request.state.caller` on every path below an organisation."""

    def __init__(self, app: ASGIApp, verifier: TokenVerifier, directory: Directory) -> None:
        self.app = app
        self.verifier = verifier
        self.directory = directory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] == "http" and scope["path"].startswith(ORG_PREFIX):
            try:
                await self._admit(scope)
            except UnauthenticatedCaller as error:
                self._count(scope, str(error))
                refusal = routing.problem_response(401, str(error), headers={"WWW-Authenticate": "Bearer"})
                await refusal(scope, receive, send)
                return
            except Rejected as error:
                self._count(scope, error.reason)
                await refusal_response(error)(scope, receive, send)
                return
            except (Retry, Unknown) as error:
                await undecided_response(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _count(self, scope: Scope, message: str) -> None:
        scope["app"].state.deps.audit.unauthenticated(unauthenticated_reason(message))

    async def _admit(self, scope: Scope) -> None:
        org = scope["path"].removeprefix(ORG_PREFIX).partition("/")[0]
        authorization = Headers(scope=scope).get("authorization")
        if (key := sent_key(authorization)) is not None:
            caller = await self.directory.caller_of(key, org)
        else:
            caller = await self.directory.with_custom_roles(self.verifier.verify(authorization, org))
        scope.setdefault("state", {})["caller"] = caller


# OpenAPI description.


_SHAPE = "#/components/schemas/{model}"
"""The reference to a model's schema in the description."""


def complete_openapi(app: FastAPI) -> None:
    """Describe authentication, error bodies, the headers of pages, and the versions of the contract."""
    gather = app.openapi

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = gather()
            schema["components"]["securitySchemes"] = {
                "bearer": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}
            }
            schema["security"] = [{"bearer": []}]
            schema["info"]["x-rackloom-contracts"] = list(CONTRACTS)
            schema["info"]["x-rackloom-unserved"] = sorted(UNSERVED)
            describe_renames(schema)
            problem = Problem.model_json_schema(by_alias=True, ref_template=_SHAPE, mode="serialization")
            shapes = {**schema["components"]["schemas"], "Problem": problem}
            schema["components"]["schemas"] = dict(sorted(shapes.items()))
            for methods in schema["paths"].values():
                for operation in methods.values():
                    # The framework's validation error, which this API does not use.
                    operation["responses"].pop("422", None)
                    # Every error is a `Problem` as JSON, even if a successful response is no JSON.
                    for status, response in operation["responses"].items():
                        if int(status) >= HTTPStatus.BAD_REQUEST:
                            response["content"] = {
                                "application/json": {"schema": {"$ref": _SHAPE.format(model="Problem")}}
                            }
                    parameters = {parameter["name"] for parameter in operation.get("parameters", ())}
                    if "pageNumber" in parameters:
                        operation["responses"]["200"]["headers"] = {
                            "X-Pagination": {
                                "description": "pageNumber, pageSize, total and orderBy as JSON",
                                "schema": {"type": "string"},
                            }
                        }
        return app.openapi_schema or {}

    app.openapi = described  # type: ignore[method-assign]


def _description_route(app: FastAPI) -> Route:
    """The public route /openapi.json. It encodes the document once."""

    @cache
    def encoded() -> bytes:
        return msgspec.json.encode(app.openapi())

    async def answer(_request: Request) -> Response:
        return Response(encoded(), media_type="application/json")

    return Route("/openapi.json", answer)


# The application.


# Types before instances: otherwise /instance/type is read as an instance id. For the same reason
# statistics come before machines, and organisations, with /service-account/current, before service accounts.
ROUTERS = (
    organizations.router, quotas.router, sites.router, instance_types.router, statistics.router,
    machines.router, machine_changes.router, maintenance.router, domains.router, domain_inventory.router,
    fabric.router, audit.router, events.router, allocations.router, reservations.router,
    logical_partitions.router, interfaces.router, vpcs.subnet_router, vpcs.router, instances.router,
    custom_roles.router, service_accounts.router,
)  # fmt: skip
ROUTES = tuple(route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute))
"""Built once: a process may create many applications."""


def _declare_access() -> Iterator[tuple[Sequence[Role], str]]:
    """Add the required roles to the description of each operation. Yields its roles and its permission."""
    for route in ROUTES:
        (method,) = sorted(route.methods or [])
        roles, permission = routing.roles_of(route), access.permission_of(route.path, method)
        route.openapi_extra = access.described_access(roles, permission)
        yield roles, permission


BUILT_IN = access.permissions_of_roles(_declare_access())
"""The permissions of each built-in role."""


def create_app(deps: ApiDeps, limits: CallerLimits | None = None) -> FastAPI:
    """The ASGI application over `deps`, with limits on each organisation's requests (None for no limits).

    It runs requests, and no background tasks.
    """
    # The framework's documentation pages load scripts from other sites. `docs_page` does not.
    app = FastAPI(
        title="Rackloom",
        version=version("rackloom"),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.deps = deps
    app.state.directory = directory = Directory(deps.store, deps.clock, BUILT_IN)
    app.state.tenants_seen = set()
    app.state.event_streams = Counter()
    # The middleware added last runs first: no body is received before the caller is verified.
    if limits is not None:
        app.add_middleware(RequestLimitMiddleware, limits=limits)
    app.add_middleware(BodyLimitMiddleware)
    app.add_middleware(AuditMiddleware)
    if deps.traces is not NO_TRACES:
        app.add_middleware(TraceMiddleware, traces=deps.traces)
    app.add_middleware(AuthenticationMiddleware, verifier=deps.verifier, directory=directory)
    install_error_handlers(app)
    app.router.routes += [RouteIndex(access.BASE, ROUTES), *ROUTES, _description_route(app), *docs_routes()]
    complete_openapi(app)
    return app
