"""Faults of the API server: latency, failed requests, lost replies, stale reads, disordered events.

`RequestFaults` holds declared latencies and `RequestFault`s. A fault selects calls by verb, resource
and user and strikes with a probability drawn from the seed. A lost request was never carried out. A
request with a lost reply was, and the client cannot know. Code 0 is a broken connection.

`StaleReads` is a server behind a load balancer that lags behind (kubernetes/kubernetes#59848). For some
users watches are silent and lists from the watch cache are old. Consistent lists, single reads and
writes see the newest state, as they go to etcd. `DisorderedEvents` repeats events or delays one behind
a later event of another object. The changes of one object stay in order, and no change is lost.

Each class counts its `hits`, so that a scenario can show that its fault had an effect.
"""

import asyncio
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rackloom.claim.kube.api import KubeError, WatchEvent
from rackloom.core.cluster.objects import Object, ResourceKind
from rackloom.lab.kube.store import ObjectStore, key_of

ANY_CALL = "*"


@dataclass(frozen=True, slots=True)
class ApiCall:
    """One request as it is counted and as faults see it.

    Verbs: get list watch create replace apply patch delete. A subresource is part of the resource
    (`computedomains/status`).
    """

    user: str
    verb: str
    resource: str

    @property
    def is_write(self) -> bool:
        """Whether it requests a change."""
        return self.verb not in ("get", "list", "watch")


@dataclass(frozen=True, slots=True)
class RequestFault:
    """Requests that fail. `rate` is a probability. `lost="reply"` carries it out and loses the answer.

    `code` 0 is a broken connection. A watch that is hit breaks at once.
    """

    rate: float = 1.0
    verb: str = ANY_CALL
    resource: str = ANY_CALL
    user: str = ANY_CALL
    code: int = 0
    reason: str = "ServiceUnavailable"
    retry_after: float | None = None
    lost: Literal["request", "reply"] = "request"

    def hits(self, call: ApiCall) -> bool:
        """Whether it is about this call."""
        pairs = ((self.verb, call.verb), (self.resource, call.resource), (self.user, call.user))
        return all(wanted in (ANY_CALL, found) for wanted, found in pairs)

    def error(self) -> KubeError:
        """The error that the client gets."""
        message = "connection reset by peer" if self.code == 0 else f"injected: {self.reason}"
        reason = "Unreachable" if self.code == 0 else self.reason
        return KubeError(self.code, reason, message, retry_after=self.retry_after)


class RequestFaults:
    """Declared latencies and faults of one server. Nothing is declared at first: it is prompt and sound."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 (reproducible on purpose)
        self._faults: list[RequestFault] = []
        self._delays: list[tuple[str, str, float, float]] = []
        self.hits = 0
        """Calls that failed since the faults were cleared."""

    def add(self, fault: RequestFault) -> None:
        """From now on."""
        self._faults.append(fault)

    def clear(self) -> None:
        """End all failures. Latencies stay."""
        self._faults.clear()
        self.hits = 0

    def delay(
        self, seconds: float, longest: float | None = None, *, verb: str = ANY_CALL, resource: str = ANY_CALL
    ) -> None:
        """How long calls take: `seconds`, or between that and `longest`. The latest that fits counts."""
        self._delays.append((verb, resource, seconds, seconds if longest is None else longest))

    async def pass_time(self, call: ApiCall) -> None:
        """Wait as long as the call takes."""
        for verb, resource, shortest, longest in reversed(self._delays):
            if verb in (ANY_CALL, call.verb) and resource in (ANY_CALL, call.resource):
                await asyncio.sleep(self._random.uniform(shortest, longest))
                return

    def strike(self, call: ApiCall, lost: Literal["request", "reply"]) -> None:
        """Raise the error of a fault that hits."""
        for fault in self._faults:
            if fault.lost == lost and fault.hits(call) and self._random.random() < fault.rate:
                self.hits += 1
                raise fault.error()


# Faults of clients' reads: stale caches, and disordered events.


REORDER_SECONDS = 0.02
"""How long a change is kept back for a later one to come before it."""


class StaleView:
    """All objects as they were at one version."""

    def __init__(self, store: ObjectStore, kinds: Collection[ResourceKind]) -> None:
        self.version = store.version
        self._objects: Mapping[ResourceKind, Sequence[Object]] = {kind: store.all(kind) for kind in kinds}

    def all(self, kind: ResourceKind) -> Sequence[Object]:
        """Every object of a kind, by namespace and name."""
        return self._objects.get(kind, ())


class StaleReads:
    """A server that some users are stuck with: until it catches up, its watches are silent.

    Lists are old only for who takes them from its memory (resourceVersion=0, or one that it has reached).
    Plain lists, reads of single objects and writes go to the newest state, as the real ones go to etcd.
    """

    def __init__(self) -> None:
        self.hits = 0
        """Lists that were old, and changes that were kept back."""
        self._users: frozenset[str] = frozenset()
        self._view: StaleView | None = None
        self._caught_up = asyncio.Event()

    def begin(self, store: ObjectStore, kinds: Collection[ResourceKind], users: Collection[str]) -> None:
        """From now on `users` see the present state."""
        self.end()
        self._users, self._view = frozenset(users), StaleView(store, kinds)
        self._caught_up = asyncio.Event()

    def end(self) -> None:
        """They see everything again, and get the events that were kept back."""
        self._users, self._view, self.hits = frozenset(), None, 0
        self._caught_up.set()

    def view(self, user: str, asked: str) -> StaleView | None:
        """The stale view for a user and a requested version, or None for the newest state."""
        view = self._view
        if view is None or user not in self._users or not asked or int(asked) > view.version:
            return None
        self.hits += 1
        return view

    async def wait(self, user: str, event: WatchEvent) -> None:
        """Wait until an event may reach a user."""
        if user in self._users:
            self.hits += event.type != "BOOKMARK"
            await self._caught_up.wait()


class DisorderedEvents:
    """Watches of some users get events twice, or after a later event of another object."""

    def __init__(self, seed: int) -> None:
        self.hits = 0
        """Events that were repeated or delayed."""
        self._random = random.Random(seed)  # noqa: S311 (reproducible on purpose)
        self._users: frozenset[str] = frozenset()
        self._twice = self._late = 0.0

    def begin(self, users: Collection[str], *, twice: float = 0.0, late: float = 0.0) -> None:
        """Disorder the events of `users` from now on. `twice` and `late` are probabilities."""
        self._users, self._twice, self._late = frozenset(users), twice, late

    def end(self) -> None:
        """From now on, each event comes once and in order."""
        self.begin(())
        self.hits = 0

    async def delivered(
        self, user: str, event: WatchEvent, coming: "asyncio.Queue[WatchEvent | None]"
    ) -> Sequence[WatchEvent]:
        """The events that a watch delivers when `event` is due. `coming` are the events after it."""
        if user not in self._users or event.type == "BOOKMARK":
            return (event,)
        events = (event,) if self._random.random() >= self._late else await self._behind(event, coming)
        return [copy for event in events for copy in [event] * self._copies()]

    async def _behind(
        self, event: WatchEvent, coming: "asyncio.Queue[WatchEvent | None]"
    ) -> Sequence[WatchEvent]:
        await asyncio.sleep(REORDER_SECONDS)
        if coming.empty():
            return (event,)
        later = coming.get_nowait()
        if later is None:
            coming.put_nowait(None)
            return (event,)
        # Watches keep the order of the changes of one object. Only different objects may change places.
        if key_of(later.object) == key_of(event.object):
            return event, later
        self.hits += 1
        return later, event

    def _copies(self) -> int:
        twice = self._random.random() < self._twice
        self.hits += twice
        return 1 + twice
