"""The nodes on which a selector may hold, by the values of the attributes that it pins.

A selector that pins an attribute (`cel.pins`) is false, without an error, on every device with another
value of the same type. So a search need not come to a node where that is the case for every device. All
other nodes it must visit, because what it finds there counts:

- a device has one of the values;
- a device lacks the attribute or has it in another type, so that reading it may be an error;
- a selector that is checked earlier, of the class or of the request, fails on a device;
- a device or a counter is malformed, or the devices of the node cannot be gathered.

Devices that an earlier selector refuses do not count. `PinnedNodes` joins all pins of the alternatives of a
request: a node that one pin rules out is skipped.

An index reads nodes in order and only as far as a search has come, at most twice as far.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rackloom.core.allocate.cel import errors
from rackloom.core.allocate.cel.pins import PinnedAttribute, Scalar
from rackloom.core.allocate.eligibility import CandidateDevice, SelectorCache, compiled
from rackloom.core.allocate.fleet_nodes import FleetNodes
from rackloom.core.allocate.inputs import Alternatives, RequestAlternative
from rackloom.core.allocate.node_kinds import NodeKinds, reads_of_expressions
from rackloom.core.allocate.objects import DeviceAttribute
from rackloom.core.allocate.outcome import AllocationStopped

# One attribute.


class _IndexKey(NamedTuple):
    """What an index depends on."""

    earlier: tuple[str, ...]
    """Selectors that are checked before the one that pins."""
    pin: PinnedAttribute
    """Without values."""


class AttributeIndex:
    """The nodes by the value of one attribute, as far as they were read."""

    def __init__(self, nodes: FleetNodes, selectors: SelectorCache, key: _IndexKey) -> None:
        self._nodes = nodes
        self._selectors = selectors
        self._earlier = key.earlier
        self._pin = key.pin
        self._kinds = NodeKinds(reads_of_expressions(key.earlier))
        self._verdicts: dict[int, bool | None] = {}
        self._read = 0
        self._with_value: dict[Scalar, int | list[int]] = {}
        """Most values of a serial number or address are on one node alone."""
        self._odd: list[int] = []
        """Nodes that are visited whatever the value."""

    def first(self, values: Iterable[Scalar], start: int) -> int:
        """The first node from `start` on where a device may have one of the values; past the end for none."""
        while start < self._end:
            found = min((self._first_with(value, start) for value in values), default=self._end)
            found = min(found, _first_of(self._odd, start, self._end))
            # What was not read yet comes later.
            if found < self._end or self._read == self._end:
                return found
            for number in range(self._read, min(max(2 * self._read, start + 1), self._end)):
                self._add(number)
        return self._end

    @property
    def _end(self) -> int:
        return len(self._nodes.nodes)

    def _first_with(self, value: Scalar, start: int) -> int:
        numbers = self._with_value.get(value, ())
        if isinstance(numbers, int):
            return numbers if numbers >= start else self._end
        return _first_of(numbers, start, self._end)

    def _add(self, number: int) -> None:
        self._read = number + 1
        values = self._values(number)
        if values is None:
            self._odd.append(number)
            return
        for value in values:
            known = self._with_value.get(value)
            if known is None:
                self._with_value[value] = number
            elif isinstance(known, int):
                self._with_value[value] = [known, number]
            else:
                known.append(number)

    def _values(self, number: int) -> set[Scalar] | None:
        """The values of a node's devices; None where it must be visited in any case."""
        try:
            devices = self._nodes.devices(number)
        except AllocationStopped:
            return None
        kind = self._kinds.of(number, devices)
        if kind in self._kinds.malformed:
            return None
        found: set[Scalar] = set()
        for candidate, device_kind in zip(devices.candidates, self._kinds.device_kinds[kind], strict=True):
            if device_kind not in self._verdicts:
                self._verdicts[device_kind] = self._passes(candidate)
            passes = self._verdicts[device_kind]
            if passes is None:
                return None
            driver = candidate.id.driver
            if not passes or self._pin.driver not in (None, driver):
                continue
            attributes = candidate.device.attributes
            given = [attributes[name] for name in self._names(driver) if name in attributes]
            if not given and self._pin.guarded:
                continue
            value = _scalar(given[0]) if len(given) == 1 else None
            if type(value) is not self._pin.type:
                return None
            found.add(value)
        return found

    def _names(self, driver: str) -> tuple[str, ...]:
        """A name without a domain is in the driver's domain."""
        domain, identifier = self._pin.domain, self._pin.identifier
        qualified = f"{domain}/{identifier}"
        return (qualified, identifier) if domain == driver else (qualified,)

    def _passes(self, candidate: CandidateDevice) -> bool | None:
        """Whether the earlier selectors let the device through; None where one of them fails."""
        for expression in self._earlier:
            result = self._selectors.evaluate(expression, candidate)
            if isinstance(result, errors.CompileError | errors.EvaluationError):
                return None
            if not result:
                return False
        return True


def _first_of(numbers: Sequence[int], start: int, end: int) -> int:
    at = bisect_left(numbers, start)
    return numbers[at] if at < len(numbers) else end


def _scalar(attribute: DeviceAttribute) -> Scalar | None:
    """The value that a selector sees; None for lists, versions and what is malformed."""
    if not (attribute.ints is attribute.bools is attribute.strings is attribute.versions is None):
        return None
    for value in (attribute.int_, attribute.bool_, attribute.string):
        if value is not None:
            return value
    return None


# All attributes, and the requests that pin some.


_INDEXES_KEPT = 16


class AttributeIndexes:
    """The indexes of a fleet, for the attributes that selectors pinned last."""

    def __init__(self, nodes: FleetNodes, selectors: SelectorCache) -> None:
        self._nodes = nodes
        self._selectors = selectors
        self._indexes: OrderedDict[_IndexKey, AttributeIndex] = OrderedDict()

    def nodes_for(self, choice: Alternatives) -> Callable[[int], int] | None:
        """The function that gives, for a node, the first from it on that a request may be met on.

        It gives the number of nodes where there is none. None where no pin rules out any node.
        """
        pinned = [self._pinned(ask) for ask in choice]
        if not choice or not all(pinned):
            return None
        return lambda start: min(_first_in_all(pins, start) for pins in pinned)

    def _pinned(self, ask: RequestAlternative) -> list[tuple[AttributeIndex, frozenset[Scalar]]]:
        found = []
        earlier: list[str] = []
        for selector in (*ask.device_class.spec.selectors, *ask.selectors):
            program = compiled(selector.cel.expression) if selector.cel is not None else None
            if program is None or isinstance(program, errors.CompileError):
                break
            for pin in program.pins:
                key = _IndexKey(tuple(earlier), pin._replace(values=frozenset()))
                found.append((self._index(key), pin.values))
            earlier.append(program.expression)
        return found

    def _index(self, key: _IndexKey) -> AttributeIndex:
        index = self._indexes.get(key)
        if index is None:
            index = self._indexes[key] = AttributeIndex(self._nodes, self._selectors, key)
            if len(self._indexes) > _INDEXES_KEPT:
                self._indexes.popitem(last=False)
        self._indexes.move_to_end(key)
        return index


def _first_in_all(pins: Sequence[tuple[AttributeIndex, frozenset[Scalar]]], start: int) -> int:
    """The first node from `start` on that no pin rules out."""
    agreed = 0
    while agreed < len(pins):
        agreed = 0
        for index, values in pins:
            found = index.first(values, start)
            agreed += found == start
            start = found
    return start
