"""The best packing of a small case, by dynamic programming over cliques that are alike."""

from collections.abc import Iterator, Mapping, Sequence

from rackloom.claim.place.many.packing import Assignment, Clique, Item, Where

CLIQUES = 6
STATES = 20_000
"""Beyond so many of either the case is not small."""

State = tuple[tuple[int, bool], ...]
"""Empty trays and whether it is in use, by clique; sorted where the order of the cliques does not matter."""


def best_packing(cliques: Sequence[Clique], items: Sequence[Item]) -> Assignment | None:
    """The assignment of highest score, or None where the case is too large to tell."""
    layers = _layers(cliques, items) if len(cliques) <= CLIQUES else None
    if layers is None:
        return None
    values = _values(layers, items)
    state = tuple((clique.empty, clique.in_use) for clique in cliques)
    assignment: list[Where | None] = []
    for number, item in enumerate(items):
        state, where = _best(item, state, values[number + 1])
        assignment.append(where)
    return tuple(assignment)


def _best(item: Item, state: State, later: Mapping[State, int]) -> tuple[State, Where | None]:
    """Where an item is best put, and the state then; `later` is what each state is worth."""
    options = list(_options(state, item))
    return max(options, key=lambda one: _gain(item, one[0], state, one[1]) + later[_like(one[0])])


def _layers(cliques: Sequence[Clique], items: Sequence[Item]) -> list[set[State]] | None:
    """The states before each item and after the last; cliques that are alike count once."""
    layers = [{_like(tuple((clique.empty, clique.in_use) for clique in cliques))}]
    total = 1
    for item in items:
        layers.append({_like(after) for state in layers[-1] for after, _ in _options(state, item)})
        total += len(layers[-1])
        if total > STATES:
            return None
    return layers


def _values(layers: Sequence[set[State]], items: Sequence[Item]) -> list[dict[State, int]]:
    """What is yet to be had from each state."""
    values = [dict.fromkeys(layers[-1], 0)]
    for item, states in zip(reversed(items), reversed(layers[:-1]), strict=True):
        after = values[0]
        found = {
            state: max(
                _gain(item, then, state, where) + after[_like(then)] for then, where in _options(state, item)
            )
            for state in states
        }
        values.insert(0, found)
    return values


def _gain(item: Item, after: State, before: State, where: Where | None) -> int:
    opened = sum(used for _, used in after) - sum(used for _, used in before)
    return (item.worth if where is not None else 0) - opened


def _options(state: State, item: Item) -> Iterator[tuple[State, Where | None]]:
    """The item left out, or in cliques; those that are alike once."""
    yield state, None
    yield from _placings(state, item.blocks, ())


def _placings(state: State, blocks: tuple[int, ...], done: Where) -> Iterator[tuple[State, Where]]:
    if not blocks:
        yield state, done
        return
    tried: set[tuple[int, bool]] = set()
    for number, clique in enumerate(state):
        if clique[0] >= blocks[0] and clique not in tried:
            tried.add(clique)
            after = (*state[:number], (clique[0] - blocks[0], True), *state[number + 1 :])
            yield from _placings(after, blocks[1:], (*done, number))


def _like(state: State) -> State:
    return tuple(sorted(state))
