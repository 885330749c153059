"""Colocation groups of a gang, and their members on the trays of a clique.

`colocation_groups` cuts a gang into subgroups that must share a clique: one per segment, or one per share,
largest first. It raises Refused for a gang that asks for nothing or contradicts itself.

`TrialPlacement` is the site while one gang is being placed: members are assigned and unassigned, and only
trays that the gang uses differ from `SiteCapacity`. Claims of two kinds are not mixed on a tray.

`assign_best_fit` assigns a subgroup member by member, those with most GPUs first, each to the tray with the
least room that fits (best fit decreasing); partly used trays are filled before an empty one is opened. It
assigns all members or none. `assign_jointly` assigns subgroups by the loads of `joint_assignment`, where
best fit could go wrong.

`spare_trays` lists the unused trays of the clique that could take over all members of any used tray,
partly used trays first.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from typing import NamedTuple

from rackloom.core.place.placement_values import Gang, GangGroup
from rackloom.core.place.search.joint_assignment import JointAssignment, SearchBudget, solve_jointly
from rackloom.core.place.search.site_capacity import (
    MemberNeed,
    SiteCapacity,
    TrayLoad,
    ordered_needs,
    tray_loads,
)
from rackloom.errors import Refused

# What of a gang must share a clique.


class MemberRange(NamedTuple):
    """Consecutive members of one group."""

    group: GangGroup
    need: MemberNeed
    """Of each member."""
    first: int
    members: int


ColocationGroup = tuple[MemberRange, ...]
"""Parts of a gang that must share a clique: one item of the packing into cliques."""
MembersByNeed = Mapping[MemberNeed, int]
MembersByClique = Mapping[str, MembersByNeed]
"""The members in each clique that is used."""
GroupShape = tuple[tuple[MemberNeed, int], ...]
"""`MembersByNeed` as a key: subgroups of equal shape are interchangeable."""


def colocation_groups(gang: Gang) -> list[ColocationGroup]:
    """The subgroups, largest first. Raises Refused for a gang that contradicts itself."""
    check_gang(gang)
    if gang.segment is not None:
        subgroups: list[ColocationGroup] = [
            (MemberRange(group, MemberNeed.of(group), first, min(gang.segment, group.members - first)),)
            for group in gang.device_groups
            for first in range(0, group.members, gang.segment)
        ]
    else:
        by_share: dict[str, ColocationGroup] = {}
        for group in gang.device_groups:
            part = MemberRange(group, MemberNeed.of(group), 0, group.members)
            by_share[group.share] = (*by_share.get(group.share, ()), part)
        subgroups = list(by_share.values())
    return sorted(subgroups, key=group_weight, reverse=True)


def group_weight(subgroup: ColocationGroup) -> tuple[int, int]:
    """GPUs, then members."""
    return (
        sum(part.group.gpus * part.members for part in subgroup),
        sum(part.members for part in subgroup),
    )


def check_gang(gang: Gang) -> None:
    """Refuse a gang that contradicts itself or asks for nothing."""
    faults = [
        (bool(gang.name), "a gang needs a name", "name it"),
        (len({g.name for g in gang.groups}) == len(gang.groups), "two groups have one name", "rename one"),
        (all(g.members > 0 for g in gang.groups), "a group has no member", "ask for 1 member or more"),
        (all(g.gpus >= 0 for g in gang.groups), "a member asks for fewer than 0 GPUs", "ask for 0 or more"),
        (gang.segment is None or gang.segment > 0, "a segment has no member", "set segments of 1 or more"),
        (gang.spares >= 0, "fewer than 0 spare trays", "set 0 spare trays or more"),
        (
            bool(gang.device_groups),
            "no member takes a GPU or has a claim: there is nothing to place",
            "give the workers a limit nvidia.com/gpu or a resource claim",
        ),
    ]
    for holds, reason, fix in faults:
        if not holds:
            raise Refused(f"{gang.name or 'the gang'}: {reason}", nearest_fix=fix)


def members_by_need(subgroups: Iterable[ColocationGroup]) -> MembersByNeed:
    """The members of all subgroups."""
    return add_members({}, ((part.need, part.members) for subgroup in subgroups for part in subgroup))


def add_members(wanted: MembersByNeed, more: Iterable[tuple[MemberNeed, int]]) -> MembersByNeed:
    """The members together."""
    total = dict(wanted)
    for need, members in more:
        total[need] = total.get(need, 0) + members
    return total


def group_shape(subgroup: ColocationGroup) -> GroupShape:
    """What the subgroup asks for, whoever its members are."""
    return tuple(sorted(members_by_need([subgroup]).items(), key=str))


# The site while one gang is being placed.


class _TrayUse(NamedTuple):
    """What the gang has on a tray."""

    gpus: int
    devices: str | None
    members: int


_UNUSED = _TrayUse(0, None, 0)


class TrialPlacement:
    """The site with the members that are assigned so far.

    Only the trays that the gang uses differ from `capacity`. Undoing all assignments restores the initial
    state, so a search can backtrack without a copy.
    """

    def __init__(self, capacity: SiteCapacity) -> None:
        """No member is assigned yet."""
        self.capacity = capacity
        self._uses: dict[str, dict[int, _TrayUse]] = {}
        """By clique, then by tray."""
        self._with_terms: dict[int, Counter[MemberNeed]] = {}
        """Members with terms, by tray."""

    def clique_slots(self, clique: str, need: MemberNeed) -> int:
        """Members that the clique can serve."""
        slots = self.capacity.slots(need)
        changed = [self.slots(at, need) - slots[at] for at in self._uses.get(clique, ())]
        return self.capacity.bounds(need)[clique].capacity + sum(changed)

    def empty(self, clique: str) -> int:
        """Open trays of the clique on which nothing is in use."""
        uses = self._uses.get(clique, {})
        opened = [self.capacity.is_empty[at] and use.gpus > 0 for at, use in uses.items()]
        return self.capacity.empty[clique] - sum(opened)

    def is_empty(self, at: int) -> bool:
        """Whether nothing is in use on the tray, and it is open."""
        return self.capacity.is_empty[at] and not self._use(at).gpus

    def slots(self, at: int, need: MemberNeed) -> int:
        """Members that the tray can serve."""
        use, most = self._use(at), self.capacity.slots(need)[at]
        if not use.members:
            return most
        # The allocator was not asked whether claims of two kinds fit on one tray.
        if use.devices != need.devices or self._is_barred(at, need):
            return 0
        by_gpus = self.free(at) // need.gpus if need.gpus else most
        by_devices = most if need.devices is None else self.capacity.device_slots(need)[at] - use.members
        return min(most, by_gpus, by_devices)

    def free(self, at: int) -> int:
        """Free GPUs of the tray."""
        return self.capacity.free[at] - self._use(at).gpus

    def members(self, at: int) -> int:
        """Members of this gang on the tray."""
        return self._use(at).members

    def take(self, at: int, need: MemberNeed, members: int) -> None:
        """Put members on a tray, where they are known to fit."""
        use = self._use(at)
        now = _TrayUse(use.gpus + members * need.gpus, need.devices, use.members + members)
        self._uses.setdefault(self.capacity.clique[at], {})[at] = now
        if need.terms is not None:
            self._with_terms.setdefault(at, Counter())[need] += members

    def put_back(self, at: int, need: MemberNeed, members: int) -> None:
        """Undo a `take`."""
        use, uses = self._use(at), self._uses[self.capacity.clique[at]]
        if use.members > members:
            uses[at] = _TrayUse(use.gpus - members * need.gpus, use.devices, use.members - members)
        else:
            del uses[at]
        if need.terms is not None:
            self._with_terms[at][need] -= members

    def _is_barred(self, at: int, need: MemberNeed) -> bool:
        """Whether a member of the gang on the tray excludes such a member."""
        return need.terms is not None and any(
            members and need.bars(present) for present, members in self._with_terms.get(at, Counter()).items()
        )

    def _use(self, at: int) -> _TrayUse:
        return self._uses.get(self.capacity.clique[at], {}).get(at, _UNUSED)


# Assignment within one clique.


class TrayAssignment(NamedTuple):
    """Consecutive members of one group on one tray."""

    at: int
    """Position of the tray in the site."""
    part: MemberRange
    first: int
    members: int


TrayAssignments = tuple[TrayAssignment, ...]
"""All members of a subgroup."""


def assign(trial: TrialPlacement, assignments: TrayAssignments) -> None:
    """Assign members where they are known to fit."""
    for assignment in assignments:
        trial.take(assignment.at, assignment.part.need, assignment.members)


def unassign(trial: TrialPlacement, assignments: TrayAssignments) -> None:
    """Undo an `assign`."""
    for assignment in assignments:
        trial.put_back(assignment.at, assignment.part.need, assignment.members)


def assign_best_fit(trial: TrialPlacement, clique: str, subgroup: ColocationGroup) -> TrayAssignments | None:
    """Assign a subgroup by best fit decreasing; None, and nothing is assigned, if it does not fit."""
    assignments: TrayAssignments = ()
    # Large members fit on fewer trays, so they choose first.
    for part in sorted(subgroup, key=lambda part: part.group.gpus, reverse=True):
        added = tuple(_best_fit_trays(trial, clique, part))
        if sum(assignment.members for assignment in added) < part.members:
            unassign(trial, assignments)
            return None
        assign(trial, added)
        assignments += added
    return assignments


def joint_assignment(
    trial: TrialPlacement, clique: str, wanted: MembersByNeed, spares: int, budget: SearchBudget
) -> JointAssignment | None:
    """The best assignment of `wanted` in a clique without other members of the gang, with so many spares."""
    needs = ordered_needs(wanted)
    vacancies = trial.capacity.vacancies(clique, needs)
    return solve_jointly(vacancies, needs, tuple(wanted[need] for need in needs), spares, budget)


def assign_jointly(
    trial: TrialPlacement, clique: str, subgroups: Sequence[ColocationGroup], loads: Sequence[TrayLoad]
) -> tuple[TrayAssignments, ...]:
    """Assign subgroups to the trays of a clique by these loads."""
    positions = trial.capacity.cliques[clique]
    # For each need, the position of a tray for each of its members.
    slots = {
        need: iter([at for at, here in zip(positions, column, strict=True) for _ in range(here)])
        for need, column in zip(
            ordered_needs(members_by_need(subgroups)), zip(*loads, strict=True), strict=True
        )
    }
    found = tuple(
        tuple(assignment for part in subgroup for assignment in _take_slots(part, slots))
        for subgroup in subgroups
    )
    for assignments in found:
        assign(trial, assignments)
    return found


def spare_trays(trial: TrialPlacement, clique: str, assigned: Iterable[TrayAssignments]) -> list[int]:
    """Trays of the clique that could take over all members of any tray of `assigned`.

    Trays of which a part is in use come first, then the last ones. `joint_assignment` applies the same rule
    while it searches: change both together, or a plan gets fewer spares than the search promised.
    """
    by_tray: dict[int, Counter[MemberNeed]] = {}
    for assignments in assigned:
        for assignment in assignments:
            by_tray.setdefault(assignment.at, Counter())[assignment.part.need] += assignment.members
    needs = tuple({need: None for load in by_tray.values() for need in load})
    loads = {tuple(load[need] for need in needs) for load in by_tray.values()}
    most = tuple(map(max, zip(*loads, strict=True)))
    capacity = trial.capacity
    trays = list(zip(capacity.cliques[clique], capacity.vacancies(clique, needs), strict=True))
    able = [
        at
        for at, vacancy in reversed(trays)
        if not trial.members(at) and loads <= tray_loads(vacancy, needs, most)
    ]
    return sorted(able, key=trial.is_empty)


def _best_fit_trays(trial: TrialPlacement, clique: str, part: MemberRange) -> Iterator[TrayAssignment]:
    """For as many members of a part as the clique takes, the trays with least room first."""
    need, number, end = part.need, part.first, part.first + part.members
    if trial.clique_slots(clique, need) < part.members:
        return
    # Least room first, partly used trays before empty ones, then least free GPUs.
    for at in sorted(
        trial.capacity.cliques[clique],
        key=lambda at: (trial.slots(at, need), trial.is_empty(at), trial.free(at)),
    ):
        here = min(trial.slots(at, need), end - number)
        if here:
            yield TrayAssignment(at, part, number, here)
            number += here


def _take_slots(part: MemberRange, slots: dict[MemberNeed, Iterator[int]]) -> Iterator[TrayAssignment]:
    """The members of a part in the next slots for their need."""
    first = part.first
    for at, same in groupby(islice(slots[part.need], part.members)):
        members = len(list(same))
        yield TrayAssignment(at, part, first, members)
        first += members
