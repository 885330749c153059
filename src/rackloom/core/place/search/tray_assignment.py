"""Colocation groups of a gang, and their members on the trays of a clique.

`colocation_groups` cuts a gang into groups that must share a clique: one per segment, or one per share,
largest first. It raises Refused for a gang that asks for nothing or contradicts itself.

`TrialPlacement` is the site while one gang is being placed: members are assigned and unassigned, and only
trays that the gang uses differ from `SiteCapacity`. Claims of two kinds are not mixed on a tray.

`assign_best_fit` assigns a group member by member, those with most GPUs first, each to the tray with the
least room that fits (best fit decreasing); partly used trays are filled before an empty one is opened. It
assigns all members or none. `assign_jointly` assigns groups by the loads of `joint_assignment`, where
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
"""Parts that must share a clique."""
MembersByNeed = Mapping[MemberNeed, int]
"""Members of each need."""
MembersByClique = Mapping[str, MembersByNeed]
"""The members in each clique that is used."""
GroupShape = tuple[tuple[MemberNeed, int], ...]
"""The same as a key."""


def colocation_groups(gang: Gang) -> list[ColocationGroup]:
    """The blocks, largest first. Raises Refused for a gang that asks for nothing, or not clearly."""
    check_gang(gang)
    serious = [group for group in gang.groups if not group.is_helper]
    if gang.segment is not None:
        blocks: list[ColocationGroup] = [
            (part,) for group in serious for part in _cut_segments(group, gang.segment)
        ]
    else:
        shares = dict.fromkeys(group.share for group in serious)
        blocks = [
            tuple(
                MemberRange(group, MemberNeed.of(group), 0, group.members)
                for group in serious
                if group.share == share
            )
            for share in shares
        ]
    return sorted(blocks, key=group_weight, reverse=True)


def group_weight(block: ColocationGroup) -> tuple[int, int]:
    """GPUs, then members."""
    return (sum(part.group.gpus * part.members for part in block), sum(part.members for part in block))


def check_gang(gang: Gang) -> None:
    """Refuse a gang that cannot be meant."""
    faults = [
        (bool(gang.name), "a gang needs a name", "name it"),
        (len({g.name for g in gang.groups}) == len(gang.groups), "two groups have one name", "rename one"),
        (all(g.members > 0 for g in gang.groups), "a group has no member", "ask for 1 member or more"),
        (all(g.gpus >= 0 for g in gang.groups), "a member asks for fewer than 0 GPUs", "ask for 0 or more"),
        (gang.segment is None or gang.segment > 0, "a segment has no member", "set segments of 1 or more"),
        (gang.spares >= 0, "fewer than 0 spare trays", "set 0 spare trays or more"),
        (
            any(not g.is_helper for g in gang.groups),
            "no member takes a GPU or has a claim: there is nothing to place",
            "give the workers a limit nvidia.com/gpu or a resource claim",
        ),
    ]
    for holds, reason, fix in faults:
        if not holds:
            raise Refused(f"{gang.name or 'the gang'}: {reason}", nearest_fix=fix)


def _cut_segments(group: GangGroup, segment: int) -> Iterator[MemberRange]:
    need = MemberNeed.of(group)
    for first in range(0, group.members, segment):
        yield MemberRange(group, need, first, min(segment, group.members - first))


def members_by_need(blocks: Iterable[ColocationGroup]) -> MembersByNeed:
    """Who is in the blocks."""
    return add_members({}, ((part.need, part.members) for block in blocks for part in block))


def add_members(wanted: MembersByNeed, more: Iterable[tuple[MemberNeed, int]]) -> MembersByNeed:
    """The members together."""
    total = dict(wanted)
    for need, members in more:
        total[need] = total.get(need, 0) + members
    return total


def group_shape(block: ColocationGroup) -> GroupShape:
    """What the block asks for, whoever its members are."""
    return tuple(sorted(members_by_need([block]).items(), key=str))


# The site while one gang is being placed.


class _TrayUse(NamedTuple):
    """What the gang has on a tray."""

    gpus: int
    devices: str | None
    members: int


_UNUSED = _TrayUse(0, None, 0)


class TrialPlacement:
    """What is left of the ground; only trays that the gang uses are told anew."""

    def __init__(self, ground: SiteCapacity) -> None:
        """Nobody is on it yet."""
        self.ground = ground
        self._uses: dict[str, dict[int, _TrayUse]] = {}
        """By clique, then by tray."""
        self._choosy: dict[int, Counter[MemberNeed]] = {}
        """Members with terms, by tray."""

    def capacity(self, clique: str, need: MemberNeed) -> int:
        """Members that the clique can serve."""
        slots = self.ground.slots(need)
        changed = [self.slots(at, need) - slots[at] for at in self._uses.get(clique, ())]
        return self.ground.outlooks(need)[clique].capacity + sum(changed)

    def empty(self, clique: str) -> int:
        """Open trays of the clique on which nothing is in use."""
        begun = [self.ground.is_empty[at] and use.gpus > 0 for at, use in self._uses.get(clique, {}).items()]
        return self.ground.empty[clique] - sum(begun)

    def is_empty(self, at: int) -> bool:
        """Whether nothing is in use on the tray, and it is open."""
        return self.ground.is_empty[at] and not self._use(at).gpus

    def slots(self, at: int, need: MemberNeed) -> int:
        """Members that the tray can serve."""
        use, most = self._use(at), self.ground.slots(need)[at]
        if not use.members:
            return most
        # Claims of two kinds are not mixed on a tray: whether both fit was not asked.
        if use.devices != need.devices or self._is_barred(at, need):
            return 0
        by_gpus = self.free(at) // need.gpus if need.gpus else most
        by_room = most if need.devices is None else self.ground.rooms(need)[at] - use.members
        return min(most, by_gpus, by_room)

    def free(self, at: int) -> int:
        """GPUs of the tray that nobody has."""
        return self.ground.free[at] - self._use(at).gpus

    def members(self, at: int) -> int:
        """Members of this gang on the tray."""
        return self._use(at).members

    def take(self, at: int, need: MemberNeed, members: int) -> None:
        """Put members on a tray."""
        use = self._use(at)
        now = _TrayUse(use.gpus + members * need.gpus, need.devices, use.members + members)
        self._uses.setdefault(self.ground.clique[at], {})[at] = now
        if need.terms is not None:
            self._choosy.setdefault(at, Counter())[need] += members

    def put_back(self, at: int, need: MemberNeed, members: int) -> None:
        """Undo a `take`."""
        use, uses = self._use(at), self._uses[self.ground.clique[at]]
        if use.members > members:
            uses[at] = _TrayUse(use.gpus - members * need.gpus, use.devices, use.members - members)
        else:
            del uses[at]
        if need.terms is not None:
            self._choosy[at][need] -= members

    def _is_barred(self, at: int, need: MemberNeed) -> bool:
        """Whether somebody of the gang on the tray keeps such a member off."""
        return need.terms is not None and any(
            members and need.bars(other) for other, members in self._choosy.get(at, Counter()).items()
        )

    def _use(self, at: int) -> _TrayUse:
        return self._uses.get(self.ground.clique[at], {}).get(at, _UNUSED)


# Assignment within one clique.


class TrayAssignment(NamedTuple):
    """Consecutive members of one group on one tray."""

    at: int
    """Position of the tray on the board."""
    part: MemberRange
    first: int
    members: int


TrayAssignments = tuple[TrayAssignment, ...]
"""All members of a block."""


def assign(board: TrialPlacement, sitting: TrayAssignments) -> None:
    """Put members on the board where they are known to fit."""
    for place in sitting:
        board.take(place.at, place.part.need, place.members)


def unassign(board: TrialPlacement, sitting: TrayAssignments) -> None:
    """Take members off the board."""
    for place in sitting:
        board.put_back(place.at, place.part.need, place.members)


def assign_best_fit(board: TrialPlacement, clique: str, block: ColocationGroup) -> TrayAssignments | None:
    """Put a block on the board, members with most GPUs first; None, and nothing put, if it does not fit.

    Trays of which a part is in use are filled up before an empty one is begun.
    """
    sitting: TrayAssignments = ()
    for part in sorted(block, key=lambda one: one.group.gpus, reverse=True):
        places = tuple(_best_fit_trays(board, clique, part))
        if sum(place.members for place in places) < part.members:
            unassign(board, sitting)
            return None
        assign(board, places)
        sitting += places
    return sitting


def joint_assignment(
    board: TrialPlacement, clique: str, wanted: MembersByNeed, spares: int, effort: SearchBudget
) -> JointAssignment | None:
    """How members sit in a clique where the gang has nobody else, and so many trays are kept."""
    needs = ordered_needs(wanted)
    vacancies = board.ground.vacancies(clique, needs)
    return solve_jointly(vacancies, needs, tuple(wanted[need] for need in needs), spares, effort)


def assign_jointly(
    board: TrialPlacement, clique: str, blocks: Sequence[ColocationGroup], loads: Sequence[TrayLoad]
) -> tuple[TrayAssignments, ...]:
    """Put blocks on the board with these loads of the trays of a clique."""
    positions = board.ground.cliques[clique]
    seats = {
        need: iter([at for at, here in zip(positions, column, strict=True) for _ in range(here)])
        for need, column in zip(ordered_needs(members_by_need(blocks)), zip(*loads, strict=True), strict=True)
    }
    sittings = tuple(tuple(place for part in block for place in _take_trays(part, seats)) for block in blocks)
    for sitting in sittings:
        assign(board, sitting)
    return sittings


def spare_trays(board: TrialPlacement, clique: str, sittings: Iterable[TrayAssignments]) -> list[int]:
    """Trays of the clique that could take over all members of any tray of `sittings`.

    Trays of which a part is in use come first, then the last ones.
    """
    carried: dict[int, Counter[MemberNeed]] = {}
    for place in (place for sitting in sittings for place in sitting):
        carried.setdefault(place.at, Counter())[place.part.need] += place.members
    needs = tuple({need: None for load in carried.values() for need in load})
    loads = {tuple(load[need] for need in needs) for load in carried.values()}
    most = tuple(map(max, zip(*loads, strict=True)))
    ground = board.ground
    trays = list(zip(ground.cliques[clique], ground.vacancies(clique, needs), strict=True))
    able = [
        at
        for at, vacancy in reversed(trays)
        if not board.members(at) and loads <= tray_loads(vacancy, needs, most)
    ]
    return sorted(able, key=board.is_empty)


def _best_fit_trays(board: TrialPlacement, clique: str, part: MemberRange) -> Iterator[TrayAssignment]:
    """For as many members of a part as the clique takes, the trays with least room first."""
    need = part.need
    number, last = part.first, part.first + part.members
    if board.capacity(clique, need) < part.members:
        return
    for at in sorted(
        board.ground.cliques[clique],
        key=lambda at: (board.slots(at, need), board.is_empty(at), board.free(at)),
    ):
        here = min(board.slots(at, need), last - number)
        if here:
            yield TrayAssignment(at, part, number, here)
            number += here


def _take_trays(part: MemberRange, seats: dict[MemberNeed, Iterator[int]]) -> Iterator[TrayAssignment]:
    """The members of a part on the next seats for their need."""
    first = part.first
    for at, same in groupby(islice(seats[part.need], part.members)):
        members = len(list(same))
        yield TrayAssignment(at, part, first, members)
        first += members
