"""The audit entry of a REST request: caller, source address, operation, object and outcome.

`AuditMiddleware` runs behind authentication. It begins the trail of each request that may change
something. A route completes it (`complete_trail`), and the transactions of the route's store write the entry.
A request that may change something is counted as refused if the answer is 400 or above. A read is
counted only if it was forbidden (403). Requests without a caller are counted by their reason, and not
entered.

The address of a client is that of its connection. A `Forwarded-For` header counts only if the
connection comes from a proxy that the configuration trusts. The client is then the last address in the
header that is not such a proxy.

A caller with a provider's role acts as an operator, unless the operation is one for tenants and the
caller is one. For a refused request, the sides of the caller's custom roles count too. A tenant may read
only its own requests and the requests that concern its objects.
"""

import heapq
import re
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Any

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rackloom.carve.api.access import PROVIDER_ROLES
from rackloom.carve.api.auth import Caller, Role, Side
from rackloom.carve.store.audit import FIELD_LIMIT, MAX_FIELDS, REST, AuditRecord, stored_text
from rackloom.carve.store.audit_trail import AuditTrail, RequestAudit
from rackloom.errors import Undecodable
from rackloom.runtime.foreign_text import decode_json
from rackloom.serving.acceptor import plain_address

READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
FORBIDDEN, FIRST_REFUSAL = 403, 400
REASON_BYTES = 4096
"""How much of an error's body is read for its message."""
REQUEST_ID_HEADER = b"x-request-id"

# Why a request has no caller.


UNAUTHENTICATED = (
    ("missing authorization", "missing"),
    ("header format", "malformed"),
    ("parsing", "malformed"),
    ("expired", "expired"),
    ("longer than", "lifetime"),
    ("not valid yet", "early"),
    ("membership", "membership"),
)
"""Part of the message of a refusal -> the reason under which it is counted."""
UNAUTHENTICATED_REASONS = (*dict.fromkeys(reason for _, reason in UNAUTHENTICATED), "invalid")


def unauthenticated_reason(message: str) -> str:
    """The reason under which a request without a caller is counted."""
    return next((reason for part, reason in UNAUTHENTICATED if part in message), "invalid")


# The source of a request.


def source_of(peer: str, forwarded_for: str | None, trusted: Sequence[IPv4Network | IPv6Network]) -> str:
    """The address of the client: that of the connection, or the one that trusted proxies report.

    IPv4 addresses that are mapped into IPv6 are compared and entered as IPv4 (`plain_address`).
    """
    peer = plain_address(peer)
    if not forwarded_for or not _is_in(peer, trusted):
        return peer
    for hop in reversed([plain_address(part.strip()) for part in forwarded_for.split(",")]):
        if _is_address(hop) and not _is_in(hop, trusted):
            return hop
        if not _is_address(hop):
            break
    return peer


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True


def _is_in(text: str, networks: Sequence[IPv4Network | IPv6Network]) -> bool:
    return _is_address(text) and any(ip_address(text) in network for network in networks)


# The middleware.


class AuditMiddleware:
    """ASGI middleware: begins the trail of requests that may change something, and counts refused ones."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http" or scope.get("state", {}).get("caller") is None:
            await self.app(scope, receive, send)
        elif scope["method"] in READING_METHODS:
            await self.app(scope, receive, _Watch(scope, FORBIDDEN, send))
        else:
            scope["state"]["audit"] = begin_trail(scope)
            await self.app(scope, receive, _Watch(scope, FIRST_REFUSAL, send))


def begin_trail(scope: Scope) -> AuditTrail:
    """Begin the trail of a request with a caller, before its operation is known."""
    deps, caller = scope["app"].state.deps, scope["state"]["caller"]
    audit: RequestAudit = deps.audit
    is_operator = _is_operator(caller, ())
    peer = scope["client"][0] if scope.get("client") else ""
    entry = AuditRecord(
        channel=REST,
        subject=caller.subject,
        org=caller.org,
        roles=" ".join(sorted(caller.roles | caller.custom_roles)),
        by_operator=is_operator,
        tenant_org=None if is_operator else caller.org,
        source=source_of(peer, Headers(scope=scope).get("x-forwarded-for"), audit.trusted_proxies),
        request_id=audit.request_ids(),
        method=scope["method"],
        path=scope["path"],
    )
    return AuditTrail(entry, deps.clock, deps.clock())


def _is_operator(caller: Caller, declared: Sequence[Role]) -> bool:
    """Whether a caller acts as a provider in an operation that declares these roles (none if unknown)."""
    is_tenant = Role.TENANT_ADMIN in caller.roles
    is_provider = not caller.roles.isdisjoint(PROVIDER_ROLES)
    if caller.roles.isdisjoint(declared):
        sides = {side for side, _ in caller.held}
        is_tenant, is_provider = is_tenant or Side.TENANT in sides, is_provider or Side.PROVIDER in sides
    return is_provider and not (is_tenant and Role.TENANT_ADMIN in declared)


class _Watch:
    """Passes the answer on, and counts it if it is a refusal."""

    def __init__(self, scope: Scope, first_refusal: int, send: Send) -> None:
        """`first_refusal` is the smallest status that is counted. For reads it is the only one."""
        self._scope = scope
        self._first_refusal = first_refusal
        self._send = send
        self._status = 0
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            trail: AuditTrail | None = self._scope["state"].get("audit")
            if trail is not None:
                identified = (REQUEST_ID_HEADER, trail.entry.request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), identified]}
        elif message["type"] == "http.response.body" and self._is_refusal():
            self._body += message.get("body", b"")[:REASON_BYTES]
            if not message.get("more_body", False):
                self._count()
        await self._send(message)

    def _is_refusal(self) -> bool:
        if self._first_refusal == FORBIDDEN:
            return self._status == FORBIDDEN
        return self._status >= self._first_refusal

    def _count(self) -> None:
        deps, route = self._scope["app"].state.deps, self._scope.get("route")
        trail = self._scope["state"].get("audit") or begin_trail(self._scope)
        if isinstance(route, APIRoute):
            trail.know(operation=route.operation_id or "")
        deps.audit.refuse(trail.refused(self._status, "", _message_of(self._body)), deps.clock())


def _message_of(body: bytes) -> str:
    try:
        decoded = decode_json(body, "the answer")
    except Undecodable:
        return ""
    return str(decoded.get("message") or "") if isinstance(decoded, dict) else ""


# Facts that a route adds.


_KINDS = {
    "tenantId": "tenant",
    "siteId": "site",
    "instanceTypeId": "instance-type",
    "machineId": "machine",
    "nvLinkDomainId": "nvlink-domain",
    "chassisSerial": "nvlink-nmxc-endpoint",
    "allocationId": "allocation",
    "nvLinkLogicalPartitionId": "nvlink-logical-partition",
    "vpcId": "vpc",
    "instanceId": "instance",
    "trayReservationId": "tray-reservation",
    "roleName": "role",
    "serviceAccountId": "service-account",
}
"""Parameter of a path -> the kind of object that it names."""
_VERBS = re.compile(r"^(batch-)?[a-z]+-")


async def complete_trail(request: Request, trail: AuditTrail, roles: Sequence[Role], caller: Caller) -> None:
    """Add the facts that are known once the operation was found. It declares `roles`.

    `caller` has the built-in roles that its custom roles stand for in this operation.
    """
    route: APIRoute = request.scope["route"]
    by_operator = _is_operator(caller, roles)
    known: dict[str, Any] = {
        "operation": route.operation_id or "",
        "by_operator": by_operator,
        "tenant_org": None if by_operator else caller.org,
        "status": route.status_code or 200,
    }
    named = next(((name, value) for name, value in request.path_params.items() if name in _KINDS), None)
    if named is not None:
        known |= {"object_kind": _KINDS[named[0]], "object_id": str(named[1])}
    else:
        known["object_kind"] = _VERBS.sub("", route.operation_id or "")
    if route.body_field is not None and await request.body():
        # The framework has parsed it already, and keeps the result.
        known |= _facts_of_body(await request.json(), with_reason=by_operator)
    trail.know(**known)


def _facts_of_body(body: object, *, with_reason: bool) -> dict[str, Any]:
    if not isinstance(body, dict):
        return {}
    reason = body.get("reason")
    given = {"reason": reason} if with_reason and isinstance(reason, str) else {}
    # As many as an entry keeps: refused requests wait in memory.
    names = heapq.nsmallest(MAX_FIELDS, map(str, body))
    return {"fields": tuple(stored_text(name, FIELD_LIMIT) for name in names), **given}
