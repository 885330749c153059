"""Which nodes are copies of each other for one kind of claim, and which of them comes first."""

import heapq
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from typing import Generic, TypeVar

from rackloom.claim.allocate.alike import fares
from rackloom.claim.allocate.candidates import Candidate
from rackloom.claim.allocate.counters import draws
from rackloom.claim.allocate.desk import Desk
from rackloom.claim.allocate.pools import Pool

A = TypeVar("A")
Condition = tuple[int, Hashable]
"""Kind of a node, and what is in use on it."""


class Kinds:
    """Nodes as one kind of claim sees them. Devices of equal content are looked at once for all nodes."""

    def __init__(self) -> None:
        self._looks: dict[Hashable, int] = {}
        self._known: dict[Hashable, int] = {}

    def of(self, desk: Desk) -> Hashable:
        """All that the claims can see of a node, without its names: equal kinds, equal answers."""
        pools = {pool.key: number for number, pool in enumerate(desk.pools)}
        devices = tuple(self._device(desk, one, pools[one.pool.key]) for one in desk.candidates)
        return devices, tuple(map(_pool, desk.pools))

    def _device(self, desk: Desk, one: Candidate, pool: int) -> int:
        # A device that selects its nodes itself may be here or not: its content does not tell.
        key = one if one.source.spec.per_device_node_selection else (one.content, pool)
        if key not in self._known:
            self._known[key] = self._looks.setdefault(_look(desk, one, pool), len(self._looks))
        return self._known[key]


def _look(desk: Desk, one: Candidate, pool: int) -> Hashable:
    asks = chain.from_iterable(chain.from_iterable(desk.choices))
    return (
        tuple(fares(ask, one, desk.eligibility, desk.ledger) for ask in asks),
        tuple(constraint.values(one) for constraint in chain.from_iterable(desk.constraints)),
        _books(one, pool),
    )


def _books(one: Candidate, pool: int) -> Hashable:
    counters = frozenset(draws(one.device)) if one.device.consumes_counters else None
    if not one.shareable:
        return pool if counters is None else (pool, counters)
    return pool, counters, frozenset((name, has.value) for name, has in one.device.capacity.items())


def _pool(pool: Pool) -> Hashable:
    counters = frozenset(
        (name, counter, total.value)
        for name, of in pool.counter_sets.items()
        for counter, total in of.counters.items()
    )
    return pool.driver, pool.trouble, counters


class View(Generic[A]):
    """The nodes as one kind of claim sees them: by condition, in order."""

    def __init__(self, kinds: Iterable[Hashable], used: Sequence[Hashable]) -> None:
        numbers: dict[Hashable, int] = {}
        self._kinds = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
        self._conditions: list[Condition] = list(zip(self._kinds, used, strict=True))
        self._open: dict[Condition, list[int]] = {}
        self._closed: set[Condition] = set()
        self.answers: dict[Condition, A] = {}
        """What was found for a condition."""
        for number, condition in enumerate(self._conditions):
            self._open.setdefault(condition, []).append(number)

    def first(self) -> tuple[int, Condition] | None:
        """The first node of an open condition."""
        tops = []
        for condition, heap in list(self._open.items()):
            while heap and self._conditions[heap[0]] != condition:
                heapq.heappop(heap)
            if heap:
                tops.append((heap[0], condition))
            else:
                del self._open[condition]
        return min(tops, key=lambda top: top[0], default=None)

    def close(self, condition: Condition) -> None:
        """No node of this condition can serve."""
        self._closed.add(condition)
        self._open.pop(condition, None)

    def moved(self, number: int, used: Hashable) -> None:
        """What is in use on a node has changed."""
        condition = (self._kinds[number], used)
        self._conditions[number] = condition
        if condition in self._closed:
            return
        heapq.heappush(self._open.setdefault(condition, []), number)
