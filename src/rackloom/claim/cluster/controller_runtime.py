"""Controller runtime: work queue, expectations (pending writes), executor, limited status writes.

Changes wake a key, and one worker at a time works on it, level-triggered. A key names an object and not an
event. A key that is added while it waits is one key. If it is added while a worker works on it, it is due
again afterwards. A key whose work failed with a KubeError comes back with exponential back-off and
jitter. The runtime runs the informers and starts work when all caches have synced. A defect in the work on
one object is logged and retried after a minute, so it cannot stop the work on others. Time is the running
event loop's.

Expectations follow the pattern of Kubernetes' own controllers: a decision from a cache that does not
show our last write would repeat it. A key therefore waits until its writes have come back through the
watch, for a limited time, since the watch may skip to something newer.

The executor makes no choices. It sends writes in order up to the first that fails. If an object to
change or delete is gone, nothing is done. A JSON patch whose `test` fails counts as a conflict.
"""

import asyncio
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Generic, TypeVar

import structlog

from rackloom.claim.kube.api import Conflict, KubeApi, KubeError, NotFound, Rejected
from rackloom.claim.kube.informer import CacheSet
from rackloom.core.cluster.objects import (
    CreateObject,
    DeleteObject,
    Object,
    ObjectWrite,
    PatchObject,
    ResourceKind,
    is_being_deleted,
    name_of,
    namespace_of,
    uid_of,
    version_of,
)
from rackloom.errors import Retry

log = structlog.get_logger(__name__)
K = TypeVar("K", bound=Hashable)

# The work queue.


class WorkQueue(Generic[K]):
    """Keys to work on. Delays of failing keys double from `shortest` to `longest` (seconds), with jitter.

    `rng` draws the jitter, so that keys that failed together do not come back together.
    """

    def __init__(self, rng: random.Random, *, shortest: float = 0.05, longest: float = 60.0) -> None:
        self._random = rng
        self._shortest = shortest
        self._longest = longest
        self._ready: OrderedDict[K, None] = OrderedDict()
        self._active: set[K] = set()
        self._again: set[K] = set()
        self._failures: dict[K, int] = {}
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._waiting = asyncio.Semaphore(0)
        """Counts the ready keys, so that a key wakes one of the many workers and not all of them."""
        self._stopping = False

    def __len__(self) -> int:
        """The number of keys that wait for a worker, without delayed keys and those being worked on."""
        return len(self._ready)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, is delayed or is worked on."""
        return not (self._ready or self._active or self._again or self._timers)

    def add(self, key: K) -> None:
        """Have `key` worked on as soon as a worker is free. A pending delay for it is cancelled."""
        self._unschedule(key)
        if self._stopping:
            return
        if key in self._active:
            self._again.add(key)
        elif key not in self._ready:
            self._ready[key] = None
            self._waiting.release()

    def add_after(self, key: K, seconds: float) -> None:
        """Have `key` worked on in `seconds`, or earlier if an earlier time is pending."""
        if seconds <= 0:
            self.add(key)
            return
        loop = asyncio.get_running_loop()
        planned = self._timers.get(key)
        if self._stopping or (planned is not None and planned.when() <= loop.time() + seconds):
            return
        self._unschedule(key)
        self._timers[key] = loop.call_later(seconds, self.add, key)

    def retry(self, key: K, *, at_least: float = 0.0) -> float:
        """Have `key` worked on again after its back-off, or `at_least` (seconds). Returns that delay."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        # Equal jitter (half fixed, half random) keeps keys that failed together from returning together.
        ceiling = min(self._longest, self._shortest * 2.0 ** min(failures - 1, 32))
        seconds = max(ceiling * self._random.uniform(0.5, 1.0), at_least)
        self.add_after(key, seconds)
        return seconds

    def forget(self, key: K) -> None:
        """Reset the back-off of `key`."""
        self._failures.pop(key, None)

    def failures(self, key: K) -> int:
        """The number of times that `key` failed in a row."""
        return self._failures.get(key, 0)

    async def work(self, do: Callable[[K], Awaitable[float | None]], *, workers: int = 1) -> None:
        """Call `do(key)` for each key that is added, at most `workers` at once, until `stop`.

        `do` returns the seconds after which the key is due again, or None. After `Retry` it is due after its
        seconds, after `KubeError` when its back-off has passed. Another error is a defect and ends the work.
        """
        async with asyncio.TaskGroup() as tasks:
            for _ in range(workers):
                tasks.create_task(self._worker(do))

    async def _worker(self, do: Callable[[K], Awaitable[float | None]]) -> None:
        while (key := await self._next()) is not None:
            try:
                await self._do(do, key)
            finally:
                self._finish(key)

    async def _next(self) -> K | None:
        await self._waiting.acquire()
        if self._stopping:
            self._waiting.release()  # for the next worker
            return None
        key, _ = self._ready.popitem(last=False)
        self._active.add(key)
        return key

    async def _do(self, do: Callable[[K], Awaitable[float | None]], key: K) -> None:
        try:
            delay = await do(key)
        except Retry as error:
            self.add_after(key, error.after)
        except KubeError as error:
            self.retry(key, at_least=error.retry_after or 0.0)
        else:
            self.forget(key)
            if delay is not None:
                self.add_after(key, delay)

    def _finish(self, key: K) -> None:
        # A key that was added during the work on it is due again, so no change is lost.
        self._active.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _unschedule(self, key: K) -> None:
        planned = self._timers.pop(key, None)
        if planned is not None:
            planned.cancel()

    def stop(self) -> None:
        """Let workers finish their current keys and take no others. `work` then returns."""
        self._stopping = True
        for key in list(self._timers):
            self._unschedule(key)
        self._ready.clear()
        self._again.clear()
        self._waiting.release()


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
        """Seconds to wait at most. None if the caches show everything."""
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
        cached = self._lookup(kind, namespace_of(written), name_of(written))
        if cached is None:
            # Either a new object that is not shown yet, or one that went when its last finalizer was removed.
            return is_being_deleted(written)
        # Another UID means that the object was replaced since. API servers issue increasing numbers.
        return uid_of(cached) != uid_of(written) or int(version_of(cached)) >= int(version_of(written))


# The executor.


async def execute_write(api: KubeApi, action: ObjectWrite) -> Object | None:
    """Send one write. Returns the object as written, or None for a deletion.

    If an object to change or delete is gone, nothing is done: a later snapshot would show the same. Raises
    KubeError for any other failure.
    """
    written = None
    try:
        match action:
            case CreateObject(kind=kind, obj=obj):
                written = await api.create(kind, obj)
            case PatchObject(kind=kind, name=name, namespace=namespace, patch=patch):
                written = await api.patch(kind, name, namespace, patch, subresource=action.subresource)
            case DeleteObject(kind=kind, name=name, namespace=namespace):
                await api.delete(
                    kind,
                    name,
                    namespace,
                    uid=action.uid,
                    resource_version=action.resource_version,
                    propagation="Background",
                    grace_seconds=action.grace_seconds,
                )
    except NotFound:
        if isinstance(action, CreateObject):
            raise
        return None
    except Rejected as refusal:
        is_json_patch = isinstance(action, PatchObject) and isinstance(action.patch, tuple)
        if is_json_patch and refusal.code == 422:
            # A `test` failed, so the object has changed since it was read.
            raise Conflict(409, "Conflict", refusal.message) from refusal
        raise
    log.info("cluster.action", what=action.what)
    return written


async def write_status(api: KubeApi, kind: ResourceKind, read: Object, status: Object) -> Object:
    """Write the status of the object that was read, and of no other with its name. Raises KubeError."""
    patch = {"metadata": {"uid": uid_of(read)}, "status": status}
    return await api.patch(kind, name_of(read), namespace_of(read), patch, subresource="status")


# The loop.


STATUS_INTERVAL_SECONDS = 1.0
"""Seconds between two writes of one status, so that 18 pods that come together cause one write."""
DEFECT_RETRY_SECONDS = 60.0
"""Seconds until work is retried that failed with an unexpected exception."""


class ControllerRuntime(Generic[K]):
    """Calls `reconcile` for each key that was woken.

    `reconcile` returns the seconds after which the key is due again without a change, or None. `name` is for
    the log. `rng` draws the jitter of retries.
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
        """Reconcile until cancelled, once the caches have synced. The caller runs the informers."""
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
        """Write the status of an object. Returns None, or the seconds until it may be written."""
        uid = uid_of(obj)
        early = self._status_writes.get(uid, float("-inf")) + STATUS_INTERVAL_SECONDS - _now()
        if early > 0:
            return early
        self._status_writes[uid] = _now()
        self.expect(key, kind, await write_status(self._api, kind, obj, status))
        return None

    def forget(self, uid: str) -> None:
        """Drop the state of an object that is gone."""
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
