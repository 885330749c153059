"""What one call costs at run time: by upstream's tables most cost one unit, some grow with operands."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from rackloom.claim.allocate.cel.library.networks import CIDR, IP
from rackloom.claim.allocate.cel.values import TYPE_NAMES, OptionalValue

_STRING = 0.1
"""Cost of one character that is walked over."""
_REGEX = 0.25
_LIST_CALL = 11
"""A call that builds a list: one for the call, ten for the list."""
FORMAT_REGEX_SIZE = 128

Values = Sequence[Any]


def size(value: Any) -> int:
    """Length of strings, lists, maps and addresses; one for everything else."""
    if isinstance(value, str | bytes | list | dict):
        return len(value)
    if isinstance(value, IP | CIDR):
        return value.size()
    return 1


def call_cost(function: str, overload: str, args: Values, result: Any) -> int:
    """Cost of calling `function` with these values; `overload` is its id, or empty if left to run time."""
    by_overload = _BY_OVERLOAD.get(overload)
    if by_overload is not None:
        return by_overload(args, result)
    by_function = _BY_FUNCTION.get(function)
    return by_function(args, result) if by_function is not None else 1


def _walk(factor: float, *, of_result: bool = False) -> Callable[[Values, Any], int]:
    return lambda args, result: math.ceil(size(result if of_result else args[0]) * factor)


def _shorter(args: Values, result: Any) -> int:
    """Comparison goes as far as the shorter operand."""
    return math.ceil(min(map(_optional_size, args)) * _STRING)


def _optional_size(value: Any) -> int:
    return size(value.value) if isinstance(value, OptionalValue) and value.present else size(value)


_ONE_UNIT_TYPES = frozenset(
    (
        "kubernetes.Quantity",
        "kubernetes.Semver",
        "kubernetes.URL",
        "kubernetes.NamedFormat",
        "net.IP",
        "net.CIDR",
    )
)


def _equality(args: Values, result: Any) -> int:
    return 1 if TYPE_NAMES.get(type(args[0])) in _ONE_UNIT_TYPES else _shorter(args, result)


def _concatenation(args: Values, result: Any) -> int:
    return math.ceil(sum(map(_optional_size, args)) * _STRING)


def _regex(args: Values, result: Any) -> int:
    return math.ceil((1 + size(args[0])) * _STRING) * math.ceil(size(args[1]) * _REGEX)


def _substring_search(args: Values, result: Any) -> int:
    return math.ceil(size(args[0]) * _STRING) * math.ceil(size(args[1]) * _STRING)


def _traversal(args: Values, result: Any) -> int:
    return _tree(args[0])


def _tree(value: Any) -> int:
    if isinstance(value, str):
        return int(len(value.encode()) * _STRING)
    if isinstance(value, bytes):
        return int(len(value) * _STRING)
    if isinstance(value, list):
        return sum(map(_tree, value))
    if isinstance(value, dict):
        return sum(_tree(key) + _tree(item) for key, item in value.items())
    return 1


def _contains_ip(args: Values, result: Any) -> int:
    return math.ceil(2 * size(args[0]) * _STRING)


def _and_parse(contains: Callable[[Values, Any], int]) -> Callable[[Values, Any], int]:
    """The same with a string to read first; upstream counts that only if the overload is known."""
    return lambda args, result: contains(args, result) + math.ceil(size(args[1]) * _STRING)


def _contains_cidr(args: Values, result: Any) -> int:
    return _contains_ip(args, result) + math.ceil(size(args[0]) * _STRING) + 1


def _validate(args: Values, result: Any) -> int:
    limit = getattr(args[0], "max_regex_size", FORMAT_REGEX_SIZE)
    return math.ceil((1 + size(args[1])) * _STRING) * math.ceil(limit * _REGEX)


def _produced(args: Values, result: Any) -> int:
    return size(result) + _LIST_CALL


def _flatten(args: Values, result: Any) -> int:
    depth = args[1] if len(args) == 2 and isinstance(args[1], int) else 1
    return int(size(args[0]) * depth) + _LIST_CALL


def _self_compare(position: int) -> Callable[[Values, Any], int]:
    def cost(args: Values, result: Any) -> int:
        items = args[position] if isinstance(args[position], list) else []
        factor = 2 + (_STRING if items and isinstance(items[0], str | bytes) else 0)
        return int(len(items) ** 2 * factor) + _LIST_CALL

    return cost


def _product(factor: int) -> Callable[[Values, Any], int]:
    return lambda args, result: 1 + size(args[0]) * size(args[1]) * factor


_SORTED = (
    "int",
    "uint",
    "double",
    "bool",
    "google.protobuf.Duration",
    "google.protobuf.Timestamp",
    "string",
    "bytes",
)
_ORDERS = ("less", "less_equals", "greater", "greater_equals")

_BY_OVERLOAD: dict[str, Callable[[Values, Any], int]] = {
    **dict.fromkeys(
        (
            "starts_with_string",
            "ends_with_string",
            "string_to_bytes",
            "bytes_to_string",
            "strings_quote",
            "string_format",
        ),
        _walk(_STRING),
    ),
    **{f"{order}_{kind}": _shorter for order in _ORDERS for kind in ("string", "bytes")},
    "in_list": lambda args, result: size(args[1]),
    "add_string": _concatenation,
    "add_bytes": _concatenation,
    "matches_string": _regex,
    "contains_string": _substring_search,
    "list_slice": _produced,
    "lists_range": _produced,
    "list_reverse": _produced,
    "list_flatten": _flatten,
    "list_flatten_int": _flatten,
    "list_distinct": _self_compare(0),
    "cidr_contains_ip_string": _and_parse(_contains_ip),
    "cidr_contains_cidr_string": _and_parse(_contains_cidr),
    "cidr_ip": lambda args, result: 1,
    **{f"list_{kind}_sort": _self_compare(0) for kind in _SORTED},
    **{f"list_{kind}_sortByAssociatedKeys": _self_compare(1) for kind in _SORTED},
    "list_sets_contains_list": _product(1),
    "list_sets_intersects_list": _product(1),
    "list_sets_equivalent_list": _product(2),
}

_BY_FUNCTION: dict[str, Callable[[Values, Any], int]] = {
    "_==_": _equality,
    "_!=_": _shorter,
    **dict.fromkeys(("isSorted", "sum", "max", "min", "indexOf", "lastIndexOf"), _traversal),
    **dict.fromkeys(("url", "lowerAscii", "upperAscii", "substring", "trim"), _walk(_STRING)),
    **dict.fromkeys(("replace", "split", "ip.isCanonical"), _walk(2 * _STRING)),
    "join": _walk(2 * _STRING, of_result=True),
    **dict.fromkeys(("find", "findAll"), _regex),
    **dict.fromkeys(
        ("ip", "cidr", "isIP", "isCIDR", "quantity", "isQuantity", "semver", "isSemver"), _walk(_STRING)
    ),
    "containsIP": _contains_ip,
    "containsCIDR": _contains_cidr,
    "validate": _validate,
}
