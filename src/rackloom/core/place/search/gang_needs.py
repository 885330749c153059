"""The needs of one gang, the members that a tray can carry, and bounds by counting.

`colocation_groups` cuts a gang into subgroups that must share a clique: one per segment of `rank_sequences`,
or one per share, largest first. It raises Refused for a gang that requests nothing or contradicts itself. A
`MemberNeed` is the demand of one member: GPUs, a kind of claims, terms. Three levels of answers, each cheaper
than a search:

1. `MemberNeed.slots`: members of one need that a tray serves, given its state (`TrayState`).
2. `CliqueBounds`: capacity of a clique for one need, and how much of it lies on partly used trays.
   `min_opened_trays` gives the fewest empty trays that members open. It is exact if every size divides the
   next larger one, all empty trays serve as many as the best tray, and no spares are kept
   (`is_counting_exact`). Otherwise it is a lower bound.
3. `tray_loads`: every mix of unlike members that one tray can carry (`TrayVacancy`), for at most 8 needs.
   Claims of two kinds are not mixed on a tray, because the allocator counts each kind alone.

A tray with claimed devices uses the capacity computed for the empty tray only if nothing on it is in use.
The loads of a tray are cached per process: the trays of a site are mostly equal.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from msgspec.structs import replace

from rackloom.core.cluster.trays import ClaimCapacity, Gang, GangGroup, PlacementTerms
from rackloom.errors import Refused

# The parts of a gang that must share a clique.


class TrayState(NamedTuple):
    """The facts that decide which members fit on a tray. Equal trays are interchangeable."""

    free: int
    """GPUs. Negative if nothing may go there, not even a member without GPUs."""
    is_empty: bool
    """It is open, and nothing on it is in use."""
    is_untouched: bool
    """Nothing on it is in use, though it may be closed."""
    has_channel: bool
    """It has an IMEX channel that is not in use."""
    closed: frozenset[str]
    """Keys of `PlacementTray.closed`."""
    rooms: frozenset[tuple[str, ClaimCapacity]]
    """Entries of `PlacementTray.rooms`."""

    def bars(self, terms: PlacementTerms) -> bool:
        """Whether a member with these terms may not go there."""
        return self.free < 0 or terms.where in self.closed or (terms.channel and not self.has_channel)


_MORE_THAN_ANY = 1 << 20
"""More members than a tray serves."""


class MemberNeed(NamedTuple):
    """The demand of one member on its tray."""

    gpus: int
    devices: str | None
    terms: PlacementTerms | None = None

    @classmethod
    def of(cls, group: GangGroup) -> "MemberNeed":
        """The need of each member of a group."""
        return cls(group.gpus, group.devices, group.terms)

    def bars(self, other: "MemberNeed") -> bool:
        """Whether a member with this need and one with the other are never on one tray."""
        return self.terms is not None and other.terms is not None and self.terms.bar(other.terms)

    def device_slots(self, tray: TrayState) -> int:
        """Members that the devices of a tray can serve, regardless of their GPUs. 0 if none may go there."""
        if tray.free < 0 or (self.terms is not None and tray.bars(self.terms)):
            return 0
        if self.devices is not None:
            # The allocator counted members for the tray as it is now, and for the tray with nothing in use.
            found = next((room for kind, room in tray.rooms if kind == self.devices), None)
            return 0 if found is None else found.empty if tray.is_untouched else found.now
        # A member that has nothing but the IMEX channel is served once by every tray that has one.
        return tray.free if self.gpus or self.terms is None else 1

    def slots(self, tray: TrayState) -> int:
        """Members that a tray can serve."""
        if self.gpus and tray.free < self.gpus:
            return 0
        # Most members only take GPUs. This is the innermost step of counting, so they skip the rest.
        if self.gpus and self.devices is None and self.terms is None:
            return tray.free // self.gpus
        # A member that bars its like (the IMEX channel, anti-affinity to itself) is alone on its tray.
        most = 1 if self.bars(self) else _MORE_THAN_ANY
        by_gpus = tray.free // self.gpus if self.gpus else most
        return min(by_gpus, self.device_slots(tray), most)


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
            segment for groups in rank_sequences(gang) for segment in _segments(groups, gang.segment)
        ]
    else:
        by_share: dict[str, ColocationGroup] = {}
        for group in gang.device_groups:
            part = MemberRange(group, MemberNeed.of(group), 0, group.members)
            by_share[group.share] = (*by_share.get(group.share, ()), part)
        subgroups = list(by_share.values())
    # GPUs, then members. The largest have the fewest cliques to choose from, so the search takes them first.
    return sorted(
        subgroups,
        key=lambda parts: (
            sum(part.group.gpus * part.members for part in parts),
            sum(part.members for part in parts),
        ),
        reverse=True,
    )


def rank_sequences(gang: Gang) -> list[tuple[GangGroup, ...]]:
    """The groups with devices, each with those that follow it: their members' ranks follow each other."""
    sequences: list[tuple[GangGroup, ...]] = []
    for group in gang.device_groups:
        if group.follows and sequences:
            sequences[-1] = (*sequences[-1], group)
        else:
            sequences.append((group,))
    return sequences


def groups_apart(groups: Iterable[GangGroup]) -> tuple[GangGroup, ...]:
    """The groups with a clique for each, which those that follow it share."""
    found, first = list[GangGroup](), ""
    for group in groups:
        # A group that continues another's ranks stays with it, even if it had another share.
        first = first if group.follows and first else group.name
        found.append(replace(group, share=first))
    return tuple(found)


def _segments(groups: Iterable[GangGroup], size: int) -> Iterator[ColocationGroup]:
    """The members of groups that follow each other, `size` at a time. The last segment may have fewer."""
    segment, room = list[MemberRange](), size
    for group in groups:
        first = 0
        while first < group.members:
            # The room goes on into the next group: ranks that follow each other may share a segment.
            members = min(room, group.members - first)
            segment.append(MemberRange(group, MemberNeed.of(group), first, members))
            first, room = first + members, room - members
            if not room:
                yield tuple(segment)
                segment, room = [], size
    if segment:
        yield tuple(segment)


KEPT = "kept"
"""The terms of a member that has to be on a tray that is kept for its tenant."""
_ANYWHERE = GangGroup(name="on any tray", members=1, gpus=1)
_ON_KEPT = GangGroup(name="on a kept tray", members=1, gpus=1, terms=PlacementTerms(where=KEPT))


def tray_group(trays: int, kept: int = 0) -> ColocationGroup:
    """A number of whole trays in one clique, at least `kept` of them among the kept ones."""
    parts = ((_ON_KEPT, kept), (_ANYWHERE, trays - kept))
    return tuple(MemberRange(group, MemberNeed.of(group), 0, count) for group, count in parts if count)


def check_gang(gang: Gang) -> None:
    """Refuse a gang that contradicts itself or requests nothing."""
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
    """The needs of the subgroup, without the identity of its members."""
    members = members_by_need([subgroup])
    return tuple(members.items() if len(members) == 1 else sorted(members.items(), key=str))


# Mixes of unlike members that one tray can carry.


CACHED_TRAYS = 4096
"""Trays for which the loads are cached: those of a site are mostly alike."""


MAX_NEEDS = 8
"""With more kinds of members, one tray has too many loads to enumerate."""

TrayLoad = tuple[int, ...]
"""Members of each need."""


class TrayVacancy(NamedTuple):
    """The remaining room of a tray. Trays with equal vacancies are interchangeable."""

    is_empty: bool
    """Nothing is in use."""
    free: int
    """GPUs. 0 if nothing may go there."""
    slots: tuple[int, ...]
    """By need: members that its devices can serve, regardless of their GPUs. 0 if none may go there."""

    @classmethod
    def of(cls, tray: TrayState, needs: tuple[MemberNeed, ...]) -> "TrayVacancy":
        """The vacancy of a tray before the gang comes."""
        return cls(tray.is_empty, max(0, tray.free), tuple([need.device_slots(tray) for need in needs]))


def ordered_needs(wanted: Mapping[MemberNeed, int]) -> tuple[MemberNeed, ...]:
    """The needs, those of most members last: only the others multiply the states of a joint assignment."""
    return tuple(
        sorted(wanted, key=lambda need: (wanted[need], need.gpus, need.devices or "", str(need.terms)))
    )


@lru_cache(CACHED_TRAYS)
def tray_loads(vacancy: TrayVacancy, needs: tuple[MemberNeed, ...], most: TrayLoad) -> frozenset[TrayLoad]:
    """Every load that the tray can carry, with at most the members in `most` of each need."""
    found: set[TrayLoad] = set()
    # The allocator counts each kind of claims alone, so each load has one kind only.
    # None: the members claim nothing, and are counted by GPUs alone.
    for kind in {need.devices for need in needs}:
        slots = [here if need.devices == kind else 0 for need, here in zip(needs, vacancy.slots, strict=True)]
        # Members with claims share the slots that the allocator counted. Others share only the GPUs.
        shared = max(slots) if kind is not None else sum(most)
        # Prefixes of loads, each with the GPUs and the slots that it leaves.
        loads: list[tuple[TrayLoad, int, int]] = [((), vacancy.free, shared)]
        for need, members, here in zip(needs, most, slots, strict=True):
            loads = [
                ((*load, added), gpus - added * need.gpus, left - added)
                for load, gpus, left in loads
                for added in range(min(members, here, left) + 1)
                if added * need.gpus <= gpus
            ]
        found.update([load for load, _, _ in loads])
    # Anti-affinity. A need that bars itself has at most one member here, two that bar each other exclude one.
    conflicts = [(a, b) for b in range(len(needs)) for a in range(b + 1) if needs[a].bars(needs[b])]
    return frozenset(
        load
        for load in found
        if not any(load[a] > 1 if a == b else load[a] and load[b] for a, b in conflicts)
    )


@lru_cache(CACHED_TRAYS)
def maximal_loads(loads: frozenset[TrayLoad]) -> tuple[TrayLoad, ...]:
    """Those to which no member can be added."""
    return tuple(
        load
        for load in sorted(loads)
        if not any((*load[:at], load[at] + 1, *load[at + 1 :]) in loads for at in range(len(load)))
    )


# Bounds of a clique, by counting.


class CliqueBounds(NamedTuple):
    """The room of a clique for members of one need while it holds none of the gang."""

    capacity: int
    """Members on all trays."""
    in_part: int
    """Those of them on trays of which a part is in use."""
    on_empty: int
    """Members on the empty tray that takes most."""
    is_level: bool
    """No tray takes more members than any empty one, so it does not matter which empty trays are used."""


BoundsByNeed = Mapping[MemberNeed, CliqueBounds]


def clique_bounds(trays: Iterable[tuple[int, bool, int]]) -> CliqueBounds:
    """The bounds of a clique, from trays: members that each serves, whether it is empty, how many of them."""
    capacity = in_part = on_empty = most = 0
    least: int | None = None
    for slots, is_empty, count in trays:
        capacity += slots * count
        most = max(most, slots)
        # Only empty trays can be opened, so only their slots are compared.
        if is_empty:
            on_empty, least = max(on_empty, slots), slots if least is None else min(least, slots)
        else:
            in_part += slots * count
    return CliqueBounds(capacity, in_part, on_empty, least is None or least == most)


def min_opened_trays(bounds: BoundsByNeed, wanted: Mapping[MemberNeed, int]) -> int | None:
    """The fewest empty trays that the members use, or None if they cannot fit.

    Each need gives a lower bound: what the partly used trays cannot serve, divided by the best empty tray
    and rounded up. The largest of these bounds holds for all needs together.
    """
    most = 0
    for need in wanted:
        bound, used = bounds[need], _slots_used(need, wanted)
        if used > bound.capacity:
            return None
        # Partly used trays are filled first, so only the rest opens empty ones.
        if used > bound.in_part:
            most = max(most, -(-(used - bound.in_part) // bound.on_empty))
    return most


def max_groups_that_fit(
    bounds: BoundsByNeed, inside: Mapping[MemberNeed, int], subgroup: Mapping[MemberNeed, int]
) -> int:
    """How many equal subgroups fit at most beside the members that are `inside`."""
    return min(
        (bounds[need].capacity - _slots_used(need, inside)) // used
        for need in {**subgroup, **inside}
        if (used := _slots_used(need, subgroup))
    )


def is_counting_exact(bounds: BoundsByNeed, wanted: Iterable[MemberNeed], spares: int) -> bool:
    """Whether counting decides if members fit, and how many empty trays they open.

    It does for best fit decreasing: larger members are assigned first, each to the tray with least room.
    If each size divides the next larger one, the rest of a tray beside a larger member is a whole number of
    slots for the smaller ones, so no GPU is lost. Claims and terms break this, and so do spare trays.
    """
    needs = list(wanted)
    if spares or not all(bounds[need].is_level for need in needs):
        return False
    # One need cannot compete with itself for trays, so it may have claims and terms.
    sizes = sorted(need.gpus for need in needs)
    counted = all(need.devices is None and need.terms is None for need in needs)
    return len(needs) == 1 or (counted and all(large % small == 0 for small, large in pairwise(sizes)))


def _slots_used(need: MemberNeed, wanted: Mapping[MemberNeed, int]) -> int:
    """Slots for a member of `need` that members of its size, and of multiples of it, take."""
    if need.devices is not None or need.terms is not None:
        return wanted.get(need, 0)
    # A member of twice the size takes two slots. One of another size takes some too, but how many depends on
    # the tray, so it counts nothing: this stays a lower bound.
    return sum(
        members * (other.gpus // need.gpus)
        for other, members in wanted.items()
        if other.devices is None and other.gpus % need.gpus == 0
    )
