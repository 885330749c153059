"""The cache of a frequent reader: only changes since the previous reading are decoded again.

`ReadCache` remembers results by the function that made them, so each function may be used for one kind of
things only. `again` compares inputs by value, `each` compares Kubernetes objects by UID and
resourceVersion, `unless` compares digests that a database computed. `marks` say up to where the journals of
the records were read. Each returns the same values as a
full reading, and the very same objects where nothing changed, which makes later comparisons cheap.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from rackloom.app.snapshot.devices import DeviceCache
from rackloom.core.cluster.objects import Object, uid_of, version_of
from rackloom.core.diagnosis.incremental import Memo, recompute_changed

K = TypeVar("K")
I = TypeVar("I")  # noqa: E741 (what it is made of)
S = TypeVar("S")
V = TypeVar("V")


class RecordMarks(NamedTuple):
    """The ends of the records' journals at a reading."""

    revisions: Mapping[str, int]
    """The intent revision of each NVLink domain."""
    newest: Mapping[str, int]
    """The number of the newest entry of each journal."""
    compared_at: float
    """The time when all records were compared, even those that no journal names."""


class ReadCache:
    """The memory of a frequent reader. Each function given to it must be used for one kind of input only."""

    def __init__(self) -> None:
        self.devices = DeviceCache()
        self.marks: RecordMarks | None = None
        self.shown: Mapping[str, Any] = {}
        """The decoded reading of each NVLink domain."""
        self.observed: set[str] = set()
        """The domains with a reading that was decoded since the records were read."""
        self._made: dict[Callable[..., Any], Memo[Any, Any, Any]] = {}
        self._decoded: dict[Callable[..., Any], tuple[list[Object], list[Any], dict[Any, Any]]] = {}
        self._read: dict[Callable[..., Any], dict[str, tuple[str, Any]]] = {}

    def again(self, inputs: Mapping[K, I], make: Callable[[I], V]) -> list[V]:
        """`make` of each input, in order. An input that equals the previous one keeps its value."""
        made: dict[K, tuple[I, V]] = recompute_changed(self._made.get(make, {}), inputs, make)
        self._made[make] = made
        return [value for _, value in made.values()]

    def each(self, decode: Callable[[Object], V], objects: Iterable[Object]) -> list[V]:
        """`decode` of each Kubernetes object. An object of a known version is not decoded again."""
        current = list(objects)
        same, found, before = self._decoded.get(decode, ([], [], {}))
        if current == same:
            # Mostly the very same objects, which are compared by address.
            return list(found)
        now, found = {}, []
        for obj in current:
            version = uid_of(obj), version_of(obj)
            value = before[version] if version in before else decode(obj)
            if all(version):
                now[version] = value
            found.append(value)
        self._decoded[decode] = current, found, now
        return list(found)

    def unless(
        self,
        digests: Mapping[str, str],
        read: Callable[[S, Collection[str]], Mapping[str, V]],
        source: S,
        among: Collection[str] | None = None,
    ) -> dict[str, V]:
        """The value of `read` for each name. A name with an unchanged digest keeps its previous value.

        Equal digests must mean equal values. `read` is called once, for all other names. Names that are not
        `among` those of the digests keep their values too.
        """
        before = self._read.get(read, {})
        changed = [
            name for name, digest in digests.items() if name not in before or before[name][0] != digest
        ]
        found = read(source, changed) if changed else {}
        now = {
            name: (digest, found[name]) if name in found else before[name] for name, digest in digests.items()
        }
        if among is not None:
            kept = {name: value for name, value in before.items() if name not in among}
            now = dict(sorted((kept | now).items()))
        self._read[read] = now
        return {name: value for name, (_, value) in now.items()}
