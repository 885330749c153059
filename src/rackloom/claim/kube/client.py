"""`KubeApi` over HTTP, on the authenticated client that lightkube configures.

Requests are plain JSON: nothing is decoded into models, so fields which this code does not know
survive. Lists are read in chunks of 500, as kubectl and client-go do, and whole where the continue
token expires. A watch that stays silent for too long is broken: bookmarks come about every minute.
Requests are rate-limited, so that a fault of ours does not flood the API server. A value that is
nested too deeply to be read is never written back.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import quote

import httpx2
import msgspec
from lightkube.core.exceptions import ConfigError

from rackloom.claim.kube import decoding
from rackloom.claim.kube.api import Expired, KubeError, ObjectList, Rejected, WatchEvent
from rackloom.claim.kube.connection import http_client
from rackloom.claim.kube.decoding import status_error, unreachable_error, watch_events
from rackloom.core.cluster.objects import Object, ResourceKind
from rackloom.serving.request_log import asked

# Rate limit.


class RateLimiter:
    """A token bucket: `burst` requests at once, then `rate` per second. Time is the running loop's."""

    def __init__(self, rate: float, burst: int) -> None:
        self._interval = 1.0 / rate
        self._slack = self._interval * (burst - 1)
        self._next = float("-inf")

    async def step(self) -> None:
        """Wait until this request may be sent."""
        now = asyncio.get_running_loop().time()
        turn = max(self._next, now - self._slack)
        self._next = turn + self._interval
        if turn > now:
            await asyncio.sleep(turn - now)


# Paths of resources.


def collection_path(kind: ResourceKind, namespace: str | None) -> str:
    """The path of all objects of a kind: of one namespace, or of all."""
    root = f"apis/{kind.group}" if kind.group else "api"
    within = f"namespaces/{quote(namespace, safe='')}/" if kind.namespaced and namespace else ""
    return f"{root}/{kind.version}/{within}{kind.plural}"


def object_path(kind: ResourceKind, metadata: Mapping[str, Any], subresource: str = "") -> str:
    """The path of the object of this metadata, or of a subresource of it."""
    path = f"{collection_path(kind, metadata.get('namespace'))}/{quote(metadata['name'], safe='')}"
    return f"{path}/{subresource}" if subresource else path


# The client.


CHUNK = 500
"""Objects in one page of a list, as with kubectl and client-go."""
WATCH_SECONDS = 300
"""Seconds after which the server ends a watch, so that watches move between servers."""
QUIET_SECONDS = 150.0
"""Seconds of silence after which a watch is broken: bookmarks come about every minute."""
REQUESTS_PER_SECOND = 50.0
BURST = 100
_JSON = "application/json"
_MERGE = "application/merge-patch+json"
_JSON_PATCH = "application/json-patch+json"
_APPLY = "application/apply-patch+yaml"
_UNREACHABLE_ERRORS = (
    httpx2.TransportError,
    ConfigError,
    OSError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
"""The connection is broken, a credential plugin fails, or the answer is not that of an API server."""

ObjectFilter = Callable[[ResourceKind, Object], Object | None]
"""The part to keep of an object from a list or a watch. None drops the object."""


def connect(
    kubeconfig: Path | None,
    context: str | None = None,
    *,
    user_agent: str = "rackloom",
    transport: httpx2.AsyncBaseTransport | None = None,
    keep: ObjectFilter | None = None,
) -> "KubeClient":
    """The API server of a kubeconfig, of this pod, or of $KUBECONFIG. Raises `Refused` where there is none.

    `user_agent` names the component. Up to its first "/" it is the field manager of creates and patches.
    """
    client = http_client(kubeconfig, context, transport=transport)
    client.headers["User-Agent"] = user_agent
    return KubeClient(client, RateLimiter(REQUESTS_PER_SECOND, BURST), keep or _keep_whole)


def _keep_whole(_: ResourceKind, obj: Object) -> Object:
    return obj


class KubeClient:
    """One client of an API server. Use it as an asynchronous context manager, or call `aclose`.

    `keep` reduces the objects of lists and watches, page by page, so that a large cluster is never in memory
    as a whole if little of it is needed.
    """

    def __init__(
        self, client: httpx2.AsyncClient, pace: RateLimiter, keep: ObjectFilter = _keep_whole
    ) -> None:
        self._client = client
        self._pace = pace
        self._keep = keep

    async def __aenter__(self) -> "KubeClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def document(self, path: str) -> Object:
        """Read a document that is no object, such as one of API discovery."""
        return await self._send("GET", path)

    async def get(self, kind: ResourceKind, name: str, namespace: str | None = None) -> Object:
        """Read one object."""
        return await self._send("GET", object_path(kind, _named_metadata(name, namespace)))

    async def list(
        self, kind: ResourceKind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> ObjectList:
        """Read all objects in chunks, or at once if the continue token expires."""
        selectors = _selectors(labels, fields)
        try:
            return await self._chunks(kind, namespace, selectors | {"limit": str(CHUNK)})
        except Expired:
            return await self._chunks(kind, namespace, selectors)

    async def _chunks(self, kind: ResourceKind, namespace: str | None, params: dict[str, str]) -> ObjectList:
        items: list[Object] = []
        while True:
            page = await self._send("GET", collection_path(kind, namespace), params=params)
            try:
                kept = (self._keep(kind, _with_type(kind, item)) for item in page.get("items") or ())
                items.extend(item for item in kept if item is not None)
                token, version = page["metadata"].get("continue"), page["metadata"]["resourceVersion"]
            except _UNREACHABLE_ERRORS as error:
                raise unreachable_error(error) from error
            if not token:
                return ObjectList(tuple(items), version)
            params = params | {"continue": token}

    async def watch(
        self,
        kind: ResourceKind,
        namespace: str | None = None,
        *,
        resource_version: str,
        labels: str = "",
        fields: str = "",
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yield changes after `resource_version` until the server ends the watch."""
        params = _selectors(labels, fields) | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        await self._pace.step()
        timeout = httpx2.Timeout(10.0, read=QUIET_SECONDS)
        try:
            path = collection_path(kind, namespace)
            async with self._client.stream("GET", path, params=params, timeout=timeout) as response:
                if not response.is_success:
                    await response.aread()
                    raise _response_error(response)
                async with aclosing(watch_events(response.aiter_bytes())) as events:
                    async for event in events:
                        yield self._reduced(kind, event)
        except _UNREACHABLE_ERRORS as error:
            raise unreachable_error(error) from error

    def _reduced(self, kind: ResourceKind, event: WatchEvent) -> WatchEvent:
        """The reduced change. An object that `keep` drops counts as deleted."""
        if event.type == "BOOKMARK":
            return event
        kept = self._keep(kind, event.object)
        return WatchEvent("DELETED", event.object) if kept is None else WatchEvent(event.type, kept)

    async def create(self, kind: ResourceKind, obj: Object, *, dry_run: bool = False) -> Object:
        """Create an object."""
        path = collection_path(kind, obj["metadata"].get("namespace"))
        params = {"dryRun": "All"} if dry_run else {}
        return await self._send("POST", path, params=params, body=_with_type(kind, obj))

    async def replace(self, kind: ResourceKind, obj: Object, *, subresource: str = "") -> Object:
        """Write a whole object back."""
        path = object_path(kind, obj["metadata"], subresource)
        return await self._send("PUT", path, body=_with_type(kind, obj))

    async def apply(
        self, kind: ResourceKind, obj: Object, *, manager: str, force: bool = False, subresource: str = ""
    ) -> Object:
        """Server-side apply."""
        path = object_path(kind, obj["metadata"], subresource)
        params = {"fieldManager": manager} | ({"force": "true"} if force else {})
        return await self._send("PATCH", path, params=params, body=_with_type(kind, obj), content_type=_APPLY)

    async def patch(
        self,
        kind: ResourceKind,
        name: str,
        namespace: str | None,
        patch: Mapping[str, Any] | tuple[Mapping[str, Any], ...],
        *,
        subresource: str = "",
    ) -> Object:
        """Change an object by a merge patch (mapping) or a JSON patch (tuple)."""
        content_type = _MERGE if isinstance(patch, Mapping) else _JSON_PATCH
        path = object_path(kind, _named_metadata(name, namespace), subresource)
        return await self._send("PATCH", path, body=patch, content_type=content_type)

    async def delete(
        self,
        kind: ResourceKind,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        propagation: Literal["Background", "Foreground", "Orphan"] | None = None,
        grace_seconds: int | None = None,
    ) -> None:
        """Ask for deletion."""
        options = _without_none(
            preconditions=_without_none(uid=uid, resourceVersion=resource_version) or None,
            propagationPolicy=propagation,
            gracePeriodSeconds=grace_seconds,
        )
        body = {"apiVersion": "v1", "kind": "DeleteOptions"} | options
        await self._send("DELETE", object_path(kind, _named_metadata(name, namespace)), body=body)

    async def _send(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        content_type: str = _JSON,
    ) -> Object:
        await self._pace.step()
        content = None if body is None else msgspec.json.encode(body)
        if content is not None and decoding.contains_cut_value(content):
            raise Rejected(422, "Invalid", f"{path}: it was not read whole, so it is not written")
        headers = {"Accept": _JSON} | ({} if body is None else {"Content-Type": content_type})
        try:
            with asked(method, self._client.base_url, path) as request:
                response = await self._client.request(
                    method, path, params=params, content=content, headers=headers
                )
                request.outcome = response.status_code
        except _UNREACHABLE_ERRORS as error:
            raise unreachable_error(error) from error
        if not response.is_success:
            raise _response_error(response)
        return _decode_response(response.content)


def _named_metadata(name: str, namespace: str | None) -> Mapping[str, Any]:
    return {"name": name, "namespace": namespace}


def _with_type(kind: ResourceKind, obj: Object) -> Object:
    """With its type, which the items of a list of a built-in kind lack."""
    return {**obj, "apiVersion": kind.api_version, "kind": kind.kind}


def _selectors(labels: str, fields: str) -> dict[str, str]:
    named = {"labelSelector": labels, "fieldSelector": fields}
    return {name: selector for name, selector in named.items() if selector}


def _without_none(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _decode_response(content: bytes) -> Object:
    try:
        document: Object = decoding.decode_document(content)
    except msgspec.DecodeError as error:
        raise unreachable_error(error) from error
    return document


def _response_error(response: httpx2.Response) -> KubeError:
    """The error of a response. Proxies and overloaded servers answer without a Status."""
    try:
        body = decoding.decode_document(response.content)
    except msgspec.DecodeError:
        body = None
    status = body if isinstance(body, Mapping) else {"message": response.text[:200] or None}
    after = response.headers.get("Retry-After", "")
    return status_error(response.status_code, status, float(after) if after.isdigit() else None)
