"""Values at run time, and the rules for them that Python does not share: equality, map keys, 64-bit bounds.

Booleans, ints, floats, strings, bytes and None stand for themselves; lists and dicts hold values and are
never changed once made. Everything else is a class below or comes from a library module.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rackloom.claim.allocate.cel.errors import EvaluationError, no_such_overload
from rackloom.claim.allocate.quantity import Quantity
from rackloom.claim.allocate.semver import Semver

INT64_MIN, INT64_MAX, UINT64_MAX = -(2**63), 2**63 - 1, 2**64 - 1


class Uint(int):
    """An unsigned 64-bit integer; a type of its own, for CEL never mixes the two."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, order=True)
class Duration:
    """A signed length of time in nanoseconds."""

    nanos: int


@dataclass(frozen=True, slots=True, order=True)
class Timestamp:
    """A moment, in nanoseconds since 1970 in UTC."""

    nanos: int


@dataclass(frozen=True, slots=True)
class TypeName:
    """A type as a value: what `type(x)` gives."""

    name: str


class OptionalValue:
    """A value that may be absent."""

    __slots__ = ("present", "value")

    def __init__(self, present: bool, value: Any = None) -> None:
        self.present = present
        self.value = value


NONE = OptionalValue(False)


def some(value: Any) -> OptionalValue:
    """An optional that holds `value`."""
    return OptionalValue(True, value)


class DerivedQuantity(Quantity):
    """The result of add or sub. Upstream cannot compare one that stands right of ==; neither may we."""

    __slots__ = ()


class DomainMap(dict[str, Mapping[str, Any]]):
    """Attributes or capacities by domain; a domain that is not there reads as an empty map."""

    __slots__ = ()

    def __missing__(self, key: str) -> Mapping[str, Any]:
        return _NOTHING


_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class BoolKey:
    """A boolean as a dict key: Python would take True for 1."""

    value: bool


_NUMBERS = frozenset((int, Uint, float))


def key_of(value: Any) -> Any:
    """The dict key that stands for a CEL value."""
    return BoolKey(value) if value is True or value is False else value


def keys(mapping: Mapping[Any, Any]) -> Iterator[Any]:
    """The keys of a map as CEL values."""
    return (key.value if type(key) is BoolKey else key for key in mapping)


def find(mapping: Mapping[Any, Any], key: Any) -> OptionalValue:
    """The entry of a map, or of `DomainMap` the empty map that stands for an absent domain."""
    if isinstance(key, list | dict):
        return NONE
    wanted = key_of(key)
    if wanted in mapping:
        return some(mapping[wanted])
    if isinstance(mapping, DomainMap) and isinstance(key, str):
        return some(_NOTHING)
    return NONE


def contains_key(mapping: Mapping[Any, Any], key: Any) -> bool:
    """Whether a map has the key. Absent domains count as absent here."""
    return not isinstance(key, list | dict) and key_of(key) in mapping


def equal(one: Any, two: Any) -> bool:
    """CEL equality: numbers by value across types, containers by content, other types never equal."""
    kind, other = type(one), type(two)
    if kind in _NUMBERS and other in _NUMBERS:
        return compare_numbers(one, two) == 0
    if kind is list:
        return other is list and len(one) == len(two) and all(map(_same_item, one, two))
    if isinstance(one, dict):
        return isinstance(two, dict) and _same_map(one, two)
    if kind in _STRICT or isinstance(one, Quantity):
        if other is not _STRICT.get(kind, Quantity):
            raise no_such_overload()
        return bool(one == two)
    if kind is OptionalValue:
        return other is OptionalValue and _same_optional(one, two)
    return kind is other and bool(one == two)


_STRICT: dict[type, type] = {Semver: Semver}
"""Types whose comparison with anything else is an error, not false; libraries add theirs."""


def compare_strictly(kind: type) -> None:
    """Make comparing a `kind` with any other type an error, as upstream does for it."""
    _STRICT[kind] = kind


def same(one: Any, two: Any) -> bool:
    """Equality where a comparison that fails counts as a difference: `!=`, membership, sets."""
    try:
        return equal(one, two)
    except EvaluationError:
        return False


def _same_item(one: Any, two: Any) -> bool:
    """Equality inside a container, where upstream takes a failed comparison for no difference."""
    try:
        return equal(one, two)
    except EvaluationError:
        return True


def _same_map(one: Mapping[Any, Any], two: Mapping[Any, Any]) -> bool:
    if len(one) != len(two):
        return False
    for key, value in one.items():
        found = find(two, key.value if type(key) is BoolKey else key)
        if not found.present or not _same_item(value, found.value):
            return False
    return True


def _same_optional(one: OptionalValue, two: OptionalValue) -> bool:
    return one.present == two.present and (not one.present or equal(one.value, two.value))


def compare_numbers(one: Any, two: Any) -> int | None:
    """-1, 0, 1, or None where a NaN is involved. An integer meets a double as a double."""
    if type(one) is float or type(two) is float:
        left, right = _as_double(one, two), _as_double(two, one)
        if math.isnan(left) or math.isnan(right):
            return None
        return (left > right) - (left < right)
    return int(one > two) - int(one < two)


def _as_double(value: Any, other: Any) -> float:
    """`value` for a comparison with `other`; doubles outside the 64-bit range stay beyond every integer."""
    return float(value)


def in_int64(value: int) -> int:
    """`value` if it fits a signed 64-bit integer."""
    if INT64_MIN <= value <= INT64_MAX:
        return value
    raise EvaluationError("integer overflow")


def in_uint64(value: int) -> Uint:
    """`value` if it fits an unsigned 64-bit integer."""
    if 0 <= value <= UINT64_MAX:
        return Uint(value)
    raise EvaluationError("unsigned integer overflow")


TYPE_NAMES: dict[type, str] = {
    bool: "bool",
    int: "int",
    Uint: "uint",
    float: "double",
    str: "string",
    bytes: "bytes",
    type(None): "null_type",
    list: "list",
    dict: "map",
    DomainMap: "map",
    Timestamp: "google.protobuf.Timestamp",
    Duration: "google.protobuf.Duration",
    TypeName: "type",
    OptionalValue: "optional_type",
    Quantity: "kubernetes.Quantity",
    DerivedQuantity: "kubernetes.Quantity",
    Semver: "kubernetes.Semver",
}
"""CEL names of the classes of values; libraries add theirs."""


def type_name(value: Any) -> str:
    """The CEL name of a value's type."""
    return TYPE_NAMES[type(value)]
