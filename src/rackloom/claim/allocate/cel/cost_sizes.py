"""Sizes and costs as ranges, and the largest sizes that the API lets a device have.

All arithmetic is on unsigned 64-bit numbers that saturate, as upstream has it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rackloom.claim.allocate.cel.values import UINT64_MAX


def _saturated(value: float) -> int:
    return UINT64_MAX if value >= UINT64_MAX else int(value)


class Span(NamedTuple):
    """From `low` to `high`, both included."""

    low: int
    high: int

    def plus(self, other: "Span") -> "Span":
        """Sum of both ends."""
        return Span(_saturated(self.low + other.low), _saturated(self.high + other.high))

    def times(self, other: "Span") -> "Span":
        """Product of both ends."""
        return Span(_saturated(self.low * other.low), _saturated(self.high * other.high))

    def scaled(self, factor: float) -> "Span":
        """Times a factor, rounded up."""
        return Span(_scaled(self.low, factor), _scaled(self.high, factor))

    def union(self, other: "Span") -> "Span":
        """The narrowest span that covers both."""
        return Span(min(self.low, other.low), max(self.high, other.high))


def _scaled(value: int, factor: float) -> int:
    product = float(value) * factor
    return UINT64_MAX if product >= 2.0**64 else math.ceil(product)


def fixed(value: int) -> Span:
    """Exactly `value`."""
    return Span(value, value)


UNKNOWN = Span(0, UINT64_MAX)
NOTHING, ONE = fixed(0), fixed(1)
WIDEST = Span(UINT64_MAX, 0)
"""The neutral element of union."""


class Entries(NamedTuple):
    """Sizes of what a list or map contains."""

    kind: str
    key: Span
    value: Span

    def union(self, other: "Entries | None") -> "Entries | None":
        """Sizes of what may come from either container, if both are known."""
        if other is None:
            return None
        return Entries(self.kind, self.key.union(other.key), self.value.union(other.value))


Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Limit:
    """The largest size of a part of a device, and where its parts are."""

    size: int
    fields: Mapping[str, "Limit"] | None = None
    key: "Limit | None" = None
    element: "Limit | None" = None
    any_field: bool = False


_ATTRIBUTE = Limit(64)
_QUANTITY = Limit(0)
_NAME, _DOMAIN = Limit(32), Limit(63)
_ATTRIBUTES = Limit(32, key=_DOMAIN, element=Limit(32, key=_NAME, element=_ATTRIBUTE, any_field=True))
_CAPACITIES = Limit(32, key=_DOMAIN, element=Limit(32, key=_NAME, element=_QUANTITY))
_DEVICE = Limit(
    0,
    {
        "driver": Limit(63),
        "allowMultipleAllocations": Limit(1),
        "attributes": _ATTRIBUTES,
        "capacity": _CAPACITIES,
    },
)


def device_size(path: Path | None) -> Span | None:
    """The size of what a path leads to, by the limits of the API."""
    if not path or path[0] != "device":
        return None
    here: Limit | None = _DEVICE
    for step in path[1:]:
        here = _step(here, step)
        if here is None:
            return None
    return Span(0, here.size) if here is not None else None


def _step(here: Limit | None, step: str) -> Limit | None:
    if here is None:
        return None
    if step in ("@items", "@values"):
        return here.element
    if step == "@keys":
        return here.key
    return (here.fields or {}).get(step) or (here.element if here.any_field else None)
