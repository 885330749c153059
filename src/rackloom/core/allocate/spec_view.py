"""What a fleet has found out for claims of one specification.

Claims of the same specification get the same answers, so a fleet keeps a view for each and looks at a
node only when the view says that it may serve.

- `OpenNodes` walks the nodes in order. It goes no further than the first node that serves, so a new
  specification costs what it must visit. A node that refused is closed until a device comes back there.
  Where a selector pins an attribute, `attribute_index` says which nodes to visit.
- `answers` has what was found for a kind of node (`node_kinds`) with certain positions in use. On a fleet
  of equal machines, one search answers for all of them.
- `lacks_devices` refuses a node without a search where too few of its free devices suit the first request.
  It runs the same checks (selectors, taints, capacity) by kind of device, once per kind. Where a selector
  fails, it leaves the node to the search, which reports that error if it gets there.

All of it is bounded: two bytes or less per node and kind of device, and the latest answers.
"""

import heapq
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from itertools import chain

from rackloom.core.allocate.attribute_index import AttributeIndexes
from rackloom.core.allocate.eligibility import Eligibility, SelectorCache
from rackloom.core.allocate.fleet_nodes import NOT_FULL, FleetNodes
from rackloom.core.allocate.inputs import Alternatives, Features, RequestAlternative
from rackloom.core.allocate.ledger import static_share
from rackloom.core.allocate.node_kinds import NodeKinds
from rackloom.core.allocate.occupancy import NodeOccupancy
from rackloom.core.allocate.outcome import AllocationStopped, Cause, Fault, Refusal
from rackloom.core.allocate.problem import FoundAnswer, NodeDevices
from rackloom.core.allocate.quantity import exact_value

# Nodes in order, as far as they were visited.


_UNSEEN, _OPEN, _CLOSED = 0, 1, 2


class OpenNodes:
    """The nodes that may serve, first to last."""

    def __init__(
        self,
        nodes: FleetNodes,
        *,
        next_possible: Callable[[int], int] | None,
        skips_full: bool,
        reopens_when_taken: bool,
    ) -> None:
        """`next_possible`: the first node from a number on that may serve at all, whatever is in use.

        `skips_full`: a node without a free device cannot serve.
        `reopens_when_taken`: a node that refused may serve after more was taken there.
        """
        self._nodes = nodes
        self._next_possible = next_possible
        self._skips_full = skips_full
        self._logs = [nodes.freed, nodes.taken] if reopens_when_taken else [nodes.freed]
        self._restart()

    def _restart(self) -> None:
        self._seen = [log.end for log in self._logs]
        self._state = bytearray(len(self._nodes.nodes))
        self._heap: list[int] = []
        self._frontier = 0

    def catch_up(self) -> None:
        """Open the closed nodes that changed since the last call."""
        for at, log in enumerate(self._logs):
            if self._seen[at] == log.end:
                continue
            changed = log.since(self._seen[at])
            if changed is None:
                self._restart()
                return
            self._seen[at] = log.end
            for number in changed:
                if self._state[number] == _CLOSED:
                    self._state[number] = _OPEN
                    heapq.heappush(self._heap, number)

    def first(self) -> int | None:
        """The first open node."""
        heap, full = self._heap, self._nodes.full
        while heap:
            if not (self._skips_full and full[heap[0]]):
                return heap[0]
            self._state[heapq.heappop(heap)] = _CLOSED
        self._advance()
        number = self._frontier
        if number == len(self._state):
            return None
        self._frontier = number + 1
        self._state[number] = _OPEN
        heapq.heappush(heap, number)
        return number

    def _advance(self) -> None:
        """Move the frontier to the next node that may serve."""
        if self._next_possible is None:
            if self._skips_full:
                self._skip_full_nodes()
            return
        # A node that can never serve stays unseen, so that no change opens it.
        number = self._next_possible(self._frontier)
        while self._skips_full and number < len(self._state) and self._nodes.full[number]:
            self._state[number] = _CLOSED
            number = self._next_possible(number + 1)
        self._frontier = number

    def _skip_full_nodes(self) -> None:
        start = self._frontier
        found = self._nodes.full.find(NOT_FULL, start)
        self._frontier = len(self._state) if found < 0 else found
        self._state[start : self._frontier] = bytes([_CLOSED]) * (self._frontier - start)

    def close_first(self) -> None:
        """The first open node cannot serve."""
        self._state[heapq.heappop(self._heap)] = _CLOSED


# The view of one specification.


NodeAnswer = FoundAnswer | Refusal | Fault
"""What was found on one node. Of a found answer, only asks, positions and amounts hold on other nodes of
the kind; the devices are those of the node that was searched."""
_ANSWERS_KEPT = 1024
_UNKNOWN, _SUITS, _UNSUITED, _FAILS = 0, 1, 2, 3
_Slack = tuple[tuple[str, Fraction], ...]
"""Of each capacity, how much others may have taken at most."""


class SpecView:
    """What is known of the nodes for claims of one specification."""

    def __init__(
        self,
        nodes: FleetNodes,
        kinds: NodeKinds,
        plan: Sequence[Alternatives],
        features: Features,
        selectors: SelectorCache,
        indexes: AttributeIndexes,
    ) -> None:
        """`plan` is empty for claims that cannot be worked on: then the search says why."""
        self.kinds = kinds
        self._features = features
        self._selectors = selectors
        everything = any(ask.everything for ask in chain.from_iterable(plan))
        counted = bool(plan) and not everything
        # Admin access ignores use, and a count of nothing is always met.
        self._first_asks: Alternatives = ()
        if counted and not any(ask.admin or ask.count < 1 for ask in plan[0]):
            self._first_asks = plan[0]
        self.skips_full = bool(self._first_asks)
        self.open = OpenNodes(
            nodes,
            next_possible=indexes.nodes_for(self._first_asks),
            skips_full=self.skips_full,
            reopens_when_taken=not counted,
        )
        self.answers: dict[Hashable, NodeAnswer] = {}
        self._marks = [bytearray() for _ in self._first_asks]
        self._slack: dict[tuple[int, int], _Slack] = {}

    def remember(self, condition: Hashable, answer: NodeAnswer) -> None:
        """Keep what was found on a kind of node with certain positions in use."""
        if len(self.answers) == _ANSWERS_KEPT:
            self.answers.clear()
        self.answers[condition] = answer

    def lacks_devices(self, devices: NodeDevices, kind: int, occupancy: NodeOccupancy) -> bool:
        """Whether too few free devices of the node suit any alternative of the first request, for sure."""
        if kind in self.kinds.malformed:
            return False
        eligibility = Eligibility(devices.node, self._features, self._selectors)
        of_devices = self.kinds.device_kinds[kind]
        for number, ask in enumerate(self._first_asks):
            marks, found = self._marks[number], 0
            for position, device_kind in enumerate(of_devices):
                if occupancy.dedicated >> position & 1:
                    continue
                mark = marks[device_kind] if device_kind < len(marks) else _UNKNOWN
                if mark == _UNKNOWN:
                    mark = self._mark(eligibility, devices, number, ask, position, device_kind)
                if mark == _FAILS:
                    return False
                if mark == _SUITS and self._has_capacity(number, device_kind, position, occupancy):
                    found += 1
                    if found >= ask.count:
                        return False
        return bool(self._first_asks)

    def _mark(
        self,
        eligibility: Eligibility,
        devices: NodeDevices,
        number: int,
        ask: RequestAlternative,
        position: int,
        device_kind: int,
    ) -> int:
        candidate, marks = devices.candidates[position], self._marks[number]
        mark = _UNSUITED
        verdict = eligibility.verdict(ask, candidate)
        if isinstance(verdict, AllocationStopped):
            mark = _FAILS
        elif verdict is None:
            try:
                given = static_share(ask, candidate.device, self._features)
                if not isinstance(given, Cause):
                    mark = _SUITS
                    if candidate.shareable:
                        self._slack[number, device_kind] = tuple(
                            (name, exact_value(candidate.device.capacity[name].value) - exact_value(amount))
                            for name, amount in given.items()
                        )
            except AllocationStopped:
                mark = _FAILS
        if device_kind >= len(marks):
            marks.extend(bytes(max(device_kind + 1 - len(marks), len(marks))))
        marks[device_kind] = mark
        return mark

    def _has_capacity(self, number: int, device_kind: int, position: int, occupancy: NodeOccupancy) -> bool:
        slack = self._slack.get((number, device_kind), ())
        return all(occupancy.taken(position, name) <= room for name, room in slack)
