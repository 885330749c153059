"""Necessary conditions that refuse a branch of the search by counting devices against demands.

Each count is a relaxation: it leaves rules out and never adds one. A branch that fails a count
therefore has no answer, and no branch with an answer is ever refused. `Relaxation.possible` checks in
this order:

1. Every request finds enough free devices on its own.
2. All requests together find devices if only use, selectors and counters count. This is a maximum flow
   from requests through classes of like devices to counter sets.
3. The counters of each pool, added up by name, carry the least that the requests draw.
4. Each constraint can be kept alone. matchAttribute has a value under which its requests can be met.
   distinctAttribute has as many values as devices.
5. N constraints over equal requests, such as N pairs of a GPU and a NIC, find N times a value with room
   for one.

`demands_met` is the method of Ford and Fulkerson with breadth-first paths (Edmonds and Karp). Paths
straight from a demand to the sink are filled first, and equal demands are added up.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import chain, pairwise
from typing import TypeVar

import msgspec

from rackloom.core.allocate.capacity import counter_draws
from rackloom.core.allocate.eligibility import CandidateDevice
from rackloom.core.allocate.inputs import RequestAlternative
from rackloom.core.allocate.ledger import AttributeValues, Constraint
from rackloom.core.allocate.outcome import Cause
from rackloom.core.allocate.pools import PoolKey
from rackloom.core.allocate.problem import AllocationProblem
from rackloom.core.allocate.symmetry import FAILS, DeviceSymmetry, sources_of, values_of

# Maximum flow by augmenting paths.


K = TypeVar("K", bound=Hashable)


def demands_met(
    demands: Iterable[tuple[Mapping[K, int], int]],
    supply: Mapping[K, int],
    groups: Mapping[K, Hashable],
    group_supply: Mapping[Hashable, int],
) -> bool:
    """Whether every demand gets its amount.

    A demand is the amount that it may take from each supply, and the amount that it needs. A supply gives at
    most `supply`, and the supplies of a group together give at most `group_supply`.
    """
    # source -> demand -> supply -> (group ->) sink. All demands are met exactly if the flow fills every
    # edge that leaves the source.
    capacity: dict[Hashable, dict[Hashable, int]] = {"source": {}}
    wanted = 0
    # Equal demands become one: requests often repeat, and their total can be divided among them later.
    equal = Counter((frozenset(rows.items()), need) for rows, need in demands)
    for (row, need), times in equal.items():
        node = ("demand", len(capacity["source"]))
        capacity["source"][node] = need * times
        capacity[node] = {("supply", key): most * times for key, most in row}
        wanted += need * times
    for key, most in supply.items():
        group = groups.get(key)
        capacity[("supply", key)] = {"sink" if group is None else ("group", group): most}
    for group, most in group_supply.items():
        capacity[("group", group)] = {"sink": most}
    # Fill the straight paths first. They mostly suffice, and finding them needs no search.
    met = 0
    for demand in list(capacity["source"]):
        for place in list(capacity[demand]):
            onward = next(iter(capacity[place]))
            end = [] if onward == "sink" else ["sink"]
            met += _push_along(capacity, ["source", demand, place, onward, *end])
            if not capacity["source"][demand]:
                break
    # Ford and Fulkerson: the flow is largest when no path has room. Such a path may take flow back from a
    # straight one, so the order above loses nothing.
    while met < wanted and (path := _augmenting_path(capacity)) is not None:
        met += _push_along(capacity, path)
    return met == wanted


def _push_along(capacity: dict[Hashable, dict[Hashable, int]], path: Sequence[Hashable]) -> int:
    """Use all the room of a path."""
    edges = list(pairwise(path))
    amount = min(capacity[start][end] for start, end in edges)
    for start, end in edges if amount else ():
        capacity[start][end] -= amount
        # The residual edge: a later path may take the flow back.
        residual = capacity.setdefault(end, {})
        residual[start] = residual.get(start, 0) + amount
    return amount


def _augmenting_path(capacity: dict[Hashable, dict[Hashable, int]]) -> list[Hashable] | None:
    # Breadth first: shortest paths bound the number of rounds (Edmonds and Karp).
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


# Counts over classes of interchangeable devices.


OpenAlternative = tuple[RequestAlternative, int, int]
"""An alternative, the number of devices that it still needs, and the first position to take them from."""
OpenRequest = Sequence[OpenAlternative]
"""The alternatives of one request. One of them must be met."""
ClassFilter = Callable[[int], bool]
DemandKey = tuple[tuple[int, int, int], ...]
"""A request as the counts see it: the kind, the number and the first position of each alternative."""


class DeviceDemand(msgspec.Struct, frozen=True):
    """The least that equal requests need, and the most that they may take from each class of devices."""

    rows: Mapping[int, int]
    need: int


class Relaxation:
    """Counts over classes of interchangeable devices."""

    def __init__(
        self,
        problem: AllocationProblem,
        asks: Sequence[RequestAlternative],
        constraints: Sequence[Constraint],
        symmetry: DeviceSymmetry,
    ) -> None:
        self._ledger = problem.ledger
        self._classes = [[problem.candidates[number] for number in alike] for alike in symmetry.classes()]
        self._constraints = constraints
        self._values: dict[Constraint, list[list[AttributeValues]]] = {}
        """The values that a constraint may compare, by class. Several if requests derive the attribute."""
        self._sharing: dict[Constraint, Counter[frozenset[int]]] = {}
        """The sets of classes that have a value in common, and the number of values of each set."""
        for constraint in constraints:
            sources = sources_of(constraint, asks)
            having: dict[Hashable, set[int]] = {}
            self._values[constraint] = []
            # One member speaks for its class: interchangeable devices have equal values.
            for number, members in enumerate(self._classes):
                found = values_of(constraint, sources, members[0])
                either = [values for values in found if values not in (None, FAILS)]
                self._values[constraint].append(either)
                for value in chain.from_iterable(values or [None] for values in either):
                    having.setdefault(value, set()).add(number)
            self._sharing[constraint] = Counter(map(frozenset, having.values()))
        self._draws = [_counters_drawn(members[0]) for members in self._classes]
        # Requests that the same classes serve are of one kind, and counts treat them alike.
        serving = {
            ask: tuple(
                number
                for number, (member, *_) in enumerate(self._classes)
                if problem.eligibility.verdict(ask, member) is None
                and self._ledger.free_before(member)
                and not isinstance(self._ledger.suits(ask, member), Cause)
            )
            for ask in asks
        }
        self._servers_of = list(dict.fromkeys(serving.values()))
        self._kind = {ask: self._servers_of.index(servers) for ask, servers in serving.items()}

    def possible(self, choices: Sequence[OpenRequest]) -> bool:
        """False if it is certain that the choices cannot all be met."""
        free = [[member for member in members if not self._ledger.held(member)] for members in self._classes]
        # The cheapest and most selective counts come first. Each leaves rules out and adds none, so a branch
        # that fails one of them has no answer.
        demands = self._demands(map(self._key, choices), free, lambda _number: True)
        if demands is None or not self._met(demands, free) or not self._counters_suffice(demands):
            return False
        # N constraints over equal requests need the same checks, so the results are kept.
        kept: dict[Hashable, bool] = {}
        if not all(self._agrees(constraint, choices, free, kept) for constraint in self._constraints):
            return False
        return self._matched(choices, free)

    def _key(self, options: OpenRequest) -> DemandKey:
        return tuple((self._kind[ask], need, start) for ask, need, start in options)

    def _demands(
        self, keys: Iterable[DemandKey], free: Sequence[Sequence[CandidateDevice]], admits: ClassFilter
    ) -> list[DeviceDemand] | None:
        """The demands, with equal ones added up. None if one of them cannot be met even alone."""
        demands = []
        # Equal requests are one demand of several times the size: their total can be divided in any way.
        for key, times in Counter(keys).items():
            rows: dict[int, int] = {}
            needs = []
            for kind, need, start in key:
                row = {
                    number: sum(member.position >= start for member in free[number])
                    if start
                    else len(free[number])
                    for number in self._servers_of[kind]
                    if admits(number)
                }
                # Alternatives share one demand: every class that serves one of them, and the least need.
                if sum(row.values()) >= need:
                    needs.append(need)
                    rows |= {number: max(count, rows.get(number, 0)) for number, count in row.items()}
            if not needs:
                return None
            row = {number: count * times for number, count in rows.items()}
            demands.append(DeviceDemand(row, min(needs) * times))
        return demands

    def _met(self, demands: Sequence[DeviceDemand], free: Sequence[Sequence[CandidateDevice]]) -> bool:
        """Whether all demands find devices if only use, selectors and the room of counter sets count."""
        wanted = set().union(*(demand.rows for demand in demands))
        most = sum(demand.need for demand in demands)
        supply: dict[int, int] = {}
        groups: dict[int, Hashable] = {}
        limits: dict[Hashable, int] = {}
        for number in wanted:
            members = free[number]
            supply[number] = _most_uses(members, most)
            # The shares of a device draw only once, so counters bound only devices that are given whole.
            if not members or members[0].shareable or not members[0].device.consumes_counters:
                continue
            tightest = self._ledger.book(members[0]).tightest(members[0].device)
            # The scarcest counter set limits the devices of the class, and other classes share it.
            if tightest is not None:
                group, room = (members[0].pool.key, tightest[0]), tightest[1]
                supply[number] = min(supply[number], room)
                groups[number] = group
                limits[group] = max(room, limits.get(group, 0))
        return demands_met([(demand.rows, demand.need) for demand in demands], supply, groups, limits)

    def _counters_suffice(self, demands: Sequence[DeviceDemand]) -> bool:
        """Whether a pool's counters, added up by name over its sets, carry the least amount that is drawn."""
        drawn: dict[tuple[PoolKey, str], Fraction] = {}
        for demand in demands:
            each = [self._draws[number] for number, count in demand.rows.items() if count]
            # Only a counter that every class draws from is certain to be drawn, and only by the least amount.
            for name in set(each[0]).intersection(*each) if each else ():
                least = min(draws[name] for draws in each)
                drawn[name] = drawn.get(name, Fraction(0)) + least * demand.need
        return all(amount <= self._ledger.left_of(pool, name) for (pool, name), amount in drawn.items())

    def _agrees(
        self,
        constraint: Constraint,
        choices: Sequence[OpenRequest],
        free: Sequence[Sequence[CandidateDevice]],
        kept: dict[Hashable, bool],
    ) -> bool:
        """Whether the requests that a constraint covers can keep it, without regard to other requests."""
        covered = self._covered(constraint, choices)
        if not covered:
            return True
        values = self._values[constraint]
        allowed = {
            number for number, of in enumerate(values) if free[number] and any(map(constraint.allows, of))
        }
        need = sum(min(need for _, need, _ in options) for options in covered)
        if constraint.distinct:
            # No two devices share a value, so there are at most as many as values, or one without a value.
            left = {value for number in allowed for of in values[number] for value in of}
            return need <= max(len(left), 1)
        keys = tuple(map(self._key, covered))
        # All covered devices share one value, so one set of classes must serve all of these requests.
        for having in dict.fromkeys(having & allowed for having in self._sharing[constraint]):
            if sum(_most_uses(free[number], need) for number in having) < need:
                continue
            if (keys, having) not in kept:
                demands = self._demands(keys, free, having.__contains__)
                kept[keys, having] = demands is not None and self._met(demands, free)
            if kept[keys, having]:
                return True
        return False

    def _covered(self, constraint: Constraint, choices: Sequence[OpenRequest]) -> list[OpenRequest]:
        """The requests that a constraint covers with all their alternatives."""
        return [
            options
            for options in choices
            if all(constraint in self._ledger.constraints(ask) for ask, _, _ in options)
        ]

    def _matched(self, choices: Sequence[OpenRequest], free: Sequence[Sequence[CandidateDevice]]) -> bool:
        """Whether there are enough values for constraints over equal requests, one for each constraint.

        N pairs of a GPU and a NIC need N times a root with one of each.
        """
        bundles: dict[tuple[str, tuple[DemandKey, ...]], list[Constraint]] = {}
        bound: set[int] = set()
        for constraint in self._constraints:
            covered = self._covered(constraint, choices)
            # A started constraint has its value already. A request may count in one bundle only, or the
            # bundles would demand its devices twice.
            if constraint.distinct or constraint.started or not covered or bound & {*map(id, covered)}:
                continue
            bound |= {*map(id, covered)}
            bundles.setdefault((constraint.attribute, tuple(sorted(map(self._key, covered)))), []).append(
                constraint
            )
        return all(
            len(ones) <= self._places(ones[0], keys, free, len(ones))
            for (_, keys), ones in bundles.items()
            if len(ones) > 1
        )

    def _places(
        self,
        constraint: Constraint,
        keys: Sequence[DemandKey],
        free: Sequence[Sequence[CandidateDevice]],
        most: int,
    ) -> int:
        """An upper bound of how often requests of these keys find one value together."""
        places = 0
        for having, values in self._sharing[constraint].items():
            times = most
            # The scarcest kind of request decides. The count ignores other requests for the same devices.
            for key, count in Counter(keys).items():
                need = count * min(need for _, need, _ in key)
                serving = having & set().union(*(self._servers_of[kind] for kind, _, _ in key))
                room = sum(_most_uses(free[number], need * most) for number in serving)
                times = min(times, room // need if need else most)
            places += values * times
        return places


def _most_uses(devices: Sequence[CandidateDevice], most: int) -> int:
    """The most times that devices can be given out: a shareable one up to `most` times, others once."""
    return sum(most if device.shareable else 1 for device in devices)


def _counters_drawn(candidate: CandidateDevice) -> dict[tuple[PoolKey, str], Fraction]:
    """The amount that a device draws from the counters of its pool, by counter name."""
    total: dict[tuple[PoolKey, str], Fraction] = {}
    for (_, name), amount in counter_draws(candidate.device) if not candidate.shareable else ():
        key = (candidate.pool.key, name)
        total[key] = total.get(key, Fraction(0)) + amount
    return total
