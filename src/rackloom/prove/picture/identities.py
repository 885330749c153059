"""Which records of different layers are about one GPU: an index on the parts of the join key.

Records are looked up by the parts they have, so the work grows with the records and not with their pairs;
whether two really name one GPU is `topology.identity.joins`' to say, and nobody else's.
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

from rackloom.errors import Refused
from rackloom.topology.identity import GpuKey, joins, merge

T = TypeVar("T")


class Joined(Generic[T]):
    """What was found of one GPU. `said` are the records, each with the name of who says so."""

    def __init__(self, key: GpuKey, who: str, record: T) -> None:
        self.key = key
        self.said: list[tuple[str, T]] = [(who, record)]
        self.conflicts: list[str] = []

    @property
    def speakers(self) -> str:
        """Who told of it so far."""
        return " and ".join(who for who, _ in self.said)


class Identities(Generic[T]):
    """All GPUs that any layer told of."""

    def __init__(self) -> None:
        self._gpus: dict[int, Joined[T]] = {}
        self._at: dict[tuple[str, object], Joined[T]] = {}

    @property
    def gpus(self) -> tuple[Joined[T], ...]:
        """Each GPU once, in the order in which they were first told of."""
        return tuple(self._gpus.values())

    def add(self, who: str, key: GpuKey, record: T) -> None:
        """Put a record to the GPU that it is about: a known one, or a new one.

        A record that shares one part with a known GPU and contradicts another is not about that one, which is
        noted there as a conflict with both sides. Nor is it about any other where the place that it names is
        taken by the one that it contradicts: in one place is one GPU. Parts that both name stay with who told
        of them first.
        """
        same: list[Joined[T]] = []
        others: list[Joined[T]] = []
        for known in self._candidates(key):
            difference = _difference(known.key, key)
            if joins(known.key, key) and not difference:
                same.append(known)
            else:
                others.append(known)
                known.conflicts.append(f"{known.speakers} against {who}: {difference}")
        holder = None if key.place is None else self._at.get(("place", key.place.value))
        if holder is not None and holder not in same:
            return
        found = Joined(key, who, record)
        for known in same:
            found = self._united(known, found)
        self._gpus[id(found)] = found
        for part in parts_of(found.key):
            if self._at.get(part) not in others:
                self._at[part] = found

    def _united(self, known: Joined[T], new: Joined[T]) -> Joined[T]:
        """Both as one GPU. Where they contradict each other they stay two, and `new` keeps the conflict."""
        try:
            key = merge(known.key, new.key)
        except Refused as refused:
            new.conflicts.append(f"{known.speakers} against {new.speakers}: {refused.reason}")
            return new
        del self._gpus[id(known)]
        known.key = key
        known.said += new.said
        known.conflicts += new.conflicts
        return known

    def _candidates(self, key: GpuKey) -> list[Joined[T]]:
        found = {id(known): known for part in parts_of(key) if (known := self._at.get(part)) is not None}
        return list(found.values())


def parts_of(key: GpuKey) -> Iterator[tuple[str, object]]:
    """The parts that mean something beyond one machine: all but the PCI address."""
    for part in ("place", "fabric_guid", "gpu_uuid"):
        fact = getattr(key, part)
        if fact is not None:
            yield part, fact.value


def _difference(known: GpuKey, told: GpuKey) -> str:
    """Where two keys that share a part contradict each other, addresses included; empty: nowhere."""
    try:
        merge(known, told)
    except Refused as refused:
        return refused.reason
    return ""
