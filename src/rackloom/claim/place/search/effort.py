"""How long all searches for one gang may last together, those for its fixes included.

It is counted in steps, not in seconds, so that the answer does not depend on the machine.
"""

from collections.abc import Hashable

STEPS = 1_000_000
"""Loads of a tray that are tried on a state: some seconds."""
DEAD_ENDS = 20_000
"""Cliques in use when a choice of them led nowhere, beyond the dead ends that each search has for itself:
about as long with few cliques as with many."""
FEW = 10
"""Fewer cliques than these count as so many: what else a dead end costs does not depend on them."""


class Effort:
    """What is left of it. Whoever plans a gang makes one, and hands it to all that search for it."""

    def __init__(self, steps: int = STEPS, dead_ends: int = DEAD_ENDS) -> None:
        self._left = steps
        self._dead_ends = dead_ends
        self._paid: set[Hashable] = set()

    def allows(self, question: Hashable) -> bool:
        """Whether the answer may be looked for: it was paid for before, or something is left."""
        return question in self._paid or self._left > 0

    def pay(self, question: Hashable, steps: int) -> None:
        """Take what the answer cost; nothing the second time, whoever remembered it."""
        if question not in self._paid:
            self._paid.add(question)
            self._left -= steps

    def bears_dead_end(self, cliques: int) -> bool:
        """Whether one more is left with so many cliques in use; it is taken."""
        self._dead_ends -= max(FEW, cliques)
        return self._dead_ends >= 0
