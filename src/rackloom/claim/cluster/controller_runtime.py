"""Controller runtime: work loop, expectations (pending writes), executor, limited status writes.

Changes wake a key; one worker at a time works on it, level-triggered. The runtime runs the informers
and starts work when all caches have synced. Work that fails with a KubeError is retried with back-off.
A defect in the work on one object is logged and retried after a minute, so it cannot stop the work on
others.

Expectations follow the pattern of Kubernetes' own controllers: a decision from a cache that does not
show our last write would repeat it. A key therefore waits until its writes have come back through the
watch, for a limited time, since the watch may skip to something newer.

The executor makes no choices. It sends writes in order up to the first that fails. If an object to
change or delete is gone, nothing is done. A JSON patch whose `test` fails counts as a conflict.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import structlog

from rackloom.claim.kube.api import Conflict, KubeApi, KubeError, NotFound, Rejected
from rackloom.claim.kube.events import EventRecorder, EventSeverity
from rackloom.claim.kube.informer import Informer
from rackloom.claim.kube.workqueue import WorkQueue
from rackloom.core.kubernetes.objects import (
    CreateObject,
    DeleteObject,
    EventNotice,
    Object,
    ObjectWrite,
    PatchObject,
    ResourceKind,
)
from rackloom.errors import Retry

# Expectations: own writes that the caches have not shown yet.


EXPECTATION_SECONDS = 5.0
"""Seconds after which a write that was not seen is no longer waited for."""


class ObjectLookup(Protocol):
    """Objects as last seen."""

    def at(self, kind: ResourceKind, namespace: str | None, name: str) -> Object | None:
        """The object of this name."""
        ...


class Expectations:
    """What is still to come back, by key. `now` is a monotonic clock in seconds."""

    def __init__(self, cluster: ObjectLookup, now: Callable[[], float]) -> None:
        self._cluster = cluster
        self._now = now
        self._expected: dict[Hashable, list[tuple[ResourceKind, Object, float]]] = {}

    def expect(self, key: Hashable, kind: ResourceKind, written: Object) -> None:
        """Wait for this version of an object, or a newer one."""
        self._expected.setdefault(key, []).append((kind, written, self._now() + EXPECTATION_SECONDS))

    def outstanding(self, key: Hashable) -> float | None:
        """Seconds to wait for at most; None when everything has come back."""
        now = self._now()
        left = [
            (kind, obj, until)
            for kind, obj, until in self._expected.pop(key, ())
            if until > now and not self._is_seen(kind, obj)
        ]
        if not left:
            return None
        self._expected[key] = left
        return max(until for _, _, until in left) - now

    def _is_seen(self, kind: ResourceKind, written: Object) -> bool:
        meta = written["metadata"]
        seen = self._cluster.at(kind, meta.get("namespace"), meta["name"])
        if seen is None:
            # A new object not shown yet; or one whose last finalizer we took off, which is gone.
            return bool(meta.get("deletionTimestamp"))
        other = seen["metadata"]["uid"] != meta["uid"]
        return other or int(seen["metadata"]["resourceVersion"]) >= int(meta["resourceVersion"])


# The executor.


write_log = structlog.get_logger(__name__)


async def execute_write(api: KubeApi, action: ObjectWrite) -> Object | None:
    """Do one action; returns the object as it was written, None for a deletion.

    That an object to change or delete is gone is what a later look would have found: nothing is done then.
    Raises KubeError for anything else.
    """
    try:
        written = await _send(api, action)
    except NotFound:
        if isinstance(action, CreateObject):
            raise
        return None
    write_log.info("cluster.action", what=action.what)
    return written


async def write_status(api: KubeApi, kind: ResourceKind, read: Object, status: Object) -> Object:
    """Write the status of just the object that was read. Raises KubeError."""
    meta = read["metadata"]
    patch = {"metadata": {"uid": meta["uid"]}, "status": status}
    return await api.patch(kind, meta["name"], meta.get("namespace"), patch, subresource="status")


async def _send(api: KubeApi, action: ObjectWrite) -> Object | None:
    match action:
        case CreateObject(kind=kind, obj=obj):
            return await api.create(kind, obj)
        case PatchObject():
            return await _send_patch(api, action)
        case DeleteObject():
            await api.delete(
                action.kind,
                action.name,
                action.namespace,
                uid=action.uid,
                resource_version=action.resource_version,
                propagation="Background",
                grace_seconds=action.grace_seconds,
            )
            return None


async def _send_patch(api: KubeApi, action: PatchObject) -> Object:
    try:
        return await api.patch(
            action.kind, action.name, action.namespace, action.patch, subresource=action.subresource
        )
    except Rejected as refusal:
        if isinstance(action.patch, tuple) and refusal.code == 422:
            # A `test` that does not hold: somebody changed the object since it was read.
            raise Conflict(409, "Conflict", refusal.message) from refusal
        raise


# Recording an event.


async def record_event(recorder: EventRecorder, regarding: Object, notice: EventNotice) -> None:
    """Record it about an object."""
    severity: EventSeverity = "Warning" if notice.warning else "Normal"
    await recorder.record(regarding, severity, notice.reason, notice.message)


# The loop.


log = structlog.get_logger(__name__)

STATUS_INTERVAL_SECONDS = 1.0
"""Seconds between two writes of one status: 18 daemons or pods that come within it are one write."""
DEFECT_RETRY_SECONDS = 60.0
"""Seconds until work that failed in a way nobody expected is tried again."""
K = TypeVar("K", bound=Hashable)


class FollowedCaches(ObjectLookup, Protocol):
    """Caches that follow the API server."""

    @property
    def informers(self) -> Sequence[Informer]:
        """All of them, to be run."""
        ...

    async def synced(self) -> None:
        """Wait until all have taken in a first list."""
        ...


class ControllerRuntime(Generic[K]):
    """`do` works on a key; what it returns are seconds after which time alone may change something.

    `name` is for the log; `rng` draws the jitter of retries.
    """

    def __init__(
        self,
        name: str,
        api: KubeApi,
        caches: FollowedCaches,
        rng: random.Random,
        do: Callable[[K], Awaitable[float | None]],
    ) -> None:
        self.queue: WorkQueue[K] = WorkQueue(rng)
        self._name = name
        self._api = api
        self._caches = caches
        self._do = do
        self._echoes = Expectations(caches, _now)
        self._said: dict[str, float] = {}
        """Loop time of the last status write, by UID."""

    async def run(self, workers: int) -> None:
        """Follow the cluster and work, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for informer in self._caches.informers:
                tasks.create_task(informer.run())
            await self._caches.synced()
            log.info("controller.synced", of=self._name)
            await self.queue.work(self._work, workers=workers)

    async def act(self, key: K, actions: Iterable[ObjectWrite]) -> None:
        """Carry out actions in order, up to the first that fails. Raises KubeError."""
        for action in actions:
            written = await execute_write(self._api, action)
            if written is not None:
                self.expect(key, action.kind, written)

    def expect(self, key: K, kind: ResourceKind, written: Object) -> None:
        """Work on a key again only when the caches show this."""
        self._echoes.expect(key, kind, written)

    async def say(self, key: K, kind: ResourceKind, obj: Object, status: Object) -> float | None:
        """Write the status of an object; None when that was done, else seconds after which it may be."""
        uid = obj["metadata"]["uid"]
        early = self._said.get(uid, float("-inf")) + STATUS_INTERVAL_SECONDS - _now()
        if early > 0:
            return early
        self._said[uid] = _now()
        self.expect(key, kind, await write_status(self._api, kind, obj, status))
        return None

    def forget(self, uid: str) -> None:
        """An object is gone, and nothing will be said of it any more."""
        self._said.pop(uid, None)

    async def _work(self, key: K) -> float | None:
        waits = self._echoes.outstanding(key)
        if waits is not None:
            return waits
        try:
            return await self._do(key)
        except (KubeError, Retry):
            raise
        except Exception as defect:
            # What is wrong with one object must not stop the work for the others.
            log.exception("controller.defect", of=self._name, key=repr(key))
            raise Retry(repr(defect), after=DEFECT_RETRY_SECONDS) from defect


def _now() -> float:
    return asyncio.get_running_loop().time()
