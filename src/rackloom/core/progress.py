"""Reports of long work about its progress, to a caller that may show them or not."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class EachInTurn(Protocol):
    """Yields the items one by one. `what` names them when they are done: `claims allocated`."""

    def __call__(self, items: Sequence[T], what: str, /) -> Iterable[T]:
        """The items in their order."""
        ...


def in_turn(items: Sequence[T], what: str, /) -> Iterable[T]:
    """The items, without a report of how far they are."""
    return items
