"""The cache of a frequent reader: only what changed since the previous reading is decoded again.

`ReadCache` remembers results by the function that made them, so each function may be used for one kind of
things only. `again` compares inputs by value, `each` compares Kubernetes objects by UID and
resourceVersion, `unless` compares digests that a database computed. Each returns the same values as a
full reading, and the very same objects where nothing changed, which makes later comparisons cheap.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from rackloom.app.snapshot.devices import DeviceCache
from rackloom.core.diagnosis.incremental import Memo, recompute_changed

Json = dict[str, Any]
K = TypeVar("K")
I = TypeVar("I")  # noqa: E741 (what it is made of)
S = TypeVar("S")
V = TypeVar("V")


class ReadCache:
    """The memory of one who looks often. Each function that is given to it is asked of one kind of things."""

    def __init__(self) -> None:
        self.devices = DeviceCache()
        self._made: dict[Callable[..., Any], Memo[Any, Any, Any]] = {}
        self._decoded: dict[Callable[..., Any], tuple[list[Json], list[Any], dict[tuple[str, str], Any]]] = {}
        self._read: dict[Callable[..., Any], dict[str, tuple[str, Any]]] = {}

    def again(self, told: Mapping[K, I], make: Callable[[I], V]) -> list[V]:
        """`make` of everything that is told, in its order; the same values where the same was told before."""
        made: dict[K, tuple[I, V]] = recompute_changed(self._made.get(make, {}), told, make)
        self._made[make] = made
        return [value for _, value in made.values()]

    def each(self, decode: Callable[[Json], V], objects: Iterable[Json]) -> list[V]:
        """`decode` of each object of a cluster; an object of a version that is known is not read again."""
        told = list(objects)
        same, found, before = self._decoded.get(decode, ([], [], {}))
        if told == same:
            # Mostly the very same objects, which are compared by address.
            return list(found)
        now, found = {}, []
        for one in told:
            version = one["metadata"].get("uid", ""), one["metadata"].get("resourceVersion", "")
            value = before[version] if version in before else decode(one)
            if all(version):
                now[version] = value
            found.append(value)
        self._decoded[decode] = told, found, now
        return list(found)

    def unless(
        self,
        digests: Mapping[str, str],
        read: Callable[[S, Collection[str]], Mapping[str, V]],
        source: S,
    ) -> dict[str, V]:
        """What `read` tells of each name; while a digest is as it was, the very value that there was then.

        A digest is equal only where what is read is equal. `read` is asked of all others at once.
        """
        before = self._read.get(read, {})
        other = [name for name, told in digests.items() if name not in before or before[name][0] != told]
        found = read(source, other) if other else {}
        now = {name: (told, found[name]) if name in found else before[name] for name, told in digests.items()}
        self._read[read] = now
        return {name: value for name, (_, value) in now.items()}
