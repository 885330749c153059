"""Counts that refuse what cannot be met: devices against demands, with most rules left out."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
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
Admits = Callable[[Ask, int], bool]


class Demand(msgspec.Struct, frozen=True):
    """What a request needs at least, and how much it may take from which class of devices."""

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
        self._serving = {ask: list(self._servers(ask, eligibility)) for ask in asks}

    def possible(self, choices: Sequence[Options]) -> bool:
        """False where the choices surely cannot all be met."""
        free = [[one for one in members if not self._ledger.held(one)] for members in self._classes]
        demands = self._demands(choices, free, lambda _ask, _number: True)
        if demands is None or not self._met(demands, free) or not self._drawn(demands):
            return False
        return all(self._agrees(one, choices, free) for one in self._constraints)

    def _servers(self, ask: Ask, eligibility: Eligibility) -> Iterator[int]:
        for number, members in enumerate(self._classes):
            one = members[0]
            selected = eligibility.verdict(ask, one) is None and self._ledger.free_before(one)
            if selected and not isinstance(self._ledger.suits(ask, one), Cause):
                yield number

    def _demands(
        self, choices: Sequence[Options], free: Sequence[Sequence[Candidate]], admits: Admits
    ) -> list[Demand] | None:
        """The demand of each request; None where one cannot be met even alone."""
        demands = []
        for options in choices:
            demand = self._demand(options, free, admits)
            if demand is None:
                return None
            demands.append(demand)
        return demands

    def _demand(self, options: Options, free: Sequence[Sequence[Candidate]], admits: Admits) -> Demand | None:
        rows: dict[int, int] = {}
        needs = []
        for ask, need, start in options:
            row = {
                number: sum(one.position >= start for one in free[number]) if start else len(free[number])
                for number in self._serving[ask]
                if admits(ask, number)
            }
            if sum(row.values()) >= need:
                needs.append(need)
                rows |= {number: max(count, rows.get(number, 0)) for number, count in row.items()}
        return Demand(rows, min(needs)) if needs else None

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
        each = [self._draw(self._classes[number][0]) for number, count in demand.rows.items() if count]
        common = set(each[0]).intersection(*each) if each else set()
        return {name: min(one[name] for one in each) for name in common}

    def _draw(self, one: Candidate) -> dict[tuple[PoolKey, str], Fraction]:
        total: dict[tuple[PoolKey, str], Fraction] = {}
        for (_, name), amount in draws(one.device) if not one.shareable else ():
            key = (one.pool.key, name)
            total[key] = total.get(key, Fraction(0)) + amount
        return total

    def _agrees(
        self, constraint: Constraint, choices: Sequence[Options], free: Sequence[Sequence[Candidate]]
    ) -> bool:
        """Whether the requests that a constraint covers can keep it, others left out."""
        covered = [
            options
            for options in choices
            if all(constraint in self._ledger.constraints(ask) for ask, _, _ in options)
        ]
        if not covered:
            return True
        values = self._values[constraint]
        allowed = [number for number, of in enumerate(values) if constraint.allows(of) and free[number]]
        need = sum(min(need for _, need, _ in options) for options in covered)
        if constraint.distinct:
            # No two devices share a value: no more of them than values, save a first one that has none.
            left = {value for number in allowed for value in values[number] or ()}
            return need <= max(len(left), 1)
        together = (one for one in self._by_value(constraint, allowed) if self._carries(one, need, free))
        return any(self._kept(covered, having, free) for having in together)

    def _carries(self, having: Set[int], need: int, free: Sequence[Sequence[Candidate]]) -> bool:
        room = sum(need if one.shareable else 1 for number in having for one in free[number])
        return room >= need

    def _kept(
        self, covered: Sequence[Options], having: Set[int], free: Sequence[Sequence[Candidate]]
    ) -> bool:
        """Whether the covered requests are met from the classes that have one value."""
        demands = self._demands(covered, free, lambda _ask, number: number in having)
        return demands is not None and self._met(demands, free)

    def _by_value(self, constraint: Constraint, allowed: Sequence[int]) -> list[frozenset[int]]:
        """Classes by the value that they could agree on; equal sets once."""
        having: dict[Hashable, set[int]] = {}
        for number in allowed:
            for value in self._values[constraint][number] or [None]:
                having.setdefault(value, set()).add(number)
        return list(dict.fromkeys(frozenset(of) for of in having.values()))
