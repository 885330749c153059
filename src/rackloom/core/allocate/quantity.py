"""Kubernetes quantities: exact numbers, compared by value and printed in canonical form.

Device capacities and counters are sums and differences of quantities. Floating point would lose bytes
of a large memory, so a `Quantity` is an integer, a power of ten and the suffix class in which it was
written (DecimalSI, DecimalExponent or BinarySI).

Parsing follows apimachinery. Short numbers get the bounded 64-bit form, longer ones the unbounded form,
which never converts to an integer. Digits below nano round away from zero. BinarySI saturates at the
largest 64-bit integer.

`exact_value` turns a quantity into a Fraction, because the ledger adds and subtracts Fractions. It caches
results, because a cluster has few distinct amounts and every device repeats them. Text that is not a
quantity stops the allocation (`AllocationStopped`). `in_binary_units` prints a Fraction the way
Kubernetes prints `40Gi`.
"""

import functools
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Self

from rackloom.core.allocate.objects import Amount
from rackloom.core.allocate.outcome import AllocationStopped

DECIMAL_SI = "DecimalSI"
DECIMAL_EXPONENT = "DecimalExponent"
BINARY_SI = "BinarySI"

_SUFFIX_EXPONENT = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_EXPONENT_SUFFIX = {exponent: suffix for suffix, exponent in _SUFFIX_EXPONENT.items()}
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_SHAPE = re.compile(r"([+-]?)(\d*)(?:\.(\d*))?([eEinumkKMGTP]*[+-]?\d*)", re.ASCII)
_INT64_MAX = 2**63 - 1
_INT64_MIN = -(2**63)
_SMALL_DIGITS = 18
"""Digits that always fit 64 bits. Upstream keeps longer numbers in its unbounded form."""
_NANO = -9
_MAX_EXPONENT = 1_000_000
"""A written exponent beyond this would make a number too large to hold."""


@functools.total_ordering
@dataclass(frozen=True, slots=True, eq=False)
class Quantity:
    """`unscaled * 10**scale`, in the suffix class `format`.

    `unbounded` marks the form that upstream keeps as an arbitrary decimal. A quantity of any value in this
    form never converts to an integer there, and the same holds for `as_integer`.
    """

    unscaled: int
    scale: int = 0
    format: str = DECIMAL_SI
    unbounded: bool = False

    @classmethod
    def parse(cls, text: str | int | float) -> "Quantity":
        """Read `"80Gi"`, `"0.5"`, `"1e3"` or a plain number. No digits at all are zero, as upstream has it.

        Raises ValueError with the problem if the text is no quantity.
        """
        if not isinstance(text, str):
            # 17 digits give every float back as it was.
            text = str(text) if isinstance(text, int) else f"{text:.17g}"
        return _parse(text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Quantity) and self.compare(other) == 0

    def __lt__(self, other: "Quantity") -> bool:
        return self.compare(other) < 0

    def __hash__(self) -> int:
        return hash(_reduced(self.unscaled, self.scale))

    def compare(self, other: "Quantity") -> int:
        """-1, 0 or 1 if this is less than, equal to or greater than `other`."""
        mine, theirs = self.unscaled, other.unscaled
        if self.scale != other.scale:
            mine, theirs, _ = _aligned(self, other)
        return (mine > theirs) - (mine < theirs)

    def sign(self) -> int:
        """-1, 0 or 1."""
        return (self.unscaled > 0) - (self.unscaled < 0)

    def __add__(self, other: "Quantity") -> "Quantity":
        return self._combined(other, 1)

    def __sub__(self, other: "Quantity") -> "Quantity":
        return self._combined(other, -1)

    def __neg__(self) -> Self:
        return replace(self, unscaled=-self.unscaled)

    def _combined(self, other: "Quantity", sign: int) -> "Quantity":
        mine, theirs, scale = _aligned(self, other)
        total = mine + sign * theirs
        style = self.format if self.unscaled else other.format
        if self.unbounded or other.unbounded or not _INT64_MIN <= total <= _INT64_MAX:
            return Quantity(total, scale, style, unbounded=True)
        if not self.unscaled or not other.unscaled:
            kept, factor = (self, 1) if self.unscaled else (other, sign)
            return Quantity(kept.unscaled * factor, kept.scale, style)
        return Quantity(total, scale, style)

    def is_integer(self) -> bool:
        """Whether `as_integer` has an answer: `1000m` is whole in value but not written as an integer."""
        return not self.unbounded and self.scale >= 0 and _INT64_MIN <= self._whole() <= _INT64_MAX

    def as_integer(self) -> int:
        """The value as a 64-bit integer. Raises ValueError if `is_integer` is false."""
        if not self.is_integer():
            raise ValueError("cannot convert value to integer")
        return self._whole()

    def _whole(self) -> int:
        return self.unscaled * int(10**self.scale)

    def as_float(self) -> float:
        """The nearest float of the digits, times the power of ten."""
        base = float(self.unscaled)
        return base if self.scale == 0 else base * float(f"1e{self.scale}")

    def __str__(self) -> str:
        if not self.unscaled:
            return "0"
        if self.format == BINARY_SI and (printed := self._binary()) is not None:
            return printed
        return self._decimal()

    def _binary(self) -> str | None:
        """The base-1024 form, or None if it would lose precision or save nothing."""
        digits, scale = _reduced(self.unscaled, self.scale)
        if scale < 0 or abs(value := digits * 10**scale) < 1024:
            return None
        power = 0
        while value % 1024 == 0:
            value, power = value // 1024, power + 1
        while power >= len(_BINARY):
            value, power = value * 1024, power - 1
        return f"{value}{_BINARY[power]}"

    def _decimal(self) -> str:
        digits, scale = _reduced(self.unscaled, self.scale)
        digits, scale = digits * 10 ** (scale % 3), scale - scale % 3
        if self.format == DECIMAL_EXPONENT:
            return f"{digits}e{scale}" if scale else str(digits)
        while scale not in _EXPONENT_SUFFIX:
            digits, scale = digits * 1000, scale - 3
        return f"{digits}{_EXPONENT_SUFFIX[scale]}"


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> Quantity:
    match = _SHAPE.fullmatch(text)
    if match is None or not text:
        raise ValueError(
            f"{text!r} is not a quantity: write a number with an optional suffix such as 500m, 4, 80Gi or 1e9"
        )
    sign, whole, fraction, suffix = match.groups()
    fraction = fraction or ""
    base, exponent, style = _suffix(suffix, text)
    magnitude = _magnitude(whole.lstrip("0"), fraction, base, exponent, style)
    return replace(magnitude, unscaled=-magnitude.unscaled) if sign == "-" else magnitude


def _suffix(suffix: str, text: str) -> tuple[int, int, str]:
    """Base, exponent and suffix class that a suffix stands for."""
    if suffix in _SUFFIX_EXPONENT:
        return 10, _SUFFIX_EXPONENT[suffix], DECIMAL_SI
    if suffix in _BINARY:
        return 2, 10 * _BINARY.index(suffix), BINARY_SI
    if (
        suffix[:1] in ("e", "E")
        and re.fullmatch(r"[+-]?\d+", suffix[1:])
        and abs(int(suffix[1:])) < _MAX_EXPONENT
    ):
        return 10, int(suffix[1:]), DECIMAL_EXPONENT
    raise ValueError(f"{text!r} is not a quantity: unknown suffix {suffix!r}")


def _magnitude(whole: str, fraction: str, base: int, exponent: int, style: str) -> Quantity:
    small = _small(whole, fraction, base, exponent, style)
    if small is not None:
        return small
    digits = int((whole + fraction) or "0")
    scale = -len(fraction)
    if base == 10:
        scale += exponent
    else:
        digits <<= exponent
    if digits and scale < _NANO:
        # A requested amount is at least the smallest unit: round away from zero to nano.
        digits, scale = -(-digits // 10 ** (_NANO - scale)), _NANO
    amount = Quantity(digits, scale, style, unbounded=True)
    # Only binary suffixes saturate, and no binary suffix can print an amount below one.
    if style == BINARY_SI and amount.compare(Quantity(_INT64_MAX)) > 0:
        return Quantity(_INT64_MAX, 0, style, unbounded=True)
    if style == BINARY_SI and digits and amount.compare(Quantity(1)) < 0:
        return replace(amount, format=DECIMAL_SI)
    return amount


def _small(whole: str, fraction: str, base: int, exponent: int, style: str) -> Quantity | None:
    """The bounded 64-bit form, if upstream uses it: short numbers, and whole ones with a binary suffix."""
    digits = whole or "0"
    if base == 10:
        room = _SMALL_DIGITS - len(digits) - len(fraction)
        scale, factor = exponent - len(fraction), 1
    elif fraction:
        return None
    else:
        room = 15 - len(digits) - exponent * 3 // 10 - 1
        scale, factor = 0, 1 << exponent
    value = int(digits + fraction) * factor
    if room < 0 or scale < _NANO or value > _INT64_MAX:
        return None
    return Quantity(value, scale, style)


def _aligned(quantity: Quantity, two: Quantity) -> tuple[int, int, int]:
    """Both numbers at their smaller scale, and that scale."""
    scale = min(quantity.scale, two.scale)
    return quantity.unscaled * 10 ** (quantity.scale - scale), two.unscaled * 10 ** (two.scale - scale), scale


def _reduced(unscaled: int, scale: int) -> tuple[int, int]:
    """The same number with all factors of ten in the scale, or (0, 0) for zero."""
    if not unscaled:
        return 0, 0
    while unscaled % 10 == 0:
        unscaled, scale = unscaled // 10, scale + 1
    return unscaled, scale


# Exact arithmetic: quantities as fractions.


_CACHED = 4096
"""A cluster has few distinct amounts, and they are read again for every device."""


@lru_cache(maxsize=_CACHED)
def exact_value(amount: Amount) -> Fraction:
    """The value of a quantity. Raises AllocationStopped if the text is no quantity."""
    try:
        read = Quantity.parse(amount)
    except ValueError as error:
        raise AllocationStopped(f"{amount!r} is not a quantity: {error}") from error
    return Fraction(read.unscaled) * Fraction(10) ** read.scale


@lru_cache(maxsize=1024)
def in_binary_units(value: Fraction) -> str:
    """The value as Kubernetes prints binary quantities (`40Gi`), rounded up to a thousandth."""
    thousandths = -(-value * 1000 // 1)
    if thousandths % 1000 == 0:
        return str(Quantity(int(thousandths // 1000), 0, BINARY_SI))
    return str(Quantity(int(thousandths), -3))
