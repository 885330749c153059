"""The results that a fleet has found for claims of one specification.

Claims of the same specification get the same answers, so a fleet keeps a view for each and looks at a
node only if the view shows that it may serve.

- `OpenNodes` walks the nodes in order. It stops at the first node that serves, so a new specification costs
  only the visited nodes. A node that refused is closed until a device comes back there. If a selector pins an
  attribute, `attribute_index` gives the nodes to visit.
- `known` has the answer for a kind of node (`node_kinds`) with certain positions in use. On a fleet of equal
  machines, one search answers for all of them.
- `without_search` looks at the free devices of a node once. It refuses the node if too few of them suit the
  first request. If that is the only request, and nothing ties its devices together, a search would take the
  first devices that fit. It runs the checks of a search (selectors, taints, capacity, counters) by kind of
  device, once per kind. If a selector fails, it leaves the node to the search, which reports that error if it
  gets there.

All of it is bounded: two bytes or less per node and kind of device, and the latest answers. `size` gives the
total, for the fleet to bound all views together.
"""

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain, islice
from typing import NamedTuple

from rackloom.core.allocate.attribute_index import AttributeIndexes
from rackloom.core.allocate.capacity import capacity_shortage
from rackloom.core.allocate.eligibility import CandidateDevice, Eligibility, SelectorCache
from rackloom.core.allocate.fleet_nodes import NOT_FULL, FleetNodes
from rackloom.core.allocate.inputs import MAX_RESULTS, Alternatives, Features, RequestAlternative
from rackloom.core.allocate.ledger import DeviceAssignment, static_share
from rackloom.core.allocate.node_kinds import NodeKinds
from rackloom.core.allocate.occupancy import CounterDraws, NodeOccupancy, draws_of
from rackloom.core.allocate.outcome import AllocationStopped, Cause, Fault, Refusal
from rackloom.core.allocate.pools import PoolKey
from rackloom.core.allocate.problem import FoundAnswer, NodeDevices
from rackloom.core.allocate.quantity import exact_value

# Nodes in order, as far as they were visited.


_UNSEEN, _OPEN, _CLOSED = 0, 1, 2
_HEAP_BYTES = 36
"""A number and the place in a list that it takes."""


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
        """`next_possible`: the first node from a number on that could serve with nothing in use.

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
        self._seen_shapes = self._nodes.reshaped.end
        self._state = bytearray(len(self._nodes.nodes))
        self._heap: list[int] = []
        self._frontier = 0

    def catch_up(self) -> None:
        """Open the closed nodes that changed, or that have devices that changed, since the last call."""
        reshaped = self._nodes.reshaped
        if self._seen_shapes != reshaped.end:
            changed = reshaped.since(self._seen_shapes)
            if changed is None:
                self._restart()
                return
            self._seen_shapes = reshaped.end
            for number in changed:
                if number < self._frontier and self._state[number] != _OPEN:
                    self._state[number] = _OPEN
                    heapq.heappush(self._heap, number)
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

    @property
    def size(self) -> int:
        """Bytes of memory, about."""
        return len(self._state) + _HEAP_BYTES * len(self._heap)

    def first(self) -> int | None:
        """The first open node."""
        # Nodes that opened again come before the frontier, and the lowest number goes first.
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
        full, end = self._nodes.full, len(self._state)
        if self._next_possible is None:
            if self._skips_full:
                # Full nodes are closed in one step, so that a device that comes back opens them.
                start, found = self._frontier, full.find(NOT_FULL, self._frontier)
                self._frontier = end if found < 0 else found
                self._state[start : self._frontier] = bytes([_CLOSED]) * (self._frontier - start)
            return
        # A node that can never serve stays unseen, so that no change opens it.
        number = self._next_possible(self._frontier)
        while self._skips_full and number < end and full[number]:
            after = full.find(NOT_FULL, number)
            after = end if after < 0 else after
            self._state[number:after] = bytes([_CLOSED]) * (after - number)
            number = self._next_possible(after) if after < end else end
        self._frontier = number

    def close_first(self) -> None:
        """Note that the first open node cannot serve."""
        self._state[heapq.heappop(self._heap)] = _CLOSED


# The view of one specification.


NodeAnswer = FoundAnswer | Refusal | Fault
"""The answer of one node. The alternatives, positions and amounts hold on other nodes of the kind too, but
the devices are those of the node that was searched."""
_ANSWERS_KEPT = 1024
_REFUSALS_KEPT = 64
"""Refusals that took no search. Nodes of few kinds refuse in few conditions."""
_VIEW_BYTES, _ANSWER_BYTES, _LIMITS_BYTES = 8000, 900, 400
"""A view's requests and key, an answer's condition and devices, and limits. Measured, rounded up."""
_UNKNOWN, _SUITS, _UNSUITED, _FAILS = 0, 1, 2, 3
REFUSED = Refusal(node="", steps=0)
"""A refusal that needed no search."""
_Slack = tuple[tuple[str, Fraction], ...]
"""The most that others may have taken of each capacity."""
_STEPS_BESIDE = 3
"""Steps of a search for one request beside those that take a device each."""


class _Limits(NamedTuple):
    """The amounts that must be left for a suitable device to serve."""

    slack: _Slack
    draws: CounterDraws


_NO_LIMITS = _Limits((), ())


class _NeedsSearch(Exception):
    """One pass over the devices does not show the answer of the node."""


class SpecView:
    """The known answers of nodes for claims of one specification."""

    def __init__(
        self,
        nodes: FleetNodes,
        kinds: NodeKinds,
        plan: Sequence[Alternatives],
        constrained: bool,
        features: Features,
        selectors: SelectorCache,
        indexes: AttributeIndexes,
    ) -> None:
        """`plan` is empty for claims that cannot be worked on. The search then reports the reason."""
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
        self._answers: dict[Hashable, NodeAnswer] = {}
        self._refused: dict[Hashable, NodeAnswer] = {}
        self.conflicts: dict[Hashable, tuple[int, ...]] = {}
        """The requests that exclude each other on kinds of nodes with certain positions in use."""
        self._marks = [bytearray() for _ in self._first_asks]
        self._limits: dict[tuple[int, int], _Limits] = {}
        # If there is no other request, the first devices that fit, in order, are the answer of the search.
        alone = self._first_asks[0] if len(plan) == 1 and self._first_asks else None
        self._is_plain = alone is not None and not constrained and alone.count <= MAX_RESULTS
        # Deriving an attribute of the first devices may fail, even if there are too few of them.
        self._may_stop = constrained and any(ask.derived for ask in self._first_asks)

        self.counted = 0
        """The size that the fleet has counted."""
        self.grew = True
        """Whether it may have grown since then."""

    @property
    def size(self) -> int:
        """Bytes of memory, about, without the kinds, which views share."""
        small = _ANSWER_BYTES * (len(self._answers) + len(self.conflicts)) + _LIMITS_BYTES * len(self._limits)
        return _VIEW_BYTES + self.open.size + small + sum(map(len, self._marks))

    def known(self, condition: Hashable) -> NodeAnswer | None:
        """The answer of a kind of node with certain positions in use, if it is still known."""
        return self._refused.get(condition) or self._answers.get(condition)

    def remember(self, condition: Hashable, answer: NodeAnswer) -> None:
        """Keep the answer of a kind of node with certain positions in use."""
        # If nodes differ, each refuses in a different condition. Refusals must not evict the other answers.
        answers, most = (
            (self._refused, _REFUSALS_KEPT) if answer is REFUSED else (self._answers, _ANSWERS_KEPT)
        )
        if len(answers) == most:
            answers.clear()
        answers[condition] = answer
        self.grew = True

    def without_search(
        self, devices: NodeDevices, kind: int, occupancy: NodeOccupancy
    ) -> FoundAnswer | Refusal | None:
        """The answer of the node if one pass over its devices shows it, or None if it needs a search."""
        if kind in self.kinds.malformed or not self._first_asks or self._may_stop:
            return None
        # Only the first request is looked at. If no alternative of it finds enough devices, the node refuses.
        try:
            for number, ask in enumerate(self._first_asks):
                fitting = self._fitting(number, devices, kind, occupancy)
                if number == 0 and self._is_plain:
                    taken, seen = _first_in_order(ask.count, fitting, occupancy)
                    if len(taken) == ask.count:
                        return self._answer(ask, taken)
                else:
                    seen = len(list(islice(fitting, ask.count)))
                if seen >= ask.count:
                    return None
        except _NeedsSearch:
            return None
        return REFUSED

    def _fitting(
        self, number: int, devices: NodeDevices, kind: int, occupancy: NodeOccupancy
    ) -> Iterator[tuple[CandidateDevice, _Limits]]:
        """The devices that an alternative could have as the only one, in order. Raises _NeedsSearch."""
        ask, marks, limits = self._first_asks[number], self._marks[number], self._limits
        dedicated = occupancy.dedicated
        for position, device_kind in enumerate(self.kinds.device_kinds[kind]):
            if dedicated >> position & 1:
                continue
            mark = marks[device_kind] if device_kind < len(marks) else _UNKNOWN
            if mark == _UNKNOWN:
                mark = self._mark(number, ask, devices, position, device_kind)
            if mark == _FAILS:
                raise _NeedsSearch
            if mark == _UNSUITED:
                continue
            candidate = devices.candidates[position]
            limit = limits.get((number, device_kind), _NO_LIMITS)
            if _is_left(candidate, limit, occupancy):
                yield candidate, limit

    def _mark(
        self, number: int, ask: RequestAlternative, devices: NodeDevices, position: int, device_kind: int
    ) -> int:
        marks = self._marks[number]
        try:
            eligibility = Eligibility(devices.node, self._features, self._selectors)
            limits = self._limits_of(eligibility, ask, devices.candidates[position])
            mark = _UNSUITED if limits is None else _SUITS
            if limits is not None and limits != _NO_LIMITS:
                self._limits[number, device_kind] = limits
        except AllocationStopped:
            mark = _FAILS
        # New kinds are numbered as nodes are read. The marks grow by doubling, like a list.
        if device_kind >= len(marks):
            marks.extend(bytes(max(device_kind + 1 - len(marks), len(marks))))
        marks[device_kind] = mark
        return mark

    def _limits_of(
        self, eligibility: Eligibility, ask: RequestAlternative, candidate: CandidateDevice
    ) -> _Limits | None:
        """The amounts that must be left for the device to serve the alternative, or None if it never does.

        Raises AllocationStopped if a selector fails, if a quantity cannot be read, or if the device's use
        depends on compatibility groups.
        """
        device = candidate.device
        if candidate.pool.has_groups and device.consumes_counters:
            raise AllocationStopped("compatibility groups need a search")
        verdict = eligibility.judge(ask, candidate)
        if isinstance(verdict, AllocationStopped):
            raise verdict
        if verdict is not None:
            return None
        given = static_share(ask, device, self._features)
        if isinstance(given, Cause) or capacity_shortage(device, {}, given) is not None:
            return None
        slack: _Slack = ()
        if candidate.shareable:
            slack = tuple(
                (name, exact_value(device.capacity[name].value) - exact_value(amount))
                for name, amount in given.items()
            )
        return _Limits(slack, draws_of(device))

    def _answer(self, ask: RequestAlternative, taken: Sequence[CandidateDevice]) -> FoundAnswer:
        """The answer of a search that takes these devices and never turns back."""
        entries = []
        for candidate in taken:
            given = static_share(ask, candidate.device, self._features)
            # The devices suit, so there is no cause.
            share = {} if isinstance(given, Cause) else given
            entries.append(DeviceAssignment(ask, candidate, share, bool(candidate.device.consumes_counters)))
        return FoundAnswer((ask,), tuple(entries), len(entries) + _STEPS_BESIDE)


def _is_left(candidate: CandidateDevice, limit: _Limits, occupancy: NodeOccupancy) -> bool:
    """Whether enough is left of a device that is not held whole. Raises _NeedsSearch."""
    position = candidate.position
    if not candidate.shareable:
        # The device may have shares in use, which the bits of `dedicated` leave out.
        if occupancy.holds(position):
            return False
        return not limit.draws or occupancy.counters(candidate.pool).suffice(limit.draws)
    if any(occupancy.taken(position, name) > room for name, room in limit.slack):
        return False
    if limit.draws:
        # Whether it draws depends on who has a share of it already.
        raise _NeedsSearch
    return True


def _first_in_order(
    count: int, fitting: Iterable[tuple[CandidateDevice, _Limits]], occupancy: NodeOccupancy
) -> tuple[list[CandidateDevice], int]:
    """The first devices that fit together, each taken as soon as it can be, and how many were seen."""
    taken: list[CandidateDevice] = []
    drawn: dict[PoolKey, list[CounterDraws]] = {}
    seen = 0
    for candidate, limit in fitting:
        seen += 1
        # Devices of one pool that were taken already draw from the same counters.
        if limit.draws:
            before = drawn.setdefault(candidate.pool.key, [])
            if before and not occupancy.counters(candidate.pool).suffice(limit.draws, before):
                continue
            before.append(limit.draws)
        taken.append(candidate)
        if len(taken) == count:
            break
    return taken, seen
