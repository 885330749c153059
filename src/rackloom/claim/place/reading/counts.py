"""Counts of GPUs as Kubernetes writes them."""

from rackloom.claim.allocate.quantity import Quantity


def count_of(value: object) -> int:
    """A count such as 4, `"4"` or `"1k"`. Raises ValueError for what is no whole number from 0."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{value!r} is not a number")
    found = Quantity.parse(value).as_integer()
    if found < 0:
        raise ValueError(f"{value!r} is less than 0")
    return found
