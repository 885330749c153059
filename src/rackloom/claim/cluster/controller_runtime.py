"""Controller runtime: caches, work loop, expectations (pending writes), executor, limited status writes.

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
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

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

log = structlog.get_logger(__name__)

# The caches that a controller decides from.


class CacheSet:
    """Informers by kind. Objects that it returns are shared and must not be changed."""

    def __init__(self, informers: Mapping[ResourceKind, Sequence[Informer]]) -> None:
        self._informers = informers

    @property
    def informers(self) -> tuple[Informer, ...]:
        """All informers, for somebody to run."""
        return tuple(informer for informers in self._informers.values() for informer in informers)

    @property
    def is_synced(self) -> bool:
        """Whether all informers have received a first list."""
        return all(informer.is_synced for informer in self.informers)

    async def synced(self) -> None:
        """Wait until all informers have received a first list."""
        for informer in self.informers:
            await informer.synced()

    def on_change(self, handler: Callable[[ResourceKind, Object], None]) -> None:
        """Call `handler(kind, object)` for every change of an object."""
        for kind, informers in self._informers.items():
            for informer in informers:
                informer.on_change(partial(handler, kind))

    def unknown_since(self) -> float | None:
        """Loop time since when a cache may be stale; None when all follow the API server."""
        moments = (informer.unknown_since for informer in self.informers)
        return min((moment for moment in moments if moment is not None), default=None)

    def at(self, kind: ResourceKind, namespace: str | None, name: str) -> Object | None:
        """The object of this name; None also for kinds without an informer."""
        objects = (informer.cache.get(name, namespace) for informer in self._informers.get(kind, ()))
        return next((obj for obj in objects if obj is not None), None)

    def by(self, kind: ResourceKind, index: str, value: str) -> Sequence[Object]:
        """The objects that an index has under a value."""
        return [obj for informer in self._informers[kind] for obj in informer.cache.find(index, value)]

    def all(self, kind: ResourceKind) -> Iterator[Object]:
        """All objects of a kind. For sweeps and counts only, since it scans."""
        for informer in self._informers[kind]:
            yield from informer.cache


# Expectations: own writes that the caches have not shown yet.


EXPECTATION_SECONDS = 5.0
"""Seconds after which a write that the watch did not show is no longer expected."""


class Expectations:
    """Writes that are still to appear in the caches, by key. `now` is a monotonic clock in seconds."""

    def __init__(
        self, lookup: Callable[[ResourceKind, str | None, str], Object | None], now: Callable[[], float]
    ) -> None:
        self._lookup = lookup
        self._now = now
        self._expected: dict[Hashable, list[tuple[ResourceKind, Object, float]]] = {}

    def expect(self, key: Hashable, kind: ResourceKind, written: Object) -> None:
        """Expect this version of an object, or a newer one."""
        self._expected.setdefault(key, []).append((kind, written, self._now() + EXPECTATION_SECONDS))

    def outstanding(self, key: Hashable) -> float | None:
        """Seconds to wait at most; None when the caches show everything."""
        now = self._now()
        pending = [
            (kind, obj, until)
            for kind, obj, until in self._expected.pop(key, ())
            if until > now and not self._is_shown(kind, obj)
        ]
        if not pending:
            return None
        self._expected[key] = pending
        return max(until for _, _, until in pending) - now

    def _is_shown(self, kind: ResourceKind, written: Object) -> bool:
        meta = written["metadata"]
        cached = self._lookup(kind, meta.get("namespace"), meta["name"])
        if cached is None:
            # Either a new object that is not shown yet, or one that went when its last finalizer was removed.
            return bool(meta.get("deletionTimestamp"))
        # Another UID means that the object was replaced since. API servers issue increasing numbers.
        is_replaced = cached["metadata"]["uid"] != meta["uid"]
        return is_replaced or int(cached["metadata"]["resourceVersion"]) >= int(meta["resourceVersion"])


# The executor.


async def execute_write(api: KubeApi, action: ObjectWrite) -> Object | None:
    """Send one write; returns the object as written, None for a deletion.

    If an object to change or delete is gone, nothing is done: a later snapshot would show the same. Raises
    KubeError for any other failure.
    """
    try:
        written = await _send(api, action)
    except NotFound:
        if isinstance(action, CreateObject):
            raise
        return None
    log.info("cluster.action", what=action.what)
    return written


async def write_status(api: KubeApi, kind: ResourceKind, read: Object, status: Object) -> Object:
    """Write the status of the object that was read, and of no other with its name. Raises KubeError."""
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
            # A `test` failed, so the object has changed since it was read.
            raise Conflict(409, "Conflict", refusal.message) from refusal
        raise


async def record_event(recorder: EventRecorder, regarding: Object, notice: EventNotice) -> None:
    """Record an event about an object."""
    severity: EventSeverity = "Warning" if notice.warning else "Normal"
    await recorder.record(regarding, severity, notice.reason, notice.message)


# The loop.


STATUS_INTERVAL_SECONDS = 1.0
"""Seconds between two writes of one status, so that 18 pods that come together cause one write."""
DEFECT_RETRY_SECONDS = 60.0
"""Seconds until work is retried that failed with an unexpected exception."""
K = TypeVar("K", bound=Hashable)


class ControllerRuntime(Generic[K]):
    """Calls `reconcile` for each key that was woken.

    `reconcile` returns the seconds after which the key is due again without a change, or None. `name` is for
    the log; `rng` draws the jitter of retries.
    """

    def __init__(
        self,
        name: str,
        api: KubeApi,
        caches: CacheSet,
        rng: random.Random,
        reconcile: Callable[[K], Awaitable[float | None]],
    ) -> None:
        self.queue: WorkQueue[K] = WorkQueue(rng)
        self._name = name
        self._api = api
        self._caches = caches
        self._reconcile = reconcile
        self._expectations = Expectations(caches.at, _now)
        self._status_writes: dict[str, float] = {}
        """Loop time of the last status write, by UID."""

    async def run(self, workers: int) -> None:
        """Run the informers and reconcile, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for informer in self._caches.informers:
                tasks.create_task(informer.run())
            await self.reconcile_keys(workers)

    async def reconcile_keys(self, workers: int) -> None:
        """Reconcile until cancelled, once the caches have synced; the caller runs the informers."""
        await self._caches.synced()
        log.info("controller.synced", of=self._name)
        await self.queue.work(self._work, workers=workers)

    async def execute(self, key: K, actions: Iterable[ObjectWrite]) -> None:
        """Send writes in order, up to the first that fails. Raises KubeError."""
        for action in actions:
            written = await execute_write(self._api, action)
            if written is not None:
                self.expect(key, action.kind, written)

    def expect(self, key: K, kind: ResourceKind, written: Object) -> None:
        """Do not reconcile a key until the caches show this version, or the expectation expires."""
        self._expectations.expect(key, kind, written)

    async def update_status(self, key: K, kind: ResourceKind, obj: Object, status: Object) -> float | None:
        """Write the status of an object; None when that was done, else the seconds until it may be."""
        uid = obj["metadata"]["uid"]
        early = self._status_writes.get(uid, float("-inf")) + STATUS_INTERVAL_SECONDS - _now()
        if early > 0:
            return early
        self._status_writes[uid] = _now()
        self.expect(key, kind, await write_status(self._api, kind, obj, status))
        return None

    def forget(self, uid: str) -> None:
        """Drop what is kept about an object that is gone."""
        self._status_writes.pop(uid, None)

    async def _work(self, key: K) -> float | None:
        waits = self._expectations.outstanding(key)
        if waits is not None:
            return waits
        try:
            return await self._reconcile(key)
        except (KubeError, Retry):
            raise
        except Exception as defect:
            # A defect that one object triggers must not stop the work on the others.
            log.exception("controller.defect", of=self._name, key=repr(key))
            raise Retry(repr(defect), after=DEFECT_RETRY_SECONDS) from defect


def _now() -> float:
    return asyncio.get_running_loop().time()
