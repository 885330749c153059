"""The nodes on which a selector may hold, by the values of the attributes that it pins.

A selector that pins an attribute (`cel.pins`) is false, without an error, on every device with another
value of the same type. If that holds for every device of a node, a search can skip the node. It must
visit a node in any of these cases, because the devices or errors there affect the answer:

- A device has one of the values, or a number in the range.
- A device lacks the attribute or has it in another type, so that reading it may be an error.
- A selector that is checked earlier, of the class or of the request, fails on a device.
- A device or a counter is malformed, or the devices of the node cannot be gathered.

Devices that an earlier selector refuses do not count.

A `TaintIndex` rules nodes out by the taints that a request tolerates. A device with a blocking taint that the
request does not tolerate cannot serve. A search can skip a node if that holds for the first blocking taint of
every device and no selector fails there. Selectors are checked before taints, so their errors count.

`AttributeIndexes` joins the pins of a request. It skips a node if a pin of each alternative rules it out. If
a request has only its class's selectors, it also skips nodes with taints that the request does not tolerate.

An index reads nodes in order, at most one block further than the node that it finds. For ranges it keeps the
least and the greatest number of each node and of each block.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar, cast

from rackloom.core.allocate.cel import errors
from rackloom.core.allocate.cel.pins import Pin, PinnedName, Scalar
from rackloom.core.allocate.eligibility import SelectorCache, compiled, first_blocking_taint
from rackloom.core.allocate.fleet_nodes import FleetNodes
from rackloom.core.allocate.inputs import Alternatives, RequestAlternative
from rackloom.core.allocate.objects import DeviceAttribute, DeviceToleration
from rackloom.core.allocate.written_devices import DevicesByDriver, PassingDevices, WrittenDevices

# Nodes in the order in which they are read.


_Value = TypeVar("_Value", bound=Hashable)


class NodesByValue(Generic[_Value]):
    """Numbers of nodes by a value that their devices have, in ascending order.

    Most serial numbers and addresses occur on one node only. Such a node is kept without a list.
    """

    def __init__(self) -> None:
        self._found: dict[_Value, int | list[int]] = {}

    def add(self, value: _Value, number: int) -> None:
        """Note a value of a node. Call it in ascending order of numbers, once for each number and value."""
        others = self._found.get(value)
        if others is None:
            self._found[value] = number
        elif isinstance(others, int):
            self._found[value] = [others, number]
        else:
            others.append(number)

    def first(self, value: _Value, start: int, end: int) -> int:
        """The first node from `start` on that has a value, or `end` if none comes before it."""
        numbers = self._found.get(value, ())
        if isinstance(numbers, int):
            return numbers if start <= numbers < end else end
        return min(_first_of(numbers, start, end), end)


def _first_of(numbers: Sequence[int], start: int, end: int) -> int:
    """The first of the sorted numbers that is at least `start`, or `end` if there is none."""
    at = bisect_left(numbers, start)
    return numbers[at] if at < len(numbers) else end


_CHANGED_SHARE = 8
"""An index is read again when more than one in this number of its nodes has changed."""


class _NodeIndex:
    """The nodes that an index has read, and those that are visited in any case."""

    def __init__(self, passing: Callable[[int], DevicesByDriver | None]) -> None:
        """`passing` gives the devices of a node that count, or None if the node is visited in any case."""
        self._passing = passing
        self.restart()

    def restart(self) -> None:
        """Forget all nodes."""
        self.read = self._changed = 0
        """The number of nodes that were read, counted from the first."""
        self._always: list[int] = []
        """Nodes that are visited in any case."""

    def forget(self, number: int) -> None:
        """Visit a node in any case, because its devices changed. After many changes, read all nodes again."""
        if number >= self.read:
            return
        self._changed += 1
        if self._changed * _CHANGED_SHARE > self.read:
            self.restart()
        elif number not in self._always:
            insort(self._always, number)


# One attribute.


class _IndexKey(NamedTuple):
    """The inputs that determine an index."""

    earlier: tuple[str, ...]
    """Selectors that are checked before the one that pins."""
    name: PinnedName


_BLOCK = 64
"""Nodes that share one entry for their least and greatest value."""
_NumberRange = tuple[int, int]


class AttributeIndex(_NodeIndex):
    """The nodes that were read, by the value of one attribute."""

    def __init__(self, passing: Callable[[int], DevicesByDriver | None], name: PinnedName) -> None:
        self._name = name
        super().__init__(passing)

    def restart(self) -> None:
        """Forget all nodes."""
        super().restart()
        self._with_value = NodesByValue[Scalar]()
        self._ranges: list[_NumberRange | None] = []
        """The least and the greatest number of each node."""
        self._blocks: list[_NumberRange | None] = []

    def first(self, pin: Pin, start: int, reach: int) -> int:
        """The first node from `start` on that the pin does not rule out, or `reach` if none comes before."""
        for number in range(self.read, reach):
            self._add(number)
        found = min(reach, _first_of(self._always, start, reach))
        if pin.low is not None or pin.high is not None:
            return self._first_between(pin.low, pin.high, start, found)
        return min((self._with_value.first(value, start, found) for value in pin.values), default=found)

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
            self._always.append(number)
            return
        for value in values:
            self._with_value.add(value, number)

    def _values(self, number: int) -> set[Scalar] | None:
        """The values of a node's devices, or None if the node must be visited in any case."""
        groups = self._passing(number)
        if groups is None:
            return None
        domain, identifier, type_, only_driver, guarded = self._name
        qualified = f"{domain}/{identifier}"
        found: set[Scalar] = set()
        for driver, devices in groups:
            if only_driver not in (None, driver):
                continue
            # A name without a domain is in the driver's domain.
            name = identifier if domain == driver else qualified
            for device in devices:
                attribute = device.attributes.get(name)
                if attribute is None:
                    attribute = device.attributes.get(qualified)
                elif name != qualified and qualified in device.attributes:
                    return None
                if attribute is None:
                    if guarded:
                        continue
                    return None
                value = _scalar(attribute)
                if type(value) is not type_:
                    return None
                found.add(value)
        return found


def _may_meet(between: _NumberRange | None, low: int | None, high: int | None) -> bool:
    """Whether the range from the least to the greatest number overlaps that from `low` to `high`."""
    if between is None:
        return False
    return (low is None or between[1] >= low) and (high is None or between[0] <= high)


def _scalar(attribute: DeviceAttribute) -> Scalar | None:
    """The value that a selector sees, or None for lists, versions and malformed attributes."""
    if attribute.ints is not None or attribute.bools is not None:
        return None
    if attribute.strings is not None or attribute.versions is not None:
        return None
    if attribute.int_ is not None:
        return attribute.int_
    return attribute.string if attribute.bool_ is None else attribute.bool_


# Taints.


class TaintIndex(_NodeIndex):
    """The nodes that were read, by the first blocking taint of their devices."""

    def restart(self) -> None:
        """Forget all nodes."""
        super().restart()
        self._tainted: list[int] = []
        self._of_key = NodesByValue[str]()
        self._of_value = NodesByValue[tuple[str, str]]()

    def first(self, tolerations: Iterable[DeviceToleration], start: int, reach: int) -> int:
        """The first node from `start` on that taints do not rule out, or `reach` if none comes before it."""
        for number in range(self.read, reach):
            self._add(number)
        found = min(_first_of(self._always, start, reach), reach)
        for toleration in tolerations:
            # Each toleration looks only at nodes before the one that is found already.
            if not toleration.key:
                found = min(_first_of(self._tainted, start, found), found)
            elif toleration.operator in ("", "Equal"):
                found = self._of_value.first((toleration.key, toleration.value), start, found)
            else:
                found = self._of_key.first(toleration.key, start, found)
        return found

    def _add(self, number: int) -> None:
        self.read = number + 1
        groups = self._passing(number)
        if groups is None:
            self._always.append(number)
            return
        pairs: set[tuple[str, str]] = set()
        for _, devices in groups:
            for device in devices:
                taint = first_blocking_taint(device)
                # One device without a taint is enough: taints do not rule the node out.
                if taint is None:
                    self._always.append(number)
                    return
                pairs.add((taint.key, taint.value))
        if pairs:
            self._tainted.append(number)
        for pair in pairs:
            self._of_value.add(pair, number)
        for key in {key for key, _ in pairs}:
            self._of_key.add(key, number)


# All attributes, and the requests that pin some.


_INDEXES_KEPT = 16


class _Term(NamedTuple):
    """A function of an index that rules nodes out for one request."""

    of: AttributeIndex | TaintIndex
    first: Callable[[int, int], int]
    """The first node in a range of numbers, or the end of the range if there is none."""


_Terms = list[list[_Term]]
"""One term of each list must be met."""
_Key = TypeVar("_Key", bound=Hashable)
_Index = TypeVar("_Index", bound=_NodeIndex)


class AttributeIndexes:
    """The indexes of a fleet, for taints and for the attributes that recent selectors pinned."""

    def __init__(self, nodes: FleetNodes, selectors: SelectorCache) -> None:
        self._nodes = nodes
        self._selectors = selectors
        self._indexes: OrderedDict[_IndexKey, AttributeIndex] = OrderedDict()
        self._taints: OrderedDict[tuple[str, ...], TaintIndex] = OrderedDict()
        self._written = WrittenDevices(nodes)
        self._passing: dict[tuple[str, ...], PassingDevices] = {}
        self._tainted: bool | None = None
        """Whether a device has or had a taint. If it only had one, the index may rule out nothing."""

    def forget(self, number: int) -> None:
        """The devices of a node changed."""
        self._tainted = self._tainted or None
        self._written.forget(number)
        for index in self._indexes.values():
            index.forget(number)
        for taints in self._taints.values():
            taints.forget(number)

    def nodes_for(self, choice: Alternatives) -> Callable[[int], int] | None:
        """A function that takes a node and finds the first node from it on that may meet a request.

        It returns the number of nodes if there is none. The result is None if no node can be ruled out.
        """
        choices = [self._terms(ask) for ask in choice]
        if not choice or not all(choices):
            return None
        indexes = [term.of for terms in choices for either in terms for term in either]
        end = len(self._nodes.nodes)

        def first(start: int) -> int:
            # Nodes that were read already cost little. Reading more goes in steps, small ones first, so that
            # no alternative reads on if another is met soon.
            reach = min(max(start + 1, min(index.read for index in indexes)), end)
            step = 1
            while True:
                found = min(_first_in_all(terms, start, reach) for terms in choices)
                if found < reach or reach == end:
                    return found
                reach = min(reach + step, end)
                step = min(2 * step, _BLOCK)

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
                either = []
                for pin in pins:
                    key = _IndexKey(before, pin.name)
                    make = partial(AttributeIndex, self._passes(before).of, pin.name)
                    index = self._kept(self._indexes, key, make)
                    either.append(_Term(index, partial(index.first, pin)))
                found.append(either)
            earlier.append(program.expression)
        # A request with more selectors than its class's seldom comes again, so it is not worth an index.
        if ask.selectors or not self._nodes.heeds_taints:
            return found
        if self._tainted is None:
            self._tainted = self._nodes.index.tainted()
        if self._tainted:
            before = tuple(earlier)
            taints = self._kept(self._taints, before, partial(TaintIndex, self._passes(before).of))
            found.append([_Term(taints, partial(taints.first, ask.tolerations))])
        return found

    def _kept(self, indexes: OrderedDict[_Key, _Index], key: _Key, make: Callable[[], _Index]) -> _Index:
        """The index of a key. When too many are kept, the least recently used one is dropped."""
        index = indexes.get(key)
        if index is None:
            index = indexes[key] = make()
            if len(indexes) > _INDEXES_KEPT:
                indexes.popitem(last=False)
                # The devices that selectors let through are kept as long as an index reads them.
                used = {*self._taints, *(kept.earlier for kept in self._indexes)}
                self._passing = {before: self._passing[before] for before in self._passing.keys() & used}
        indexes.move_to_end(key)
        return index

    def _passes(self, earlier: tuple[str, ...]) -> PassingDevices:
        passing = self._passing.get(earlier)
        if passing is None:
            passing = self._passing[earlier] = PassingDevices(self._written, self._selectors, earlier)
        return passing


def _first_in_all(terms: _Terms, start: int, reach: int) -> int:
    """The first node from `start` on that no term rules out, or `reach` if none comes before it."""
    agreed = 0
    while agreed < len(terms) and start < reach:
        agreed = 0
        for either in terms:
            found = min(term.first(start, reach) for term in either)
            agreed += found == start
            start = found
    return min(start, reach)
