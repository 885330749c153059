"""The API server over HTTP: an httpx2 transport, so that a real client runs against it in process.

A request is routed by its path to a kind, namespace, name and subresource. The body is read in its
format (JSON or, for kubectl, protobuf) with limits on size and nesting. The verb goes to a `DirectApi`
of the user that the User-Agent names. Discovery documents are answered first. `pods/binding` and
`pods/eviction` are the only subresources besides `status`. No disruption budget is served, so an
eviction is a delete.

A patch is a merge patch, a JSON patch, a server-side apply, or for built-in types a strategic merge
patch. The answer is the object, a list, or the table that kubectl requests. A watch is a stream of JSON
lines. An error after its start is its last line.

A body of a shape that no rule expects is refused with 400 and logged: the store takes a write whole or not
at all.
"""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import httpx2
import msgspec

from rackloom.claim.kube.api import KubeError, WatchEvent
from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object, ResourceKind
from rackloom.lab.kube import objects as kube_objects
from rackloom.lab.kube import patches, refusals
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.kubectl import writes
from rackloom.lab.kube.kubectl.discovery import discovery_document
from rackloom.lab.kube.kubectl.tables import table_of, wants_table
from rackloom.lab.kube.kubectl.writes import MERGE_KEYS
from rackloom.lab.kube.managed_fields import clone
from rackloom.lab.kube.queries import (
    Binding,
    Continuations,
    DeleteOptions,
    Eviction,
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
_METHOD_NOT_ALLOWED = KubeError(
    405, "MethodNotAllowed", "the server does not allow this method on the resource"
)
_SUCCESS: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
_UNFORESEEN = (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)


_CONTAINER_SUBRESOURCES = {
    "log": "write no log",
    "exec": "run no command",
    "attach": "have no input and output",
    "portforward": "listen on no port",
}
"""Requests of kubectl to running containers, and the reason why none is served."""


def _of_simulated_container(pod: str, subresource: str) -> KubeError:
    lacking = _CONTAINER_SUBRESOURCES[subresource]
    return KubeError(
        501,
        "NotImplemented",
        f"the containers of pod {pod} are simulated and {lacking}: `kubectl describe pod {pod}` shows what"
        " happened to it",
    )


class KubeTransport(httpx2.AsyncBaseTransport):
    """HTTP requests to a fake server. Without `user`, the User-Agent up to its "/" is the user."""

    def __init__(self, kube: FakeKube, user: str | None = None) -> None:
        self._kube = kube
        self._user = user
        self._pages = Continuations()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Answer one request."""
        path, params = request.url.path, request.url.params
        user = self._user or request.headers.get("User-Agent", "").split("/")[0]
        try:
            document = discovery_document(path, self._kube.schemas) if request.method == "GET" else None
            if document is not None:
                return _json_response(200, document)
            api = DirectApi(self._kube, user, params.get("fieldManager", ""))
            call = _ResourceCall(self._kube, api, request, self._pages)
            return call.watch() if params.get("watch") in ("true", "1") else await call.answer()
        except KubeError as error:
            if error.code == 0:
                raise httpx2.ReadError(error.message, request=request) from error
            return _json_response(error.code, status_body(error), error.retry_after)


class _ResourceCall:
    """One request for the objects of a kind: the parts of its path and query, and its response."""

    def __init__(self, kube: FakeKube, api: DirectApi, request: httpx2.Request, pages: Continuations) -> None:
        self._kube = kube
        self._api = api
        self._request = request
        self._params = params = request.url.params
        self._pages = pages
        self._dry_run = False
        self._is_table = wants_table(request.headers.get("Accept", ""))
        self._selectors = {
            "labels": params.get("labelSelector", ""),
            "fields": params.get("fieldSelector", ""),
        }
        group, version, rest = _group_version(request.url.path.strip("/").split("/"))
        self._namespace = None
        if len(rest) > 2 and rest[0] == "namespaces" and rest[2] not in ("status", "finalize"):
            self._namespace, rest = rest[1], rest[2:]
        plural, self._name, self._subresource = (*rest, "", "", "")[:3]
        self._kind = self._served_kind(group, version, plural)
        if self._kind == objects.POD and self._subresource in _CONTAINER_SUBRESOURCES:
            raise _of_simulated_container(self._name, self._subresource)
        if request.method == "GET" and self._subresource not in ("", "status"):
            raise refusals.not_served()

    def _served_kind(self, group: str, version: str, plural: str) -> ResourceKind:
        for kind in self._kube.schemas:
            if (kind.group, kind.version, kind.plural) == (group, version, plural):
                return kind
        raise refusals.not_served()

    async def answer(self) -> httpx2.Response:
        """The response. A body of a shape that no rule expects is refused with 400."""
        request = self._request
        try:
            body = read_body(request.content, request.headers.get("Content-Type", ""))
            self._dry_run = is_dry_run(self._params)
            if request.method == "GET":
                return _json_response(200, await self._read())
            if request.method == "POST":
                return _json_response(201, await self._post(body))
            return _json_response(200, await self._write(body))
        except _UNFORESEEN as error:
            if request.method == "GET":
                raise
            _logger.warning("%s %s cannot be handled", request.method, request.url.path, exc_info=error)
            why = f"the body of the request cannot be handled: {type(error).__name__}: {error}"
            raise refusals.bad_request(why) from error

    async def _read(self) -> Object:
        if self._name:
            return self._shown(await self._api.get(self._kind, self._name, self._namespace))
        options = list_options(self._params)
        if options.token:
            page = self._pages.rest(options.token, self._kube.store, options.limit)
        else:
            listed = await self._api.list_of(self._kind, self._namespace, options, **self._selectors)
            page = self._pages.first(listed, options.limit)
        if self._is_table:
            return self._table(page.items, page.metadata)
        items = [{key: item[key] for key in item if key not in ("apiVersion", "kind")} for item in page.items]
        kind, version = f"{self._kind.kind}List", self._kind.api_version
        return {"kind": kind, "apiVersion": version, "metadata": page.metadata, "items": items}

    def _shown(self, obj: Object) -> Object:
        """One object as the client wants to see it: as it is, or as the row of a table."""
        if not self._is_table:
            return obj
        return self._table((obj,), {"resourceVersion": obj["metadata"]["resourceVersion"]})

    def _table(self, items: tuple[Object, ...], metadata: Object) -> Object:
        included = self._params.get("includeObject", "Metadata")
        return table_of(self._kind, items, metadata, self._kube.now(), included)

    async def _post(self, body: Any) -> Object:
        match self._kind, self._subresource:
            case objects.POD, kube_objects.BINDING_SUBRESOURCE:
                asked = read_options(Binding, body)
                uid = asked.metadata.uid if asked.metadata else None
                namespace, node = self._namespace or "", asked.target.name
                await self._api.bind(self._name, namespace, node, uid=uid, dry_run=self._dry_run)
                return _SUCCESS
            case objects.POD, "eviction":
                # An eviction is a delete that a disruption budget may refuse, but none is served.
                return await self._delete(read_options(Eviction, body).delete_options)
        return await self._api.create(self._kind, self._placed(body), dry_run=self._dry_run)

    async def _write(self, body: Any) -> Object:
        method = self._request.method if self._name else ""
        if method == "PUT":
            obj = self._placed(body)
            return await self._api.replace(
                self._kind, obj, subresource=self._subresource, dry_run=self._dry_run
            )
        if method == "PATCH":
            return await self._patch(body)
        if method == "DELETE":
            return await self._delete(read_options(DeleteOptions, body))
        raise _METHOD_NOT_ALLOWED

    async def _patch(self, body: Any) -> Object:
        kind, where, dry_run = self._kind, self._subresource, self._dry_run
        content_type = self._request.headers.get("Content-Type", "")
        if content_type == APPLY_PATCH:
            force, manager = self._params.get("force") == "true", field_manager_of(self._params)
            return await self._api.apply(
                kind, self._placed(body), manager=manager, force=force, subresource=where, dry_run=dry_run
            )
        change = patch_mutation(kind, content_type, body)
        return await self._api.modify(
            kind, self._name, self._namespace, change, subresource=where, dry_run=dry_run
        )

    async def _delete(self, options: DeleteOptions | None) -> Object:
        options = options or DeleteOptions()
        dry_run = is_dry_run({}, options.dry_run or ()) or self._dry_run
        await self._api.delete_with(self._kind, self._name, self._namespace, options, dry_run=dry_run)
        return _SUCCESS

    def _placed(self, obj: Object) -> Object:
        """The object with the namespace of its path. Its body must not contradict the path."""
        if not isinstance(obj, dict) or not isinstance(obj.get("metadata") or {}, dict):
            raise refusals.bad_request("the body of the request is not an object")
        metadata = dict(obj.get("metadata") or {})
        if self._kind.namespaced:
            if (metadata.get("namespace") or self._namespace) != self._namespace:
                raise refusals.bad_request(
                    "the namespace of the provided object does not match the namespace sent on the request"
                )
            metadata["namespace"] = self._namespace
        if self._name and metadata.get("name") != self._name:
            name = metadata.get("name", "")
            raise refusals.bad_request(
                f"the name of the object ({name}) does not match the name on the URL ({self._name})"
            )
        return {**obj, "metadata": metadata}

    def watch(self) -> httpx2.Response:
        """Refuse an invalid watch before the response begins. Later errors are in its body."""
        options = watch_options(self._params)
        fields = self._selectors["fields"]
        check_field_selector(self._kind, fields, self._kube.schema(self._kind).selectable)
        selector_predicate(**self._selectors)
        events = self._api.follow(self._kind, self._namespace, options, **self._selectors)
        return httpx2.Response(200, stream=_WatchBody(events, self._shown))


def _group_version(parts: list[str]) -> tuple[str, str, list[str]]:
    """The group and the version that a path begins with, and the rest of the path."""
    match parts:
        case ["api", version, *rest]:
            return "", version, rest
        case ["apis", group, version, *rest]:
            return group, version, rest
    raise refusals.not_served()


class _WatchBody(httpx2.AsyncByteStream):
    """The body of a watch: what goes wrong on the way is its last line, or a broken connection."""

    def __init__(self, events: AsyncGenerator[WatchEvent, None], shown: Callable[[Object], Object]) -> None:
        self._events = events
        self._shown = shown

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async with aclosing(self._events):
                async for event in self._events:
                    yield _watch_line(event.type, self._shown(event.object))
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
"""Of Python's 1000 calls, those that are left to a function that walks through a body."""


def read_body(content: bytes, content_type: str) -> Any:
    """The value, or None if there is none. Raises `KubeError` (413, 415) and `Rejected` (400)."""
    if len(content) > MAX_BODY_BYTES:
        raise refusals.too_large(f"Request entity too large: limit is {MAX_BODY_BYTES}")
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
    # msgspec counts its levels on top of Python's calls, so that calls bound them.
    return _decode_json(content, spare - 1) if spare else msgspec.json.decode(content)


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
    """The effect of a patch of this type on an object.

    Raises:
        Rejected: (400) it is no patch.
        KubeError: (415) objects of this kind take none of this type: custom ones no strategic merge patch.
    """
    effect: Callable[[Object, Any], Any] = patches.merge_patch
    wanted: type = dict
    if content_type == _JSON:
        effect, wanted = patches.json_patch, list
    elif content_type == _STRATEGIC_MERGE_PATCH and kind in MERGE_KEYS:
        effect = partial(writes.strategic_merge, keys=MERGE_KEYS[kind])
    elif content_type != _MERGE:
        raise unknown_format(content_type)
    if not isinstance(patch, wanted):
        raise refusals.bad_request(f"the body of the request is no patch: {type(patch).__name__}")
    return lambda old: effect(old, clone(patch))
