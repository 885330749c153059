"""Many gangs into cliques as numbers: trays that are empty, trays that are asked for.

Worth first (trays of the placed gangs, weighted by priority), then few cliques. Small cases are solved
exactly; the others by best fit and a bounded number of improvements.
"""

from collections.abc import Sequence

import msgspec

TRAY = 1000
"""Worth of a tray of weight 1, against 1 for a clique that stays unopened."""

Where = tuple[int, ...]
"""The clique of each block of a gang."""


class Item(msgspec.Struct, frozen=True):
    """A gang: the trays of each of its blocks, which run all or not at all."""

    blocks: tuple[int, ...]
    weight: int = 1

    @property
    def worth(self) -> int:
        """What placing it is worth."""
        return TRAY * self.weight * sum(self.blocks)


class Clique(msgspec.Struct, frozen=True):
    """A clique."""

    empty: int
    """Trays."""
    in_use: bool = False
    """Opening it costs nothing."""


Assignment = tuple[Where | None, ...]
"""By item; None: not placed."""


def score(cliques: Sequence[Clique], items: Sequence[Item], assignment: Assignment) -> int:
    """The worth of what is placed, less the cliques that are opened for it."""
    worth = sum(item.worth for item, where in zip(items, assignment, strict=True) if where is not None)
    opened = {clique for where in assignment if where is not None for clique in where}
    return worth - sum(not cliques[clique].in_use for clique in opened)


class Packing:
    """Items in cliques, while they are being packed."""

    def __init__(self, cliques: Sequence[Clique], items: Sequence[Item]) -> None:
        self.cliques = cliques
        self.items = items
        self.free = [clique.empty for clique in cliques]
        self.where: list[Where | None] = [None] * len(items)
        self.inside: list[dict[int, int]] = [{} for _ in cliques]
        """By clique: trays by item."""

    def result(self) -> Assignment:
        """Where everything is."""
        return tuple(self.where)

    def unplaced(self) -> list[int]:
        """Items without a clique, most worth first."""
        waiting = [number for number, where in enumerate(self.where) if where is None]
        return sorted(waiting, key=lambda number: (-self.items[number].worth, number))

    def place(self, number: int) -> bool:
        """All blocks of an item, largest first, each where it fits tightest; nothing if one does not fit."""
        found: list[int] = []
        for block in self.items[number].blocks:
            clique = self._tightest(block)
            if clique is None:
                for before, taken in zip(found, self.items[number].blocks, strict=False):
                    self._add(before, number, -taken)
                return False
            self._add(clique, number, block)
            found.append(clique)
        self.where[number] = tuple(found)
        return True

    def put(self, number: int, where: Where) -> None:
        """An item where it is known to fit."""
        for clique, block in zip(where, self.items[number].blocks, strict=True):
            self._add(clique, number, block)
        self.where[number] = where

    def remove(self, number: int) -> Where:
        """Take an item out, if it is in. Returns where it was."""
        where = self.where[number]
        if where is None:
            return ()
        for clique, block in zip(where, self.items[number].blocks, strict=True):
            self._add(clique, number, -block)
        self.where[number] = None
        return where

    def _tightest(self, block: int) -> int | None:
        """Among cliques in use first: opening one costs."""
        fitting = [number for number, free in enumerate(self.free) if free >= block]
        return min(fitting, key=lambda number: (self._is_closed(number), self.free[number]), default=None)

    def _is_closed(self, clique: int) -> bool:
        return not self.cliques[clique].in_use and not self.inside[clique]

    def _add(self, clique: int, number: int, trays: int) -> None:
        self.free[clique] -= trays
        has = self.inside[clique].get(number, 0) + trays
        if has:
            self.inside[clique][number] = has
        else:
            self.inside[clique].pop(number, None)


def by_best_fit(cliques: Sequence[Clique], items: Sequence[Item]) -> Packing:
    """Heaviest weight first, then largest."""
    packing = Packing(cliques, items)
    order = sorted(range(len(items)), key=lambda number: (-items[number].weight, -sum(items[number].blocks)))
    for number in order:
        packing.place(number)
    return packing
