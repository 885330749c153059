"""Events (core/v1) on objects, as `kubectl describe` shows them, without event storms.

The same event on the same object is one Event with a count, written again at most once per interval.
Many different messages of one reason on one object are combined, as client-go does. An event that
cannot be written is logged and dropped: reporting must not make working code fail.
"""

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from rackloom.claim.kube.api import KubeApi, KubeError, NotFound
from rackloom.core.cluster.metadata import identity_of, name_of, namespace_of, uid_of
from rackloom.core.cluster.objects import EVENT, EventNotice, Object, metav1_time

log = structlog.get_logger(__name__)

REPEAT_SECONDS = 60.0
"""Seconds between two writes of one Event; repetitions in between are counted."""
MOST_MESSAGES = 10
"""Messages of one reason on one object that are kept apart; further ones are combined, as in client-go."""
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
        # All combined events are one event, whatever their messages.
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
