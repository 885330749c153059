"""Operators: arithmetic, comparison, logic, membership, indexing, size, and optional values.

Integer arithmetic checks 64-bit overflow and division by zero. Division truncates towards zero.
Ordering works across numeric types, and a NaN cannot be ordered. Durations must fit 64 bits of
nanoseconds, and timestamps the years 1 to 9999.

Indexing a missing key or position is an error. `[?]` and `.?` return an optional value instead, on
which `orValue`, `or`, `value` and `hasValue` work. The evaluator runs `&&`, `||`, `?:`, `==`, `!=`,
`orValue` and `or` itself. Their overloads here serve the checker.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

from rackloom.core.allocate.cel.errors import EvaluationError, no_such_key, no_such_overload
from rackloom.core.allocate.cel.types import cel_function, declare_functions
from rackloom.core.allocate.cel.values import (
    NONE,
    Duration,
    OptionalValue,
    Timestamp,
    Uint,
    compare_numbers,
    contains_key,
    equal,
    find_entry,
    in_int64,
    in_uint64,
    present_optional,
    same_value,
)

# Operators.


_MIN_SECOND, _MAX_SECOND = -62135596800, 253402300799
_SECOND = 10**9


def as_duration(nanos: int) -> Duration:
    """A duration if it fits 64 bits of nanoseconds."""
    if -(2**63) <= nanos < 2**63:
        return Duration(nanos)
    raise EvaluationError("integer overflow")


def as_timestamp(nanos: int) -> Timestamp:
    """A timestamp between the years 1 and 9999."""
    if _MIN_SECOND <= nanos // _SECOND <= _MAX_SECOND:
        return Timestamp(nanos)
    raise EvaluationError("timestamp overflow")


def shown_value(value: Any) -> str:
    """A value as error messages name it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


declare_functions(
    ("logical_not", "!_(bool) -> bool", operator.not_),
    ("negate_double", "-_(double) -> double", operator.neg),
    ("negate_int64", "-_(int) -> int", lambda value: in_int64(-value)),
    ("@not_strictly_false", "@not_strictly_false(bool) -> bool", lambda value: value is not False),
)


declare_functions(
    ("add_list", "_+_(list<A>, list<A>) -> list<A>", operator.add),
    ("add_double", "_+_(double, double) -> double", operator.add),
    ("add_string", "_+_(string, string) -> string", operator.add),
    ("add_bytes", "_+_(bytes, bytes) -> bytes", operator.add),
    ("add_int64", "_+_(int, int) -> int", lambda first, second: in_int64(first + second)),
    ("add_uint64", "_+_(uint, uint) -> uint", lambda first, second: in_uint64(int(first) + int(second))),
)


@cel_function("add_duration_duration", "_+_(duration, duration) -> duration")
def _add_durations(first: Duration, second: Duration) -> Duration:
    return as_duration(first.nanos + second.nanos)


@cel_function("add_duration_timestamp", "_+_(duration, timestamp) -> timestamp")
@cel_function("add_timestamp_duration", "_+_(timestamp, duration) -> timestamp")
def _later(first: Timestamp | Duration, second: Timestamp | Duration) -> Timestamp:
    return as_timestamp(first.nanos + second.nanos)


declare_functions(
    ("subtract_double", "_-_(double, double) -> double", operator.sub),
    ("subtract_int64", "_-_(int, int) -> int", lambda first, second: in_int64(first - second)),
    ("subtract_uint64", "_-_(uint, uint) -> uint", lambda first, second: in_uint64(int(first) - int(second))),
)


@cel_function("subtract_duration_duration", "_-_(duration, duration) -> duration")
@cel_function("subtract_timestamp_timestamp", "_-_(timestamp, timestamp) -> duration")
def _between(first: Timestamp | Duration, second: Timestamp | Duration) -> Duration:
    return as_duration(first.nanos - second.nanos)


@cel_function("subtract_timestamp_duration", "_-_(timestamp, duration) -> timestamp")
def _earlier(first: Timestamp, second: Duration) -> Timestamp:
    return as_timestamp(first.nanos - second.nanos)


declare_functions(
    ("multiply_double", "_*_(double, double) -> double", operator.mul),
    ("multiply_int64", "_*_(int, int) -> int", lambda first, second: in_int64(first * second)),
    ("multiply_uint64", "_*_(uint, uint) -> uint", lambda first, second: in_uint64(int(first) * int(second))),
)


@cel_function("divide_double", "_/_(double, double) -> double")
def _divide_double(first: float, second: float) -> float:
    if second:
        return first / second
    if not first or math.isnan(first):
        return math.nan
    return math.copysign(math.inf, first) * math.copysign(1, second)


def _quotient(first: int, second: int) -> int:
    """Division towards zero, as CEL has it."""
    if second == 0:
        raise EvaluationError("division by zero")
    return abs(first) // abs(second) * (1 if (first < 0) == (second < 0) else -1)


declare_functions(
    ("divide_int64", "_/_(int, int) -> int", lambda first, second: in_int64(_quotient(first, second))),
    (
        "divide_uint64",
        "_/_(uint, uint) -> uint",
        lambda first, second: Uint(_quotient(int(first), int(second))),
    ),
)


@cel_function("modulo_int64", "_%_(int, int) -> int")
def _modulo(first: int, second: int) -> int:
    if second == 0:
        raise EvaluationError("modulus by zero")
    if (first, second) == (-(2**63), -1):
        raise EvaluationError("integer overflow")
    return first - second * _quotient(first, second)


@cel_function("modulo_uint64", "_%_(uint, uint) -> uint")
def _modulo_uint(first: int, second: int) -> Uint:
    return Uint(_modulo(int(first), int(second)))


def _comparison(symbol: str, name: str, holds: Callable[[Any, Any], bool]) -> None:
    """Declare one ordering operator over everything that has an order."""

    def ordered(first: Any, second: Any) -> bool:
        return holds(first, second)

    def numbers(first: Any, second: Any) -> bool:
        order = compare_numbers(first, second)
        if order is None:
            raise EvaluationError("NaN values cannot be ordered")
        return holds(order, 0)

    kinds = (("int", "int64"), ("uint", "uint64"), ("double", "double"))
    for kind in ("bool", "string", "bytes", "timestamp", "duration"):
        cel_function(f"{name}_{kind}", f"{symbol}({kind}, {kind}) -> bool")(ordered)
    for first, left_id in kinds:
        for second, right_id in kinds:
            overload_id = f"{name}_{left_id}" if first == second else f"{name}_{left_id}_{right_id}"
            cel_function(overload_id, f"{symbol}({first}, {second}) -> bool")(numbers)


_comparison("_<_", "less", operator.lt)
_comparison("_<=_", "less_equals", operator.le)
_comparison("_>_", "greater", operator.gt)
_comparison("_>=_", "greater_equals", operator.ge)


declare_functions(
    ("equals", "_==_(A, A) -> bool", equal),
    ("not_equals", "_!=_(A, A) -> bool", lambda first, second: not same_value(first, second)),
    (
        "in_list",
        "@in(A, list<A>) -> bool",
        lambda item, items: any(same_value(item, other) for other in items),
    ),
    ("in_map", "@in(A, map<A, B>) -> bool", lambda key, mapping: contains_key(mapping, key)),
    ("logical_and", "_&&_(bool, bool) -> bool", lambda first, second: first and second),
    ("logical_or", "_||_(bool, bool) -> bool", lambda first, second: first or second),
    (
        "conditional",
        "_?_:_(bool, A, A) -> A",
        lambda condition, first, second: first if condition else second,
    ),
)


def list_index(items: list[Any], key: Any) -> int:
    """The position that `key` names. A whole double or a uint will do."""
    kind = type(key)
    if kind is float:
        if not key.is_integer():
            raise EvaluationError(f"unsupported index value {key} in list")
        return int(key)
    if kind is not int and kind is not Uint:
        raise EvaluationError(f"unsupported index type {shown_value(key)} in list")
    return int(key)


def index_container(container: Any, key: Any) -> Any:
    """`container[key]`."""
    if isinstance(container, dict):
        found = find_entry(container, key)
        if not found.present:
            raise no_such_key(shown_value(key))
        return found.value
    if type(container) is list:
        at = list_index(container, key)
        if not 0 <= at < len(container):
            raise EvaluationError(f"index out of bounds: {at}")
        return container[at]
    raise no_such_overload()


def optional_index(container: Any, key: Any) -> OptionalValue:
    """`container[?key]`."""
    if isinstance(container, dict):
        return find_entry(container, key)
    if type(container) is list:
        at = list_index(container, key)
        return present_optional(container[at]) if 0 <= at < len(container) else NONE
    return NONE


declare_functions(
    ("index_list", "_[_](list<A>, int) -> A", index_container),
    ("index_map", "_[_](map<A, B>, A) -> B", index_container),
    ("optional_list_index_int", "_[_](optional<list<V>>, int) -> optional<V>", index_container),
    ("optional_map_index_value", "_[_](optional<map<K, V>>, K) -> optional<V>", index_container),
    ("select_optional_field", "_?._(dyn, string) -> optional<V>", optional_index),
    ("list_optindex_optional_int", "_[?_](list<V>, int) -> optional<V>", optional_index),
    ("optional_list_optindex_optional_int", "_[?_](optional<list<V>>, int) -> optional<V>", optional_index),
    ("map_optindex_optional_value", "_[?_](map<K, V>, K) -> optional<V>", optional_index),
    ("optional_map_optindex_optional_value", "_[?_](optional<map<K, V>>, K) -> optional<V>", optional_index),
)


declare_functions(
    ("map_size", "map<A, B>.size() -> int", len),
    ("size_map", "size(map<A, B>) -> int", len),
    ("list_size", "list<A>.size() -> int", len),
    ("size_list", "size(list<A>) -> int", len),
    ("bytes_size", "bytes.size() -> int", len),
    ("size_bytes", "size(bytes) -> int", len),
    ("string_size", "string.size() -> int", len),
    ("size_string", "size(string) -> int", len),
)


# Optional values.


declare_functions(
    ("optional_of", "optional.of(V) -> optional<V>", present_optional),
    (
        "optional_ofNonZeroValue",
        "optional.ofNonZeroValue(V) -> optional<V>",
        lambda value: NONE if is_zero(value) else present_optional(value),
    ),
    ("optional_none", "optional.none() -> optional<V>", lambda: NONE),
    ("optional_hasValue", "optional<V>.hasValue() -> bool", lambda optional: optional.present),
    (
        "optional_orValue_value",
        "optional<V>.orValue(V) -> V",
        lambda optional, other: optional.value if optional.present else other,
    ),
    (
        "optional_or_optional",
        "optional<V>.or(optional<V>) -> optional<V>",
        lambda optional, other: optional if optional.present else other,
    ),
)


@cel_function("optional_value", "optional<V>.value() -> V")
def _optional_value(optional: OptionalValue) -> Any:
    if not optional.present:
        raise EvaluationError("optional.none() dereference")
    return optional.value


@cel_function("optional_unwrap", "optional.unwrap(list<optional<V>>) -> list<V>")
@cel_function("optional_unwrapOpt", "list<optional<V>>.unwrapOpt() -> list<V>")
def _unwrap_optionals(items: list[OptionalValue]) -> list[Any]:
    return [item.value for item in items if item.present]


def is_zero(value: Any) -> bool:
    """Whether a value is the zero of its type. False if the type has no zero."""
    if value is None:
        return True
    if isinstance(value, OptionalValue):
        return not value.present
    nanos = getattr(value, "nanos", None)
    if nanos is not None:
        return bool(nanos == 0)
    return isinstance(value, bool | int | float | str | bytes | list | dict) and not value
