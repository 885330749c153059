"""Lists in findings, short enough to be read."""

from collections.abc import Sequence


def some(things: Sequence[str], most: int = 3) -> str:
    """The first `most` of them, and how many more there are."""
    more = f" and {len(things) - most} more" if len(things) > most else ""
    return ", ".join(things[:most]) + more


def unique(*things: str) -> tuple[str, ...]:
    """Each once, in the order in which they were first named."""
    return tuple(dict.fromkeys(things))
