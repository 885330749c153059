"""The fake server on the wire: an httpx2 transport, so that a real client runs against it in process."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx2
import msgspec

from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import Kind, KubeError, Object, WatchEvent
from rackloom.twin.kube import answers
from rackloom.twin.kube.binding import SUBRESOURCE
from rackloom.twin.kube.bodies import read_body
from rackloom.twin.kube.direct import DirectApi
from rackloom.twin.kube.discovery import discovery
from rackloom.twin.kube.options import is_dry_run, list_options, manager_of, watch_options
from rackloom.twin.kube.pages import Page, Pages
from rackloom.twin.kube.patching import APPLY, change_of
from rackloom.twin.kube.request_types import Binding, DeleteOptions, Eviction, read_as
from rackloom.twin.kube.selectors import check_fields, matcher
from rackloom.twin.kube.server import FakeKube
from rackloom.twin.kube.views import View, view

_log = logging.getLogger(__name__)
_CREATED = 201
_NOT_ALLOWED = KubeError(405, "MethodNotAllowed", "the server does not allow this method on the resource")
EVICTION = "eviction"
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
        api = DirectApi(self._kube, user, request.url.params.get("fieldManager", ""))
        try:
            document = discovery(request.url.path, self._kube.shapes) if request.method == "GET" else None
            if document is not None:
                return _json(200, document)
            target = self._target(request.url.path)
            if request.url.params.get("watch") in ("true", "1"):
                return httpx2.Response(200, stream=self._events(api, target, request))
            return await self._handled(api, target, request)
        except KubeError as error:
            if error.code == 0:
                raise httpx2.ReadError(error.message, request=request) from error
            return _json(error.code, status_of(error), error.retry_after)

    def _target(self, path: str) -> Target:
        group, version, rest = _grouped(path.strip("/").split("/"))
        namespace = None
        if len(rest) > 2 and rest[0] == "namespaces" and rest[2] not in ("status", "finalize"):
            namespace, rest = rest[1], rest[2:]
        plural, name, subresource = (*rest, "", "", "")[:3]
        for kind in self._kube.shapes:
            if (kind.group, kind.version, kind.plural) == (group, version, plural):
                return Target(kind, namespace, name, subresource)
        raise answers.not_served()

    async def _handled(self, api: DirectApi, target: Target, request: httpx2.Request) -> httpx2.Response:
        """The answer. What no rule foresaw in a body is refused: the store takes a write whole or not."""
        try:
            return await self._answer(api, target, request)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
            if request.method == "GET":
                raise
            _log.warning("%s %s cannot be handled", request.method, request.url.path, exc_info=error)
            why = f"the body of the request cannot be handled: {type(error).__name__}: {error}"
            raise answers.bad_request(why) from error

    async def _answer(self, api: DirectApi, target: Target, request: httpx2.Request) -> httpx2.Response:
        params, body = request.url.params, read_body(request.content, request.headers.get("Content-Type", ""))
        dry_run = is_dry_run(params)
        match request.method:
            case "GET" if target.name:
                found = await api.get(target.kind, target.name, target.namespace)
                return _json(200, self._view(target, request).one(found))
            case "GET":
                page = await self._page(api, target, params)
                return _json(200, self._view(target, request).page(page))
            case "POST" if (target.kind, target.subresource) in _OF_PODS:
                act = _OF_PODS[target.kind, target.subresource]
                return _json(_CREATED, await act(api, target, body, dry_run))
            case "POST":
                obj = _placed(target, body)
                return _json(_CREATED, await api.create(target.kind, obj, dry_run=dry_run))
            case "PUT" | "PATCH" | "DELETE" if not target.name:
                raise _NOT_ALLOWED
            case "PUT":
                obj = _placed(target, body)
                where = target.subresource
                return _json(200, await api.replace(target.kind, obj, subresource=where, dry_run=dry_run))
            case "PATCH":
                return _json(200, await _patch(api, target, request, body, dry_run))
            case "DELETE":
                return _json(200, await _delete(api, target, read_as(DeleteOptions, body), dry_run))
        raise _NOT_ALLOWED

    async def _page(self, api: DirectApi, target: Target, params: httpx2.QueryParams) -> Page:
        options = list_options(params)
        if options.token:
            return self._pages.rest(options.token, self._kube.store, options.limit)
        listed = await api.list_of(target.kind, target.namespace, options, **_selectors(params))
        return self._pages.first(listed, options.limit)

    def _view(self, target: Target, request: httpx2.Request) -> View:
        accept = request.headers.get("Accept", "")
        return view(target.kind, accept, request.url.params, self._kube.now)

    def _events(self, api: DirectApi, target: Target, request: httpx2.Request) -> "_Events":
        """What cannot be watched is refused before the answer begins; all else is said in its body."""
        params = request.url.params
        options, selectors = watch_options(params), _selectors(params)
        check_fields(target.kind, selectors["fields"], self._kube.shape(target.kind).selectable)
        matcher(**selectors)
        events = api.follow(target.kind, target.namespace, options, **selectors)
        return _Events(events, self._view(target, request))


def _grouped(parts: list[str]) -> tuple[str, str, list[str]]:
    """The group and the version that a path begins with, and what follows them."""
    match parts:
        case ["api", version, *rest]:
            return "", version, rest
        case ["apis", group, version, *rest]:
            return group, version, rest
    raise answers.not_served()


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
    if content_type == APPLY:
        params = request.url.params
        force, manager = params.get("force") == "true", manager_of(params)
        placed = _placed(target, body)
        return await api.apply(
            target.kind, placed, manager=manager, force=force, subresource=where, dry_run=dry_run
        )
    change = change_of(target.kind, content_type, body)
    return await api.modify(
        target.kind, target.name, target.namespace, change, subresource=where, dry_run=dry_run
    )


async def _bind(api: DirectApi, target: Target, body: Any, dry_run: bool) -> Object:
    asked = read_as(Binding, body)
    uid = asked.metadata.uid if asked.metadata else None
    await api.bind(target.name, target.namespace or "", asked.target.name, uid=uid, dry_run=dry_run)
    return _SUCCESS


async def _evict(api: DirectApi, target: Target, body: Any, dry_run: bool) -> Object:
    """An eviction is a delete that a disruption budget may refuse; none is served, so none does."""
    options = read_as(Eviction, body).delete_options or DeleteOptions()
    return await _delete(api, target, options, dry_run)


_OF_PODS = {(kinds.POD, SUBRESOURCE): _bind, (kinds.POD, EVICTION): _evict}
"""What can be asked of a pod beside a write of it."""


async def _delete(api: DirectApi, target: Target, options: DeleteOptions, dry_run: bool) -> Object:
    await api.delete(
        target.kind,
        target.name,
        target.namespace,
        uid=options.meant.uid,
        resource_version=options.meant.resource_version,
        propagation=options.propagation_policy,
        grace_seconds=options.grace_period_seconds,
        dry_run=is_dry_run({}, options.dry_run or ()) or dry_run,
    )
    return _SUCCESS


class _Events(httpx2.AsyncByteStream):
    """The body of a watch: what goes wrong on the way is its last line, or a broken connection."""

    def __init__(self, events: AsyncGenerator[WatchEvent, None], seen: View) -> None:
        self._events = events
        self._view = seen

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async with aclosing(self._events):
                async for event in self._events:
                    yield _line(event.type, self._view.one(event.object))
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
