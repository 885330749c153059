"""Static cost of single calls and the size of their results, as ranges, by upstream's tables.

A `CostRange` is a pair of unsigned 64-bit numbers. Addition, multiplication and scaling saturate, as
upstream has it, except where upstream itself wraps (`_wrapped`). Sizes of unknown origin reach up to
2**64 - 1. Sizes of parts of a device are bounded by the API's limits: 32 domains and 32 names below
each domain, 64 characters per attribute (`device_size`).

`cost_function_of` finds the entry of a call by overload id or by function name. A call without an entry
costs one unit. String functions cost 0.1 per character, regular expressions the product of text and
pattern, functions that build a list 11 units and more.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rackloom.core.allocate.cel import types
from rackloom.core.allocate.cel.syntax import CelNode, Const
from rackloom.core.allocate.cel.types import CelType
from rackloom.core.allocate.cel.values import UINT64_MAX

# Ranges, sizes, and the size limits of a device.


def _saturated(value: float) -> int:
    return UINT64_MAX if value >= UINT64_MAX else int(value)


class CostRange(NamedTuple):
    """From `low` to `high`, both included."""

    low: int
    high: int

    def plus(self, other: "CostRange") -> "CostRange":
        """Sum of both ends."""
        return CostRange(_saturated(self.low + other.low), _saturated(self.high + other.high))

    def times(self, other: "CostRange") -> "CostRange":
        """Product of both ends."""
        return CostRange(_saturated(self.low * other.low), _saturated(self.high * other.high))

    def scaled(self, factor: float) -> "CostRange":
        """Times a factor, rounded up."""
        return CostRange(_scaled(self.low, factor), _scaled(self.high, factor))

    def union(self, other: "CostRange") -> "CostRange":
        """The narrowest span that covers both."""
        return CostRange(min(self.low, other.low), max(self.high, other.high))


def _scaled(value: int, factor: float) -> int:
    product = float(value) * factor
    return UINT64_MAX if product >= 2.0**64 else math.ceil(product)


def exactly(value: int) -> CostRange:
    """Exactly `value`."""
    return CostRange(value, value)


UNKNOWN_SIZE = CostRange(0, UINT64_MAX)
ZERO, ONE = exactly(0), exactly(1)
WIDEST = CostRange(UINT64_MAX, 0)
"""The neutral element of union."""


class ElementSizes(NamedTuple):
    """Sizes of what a list or map contains."""

    kind: str
    key: CostRange
    value: CostRange

    def union(self, other: "ElementSizes | None") -> "ElementSizes | None":
        """Sizes of what may come from either container, if both are known."""
        if other is None:
            return None
        return ElementSizes(self.kind, self.key.union(other.key), self.value.union(other.value))


DevicePath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """The largest size of a part of a device, and where its parts are."""

    size: int
    fields: Mapping[str, "SizeLimit"] | None = None
    key: "SizeLimit | None" = None
    element: "SizeLimit | None" = None
    any_field: bool = False


_ATTRIBUTE = SizeLimit(64)
_QUANTITY = SizeLimit(0)
_NAME, _DOMAIN = SizeLimit(32), SizeLimit(63)
_ATTRIBUTES = SizeLimit(32, key=_DOMAIN, element=SizeLimit(32, key=_NAME, element=_ATTRIBUTE, any_field=True))
_CAPACITIES = SizeLimit(32, key=_DOMAIN, element=SizeLimit(32, key=_NAME, element=_QUANTITY))
_DEVICE = SizeLimit(
    0,
    {"driver": SizeLimit(63), "allowMultipleAllocations": SizeLimit(1)}
    | {"attributes": _ATTRIBUTES, "capacity": _CAPACITIES},
)


def device_size(path: DevicePath | None) -> CostRange | None:
    """The size of what a path leads to, by the limits of the API."""
    if not path or path[0] != "device":
        return None
    here: SizeLimit | None = _DEVICE
    for step in path[1:]:
        here = _limit_below(here, step)
        if here is None:
            return None
    return CostRange(0, here.size) if here is not None else None


def _limit_below(here: SizeLimit | None, step: str) -> SizeLimit | None:
    if here is None:
        return None
    if step in ("@items", "@values"):
        return here.element
    if step == "@keys":
        return here.key
    return (here.fields or {}).get(step) or (here.element if here.any_field else None)


# The cost table of calls.


_LIST = 10
_STRING, _REGEX = 0.1, 0.25


@dataclass(frozen=True, slots=True)
class CostOperand:
    """An argument as cost functions see it."""

    node: CelNode
    type: CelType
    path: DevicePath | None
    known: CostRange | None

    @property
    def size(self) -> CostRange:
        """Its size, as far as the expression itself tells."""
        return self.known if self.known is not None else UNKNOWN_SIZE

    @property
    def full_size(self) -> CostRange:
        """Its size, where the limits of devices count too."""
        return self.known or device_size(self.path) or UNKNOWN_SIZE


class CallEstimate(NamedTuple):
    """Cost of a call, and the size of its result if known."""

    cost: CostRange
    size: CostRange | None = None


CostFunction = Callable[[Sequence[CostOperand]], CallEstimate | None]


def cost_function_of(overload: str, function: str) -> CostFunction | None:
    """How a call is costed, by overload id or by function name; None for one unit."""
    return _BY_OVERLOAD.get(overload) or _BY_FUNCTION.get(function)


def _traversal(of: Sequence[CostOperand]) -> CallEstimate:
    """One unit for each element, and for strings their length; a string itself is walked."""
    target = of[0]
    if not target.type.params:
        return CallEstimate(target.full_size.scaled(_STRING))
    element = target.type.params[0]
    each = ONE
    if element.kind in ("string", "bytes"):
        path = (*target.path, "@items") if target.path is not None else None
        each = each.plus((device_size(path) or UNKNOWN_SIZE).scaled(_STRING))
    return CallEstimate(target.full_size.times(each))


def _walk(factor: float, *, keeps_size: bool = False) -> CostFunction:
    def cost(of: Sequence[CostOperand]) -> CallEstimate:
        size = of[0].full_size
        return CallEstimate(size.scaled(factor), size if keeps_size else None)

    return cost


def _replace(of: Sequence[CostOperand]) -> CallEstimate:
    text, old, new = (operand.full_size for operand in of[:3])
    high, kept_high = _replacements(text.high, old.low, old.low == 0, new.high <= old.low)
    low, kept_low = _replacements(text.low, old.high, old.high == 0, old.high <= new.low)
    size = CostRange(low, high).times(new).plus(CostRange(kept_low, kept_high))
    return CallEstimate(text.scaled(2 * _STRING), size)


def _replacements(text: int, old: int, everywhere: bool, no_gain: bool) -> tuple[int, int]:
    """How often something is replaced, and how much of the text stays, for one end of the range."""
    if everywhere:
        return min(text + 1, UINT64_MAX), text
    if no_gain:
        return 0, text
    return math.ceil(float(text) / float(old)), 0


def _split(of: Sequence[CostOperand]) -> CallEstimate:
    size = of[0].full_size
    most = size.high
    if len(of) > 2 and isinstance(of[2].node, Const):
        most = of[2].node.value % (UINT64_MAX + 1)
    return CallEstimate(size.scaled(2 * _STRING), CostRange(0, most))


def _join(of: Sequence[CostOperand]) -> CallEstimate:
    items = of[0].full_size
    path = (*of[0].path, "@items") if of[0].path is not None else None
    size = items.times(device_size(path) or UNKNOWN_SIZE) if of[0].type.params else ZERO
    if len(of) > 1:
        gaps = CostRange(max(items.low - 1, 0), max(items.high - 1, 0))
        size = size.plus(of[1].full_size.times(gaps))
    return CallEstimate(size.scaled(_STRING), size)


def _regex(*, full: bool) -> CostFunction:
    def cost(of: Sequence[CostOperand]) -> CallEstimate | None:
        if len(of) < 2:
            return None
        text, pattern = (operand.full_size if full else operand.size for operand in of[:2])
        spent = text.plus(ONE).scaled(_STRING).times(pattern.scaled(_REGEX))
        return CallEstimate(spent, CostRange(0, text.high) if full else None)

    return cost


def _contains(of: Sequence[CostOperand]) -> CallEstimate:
    return CallEstimate(of[0].size.scaled(_STRING).times(of[1].size.scaled(_STRING)))


def _shorter(of: Sequence[CostOperand]) -> CallEstimate:
    most = min(of[0].size.high, of[1].size.high)
    return CallEstimate(CostRange(min(most, 1), most).scaled(_STRING))


_ONE_UNIT = (types.QUANTITY, types.SEMVER, types.IP, types.CIDR)


def _equality(of: Sequence[CostOperand]) -> CallEstimate:
    type_ = of[0].type
    if type_ == of[1].type:
        if type_ in _ONE_UNIT:
            return CallEstimate(ONE)
        if type_ == types.FORMAT:
            return CallEstimate(CostRange(1, 64).scaled(_STRING))
        if type_ == types.URL:
            return CallEstimate(CostRange(1, of[1].known.high if of[1].known else 1).scaled(_STRING))
    return _shorter(of)


_ADDRESS = CostRange(4, 16)


def _contains_ip(of: Sequence[CostOperand]) -> CallEstimate:
    return CallEstimate(_ADDRESS.plus(_ADDRESS).scaled(_STRING))


def _contains_cidr(of: Sequence[CostOperand]) -> CallEstimate:
    return CallEstimate(_contains_ip(of).cost.plus(_ADDRESS.scaled(_STRING)).plus(ONE))


def _and_parse(contains: Callable[[Sequence[CostOperand]], CallEstimate]) -> CostFunction:
    return lambda of: CallEstimate(contains(of).cost.plus(of[1].full_size.scaled(_STRING)))


def _argument(factor: float, at: int) -> CostFunction:
    return lambda of: CallEstimate(of[at].size.scaled(factor))


def _resized(low: float, high: float, extra: int) -> CostFunction:
    """A walk whose result is between `low` and `high` times the size, plus `extra`."""

    def cost(of: Sequence[CostOperand]) -> CallEstimate:
        size = of[0].size
        result = CostRange(int(size.low * low) + extra, _wrapped(size.high * int(high) + extra))
        return CallEstimate(size.scaled(_STRING), result)

    return cost


def _wrapped(value: int) -> int:
    """Upstream multiplies these without a check for overflow."""
    return value % (UINT64_MAX + 1)


def _allocating(factor: float, size: CostRange) -> CallEstimate:
    return CallEstimate(size.scaled(factor).plus(exactly(1 + _LIST)), size)


def _as_uint(node: CelNode, otherwise: int) -> int:
    return max(node.value, 0) if isinstance(node, Const) and type(node.value) is int else otherwise


def _slice(of: Sequence[CostOperand]) -> CallEstimate:
    size = of[0].full_size
    length = _as_uint(of[2].node, size.high) - _as_uint(of[1].node, 0)
    return _allocating(1, exactly(_wrapped(length)))


def _flatten(of: Sequence[CostOperand]) -> CallEstimate:
    depth = _as_uint(of[1].node, UINT64_MAX) if len(of) > 1 else 1
    return _allocating(float(depth), of[0].full_size)


def _self_compare(at: int, factor: float) -> CostFunction:
    def cost(of: Sequence[CostOperand]) -> CallEstimate:
        size = of[at].full_size
        return _allocating(factor, size.times(size))

    return cost


def _sets(factor: float) -> CostFunction:
    return lambda of: CallEstimate(of[0].full_size.times(of[1].full_size).scaled(factor).plus(ONE))


_PLAIN = ("int", "uint", "double", "bool", "google.protobuf.Duration", "google.protobuf.Timestamp")
_TEXT = ("string", "bytes")

_BY_OVERLOAD: dict[str, CostFunction] = {
    "string_format": _argument(_STRING, 0),
    "string_to_bytes": _resized(1, 4, 0),
    "bytes_to_string": _resized(0.25, 1, 0),
    "strings_quote": _resized(1, 2, 2),
    "starts_with_string": _argument(_STRING, 1),
    "ends_with_string": _argument(_STRING, 1),
    "in_list": _argument(1, 1),
    "matches_string": _regex(full=False),
    "contains_string": _contains,
    **{
        f"{order}_{kind}": _shorter
        for order in ("less", "less_equals", "greater", "greater_equals")
        for kind in _TEXT
    },
    "not_equals": _shorter,
    "equals": _equality,
    "cidr_contains_ip_string": _and_parse(_contains_ip),
    "cidr_contains_cidr_string": _and_parse(_contains_cidr),
    "cidr_ip": lambda of: CallEstimate(ONE),
    "list_slice": _slice,
    "lists_range": lambda of: _allocating(1, exactly(_as_uint(of[0].node, UINT64_MAX))),
    "list_reverse": lambda of: _allocating(1, of[0].full_size),
    "list_flatten": _flatten,
    "list_flatten_int": _flatten,
    "list_distinct": _self_compare(0, 2),
    **{f"list_{kind}_sort": _self_compare(0, 2) for kind in _PLAIN},
    **{f"list_{kind}_sort": _self_compare(0, 2.1) for kind in _TEXT},
    **{f"list_{kind}_sortByAssociatedKeys": _self_compare(1, 2) for kind in _PLAIN},
    **{f"list_{kind}_sortByAssociatedKeys": _self_compare(1, 2.1) for kind in _TEXT},
    "list_sets_contains_list": _sets(1),
    "list_sets_intersects_list": _sets(1),
    "list_sets_equivalent_list": _sets(2),
}

_BY_FUNCTION: dict[str, CostFunction] = {
    **dict.fromkeys(("isSorted", "sum", "max", "min", "indexOf", "lastIndexOf"), _traversal),
    "includes": lambda of: CallEstimate(CostRange(0, 48)),
    **dict.fromkeys(
        ("url", "lowerAscii", "upperAscii", "substring", "trim"), _walk(_STRING, keeps_size=True)
    ),
    "replace": _replace,
    "split": _split,
    "join": _join,
    **dict.fromkeys(("find", "findAll"), _regex(full=True)),
    **dict.fromkeys(
        ("ip", "cidr", "isIP", "isCIDR", "quantity", "isQuantity", "semver", "isSemver"), _walk(_STRING)
    ),
    "ip.isCanonical": _walk(2 * _STRING),
    "containsIP": _contains_ip,
    "containsCIDR": _contains_cidr,
    "validate": lambda of: CallEstimate(of[1].full_size.scaled(_STRING).scaled(128 * _REGEX)),
}
