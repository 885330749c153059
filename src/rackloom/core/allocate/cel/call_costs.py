"""The cost of every call, estimated without a device and charged at run time, by upstream's tables.

Upstream has two tables: the estimate, by which the API server admits an expression, and the charge, which
counts against the limit of one evaluation. `CALL_COSTS` has both of a function side by side. Mostly they
are one formula over the sizes of the operands (`_by_sizes`): the estimate applies it to ranges of sizes,
the charge to exact ones. If upstream's tables differ, the rule has two functions.

A `CostRange` is a pair of unsigned 64-bit numbers. Addition, multiplication and scaling saturate, as
upstream has it, except where upstream itself wraps (`_wrapped`). Sizes of unknown origin reach up to
2**64 - 1. Sizes of parts of a device are bounded by the API's limits: 32 domains and 32 names below
each domain, 64 characters per attribute (`device_size`).

A call is looked up by overload id, then by function name. A call without an entry costs one unit. String
functions cost 0.1 per character, regular expressions the product of text and pattern, functions that
build a list 11 units and more.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from rackloom.core.allocate.cel import types
from rackloom.core.allocate.cel.library.networks import CIDR, IP
from rackloom.core.allocate.cel.syntax import CelNode, Const
from rackloom.core.allocate.cel.types import CelType
from rackloom.core.allocate.cel.values import TYPE_NAMES, UINT64_MAX, OptionalValue

# Ranges, sizes, and the size limits of a device.


def _saturated(value: float) -> int:
    return UINT64_MAX if value >= UINT64_MAX else int(value)


class CostRange(NamedTuple):
    """From `low` to `high`, both included."""

    low: int
    high: int

    def plus(self, other: "CostRange") -> "CostRange":
        """Sum of both ends."""
        low, high = self.low + other.low, self.high + other.high
        return CostRange(min(low, UINT64_MAX), min(high, UINT64_MAX))

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
    """Sizes of the keys and values in a list or map."""

    kind: str
    key: CostRange
    value: CostRange

    def union(self, other: "ElementSizes | None") -> "ElementSizes | None":
        """Sizes that cover the contents of either container, if both are known."""
        if other is None:
            return None
        return ElementSizes(self.kind, self.key.union(other.key), self.value.union(other.value))


DevicePath = tuple[str, ...]


class SizeLimit(msgspec.Struct, frozen=True):
    """The largest size of a part of a device, with the limits of the parts below it."""

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
    """The size of the value at a path, by the limits of the API."""
    if not path or path[0] != "device":
        return None
    here = _DEVICE
    for step in path[1:]:
        if step in ("@items", "@values"):
            below = here.element
        elif step == "@keys":
            below = here.key
        else:
            # Only the names of a domain may be any: a device has no other field than these.
            below = (here.fields or {}).get(step) or (here.element if here.any_field else None)
        if below is None:
            return None
        here = below
    return CostRange(0, here.size)


# The operands of a call, as ranges and as values.


_LIST_CALL = 11
"""A call that builds a list: one for the call, ten for the list."""
_MESSAGE = 40
"""Building a message, beside the values of its fields."""
_STRING, _REGEX = 0.1, 0.25
"""Cost of one character that is walked over, and of one character of a pattern."""
FORMAT_REGEX_SIZE = 128


class CostOperand(msgspec.Struct, frozen=True):
    """An argument as estimates see it."""

    node: CelNode
    type: CelType
    path: DevicePath | None
    known: CostRange | None

    @property
    def size(self) -> CostRange:
        """Its size, if the expression itself determines it."""
        return self.known if self.known is not None else UNKNOWN_SIZE

    @property
    def full_size(self) -> CostRange:
        """Its size. The limits of devices count too."""
        return self.known or device_size(self.path) or UNKNOWN_SIZE

    @property
    def item_size(self) -> CostRange:
        """The size of its elements, by the limits of devices."""
        return (self.path is not None and device_size((*self.path, "@items"))) or UNKNOWN_SIZE


class CallEstimate(NamedTuple):
    """Cost of a call, and the size of its result if known."""

    cost: CostRange
    size: CostRange | None = None


Operands = Sequence[CostOperand]
CallValues = Sequence[Any]
Estimate = Callable[[Operands], CallEstimate | None]
"""None: one unit."""
Charge = Callable[[CallValues, Any], int]
"""The cost of a call with these values and this result."""


class CallCost(NamedTuple):
    """Both prices of a call."""

    estimate: Estimate | None
    charge: Charge | None


def size_of_value(value: Any) -> int:
    """Length of strings, lists, maps and addresses. The size of any other value is one."""
    if isinstance(value, str | bytes | list | dict):
        return len(value)
    if isinstance(value, IP | CIDR):
        return value.size()
    return 1


def _size_inside(value: Any) -> int:
    """The size of a value, or of the value in an optional."""
    present = isinstance(value, OptionalValue) and value.present
    return size_of_value(value.value if present else value)


def estimate_of(overload: str, function: str) -> Estimate | None:
    """The estimate of a call's cost, or None if it costs one unit."""
    by_overload, by_function = CALL_COSTS.get(overload), CALL_COSTS.get(function)
    return (by_overload and by_overload.estimate) or (by_function and by_function.estimate)


def charge_of(overload: str, function: str) -> Charge:
    """The run-time charge of a call. `overload` is empty if run time chooses it."""
    by_overload, by_function = CALL_COSTS.get(overload), CALL_COSTS.get(function)
    charge = (by_overload and by_overload.charge) or (by_function and by_function.charge)
    return charge or (lambda args, result: 1)


# Formulas over sizes, the same before and at run time.


Formula = Callable[..., int]
"""From sizes to the cost, without saturation at 64 bits. The cost does not shrink when a size grows."""


def _by_sizes(
    formula: Formula,
    count: int,
    *,
    full: bool = True,
    size: Callable[[Operands], CostRange] | None = None,
) -> CallCost:
    """The cost by a formula over the sizes of the first `count` operands. `size` is that of the result.

    Without `full`, the estimate ignores the limits of devices, as upstream does.
    """

    def estimate(of: Operands) -> CallEstimate | None:
        if len(of) < count:
            return None
        sizes = [operand.full_size if full else operand.size for operand in of[:count]]
        return CallEstimate(_range_by(formula, *sizes), size and size(of))

    return CallCost(estimate, lambda args, result: formula(*map(size_of_value, args[:count])))


def _range_by(formula: Formula, *sizes: CostRange) -> CostRange:
    lows, highs = zip(*sizes, strict=True)
    return CostRange(_saturated(formula(*lows)), _saturated(formula(*highs)))


def _walk(factor: float) -> Formula:
    return lambda size: _scaled(size, factor)


def _search(text: int, pattern: int) -> int:
    return _scaled(text + 1, _STRING) * _scaled(pattern, _REGEX)


def _estimate_comparison(of: Operands) -> CallEstimate:
    """Comparison goes as far as the shorter operand."""
    most = min(of[0].size.high, of[1].size.high)
    return CallEstimate(CostRange(min(most, 1), most).scaled(_STRING))


def _charge_comparison(args: CallValues, result: Any) -> int:
    return _scaled(min(map(_size_inside, args)), _STRING)


def _product(factor: int) -> Formula:
    return lambda first, second: _scaled(first * second, factor) + 1


def _building(size: CostRange) -> CostRange:
    # Upstream multiplies by 1.0, which rounds sizes beyond 53 bits.
    return size.scaled(1).plus(exactly(_LIST_CALL))


def _text_size(of: Operands) -> CostRange:
    return of[0].full_size


# Estimates and charges that upstream computes in two ways.


def _resized(low: float, high: float, extra: int) -> Callable[[Operands], CostRange]:
    """A result between `low` and `high` times the size of the first operand, plus `extra`."""

    def size(of: Operands) -> CostRange:
        whole = of[0].size
        return CostRange(int(whole.low * low) + extra, _wrapped(whole.high * int(high) + extra))

    return size


def _wrapped(value: int) -> int:
    """Upstream multiplies these without a check for overflow."""
    return value % (UINT64_MAX + 1)


def _estimate_traversal(of: Operands) -> CallEstimate:
    """One unit for each element, and for strings their length. A string itself is walked."""
    target = of[0]
    if not target.type.params:
        return CallEstimate(target.full_size.scaled(_STRING))
    is_text = target.type.params[0].kind in ("string", "bytes")
    each = ONE.plus(target.item_size.scaled(_STRING)) if is_text else ONE
    return CallEstimate(target.full_size.times(each))


def _tree_cost(value: Any) -> int:
    if isinstance(value, str):
        return int(len(value.encode()) * _STRING)
    if isinstance(value, bytes):
        return int(len(value) * _STRING)
    if isinstance(value, list):
        return sum(map(_tree_cost, value))
    if isinstance(value, dict):
        return sum(_tree_cost(key) + _tree_cost(item) for key, item in value.items())
    return 1


def _replaced_size(of: Operands) -> CostRange:
    text, old, new = (operand.full_size for operand in of[:3])
    high, kept_high = _replacements(text.high, old.low, old.low == 0, new.high <= old.low)
    low, kept_low = _replacements(text.low, old.high, old.high == 0, old.high <= new.low)
    return CostRange(low, high).times(new).plus(CostRange(kept_low, kept_high))


def _replacements(text: int, old: int, everywhere: bool, no_gain: bool) -> tuple[int, int]:
    """The number of replacements, and the size of the remaining text, for one end of the range."""
    if everywhere:
        return min(text + 1, UINT64_MAX), text
    if no_gain:
        return 0, text
    return math.ceil(float(text) / float(old)), 0


def _split_size(of: Operands) -> CostRange:
    limited = len(of) > 2 and isinstance(of[2].node, Const)
    return CostRange(0, _wrapped(of[2].node.value) if limited else of[0].full_size.high)  # type: ignore[union-attr]


def _estimate_join(of: Operands) -> CallEstimate:
    items = of[0].full_size
    size = items.times(of[0].item_size) if of[0].type.params else ZERO
    if len(of) > 1:
        gaps = CostRange(max(items.low - 1, 0), max(items.high - 1, 0))
        size = size.plus(of[1].full_size.times(gaps))
    return CallEstimate(size.scaled(_STRING), size)


_ONE_UNIT = (types.QUANTITY, types.SEMVER, types.IP, types.CIDR)
_ONE_UNIT_NAMES = {type_.name for type_ in (*_ONE_UNIT, types.URL, types.FORMAT)}


def _estimate_equality(of: Operands) -> CallEstimate:
    type_ = of[0].type
    if type_ == of[1].type:
        if type_ in _ONE_UNIT:
            return CallEstimate(ONE)
        if type_ == types.FORMAT:
            return CallEstimate(CostRange(1, 64).scaled(_STRING))
        if type_ == types.URL:
            return CallEstimate(CostRange(1, of[1].known.high if of[1].known else 1).scaled(_STRING))
    return _estimate_comparison(of)


def _charge_equality(args: CallValues, result: Any) -> int:
    return 1 if TYPE_NAMES.get(type(args[0])) in _ONE_UNIT_NAMES else _charge_comparison(args, result)


_ADDRESS = CostRange(4, 16)


def _address_search(*, whole_range: bool, parsed: bool) -> CallCost:
    """Whether a range holds an address or another range, which a `parsed` operand writes as a string."""

    def formula(network: int, text: int) -> int:
        cost = _scaled(2 * network, _STRING)
        if whole_range:
            cost += _scaled(network, _STRING) + 1
        return cost + _scaled(text, _STRING) if parsed else cost

    return CallCost(
        lambda of: CallEstimate(_range_by(formula, _ADDRESS, of[1].full_size)),
        lambda args, result: formula(*map(size_of_value, args[:2])),
    )


def _list_of_size(size: Callable[[Operands], CostRange]) -> CallCost:
    """A call that builds a list. The charge counts the list that was built."""

    def estimate(of: Operands) -> CallEstimate:
        built = size(of)
        return CallEstimate(_building(built), built)

    return CallCost(estimate, lambda args, result: size_of_value(result) + _LIST_CALL)


def _as_uint(node: CelNode, otherwise: int) -> int:
    return max(node.value, 0) if isinstance(node, Const) and type(node.value) is int else otherwise


def _slice_size(of: Operands) -> CostRange:
    length = _as_uint(of[2].node, of[0].full_size.high) - _as_uint(of[1].node, 0)
    return exactly(_wrapped(length))


def _estimate_flatten(of: Operands) -> CallEstimate:
    depth = _as_uint(of[1].node, UINT64_MAX) if len(of) > 1 else 1
    size = of[0].full_size
    return CallEstimate(_building(size.scaled(float(depth))), size)


def _charge_flatten(args: CallValues, result: Any) -> int:
    depth = args[1] if len(args) == 2 and isinstance(args[1], int) else 1
    return int(size_of_value(args[0]) * depth) + _LIST_CALL


def _pairwise(at: int, factor: float) -> CallCost:
    """Every element is compared with every other one of the list at a position."""

    def estimate(of: Operands) -> CallEstimate:
        pairs = of[at].full_size.times(of[at].full_size)
        return CallEstimate(_building(pairs.scaled(factor)), pairs)

    def charge(args: CallValues, result: Any) -> int:
        items = args[at] if isinstance(args[at], list) else []
        walked = _STRING if items and isinstance(items[0], str | bytes) else 0
        return int(len(items) ** 2 * (2 + walked)) + _LIST_CALL

    return CallCost(estimate, charge)


def _estimate_validate(of: Operands) -> CallEstimate:
    return CallEstimate(of[1].full_size.scaled(_STRING).scaled(FORMAT_REGEX_SIZE * _REGEX))


def _charge_validate(args: CallValues, result: Any) -> int:
    limit = getattr(args[0], "max_regex_size", FORMAT_REGEX_SIZE)
    return math.ceil((1 + size_of_value(args[1])) * _STRING) * math.ceil(limit * _REGEX)


# The table.


_WALK = _by_sizes(_walk(_STRING), 1)
_EDIT = _by_sizes(_walk(_STRING), 1, size=_text_size)
_LIST_TYPES = ("int", "uint", "double", "bool", "google.protobuf.Duration", "google.protobuf.Timestamp")
_ORDERS = ("less", "less_equals", "greater", "greater_equals")

CALL_COSTS: dict[str, CallCost] = {
    # By overload.
    types.NEW_MESSAGE: CallCost(lambda of: CallEstimate(exactly(_MESSAGE)), lambda args, result: _MESSAGE),
    "string_format": _by_sizes(_walk(_STRING), 1, full=False),
    "string_to_bytes": _by_sizes(_walk(_STRING), 1, full=False, size=_resized(1, 4, 0)),
    "bytes_to_string": _by_sizes(_walk(_STRING), 1, full=False, size=_resized(0.25, 1, 0)),
    "strings_quote": _by_sizes(_walk(_STRING), 1, full=False, size=_resized(1, 2, 2)),
    # Upstream estimates these by the text that is looked for, and charges for the text that is searched.
    **dict.fromkeys(
        ("starts_with_string", "ends_with_string"),
        CallCost(lambda of: CallEstimate(of[1].size.scaled(_STRING)), _WALK.charge),
    ),
    "in_list": _by_sizes(lambda item, items: _scaled(items, 1), 2, full=False),
    "matches_string": _by_sizes(_search, 2, full=False),
    "contains_string": _by_sizes(
        lambda text, part: _scaled(text, _STRING) * _scaled(part, _STRING), 2, full=False
    ),
    **{
        f"{order}_{kind}": CallCost(_estimate_comparison, _charge_comparison)
        for order in _ORDERS
        for kind in ("string", "bytes")
    },
    "not_equals": CallCost(_estimate_comparison, None),
    "equals": CallCost(_estimate_equality, None),
    **dict.fromkeys(
        ("add_string", "add_bytes"),
        CallCost(None, lambda args, result: _scaled(sum(map(_size_inside, args)), _STRING)),
    ),
    "cidr_contains_ip_string": _address_search(whole_range=False, parsed=True),
    "cidr_contains_cidr_string": _address_search(whole_range=True, parsed=True),
    "cidr_ip": CallCost(lambda of: CallEstimate(ONE), lambda args, result: 1),
    "list_slice": _list_of_size(_slice_size),
    "lists_range": _list_of_size(lambda of: exactly(_as_uint(of[0].node, UINT64_MAX))),
    "list_reverse": _list_of_size(_text_size),
    **dict.fromkeys(("list_flatten", "list_flatten_int"), CallCost(_estimate_flatten, _charge_flatten)),
    "list_distinct": _pairwise(0, 2),
    **{
        f"list_{kind}_{sort}": _pairwise(at, 2 if kind in _LIST_TYPES else 2.1)
        for kind in (*_LIST_TYPES, "string", "bytes")
        for sort, at in (("sort", 0), ("sortByAssociatedKeys", 1))
    },
    "list_sets_contains_list": _by_sizes(_product(1), 2),
    "list_sets_intersects_list": _by_sizes(_product(1), 2),
    "list_sets_equivalent_list": _by_sizes(_product(2), 2),
    # By function.
    "_==_": CallCost(None, _charge_equality),
    "_!=_": CallCost(None, _charge_comparison),
    **dict.fromkeys(
        ("isSorted", "sum", "max", "min", "indexOf", "lastIndexOf"),
        CallCost(_estimate_traversal, lambda args, result: _tree_cost(args[0])),
    ),
    "includes": CallCost(lambda of: CallEstimate(CostRange(0, 48)), None),
    **dict.fromkeys(("url", "lowerAscii", "upperAscii", "substring", "trim"), _EDIT),
    "replace": _by_sizes(_walk(2 * _STRING), 1, size=_replaced_size),
    "split": _by_sizes(_walk(2 * _STRING), 1, size=_split_size),
    "join": CallCost(_estimate_join, lambda args, result: _scaled(size_of_value(result), 2 * _STRING)),
    **dict.fromkeys(
        ("find", "findAll"), _by_sizes(_search, 2, size=lambda of: CostRange(0, of[0].full_size.high))
    ),
    **dict.fromkeys(("ip", "cidr", "isIP", "isCIDR", "quantity", "isQuantity", "semver", "isSemver"), _WALK),
    "ip.isCanonical": _by_sizes(_walk(2 * _STRING), 1),
    "containsIP": _address_search(whole_range=False, parsed=False),
    "containsCIDR": _address_search(whole_range=True, parsed=False),
    "validate": CallCost(_estimate_validate, _charge_validate),
}
"""By overload id, or by name of the function. No overload has the id of one of these functions."""
