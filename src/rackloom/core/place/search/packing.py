"""Choose which of several gangs of whole trays run, and in which cliques, when they compete for room.

`choose_cliques` places one gang, and cannot weigh gangs against each other. So if a gang of a batch is left
over, this strategy is used. The problem is multiple knapsack with item groups. An item is the tray counts of
a gang's colocation groups, which are placed all or not at all. A bin is the empty trays of a clique.
The score is the worth of the placed items (trays, weighted by priority), less one for each clique that is
newly opened.

One dynamic programme (`best_fill`) packs some items into some cliques. It walks through the items. A state
is the free trays of the cliques, sorted, so that equal cliques count once. `pack` takes all cliques and all
items if the states are few, which is exact. Otherwise it starts with best fit decreasing, packs one clique,
then two cliques together with the waiting items, and keeps each change that raises the score. Only gangs
with one colocation group are packed again. Gains that need three cliques at once are not found.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, combinations, islice
from math import inf
from typing import Any

import msgspec

TRAY_WORTH = 1000
"""Worth of a tray of weight 1, against 1 for a clique that stays closed: placing more always counts more."""
MAX_EXACT_CLIQUES = 6
MAX_EXACT_STATES = 20_000
"""A small case has at most this many cliques and states. States count once for each item that meets them."""
MAX_PAIRS = 400
"""Pairs of cliques that are packed again at most: each takes some 10 ms."""
CACHED_STEPS = 1 << 14
"""Steps of the dynamic programme that are remembered: gangs of one size take the same steps."""

ItemCliques = tuple[int, ...]
"""The clique of each colocation group of a gang."""


class PackingItem(msgspec.Struct, frozen=True):
    """A gang: the trays of each of its colocation groups, which are placed all or not at all."""

    sizes: tuple[int, ...]
    weight: int = 1

    @property
    def worth(self) -> int:
        """The worth of placing it."""
        return TRAY_WORTH * self.weight * sum(self.sizes)


class PackingClique(msgspec.Struct, frozen=True):
    """A clique."""

    empty: int
    """Trays."""
    in_use: bool = False
    """Opening it costs nothing."""


PackingAssignment = tuple[ItemCliques | None, ...]
"""By item. None if it is not placed."""


def pack(cliques: Sequence[PackingClique], items: Sequence[PackingItem]) -> PackingAssignment:
    """The optimum if the case is small, else a good packing."""
    # Small sites are solved exactly, unless many unlike gangs make too many states.
    if len(cliques) <= MAX_EXACT_CLIQUES:
        exact = best_fill(_rooms(cliques, items, ()), dict(enumerate(items)), MAX_EXACT_STATES)
        if exact is not None:
            return tuple([exact[1].get(number) for number in range(len(items))])
    return improved(cliques, items, best_fit_decreasing(cliques, items))


# Some items in some cliques.


Rooms = tuple[int, ...]
"""By clique: twice its free trays, and one more if it is in use. Numbers sort and hash faster than pairs."""


def _rooms(
    cliques: Sequence[PackingClique], items: Sequence[PackingItem], where: Sequence[ItemCliques | None]
) -> Rooms:
    """The cliques with the items that are placed so far."""
    rooms = [2 * clique.empty + clique.in_use for clique in cliques]
    for item, at in zip(items, where, strict=False):
        for size, clique in zip(item.sizes, at or (), strict=False):
            rooms[clique] = (rooms[clique] - 2 * size) | 1
    return tuple(rooms)


def best_fill(
    rooms: Rooms, items: Mapping[int, PackingItem], most_states: float = inf
) -> tuple[int, dict[int, ItemCliques]] | None:
    """The worth, then the items to place and their cliques. None if there are too many states."""
    start: Rooms = tuple(sorted(rooms))
    # By state: the worth of the placed items, and the steps to it, the newest first. Of two ways to a state,
    # the one with less worth can never lead to more.
    states: dict[Rooms, tuple[int, Any]] = {start: (0, ())}
    met = 0
    for number, item in items.items():
        # Leaving the item out is a choice as well, so the states before it stay.
        for state, (value, steps) in list(states.items()):
            for after, opened in _next_states(state, item.sizes):
                worth = value + item.worth - opened
                if after not in states or worth > states[after][0]:
                    states[after] = (worth, (number, after, steps))
        met += len(states)
        if met > most_states:
            return None
    worth, steps = max(states.values(), key=lambda found: found[0])
    path = []
    while steps:
        number, after, steps = steps
        path.append((number, after))
    # A state loses the identity of the sorted cliques, so each step is taken again from the start.
    where: dict[int, ItemCliques] = {}
    for number, after in reversed(path):
        rooms, where[number] = next(
            placed for placed in _placements(rooms, items[number].sizes) if tuple(sorted(placed[0])) == after
        )
    return worth, where


@lru_cache(CACHED_STEPS)
def _next_states(state: Rooms, sizes: tuple[int, ...]) -> tuple[tuple[Rooms, int], ...]:
    """The states with one more item, each with the number of cliques that are opened for it."""
    used = sum([room & 1 for room in state])
    found = dict.fromkeys(tuple(sorted(after)) for after, _ in _placements(state, sizes))
    return tuple((after, sum([room & 1 for room in after]) - used) for after in found)


def _placements(
    rooms: Rooms, sizes: tuple[int, ...], done: ItemCliques = ()
) -> Iterator[tuple[Rooms, ItemCliques]]:
    """Ways to place an item. Equal cliques are tried once."""
    if not sizes:
        yield rooms, done
        return
    for at, room in enumerate(rooms):
        # A clique equal to an earlier one leads to the same sorted state.
        if room >> 1 >= sizes[0] and room not in rooms[:at]:
            after = (*rooms[:at], (room - 2 * sizes[0]) | 1, *rooms[at + 1 :])
            yield from _placements(after, sizes[1:], (*done, at))


# A start, and its improvement.


def best_fit_decreasing(cliques: Sequence[PackingClique], items: Sequence[PackingItem]) -> PackingAssignment:
    """Heaviest weight first, then largest, each where it fits tightest."""
    rooms, where = list(_rooms(cliques, items, ())), dict[int, ItemCliques | None]()
    for number in sorted(range(len(items)), key=lambda at: (-items[at].weight, -sum(items[at].sizes))):
        where[number] = _put_tightest(rooms, items[number].sizes)
    return tuple([where[number] for number in range(len(items))])


def _put_tightest(rooms: list[int], sizes: tuple[int, ...]) -> ItemCliques | None:
    """Use the tightest clique for each size, one in use first. If one lacks, return None and use nothing."""
    left, found = list(rooms), list[int]()
    for size in sizes:
        # Opening a clique costs one, so those in use come first. Among equals, the least room is left over.
        fitting = [(1 - (room & 1), room, clique) for clique, room in enumerate(left) if room >> 1 >= size]
        if not fitting:
            return None
        _, room, clique = min(fitting)
        found.append(clique)
        left[clique] = (room - 2 * size) | 1
    rooms[:] = left
    return tuple(found)


def improved(
    cliques: Sequence[PackingClique], items: Sequence[PackingItem], where: PackingAssignment
) -> PackingAssignment:
    """Fill one or two cliques again until that gains nothing, or `MAX_PAIRS` were tried.

    Each time raises the score, so no packing is seen twice and the loop ends.
    """
    now, pairs_left = list(where), MAX_PAIRS
    while None in now:
        # Gangs with several colocation groups reach into other cliques, so they stay.
        single = [number for number, item in enumerate(items) if len(item.sizes) == 1]
        bare = _rooms(cliques, items, [None if len(at or ()) == 1 else at for at in now])
        free = _rooms(cliques, items, now)
        inside: dict[int, list[int]] = {}
        for number in single:
            if (at := now[number]) is not None:
                inside.setdefault(at[0], []).append(number)
        waiting = [number for number in single if now[number] is None]
        # Those with most free trays first: they have most to gain.
        order = sorted(range(len(cliques)), key=lambda clique: -(free[clique] >> 1))
        pairs = (pair for pair in combinations(order, 2) if free[pair[0]] >> 1)
        for chosen in chain(((clique,) for clique in order), islice(pairs, pairs_left)):
            pairs_left -= len(chosen) - 1
            # The present worth: the gangs in these cliques, less the cliques that only these gangs keep open.
            before = [number for clique in chosen for number in inside.get(clique, ())]
            present = sum([items[number].worth for number in before])
            present -= sum([clique in inside and not bare[clique] & 1 for clique in chosen])
            rooms = tuple([bare[clique] for clique in chosen])
            candidates = _candidates(items, [*before, *waiting], sum(rooms) >> 1)
            worth, fill = best_fill(rooms, candidates) or (0, {})
            if worth > present:
                # A gang that was here and is not in the better filling waits again.
                for number in before:
                    now[number] = None
                for number, at in fill.items():
                    now[number] = (chosen[at[0]],)
                break
        else:
            break
        # The filling may have freed room elsewhere, for gangs with several colocation groups too.
        left = list(_rooms(cliques, items, now))
        for number in sorted(range(len(items)), key=lambda at: -items[at].worth):
            now[number] = now[number] or _put_tightest(left, items[number].sizes)
    return tuple(now)


def _candidates(items: Sequence[PackingItem], numbers: Sequence[int], trays: int) -> dict[int, PackingItem]:
    """Items that could matter: of each size as many as the cliques can hold, most worth first."""
    held: dict[int, int] = {}
    found = {}
    for number in sorted(numbers, key=lambda at: (-items[at].worth, at)):
        # Equal sizes are interchangeable but for their worth: an optimum takes the best of each size.
        size = items[number].sizes[0]
        held[size] = held.get(size, 0) + size
        if held[size] <= trays:
            found[number] = items[number]
    return found
