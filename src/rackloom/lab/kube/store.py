"""The stored objects of the server, with one resourceVersion, and the history that watches read.

Stored objects are immutable: each write stores a new value, readers must not change it, and the front ends
hand out copies. `put` and `drop` first compute everything that can fail and then change the store, so a
write is stored whole or not at all. Indexes by UID and by owner keep garbage collection cheap.

Thousands of clients each select a few objects. So a selector names one `Trait` that all of its objects
have: a name, a node, or the value of a label. Lists read an index by traits, which is made at its first
use. A watch gets a change only if the object has or had the trait of the watch.

`History` keeps the newest `window` changes of each kind. A watch from an older version, or from before
`compact`, is expired (410). Watches with an equal `WatchScope` are evaluated once per change. An object
that starts to match a selector is ADDED, and one that stops matching is DELETED. Listeners in the same
process see every change as it happens, in the context of the server.
"""

import asyncio
import contextvars
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from rackloom.claim.kube.api import WatchEvent
from rackloom.core.cluster.objects import Object, ResourceKind
from rackloom.lab.kube import objects as kube_objects
from rackloom.lab.kube import refusals

ChangeType = Literal["ADDED", "MODIFIED", "DELETED"]


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One change: the object after it, and before it (None: it did not exist)."""

    version: int
    type: ChangeType
    object: Object
    before: Object | None


@dataclass(frozen=True, slots=True)
class Trait:
    """One value of an object: at a path, or of the label `path`."""

    path: str
    value: str
    of_label: bool = False

    def of(self, obj: Object) -> str | None:
        """The value that the object has there, or None if it lacks the label."""
        if self.of_label:
            found: str | None = (obj["metadata"].get("labels") or {}).get(self.path)
            return found
        return _node_name(obj) if self.path == NODE_NAME else str(obj["metadata"]["name"])


OBJECT_NAME, NODE_NAME = "metadata.name", "spec.nodeName"


def _traits_of(obj: Object) -> Iterator[Trait]:
    yield Trait(OBJECT_NAME, obj["metadata"]["name"])
    yield Trait(NODE_NAME, _node_name(obj))
    for label, value in (obj["metadata"].get("labels") or {}).items():
        yield Trait(label, value, of_label=True)


@dataclass(frozen=True, slots=True)
class WatchScope:
    """The selection of a watch. Watches with equal scopes share one evaluation per change."""

    namespace: str | None
    matches: Callable[[Object], bool]
    trait: Trait | None = None
    """Every object that matches has it."""

    def holds(self, obj: Object | None) -> bool:
        """Whether an object is one of those watched."""
        if obj is None:
            return False
        return self.namespace in (None, obj["metadata"].get("namespace")) and self.matches(obj)

    def seen(self, entry: HistoryEntry) -> WatchEvent | None:
        """The event of a change in this scope: ADDED if the object starts to match, DELETED if it stops."""
        matches_now = entry.type != "DELETED" and self.holds(entry.object)
        before = self.holds(entry.before)
        if matches_now:
            return WatchEvent("MODIFIED" if before else "ADDED", entry.object)
        return WatchEvent("DELETED", entry.object) if before else None


class WatchFeed:
    """The undelivered events of one watch: changes after a version. None in the queue ends it."""

    def __init__(self, scope: WatchScope, after: int) -> None:
        self.scope = scope
        self.after = after
        self.queue: asyncio.Queue[WatchEvent | None] = asyncio.Queue()

    def send(self, event: WatchEvent | None) -> None:
        """Queue a change as its scope sees it, if it does."""
        if event is not None:
            self.queue.put_nowait(event)


@dataclass(slots=True)
class _Audience:
    """The watches of one scope. `number` keeps the order in which scopes were first watched."""

    number: int
    feeds: dict[WatchFeed, None]


class History:
    """Changes of every kind, the newest `window` of each. Older resourceVersions are expired."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._entries: dict[ResourceKind, deque[HistoryEntry]] = defaultdict(deque)
        self._floor: dict[ResourceKind, int] = defaultdict(int)
        self.compacted = 0
        self._audiences: dict[ResourceKind, dict[Trait | None, dict[WatchScope, _Audience]]] = defaultdict(
            lambda: defaultdict(dict)
        )
        self._numbers = itertools.count()
        self.version = 1
        self.listeners: list[Callable[[ResourceKind, Object], None]] = []
        """Called with every change as it happens, for controllers of the same process."""
        self.context = contextvars.copy_context()
        """The server's context: what a listener starts must not belong to the writing process."""

    def add(self, kind: ResourceKind, change: ChangeType, obj: Object, before: Object | None) -> None:
        """Record a change at the current version, and send it to the watches."""
        entry = HistoryEntry(self.version, change, obj, before)
        entries = self._entries[kind]
        entries.append(entry)
        if len(entries) > self._window:
            self._floor[kind] = entries.popleft().version
        for scope, audience in self._concerned(kind, obj, before):
            # One evaluation per scope: many watches share a selector.
            event = scope.seen(entry)
            for feed in audience.feeds:
                if entry.version > feed.after:
                    feed.send(event)
        for listener in self.listeners:
            self.context.copy().run(listener, kind, obj)

    def _concerned(
        self, kind: ResourceKind, obj: Object, before: Object | None
    ) -> list[tuple[WatchScope, _Audience]]:
        """The watches that may see a change, in the order in which their scopes were first watched."""
        by_trait = self._audiences[kind]
        if not by_trait:
            return []
        traits: dict[Trait | None, None] = {None: None}
        for state in (obj, before):
            traits |= {} if state is None else dict.fromkeys(_traits_of(state))
        found = [item for trait in traits if trait in by_trait for item in by_trait[trait].items()]
        return sorted(found, key=lambda item: item[1].number)

    def open(self, kind: ResourceKind, scope: WatchScope, after: int) -> WatchFeed:
        """A watch from a version on, be it one to come. Raises `Expired` when that is too long ago."""
        floor = self.oldest(kind)
        if after < floor:
            raise refusals.watch_expired(after, floor)
        # Replay and registration happen without an await between them: no change is missed or sent twice.
        feed = WatchFeed(scope, after)
        for entry in reversed(list(self.undone(kind, after))):
            feed.send(scope.seen(entry))
        scopes = self._audiences[kind][scope.trait]
        if scope not in scopes:
            scopes[scope] = _Audience(next(self._numbers), {})
        scopes[scope].feeds[feed] = None
        return feed

    def oldest(self, kind: ResourceKind) -> int:
        """The version that a kind is known from."""
        return max(self._floor[kind], self.compacted)

    def undone(self, kind: ResourceKind, until: int) -> Iterator[HistoryEntry]:
        """The changes of a kind after a version, the newest first."""
        for entry in reversed(self._entries[kind]):
            if entry.version <= until:
                return
            yield entry

    def close(self, kind: ResourceKind, feed: WatchFeed) -> None:
        """End a watch after its reader is gone."""
        by_trait, scope = self._audiences[kind], feed.scope
        audience = by_trait[scope.trait].get(scope)
        if audience is not None:
            audience.feeds.pop(feed, None)
            if not audience.feeds:
                del by_trait[scope.trait][scope]
        if not by_trait[scope.trait]:
            del by_trait[scope.trait]

    def compact(self) -> None:
        """Forget the past: every version but the current one is expired."""
        self._entries.clear()
        self.compacted = self.version

    def hang_up(self) -> None:
        """End every watch, as a server does that is restarted."""
        for by_trait in self._audiences.values():
            audiences = [audience for scopes in by_trait.values() for audience in scopes.values()]
            for audience in sorted(audiences, key=lambda audience: audience.number):
                for feed in audience.feeds:
                    feed.queue.put_nowait(None)
            by_trait.clear()


ObjectKey = tuple[str | None, str]
"""(namespace, name) of an object. The namespace of a cluster-wide one is None."""
_ObjectPlace = tuple[ResourceKind, ObjectKey]
_IndexPlace = tuple[str, str]
"""A key of an object in the index: its UID, or an owner's UID."""


class _TraitIndex:
    """The objects of one kind by their value at one path or of one label."""

    def __init__(self, trait: Trait) -> None:
        self._trait = trait
        self._keys = defaultdict[str, set[ObjectKey]](set)

    def add(self, key: ObjectKey, obj: Object) -> None:
        """File an object under its value, if it has one."""
        value = self._trait.of(obj)
        if value is not None:
            self._keys[value].add(key)

    def discard(self, key: ObjectKey, obj: Object) -> None:
        """Take out an object that was filed as it was then."""
        value = self._trait.of(obj)
        if value is not None:
            self._keys[value].discard(key)
            if not self._keys[value]:
                del self._keys[value]

    def keys(self, value: str) -> list[ObjectKey]:
        """The keys of a value, by namespace and name."""
        return sorted(self._keys.get(value, ()), key=_place_in_list)


class ObjectStore(History):
    """Every object of every kind. One resourceVersion counts all writes, as etcd's revision does."""

    def __init__(self, window: int) -> None:
        super().__init__(window)
        self._objects: dict[ResourceKind, dict[ObjectKey, Object]] = defaultdict(dict)
        self._unsorted: set[ResourceKind] = set()
        """Kinds to which an object was added since they were last put in order."""
        self._index = defaultdict[_IndexPlace, set[_ObjectPlace]](set)
        self._by_trait: dict[ResourceKind, dict[tuple[str, bool], _TraitIndex]] = defaultdict(dict)
        """For those paths and labels of a kind by which objects were selected."""

    def find(self, kind: ResourceKind, key: ObjectKey) -> Object | None:
        """The object, or None."""
        return self._objects[kind].get(key)

    def read(self, kind: ResourceKind, key: ObjectKey) -> Object:
        """The object. Raises `NotFound`."""
        found = self._objects[kind].get(key)
        if found is None:
            raise refusals.not_found(kind, key[1])
        return found

    def all(self, kind: ResourceKind) -> list[Object]:
        """Every object of a kind, by namespace and name."""
        if kind in self._unsorted:
            self._unsorted.discard(kind)
            self._objects[kind] = _sorted_objects(self._objects[kind])
        return list(self._objects[kind].values())

    def at(self, kind: ResourceKind, version: int) -> list[Object]:
        """Every object of a kind as it was at a version. Raises `Expired` where that is too long ago."""
        if version < self.oldest(kind):
            raise refusals.list_expired()
        # Undo the changes since then, the newest first: each entry holds the object before it.
        objects = dict(self._objects[kind])
        for entry in self.undone(kind, version):
            objects.pop(key_of(entry.object), None)
            if entry.before is not None:
                objects[key_of(entry.before)] = entry.before
        return list(_sorted_objects(objects).values())

    def narrowed(self, kind: ResourceKind, namespace: str | None, trait: Trait | None) -> list[Object]:
        """Every object of a kind that may be in a selection, by namespace and name."""
        objects = self._objects[kind]
        if trait is None:
            return self.all(kind)
        if trait.path == OBJECT_NAME and not trait.of_label and (namespace or not kind.namespaced):
            found = self.find(kind, (namespace if kind.namespaced else None, trait.value))
            return [] if found is None else [found]
        where = (trait.path, trait.of_label)
        if where not in self._by_trait[kind]:
            index = self._by_trait[kind][where] = _TraitIndex(trait)
            for key, obj in objects.items():
                index.add(key, obj)
        return [objects[key] for key in self._by_trait[kind][where].keys(trait.value)]

    def put(self, kind: ResourceKind, obj: Object) -> Object:
        """Store an object as it is now, and return it with its new resourceVersion."""
        key = key_of(obj)
        before = self._objects[kind].get(key)
        stored = _with_version(obj, self.version + 1)
        # All that can fail comes before the first change: a write is stored whole or not at all.
        left, taken = _index_places(before), _index_places(stored)
        self.version += 1
        self._objects[kind][key] = stored
        if before is None:
            self._unsorted.add(kind)
        self._reindex((kind, key), left, taken)
        for index in self._by_trait[kind].values():
            if before is not None:
                index.discard(key, before)
            index.add(key, stored)
        self.add(kind, "ADDED" if before is None else "MODIFIED", stored, before)
        return stored

    def drop(self, kind: ResourceKind, key: ObjectKey) -> Object:
        """Remove an object. Watches see it with the version of its removal."""
        before = self._objects[kind][key]
        gone, left = _with_version(before, self.version + 1), _index_places(before)
        self.version += 1
        del self._objects[kind][key]
        self._reindex((kind, key), left, set())
        for index in self._by_trait[kind].values():
            index.discard(key, before)
        self.add(kind, "DELETED", gone, before)
        return gone

    def _reindex(self, where: _ObjectPlace, left: set[_IndexPlace], taken: set[_IndexPlace]) -> None:
        for place in left:
            # Places without objects are removed: `is_alive` checks only whether the UID has a place.
            self._index[place].discard(where)
            if not self._index[place]:
                del self._index[place]
        for place in taken:
            self._index[place].add(where)

    def is_alive(self, uid: str) -> bool:
        """Whether an object of this uid is stored."""
        return ("uid", uid) in self._index

    def whose(self, uid: str) -> tuple[ResourceKind, ObjectKey] | None:
        """The kind and key of the object with a uid, if there is one."""
        return next(iter(self._index.get(("uid", uid), ())), None)

    def dependents(self, uid: str) -> Iterator[tuple[ResourceKind, ObjectKey, Object]]:
        """The objects that name `uid` as an owner."""
        for kind, key in sorted(self._index.get(("owner", uid), ()), key=str):
            yield kind, key, self._objects[kind][key]

    def inside(self, namespace: str) -> Iterator[tuple[ResourceKind, ObjectKey]]:
        """Everything in a namespace."""
        for kind, objects in self._objects.items():
            for key in [key for key in objects if key[0] == namespace]:
                yield kind, key

    def defined_by(self, definition: str) -> Iterator[tuple[ResourceKind, ObjectKey]]:
        """Every object of the type that a CustomResourceDefinition of this name defines."""
        for kind, objects in self._objects.items():
            if f"{kind.plural}.{kind.group}" == definition:
                for key in list(objects):
                    yield kind, key


def _index_places(obj: Object | None) -> set[_IndexPlace]:
    if obj is None:
        return set()
    owners: set[_IndexPlace] = {("owner", owner["uid"]) for owner in kube_objects.owner_references(obj)}
    return owners | {("uid", obj["metadata"]["uid"])}


def key_of(obj: Object) -> ObjectKey:
    """The key under which an object is stored."""
    return obj["metadata"].get("namespace"), obj["metadata"]["name"]


def _sorted_objects(objects: dict[ObjectKey, Object]) -> dict[ObjectKey, Object]:
    return {key: objects[key] for key in sorted(objects, key=_place_in_list)}


def _place_in_list(key: ObjectKey) -> tuple[str, str]:
    return key[0] or "", key[1]


def _node_name(obj: Object) -> str:
    """The value of field selectors on spec.nodeName, or "" if there is none."""
    spec = obj.get("spec")
    return str(spec.get("nodeName", "")) if isinstance(spec, Mapping) else ""


def _with_version(obj: Object, version: int) -> Object:
    return {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(version)}}
