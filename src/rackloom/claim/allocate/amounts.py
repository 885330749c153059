"""Quantities as exact numbers: what the books add and subtract."""

from fractions import Fraction
from functools import lru_cache

from rackloom.claim.allocate.objects import Amount
from rackloom.claim.allocate.outcome import Stop
from rackloom.claim.allocate.quantity import BINARY_SI, Quantity

_CACHED = 4096
"""Distinct amounts of a cluster are few; they are read again for every device."""


@lru_cache(maxsize=_CACHED)
def number(amount: Amount) -> Fraction:
    """The value of a quantity. Raises Stop for text that is none."""
    try:
        read = Quantity.parse(amount)
    except ValueError as error:
        raise Stop(f"{amount!r} is not a quantity: {error}") from error
    return Fraction(read.unscaled) * Fraction(10) ** read.scale


def in_binary_units(value: Fraction) -> str:
    """The value as Kubernetes prints binary quantities (`40Gi`), rounded up to a thousandth."""
    thousandths = -(-value * 1000 // 1)
    if thousandths % 1000 == 0:
        return str(Quantity(int(thousandths // 1000), 0, BINARY_SI))
    return str(Quantity(int(thousandths), -3))
