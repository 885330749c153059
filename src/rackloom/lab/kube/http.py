"""The API server over HTTP: an httpx2 transport, so that a real client runs against it in process.

A request is routed by its path to a kind, namespace, name and subresource. The body is read in its
format (JSON or, for kubectl, protobuf) with limits on size and nesting. The verb goes to a `DirectApi`
of the user that the User-Agent names. Discovery documents are answered first. `pods/binding` and
`pods/eviction` are the only subresources besides `status`; no disruption budget is served, so an
eviction is a delete.

A patch is a merge patch, a JSON patch, a server-side apply, or for built-in types a strategic merge
patch. The answer is the object, a list, or the table that kubectl asks for. A watch is a stream of JSON
lines; an error after its start is its last line.

What no rule foresaw in a body is refused with 400 and logged: the store takes a write whole or not at
all.
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx2
import msgspec

from rackloom.claim.kube.api import KubeError, WatchEvent
from rackloom.core.kubernetes import objects
from rackloom.core.kubernetes.objects import Object, ResourceKind
from rackloom.lab.kube import patches, refusals
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.kubectl import writes
from rackloom.lab.kube.kubectl.discovery import discovery_document
from rackloom.lab.kube.kubectl.tables import table_of, wants_table
from rackloom.lab.kube.kubectl.writes import MERGE_KEYS
from rackloom.lab.kube.managed_fields import clone
from rackloom.lab.kube.objects import BINDING_SUBRESOURCE
from rackloom.lab.kube.queries import (
    Binding,
    Continuations,
    DeleteOptions,
    Eviction,
    ListChunk,
    check_field_selector,
    field_manager_of,
    is_dry_run,
    list_options,
    read_options,
    selector_predicate,
    watch_options,
)
from rackloom.lab.kube.server import FakeKube, Mutation

_logger = logging.getLogger(__name__)
_CREATED = 201
_METHOD_NOT_ALLOWED = KubeError(
    405, "MethodNotAllowed", "the server does not allow this method on the resource"
)
EVICTION_SUBRESOURCE = "eviction"
_SUCCESS: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """What a path leads to."""

    kind: ResourceKind
    namespace: str | None
    name: str
    subresource: str


# How a client wants to see objects: as they are, or as rows of a table.


@dataclass(frozen=True, slots=True)
class ResponseView:
    """How one request wants objects. `included`: what of an object accompanies its row in a table."""

    kind: ResourceKind
    is_table: bool
    included: str
    now: Callable[[], float]

    def single(self, obj: Object) -> Object:
        """One object: the answer to a read, and what an event of a watch tells."""
        if not self.is_table:
            return obj
        return self._table((obj,), {"resourceVersion": obj["metadata"]["resourceVersion"]})

    def page(self, page: ListChunk) -> Object:
        """A list, or a chunk of one."""
        if self.is_table:
            return self._table(page.items, page.metadata)
        items = [{key: item[key] for key in item if key not in _LIST_ITEM_OMITS} for item in page.items]
        kind, version = f"{self.kind.kind}List", self.kind.api_version
        return {"kind": kind, "apiVersion": version, "metadata": page.metadata, "items": items}

    def _table(self, items: tuple[Object, ...], metadata: Object) -> Object:
        return table_of(self.kind, items, metadata, self.now(), self.included)


class KubeTransport(httpx2.AsyncBaseTransport):
    """HTTP requests to a fake server. Without `user`, the User-Agent up to its "/" is the user."""

    def __init__(self, kube: FakeKube, user: str | None = None) -> None:
        self._kube = kube
        self._user = user
        self._pages = Continuations()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer one request."""
        user = self._user or request.headers.get("User-Agent", "").split("/")[0]
        api = DirectApi(self._kube, user, request.url.params.get("fieldManager", ""))
        try:
            document = (
                discovery_document(request.url.path, self._kube.schemas) if request.method == "GET" else None
            )
            if document is not None:
                return _json_response(200, document)
            target = self._target(request.url.path)
            if request.url.params.get("watch") in ("true", "1"):
                return httpx2.Response(200, stream=self._events(api, target, request))
            return await self._handled(api, target, request)
        except KubeError as error:
            if error.code == 0:
                raise httpx2.ReadError(error.message, request=request) from error
            return _json_response(error.code, status_body(error), error.retry_after)

    def _target(self, path: str) -> RequestTarget:
        group, version, rest = _group_version(path.strip("/").split("/"))
        namespace = None
        if len(rest) > 2 and rest[0] == "namespaces" and rest[2] not in ("status", "finalize"):
            namespace, rest = rest[1], rest[2:]
        plural, name, subresource = (*rest, "", "", "")[:3]
        for kind in self._kube.schemas:
            if (kind.group, kind.version, kind.plural) == (group, version, plural):
                return RequestTarget(kind, namespace, name, subresource)
        raise refusals.not_served()

    async def _handled(
        self, api: DirectApi, target: RequestTarget, request: httpx2.Request
    ) -> httpx2.Response:
        """The answer. What no rule foresaw in a body is refused: the store takes a write whole or not."""
        try:
            return await self._answer(api, target, request)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
            if request.method == "GET":
                raise
            _logger.warning("%s %s cannot be handled", request.method, request.url.path, exc_info=error)
            why = f"the body of the request cannot be handled: {type(error).__name__}: {error}"
            raise refusals.bad_request(why) from error

    async def _answer(
        self, api: DirectApi, target: RequestTarget, request: httpx2.Request
    ) -> httpx2.Response:
        params, body = request.url.params, read_body(request.content, request.headers.get("Content-Type", ""))
        dry_run = is_dry_run(params)
        match request.method:
            case "GET" if target.name:
                found = await api.get(target.kind, target.name, target.namespace)
                return _json_response(200, self._view(target, request).single(found))
            case "GET":
                page = await self._page(api, target, params)
                return _json_response(200, self._view(target, request).page(page))
            case "POST" if (target.kind, target.subresource) in _POD_SUBRESOURCES:
                act = _POD_SUBRESOURCES[target.kind, target.subresource]
                return _json_response(_CREATED, await act(api, target, body, dry_run))
            case "POST":
                obj = _object_at(target, body)
                return _json_response(_CREATED, await api.create(target.kind, obj, dry_run=dry_run))
            case "PUT" | "PATCH" | "DELETE" if not target.name:
                raise _METHOD_NOT_ALLOWED
            case "PUT":
                obj = _object_at(target, body)
                where = target.subresource
                return _json_response(
                    200, await api.replace(target.kind, obj, subresource=where, dry_run=dry_run)
                )
            case "PATCH":
                return _json_response(200, await _patch_object(api, target, request, body, dry_run))
            case "DELETE":
                return _json_response(
                    200, await _delete_object(api, target, read_options(DeleteOptions, body), dry_run)
                )
        raise _METHOD_NOT_ALLOWED

    async def _page(self, api: DirectApi, target: RequestTarget, params: httpx2.QueryParams) -> ListChunk:
        options = list_options(params)
        if options.token:
            return self._pages.rest(options.token, self._kube.store, options.limit)
        listed = await api.list_of(target.kind, target.namespace, options, **_selectors(params))
        return self._pages.first(listed, options.limit)

    def _view(self, target: RequestTarget, request: httpx2.Request) -> ResponseView:
        accept = request.headers.get("Accept", "")
        return response_view(target.kind, accept, request.url.params, self._kube.now)

    def _events(self, api: DirectApi, target: RequestTarget, request: httpx2.Request) -> "_WatchBody":
        """Refuse an invalid watch before the answer begins; later errors are in its body."""
        params = request.url.params
        options, selectors = watch_options(params), _selectors(params)
        check_field_selector(target.kind, selectors["fields"], self._kube.schema(target.kind).selectable)
        selector_predicate(**selectors)
        events = api.follow(target.kind, target.namespace, options, **selectors)
        return _WatchBody(events, self._view(target, request))


def _group_version(parts: list[str]) -> tuple[str, str, list[str]]:
    """The group and the version that a path begins with, and what follows them."""
    match parts:
        case ["api", version, *rest]:
            return "", version, rest
        case ["apis", group, version, *rest]:
            return group, version, rest
    raise refusals.not_served()


def _object_at(target: RequestTarget, obj: Object) -> Object:
    """The object with the namespace of its path; its body must not contradict the path."""
    if not isinstance(obj, dict) or not isinstance(obj.get("metadata") or {}, dict):
        raise refusals.bad_request("the body of the request is not an object")
    metadata = dict(obj.get("metadata") or {})
    named = metadata.get("namespace") or target.namespace
    if target.kind.namespaced and named != target.namespace:
        raise refusals.bad_request(
            "the namespace of the provided object does not match the namespace sent on the request"
        )
    if target.name and metadata.get("name") != target.name:
        name = metadata.get("name", "")
        raise refusals.bad_request(
            f"the name of the object ({name}) does not match the name on the URL ({target.name})"
        )
    if target.kind.namespaced:
        metadata["namespace"] = target.namespace
    return {**obj, "metadata": metadata}


def _selectors(params: httpx2.QueryParams) -> dict[str, str]:
    return {"labels": params.get("labelSelector", ""), "fields": params.get("fieldSelector", "")}


async def _patch_object(
    api: DirectApi, target: RequestTarget, request: httpx2.Request, body: Any, dry_run: bool
) -> Object:
    content_type, where = request.headers.get("Content-Type", ""), target.subresource
    if content_type == APPLY_PATCH:
        params = request.url.params
        force, manager = params.get("force") == "true", field_manager_of(params)
        placed = _object_at(target, body)
        return await api.apply(
            target.kind, placed, manager=manager, force=force, subresource=where, dry_run=dry_run
        )
    change = patch_mutation(target.kind, content_type, body)
    return await api.modify(
        target.kind, target.name, target.namespace, change, subresource=where, dry_run=dry_run
    )


async def _bind_pod(api: DirectApi, target: RequestTarget, body: Any, dry_run: bool) -> Object:
    asked = read_options(Binding, body)
    uid = asked.metadata.uid if asked.metadata else None
    await api.bind(target.name, target.namespace or "", asked.target.name, uid=uid, dry_run=dry_run)
    return _SUCCESS


async def _evict_pod(api: DirectApi, target: RequestTarget, body: Any, dry_run: bool) -> Object:
    """An eviction is a delete that a disruption budget may refuse; none is served, so none does."""
    options = read_options(Eviction, body).delete_options or DeleteOptions()
    return await _delete_object(api, target, options, dry_run)


_POD_SUBRESOURCES = {
    (objects.POD, BINDING_SUBRESOURCE): _bind_pod,
    (objects.POD, EVICTION_SUBRESOURCE): _evict_pod,
}
"""The subresources of pods besides status."""


async def _delete_object(
    api: DirectApi, target: RequestTarget, options: DeleteOptions, dry_run: bool
) -> Object:
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


class _WatchBody(httpx2.AsyncByteStream):
    """The body of a watch: what goes wrong on the way is its last line, or a broken connection."""

    def __init__(self, events: AsyncGenerator[WatchEvent, None], view: ResponseView) -> None:
        self._events = events
        self._view = view

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async with aclosing(self._events):
                async for event in self._events:
                    yield _watch_line(event.type, self._view.single(event.object))
        except KubeError as error:
            if error.code == 0:
                raise httpx2.ReadError(error.message) from error
            yield _watch_line("ERROR", status_body(error))


def _watch_line(kind: str, obj: Object) -> bytes:
    return msgspec.json.encode({"type": kind, "object": obj}) + b"\n"


def status_body(error: KubeError) -> Object:
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


def _json_response(code: int, body: Object, retry_after: float | None = None) -> httpx2.Response:
    headers = {"Content-Type": "application/json"}
    if retry_after is not None:
        headers["Retry-After"] = str(round(retry_after))
    return httpx2.Response(code, headers=headers, content=msgspec.json.encode(body))


# Request bodies.


MAX_BODY_BYTES = 3 << 20
"""Bytes of a body that an API server reads (k8s.io/apiserver, MaxRequestBodyBytes)."""
_SHALLOW_LEVELS = 200
"""Levels that are read anywhere."""
_SPARE_CALLS = 700
"""Of Python's 1000 calls, those that whoever walks through a body has left."""


def read_body(content: bytes, content_type: str) -> Any:
    """The value; None where there is none. Raises `KubeError` (413, 415) and `Rejected` (400)."""
    if len(content) > MAX_BODY_BYTES:
        raise body_too_large()
    if not content:
        return None
    if content_type.startswith(writes.PROTOBUF_CONTENT_TYPE):
        return _read_protobuf_body(content)
    try:
        return _decode_json(
            content, 0 if content.count(b"[") + content.count(b"{") <= _SHALLOW_LEVELS else _SPARE_CALLS
        )
    except RecursionError:
        raise refusals.bad_request("the body of the request is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise refusals.bad_request(f"the body of the request is not JSON: {error}") from error


def _decode_json(content: bytes, spare: int) -> Any:
    # msgspec counts its levels on top of Python's calls, so that calls are what bounds them.
    return _decode_json(content, spare - 1) if spare else msgspec.json.decode(content)


def body_too_large() -> KubeError:
    """A body above the limit."""
    return refusals.too_large(f"Request entity too large: limit is {MAX_BODY_BYTES}")


def _read_protobuf_body(content: bytes) -> Any:
    try:
        return writes.read_protobuf(content)
    except writes.UnreadableProtobuf as error:
        way = "of this one the API server reads JSON (kubectl create -f, kubectl apply)"
        raise unknown_format(f"{writes.PROTOBUF_CONTENT_TYPE}, {error}: {way}") from error


def unknown_format(what: str) -> KubeError:
    """A body, or a patch, that is not understood."""
    return KubeError(415, "UnsupportedMediaType", f"the body of the request was in an unknown format: {what}")


# Patch types.


APPLY_PATCH = "application/apply-patch+yaml"
_JSON, _MERGE = "application/json-patch+json", "application/merge-patch+json"
_STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"


def patch_mutation(kind: ResourceKind, content_type: str, patch: Any) -> Mutation:
    """What a patch of this type does to an object.

    Raises:
        Rejected: (400) it is no patch.
        KubeError: (415) objects of this kind take none of this type: custom ones no strategic merge patch.
    """
    if content_type == _JSON:
        operations = _require_patch_type(patch, list)
        return lambda old: patches.json_patch(old, clone(operations))
    if content_type == _MERGE:
        fields = _require_patch_type(patch, dict)
        return lambda old: patches.merge_patch(old, clone(fields))
    if content_type == _STRATEGIC_MERGE_PATCH and kind in MERGE_KEYS:
        fields, keys = _require_patch_type(patch, dict), MERGE_KEYS[kind]
        return lambda old: writes.strategic_merge(old, clone(fields), keys)
    raise unknown_format(content_type)


def _require_patch_type(patch: Any, type_: type) -> Any:
    if not isinstance(patch, type_):
        raise refusals.bad_request(f"the body of the request is no patch: {type(patch).__name__}")
    return patch


_LIST_ITEM_OMITS = ("apiVersion", "kind")


def response_view(
    kind: ResourceKind, accept: str, params: Mapping[str, str], now: Callable[[], float]
) -> ResponseView:
    """What a request for objects of a kind wants to see."""
    return ResponseView(kind, wants_table(accept), params.get("includeObject", "Metadata"), now)
