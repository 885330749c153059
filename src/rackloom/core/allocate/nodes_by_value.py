"""Numbers of nodes by a value that their devices have, in ascending order."""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

CHANGED_SHARE = 8
"""One node in so many may have changed since an index read it."""

_Value = TypeVar("_Value", bound=Hashable)


class NodesByValue(Generic[_Value]):
    """Most values of a serial number or address are on one node alone, which is kept without a list."""

    def __init__(self) -> None:
        self._found: dict[_Value, int | list[int]] = {}

    def add(self, value: _Value, number: int) -> None:
        """Note a value of a node. Numbers come in ascending order, each once for a value."""
        others = self._found.get(value)
        if others is None:
            self._found[value] = number
        elif isinstance(others, int):
            self._found[value] = [others, number]
        else:
            others.append(number)

    def first(self, value: _Value, start: int, end: int) -> int:
        """The first node from `start` on with a value; `end` where there is none before."""
        numbers = self._found.get(value, ())
        if isinstance(numbers, int):
            return numbers if start <= numbers < end else end
        return min(first_of(numbers, start, end), end)


def first_of(numbers: Sequence[int], start: int, end: int) -> int:
    """The first of sorted numbers from `start` on; `end` where there is none."""
    at = bisect_left(numbers, start)
    return numbers[at] if at < len(numbers) else end
