"""The part of the Kubernetes API that Rackloom uses, as a protocol.

Objects are plain JSON mappings, exactly as the API server sends them: a field that this code does not know
survives a read and a write. What a room needs of an object it decodes into values of its own.
"""

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Object = dict[str, Any]
"""One Kubernetes object as JSON. A value that nests too deeply to be read is `nesting.TOO_DEEP` instead."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A resource type: where it is served and how its objects name themselves."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool

    @property
    def api_version(self) -> str:
        """What an object's `apiVersion` says: `v1` for the core group, else `group/version`."""
        return f"{self.group}/{self.version}" if self.group else self.version


@dataclass(frozen=True, slots=True)
class Listed:
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

    async def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object:
        """Read one object."""
        ...

    async def list(
        self, kind: Kind, namespace: str | None = None, *, labels: str = "", fields: str = ""
    ) -> Listed:
        """Read all objects of a kind (in all namespaces when `namespace` is None), chunked underneath."""
        ...

    def watch(
        self,
        kind: Kind,
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

    async def create(self, kind: Kind, obj: Object, *, dry_run: bool = False) -> Object:
        """Create an object; `Conflict` with reason AlreadyExists when the name is taken."""
        ...

    async def replace(self, kind: Kind, obj: Object, *, subresource: str = "") -> Object:
        """Write a whole object back; `Conflict` when its resourceVersion is no longer current."""
        ...

    async def apply(
        self, kind: Kind, obj: Object, *, manager: str, force: bool = False, subresource: str = ""
    ) -> Object:
        """Server-side apply: own the fields given and no others; `Conflict` when another manager owns one."""
        ...

    async def patch(
        self,
        kind: Kind,
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
        kind: Kind,
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
