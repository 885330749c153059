"""Pack gangs of whole trays into cliques: exactly if small, else best fit and improvement.

The problem is multiple knapsack with item groups: an item is the tray counts of a gang's colocation
groups, which are placed all or not at all; a bin is the number of empty trays of a clique. The score is
the worth of the placed items (trays, weighted by priority), less one for each clique that is newly
opened.

- `pack_exactly`: dynamic programming over the items. States are the free trays of all cliques, sorted, so
  that equal cliques count once. It applies to at most 6 cliques and 20,000 states, and returns None
  beyond.
- `best_fit_decreasing`: heaviest weight first, then largest, each into the fullest clique that fits,
  cliques in use first.
- `PairwiseImprovement`: repacks one clique, then two cliques, together with the waiting items by dynamic
  programming, and keeps what raises the score. Only gangs with one colocation group are repacked. Gains
  that need three cliques at once are not found, and at most 400 pairs are tried.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import msgspec

TRAY_WORTH = 1000
"""Worth of a tray of weight 1, against 1 for a clique that stays closed: placing more always counts more."""

ItemCliques = tuple[int, ...]
"""The clique of each colocation group of a gang."""


class PackingItem(msgspec.Struct, frozen=True):
    """A gang: the trays of each of its colocation groups, which are placed all or not at all."""

    sizes: tuple[int, ...]
    weight: int = 1

    @property
    def worth(self) -> int:
        """What placing it is worth."""
        return TRAY_WORTH * self.weight * sum(self.sizes)


class PackingClique(msgspec.Struct, frozen=True):
    """A clique."""

    empty: int
    """Trays."""
    in_use: bool = False
    """Opening it costs nothing."""


PackingAssignment = tuple[ItemCliques | None, ...]
"""By item; None: not placed."""


def packing_score(
    cliques: Sequence[PackingClique], items: Sequence[PackingItem], assignment: PackingAssignment
) -> int:
    """The worth of what is placed, less the cliques that are opened for it."""
    worth = sum(item.worth for item, where in zip(items, assignment, strict=True) if where is not None)
    opened = {clique for where in assignment if where is not None for clique in where}
    return worth - sum(not cliques[clique].in_use for clique in opened)


class Packing:
    """Items in cliques, while they are being packed."""

    def __init__(self, cliques: Sequence[PackingClique], items: Sequence[PackingItem]) -> None:
        self.cliques = cliques
        self.items = items
        self.free = [clique.empty for clique in cliques]
        self.where: list[ItemCliques | None] = [None] * len(items)
        self.inside: list[dict[int, int]] = [{} for _ in cliques]
        """By clique: trays by item."""

    def result(self) -> PackingAssignment:
        """Where everything is."""
        return tuple(self.where)

    def unplaced(self) -> list[int]:
        """Items without a clique, most worth first."""
        waiting = [number for number, where in enumerate(self.where) if where is None]
        return sorted(waiting, key=lambda number: (-self.items[number].worth, number))

    def place(self, number: int) -> bool:
        """Place an item, each size where it fits tightest; nothing is placed if one does not fit."""
        found: list[int] = []
        for size in self.items[number].sizes:
            clique = self._tightest(size)
            if clique is None:
                # A gang is placed whole or not at all.
                for before, taken in zip(found, self.items[number].sizes, strict=False):
                    self._add(before, number, -taken)
                return False
            self._add(clique, number, size)
            found.append(clique)
        self.where[number] = tuple(found)
        return True

    def put(self, number: int, where: ItemCliques) -> None:
        """An item where it is known to fit."""
        for clique, size in zip(where, self.items[number].sizes, strict=True):
            self._add(clique, number, size)
        self.where[number] = where

    def remove(self, number: int) -> ItemCliques:
        """Take an item out, if it is placed. Returns where it was."""
        where = self.where[number]
        if where is None:
            return ()
        for clique, size in zip(where, self.items[number].sizes, strict=True):
            self._add(clique, number, -size)
        self.where[number] = None
        return where

    def _tightest(self, size: int) -> int | None:
        """The clique with least room that fits, one in use first: opening a clique costs."""
        fitting = [number for number, free in enumerate(self.free) if free >= size]
        return min(fitting, key=lambda number: (self.is_closed(number), self.free[number]), default=None)

    def is_closed(self, clique: int) -> bool:
        """Whether nothing is in the clique: the first item opens it."""
        return not self.cliques[clique].in_use and not self.inside[clique]

    def _add(self, clique: int, number: int, trays: int) -> None:
        self.free[clique] -= trays
        has = self.inside[clique].get(number, 0) + trays
        if has:
            self.inside[clique][number] = has
        else:
            self.inside[clique].pop(number, None)


def best_fit_decreasing(cliques: Sequence[PackingClique], items: Sequence[PackingItem]) -> Packing:
    """Heaviest weight first, then largest."""
    packing = Packing(cliques, items)
    order = sorted(range(len(items)), key=lambda number: (-items[number].weight, -sum(items[number].sizes)))
    for number in order:
        packing.place(number)
    return packing


# The exact solution of a small case.


MAX_EXACT_CLIQUES = 6
MAX_EXACT_STATES = 20_000
"""Beyond so many of either the case is not small."""

PackingState = tuple[tuple[int, bool], ...]
"""Empty trays and whether it is in use, by clique; sorted where the order of the cliques does not matter."""


def pack_exactly(cliques: Sequence[PackingClique], items: Sequence[PackingItem]) -> PackingAssignment | None:
    """The assignment of highest score, or None where the case is too large.

    Forward, all states that each item can leave; backward, the value of each; forward again, the best choice.
    """
    layers = _reachable_states(cliques, items) if len(cliques) <= MAX_EXACT_CLIQUES else None
    if layers is None:
        return None
    values = _state_values(layers, items)
    state = tuple((clique.empty, clique.in_use) for clique in cliques)
    assignment: list[ItemCliques | None] = []
    for number, item in enumerate(items):
        state, where = _best_option(item, state, values[number + 1])
        assignment.append(where)
    return tuple(assignment)


def _best_option(
    item: PackingItem, state: PackingState, later: Mapping[PackingState, int]
) -> tuple[PackingState, ItemCliques | None]:
    """The best clique for an item, and the state then; `later` is the value of each state."""
    options = list(_options(state, item))
    return max(
        options, key=lambda option: _gain(item, option[0], state, option[1]) + later[_canonical(option[0])]
    )


def _reachable_states(
    cliques: Sequence[PackingClique], items: Sequence[PackingItem]
) -> list[set[PackingState]] | None:
    """The states before each item and after the last, in canonical order of the cliques; None: too many.

    Equal cliques are interchangeable, so sorting a state loses no packing and merges the symmetric ones.
    """
    layers = [{_canonical(tuple((clique.empty, clique.in_use) for clique in cliques))}]
    total = 1
    for item in items:
        layers.append({_canonical(after) for state in layers[-1] for after, _ in _options(state, item)})
        total += len(layers[-1])
        if total > MAX_EXACT_STATES:
            return None
    return layers


def _state_values(
    layers: Sequence[set[PackingState]], items: Sequence[PackingItem]
) -> list[dict[PackingState, int]]:
    """By backward induction, the most that the items still to come can add to each state."""
    values = [dict.fromkeys(layers[-1], 0)]
    for item, states in zip(reversed(items), reversed(layers[:-1]), strict=True):
        after = values[0]
        found = {
            state: max(
                _gain(item, then, state, where) + after[_canonical(then)]
                for then, where in _options(state, item)
            )
            for state in states
        }
        values.insert(0, found)
    return values


def _gain(item: PackingItem, after: PackingState, before: PackingState, where: ItemCliques | None) -> int:
    opened = sum(used for _, used in after) - sum(used for _, used in before)
    return (item.worth if where is not None else 0) - opened


def _options(state: PackingState, item: PackingItem) -> Iterator[tuple[PackingState, ItemCliques | None]]:
    """The item left out, or in cliques; equal cliques are tried once."""
    yield state, None
    yield from _placements(state, item.sizes, ())


def _placements(
    state: PackingState, sizes: tuple[int, ...], done: ItemCliques
) -> Iterator[tuple[PackingState, ItemCliques]]:
    if not sizes:
        yield state, done
        return
    tried: set[tuple[int, bool]] = set()
    for number, clique in enumerate(state):
        if clique[0] >= sizes[0] and clique not in tried:
            tried.add(clique)
            after = (*state[:number], (clique[0] - sizes[0], True), *state[number + 1 :])
            yield from _placements(after, sizes[1:], (*done, number))


def _canonical(state: PackingState) -> PackingState:
    return tuple(sorted(state))


# Improvement of one or two cliques at a time.


MAX_PAIRS = 400
"""Pairs of cliques that are packed anew at most: each takes some 10 ms."""

CliqueFill = tuple[tuple[int, int], ...]
"""Items with their cliques, newest first."""


class PairwiseImprovement:
    """Changes of a packing, each of which raises its score."""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self._left = MAX_PAIRS

    def run(self) -> Packing:
        """Improve until no pair of cliques gains anything, or `MAX_PAIRS` were tried.

        Each refill raises the score, so no packing is seen twice and the loop ends.
        """
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
        """Pack the cliques anew if that is worth more than their present content."""
        packing = self._packing
        # Gangs with several colocation groups reach into other cliques, so they stay.
        inside = [number for clique in cliques for number in packing.inside[clique]]
        before = {number: packing.where[number] for number in inside if len(packing.items[number].sizes) == 1}
        present = self._worth(tuple(before), cliques)
        for number in before:
            packing.remove(number)
        worth, fill = self._best_fill(cliques)
        if worth > present:
            for number, clique in fill:
                packing.put(number, (clique,))
            return True
        for number, where in before.items():
            packing.put(number, where or ())
        return False

    def _best_fill(self, cliques: tuple[int, ...]) -> tuple[int, CliqueFill]:
        """The fill of highest worth, by dynamic programming over the free trays of the cliques (knapsack)."""
        start = tuple(self._packing.free[clique] for clique in cliques)
        states: dict[tuple[int, ...], tuple[int, CliqueFill]] = {start: (0, ())}
        for number in self._candidates(sum(start)):
            item = self._packing.items[number]
            size, worth = item.sizes[0], item.worth
            # A copy: each item is put in once.
            for free, (so_far, fill) in list(states.items()):
                for at, clique in enumerate(cliques):
                    if free[at] >= size:
                        then = (*free[:at], free[at] - size, *free[at + 1 :])
                        if so_far + worth > states.get(then, (-1, ()))[0]:
                            states[then] = (so_far + worth, ((number, clique), *fill))
        opened = {
            free: sum(
                left < most and self._packing.is_closed(clique)
                for left, most, clique in zip(free, start, cliques, strict=True)
            )
            for free in states
        }
        return max((worth - opened[free], fill) for free, (worth, fill) in states.items())

    def _candidates(self, trays: int) -> Iterator[int]:
        """Waiting items that could matter: of each size as many as the cliques can hold, most worth first."""
        held: dict[int, int] = {}
        for number in self._packing.unplaced():
            sizes = self._packing.items[number].sizes
            if len(sizes) == 1 and held.get(sizes[0], 0) + sizes[0] <= trays:
                held[sizes[0]] = held.get(sizes[0], 0) + sizes[0]
                yield number

    def _worth(self, numbers: tuple[int, ...], cliques: tuple[int, ...]) -> int:
        used = {clique for number in numbers for clique in self._packing.where[number] or ()}
        kept = {clique for clique in cliques if set(self._packing.inside[clique]) - set(numbers)}
        opened = sum(not self._packing.cliques[clique].in_use for clique in used - kept)
        return sum(self._packing.items[number].worth for number in numbers) - opened
