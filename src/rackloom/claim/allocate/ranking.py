"""What an answer costs, and what it will cost at least while it is still being put together."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from fractions import Fraction
from itertools import combinations

from rackloom.claim.allocate.amounts import number
from rackloom.claim.allocate.candidates import Candidate
from rackloom.claim.allocate.cost import Cost
from rackloom.claim.allocate.ledger import Entry, Ledger
from rackloom.claim.allocate.places import Place, Unit, place_of, units_of

Group = tuple[str, Hashable]


class Ranking:
    """The groups of a node's devices, and what was in use of them before."""

    def __init__(self, candidates: Sequence[Candidate], ledger: Ledger) -> None:
        self.places: list[Place] = [place_of(one) for one in candidates]
        self._units = [units_of(one) for one in candidates]
        self.used: list[bool] = [ledger.ever_held(one.id) for one in candidates]
        """Whether a device was in use before, by position."""
        self._before = {
            unit for units, used in zip(self._units, self.used, strict=True) if used for unit in units
        }
        self._members: dict[Group, set[Unit]] = defaultdict(set)
        self._groups: dict[Unit, set[Group]] = defaultdict(set)
        for place, units in zip(self.places, self._units, strict=True):
            for unit in units:
                self._groups[unit].update(place.groups())
                for group in place.groups():
                    self._members[group].add(unit)
        self._taken = {group: len(members & self._before) for group, members in self._members.items()}
        self._rooms = {unit: room for one in candidates for unit, room in _rooms(one, ledger)}
        self._broken_before: dict[int, int] = {}
        self._distances: dict[tuple[int, int], int] = {}

    def cost(self, alternatives: int, entries: Sequence[Entry], more: int = 0) -> Cost:
        """The cost of an answer. With `more` devices still to come at most, what it will cost at least."""
        holding = [entry.candidate.position for entry in entries if not entry.ask.admin]
        units = {unit for position in holding for unit in self._units[position]}
        pairs = [(a, b) for a, b in combinations(entries, 2) if a.ask.claim == b.ask.claim]
        return Cost(
            alternatives=alternatives,
            broken=self._broken(units - self._before, more),
            room=sum(self._rooms.get(unit, 0) for unit in units),
            apart=sum(self._distance(a, b) for a, b in pairs if a.ask.request != b.ask.request),
            unlinked=sum(self._unlinked(a, b) for a, b in pairs),
        )

    def _broken(self, taken: Iterable[Unit], more: int) -> int:
        """Groups that are and stay partly in use: `more` devices cannot use up what is free of them.

        A device draws from two counter sets at most, so it brings at most two units into use.
        """
        reach = 2 * more
        now = Counter(group for unit in taken for group in self._groups[unit])
        changed = sum(
            self._parted(group, count, reach) - self._parted(group, 0, reach) for group, count in now.items()
        )
        return self._parted_before(reach) + changed

    def _parted_before(self, reach: int) -> int:
        if reach not in self._broken_before:
            self._broken_before[reach] = sum(self._parted(group, 0, reach) for group in self._members)
        return self._broken_before[reach]

    def _parted(self, group: Group, count: int, reach: int) -> bool:
        taken = self._taken[group] + count
        return taken > 0 and len(self._members[group]) - taken > reach

    def _distance(self, a: Entry, b: Entry) -> int:
        key = (a.candidate.position, b.candidate.position)
        if key not in self._distances:
            one, other = (self.places[position] for position in key)
            near = 1 if one.numa & other.numa else 2
            self._distances[key] = 0 if one.roots & other.roots else near
        return self._distances[key]

    def _unlinked(self, a: Entry, b: Entry) -> bool:
        one, other = (self.places[entry.candidate.position].cliques for entry in (a, b))
        return bool(one and other) and one.isdisjoint(other)


def _rooms(one: Candidate, ledger: Ledger) -> Iterable[tuple[Unit, int]]:
    """What was left of each counter set of a device: the mean of its counters, in thousandths."""
    for unit in units_of(one) if one.device.consumes_counters else ():
        left, total = ledger.book(one).at_first, one.pool.counter_sets[str(unit[-1])].counters
        parts = [
            left[str(unit[-1]), name] / of
            for name, counter in total.items()
            if (of := number(counter.value)) > 0
        ]
        yield unit, int(1000 * sum(parts, Fraction(0)) / len(parts)) if parts else 0
