"""The fake server on the wire: an httpx2 transport, so that a real client runs against it in process."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx2
import msgspec

from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import Kind, KubeError, Object, WatchEvent
from rackloom.twin.kube import answers
from rackloom.twin.kube.binding import SUBRESOURCE
from rackloom.twin.kube.direct import DirectApi
from rackloom.twin.kube.options import is_dry_run, list_options, manager_of, watch_options
from rackloom.twin.kube.pages import Pages
from rackloom.twin.kube.selectors import check_fields, matcher
from rackloom.twin.kube.server import FakeKube

_CREATED = 201
_SUCCESS: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}


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
                return httpx2.Response(200, stream=self._events(api, target, request.url.params))
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
        dry_run = is_dry_run(params, body if request.method == "DELETE" else None)
        match request.method:
            case "GET" if target.name:
                return _json(200, await api.get(target.kind, target.name, target.namespace))
            case "GET":
                return _json(200, await self._page(api, target, params))
            case "POST" if (target.kind, target.subresource) == (kinds.POD, SUBRESOURCE):
                return _json(_CREATED, await _bind(api, target, body, dry_run))
            case "POST":
                obj = _placed(target, body)
                return _json(_CREATED, await api.create(target.kind, obj, dry_run=dry_run))
            case "PUT":
                obj = _placed(target, body)
                where = target.subresource
                return _json(200, await api.replace(target.kind, obj, subresource=where, dry_run=dry_run))
            case "PATCH":
                return _json(200, await _patch(api, target, request, body, dry_run))
            case "DELETE":
                return _json(200, await _delete(api, target, body, dry_run))
        raise KubeError(405, "MethodNotAllowed", "the server does not allow this method on the resource")

    async def _page(self, api: DirectApi, target: Target, params: httpx2.QueryParams) -> Object:
        options = list_options(params)
        if options.token:
            page = self._pages.rest(options.token, self._kube.store, options.limit)
        else:
            listed = await api.list_of(target.kind, target.namespace, options, **_selectors(params))
            page = self._pages.first(listed, options.limit)
        bare = ("apiVersion", "kind")
        items = [{key: item[key] for key in item if key not in bare} for item in page.items]
        kind, version = f"{target.kind.kind}List", target.kind.api_version
        return {"kind": kind, "apiVersion": version, "metadata": page.metadata, "items": items}

    def _events(self, api: DirectApi, target: Target, params: httpx2.QueryParams) -> "_Events":
        """What cannot be watched is refused before the answer begins; all else is said in its body."""
        options, selectors = watch_options(params), _selectors(params)
        check_fields(target.kind, selectors["fields"], self._kube.shape(target.kind).selectable)
        matcher(**selectors)
        return _Events(api.follow(target.kind, target.namespace, options, **selectors))


def _body(request: httpx2.Request) -> Any:
    content, content_type = request.content, request.headers.get("Content-Type", "")
    # `kubectl create namespace` and its like write protobuf; `kubectl create -f` and `apply` do not.
    if content_type.startswith("application/vnd.kubernetes.protobuf"):
        raise _unknown_format(
            f"{content_type}: this API server reads JSON (kubectl create -f, kubectl apply)"
        )
    try:
        return msgspec.json.decode(content) if content else None
    except msgspec.DecodeError as error:
        raise answers.bad_request(f"the body of the request is not JSON: {error}") from error


def _placed(target: Target, obj: Object) -> Object:
    """The path says where an object is; its body must not say otherwise."""
    if not isinstance(obj, dict) or not isinstance(obj.get("metadata") or {}, dict):
        raise answers.bad_request("the body of the request is not an object")
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


async def _patch(api: DirectApi, target: Target, request: httpx2.Request, body: Any, dry_run: bool) -> Object:
    content_type, where = request.headers.get("Content-Type", ""), target.subresource
    if content_type == "application/apply-patch+yaml":
        params = request.url.params
        force, manager = params.get("force") == "true", manager_of(params)
        placed = _placed(target, body)
        return await api.apply(
            target.kind, placed, manager=manager, force=force, subresource=where, dry_run=dry_run
        )
    if content_type not in ("application/merge-patch+json", "application/json-patch+json"):
        raise _unknown_format(content_type)
    patch = tuple(body) if isinstance(body, list) else body
    return await api.patch(
        target.kind, target.name, target.namespace, patch, subresource=where, dry_run=dry_run
    )


def _unknown_format(what: str) -> KubeError:
    return KubeError(415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {what}")


async def _bind(api: DirectApi, target: Target, body: Object, dry_run: bool) -> Object:
    node, uid = body["target"]["name"], (body.get("metadata") or {}).get("uid")
    await api.bind(target.name, target.namespace or "", node, uid=uid, dry_run=dry_run)
    return _SUCCESS


async def _delete(api: DirectApi, target: Target, options: Any, dry_run: bool) -> Object:
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
        dry_run=dry_run,
    )
    return _SUCCESS


class _Events(httpx2.AsyncByteStream):
    """The body of a watch: what goes wrong on the way is its last line, or a broken connection."""

    def __init__(self, events: AsyncGenerator[WatchEvent, None]) -> None:
        self._events = events

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
    after = error.retry_after
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": error.message,
        "reason": error.reason,
        "code": error.code,
    } | ({} if after is None else {"details": {"retryAfterSeconds": round(after)}})


def _json(code: int, body: Object, retry_after: float | None = None) -> httpx2.Response:
    headers = {"Content-Type": "application/json"}
    if retry_after is not None:
        headers["Retry-After"] = str(round(retry_after))
    return httpx2.Response(code, headers=headers, content=msgspec.json.encode(body))
