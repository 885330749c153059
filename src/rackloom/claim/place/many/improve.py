"""Better than best fit: what two cliques hold, and what is left over, is packed anew as well as can be.

Whatever a single clique or a pair could gain is found; what needs three at once is not.
"""

from collections.abc import Iterator
from itertools import combinations

from rackloom.claim.place.many.packing import Packing

PAIRS = 400
"""Pairs of cliques that are packed anew at most: each takes some 10 ms."""

Fill = tuple[tuple[int, int], ...]
"""Items with their cliques, newest first."""


class Improvement:
    """Changes of a packing, each of which raises its score."""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self._left = PAIRS

    def run(self) -> Packing:
        """The packing when no pair of cliques has anything to gain, or enough of them were tried."""
        while self._packing.unplaced() and any(self._refill(cliques) for cliques in self._choices()):
            for number in self._packing.unplaced():
                self._packing.place(number)
        return self._packing

    def _choices(self) -> Iterator[tuple[int, ...]]:
        """Each clique alone, then pairs, those with most empty trays first: they have most to gain."""
        free = self._packing.free
        cliques = sorted(range(len(free)), key=lambda clique: -free[clique])
        yield from ((clique,) for clique in cliques)
        for pair in combinations(cliques, 2):
            if not free[pair[0]] or self._left <= 0:
                return
            self._left -= 1
            yield pair

    def _refill(self, cliques: tuple[int, ...]) -> bool:
        """Pack the cliques anew if that is worth more than what is in them."""
        packing = self._packing
        before = {number: packing.where[number] for number in self._loose(cliques)}
        was = self._worth(tuple(before), cliques)
        for number in before:
            packing.remove(number)
        worth, fill = self._best_fill(cliques)
        if worth > was:
            for number, clique in fill:
                packing.put(number, (clique,))
            return True
        for number, where in before.items():
            packing.put(number, where or ())
        return False

    def _loose(self, cliques: tuple[int, ...]) -> list[int]:
        """Gangs of one block in the cliques: the others reach beyond."""
        inside = (number for clique in cliques for number in self._packing.inside[clique])
        return [number for number in inside if len(self._packing.items[number].blocks) == 1]

    def _best_fill(self, cliques: tuple[int, ...]) -> tuple[int, Fill]:
        """The fill of highest worth, over all ways to use the empty trays of the cliques."""
        start = tuple(self._packing.free[clique] for clique in cliques)
        states: dict[tuple[int, ...], tuple[int, Fill]] = {start: (0, ())}
        for number in self._candidates(sum(start)):
            block, worth = self._packing.items[number].blocks[0], self._packing.items[number].worth
            for free, (so_far, fill) in list(states.items()):
                for at, clique in enumerate(cliques):
                    if free[at] >= block:
                        then = (*free[:at], free[at] - block, *free[at + 1 :])
                        if so_far + worth > states.get(then, (-1, ()))[0]:
                            states[then] = (so_far + worth, ((number, clique), *fill))
        opened = {
            free: sum(
                one < most and self._opens(clique)
                for one, most, clique in zip(free, start, cliques, strict=True)
            )
            for free in states
        }
        return max((worth - opened[free], fill) for free, (worth, fill) in states.items())

    def _candidates(self, trays: int) -> Iterator[int]:
        """What waits and could matter: of each size as many as the cliques can hold, most worth first."""
        held: dict[int, int] = {}
        for number in self._packing.unplaced():
            blocks = self._packing.items[number].blocks
            if len(blocks) == 1 and held.get(blocks[0], 0) + blocks[0] <= trays:
                held[blocks[0]] = held.get(blocks[0], 0) + blocks[0]
                yield number

    def _worth(self, numbers: tuple[int, ...], cliques: tuple[int, ...]) -> int:
        used = {clique for number in numbers for clique in self._packing.where[number] or ()}
        kept = {clique for clique in cliques if set(self._packing.inside[clique]) - set(numbers)}
        opened = sum(not self._packing.cliques[clique].in_use for clique in used - kept)
        return sum(self._packing.items[number].worth for number in numbers) - opened

    def _opens(self, clique: int) -> bool:
        return not self._packing.cliques[clique].in_use and not self._packing.inside[clique]
