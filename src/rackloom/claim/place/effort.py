"""How long all searches for one gang may last together, those for its fixes included.

It is counted in steps, not in seconds, so that the answer does not depend on the machine.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

STEPS = 1_000_000
"""Loads of a tray that are tried on a state: some seconds."""


class Effort:
    """What is left of it."""

    def __init__(self, steps: int) -> None:
        self._left = steps
        self._paid: set[Hashable] = set()

    @property
    def is_spent(self) -> bool:
        """Nothing may be looked for any more."""
        return self._left <= 0

    def has(self, question: Hashable) -> bool:
        """Whether the answer to it was paid for."""
        return question in self._paid

    def pay(self, question: Hashable, steps: int) -> None:
        """Once for each question, whoever remembered its answer."""
        self._paid.add(question)
        self._left -= steps


_CURRENT: ContextVar[Effort | None] = ContextVar("effort", default=None)


@contextmanager
def one_effort() -> Iterator[Effort]:
    """The effort that is under way, or a new one that ends with the block."""
    current = _CURRENT.get()
    if current is not None:
        yield current
        return
    token = _CURRENT.set(made := Effort(STEPS))
    try:
        yield made
    finally:
        _CURRENT.reset(token)
