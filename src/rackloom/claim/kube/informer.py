"""An informer: one list, then one watch, and an indexed cache that follows.

Handlers receive the object that changed. They put keys on a queue, and the work on a key reads the cache
(level-triggered). A watch that ends resumes from the last version seen. If that is too old (410), it
starts over with a list. Between a broken watch and the next answer the cache may be stale, which
`unknown_since` reports. Cached objects are shared and must not be changed. A `CacheSet` is the informers of
all kinds that a controller decides from, and a `ClusterFeed` makes a `ClusterState` of them.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial

from rackloom.claim.kube.api import Expired, KubeApi, KubeError, NotFound, WatchEvent
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.objects import (
    DEVICE_TAINT_RULES,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_SLICE,
    Indexer,
    Object,
    ResourceKind,
    name_of,
    namespace_of,
    uid_of,
)
from rackloom.core.cluster.reader import ClusterReader
from rackloom.core.cluster.state import ClusterState

# The indexed cache: lookups never scan.


ObjectKey = tuple[str, str]
"""(namespace, name). The namespace of a cluster-wide object is ""."""


def key_of(obj: Object) -> ObjectKey:
    """The key of an object."""
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


class ObjectCache:
    """Objects by key and by named indexes. They are shared and must not be changed."""

    def __init__(self, indexers: Mapping[str, Indexer]) -> None:
        self._indexers = dict(indexers)
        self._objects: dict[ObjectKey, Object] = {}
        self._indexes: dict[str, dict[str, dict[ObjectKey, None]]] = {
            name: defaultdict(dict) for name in self._indexers
        }

    def __len__(self) -> int:
        """The number of objects."""
        return len(self._objects)

    def __iter__(self) -> Iterator[Object]:
        return iter(self._objects.values())

    def get(self, name: str, namespace: str | None = None) -> Object | None:
        """The cached object, or None."""
        return self._objects.get((namespace or "", name))

    def find(self, index: str, value: str) -> tuple[Object, ...]:
        """The objects that an index has under `value`, in the order in which they were first seen there."""
        return tuple(self._objects[key] for key in self._indexes[index].get(value, ()))

    def put(self, obj: Object) -> Object | None:
        """Store an object. Returns its previous state."""
        key = key_of(obj)
        before = self._objects.get(key)
        after = {name: dict.fromkeys(values(obj)) for name, values in self._indexers.items()}
        if before is not None:
            self._unindex(key, before, after)
        self._objects[key] = obj
        for name, values in after.items():
            for value in values:
                self._indexes[name][value][key] = None
        return before

    def drop(self, key: ObjectKey) -> Object | None:
        """Remove an object. Returns its last state."""
        before = self._objects.pop(key, None)
        if before is not None:
            self._unindex(key, before, {})
        return before

    def _unindex(self, key: ObjectKey, obj: Object, kept: Mapping[str, Mapping[str, None]]) -> None:
        for name, values in self._indexers.items():
            for value in values(obj):
                if value not in kept.get(name, {}):
                    keys = self._indexes[name][value]
                    keys.pop(key, None)
                    if not keys:
                        del self._indexes[name][value]

    def keys(self) -> set[ObjectKey]:
        """The keys of all objects."""
        return set(self._objects)


# List and watch.


ChangeHandler = Callable[[Object], None]
"""Receives an object that is new, changed or gone, in its last known state."""

SHORTEST_RETRY_SECONDS = 0.2
LONGEST_RETRY_SECONDS = 30.0
"""Seconds between attempts while the API server does not answer."""


def is_not_served(error: KubeError) -> bool:
    """An excuse for kinds that the API server may not have, such as those of Kueue."""
    return isinstance(error, NotFound)


def is_not_served_to_us(error: KubeError) -> bool:
    """The same, and an excuse where the rights to read it are missing."""
    return is_not_served(error) or error.code == 403


def _accept_no_error(_: KubeError) -> bool:
    return False


class Informer:
    """The objects of one kind. `run` keeps the cache up to date until it is cancelled.

    `indexers` name the indexes of `cache`. `excuses` selects errors that count as an empty list. The list
    is then requested again. `rng` draws the jitter of retries. Times are those of the running loop.
    """

    def __init__(
        self,
        api: KubeApi,
        kind: ResourceKind,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        indexers: Mapping[str, Indexer] | None = None,
        excuses: Callable[[KubeError], bool] = _accept_no_error,
        rng: random.Random,
    ) -> None:
        self._api = api
        self._kind = kind
        self._namespace = namespace
        self._labels = labels
        self._fields = fields
        self._excuses = excuses
        self._random = rng
        self._handlers: list[ChangeHandler] = []
        self._version: str | None = None
        self._failures = 0
        self._synced = asyncio.Event()
        self._observed_at: float | None = None
        self._unknown_since: float | None = None
        self._problem: KubeError | None = None
        self.cache = ObjectCache(indexers or {})

    def on_change(self, handler: ChangeHandler) -> None:
        """Call `handler` for every object that is added, changed or removed from now on."""
        self._handlers.append(handler)

    @property
    def is_synced(self) -> bool:
        """Whether a first list was received in full, or was excused."""
        return self._synced.is_set()

    async def synced(self) -> None:
        """Wait for the first list."""
        await self._synced.wait()

    @property
    def observed_at(self) -> float | None:
        """Loop time of the newest answer of the API server (a list, a change, a bookmark, an excuse)."""
        return self._observed_at

    @property
    def unknown_since(self) -> float | None:
        """Loop time since when the cache may be stale: no list yet, or a broken watch. None: it follows."""
        return self._unknown_since

    @property
    def problem(self) -> KubeError | None:
        """The last error of the API server, if the cache is stale or excused because of it."""
        return self._problem

    async def run(self) -> None:
        """Follow the API server until cancelled. Raises the error of a handler. The cache is stale then."""
        self._mark_stale(self._problem)
        while True:
            try:
                await self._follow()
            except Expired:
                self._version = None
                await asyncio.sleep(self._random.uniform(0.0, SHORTEST_RETRY_SECONDS))
            except KubeError as error:
                self._handle_error(error)
                await self._pause(error)
            except Exception as error:
                self._mark_stale(KubeError(0, "Defect", f"what was told could not be taken in: {error!r}"))
                raise

    async def _follow(self) -> None:
        """Run one watch, after a list if there is no version to resume from."""
        if self._version is None:
            await self._list()
        assert self._version is not None  # noqa: S101 (set by the list)
        events = self._api.watch(
            self._kind,
            self._namespace,
            resource_version=self._version,
            labels=self._labels,
            fields=self._fields,
        )
        async with aclosing(events):
            async for event in events:
                self._apply(event)

    async def _list(self) -> None:
        listed = await self._api.list(self._kind, self._namespace, labels=self._labels, fields=self._fields)
        # Objects that vanished while no watch ran are only visible as missing in the new list.
        gone = self.cache.keys() - {key_of(obj) for obj in listed.items}
        for obj in listed.items:
            self._put(obj)
        for key in sorted(gone):
            self._drop(key)
        self._version = listed.resource_version
        self._mark_current()
        self._synced.set()

    def _apply(self, event: WatchEvent) -> None:
        if event.type == "DELETED":
            self._drop(key_of(event.object))
        elif event.type != "BOOKMARK":
            self._put(event.object)
        self._version = event.object["metadata"]["resourceVersion"]
        self._mark_current()

    def _put(self, obj: Object) -> None:
        before = self.cache.put(obj)
        if before is not None and uid_of(before) != uid_of(obj):
            # Another object took the name while no watch ran, and the watch will not show its deletion.
            self._notify(before)
        if before is None or _version(before) != _version(obj):
            self._notify(obj)

    def _drop(self, key: ObjectKey) -> None:
        gone = self.cache.drop(key)
        if gone is not None:
            self._notify(gone)

    def _notify(self, obj: Object) -> None:
        for handler in self._handlers:
            handler(obj)

    def _mark_current(self) -> None:
        self._failures = 0
        self._observed_at = asyncio.get_running_loop().time()
        self._unknown_since = self._problem = None

    def _handle_error(self, error: KubeError) -> None:
        """Mark the cache stale, or empty it if the error is excused."""
        if not self._excuses(error):
            self._mark_stale(error)
            return
        for key in sorted(self.cache.keys()):
            self._drop(key)
        self._version, self._unknown_since, self._problem = None, None, error
        self._observed_at = asyncio.get_running_loop().time()
        self._synced.set()

    def _mark_stale(self, problem: KubeError | None) -> None:
        """Mark the cache as possibly stale, since the newest answer."""
        self._problem = problem
        if self._unknown_since is None:
            observed = self._observed_at
            self._unknown_since = asyncio.get_running_loop().time() if observed is None else observed

    async def _pause(self, error: KubeError) -> None:
        self._failures += 1
        ceiling = min(LONGEST_RETRY_SECONDS, SHORTEST_RETRY_SECONDS * 2.0 ** min(self._failures, 16))
        await asyncio.sleep(max(ceiling * self._random.uniform(0.5, 1.0), error.retry_after or 0.0))


def _version(obj: Object) -> str:
    return str(obj["metadata"]["resourceVersion"])


# The caches that a controller decides from.


class CacheSet:
    """Informers by kind. Objects that it returns are shared and must not be changed."""

    def __init__(self, informers: Mapping[ResourceKind, Sequence[Informer]]) -> None:
        self._informers = informers

    @property
    def informers(self) -> tuple[Informer, ...]:
        """All informers, for the caller to run."""
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
        """Loop time since when a cache may be stale, or None if all follow the API server."""
        moments = (informer.unknown_since for informer in self.informers)
        return min((moment for moment in moments if moment is not None), default=None)

    def at(self, kind: ResourceKind, namespace: str | None, name: str) -> Object | None:
        """The object of this name. None also for kinds without an informer."""
        objects = (informer.cache.get(name, namespace) for informer in self._informers.get(kind, ()))
        return next((obj for obj in objects if obj is not None), None)

    def by(self, kind: ResourceKind, index: str, value: str) -> Sequence[Object]:
        """The objects that an index has under a value."""
        return [obj for informer in self._informers[kind] for obj in informer.cache.find(index, value)]

    def follows(self, kind: ResourceKind) -> bool:
        """Whether there is an informer of a kind."""
        return kind in self._informers

    def all(self, kind: ResourceKind) -> Iterator[Object]:
        """All objects of a kind. For sweeps and counts only, since it scans."""
        for informer in self._informers[kind]:
            yield from informer.cache


def taint_rule_informers(api: KubeApi, rng: random.Random) -> Mapping[ResourceKind, tuple[Informer, ...]]:
    """An informer of each version. A rule is in the cache of every version that is served."""
    return {kind: (Informer(api, kind, excuses=is_not_served, rng=rng),) for kind in DEVICE_TAINT_RULES}


# The state of the cluster.


STATE_KINDS = (NODE, POD, RESOURCE_CLAIM, RESOURCE_SLICE)
"""The kinds of objects that a `ClusterState` is read from."""


class ClusterFeed:
    """The `ClusterState` of `caches`, which have informers of all `STATE_KINDS`.

    It collects changed objects as the watches show them, and each counts once however often it changed.
    `state` reads them, in a thread: after the first list there are many, and the event loop has a lease to
    renew.

    A watch may be behind. `take` and `drop` bring in an object that was read from the API server before a
    write. An older state that the watch still shows afterwards counts until it shows the newest. The next
    write that depends on the object reads it again.
    """

    def __init__(self, caches: CacheSet, labels: SchedulerLabels) -> None:
        self._caches = caches
        self._reader = ClusterReader(labels)
        self._changed: dict[tuple[ResourceKind, str], Object | None] = {}
        """By kind and UID: the object, or None if it is gone."""
        self._reading = asyncio.Lock()
        caches.on_change(self._note)

    def _note(self, kind: ResourceKind, obj: Object) -> None:
        if kind in STATE_KINDS:
            cached = self._caches.at(kind, namespace_of(obj), name_of(obj))
            is_there = cached is not None and uid_of(cached) == uid_of(obj)
            self._changed[kind, uid_of(obj)] = obj if is_there else None

    def take(self, kind: ResourceKind, obj: Object) -> None:
        """Count an object that was read now."""
        self._changed[kind, uid_of(obj)] = obj

    def drop(self, kind: ResourceKind, uid: str) -> None:
        """Count an object no more that was found to be gone."""
        self._changed[kind, uid] = None

    async def state(self) -> ClusterState:
        """The facts of all objects that the informers have shown so far."""
        async with self._reading:
            changed, self._changed = self._changed, {}
            try:
                return await asyncio.to_thread(self._read, changed)
            finally:
                # After a defect in one object, the others are still to be read.
                self._changed = changed | self._changed

    def _read(self, changed: dict[tuple[ResourceKind, str], Object | None]) -> ClusterState:
        for kind, uid in list(changed):
            obj = changed.pop((kind, uid))
            if obj is not None:
                self._reader.take(kind, obj)
            else:
                self._reader.drop(kind, {"metadata": {"uid": uid}})
        return self._reader.state()
