"""The nodes on which a selector may hold, by the values of the attributes that it pins.

A selector that pins an attribute (`cel.pins`) is false, without an error, on every device with another
value of the same type. So a search need not come to a node where that is the case for every device. All
other nodes it must visit, because what it finds there counts:

- a device has one of the values, or a number in the range;
- a device lacks the attribute or has it in another type, so that reading it may be an error;
- a selector that is checked earlier, of the class or of the request, fails on a device;
- a device or a counter is malformed, or the devices of the node cannot be gathered.

Devices that an earlier selector refuses do not count. `AttributeIndexes` joins the pins of a request: a node
that a pin of each alternative rules out is skipped.

An index reads nodes in order, and at most twice as far as the node that it finds. For ranges it keeps the
least and the greatest number of each node, and of each block of nodes.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rackloom.core.allocate.cel import errors
from rackloom.core.allocate.cel.pins import Pin, PinnedName, Scalar
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
    name: PinnedName


_BLOCK = 64
"""Nodes whose least and greatest value are kept together."""
_NumberRange = tuple[int, int]


class AttributeIndex:
    """The nodes by the value of one attribute, as far as they were read."""

    def __init__(self, nodes: FleetNodes, selectors: SelectorCache, key: _IndexKey) -> None:
        self._nodes = nodes
        self._selectors = selectors
        self._earlier = key.earlier
        self._name = key.name
        self._kinds = NodeKinds(reads_of_expressions(key.earlier))
        self._verdicts: dict[int, bool | None] = {}
        self.read = 0
        """How many nodes were read, the first ones."""
        self._with_value: dict[Scalar, int | list[int]] = {}
        """Most values of a serial number or address are on one node alone."""
        self._odd: list[int] = []
        """Nodes that are visited whatever the value."""
        self._ranges: list[_NumberRange | None] = []
        """Of each node, the least and the greatest number."""
        self._blocks: list[_NumberRange | None] = []

    def first(self, pin: Pin, start: int, reach: int) -> int:
        """The first node from `start` on that the pin does not rule out; `reach` where none comes before."""
        for number in range(self.read, reach):
            self._add(number)
        found = min(reach, _first_of(self._odd, start, reach))
        if pin.low is not None or pin.high is not None:
            return self._first_between(pin.low, pin.high, start, found)
        return min((self._first_with(value, start, found) for value in pin.values), default=found)

    def _first_with(self, value: Scalar, start: int, reach: int) -> int:
        numbers = self._with_value.get(value, ())
        if isinstance(numbers, int):
            return numbers if start <= numbers < reach else reach
        return min(reach, _first_of(numbers, start, reach))

    def _first_between(self, low: int | None, high: int | None, start: int, reach: int) -> int:
        number = start
        while number < reach:
            if number % _BLOCK == 0 and not _may_meet(self._blocks[number // _BLOCK], low, high):
                number += _BLOCK
            elif _may_meet(self._ranges[number], low, high):
                return number
            else:
                number += 1
        return reach

    def _add(self, number: int) -> None:
        self.read = number + 1
        values = self._values(number)
        numbers = [value for value in values or () if isinstance(value, int)]
        between = (min(numbers), max(numbers)) if numbers else None
        self._ranges.append(between)
        if number % _BLOCK == 0:
            self._blocks.append(between)
        elif between is not None:
            known = self._blocks[-1] or between
            self._blocks[-1] = min(known[0], between[0]), max(known[1], between[1])
        if values is None:
            self._odd.append(number)
            return
        for value in values:
            others = self._with_value.get(value)
            if others is None:
                self._with_value[value] = number
            elif isinstance(others, int):
                self._with_value[value] = [others, number]
            else:
                others.append(number)

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
            if not passes or self._name.driver not in (None, driver):
                continue
            attributes = candidate.device.attributes
            given = [attributes[name] for name in self._names(driver) if name in attributes]
            if not given and self._name.guarded:
                continue
            value = _scalar(given[0]) if len(given) == 1 else None
            if type(value) is not self._name.type:
                return None
            found.add(value)
        return found

    def _names(self, driver: str) -> tuple[str, ...]:
        """A name without a domain is in the driver's domain."""
        domain, identifier = self._name.domain, self._name.identifier
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


def _may_meet(between: _NumberRange | None, low: int | None, high: int | None) -> bool:
    """Whether a number from the least to the greatest may be from `low` to `high`."""
    if between is None:
        return False
    return (low is None or between[1] >= low) and (high is None or between[0] <= high)


def _scalar(attribute: DeviceAttribute) -> Scalar | None:
    """The value that a selector sees; None for lists, versions and what is malformed."""
    lists = (attribute.ints, attribute.bools, attribute.strings, attribute.versions)
    if any(values is not None for values in lists):
        return None
    for value in (attribute.int_, attribute.bool_, attribute.string):
        if value is not None:
            return value
    return None


# All attributes, and the requests that pin some.


_INDEXES_KEPT = 16
_IndexedPins = list[tuple[AttributeIndex, Pin]]
"""Pins of which one must be met, with the index of each."""


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
        choices = [self._pins(ask) for ask in choice]
        if not choice or not all(choices):
            return None
        indexes = [index for terms in choices for pins in terms for index, _ in pins]
        end = len(self._nodes.nodes)

        def first(start: int) -> int:
            # To look at what was read costs little. Reading more goes in steps, so that no alternative
            # reads on where another is met soon.
            reach = min(max(start + 1, min(index.read for index in indexes)), end)
            while True:
                found = min(_first_in_all(terms, start, reach) for terms in choices)
                if found < reach or reach == end:
                    return found
                reach = min(2 * reach, end)

        return first

    def _pins(self, ask: RequestAlternative) -> list[_IndexedPins]:
        found: list[_IndexedPins] = []
        earlier: list[str] = []
        for selector in (*ask.device_class.spec.selectors, *ask.selectors):
            program = compiled(selector.cel.expression) if selector.cel is not None else None
            if program is None or isinstance(program, errors.CompileError):
                break
            before = tuple(earlier)
            found += [
                [(self._index(_IndexKey(before, pin.name)), pin) for pin in pins] for pins in program.pins
            ]
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


def _first_in_all(terms: Sequence[_IndexedPins], start: int, reach: int) -> int:
    """The first node from `start` on that no term rules out; `reach` where none comes before."""
    agreed = 0
    while agreed < len(terms) and start < reach:
        agreed = 0
        for pins in terms:
            found = min(index.first(pin, start, reach) for index, pin in pins)
            agreed += found == start
            start = found
    return min(start, reach)
