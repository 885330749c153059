"""Counts that refuse what cannot be met: devices against demands, with most rules left out."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from fractions import Fraction

import msgspec

from rackloom.claim.allocate.alike import Alike
from rackloom.claim.allocate.candidates import Candidate
from rackloom.claim.allocate.causes import Cause
from rackloom.claim.allocate.constraints import Constraint, Values
from rackloom.claim.allocate.counters import draws
from rackloom.claim.allocate.eligibility import Eligibility
from rackloom.claim.allocate.flow import met
from rackloom.claim.allocate.ledger import Ledger
from rackloom.claim.allocate.pools import PoolKey
from rackloom.claim.allocate.requests import Ask

Option = tuple[Ask, int, int]
"""An ask, how many devices it still needs, and the position from which it may take them."""
Options = Sequence[Option]
"""The asks of one request of which one is to be met."""
Admits = Callable[[int], bool]
Key = tuple[tuple[int, int, int], ...]
"""What counts of the options of a request: for each, whom it can take, how many, and from where."""


class Demand(msgspec.Struct, frozen=True):
    """What equal requests need at least, and how much they may take from which class of devices."""

    rows: Mapping[int, int]
    need: int


class Relaxation:
    """Counting over classes of devices that are alike in every way."""

    def __init__(
        self,
        asks: Sequence[Ask],
        candidates: Sequence[Candidate],
        constraints: Sequence[Constraint],
        alike: Alike,
        eligibility: Eligibility,
        ledger: Ledger,
    ) -> None:
        self._ledger = ledger
        self._classes = [[candidates[one] for one in positions] for positions in alike.classes()]
        self._constraints = constraints
        self._values: dict[Constraint, list[Values | None]] = {
            one: [one.values(members[0]) for members in self._classes] for one in constraints
        }
        self._sharing = {one: self._having(one) for one in constraints}
        self._draws = [_draw(members[0]) for members in self._classes]
        serving = {ask: tuple(self._servers(ask, eligibility)) for ask in asks}
        self._servers_of = list(dict.fromkeys(serving.values()))
        self._kind = {ask: self._servers_of.index(servers) for ask, servers in serving.items()}

    def possible(self, choices: Sequence[Options]) -> bool:
        """False where the choices surely cannot all be met."""
        free = [[one for one in members if not self._ledger.held(one)] for members in self._classes]
        demands = self._demands(map(self._key, choices), free, lambda _number: True)
        if demands is None or not self._met(demands, free) or not self._drawn(demands):
            return False
        kept: dict[Hashable, bool] = {}
        if not all(self._agrees(one, choices, free, kept) for one in self._constraints):
            return False
        return self._matched(choices, free)

    def _key(self, options: Options) -> Key:
        return tuple((self._kind[ask], need, start) for ask, need, start in options)

    def _servers(self, ask: Ask, eligibility: Eligibility) -> Iterator[int]:
        for number, members in enumerate(self._classes):
            one = members[0]
            selected = eligibility.verdict(ask, one) is None and self._ledger.free_before(one)
            if selected and not isinstance(self._ledger.suits(ask, one), Cause):
                yield number

    def _demands(
        self, keys: Iterable[Key], free: Sequence[Sequence[Candidate]], admits: Admits
    ) -> list[Demand] | None:
        """The demands, equal ones added up; None where one cannot be met even alone."""
        demands = []
        for key, times in Counter(keys).items():
            demand = self._demand(key, times, free, admits)
            if demand is None:
                return None
            demands.append(demand)
        return demands

    def _demand(
        self, key: Key, times: int, free: Sequence[Sequence[Candidate]], admits: Admits
    ) -> Demand | None:
        rows: dict[int, int] = {}
        needs = []
        for kind, need, start in key:
            row = {
                number: sum(one.position >= start for one in free[number]) if start else len(free[number])
                for number in self._servers_of[kind]
                if admits(number)
            }
            if sum(row.values()) >= need:
                needs.append(need)
                rows |= {number: max(count, rows.get(number, 0)) for number, count in row.items()}
        if not needs:
            return None
        return Demand({number: count * times for number, count in rows.items()}, min(needs) * times)

    def _met(self, demands: Sequence[Demand], free: Sequence[Sequence[Candidate]]) -> bool:
        """Whether all find devices if only use, selectors and the room of counter sets counted."""
        wanted = set().union(*(demand.rows for demand in demands))
        most = sum(demand.need for demand in demands)
        supply: dict[int, int] = {}
        groups: dict[int, Hashable] = {}
        limits: dict[Hashable, int] = {}
        for number in wanted:
            supply[number] = sum(most if one.shareable else 1 for one in free[number])
            tightest = self._tightest(free[number])
            if tightest is not None:
                group, room = tightest
                supply[number] = min(supply[number], room)
                groups[number] = group
                limits[group] = max(room, limits.get(group, 0))
        return met([(one.rows, one.need) for one in demands], supply, groups, limits)

    def _tightest(self, members: Sequence[Candidate]) -> tuple[Hashable, int] | None:
        """Which counter bounds a class of devices, and how many of them it carries."""
        if not members or members[0].shareable:
            return None
        one = members[0]
        tightest = self._ledger.book(one).tightest(one.device) if one.device.consumes_counters else None
        return None if tightest is None else ((one.pool.key, tightest[0]), tightest[1])

    def _drawn(self, demands: Sequence[Demand]) -> bool:
        """Whether a pool's counters of one name, added up over its sets, carry the least that is drawn."""
        drawn: dict[tuple[PoolKey, str], Fraction] = {}
        for demand in demands:
            for name, amount in self._least(demand).items():
                drawn[name] = drawn.get(name, Fraction(0)) + amount * demand.need
        return all(amount <= self._ledger.left_of(pool, name) for (pool, name), amount in drawn.items())

    def _least(self, demand: Demand) -> dict[tuple[PoolKey, str], Fraction]:
        """What each device of a demand draws at least, whichever it is."""
        each = [self._draws[number] for number, count in demand.rows.items() if count]
        common = set(each[0]).intersection(*each) if each else set()
        return {name: min(one[name] for one in each) for name in common}

    def _agrees(
        self,
        constraint: Constraint,
        choices: Sequence[Options],
        free: Sequence[Sequence[Candidate]],
        kept: dict[Hashable, bool],
    ) -> bool:
        """Whether the requests that a constraint covers can keep it, others left out."""
        covered = self._covered(constraint, choices)
        if not covered:
            return True
        values = self._values[constraint]
        allowed = {number for number, of in enumerate(values) if free[number] and constraint.allows(of)}
        need = sum(min(need for _, need, _ in options) for options in covered)
        if constraint.distinct:
            # No two devices share a value: no more of them than values, save a first one that has none.
            left = {value for number in allowed for value in values[number] or ()}
            return need <= max(len(left), 1)
        together = (one for one in self._by_value(constraint, allowed) if self._carries(one, need, free))
        keys = tuple(map(self._key, covered))
        return any(self._kept(keys, having, free, kept) for having in together)

    def _covered(self, constraint: Constraint, choices: Sequence[Options]) -> list[Options]:
        """The requests that a constraint covers with all their alternatives."""
        return [
            options
            for options in choices
            if all(constraint in self._ledger.constraints(ask) for ask, _, _ in options)
        ]

    def _carries(self, having: Set[int], need: int, free: Sequence[Sequence[Candidate]]) -> bool:
        room = sum(need if one.shareable else 1 for number in having for one in free[number])
        return room >= need

    def _kept(
        self,
        keys: tuple[Key, ...],
        having: frozenset[int],
        free: Sequence[Sequence[Candidate]],
        known: dict[Hashable, bool],
    ) -> bool:
        """Whether the covered requests are met from the classes that have one value."""
        if (keys, having) not in known:
            demands = self._demands(keys, free, lambda number: number in having)
            known[keys, having] = demands is not None and self._met(demands, free)
        return known[keys, having]

    def _matched(self, choices: Sequence[Options], free: Sequence[Sequence[Candidate]]) -> bool:
        """Whether there are values enough for constraints that ask for the same, each for a value of its own.

        N pairs of a GPU and a NIC need N times a root with one of each.
        """
        bundles: dict[tuple[str, tuple[Key, ...]], list[Constraint]] = {}
        bound: set[int] = set()
        for one in self._constraints:
            covered = self._covered(one, choices)
            if one.distinct or one.started or not covered or bound & {*map(id, covered)}:
                continue
            bound |= {*map(id, covered)}
            bundles.setdefault((one.attribute, tuple(sorted(map(self._key, covered)))), []).append(one)
        return all(
            len(ones) <= self._places(ones[0], keys, free, len(ones))
            for (_, keys), ones in bundles.items()
            if len(ones) > 1
        )

    def _places(
        self, constraint: Constraint, keys: Sequence[Key], free: Sequence[Sequence[Candidate]], most: int
    ) -> int:
        """How many times, at most, requests of these keys find one value together."""
        return sum(
            values * min(self._times(key, count, having, free, most) for key, count in Counter(keys).items())
            for having, values in self._sharing[constraint].items()
        )

    def _times(
        self, key: Key, count: int, having: Set[int], free: Sequence[Sequence[Candidate]], most: int
    ) -> int:
        """How many times `count` requests of a key are met from the classes, counting devices alone."""
        need = count * min(need for _, need, _ in key)
        serving = having & set().union(*(self._servers_of[kind] for kind, _, _ in key))
        room = sum(need * most if one.shareable else 1 for number in serving for one in free[number])
        return min(room // need if need else most, most)

    def _by_value(self, constraint: Constraint, allowed: Set[int]) -> list[frozenset[int]]:
        """Classes by the value that they could agree on; equal sets once."""
        found = dict.fromkeys(having & allowed for having in self._sharing[constraint])
        return [having for having in found if having]

    def _having(self, constraint: Constraint) -> Counter[frozenset[int]]:
        """The sets of classes that have a value together, and how many values each has."""
        having: dict[Hashable, set[int]] = {}
        for number, values in enumerate(self._values[constraint]):
            for value in () if values is None else values or [None]:
                having.setdefault(value, set()).add(number)
        return Counter(map(frozenset, having.values()))


def _draw(one: Candidate) -> dict[tuple[PoolKey, str], Fraction]:
    """What a device draws from the counters of its pool, by their names."""
    total: dict[tuple[PoolKey, str], Fraction] = {}
    for (_, name), amount in draws(one.device) if not one.shareable else ():
        key = (one.pool.key, name)
        total[key] = total.get(key, Fraction(0)) + amount
    return total
