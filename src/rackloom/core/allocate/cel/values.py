"""Run-time values of CEL, and the rules for them that Python does not share.

Booleans, ints, floats, strings, bytes and None stand for themselves. Lists and dicts hold values and do
not change once made. Only the accumulator of a running fold grows in place. Everything else is a class
here (`Uint`, `Duration`, `Timestamp`, `OptionalValue`, `SemanticVersion`) or comes from a library
module, which registers it in TYPE_NAMES.

The rules that differ from Python:

- Equality compares numbers by value across numeric types and containers by content. Values of other
  types are never equal, except that comparing a quantity, version or other registered type with a
  foreign type is an error.
- A boolean map key has a separate class (`BoolKey`): Python would take True for 1.
- Integers are 64-bit and overflow is an error.
- A domain that a device lacks reads as an empty map (`DomainMap`).
- The result of quantity arithmetic cannot stand right of `==` (`DerivedQuantity`). Upstream has the
  same limit.

`SemanticVersion` implements Semantic Versioning 2.0.0 with unsigned 64-bit numbers. Build metadata is
kept and takes no part in comparison.
"""

import functools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rackloom.core.allocate.cel.errors import EvaluationError, no_such_overload
from rackloom.core.allocate.quantity import Quantity

# Semantic versions.


_NUMBER = re.compile(r"[0-9]*")
_IDENTIFIER = re.compile(r"[0-9A-Za-z-]+")
INT64_MIN, INT64_MAX, UINT64_MAX = -(2**63), 2**63 - 1, 2**64 - 1


@functools.total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class SemanticVersion:
    """A version. `prerelease` and `build` are its dot-separated parts."""

    major: int
    minor: int
    patch: int
    prerelease: tuple[int | str, ...] = ()
    build: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "SemanticVersion":
        """Read `1.2.3-rc.1+build`. Raises ValueError with the problem if it is malformed."""
        return _parse_version(text)

    @classmethod
    def normalise(cls, text: str) -> "SemanticVersion":
        """Read a version with a v prefix, missing minor or patch, or leading zeros, as `v1.02`."""
        parts = []
        for part in text.removeprefix("v").split(".", 2):
            # One zero stays where no other digit follows, as in `00-rc.1`.
            bare = part.lstrip("0")
            kept = bare if bare[:1].isdigit() and bare[:1].isascii() else "0" + bare
            parts.append(part if len(part) < 2 else kept)
        if len(parts) < 3 and re.search("[+-]", parts[-1]):
            raise ValueError("short version cannot contain PreRelease/Build meta data")
        return _parse_version(".".join(parts + ["0"] * (3 - len(parts))))

    def compare(self, other: "SemanticVersion") -> int:
        """-1, 0 or 1 by precedence. Build metadata does not count."""
        numbers, others = (self.major, self.minor, self.patch), (other.major, other.minor, other.patch)
        if numbers != others or not (self.prerelease or other.prerelease):
            return (numbers > others) - (numbers < others)
        mine, theirs = self._prerelease_order(), other._prerelease_order()
        return (mine > theirs) - (mine < theirs)

    def _prerelease_order(self) -> tuple[bool, tuple[tuple[bool, int, str], ...]]:
        parts = tuple(
            (False, part, "") if isinstance(part, int) else (True, 0, part) for part in self.prerelease
        )
        return not self.prerelease, parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SemanticVersion) and self.compare(other) == 0

    def __lt__(self, other: "SemanticVersion") -> bool:
        return self.compare(other) < 0

    def __hash__(self) -> int:
        return hash((self.major, self.minor, self.patch, self.prerelease))

    def __str__(self) -> str:
        core = f"{self.major}.{self.minor}.{self.patch}"
        before = "-" + ".".join(map(str, self.prerelease)) if self.prerelease else ""
        return core + before + ("+" + ".".join(self.build) if self.build else "")


@functools.lru_cache(maxsize=4096)
def _parse_version(text: str) -> SemanticVersion:
    if not text:
        raise ValueError("Version string empty")
    parts = text.split(".", 2)
    if len(parts) != 3:
        raise ValueError(f"No Major.Minor.Patch elements found in {text!r}")
    rest, plus, build = parts[2].partition("+")
    patch, dash, before = rest.partition("-")
    numbers = [
        _version_number(part, name)
        for part, name in zip((*parts[:2], patch), ("major", "minor", "patch"), strict=True)
    ]
    prerelease: list[int | str] = []
    for part in before.split(".") if dash else ():
        if not _IDENTIFIER.fullmatch(part):
            raise ValueError(f"Invalid character(s) found in prerelease {part!r}")
        # Identifiers of digits alone compare as numbers, all others as texts.
        prerelease.append(_version_number(part, "prerelease") if _NUMBER.fullmatch(part) else part)
    metadata = tuple(build.split(".")) if plus else ()
    for part in metadata:
        if not _IDENTIFIER.fullmatch(part):
            raise ValueError(f"Invalid character(s) found in build meta data {part!r}")
    return SemanticVersion(numbers[0], numbers[1], numbers[2], tuple(prerelease), metadata)


def _version_number(part: str, name: str) -> int:
    if not part or not _NUMBER.fullmatch(part):
        raise ValueError(f"Invalid character(s) found in {name} number {part!r}")
    if len(part) > 1 and part[0] == "0":
        raise ValueError(f"{name.capitalize()} number must not contain leading zeroes {part!r}")
    if int(part) > UINT64_MAX:
        raise ValueError(f"{name.capitalize()} number {part!r} is out of range")
    return int(part)


# Values, map keys, equality and 64-bit bounds.


class Uint(int):
    """An unsigned 64-bit integer. It is a separate type, because CEL never mixes the two."""

    __slots__ = ()


class Duration(msgspec.Struct, frozen=True, order=True):
    """A signed length of time in nanoseconds."""

    nanos: int


class Timestamp(msgspec.Struct, frozen=True, order=True):
    """A moment, in nanoseconds since 1970 in UTC."""

    nanos: int


class TypeName(msgspec.Struct, frozen=True):
    """A type as a value: the result of `type(x)`."""

    name: str


class OptionalValue:
    """A value that may be absent."""

    __slots__ = ("present", "value")

    def __init__(self, present: bool, value: Any = None) -> None:
        self.present = present
        self.value = value


NONE = OptionalValue(False)


def present_optional(value: Any) -> OptionalValue:
    """An optional that holds `value`."""
    return OptionalValue(True, value)


class DerivedQuantity(Quantity):
    """The result of add or sub. Upstream cannot compare one that stands right of ==, so we may not either."""

    __slots__ = ()


class DomainMap(dict[str, Mapping[str, Any]]):
    """Attributes or capacities by domain. A missing domain reads as an empty map."""

    __slots__ = ()

    def __missing__(self, key: str) -> Mapping[str, Any]:
        return _NOTHING


_NOTHING: Mapping[str, Any] = {}


class BoolKey(msgspec.Struct, frozen=True):
    """A boolean as a dict key: Python would take True for 1."""

    value: bool


_NUMBERS = frozenset((int, Uint, float))


def key_of(value: Any) -> Any:
    """The dict key that stands for a CEL value."""
    return BoolKey(value) if value is True or value is False else value


def map_keys(mapping: Mapping[Any, Any]) -> Iterator[Any]:
    """The keys of a map as CEL values."""
    return (key.value if type(key) is BoolKey else key for key in mapping)


def find_entry(mapping: Mapping[Any, Any], key: Any) -> OptionalValue:
    """The entry of a map, or of `DomainMap` the empty map that stands for an absent domain."""
    if isinstance(key, list | dict):
        return NONE
    wanted = key_of(key)
    if wanted in mapping:
        return present_optional(mapping[wanted])
    if isinstance(mapping, DomainMap) and isinstance(key, str):
        return present_optional(_NOTHING)
    return NONE


def contains_key(mapping: Mapping[Any, Any], key: Any) -> bool:
    """Whether a map has the key. Absent domains count as absent here."""
    return not isinstance(key, list | dict) and key_of(key) in mapping


def equal(first: Any, second: Any) -> bool:
    """CEL equality: numbers by value across types, containers by content, other types never equal."""
    kind, other = type(first), type(second)
    if kind in _NUMBERS and other in _NUMBERS:
        return compare_numbers(first, second) == 0
    if kind is list:
        return other is list and len(first) == len(second) and all(map(_same_item, first, second))
    if isinstance(first, dict):
        return isinstance(second, dict) and _same_map(first, second)
    if kind in _STRICT or isinstance(first, Quantity):
        if other is not _STRICT.get(kind, Quantity):
            raise no_such_overload()
        return bool(first == second)
    if kind is OptionalValue:
        if other is not OptionalValue or first.present != second.present:
            return False
        return not first.present or equal(first.value, second.value)
    return kind is other and bool(first == second)


_STRICT: dict[type, type] = {SemanticVersion: SemanticVersion}
"""Types that raise an error, not false, when compared with any other type. Libraries add theirs."""


def compare_strictly(kind: type) -> None:
    """Make comparing a `kind` with any other type an error, as upstream does for it."""
    _STRICT[kind] = kind


def same_value(first: Any, second: Any) -> bool:
    """Equality for `!=`, membership and sets. A comparison that fails counts as a difference."""
    try:
        return equal(first, second)
    except EvaluationError:
        return False


def _same_item(first: Any, second: Any) -> bool:
    """Equality inside a container. There, upstream treats a failed comparison as equality."""
    try:
        return equal(first, second)
    except EvaluationError:
        return True


def _same_map(first: Mapping[Any, Any], second: Mapping[Any, Any]) -> bool:
    if len(first) != len(second):
        return False
    for key, value in first.items():
        found = find_entry(second, key.value if type(key) is BoolKey else key)
        if not found.present or not _same_item(value, found.value):
            return False
    return True


def compare_numbers(first: Any, second: Any) -> int | None:
    """-1, 0 or 1, or None if a NaN is involved. An integer meets a double as a double."""
    if type(first) is float or type(second) is float:
        left, right = float(first), float(second)
        if math.isnan(left) or math.isnan(right):
            return None
        return (left > right) - (left < right)
    return int(first > second) - int(first < second)


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
    SemanticVersion: "kubernetes.Semver",
}
"""CEL names of the classes of values. Libraries add theirs."""


def type_name(value: Any) -> str:
    """The CEL name of a value's type."""
    return TYPE_NAMES[type(value)]
