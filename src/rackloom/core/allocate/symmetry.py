"""Devices and groups of devices that are interchangeable in an allocation.

Two devices have one shape when every selector, taint, capacity, counter, compatibility group and
constraint treats them the same. Devices that share a counter set or a value of a constrained attribute
form a group: the partitions of a GPU, or the GPU and the NIC below one PCIe root. Groups are the
connected components of these links (union-find).

If requests derive an attribute, a device has several sets of values for a constraint: its published ones, and
those from each expression. It is treated the same as another only if that holds for all of them.

Within a group, the names of counter sets and values are replaced by their rank. Eight equal GPUs with
their partitions are then eight groups of one kind, and a choice that failed on the first group need not be
tried on the others.

`DeviceSymmetry` is computed from the state before the search. `PruningBounds` and
`InterchangeableDevices` add the changes of the search to each device since.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence

from rackloom.core.allocate.capacity import counter_draws
from rackloom.core.allocate.eligibility import CandidateDevice
from rackloom.core.allocate.inputs import RequestAlternative
from rackloom.core.allocate.ledger import AllocationLedger, AttributeValues, Constraint
from rackloom.core.allocate.outcome import AllocationStopped, Cause
from rackloom.core.allocate.problem import AllocationProblem

Link = tuple[Hashable, ...]
"""A link between devices: a counter set of a pool, or a value of a constraint."""


class DeviceSymmetry:
    """Shapes and groups of the devices of one allocation, by position."""

    def __init__(
        self,
        problem: AllocationProblem,
        asks: Sequence[RequestAlternative],
        constraints: Sequence[Constraint],
    ) -> None:
        candidates = problem.candidates
        sources = [sources_of(constraint, asks) for constraint in constraints]
        # The values of each device that each constraint may compare, with the number of the constraint.
        compared = [
            [
                (number, values)
                for number, constraint in enumerate(constraints)
                for values in values_of(constraint, sources[number], candidate)
            ]
            for candidate in candidates
        ]
        links: list[list[Link]] = []
        for candidate, found in zip(candidates, compared, strict=True):
            uses = candidate.device.consumes_counters
            sets: list[Link] = [("counters", candidate.pool.key, use.counter_set) for use in uses]
            # Sorted, so that equal devices have their values in one order: ranks depend on it.
            known = ((number, values) for number, values in found if values and values != FAILS)
            tied = (("value", number, value) for number, values in known for value in sorted(values, key=str))
            links.append([*sets, *tied])
        self.group: list[int] = _connected_groups(links)
        """Group of each device."""
        members: dict[int, list[int]] = {}
        for position, group in enumerate(self.group):
            members.setdefault(group, []).append(position)
        self.members = [members[group] for group in range(len(members))]
        # Ranks replace names: the second counter set of GPU 0 and that of GPU 5 are both number 1 in their
        # groups, so equal GPUs get equal shapes.
        self.ranks: list[dict[Link, int]] = []
        """The ranks of each group's links, by first appearance."""
        for positions in self.members:
            ties = dict.fromkeys(tie for position in positions for tie in links[position])
            self.ranks.append({tie: rank for rank, tie in enumerate(ties)})
        # Requests often repeat. Those of one likeness treat every device the same, so one of them will do.
        distinct_asks = {ask.likeness: ask for ask in asks}.values()
        shapes = [
            (_treatment(problem, candidate, distinct_asks), self._local(candidate, found, problem.ledger))
            for candidate, found in zip(candidates, compared, strict=True)
        ]
        self.shape: list[int] = numbered(shapes)
        """Shape of each device. Equal only if the devices are alike up to the names of their group."""
        self.kind: list[int] = numbered(
            [
                frozenset(Counter(self.shape[position] for position in positions).items())
                for positions in self.members
            ]
        )
        """Kind of each group: groups of one kind are copies of each other."""

    def classes(self) -> list[list[int]]:
        """Positions of the devices of one group and shape: these are alike in every way."""
        found: dict[tuple[int, int], list[int]] = {}
        for position, shape in enumerate(self.shape):
            found.setdefault((self.group[position], shape), []).append(position)
        return list(found.values())

    def ranks_of(self, group: int, constraint: int, values: Iterable[Hashable]) -> frozenset[int]:
        """The values of a constraint that tie the group, as ranks."""
        links = (("value", constraint, value) for value in values)
        return frozenset(self.ranks[group][link] for link in links if link in self.ranks[group])

    def _local(
        self,
        candidate: CandidateDevice,
        compared: Iterable[tuple[int, AttributeValues | None]],
        ledger: AllocationLedger,
    ) -> Hashable:
        """Values and counters of a device in the names of its group, with the remainder of the counters."""
        ranks = self.ranks[self.group[candidate.position]]
        values = tuple(
            found if found is None or found == FAILS else frozenset(ranks["value", n, v] for v in found)
            for n, found in compared
        )
        if not candidate.device.consumes_counters:
            return values
        # Devices in use before the search draw from counters too, so the remainder is part of the shape.
        left = ledger.book(candidate).at_first
        drawn = frozenset(
            (ranks[("counters", candidate.pool.key, name)], counter, amount, left.get((name, counter)))
            for (name, counter), amount in counter_draws(candidate.device)
        )
        # So do their compatibility groups: a device has to have one in common with all of them.
        book = ledger.groups(candidate)
        groups = None
        if book is not None:
            groups = frozenset(
                (
                    ranks["counters", candidate.pool.key, use.counter_set],
                    frozenset(use.compatibility_groups),
                    # None means that those in use name no group, and False that there are none.
                    book.at_first.get(use.counter_set, False),
                )
                for use in candidate.device.consumes_counters
            )
        return values, candidate.pool.key, drawn, groups


ValueSources = tuple[str | None, ...]
"""Possible sources of a constraint's values: expressions of derived attributes, None for the device."""
FAILS = frozenset([("fails", None)])
"""In place of values that an expression fails to derive."""


def sources_of(constraint: Constraint, asks: Iterable[RequestAlternative]) -> ValueSources:
    """The sources of the constraint's values for these alternatives."""
    return tuple(dict.fromkeys(ask.derived.get(constraint.attribute) for ask in asks)) or (None,)


def values_of(
    constraint: Constraint, sources: ValueSources, candidate: CandidateDevice
) -> Iterator[AttributeValues | None]:
    """The values of a device that a constraint compares, for each source. FAILS if it cannot be derived."""
    for expression in sources:
        if expression is None:
            yield constraint.published(candidate)
            continue
        found = constraint.derived(expression, candidate)
        yield found if isinstance(found, frozenset) else FAILS


def _connected_groups(links: Sequence[Sequence[Link]]) -> list[int]:
    """Connected devices, numbered from 0 in order of their first member."""
    # Union-find with path halving: each link joins its device with the first device that had it.
    parent = list(range(len(links)))

    def root(position: int) -> int:
        while parent[position] != position:
            parent[position] = parent[parent[position]]
            position = parent[position]
        return position

    # A root may be any member, so the numbers come from the order of the devices.
    first: dict[Link, int] = {}
    for position, ties in enumerate(links):
        for tie in ties:
            parent[root(position)] = root(first.setdefault(tie, position))
    return numbered([root(position) for position in range(len(links))])


def numbered(values: Iterable[Hashable]) -> list[int]:
    """Equal values get equal numbers, in order of appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]


def _treatment(
    problem: AllocationProblem, candidate: CandidateDevice, asks: Iterable[RequestAlternative]
) -> Hashable:
    """The fit of the device to each alternative, and the amounts that were taken of it before."""
    ledger = problem.ledger
    # The share of each alternative if the device were free: None, amounts, or a selector that fails.
    served: list[Hashable] = []
    for ask in asks:
        verdict = problem.eligibility.verdict(ask, candidate)
        if isinstance(verdict, AllocationStopped):
            served.append("fails")
            continue
        suits = ledger.suits(ask, candidate)
        if verdict is not None or isinstance(suits, Cause):
            served.append(None)
        else:
            served.append(frozenset(suits.items()))
    if not candidate.shareable:
        return ledger.free_before(candidate), tuple(served)
    # A device that can be shared also differs by the shares that earlier allocations took.
    capacity = frozenset((name, has.value) for name, has in candidate.device.capacity.items())
    used = frozenset(ledger.used_before(candidate.id).items())
    return (
        ledger.free_before(candidate),
        tuple(served),
        capacity,
        used,
        ledger.charged_before(candidate),
    )
