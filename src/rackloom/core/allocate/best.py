"""Mode best: the cheapest valid answer, by branch and bound from the first fit.

`CostModel` prices an answer by the fields of `Cost`: steps down the alternatives, locality groups (NUMA
nodes, PCIe roots, NVLink cliques) left partly used, room in the counter sets that are drawn from,
distance between devices of two requests, and pairs without a common NVLink clique. For an unfinished
answer it gives a lower bound. `more` devices bring a limited number of allocation units into use. At
best they complete those partly used groups of a kind that have the fewest free units.

`BranchAndBound` starts with the first fit as the best known answer. It leaves a branch if its bound is
not below the best cost. Within a request it tries devices cheapest first, and only one of each class of
interchangeable devices. A device that was tried is left to no later branch of the same request. A
selector or derived attribute that fails on a device is no error here: the device is not chosen. If no
answer exists, the first fit has already failed, so this search never starts.

The search ends with a proof that nothing is cheaper, or is cut short by the caller or by MAX_TRIALS.
Then the best answer so far counts. No answer costs less than the least bound of all branches that were
left open (`Optimality.at_least`). If that bound equals the best cost, the answer is proved after all.

`best_of_nodes` takes the best answer of several nodes. It compares the changes that the answers make,
because a group that was broken before stays broken when another node is chosen. `NodeLocalities` finds
nodes with the same locality, so that one search answers for all of them.

Drivers publish locality under several names: the standard attributes of resource.kubernetes.io, and
DRANET's own. NVLink cliques have no standard name, so `clique` and `cliqueID` in the driver's domain are
read.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from itertools import chain, combinations

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.driver_slices import NIC_NUMA_NODE, NUMA_NODE, PCIE_ROOT
from rackloom.core.allocate.eligibility import CandidateDevice
from rackloom.core.allocate.inputs import RequestAlternative
from rackloom.core.allocate.ledger import (
    AllocationLedger,
    AttributeValues,
    Constraint,
    DeviceAssignment,
    attribute_values,
)
from rackloom.core.allocate.outcome import (
    Allocation,
    AllocationStopped,
    Cause,
    Cost,
    Fault,
    Optimality,
    Outcome,
    Refusal,
)
from rackloom.core.allocate.problem import AllocationProblem, FoundAnswer
from rackloom.core.allocate.quantity import exact_value
from rackloom.core.allocate.symmetry import DeviceSymmetry

# Locality: the places that a device shares with its neighbours, if its driver publishes them.


_CLIQUE_ATTRIBUTES = ("cliqueID", "clique")

AllocationUnit = tuple[Hashable, ...]
"""A device, or a counter set with all partitions that draw from it. It is in use or free as a whole."""


class DeviceLocality(msgspec.Struct, frozen=True):
    """The places that a device shares with its neighbours. Empty if they are not published."""

    numa: AttributeValues
    roots: AttributeValues
    cliques: AttributeValues

    def groups(self) -> Iterable[tuple[str, Hashable]]:
        """The groups that the device is in, over all drivers of the node."""
        for kind, values in (("numa", self.numa), ("root", self.roots), ("clique", self.cliques)):
            yield from ((kind, value) for value in values)


def locality_of(candidate: CandidateDevice) -> DeviceLocality:
    """The locality that the device's driver publishes."""
    numa: AttributeValues = frozenset()
    # A list names the device's own NUMA node first, then its neighbours (KEP-6072).
    for name in (NUMA_NODE, NIC_NUMA_NODE):
        found = candidate.attribute(name)
        if found is not None:
            own = frozenset([("int", found.ints[0])]) if found.ints else None
            numa = own or attribute_values(found, lists=False)
            break
    return DeviceLocality(
        numa=numa,
        roots=_first_known(candidate, (PCIE_ROOT,)),
        cliques=_first_known(candidate, [f"{candidate.id.driver}/{name}" for name in _CLIQUE_ATTRIBUTES]),
    )


def units_of(candidate: CandidateDevice) -> tuple[AllocationUnit, ...]:
    """The units that come into use with the device."""
    sets = {use.counter_set for use in candidate.device.consumes_counters}
    return tuple((*candidate.pool.key, "counters", name) for name in sorted(sets)) or ((*candidate.id,),)


def _first_known(candidate: CandidateDevice, names: Iterable[str]) -> AttributeValues:
    found = next((has for name in names if (has := candidate.attribute(name)) is not None), None)
    return frozenset() if found is None else attribute_values(found, lists=True)


# The cost model: price of a complete answer, lower bound of an unfinished one.


LocalityGroup = tuple[str, Hashable]


class CostModel:
    """The groups of a node's devices, and the units of them that were in use before."""

    def __init__(self, candidates: Sequence[CandidateDevice], ledger: AllocationLedger) -> None:
        self.localities: list[DeviceLocality] = [locality_of(candidate) for candidate in candidates]
        # Partitions of a GPU share one unit, its counter set. If one of them is in use, the unit is used.
        self._units = [units_of(candidate) for candidate in candidates]
        self.used: list[bool] = [ledger.ever_held(candidate.id) for candidate in candidates]
        """Whether a device was in use before, by position."""
        self._before = {
            unit for units, used in zip(self._units, self.used, strict=True) if used for unit in units
        }
        self._members: dict[LocalityGroup, set[AllocationUnit]] = defaultdict(set)
        self._groups: dict[AllocationUnit, set[LocalityGroup]] = defaultdict(set)
        for locality, units in zip(self.localities, self._units, strict=True):
            for unit in units:
                self._groups[unit].update(locality.groups())
                for group in locality.groups():
                    self._members[group].add(unit)
        self._taken = {group: len(members & self._before) for group, members in self._members.items()}
        self._rooms = {
            unit: room for candidate in candidates for unit, room in _counter_room(candidate, ledger)
        }
        self.broken_before = sum(map(bool, map(self._free_of_started, self._members)))
        """The number of groups that were partly in use before."""
        self._reach = max(map(len, self._units), default=1)
        """The most units that one device brings into use."""
        self._memberships: dict[str, int] = {kind: 1 for kind, _ in self._members}
        """The most groups of each kind that one allocation unit is in."""
        for groups in self._groups.values():
            for kind, count in Counter(kind for kind, _ in groups).items():
                self._memberships[kind] = max(self._memberships[kind], count)
        self._distances: dict[tuple[int, int], int] = {}

    def cost(self, alternatives: int, entries: Sequence[DeviceAssignment], more: int = 0) -> Cost:
        """The cost of an answer, or its lower bound if at most `more` devices are still to come."""
        # Admin access looks at a device and takes nothing from it.
        holding = [entry.candidate.position for entry in entries if not entry.ask.admin]
        units = {unit for position in holding for unit in self._units[position]}
        # Only devices of one claim work together. Those of one request may be apart, but should be linked.
        apart = unlinked = 0
        for a, b in combinations(entries, 2):
            if a.ask.claim != b.ask.claim:
                continue
            if a.ask.request != b.ask.request:
                apart += self._distance(a, b)
            first, second = (self.localities[entry.candidate.position].cliques for entry in (a, b))
            unlinked += bool(first and second) and first.isdisjoint(second)
        return Cost(
            alternatives=alternatives,
            broken=self._broken(units - self._before, more),
            room=sum(self._rooms.get(unit, 0) for unit in units),
            apart=apart,
            unlinked=unlinked,
        )

    def _broken(self, taken: Iterable[AllocationUnit], more: int) -> int:
        """The number of groups that are and stay partly in use.

        `more` devices cannot use up more free units than they bring into use. At best they complete those of
        the groups that have the fewest free units.
        """
        now = Counter(group for unit in taken for group in self._groups[unit])
        if not more:
            # A complete answer changes only the groups that it touches.
            changed = [
                (self._free_of_started(group, count) > 0) - (self._free_of_started(group) > 0)
                for group, count in now.items()
            ]
            return self.broken_before + sum(changed)
        free: dict[str, list[int]] = defaultdict(list)
        for group in self._members:
            left = self._free_of_started(group, now[group])
            if left:
                free[group[0]].append(left)
        broken = 0
        for kind, lefts in free.items():
            broken += len(lefts)
            # A device may use up a free unit in each group that its units are in, so at most this many.
            room = more * self._reach * self._memberships[kind]
            for left in sorted(lefts):
                room -= left
                if room < 0:
                    break
                broken -= 1
        return broken

    def _free_of_started(self, group: LocalityGroup, count: int = 0) -> int:
        """The free units of a group if `count` more are in use, or 0 if none is in use at all."""
        taken = self._taken[group] + count
        return len(self._members[group]) - taken if taken else 0

    def _distance(self, a: DeviceAssignment, b: DeviceAssignment) -> int:
        key = (a.candidate.position, b.candidate.position)
        if key not in self._distances:
            first, second = (self.localities[position] for position in key)
            # Places that are not published are not shared, so devices at unknown places count as far apart.
            near = 1 if first.numa & second.numa else 2
            self._distances[key] = 0 if first.roots & second.roots else near
        return self._distances[key]


def _counter_room(
    candidate: CandidateDevice, ledger: AllocationLedger
) -> Iterable[tuple[AllocationUnit, int]]:
    """The part of each counter set of a device that was left: the mean of its counters, in thousandths."""
    for unit in units_of(candidate) if candidate.device.consumes_counters else ():
        name, left = str(unit[-1]), ledger.book(candidate).at_first
        counters = candidate.pool.counter_sets[name].counters.items()
        # Shares of the whole, because counters have different units. One without a total has no share.
        parts = [
            left[name, counter] / total
            for counter, held in counters
            if (total := exact_value(held.value)) > 0
        ]
        yield unit, int(1000 * sum(parts, Fraction(0)) / len(parts)) if parts else 0


# Interchangeable devices. PCIe roots tie devices together as constraints do. NUMA nodes and cliques keep
# their names, so devices of different nodes or cliques stay apart.


class InterchangeableDevices:
    """Classes of devices that are interchangeable in the current state of the ledger."""

    def __init__(self, problem: AllocationProblem, ranking: CostModel) -> None:
        asks = tuple(chain.from_iterable(problem.plan))
        self._ledger = problem.ledger
        self._constraints = tuple(dict.fromkeys(chain.from_iterable(map(self._ledger.constraints, asks))))
        # A common PCIe root ties devices too: two GPUs are alike only if the NICs beside them are.
        ties = (*self._constraints, Constraint(PCIE_ROOT, (), distinct=False, lists=True))
        self._symmetry = DeviceSymmetry(problem, asks, ties)
        localities = ranking.localities
        self._shape = [
            (shape, localities[position].numa, localities[position].cliques, ranking.used[position])
            for position, shape in enumerate(self._symmetry.shape)
        ]

    def classes(self, allowed: Sequence[CandidateDevice]) -> list[list[CandidateDevice]]:
        """The classes of `allowed`, in order of their first members."""
        holders: dict[int, list[Hashable]] = {}
        for entry in self._ledger.entries:
            where = (entry.ask.claim, entry.ask.request)
            holders.setdefault(entry.candidate.position, []).append(where)
        open_ = {device.position for device in allowed}
        # Two devices are interchangeable now if they have the same shape and the same holders, both or
        # neither are still allowed, and their groups are in the same condition.
        fate = [
            (self._shape[position], tuple(holders.get(position, ())), position in open_)
            for position in range(len(self._shape))
        ]
        # The condition of a group: the fates of its devices, and which of its values constraints still hold
        # or have used.
        conditions: dict[int, Hashable] = {}
        for group in {self._symmetry.group[position] for position in open_}:
            fates = Counter(fate[position] for position in self._symmetry.members[group])
            ranks = tuple(
                self._symmetry.ranks_of(group, number, constraint.values_so_far())
                if constraint.started
                else None
                for number, constraint in enumerate(self._constraints)
            )
            conditions[group] = frozenset(fates.items()), ranks
        found: dict[Hashable, list[CandidateDevice]] = {}
        for device in allowed:
            condition = fate[device.position], conditions[self._symmetry.group[device.position]]
            found.setdefault(condition, []).append(device)
        return list(found.values())


# Branch and bound.


MAX_TRIALS = 10_000
"""The most devices tried in all: seconds for 32 of 128 devices. A proof can take exponentially many."""


class _SearchCutShort(Exception):
    """The number of trials is used up, or the caller stopped the search."""


class BranchAndBound:
    """One search for an answer that costs less than `first` and adds less than `below` to the cost."""

    def __init__(
        self,
        problem: AllocationProblem,
        first: FoundAnswer,
        proceed: Callable[[], bool],
        below: Cost | None = None,
    ) -> None:
        self._problem = problem
        self._plan = problem.plan
        self._ledger = problem.ledger
        # The first fit left its entries in the ledger.
        self._ledger.clear()
        self._proceed = proceed
        self._ranking = CostModel(problem.candidates, problem.ledger)
        self._interchangeable = InterchangeableDevices(problem, self._ranking)
        # A device on which a selector fails is no error here: it is just not chosen.
        self._serving = {
            ask: [
                candidate
                for candidate in problem.candidates
                if problem.eligibility.verdict(ask, candidate) is None
                and not isinstance(problem.ledger.suits(ask, candidate), Cause)
            ]
            for ask in chain.from_iterable(self._plan)
        }
        self._chosen: list[RequestAlternative] = []
        self.found = first
        self.cost = self._cost(first.chosen, first.entries)
        before = self._ranking.broken_before
        self._limit = self.cost if below is None else min(self.cost, _with_broken(below, before))
        """An answer must cost less than this to be of use."""
        self._open: list[Cost] = []
        """Bounds of the branches that the search left open when it was cut short."""
        self.trials = 0

    def run(self) -> None:
        """Search, and leave the best known answer in `found`."""
        with suppress(_SearchCutShort):
            self._choose(0)

    @property
    def optimality(self) -> Optimality:
        """The cost of the answer that was found, and how far it is proved."""
        # Every answer costs at least the limit, or the least bound of a branch that was left open.
        at_least = min([self._limit, *self._open])
        return Optimality(
            cost=self.cost,
            proved=at_least == self.cost,
            at_least=at_least,
            broken_before=self._ranking.broken_before,
        )

    def _cost(
        self, chosen: Sequence[RequestAlternative], entries: Sequence[DeviceAssignment], more: int = 0
    ) -> Cost:
        steps_down = sum(choice.index(ask) for choice, ask in zip(self._plan, chosen, strict=False))
        return self._ranking.cost(steps_down, entries, more)

    def _bound(self, left: int) -> Cost:
        """The least cost of any answer below, if the current request still takes `left` devices."""
        # Costs never shrink as devices are added, except that a group left partly used may become fully
        # used. `most` is the largest number of devices that can still do that.
        later = self._plan[len(self._chosen) :]
        most = left + sum(max(map(self._problem.devices_needed, choice)) for choice in later)
        return self._cost(self._chosen, self._ledger.entries, most)

    def _choose(self, index: int) -> None:
        if index == len(self._plan):
            self._keep_if_better()
            return
        # Compute all bounds first: a cut below one alternative leaves the ones after it open.
        options = []
        for ask in self._plan[index]:
            self._chosen.append(ask)
            options.append((ask, self._bound(self._problem.devices_needed(ask))))
            self._chosen.pop()
        for number, (ask, bound) in enumerate(options):
            self._chosen.append(ask)
            if self._problem.has_room(ask) and bound < self._limit:
                with self._leaves_open(other for _, other in options[number + 1 :]):
                    self._give(ask, index, bound)
            self._chosen.pop()

    def _give(self, ask: RequestAlternative, index: int, bound: Cost) -> None:
        if not ask.everything:
            self._pick(ask, index, self._problem.devices_needed(ask), self._serving[ask], bound)
            return
        before = len(self._ledger.entries)
        # Mode All has only one way: its whole list.
        with self._leaves_open([bound]):
            entered = all(self._entered(ask, candidate) for candidate in self._problem.everything[ask])
        if entered:
            self._choose(index + 1)
        self._ledger.clear(before)

    def _pick(
        self,
        ask: RequestAlternative,
        index: int,
        left: int,
        allowed: Sequence[CandidateDevice],
        bound: Cost,
    ) -> None:
        """Pick one more device for a request. A device that was tried is not offered to later branches."""
        if left == 0:
            self._choose(index + 1)
            return
        # Try one device of each class of copies, to learn which can be had and the least cost of each.
        trials: list[tuple[Cost, list[CandidateDevice]]] = []
        with self._leaves_open([bound]):
            for copies in self._interchangeable.classes(allowed):
                if self._entered(ask, copies[0]):
                    trials.append((self._bound(left - 1), copies))
                    self._ledger.strike()
        trials.sort(key=lambda trial: trial[0])
        for number, (least, copies) in enumerate(trials):
            # Trials are sorted by bound, so none of the rest can be cheaper.
            if least >= self._limit:
                return
            self._ledger.enter(ask, copies[0])
            # Classes that were tried before this one are left out, so that no set of devices comes twice.
            rest = [device for _, more in trials[number:] for device in more if device is not copies[0]]
            # If the search is cut short below, the trials left open cost at least as much as the next one.
            with self._leaves_open(other for other, _ in trials[number + 1 : number + 2]):
                self._pick(ask, index, left - 1, rest, least)
            self._ledger.strike()

    @contextmanager
    def _leaves_open(self, bounds: Iterable[Cost]) -> Iterator[None]:
        """Note the bounds of branches that stay open if the search is cut short inside."""
        try:
            yield
        except _SearchCutShort:
            self._open.extend(bounds)
            raise

    def _entered(self, ask: RequestAlternative, candidate: CandidateDevice) -> bool:
        self.trials += 1
        if self.trials > MAX_TRIALS or not self._proceed():
            raise _SearchCutShort
        try:
            return self._ledger.enter(ask, candidate) is None
        except AllocationStopped:
            # As if a selector fails: the device is just not chosen.
            return False

    def _keep_if_better(self) -> None:
        """Keep a complete answer if it costs less. Within a request, devices are in order of position."""
        cost = self._cost(self._chosen, self._ledger.entries)
        if cost >= self._limit:
            return
        # Devices were entered cheapest first, but results list them as mode exact does.
        order = {ask: number for number, ask in enumerate(self._chosen)}
        entries = sorted(self._ledger.entries, key=lambda entry: (order[entry.ask], entry.candidate.position))
        self.cost = self._limit = cost
        self.found = FoundAnswer(tuple(self._chosen), tuple(entries))


# The best of several nodes.


class NodeLocalities:
    """Numbers the nodes of a fleet by the locality of their devices. Equal numbers mean equal costs."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, int] = {}
        self._of_node: dict[int, int] = {}

    def forget(self, number: int) -> None:
        """Forget the number of a node, because its devices changed."""
        self._of_node.pop(number, None)

    def of(self, number: int, candidates: Iterable[CandidateDevice]) -> int:
        """The kind of a node. `number` is the node's number in its fleet."""
        kind = self._of_node.get(number)
        if kind is None:
            found = tuple(map(locality_of, candidates))
            kind = self._of_node[number] = self._kinds.setdefault(found, len(self._kinds))
        return kind


def best_of_nodes(searches: Iterable[Callable[[Cost | None], Outcome]]) -> Outcome:
    """The first allocation that adds the least cost, or a refusal if there is none.

    Each search is on one node. It gets the least cost so far and may skip answers that don't cost less. A
    fault counts only if no node before it serves.
    """
    found: Allocation | None = None
    least: Cost | None = None
    at_least: list[Cost] = []
    decided = True
    for search in searches:
        outcome = search(least)
        if isinstance(outcome, Fault):
            if found is None:
                return outcome
            # An undecided node might have had a cheaper answer, so nothing is proved anymore.
            decided = decided and not outcome.undecided
        if not isinstance(outcome, Allocation) or outcome.optimality is None:
            continue
        # Compare only the changes: an answer is not to blame for groups that were broken before.
        before = outcome.optimality.broken_before
        added = _with_broken(outcome.optimality.cost, -before)
        if outcome.optimality.at_least is not None:
            at_least.append(_with_broken(outcome.optimality.at_least, -before))
        if least is None or added < least:
            found, least = outcome, added
    if found is None or found.optimality is None:
        return Refusal(node="", steps=0)
    # The least bound of any node bounds them all. Add the groups that the chosen node had broken before.
    before = found.optimality.broken_before
    bound = _with_broken(min(at_least), before) if decided else None
    optimality = replace(found.optimality, proved=bound == found.optimality.cost, at_least=bound)
    return replace(found, optimality=optimality)


def _with_broken(cost: Cost, more: int) -> Cost:
    """The cost with `more` more groups that are partly in use."""
    return replace(cost, broken=cost.broken + more)
