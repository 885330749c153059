"""An informer: one list, then one watch, and an indexed cache that follows.

Handlers are told which object changed, never what to do: they put keys on a queue, and whoever works on
a key reads the cache (level-triggered). A watch that ends goes on from the last version seen; one that
is too old (410) starts over with a list. Between a broken watch and the next answer the cache may be
behind, which `unknown_since` reports. What a cache hands out is shared and must not be changed.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing

from rackloom.claim.kube.api import Expired, KubeApi, KubeError, WatchEvent
from rackloom.core.kubernetes.objects import Indexer, Object, ResourceKind

# The indexed cache: lookups never scan.


ObjectKey = tuple[str, str]
"""(namespace, name); the namespace of a cluster-wide object is ""."""


def key_of(obj: Object) -> ObjectKey:
    """The key of an object."""
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


class ObjectCache:
    """Objects by key and by named indexes. What it hands out is shared: it must not be changed."""

    def __init__(self, indexers: Mapping[str, Indexer]) -> None:
        self._indexers = dict(indexers)
        self._objects: dict[ObjectKey, Object] = {}
        self._indexes: dict[str, dict[str, dict[ObjectKey, None]]] = {
            name: defaultdict(dict) for name in self._indexers
        }

    def __len__(self) -> int:
        """How many objects there are."""
        return len(self._objects)

    def __iter__(self) -> Iterator[Object]:
        return iter(self._objects.values())

    def get(self, name: str, namespace: str | None = None) -> Object | None:
        """The object as last seen, or None."""
        return self._objects.get((namespace or "", name))

    def find(self, index: str, value: str) -> tuple[Object, ...]:
        """The objects that an index has under `value`, in the order in which they were first seen there."""
        return tuple(self._objects[key] for key in self._indexes[index].get(value, ()))

    def put(self, obj: Object) -> Object | None:
        """Remember an object; returns what it was before."""
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
        """Forget an object; returns what it was."""
        before = self._objects.pop(key, None)
        if before is not None:
            self._unindex(key, before, {})
        return before

    def _unindex(self, key: ObjectKey, obj: Object, kept: Mapping[str, Mapping[str, None]]) -> None:
        for name, values in self._indexers.items():
            for value in values(obj):
                if value not in kept.get(name, {}):
                    found = self._indexes[name][value]
                    found.pop(key, None)
                    if not found:
                        del self._indexes[name][value]

    def keys(self) -> set[ObjectKey]:
        """The keys of all objects."""
        return set(self._objects)


# List and watch.


ChangeHandler = Callable[[Object], None]
"""Told of an object that is new, changed or gone, as it was last seen."""

SHORTEST_RETRY_SECONDS = 0.2
LONGEST_RETRY_SECONDS = 30.0
"""Seconds between attempts while the API server does not answer."""


def _accept_no_error(_: KubeError) -> bool:
    return False


class Informer:
    """What there is of one kind, as last seen. `run` keeps it up to date until it is cancelled.

    `indexers` name the indexes of `cache`. `excuses` says of a refusal that it tells as much as an empty
    list: it is observed, and asked for again. `rng` draws the jitter of retries. Times are of the running
    loop.
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
        """Whether a first list has been taken in whole, or was excused."""
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
        """Loop time since when the cache may be behind: no list yet, or a broken watch. None: it follows."""
        return self._unknown_since

    @property
    def problem(self) -> KubeError | None:
        """What the API server last answered, where the cache may be behind or is excused because of that."""
        return self._problem

    async def run(self) -> None:
        """Follow the API server until cancelled. Raises what a handler raises, and is behind since then."""
        self._lose(self._problem)
        while True:
            try:
                await self._follow()
            except Expired:
                self._version = None
                await asyncio.sleep(self._random.uniform(0.0, SHORTEST_RETRY_SECONDS))
            except KubeError as error:
                self._hear(error)
                await self._pause(error)
            except Exception as error:
                self._lose(KubeError(0, "Defect", f"what was told could not be taken in: {error!r}"))
                raise

    async def _follow(self) -> None:
        """One watch, after a list where there is nothing to go on from."""
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
                self._take(event)

    async def _list(self) -> None:
        listed = await self._api.list(self._kind, self._namespace, labels=self._labels, fields=self._fields)
        gone = self.cache.keys() - {key_of(obj) for obj in listed.items}
        for obj in listed.items:
            self._put(obj)
        for key in sorted(gone):
            self._drop(key)
        self._version = listed.resource_version
        self._see()
        self._synced.set()

    def _take(self, event: WatchEvent) -> None:
        if event.type == "DELETED":
            self._drop(key_of(event.object))
        elif event.type != "BOOKMARK":
            self._put(event.object)
        self._version = event.object["metadata"]["resourceVersion"]
        self._see()

    def _put(self, obj: Object) -> None:
        before = self.cache.put(obj)
        if before is None or _version(before) != _version(obj):
            self._tell(obj)

    def _drop(self, key: ObjectKey) -> None:
        gone = self.cache.drop(key)
        if gone is not None:
            self._tell(gone)

    def _tell(self, obj: Object) -> None:
        for handler in self._handlers:
            handler(obj)

    def _see(self) -> None:
        self._failures = 0
        self._observed_at = asyncio.get_running_loop().time()
        self._unknown_since = self._problem = None

    def _hear(self, error: KubeError) -> None:
        """Take a refusal in."""
        if not self._excuses(error):
            self._lose(error)
            return
        for key in sorted(self.cache.keys()):
            self._drop(key)
        self._version, self._unknown_since, self._problem = None, None, error
        self._observed_at = asyncio.get_running_loop().time()
        self._synced.set()

    def _lose(self, problem: KubeError | None) -> None:
        """The cache may be behind from now on; it is since the newest answer."""
        self._problem = problem
        if self._unknown_since is None:
            seen = self._observed_at
            self._unknown_since = asyncio.get_running_loop().time() if seen is None else seen

    async def _pause(self, error: KubeError) -> None:
        self._failures += 1
        ceiling = min(LONGEST_RETRY_SECONDS, SHORTEST_RETRY_SECONDS * 2.0 ** min(self._failures, 16))
        await asyncio.sleep(max(ceiling * self._random.uniform(0.5, 1.0), error.retry_after or 0.0))


def _version(obj: Object) -> str:
    return str(obj["metadata"]["resourceVersion"])
