"""`KubeApi` over the HTTP client that lightkube connects.

Requests are plain JSON: nothing is decoded into models, so that fields which this code does not know survive.
What nests too deeply to be read (`nesting`) is not written back.
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import httpx2
import msgspec
from lightkube.core.exceptions import ConfigError

from rackloom.claim.kube import nesting, paths
from rackloom.claim.kube.api import Expired, Kind, KubeError, Listed, Object, Rejected, WatchEvent
from rackloom.claim.kube.connection import http_client
from rackloom.claim.kube.pace import Pace
from rackloom.claim.kube.refusals import error_of, unreachable
from rackloom.claim.kube.watching import events_of

CHUNK = 500
"""Objects asked for at once by a list, as kubectl and client-go do."""
WATCH_SECONDS = 300
"""After which the server is asked to end a watch, so that watches move between servers."""
QUIET_SECONDS = 150.0
"""A watch that is silent for longer is broken: bookmarks come about every minute."""
REQUESTS_PER_SECOND = 50.0
BURST = 100
_JSON = "application/json"
_MERGE = "application/merge-patch+json"
_JSON_PATCH = "application/json-patch+json"
_APPLY = "application/apply-patch+yaml"
_NO_ANSWER = (
    httpx2.TransportError,
    ConfigError,
    OSError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
"""The way there is broken, a credential plugin fails, or what comes back was written by no API server."""

Keep = Callable[[Kind, Object], Object | None]
"""What is wanted of an object that a list or a watch tells; None: nothing."""


def connect(
    kubeconfig: Path | None,
    context: str | None = None,
    *,
    user_agent: str = "rackloom",
    transport: httpx2.AsyncBaseTransport | None = None,
    keep: Keep | None = None,
) -> "LightkubeApi":
    """The API server of a kubeconfig, of this pod, or of $KUBECONFIG. Raises `Refused` where there is none.

    `user_agent` names the component; up to its first "/" it is the field manager of creates and patches.
    """
    client = http_client(kubeconfig, context, transport=transport)
    client.headers["User-Agent"] = user_agent
    return LightkubeApi(client, Pace(REQUESTS_PER_SECOND, BURST), keep or _whole)


def _whole(_: Kind, obj: Object) -> Object:
    return obj


class LightkubeApi:
    """One client of an API server. Use it as an asynchronous context manager, or call `aclose`.

    Of what lists and watches tell it gives what `keep` makes of it, page by page: a large cluster is never
    whole in memory where little of it is wanted.
    """

    def __init__(self, client: httpx2.AsyncClient, pace: Pace, keep: Keep = _whole) -> None:
        self._client = client
        self._pace = pace
        self._keep = keep

    async def __aenter__(self) -> "LightkubeApi":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def document(self, path: str) -> Object:
        """Read what is no object: a document of discovery (`discovery.served`)."""
        return await self._send("GET", path)

    async def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object:
        """Read one object."""
        return await self._send("GET", paths.item(kind, _named(name, namespace)))

    async def list(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> Listed:
        """Read all objects in chunks; whole where the server's past is shorter than reading them takes."""
        selectors = _selectors(labels, fields)
        try:
            return await self._chunks(kind, namespace, selectors | {"limit": str(CHUNK)})
        except Expired:
            return await self._chunks(kind, namespace, selectors)

    async def _chunks(self, kind: Kind, namespace: str | None, params: dict[str, str]) -> Listed:
        items: list[Object] = []
        while True:
            page = await self._send("GET", paths.collection(kind, namespace), params=params)
            try:
                wanted = (self._keep(kind, _typed(kind, item)) for item in page.get("items") or ())
                items.extend(item for item in wanted if item is not None)
                token, version = page["metadata"].get("continue"), page["metadata"]["resourceVersion"]
            except _NO_ANSWER as error:
                raise unreachable(error) from error
            if not token:
                return Listed(tuple(items), version)
            params = params | {"continue": token}

    async def watch(
        self,
        kind: Kind,
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
            path = paths.collection(kind, namespace)
            async with self._client.stream("GET", path, params=params, timeout=timeout) as response:
                if not response.is_success:
                    await response.aread()
                    raise _error(response)
                async with aclosing(events_of(response.aiter_bytes())) as events:
                    async for event in events:
                        yield self._wanted(kind, event)
        except _NO_ANSWER as error:
            raise unreachable(error) from error

    def _wanted(self, kind: Kind, event: WatchEvent) -> WatchEvent:
        """A change; an object of which nothing is wanted is gone."""
        if event.type == "BOOKMARK":
            return event
        wanted = self._keep(kind, event.object)
        return WatchEvent("DELETED", event.object) if wanted is None else WatchEvent(event.type, wanted)

    async def create(self, kind: Kind, obj: Object, *, dry_run: bool = False) -> Object:
        """Create an object."""
        path = paths.collection(kind, obj["metadata"].get("namespace"))
        params = {"dryRun": "All"} if dry_run else {}
        return await self._send("POST", path, params=params, body=_typed(kind, obj))

    async def replace(self, kind: Kind, obj: Object, *, subresource: str = "") -> Object:
        """Write a whole object back."""
        path = paths.item(kind, obj["metadata"], subresource)
        return await self._send("PUT", path, body=_typed(kind, obj))

    async def apply(
        self, kind: Kind, obj: Object, *, manager: str, force: bool = False, subresource: str = ""
    ) -> Object:
        """Server-side apply."""
        path = paths.item(kind, obj["metadata"], subresource)
        params = {"fieldManager": manager} | ({"force": "true"} if force else {})
        return await self._send("PATCH", path, params=params, body=_typed(kind, obj), content_type=_APPLY)

    async def patch(
        self,
        kind: Kind,
        name: str,
        namespace: str | None,
        patch: Mapping[str, Any] | tuple[Mapping[str, Any], ...],
        *,
        subresource: str = "",
    ) -> Object:
        """Change an object by a merge patch (mapping) or a JSON patch (tuple)."""
        content_type = _MERGE if isinstance(patch, Mapping) else _JSON_PATCH
        path = paths.item(kind, _named(name, namespace), subresource)
        return await self._send("PATCH", path, body=patch, content_type=content_type)

    async def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        resource_version: str | None = None,
        propagation: Literal["Background", "Foreground", "Orphan"] | None = None,
        grace_seconds: int | None = None,
    ) -> None:
        """Ask for deletion."""
        options = _given(
            preconditions=_given(uid=uid, resourceVersion=resource_version) or None,
            propagationPolicy=propagation,
            gracePeriodSeconds=grace_seconds,
        )
        body = {"apiVersion": "v1", "kind": "DeleteOptions"} | options
        await self._send("DELETE", paths.item(kind, _named(name, namespace)), body=body)

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
        if content is not None and nesting.was_cut(content):
            raise Rejected(422, "Invalid", f"{path}: it was not read whole, so it is not written")
        headers = {"Accept": _JSON} | ({} if body is None else {"Content-Type": content_type})
        try:
            response = await self._client.request(
                method, path, params=params, content=content, headers=headers
            )
        except _NO_ANSWER as error:
            raise unreachable(error) from error
        if not response.is_success:
            raise _error(response)
        return _decoded(response.content)


def _named(name: str, namespace: str | None) -> Mapping[str, Any]:
    return {"name": name, "namespace": namespace}


def _typed(kind: Kind, obj: Object) -> Object:
    """With its type, which the items of a list of a built-in kind lack."""
    return {**obj, "apiVersion": kind.api_version, "kind": kind.kind}


def _selectors(labels: str, fields: str) -> dict[str, str]:
    named = {"labelSelector": labels, "fieldSelector": fields}
    return {name: selector for name, selector in named.items() if selector}


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _decoded(content: bytes) -> Object:
    try:
        told: Object = nesting.decoded(content)
    except msgspec.DecodeError as error:
        raise unreachable(error) from error
    return told


def _error(response: httpx2.Response) -> KubeError:
    """What a refusal says; proxies and overloaded servers answer without a Status."""
    try:
        body = nesting.decoded(response.content)
    except msgspec.DecodeError:
        body = None
    status = body if isinstance(body, Mapping) else {"message": response.text[:200] or None}
    after = response.headers.get("Retry-After", "")
    return error_of(response.status_code, status, float(after) if after.isdigit() else None)
