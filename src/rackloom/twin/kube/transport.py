"""The fake server on the wire: an httpx2 transport, so that a real client runs against it in process."""

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx2
import msgspec

from rackloom.claim.kube.api import Kind, KubeError, Object
from rackloom.twin.kube import answers
from rackloom.twin.kube.direct import DirectApi
from rackloom.twin.kube.pages import Pages
from rackloom.twin.kube.server import FakeKube

_CREATED = 201


@dataclass(frozen=True, slots=True)
class Target:
    """What a path leads to."""

    kind: Kind
    namespace: str | None
    name: str
    subresource: str


class KubeTransport(httpx2.AsyncBaseTransport):
    """HTTP requests to a fake server. Without `user`, the User-Agent up to its "/" says who asks."""

    def __init__(self, kube: FakeKube, user: str | None = None) -> None:
        self._kube = kube
        self._user = user
        self._pages = Pages()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer one request."""
        user = self._user or request.headers.get("User-Agent", "").split("/")[0]
        api = DirectApi(self._kube, user)
        try:
            target = self._target(request.url.path)
            if request.url.params.get("watch") in ("true", "1"):
                return httpx2.Response(200, stream=_Events(api, target, request.url.params))
            return await self._answer(api, target, request)
        except KubeError as error:
            if error.code == 0:
                raise httpx2.ReadError(error.message, request=request) from error
            return _json(error.code, status_of(error), error.retry_after)

    def _target(self, path: str) -> Target:
        parts = path.strip("/").split("/")
        group, rest = ("", parts[1:]) if parts[0] == "api" else (parts[1], parts[2:])
        version, rest = rest[0], rest[1:]
        namespace = None
        if len(rest) > 2 and rest[0] == "namespaces" and rest[2] not in ("status", "finalize"):
            namespace, rest = rest[1], rest[2:]
        plural, name, subresource = (*rest, "", "")[:3]
        for kind in self._kube.shapes:
            if (kind.group, kind.version, kind.plural) == (group, version, plural):
                return Target(kind, namespace, name, subresource)
        raise answers.not_served()

    async def _answer(self, api: DirectApi, target: Target, request: httpx2.Request) -> httpx2.Response:
        params, body = request.url.params, _body(request)
        match request.method:
            case "GET" if target.name:
                return _json(200, await api.get(target.kind, target.name, target.namespace))
            case "GET":
                return _json(200, await self._page(api, target, params))
            case "POST":
                obj = _placed(target, body)
                return _json(_CREATED, await api.create(target.kind, obj, dry_run="dryRun" in params))
            case "PUT":
                obj = _placed(target, body)
                return _json(200, await api.replace(target.kind, obj, subresource=target.subresource))
            case "PATCH":
                return _json(200, await _patch(api, target, request.headers["Content-Type"], params, body))
            case "DELETE":
                return _json(200, await _delete(api, target, body))
        raise KubeError(405, "MethodNotAllowed", "the server does not allow this method on the resource")

    async def _page(self, api: DirectApi, target: Target, params: httpx2.QueryParams) -> Object:
        if "continue" in params:
            page = self._pages.rest(params["continue"], self._kube.store, int(params["limit"]))
        else:
            listed = await api.list(target.kind, target.namespace, **_selectors(params))
            page = self._pages.first(listed, int(params.get("limit", "0")))
        bare = ("apiVersion", "kind")
        items = [{key: item[key] for key in item if key not in bare} for item in page.items]
        kind, version = f"{target.kind.kind}List", target.kind.api_version
        return {"kind": kind, "apiVersion": version, "metadata": page.metadata, "items": items}


def _body(request: httpx2.Request) -> Any:
    content = request.content
    return msgspec.json.decode(content) if content else None


def _placed(target: Target, obj: Object) -> Object:
    """The path says where an object is; its body must not say otherwise."""
    metadata = dict(obj.get("metadata") or {})
    named = metadata.get("namespace") or target.namespace
    if target.kind.namespaced and named != target.namespace:
        raise answers.bad_request(
            "the namespace of the provided object does not match the namespace sent on the request"
        )
    if target.name and metadata.get("name") != target.name:
        name = metadata.get("name", "")
        raise answers.bad_request(
            f"the name of the object ({name}) does not match the name on the URL ({target.name})"
        )
    if target.kind.namespaced:
        metadata["namespace"] = target.namespace
    return {**obj, "metadata": metadata}


def _selectors(params: httpx2.QueryParams) -> dict[str, str]:
    return {"labels": params.get("labelSelector", ""), "fields": params.get("fieldSelector", "")}


async def _patch(
    api: DirectApi, target: Target, content_type: str, params: httpx2.QueryParams, body: Any
) -> Object:
    if content_type == "application/apply-patch+yaml":
        force = params.get("force") == "true"
        placed, manager = _placed(target, body), params["fieldManager"]
        return await api.apply(
            target.kind, placed, manager=manager, force=force, subresource=target.subresource
        )
    if content_type not in ("application/merge-patch+json", "application/json-patch+json"):
        message = f"the body of the request was in an unknown format: {content_type}"
        raise KubeError(415, "UnsupportedMediaType", message)
    patch = tuple(body) if isinstance(body, list) else body
    return await api.patch(target.kind, target.name, target.namespace, patch, subresource=target.subresource)


async def _delete(api: DirectApi, target: Target, options: Any) -> Object:
    options = options or {}
    conditions: Mapping[str, str] = options.get("preconditions") or {}
    await api.delete(
        target.kind,
        target.name,
        target.namespace,
        uid=conditions.get("uid"),
        resource_version=conditions.get("resourceVersion"),
        propagation=options.get("propagationPolicy"),
        grace_seconds=options.get("gracePeriodSeconds"),
    )
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}


class _Events(httpx2.AsyncByteStream):
    """The body of a watch: what goes wrong on the way is its last line, or a broken connection."""

    def __init__(self, api: DirectApi, target: Target, params: httpx2.QueryParams) -> None:
        self._events = api.watch(
            target.kind,
            target.namespace,
            resource_version=params.get("resourceVersion", ""),
            **_selectors(params),
        )

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async with aclosing(self._events):
                async for event in self._events:
                    yield _line(event.type, event.object)
        except KubeError as error:
            if error.code == 0:
                raise httpx2.ReadError(error.message) from error
            yield _line("ERROR", status_of(error))


def _line(kind: str, obj: Object) -> bytes:
    return msgspec.json.encode({"type": kind, "object": obj}) + b"\n"


def status_of(error: KubeError) -> Object:
    """The body of a refusal (metav1.Status)."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": error.message,
        "reason": error.reason,
        "code": error.code,
    }


def _json(code: int, body: Object, retry_after: float | None = None) -> httpx2.Response:
    headers = {"Content-Type": "application/json"}
    if retry_after is not None:
        headers["Retry-After"] = str(round(retry_after))
    return httpx2.Response(code, headers=headers, content=msgspec.json.encode(body))
