"""Making again only what is made of something else than before."""

from collections.abc import Callable, Mapping
from typing import TypeVar

K = TypeVar("K")
I = TypeVar("I")  # noqa: E741 (what it is made of)
V = TypeVar("V")

Kept = Mapping[K, tuple[I, V]]
"""By name: what was told, and what was made of it."""


def again(before: Kept[K, I, V], told: Mapping[K, I], make: Callable[[I], V]) -> dict[K, tuple[I, V]]:
    """`make(told)` under every name; where what is told equals what was, the very values that there were.

    `make` looks at nothing else, so the outcome equals that of making everything anew. Values that are the
    same objects are compared by address, so that what did not change costs next to nothing.
    """
    found = {}
    for name, one in told.items():
        known = before.get(name)
        found[name] = known if known is not None and known[0] == one else (one, make(one))
    return found
