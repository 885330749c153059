"""What earlier readings were made of: a reading makes only what is told otherwise than before."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from rackloom.app.picture.devices import KnownDevices
from rackloom.prove.picture.kept import Kept, again

Json = dict[str, Any]
K = TypeVar("K")
I = TypeVar("I")  # noqa: E741 (what it is made of)
S = TypeVar("S")
V = TypeVar("V")


class Known:
    """The memory of one who looks often. Each function that is given to it is asked of one kind of things."""

    def __init__(self) -> None:
        self.devices = KnownDevices()
        self._made: dict[Callable[..., Any], Kept[Any, Any, Any]] = {}
        self._decoded: dict[Callable[..., Any], dict[tuple[str, str], Any]] = {}
        self._read: dict[Callable[..., Any], tuple[str, Any]] = {}

    def again(self, told: Mapping[K, I], make: Callable[[I], V]) -> list[V]:
        """`make` of everything that is told, in its order; the same values where the same was told before."""
        made: dict[K, tuple[I, V]] = again(self._made.get(make, {}), told, make)
        self._made[make] = made
        return [value for _, value in made.values()]

    def each(self, decode: Callable[[Json], V], objects: Iterable[Json]) -> list[V]:
        """`decode` of each object of a cluster; an object of a version that is known is not read again."""
        before, now, found = self._decoded.get(decode, {}), {}, []
        for one in objects:
            version = one["metadata"].get("uid", ""), one["metadata"].get("resourceVersion", "")
            value = before[version] if version in before else decode(one)
            if all(version):
                now[version] = value
            found.append(value)
        self._decoded[decode] = now
        return found

    def unless(self, digest: str, read: Callable[[S], V], source: S) -> V:
        """`read` of the source; while the digest is as it was, the very value that it gave then.

        `digest` is equal only where what is read is equal.
        """
        known = self._read.get(read)
        if known is None or known[0] != digest:
            known = self._read[read] = digest, read(source)
        value: V = known[1]
        return value
