"""The part of the Kubernetes API that Rackloom uses, as a protocol with named errors, and events.

Objects are plain JSON (`core.cluster.objects`). A `KubeError` means that the server was not reached
or gave no success. Its subclasses show the caller's next step: the object is gone (NotFound), read it
again (Conflict), list again (Expired), or do not repeat the request (Rejected).

`EventRecorder` writes events (core/v1) on objects, as `kubectl describe` shows them, without event storms.
The same event on the same object is one Event with a count, written again at most once per interval.
Many different messages of one reason on one object are combined, as client-go does. An event that
cannot be written is logged and dropped: reporting must not make working code fail.
"""

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import structlog

from rackloom.core.cluster.objects import (
    DEVICE_TAINT_RULES,
    EVENT,
    EventNotice,
    Object,
    ResourceKind,
    identity_of,
    metav1_time,
    name_of,
    namespace_of,
    uid_of,
)


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
    """410: the resourceVersion is too old to continue. List again."""


class Rejected(KubeError):
    """400, 403, 405, 413, 415, 422: the server will not accept this, however often it is sent."""


class KubeApi(Protocol):
    """The requests of controllers and node plugins. All methods raise `KubeError`."""

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
        """Yield changes after `resource_version` until the server ends it. `Expired` means re-list.

        Close it (`contextlib.aclosing`) to leave earlier.
        """
        ...

    async def create(self, kind: ResourceKind, obj: Object, *, dry_run: bool = False) -> Object:
        """Create an object. Raises `Conflict` with reason AlreadyExists if the name is taken."""
        ...

    async def replace(self, kind: ResourceKind, obj: Object, *, subresource: str = "") -> Object:
        """Write a whole object back. Raises `Conflict` if its resourceVersion is no longer current."""
        ...

    async def apply(
        self, kind: ResourceKind, obj: Object, *, manager: str, force: bool = False, subresource: str = ""
    ) -> Object:
        """Server-side apply: own these fields only. Raises `Conflict` if another manager owns one."""
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
    """All rules of the first version that is served, or none. Raises KubeError of `list_kind`."""
    for kind in DEVICE_TAINT_RULES:
        try:
            return (await list_kind(kind)).items
        except NotFound:
            continue
    return ()


# Events on objects.


log = structlog.get_logger(__name__)

REPEAT_SECONDS = 60.0
"""Seconds between two writes of one Event. Repetitions in between are counted."""
MOST_MESSAGES = 10
"""Messages of one reason on one object that stay separate. Further ones are combined, as in client-go."""
MOST_REMEMBERED = 4096
COMBINED = "(combined from similar events): "
_LONGEST_MESSAGE = 1024
_LONGEST_NAME = 200

_Topic = tuple[str, bool, str]
"""The UID of the object, whether it is a warning, and the reason."""


@dataclass(slots=True)
class _RecordedEvent:
    """One Event as it was last written, and how often it has happened."""

    name: str
    first: str
    count: int
    written_at: float


class EventRecorder:
    """Writes events of one component, which runs in the pod or on the node `instance`.

    `now` gives seconds since 1970.
    """

    def __init__(self, api: KubeApi, component: str, instance: str, now: Callable[[], float]) -> None:
        self._api = api
        self._component = component
        self._instance = instance
        self._now = now
        self._events: OrderedDict[tuple[_Topic, str], _RecordedEvent] = OrderedDict()
        self._messages: defaultdict[_Topic, set[str]] = defaultdict(set)

    async def record(self, regarding: Object, notice: EventNotice) -> None:
        """Record an event about an object."""
        topic = (
            uid_of(regarding) or name_of(regarding),
            notice.warning,
            notice.reason,
        )
        text = self._combined(topic, notice.message)
        # All combined events are one event, with any messages.
        key = (topic, COMBINED if text.startswith(COMBINED) else text)
        now, recorded = self._now(), self._events.get(key)
        if recorded is None:
            recorded = _RecordedEvent(_event_name(regarding, key, now), metav1_time(now), 0, float("-inf"))
            self._remember(key, recorded)
        recorded.count += 1
        if now - recorded.written_at < REPEAT_SECONDS:
            return
        recorded.written_at = now
        try:
            await self._write(regarding, notice, text, recorded)
        except KubeError as error:
            log.warning("an event was not written", reason=notice.reason, message=text, why=error.message)

    def _combined(self, topic: _Topic, message: str) -> str:
        known, message = self._messages[topic], message[:_LONGEST_MESSAGE]
        if message in known or len(known) < MOST_MESSAGES:
            known.add(message)
            return message
        return (COMBINED + message)[:_LONGEST_MESSAGE]

    def _remember(self, key: tuple[_Topic, str], recorded: _RecordedEvent) -> None:
        self._events[key] = recorded
        if len(self._events) > MOST_REMEMBERED:
            (topic, text), _ = self._events.popitem(last=False)
            self._messages[topic].discard(text)
            if not self._messages[topic]:
                del self._messages[topic]

    async def _write(
        self, regarding: Object, notice: EventNotice, text: str, recorded: _RecordedEvent
    ) -> None:
        namespace = namespace_of(regarding) or "default"
        last = metav1_time(self._now())
        if recorded.count > 1:
            try:
                changes = {"count": recorded.count, "lastTimestamp": last, "message": text}
                await self._api.patch(EVENT, recorded.name, namespace, changes)
            except NotFound:
                log.debug("an event has run out; it is written anew", name=recorded.name)
            else:
                return
        metadata = {"name": recorded.name, "namespace": namespace}
        event = {
            "metadata": metadata,
            "involvedObject": {"apiVersion": regarding["apiVersion"], "kind": regarding["kind"]}
            | identity_of(regarding, "name", "namespace", "uid", "resourceVersion"),
            "type": "Warning" if notice.warning else "Normal",
            "reason": notice.reason,
            "message": text,
            "count": recorded.count,
            "firstTimestamp": recorded.first,
            "lastTimestamp": last,
            "source": {"component": self._component, "host": self._instance},
            "reportingComponent": self._component,
            "reportingInstance": self._instance,
        }
        await self._api.create(EVENT, event)


def _event_name(obj: Object, key: object, now: float) -> str:
    """A unique name. It contains the time, so a restarted process creates another Event."""
    digest = hashlib.sha256(repr((key, now)).encode()).hexdigest()[:16]
    return f"{name_of(obj)[:_LONGEST_NAME]}.{digest}"
