"""The objects of a fake server: what is stored, under which version, and what becomes of dependents.

Stored objects are never changed in place: each write stores a new value. Readers must not change them either;
the fronts hand out copies.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rackloom.claim.kube.api import Kind, Object
from rackloom.twin.kube import answers, lifecycle
from rackloom.twin.kube.history import History

Key = tuple[str | None, str]
"""(namespace, name) of an object; the namespace of a cluster-wide one is None."""


class Store(History):
    """Every object of every kind. One resourceVersion counts all writes, as etcd's revision does."""

    def __init__(self, window: int) -> None:
        super().__init__(window)
        self._objects: dict[Kind, dict[Key, Object]] = defaultdict(dict)
        self._unsorted: set[Kind] = set()
        """Kinds to which an object was added since they were last put in order."""
        self._by_uid: dict[str, tuple[Kind, Key]] = {}
        self._dependents: dict[str, set[tuple[Kind, Key]]] = defaultdict(set)
        self._by_node: dict[tuple[Kind, str], set[Key]] = defaultdict(set)

    def find(self, kind: Kind, key: Key) -> Object | None:
        """The object, or None."""
        return self._objects[kind].get(key)

    def read(self, kind: Kind, key: Key) -> Object:
        """The object. Raises `NotFound`."""
        found = self._objects[kind].get(key)
        if found is None:
            raise answers.not_found(kind, key[1])
        return found

    def all(self, kind: Kind) -> list[Object]:
        """Every object of a kind, by namespace and name."""
        if kind in self._unsorted:
            self._unsorted.discard(kind)
            self._objects[kind] = _sorted(self._objects[kind])
        return list(self._objects[kind].values())

    def at(self, kind: Kind, version: int) -> list[Object]:
        """Every object of a kind as it was at a version. Raises `Expired` where that is too long ago."""
        if version < self.oldest(kind):
            raise answers.list_expired()
        objects = dict(self._objects[kind])
        for entry in self.undone(kind, version):
            objects.pop(key_of(entry.object), None)
            if entry.before is not None:
                objects[key_of(entry.before)] = entry.before
        return list(_sorted(objects).values())

    def narrowed(self, kind: Kind, fields: Mapping[str, str]) -> list[Object]:
        """Every object of a kind that may have these fields: a server has indexes for the common ones."""
        node = fields.get("spec.nodeName")
        if node is None:
            return self.all(kind)
        objects = self._objects[kind]
        return [objects[key] for key in sorted(self._by_node[kind, node], key=str)]

    def put(self, kind: Kind, obj: Object) -> Object:
        """Store an object as it is now, under a new resourceVersion; returns it with that."""
        key = key_of(obj)
        before = self._objects[kind].get(key)
        stored = _versioned(obj, self.version + 1)
        # All that can fail comes before the first change: a write is stored whole or not at all.
        left, taken = _places(before), _places(stored)
        self.version += 1
        self._objects[kind][key] = stored
        if before is None:
            self._unsorted.add(kind)
        self._reindex(kind, key, left, taken)
        self.add(kind, "ADDED" if before is None else "MODIFIED", stored, before)
        return stored

    def drop(self, kind: Kind, key: Key) -> Object:
        """Remove an object; what watches see of it carries the version of its removal."""
        before = self._objects[kind][key]
        gone, left = _versioned(before, self.version + 1), _places(before)
        self.version += 1
        del self._objects[kind][key]
        self._reindex(kind, key, left, None)
        self.add(kind, "DELETED", gone, before)
        return gone

    def _reindex(self, kind: Kind, key: Key, left: "_Places | None", taken: "_Places | None") -> None:
        if left is not None:
            self._by_uid.pop(left.uid, None)
            for owner in left.owners:
                self._dependents[owner].discard((kind, key))
            self._by_node[kind, left.node].discard(key)
        if taken is not None:
            self._by_uid[taken.uid] = (kind, key)
            for owner in taken.owners:
                self._dependents[owner].add((kind, key))
            self._by_node[kind, taken.node].add(key)

    def is_alive(self, uid: str) -> bool:
        """Whether an object of this uid is stored."""
        return uid in self._by_uid

    def whose(self, uid: str) -> tuple[Kind, Key] | None:
        """Where the object of a uid is, if there is one."""
        return self._by_uid.get(uid)

    def dependents(self, uid: str) -> Iterator[tuple[Kind, Key, Object]]:
        """The objects that name `uid` as an owner."""
        for kind, key in sorted(self._dependents.get(uid, ()), key=str):
            yield kind, key, self._objects[kind][key]

    def inside(self, namespace: str) -> Iterator[tuple[Kind, Key]]:
        """Everything in a namespace."""
        for kind, objects in self._objects.items():
            for key in [key for key in objects if key[0] == namespace]:
                yield kind, key

    def defined_by(self, definition: str) -> Iterator[tuple[Kind, Key]]:
        """Every object of the type that a CustomResourceDefinition of this name defines."""
        for kind, objects in self._objects.items():
            if f"{kind.plural}.{kind.group}" == definition:
                for key in list(objects):
                    yield kind, key


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the indexes have an object."""

    uid: str
    owners: frozenset[str]
    node: str


def _places(obj: Object | None) -> _Places | None:
    if obj is None:
        return None
    owners = frozenset(owner["uid"] for owner in lifecycle.owners(obj))
    return _Places(obj["metadata"]["uid"], owners, _node_of(obj))


def key_of(obj: Object) -> Key:
    """Under what an object is stored."""
    return obj["metadata"].get("namespace"), obj["metadata"]["name"]


def _sorted(objects: dict[Key, Object]) -> dict[Key, Object]:
    return dict(sorted(objects.items(), key=lambda one: (one[0][0] or "", one[0][1])))


def _node_of(obj: Object) -> str:
    """The value of field selectors on spec.nodeName; "" where there is none."""
    spec = obj.get("spec")
    return str(spec.get("nodeName", "")) if isinstance(spec, Mapping) else ""


def _versioned(obj: Object, version: int) -> Object:
    return {**obj, "metadata": {**obj["metadata"], "resourceVersion": str(version)}}
