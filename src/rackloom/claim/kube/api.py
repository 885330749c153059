"""The part of the Kubernetes API that Rackloom uses, as a protocol, with named errors.

Objects are plain JSON (`core.cluster.objects`). A `KubeError` says that the server was not reached
or gave no success; its subclasses tell the caller what to do: the object is gone (NotFound), read it
again (Conflict), list again (Expired), or do not repeat the request (Rejected).
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rackloom.core.cluster.objects import DEVICE_TAINT_RULES, Object, ResourceKind


@dataclass(frozen=True, slots=True)
class ObjectList:
    """A list answer: its objects, and the collection's resourceVersion, from which a watch goes on."""

    items: tuple[Object, ...]
    resource_version: str


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One change seen by a watch. A bookmark's object carries only its resourceVersion."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: Object


class KubeError(Exception):
    """An answer of the API server that is no success, or none (`code` 0: it was not reached)."""

    def __init__(self, code: int, reason: str, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after = retry_after


class NotFound(KubeError):
    """404: there is no such object, or no such resource type."""


class Conflict(KubeError):
    """409: the object changed since it was read, exists already, or is owned by another field manager."""


class Expired(KubeError):
    """410: the resourceVersion is too old to go on from; list again."""


class Rejected(KubeError):
    """400, 403, 405, 413, 415, 422: the server will not accept this, however often it is sent."""


class KubeApi(Protocol):
    """What controllers and node plugins ask of an API server. All methods raise `KubeError`."""

    async def get(self, kind: ResourceKind, name: str, namespace: str | None = None) -> Object:
        """Read one object."""
        ...

    async def list(
        self, kind: ResourceKind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> ObjectList:
        """Read all objects of a kind (in all namespaces when `namespace` is None), chunked underneath."""
        ...

    def watch(
        self,
        kind: ResourceKind,
        namespace: str | None = None,
        *,
        resource_version: str,
        labels: str = "",
        fields: str = "",
    ) -> AsyncGenerator[WatchEvent, None]:
        """Yield changes after `resource_version` until the server ends it; `Expired` means re-list.

        Close it (`contextlib.aclosing`) to leave earlier.
        """
        ...

    async def create(self, kind: ResourceKind, obj: Object, *, dry_run: bool = False) -> Object:
        """Create an object; `Conflict` with reason AlreadyExists when the name is taken."""
        ...

    async def replace(self, kind: ResourceKind, obj: Object, *, subresource: str = "") -> Object:
        """Write a whole object back; `Conflict` when its resourceVersion is no longer current."""
        ...

    async def apply(
        self, kind: ResourceKind, obj: Object, *, manager: str, force: bool = False, subresource: str = ""
    ) -> Object:
        """Server-side apply: own the fields given and no others; `Conflict` when another manager owns one."""
        ...

    async def patch(
        self,
        kind: ResourceKind,
        name: str,
        namespace: str | None,
        patch: Mapping[str, Any] | tuple[Mapping[str, Any], ...],
        *,
        subresource: str = "",
    ) -> Object:
        """Change an object: a mapping is a merge patch, a tuple of operations a JSON patch."""
        ...

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
        """Ask for deletion, of just this `uid` and `resource_version` where given (else `Conflict`)."""
        ...


async def list_taint_rules(
    list_kind: Callable[[ResourceKind], Awaitable[ObjectList]],
) -> tuple[Object, ...]:
    """All rules, of the first version that is served; none where none is. Raises KubeError of `list_kind`."""
    for kind in DEVICE_TAINT_RULES:
        try:
            return (await list_kind(kind)).items
        except NotFound:
            continue
    return ()
