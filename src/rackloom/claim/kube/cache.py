"""The latest objects of one kind as they were last seen, with indexes: lookups never scan."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from rackloom.claim.kube.api import Object

Key = tuple[str, str]
"""(namespace, name); the namespace of a cluster-wide object is ""."""
Indexer = Callable[[Object], Iterable[str]]
"""Under which values an object is to be found."""


def key_of(obj: Object) -> Key:
    """The key of an object."""
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def by_label(label: str) -> Indexer:
    """An index of the values of a label."""

    def values(obj: Object) -> Iterable[str]:
        found = (obj["metadata"].get("labels") or {}).get(label)
        return () if found is None else (found,)

    return values


def by_uid(obj: Object) -> Iterable[str]:
    """An index of the object's own uid."""
    return (obj["metadata"]["uid"],)


class Cache:
    """Objects by key and by named indexes. What it hands out is shared: it must not be changed."""

    def __init__(self, indexers: Mapping[str, Indexer]) -> None:
        self._indexers = dict(indexers)
        self._objects: dict[Key, Object] = {}
        self._indexes: dict[str, dict[str, dict[Key, None]]] = {
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

    def drop(self, key: Key) -> Object | None:
        """Forget an object; returns what it was."""
        before = self._objects.pop(key, None)
        if before is not None:
            self._unindex(key, before, {})
        return before

    def _unindex(self, key: Key, obj: Object, kept: Mapping[str, Mapping[str, None]]) -> None:
        for name, values in self._indexers.items():
            for value in values(obj):
                if value not in kept.get(name, {}):
                    found = self._indexes[name][value]
                    found.pop(key, None)
                    if not found:
                        del self._indexes[name][value]

    def keys(self) -> set[Key]:
        """The keys of all objects."""
        return set(self._objects)
