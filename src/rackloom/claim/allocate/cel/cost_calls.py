"""The worst-case cost of single calls, and the size of what they return, by upstream's tables."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rackloom.claim.allocate.cel import types as t
from rackloom.claim.allocate.cel.cost_sizes import NOTHING, ONE, UNKNOWN, Path, Span, device_size, fixed
from rackloom.claim.allocate.cel.nodes import Const, Node
from rackloom.claim.allocate.cel.types import Type
from rackloom.claim.allocate.cel.values import UINT64_MAX

_LIST = 10
_STRING, _REGEX = 0.1, 0.25


@dataclass(frozen=True, slots=True)
class Operand:
    """An argument as cost functions see it."""

    node: Node
    type: Type
    path: Path | None
    known: Span | None

    @property
    def size(self) -> Span:
        """Its size, as far as the expression itself tells."""
        return self.known if self.known is not None else UNKNOWN

    @property
    def full_size(self) -> Span:
        """Its size, where the limits of devices count too."""
        return self.known or device_size(self.path) or UNKNOWN


class Estimate(NamedTuple):
    """Cost of a call, and the size of its result if known."""

    cost: Span
    size: Span | None = None


Costing = Callable[[Sequence[Operand]], Estimate | None]


def costing_of(overload: str, function: str) -> Costing | None:
    """How a call is costed, by overload id or by function name; None for one unit."""
    return _CALLS.get(overload) or _FUNCTIONS.get(function)


def _traversal(of: Sequence[Operand]) -> Estimate:
    """One unit for each element, and for strings their length; a string itself is walked."""
    target = of[0]
    if not target.type.params:
        return Estimate(target.full_size.scaled(_STRING))
    element = target.type.params[0]
    each = ONE
    if element.kind in ("string", "bytes"):
        path = (*target.path, "@items") if target.path is not None else None
        each = each.plus((device_size(path) or UNKNOWN).scaled(_STRING))
    return Estimate(target.full_size.times(each))


def _includes(of: Sequence[Operand]) -> Estimate:
    return Estimate(Span(0, 48))


def _walk(factor: float, *, keeps_size: bool = False) -> Costing:
    def cost(of: Sequence[Operand]) -> Estimate:
        size = of[0].full_size
        return Estimate(size.scaled(factor), size if keeps_size else None)

    return cost


def _replace(of: Sequence[Operand]) -> Estimate:
    text, old, new = (one.full_size for one in of[:3])
    high, kept_high = _replacements(text.high, old.low, old.low == 0, new.high <= old.low)
    low, kept_low = _replacements(text.low, old.high, old.high == 0, old.high <= new.low)
    size = Span(low, high).times(new).plus(Span(kept_low, kept_high))
    return Estimate(text.scaled(2 * _STRING), size)


def _replacements(text: int, old: int, everywhere: bool, no_gain: bool) -> tuple[int, int]:
    """How often something is replaced, and how much of the text stays, for one end of the range."""
    if everywhere:
        return min(text + 1, UINT64_MAX), text
    if no_gain:
        return 0, text
    return math.ceil(float(text) / float(old)), 0


def _split(of: Sequence[Operand]) -> Estimate:
    size = of[0].full_size
    most = size.high
    if len(of) > 2 and isinstance(of[2].node, Const):
        most = of[2].node.value % (UINT64_MAX + 1)
    return Estimate(size.scaled(2 * _STRING), Span(0, most))


def _join(of: Sequence[Operand]) -> Estimate:
    items = of[0].full_size
    path = (*of[0].path, "@items") if of[0].path is not None else None
    size = NOTHING
    if of[0].type.params:
        size = items.times(device_size(path) or UNKNOWN)
    if len(of) > 1:
        gaps = Span(max(items.low - 1, 0), max(items.high - 1, 0))
        size = size.plus(of[1].full_size.times(gaps))
    return Estimate(size.scaled(_STRING), size)


def _regex(*, full: bool) -> Costing:
    def cost(of: Sequence[Operand]) -> Estimate | None:
        if len(of) < 2:
            return None
        text, pattern = (one.full_size if full else one.size for one in of[:2])
        spent = text.plus(ONE).scaled(_STRING).times(pattern.scaled(_REGEX))
        return Estimate(spent, Span(0, text.high) if full else None)

    return cost


def _contains(of: Sequence[Operand]) -> Estimate:
    return Estimate(of[0].size.scaled(_STRING).times(of[1].size.scaled(_STRING)))


def _shorter(of: Sequence[Operand]) -> Estimate:
    most = min(of[0].size.high, of[1].size.high)
    return Estimate(Span(min(most, 1), most).scaled(_STRING))


_ONE_UNIT = (t.QUANTITY, t.SEMVER, t.IP, t.CIDR)


def _equality(of: Sequence[Operand]) -> Estimate:
    type_ = of[0].type
    if type_ == of[1].type:
        if type_ in _ONE_UNIT:
            return Estimate(ONE)
        if type_ == t.FORMAT:
            return Estimate(Span(1, 64).scaled(_STRING))
        if type_ == t.URL:
            return Estimate(Span(1, of[1].known.high if of[1].known else 1).scaled(_STRING))
    return _shorter(of)


_ADDRESS = Span(4, 16)


def _contains_ip(of: Sequence[Operand]) -> Estimate:
    return Estimate(_ADDRESS.plus(_ADDRESS).scaled(_STRING))


def _contains_cidr(of: Sequence[Operand]) -> Estimate:
    return Estimate(_contains_ip(of).cost.plus(_ADDRESS.scaled(_STRING)).plus(ONE))


def _and_parse(contains: Callable[[Sequence[Operand]], Estimate]) -> Costing:
    return lambda of: Estimate(contains(of).cost.plus(of[1].full_size.scaled(_STRING)))


def _validate(of: Sequence[Operand]) -> Estimate:
    return Estimate(of[1].full_size.scaled(_STRING).scaled(128 * _REGEX))


def _argument(factor: float, at: int = 0) -> Costing:
    return lambda of: Estimate(of[at].size.scaled(factor))


def _resized(low: float, high: float, extra: int) -> Costing:
    """A walk whose result is between `low` and `high` times the size, plus `extra`."""

    def cost(of: Sequence[Operand]) -> Estimate:
        size = of[0].size
        result = Span(int(size.low * low) + extra, _wrapped(size.high * int(high) + extra))
        return Estimate(size.scaled(_STRING), result)

    return cost


def _wrapped(value: int) -> int:
    """Upstream multiplies these without a check for overflow."""
    return value % (UINT64_MAX + 1)


def _allocating(factor: float, size: Span) -> Estimate:
    return Estimate(size.scaled(factor).plus(fixed(1 + _LIST)), size)


def _as_uint(node: Node, otherwise: int) -> int:
    if isinstance(node, Const) and type(node.value) is int:
        return max(node.value, 0)
    return otherwise


def _slice(of: Sequence[Operand]) -> Estimate:
    size = of[0].full_size
    length = _as_uint(of[2].node, size.high) - _as_uint(of[1].node, 0)
    return _allocating(1, fixed(_wrapped(length)))


def _range(of: Sequence[Operand]) -> Estimate:
    return _allocating(1, fixed(_as_uint(of[0].node, UINT64_MAX)))


def _reverse(of: Sequence[Operand]) -> Estimate:
    return _allocating(1, of[0].full_size)


def _flatten(of: Sequence[Operand]) -> Estimate:
    depth = _as_uint(of[1].node, UINT64_MAX) if len(of) > 1 else 1
    return _allocating(float(depth), of[0].full_size)


def _self_compare(at: int, factor: float) -> Costing:
    def cost(of: Sequence[Operand]) -> Estimate:
        size = of[at].full_size
        return _allocating(factor, size.times(size))

    return cost


def _sets(factor: float) -> Costing:
    return lambda of: Estimate(of[0].full_size.times(of[1].full_size).scaled(factor).plus(ONE))


def _constant(of: Sequence[Operand]) -> Estimate:
    return Estimate(ONE)


_PLAIN = ("int", "uint", "double", "bool", "google.protobuf.Duration", "google.protobuf.Timestamp")
_TEXT = ("string", "bytes")

_CALLS: dict[str, Costing] = {
    "string_format": lambda of: Estimate(of[0].size.scaled(_STRING)),
    "string_to_bytes": _resized(1, 4, 0),
    "bytes_to_string": _resized(0.25, 1, 0),
    "strings_quote": _resized(1, 2, 2),
    "starts_with_string": _argument(_STRING, 1),
    "ends_with_string": _argument(_STRING, 1),
    "in_list": lambda of: Estimate(of[1].size.scaled(1)),
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
    "cidr_ip": _constant,
    "list_slice": _slice,
    "lists_range": _range,
    "list_reverse": _reverse,
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

_FUNCTIONS: dict[str, Costing] = {
    **dict.fromkeys(("isSorted", "sum", "max", "min", "indexOf", "lastIndexOf"), _traversal),
    "includes": _includes,
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
    "validate": _validate,
}
