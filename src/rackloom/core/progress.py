"""How long work tells its caller how far it is, without knowing who shows it, or whether anybody does."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class EachInTurn(Protocol):
    """Yields the items one by one. `what` says what they are when they are done: `claims allocated`."""

    def __call__(self, items: Sequence[T], what: str, /) -> Iterable[T]:
        """The items in their order."""
        ...


def in_turn(items: Sequence[T], what: str, /) -> Iterable[T]:
    """The items, without a report of how far they are."""
    return items
