"""The nodes on which a selector may hold, by the values of the attributes that it pins.

A selector that pins an attribute (`cel.pins`) is false, without an error, on every device with another
value of the same type. So a search need not come to a node where that is the case for every device. All
other nodes it must visit, because what it finds there counts:

- a device has one of the values, or a number in the range;
- a device lacks the attribute or has it in another type, so that reading it may be an error;
- a selector that is checked earlier, of the class or of the request, fails on a device;
- a device or a counter is malformed, or the devices of the node cannot be gathered.

Devices that an earlier selector refuses do not count. `AttributeIndexes` joins the pins of a request: a node
that a pin of each alternative rules out is skipped, or one whose taints a request without selectors of its
own does not tolerate (`taint_index`).

An index reads nodes in order, and at most twice as far as the node that it finds. For ranges it keeps the
least and the greatest number of each node, and of each block of nodes.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

from rackloom.core.allocate.cel import errors
from rackloom.core.allocate.cel.pins import Pin, PinnedName, Scalar
from rackloom.core.allocate.eligibility import CandidateDevice, SelectorCache, compiled
from rackloom.core.allocate.fleet_nodes import FleetNodes
from rackloom.core.allocate.inputs import Alternatives, RequestAlternative
from rackloom.core.allocate.node_kinds import NodeKinds, has_malformed, reads_of_expressions
from rackloom.core.allocate.objects import DeviceAttribute
from rackloom.core.allocate.outcome import AllocationStopped
from rackloom.core.allocate.taint_index import CHANGED_SHARE, TaintIndex, first_of

# One attribute.


class _IndexKey(NamedTuple):
    """What an index depends on."""

    earlier: tuple[str, ...]
    """Selectors that are checked before the one that pins."""
    name: PinnedName


_BLOCK = 64
"""Nodes whose least and greatest value are kept together."""
_NumberRange = tuple[int, int]


class _Passing:
    """The devices of each node that the selectors before a pin let through."""

    def __init__(self, nodes: FleetNodes, selectors: SelectorCache, earlier: tuple[str, ...]) -> None:
        self._nodes = nodes
        self._selectors = selectors
        self._earlier = earlier
        self._kinds = NodeKinds(reads_of_expressions(earlier))
        self._verdicts: dict[int, bool | None] = {}

    def through(self, number: int) -> Sequence[CandidateDevice] | None:
        """Those of a node; None where it must be visited in any case."""
        try:
            devices = self._nodes.devices(number)
        except AllocationStopped:
            return None
        if not self._earlier:
            return None if has_malformed(devices) else devices.candidates
        kind = self._kinds.of(number, devices)
        if kind in self._kinds.malformed:
            return None
        found: list[CandidateDevice] = []
        for candidate, device_kind in zip(devices.candidates, self._kinds.device_kinds[kind], strict=True):
            if device_kind not in self._verdicts:
                self._verdicts[device_kind] = self._passes(candidate)
            passes = self._verdicts[device_kind]
            if passes is None:
                return None
            if passes:
                found.append(candidate)
        return found

    def forget(self, number: int) -> None:
        """The devices of a node changed."""
        self._kinds.forget(number)

    def _passes(self, candidate: CandidateDevice) -> bool | None:
        """Whether the earlier selectors let the device through; None where one of them fails."""
        for expression in self._earlier:
            result = self._selectors.evaluate(expression, candidate)
            if isinstance(result, errors.CompileError | errors.EvaluationError):
                return None
            if not result:
                return False
        return True


class AttributeIndex:
    """The nodes by the value of one attribute, as far as they were read."""

    def __init__(self, passing: _Passing, name: PinnedName) -> None:
        self._passing = passing
        self._name = name
        self._names_of: dict[str, tuple[str, ...]] = {}
        self.restart()

    def restart(self) -> None:
        """Forget what was read."""
        self.read = self._changed = 0
        """How many nodes were read, the first ones."""
        self._with_value: dict[Scalar, int | list[int]] = {}
        """Most values of a serial number or address are on one node alone."""
        self._odd: list[int] = []
        """Nodes that are visited whatever the value."""
        self._ranges: list[_NumberRange | None] = []
        """Of each node, the least and the greatest number."""
        self._blocks: list[_NumberRange | None] = []

    def forget(self, number: int) -> None:
        """The devices of a node changed: it is visited whatever the value. After many, all is read again."""
        if number >= self.read:
            return
        self._changed += 1
        if self._changed * CHANGED_SHARE > self.read:
            self.restart()
        elif number not in self._odd:
            insort(self._odd, number)

    def first(self, pin: Pin, start: int, reach: int) -> int:
        """The first node from `start` on that the pin does not rule out; `reach` where none comes before."""
        for number in range(self.read, reach):
            self._add(number)
        found = min(reach, first_of(self._odd, start, reach))
        if pin.low is not None or pin.high is not None:
            return self._first_between(pin.low, pin.high, start, found)
        return min((self._first_with(value, start, found) for value in pin.values), default=found)

    def _first_with(self, value: Scalar, start: int, reach: int) -> int:
        numbers = self._with_value.get(value, ())
        if isinstance(numbers, int):
            return numbers if start <= numbers < reach else reach
        return min(reach, first_of(numbers, start, reach))

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
        between = None
        if values and issubclass(self._name.type, int):
            numbers = cast("set[int]", values)
            between = min(numbers), max(numbers)
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
        candidates = self._passing.through(number)
        if candidates is None:
            return None
        found: set[Scalar] = set()
        for candidate in candidates:
            driver = candidate.id.driver
            if self._name.driver not in (None, driver):
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
        names = self._names_of.get(driver)
        if names is None:
            domain, identifier = self._name.domain, self._name.identifier
            qualified = f"{domain}/{identifier}"
            names = self._names_of[driver] = (qualified, identifier) if domain == driver else (qualified,)
        return names


def _may_meet(between: _NumberRange | None, low: int | None, high: int | None) -> bool:
    """Whether a number from the least to the greatest may be from `low` to `high`."""
    if between is None:
        return False
    return (low is None or between[1] >= low) and (high is None or between[0] <= high)


def _scalar(attribute: DeviceAttribute) -> Scalar | None:
    """The value that a selector sees; None for lists, versions and what is malformed."""
    if attribute.ints is not None or attribute.bools is not None:
        return None
    if attribute.strings is not None or attribute.versions is not None:
        return None
    if attribute.int_ is not None:
        return attribute.int_
    return attribute.string if attribute.bool_ is None else attribute.bool_


# All attributes, and the requests that pin some.


_INDEXES_KEPT = 16


class _Term(NamedTuple):
    """What rules nodes out, for one request."""

    of: AttributeIndex | TaintIndex
    first: Callable[[int, int], int]
    """The first node from a number on, below another one."""


_Terms = list[list[_Term]]
"""Of each list, one must be met."""


class AttributeIndexes:
    """The indexes of a fleet, for the attributes that selectors pinned last, and for taints."""

    def __init__(self, nodes: FleetNodes, selectors: SelectorCache) -> None:
        self._nodes = nodes
        self._selectors = selectors
        self._indexes: OrderedDict[_IndexKey, AttributeIndex] = OrderedDict()
        self._taints: OrderedDict[tuple[str, ...], TaintIndex] = OrderedDict()
        self._passing: dict[tuple[str, ...], _Passing] = {}
        self._tainted: bool | None = None

    def forget(self, number: int) -> None:
        """The devices of a node changed."""
        self._tainted = None
        for passing in self._passing.values():
            passing.forget(number)
        for index in self._indexes.values():
            index.forget(number)
        for taints in self._taints.values():
            taints.forget(number)

    def nodes_for(self, choice: Alternatives) -> Callable[[int], int] | None:
        """The function that gives, for a node, the first from it on that a request may be met on.

        It gives the number of nodes where there is none. None where nothing rules out any node.
        """
        choices = [self._terms(ask) for ask in choice]
        if not choice or not all(choices):
            return None
        indexes = [term.of for terms in choices for either in terms for term in either]
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

    def _terms(self, ask: RequestAlternative) -> _Terms:
        found: _Terms = []
        earlier: list[str] = []
        for selector in (*ask.device_class.spec.selectors, *ask.selectors):
            program = compiled(selector.cel.expression) if selector.cel is not None else None
            if program is None or isinstance(program, errors.CompileError):
                return found
            before = tuple(earlier)
            for pins in program.pins:
                indexes = [self._index(_IndexKey(before, pin.name)) for pin in pins]
                either = zip(indexes, pins, strict=True)
                found.append([_Term(index, partial(index.first, pin)) for index, pin in either])
            earlier.append(program.expression)
        # A request with selectors of its own is seldom asked again: it is not worth an index.
        if not ask.selectors and self._has_taints:
            taints = self._taint_index(tuple(earlier))
            found.append([_Term(taints, partial(taints.first, ask.tolerations))])
        return found

    @property
    def _has_taints(self) -> bool:
        if not self._nodes.heeds_taints:
            return False
        if self._tainted is None:
            self._tainted = any(True for _ in self._nodes.index.taints())
        return self._tainted

    def _index(self, key: _IndexKey) -> AttributeIndex:
        index = self._indexes.get(key)
        if index is None:
            index = self._indexes[key] = AttributeIndex(self._passes(key.earlier), key.name)
            if len(self._indexes) > _INDEXES_KEPT:
                self._indexes.popitem(last=False)
                self._forget_unused()
        self._indexes.move_to_end(key)
        return index

    def _taint_index(self, earlier: tuple[str, ...]) -> TaintIndex:
        index = self._taints.get(earlier)
        if index is None:
            index = self._taints[earlier] = TaintIndex(self._passes(earlier).through)
            if len(self._taints) > _INDEXES_KEPT:
                self._taints.popitem(last=False)
                self._forget_unused()
        self._taints.move_to_end(earlier)
        return index

    def _passes(self, earlier: tuple[str, ...]) -> _Passing:
        passing = self._passing.get(earlier)
        if passing is None:
            passing = self._passing[earlier] = _Passing(self._nodes, self._selectors, earlier)
        return passing

    def _forget_unused(self) -> None:
        used = {*self._taints, *(key.earlier for key in self._indexes)}
        self._passing = {earlier: found for earlier, found in self._passing.items() if earlier in used}


def _first_in_all(terms: _Terms, start: int, reach: int) -> int:
    """The first node from `start` on that no term rules out; `reach` where none comes before."""
    agreed = 0
    while agreed < len(terms) and start < reach:
        agreed = 0
        for either in terms:
            found = min(term.first(start, reach) for term in either)
            agreed += found == start
            start = found
    return min(start, reach)
