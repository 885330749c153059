"""Allocation over many nodes at a cost that does not grow with their number.

kube-scheduler searches on every node again for every pod. Nodes of one machine type differ in names,
addresses and UUIDs, which few claims read. To one kind of claim, most nodes are therefore copies of
each other: the same devices, position by position. What is found for one holds for all of them.

- `NodeSignatures` computes what the claims can see of a node without its names. Equal signatures mean
  equal answers.
- `NodeOccupancy` records what is in use on a node by device position, as a small hashable key.
- `NodeEquivalenceClasses` keeps nodes by condition (signature and occupancy), with one heap per
  condition. A node whose occupancy changes is pushed under its new condition, and stale heap entries
  are dropped when they surface.

`Fleet.place` searches once per condition and reuses the answer on every node of that condition.
The chosen node is the first in order that can serve, as if each had been asked.

Slices must name their node. Devices that several nodes reach tie nodes together; `allocate` is for
those.
"""

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.allocator import fault_of, numbered_ids, refusal_of, results_of, unbounded
from rackloom.core.allocate.capacity import counter_draws
from rackloom.core.allocate.eligibility import CandidateDevice, SelectorCache
from rackloom.core.allocate.inputs import DeviceId, Features, InUse
from rackloom.core.allocate.objects import (
    AllocationResult,
    DeviceClass,
    DeviceResult,
    Node,
    ResourceClaim,
    ResourceSlice,
)
from rackloom.core.allocate.outcome import Allocation, AllocationStopped, Fault, FaultScope, Outcome, Refusal
from rackloom.core.allocate.pools import Pool, SliceIndex
from rackloom.core.allocate.problem import AllocationProblem, FoundAnswer, NodeDevices, devices_on_node
from rackloom.core.allocate.quantity import Quantity, exact_value
from rackloom.core.allocate.search import FirstFitSearch
from rackloom.core.allocate.symmetry import numbered, request_outcome

# What is in use on one node, by device position.


class NodeOccupancy:
    """Dedicated devices as bits; of shared ones how many shares, and what these took."""

    def __init__(self) -> None:
        self._dedicated = 0
        self._shares: dict[int, int] = {}
        self._taken: dict[tuple[int, str], Fraction] = {}

    def key(self) -> Hashable:
        """Equal where the same positions are used the same way."""
        return self._dedicated, frozenset(self._shares.items()), frozenset(self._taken.items())

    def add(self, devices: NodeDevices, results: Iterable[AllocationResult]) -> None:
        """Note what was given. Admin access holds nothing."""
        for at, device in _positions_held(devices, results):
            if device.share_id is None:
                self._dedicated |= 1 << at
                continue
            self._shares[at] = self._shares.get(at, 0) + 1
            for name, amount in (device.consumed_capacity or {}).items():
                self._taken[at, name] = self._taken.get((at, name), Fraction(0)) + exact_value(amount)

    def remove(self, devices: NodeDevices, results: Iterable[AllocationResult]) -> None:
        """Note what was given back."""
        for at, device in _positions_held(devices, results):
            if device.share_id is None:
                self._dedicated &= ~(1 << at)
            else:
                self._return(at, device)

    def _return(self, at: int, device_result: DeviceResult) -> None:
        self._shares[at] -= 1
        for name, amount in (device_result.consumed_capacity or {}).items():
            self._taken[at, name] -= exact_value(amount)
        if not self._shares[at]:
            del self._shares[at]
            self._taken = {key: amount for key, amount in self._taken.items() if key[0] != at}

    def as_in_use(self, devices: NodeDevices) -> InUse:
        """The same as books of devices."""
        candidates = devices.candidates
        dedicated = (device.id for device in candidates if self._dedicated >> device.position & 1)
        consumed: dict[DeviceId, dict[str, str]] = {}
        for (at, name), amount in self._taken.items():
            # Quantities have no more than nine decimals, and so have their sums.
            consumed.setdefault(candidates[at].id, {})[name] = str(Quantity(int(amount * 10**9), -9))
        return InUse(
            dedicated=frozenset(dedicated),
            shared=frozenset(candidates[at].id for at in self._shares),
            consumed=consumed,
        )


def _positions_held(
    devices: NodeDevices, results: Iterable[AllocationResult]
) -> Iterator[tuple[int, DeviceResult]]:
    """The devices of results that hold one, with their positions; those that are gone are left out."""
    for result in chain.from_iterable(allocation.devices.results for allocation in results):
        position = devices.positions.get(DeviceId.of(result))
        if position is not None and not result.admin_access:
            yield position, result


# Signatures and equivalence classes of nodes.


NodeCondition = tuple[int, Hashable]
"""Kind of a node, and what is in use on it."""


class NodeSignatures:
    """Nodes as one kind of claim sees them. Devices of equal content are looked at once for all nodes."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[Hashable, int] = {}

    def of(self, problem: AllocationProblem) -> Hashable:
        """All that the claims can see of a node, without its names: equal kinds, equal answers."""
        pools = {pool.key: number for number, pool in enumerate(problem.pools)}
        devices = tuple(
            self._device(problem, candidate, pools[candidate.pool.key]) for candidate in problem.candidates
        )
        return devices, tuple(map(_pool_signature, problem.pools))

    def _device(self, problem: AllocationProblem, candidate: CandidateDevice, pool: int) -> int:
        # A device that selects its nodes itself may be reachable or not, which its content does not show.
        key = candidate if candidate.source.spec.per_device_node_selection else (candidate.content, pool)
        if key not in self._known:
            self._known[key] = self._numbers.setdefault(
                _device_signature(problem, candidate, pool), len(self._numbers)
            )
        return self._known[key]


def _device_signature(problem: AllocationProblem, candidate: CandidateDevice, pool: int) -> Hashable:
    asks = chain.from_iterable(problem.plan)
    return (
        tuple(request_outcome(problem, ask, candidate) for ask in asks),
        tuple(constraint.values(candidate) for constraint in chain.from_iterable(problem.constraints)),
        _book_signature(candidate, pool),
    )


def _book_signature(candidate: CandidateDevice, pool: int) -> Hashable:
    counters = frozenset(counter_draws(candidate.device)) if candidate.device.consumes_counters else None
    if not candidate.shareable:
        return pool if counters is None else (pool, counters)
    return (
        pool,
        counters,
        frozenset((name, has.value) for name, has in candidate.device.capacity.items()),
    )


def _pool_signature(pool: Pool) -> Hashable:
    counters = frozenset(
        (name, counter, total.value)
        for name, of in pool.counter_sets.items()
        for counter, total in of.counters.items()
    )
    return pool.driver, pool.trouble, counters


class NodeEquivalenceClasses:
    """The nodes as one kind of claim sees them: by condition, in order."""

    def __init__(self, kinds: Iterable[Hashable], used: Sequence[Hashable]) -> None:
        self._kinds = numbered(kinds)
        self._conditions: list[NodeCondition] = list(zip(self._kinds, used, strict=True))
        self._open: dict[NodeCondition, list[int]] = {}
        self._closed: set[NodeCondition] = set()
        self.answers: dict[NodeCondition, ClassAnswer] = {}
        """What was found for a condition."""
        for number, condition in enumerate(self._conditions):
            self._open.setdefault(condition, []).append(number)

    def first(self) -> tuple[int, NodeCondition] | None:
        """The first node of an open condition."""
        tops = []
        for condition, heap in list(self._open.items()):
            # Lazy deletion: a node that changed its condition stays in its old heap until it surfaces.
            while heap and self._conditions[heap[0]] != condition:
                heapq.heappop(heap)
            if heap:
                tops.append((heap[0], condition))
            else:
                del self._open[condition]
        return min(tops, key=lambda top: top[0], default=None)

    def close(self, condition: NodeCondition) -> None:
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


# The fleet.


ClassAnswer = FoundAnswer | Refusal | Fault
"""What was found on one node of a condition. Of an answer, only asks, positions and amounts hold on every
node of the condition; the devices are those of the node that was searched."""


class Fleet:
    """Nodes with devices of their own, and what is in use on them.

    Slices must name their node. Devices that several nodes reach tie nodes together; `allocate` is for those.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        classes: Iterable[DeviceClass],
        slices: Iterable[ResourceSlice],
        *,
        features: Features = Features(),  # noqa: B008 (a frozen value)
    ) -> None:
        """Raises AllocationStopped for slices that do not name their node."""
        index = SliceIndex(slices)
        if index.unbound():
            raise AllocationStopped("a fleet takes slices that name their node")
        self._devices = [devices_on_node(node, index, features) for node in nodes]
        self._number = {node.metadata.name: number for number, node in enumerate(nodes)}
        self._used = [NodeOccupancy() for _ in nodes]
        self._classes = {klass.metadata.name: klass for klass in classes}
        self._features = features
        self._selectors = SelectorCache()
        self._new_id = numbered_ids()
        self._classes_of: dict[bytes, NodeEquivalenceClasses] = {}

    def place(self, claims: Sequence[ResourceClaim], *, proceed: Callable[[], bool] = unbounded) -> Outcome:
        """Give the claims of one pod their devices on the first node that can serve them, and note the use.

        A refusal names no node. A fault of a node passes the node over, like upstream; one of the attempt, or
        a search that `proceed` stopped, is the outcome.
        """
        nodes = self._node_classes(claims)
        # One search per condition: each round either answers or closes a condition, so there are at most as
        # many rounds as conditions, whatever the number of nodes.
        while (found := nodes.first()) is not None:
            number, condition = found
            answer = nodes.answers.get(condition) or self._searched(number, claims, proceed)
            if isinstance(answer, Fault) and answer.scope is FaultScope.ATTEMPT:
                return answer
            nodes.answers[condition] = answer
            if isinstance(answer, FoundAnswer):
                return self._taken(number, claims, answer)
            nodes.close(condition)
        return Refusal(node="", steps=0)

    def occupy(self, node: str, results: Iterable[AllocationResult]) -> None:
        """Note that claims that were allocated elsewhere hold devices of `node`."""
        number = self._number[node]
        self._used[number].add(self._devices[number], results)
        self._moved(number)

    def release(self, node: str, results: Iterable[AllocationResult]) -> None:
        """Note that devices of `node` are free again."""
        number = self._number[node]
        self._used[number].remove(self._devices[number], results)
        self._moved(number)

    def _node_classes(self, claims: Sequence[ResourceClaim]) -> NodeEquivalenceClasses:
        key = msgspec.json.encode([claim.spec for claim in claims])
        if key not in self._classes_of:
            signatures = NodeSignatures()
            kinds = [self._kind(devices, claims, signatures) for devices in self._devices]
            self._classes_of[key] = NodeEquivalenceClasses(kinds, [used.key() for used in self._used])
        return self._classes_of[key]

    def _kind(
        self, devices: NodeDevices, claims: Sequence[ResourceClaim], signatures: NodeSignatures
    ) -> Hashable:
        try:
            problem = self._problem(devices, claims, InUse())
        except AllocationStopped as stop:
            return stop.reason
        return signatures.of(problem)

    def _problem(
        self, devices: NodeDevices, claims: Sequence[ResourceClaim], state: InUse
    ) -> AllocationProblem:
        return AllocationProblem(devices, self._classes, claims, state, self._features, self._selectors)

    def _searched(
        self, number: int, claims: Sequence[ResourceClaim], proceed: Callable[[], bool]
    ) -> ClassAnswer:
        devices = self._devices[number]
        steps = 0
        try:
            problem = self._problem(devices, claims, self._used[number].as_in_use(devices))
            search = FirstFitSearch(problem, proceed)
            found = search.run()
            steps = search.steps
            return search.answer if found else refusal_of(problem, steps)
        except AllocationStopped as stop:
            return fault_of(devices.node, stop, steps)

    def _taken(self, number: int, claims: Sequence[ResourceClaim], answer: FoundAnswer) -> Outcome:
        devices = self._devices[number]
        entries = tuple(
            replace(entry, candidate=devices.candidates[entry.candidate.position]) for entry in answer.entries
        )
        try:
            results = results_of(devices.node, claims, replace(answer, entries=entries), self._new_id)
        except AllocationStopped as stop:
            return fault_of(devices.node, stop, answer.steps)
        self.occupy(devices.node.metadata.name, results)
        return Allocation(node=devices.node.metadata.name, results=results, steps=answer.steps)

    def _moved(self, number: int) -> None:
        key = self._used[number].key()
        for nodes in self._classes_of.values():
            nodes.moved(number, key)
