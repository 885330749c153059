"""Maximum flow, small: whether demands can be met by supplies that several of them want."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

K = TypeVar("K", bound=Hashable)


def met(
    demands: Iterable[tuple[Mapping[K, int], int]],
    supply: Mapping[K, int],
    groups: Mapping[K, Hashable],
    group_supply: Mapping[Hashable, int],
) -> bool:
    """Whether every demand gets its amount.

    A demand is (how much it may take from each supply, how much it needs); a supply gives at most `supply`,
    and the supplies of a group together at most `group_supply`.
    """
    capacity: dict[Hashable, dict[Hashable, int]] = {"source": {}}
    total = 0
    for rows, need in _alike(demands):
        node = ("demand", len(capacity["source"]))
        capacity["source"][node] = need
        capacity[node] = {("supply", key): most for key, most in rows.items()}
        total += need
    for key, most in supply.items():
        group = groups.get(key)
        capacity[("supply", key)] = {"sink" if group is None else ("group", group): most}
    for group, most in group_supply.items():
        capacity[("group", group)] = {"sink": most}
    return _max_flow(capacity, total) == total


def _alike(demands: Iterable[tuple[Mapping[K, int], int]]) -> Iterable[tuple[Mapping[K, int], int]]:
    """Equal demands, added up: requests often repeat, and what they get together can be shared out again."""
    times = Counter((frozenset(rows.items()), need) for rows, need in demands)
    return [
        ({supply: most * count for supply, most in rows}, need * count)
        for (rows, need), count in times.items()
    ]


def _max_flow(capacity: dict[Hashable, dict[Hashable, int]], wanted: int) -> int:
    """Ford and Fulkerson: find a path with room until there is none; the straight ones first."""
    total = _straight(capacity)
    while total < wanted:
        path = _path(capacity)
        if path is None:
            break
        total += _push(capacity, path)
    return total


def _straight(capacity: dict[Hashable, dict[Hashable, int]]) -> int:
    """From each demand to its supplies and on to the sink, as far as there is room."""
    total = 0
    for demand in list(capacity["source"]):
        for supply in list(capacity[demand]):
            onward = next(iter(capacity[supply]))
            end = [] if onward == "sink" else ["sink"]
            total += _push(capacity, ["source", demand, supply, onward, *end])
            if not capacity["source"][demand]:
                break
    return total


def _push(capacity: dict[Hashable, dict[Hashable, int]], path: Sequence[Hashable]) -> int:
    """Use all the room of a path."""
    edges = list(pairwise(path))
    amount = min(capacity[a][b] for a, b in edges)
    for a, b in edges if amount else ():
        capacity[a][b] -= amount
        back = capacity.setdefault(b, {})
        back[a] = back.get(a, 0) + amount
    return amount


def _path(capacity: dict[Hashable, dict[Hashable, int]]) -> list[Hashable] | None:
    came: dict[Hashable, Hashable] = {"source": None}
    queue: list[Hashable] = ["source"]
    for node in queue:
        for there, room in capacity.get(node, {}).items():
            if room > 0 and there not in came:
                came[there] = node
                queue.append(there)
        if "sink" in came:
            break
    if "sink" not in came:
        return None
    path: list[Hashable] = ["sink"]
    while came[path[-1]] is not None:
        path.append(came[path[-1]])
    return path[::-1]
