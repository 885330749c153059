"""The two sides of the search: what one gang asks for, and what a site has left for it.

`colocation_groups` cuts a gang into subgroups that must share a clique: one per segment, or one per share,
largest first. It raises Refused for a gang that asks for nothing or contradicts itself. A `MemberNeed` is
what one member takes: GPUs, a kind of claims, terms.

`SiteCapacity` is immutable and remembers each answer, so all searches for a gang share it. Holds of the
gang itself do not count. A closed tray has no slots; an exclusive gang sees only empty trays. A tray with
claimed devices uses the capacity computed for the empty tray only if nothing on it is in use. Three levels
of answers, each cheaper than a search:

1. `slots`: members of one need that each tray serves.
2. `CliqueBounds`: capacity of a clique for one need, and how much of it lies on partly used trays.
   `min_opened_trays` gives the fewest empty trays that members open. It is exact where every size divides
   the next larger one and all empty trays serve as many as the best tray, and no spares are kept
   (`is_counting_exact`); elsewhere it is a lower bound.
3. `tray_loads`: every mix of unlike members that one tray can carry (`TrayVacancy`), for at most 8 needs.
   Claims of two kinds are not mixed on a tray, because the allocator was not asked about both.

The loads of a tray are cached per process: the trays of a site are mostly equal.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from rackloom.core.place.placement_values import Gang, GangGroup, PlacementSite, PlacementTerms
from rackloom.errors import Refused

# What of a gang must share a clique.


class MemberNeed(NamedTuple):
    """What one member takes of its tray."""

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


# What one tray can carry of members that are unlike.


CACHED_TRAYS = 4096
"""Trays whose loads are remembered: those of a site are mostly alike."""


MAX_NEEDS = 8
"""With more kinds of members, one tray has too many loads to enumerate."""

TrayLoad = tuple[int, ...]
"""Members of each need."""


class TrayVacancy(NamedTuple):
    """What is left of a tray. Trays with equal vacancies are interchangeable."""

    is_empty: bool
    """Nothing is in use."""
    free: int
    """GPUs; 0 where nothing may go."""
    slots: tuple[int, ...]
    """By need: members that its devices can serve, whatever their GPUs; 0 where none may go."""


def ordered_needs(wanted: Mapping[MemberNeed, int]) -> tuple[MemberNeed, ...]:
    """The needs, those of most members last: only the others multiply the states of a joint assignment."""
    return tuple(
        sorted(wanted, key=lambda need: (wanted[need], need.gpus, need.devices or "", str(need.terms)))
    )


@lru_cache(CACHED_TRAYS)
def tray_loads(vacancy: TrayVacancy, needs: tuple[MemberNeed, ...], most: TrayLoad) -> frozenset[TrayLoad]:
    """Every load that the tray can carry, with at most so many members of each need."""
    # The allocator was not asked whether claims of two kinds fit together, so each load has one kind only.
    kinds = {need.devices for need in needs}
    conflicts = [(a, b) for b in range(len(needs)) for a in range(b + 1) if needs[a].bars(needs[b])]
    loads = (load for kind in kinds for load in _loads_of_kind(kind, vacancy, needs, most))
    return frozenset(
        load
        for load in loads
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


def _loads_of_kind(
    kind: str | None, vacancy: TrayVacancy, needs: tuple[MemberNeed, ...], most: TrayLoad
) -> Iterator[TrayLoad]:
    """Loads whose members all claim this kind of devices (None: they are counted by GPUs alone)."""
    slots = [here if need.devices == kind else 0 for need, here in zip(needs, vacancy.slots, strict=True)]
    # Members with claims share the slots that the allocator counted; others share only the GPUs.
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
    return (load for load, _, _ in loads)


# Bounds of a clique, by counting.


class CliqueBounds(NamedTuple):
    """What a clique has for members of one need while it holds none of the gang."""

    capacity: int
    """Members on all trays."""
    in_part: int
    """Those of them on trays of which a part is in use."""
    on_empty: int
    """Members on the empty tray that takes most."""
    is_level: bool
    """No tray takes more members than any empty one, so it does not matter which empty trays are used."""


BoundsByNeed = Mapping[MemberNeed, CliqueBounds]


def clique_bounds(slots: Sequence[int], is_empty: Sequence[bool]) -> CliqueBounds:
    """The bounds of a clique whose trays can each serve so many members."""
    on_empty = [here for here, empty in zip(slots, is_empty, strict=True) if empty]
    return CliqueBounds(
        capacity=sum(slots),
        in_part=sum(slots) - sum(on_empty),
        on_empty=max(on_empty, default=0),
        is_level=not on_empty or min(on_empty) == max(slots),
    )


def min_opened_trays(bounds: BoundsByNeed, wanted: Mapping[MemberNeed, int]) -> int | None:
    """Empty trays that the members use at least; None where they cannot fit.

    Each need gives a lower bound: what the partly used trays cannot serve, divided by the best empty tray
    and rounded up. The largest of these bounds holds for all needs together.
    """
    most = 0
    for need in wanted:
        bound, used = bounds[need], _slots_used(need, wanted)
        if used > bound.capacity:
            return None
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
    """Whether counting tells if members fit, and how many empty trays they open.

    It does for best fit decreasing: larger members are assigned first, each to the tray with least room.
    Where each size divides the next larger one, what a larger member leaves on a tray is a whole number of
    slots for the smaller ones, so no GPU is lost. Claims and terms break this, and so do spare trays.
    """
    needs = list(wanted)
    if spares or not all(bounds[need].is_level for need in needs):
        return False
    sizes = sorted(need.gpus for need in needs)
    counted = all(need.devices is None and need.terms is None for need in needs)
    return len(needs) == 1 or (counted and all(large % small == 0 for small, large in pairwise(sizes)))


def _slots_used(need: MemberNeed, wanted: Mapping[MemberNeed, int]) -> int:
    """Slots for a member of `need` that members of its size, and of multiples of it, take."""
    if need.devices is not None or need.terms is not None:
        return wanted.get(need, 0)
    return sum(
        members * (other.gpus // need.gpus)
        for other, members in wanted.items()
        if other.devices is None and other.gpus % need.gpus == 0
    )


# The site as one gang meets it.


_MORE_THAN_ANY = 1 << 20
"""More GPUs than a tray has."""
_CLOSED = -1
"""Free GPUs of a tray where nothing may go, not even a member without GPUs."""


class SiteCapacity:
    """Trays by position, and cliques. It is immutable, and each answer is computed once."""

    def __init__(self, site: PlacementSite, *, owner: str = "", exclusive: bool = False) -> None:
        """Holds of `owner` do not count. `exclusive`: trays that others use in part count as full."""
        self.site = site
        self.trays = site.trays
        left = _gpus_left(site, owner)
        self._channel_users = {hold.tray for hold in site.holds if hold.channel and hold.owner != owner}
        """Trays whose IMEX channel is in use."""
        self._is_untouched = [
            gpus == tray.gpus and tray.name not in self._channel_users
            for gpus, tray in zip(left, site.trays, strict=True)
        ]
        self.free = [
            gpus if gpus >= 0 and tray.shut is None and (untouched or not exclusive) else _CLOSED
            for gpus, tray, untouched in zip(left, site.trays, self._is_untouched, strict=True)
        ]
        """Free GPUs by tray; less than 0 where nothing may go."""
        self.is_empty = [
            0 < tray.gpus == free and untouched
            for tray, free, untouched in zip(site.trays, self.free, self._is_untouched, strict=True)
        ]
        """By tray: it is open and nothing on it is in use."""
        self.clique = [tray.sharing for tray in site.trays]
        """That of each tray."""
        self.cliques: dict[str, list[int]] = {}
        """Their trays, in the order of their first ones."""
        for at, name in enumerate(self.clique):
            self.cliques.setdefault(name, []).append(at)
        self._device_slots: dict[MemberNeed, list[int]] = {}
        self._slots: dict[MemberNeed, list[int]] = {}
        self._bounds: dict[MemberNeed, dict[str, CliqueBounds]] = {}
        self._vacancies: dict[tuple[str, tuple[MemberNeed, ...]], tuple[TrayVacancy, ...]] = {}

    @cached_property
    def empty(self) -> dict[str, int]:
        """Empty trays by clique."""
        return {name: sum([self.is_empty[at] for at in found]) for name, found in self.cliques.items()}

    def why_barred(self, at: int, terms: PlacementTerms) -> str | None:
        """Why a member with these terms may not go on a tray; None where the terms allow it."""
        tray = self.trays[at]
        if self.free[at] == _CLOSED or terms.where in tray.closed:
            return tray.shut or tray.closed.get(terms.where, "in use")
        if not terms.channel:
            return None
        if tray.name in self._channel_users:
            return "its IMEX channel is in use"
        return None if tray.gpus or tray.clique else "it has no IMEX channel"

    def device_slots(self, need: MemberNeed) -> Sequence[int]:
        """Members that the devices of each tray can serve, whatever their GPUs; 0 where none may go."""
        if need not in self._device_slots:
            terms = need.terms
            self._device_slots[need] = [
                slots if free >= 0 and (terms is None or self.why_barred(at, terms) is None) else 0
                for at, (slots, free) in enumerate(zip(self._claim_slots(need), self.free, strict=True))
            ]
        return self._device_slots[need]

    def _claim_slots(self, need: MemberNeed) -> Sequence[int]:
        if need.devices is None:
            # A member that has nothing but the IMEX channel is served once by every tray that has one.
            return self.free if need.gpus or need.terms is None else [1] * len(self.trays)
        claims = [tray.rooms.get(need.devices) for tray in self.trays]
        return [
            0 if found is None else found.empty if untouched else found.now
            for found, untouched in zip(claims, self._is_untouched, strict=True)
        ]

    def slots(self, need: MemberNeed) -> Sequence[int]:
        """Members that each tray can serve."""
        if need not in self._slots:
            most = 1 if need.bars(need) else _MORE_THAN_ANY
            if not need.gpus:
                found = [min(here, most) for here in self.device_slots(need)]
            elif need.devices is None and need.terms is None:
                found = [free // need.gpus if free >= need.gpus else 0 for free in self.free]
            else:
                found = [
                    min(free // need.gpus, here, most) if free >= need.gpus else 0
                    for free, here in zip(self.free, self.device_slots(need), strict=True)
                ]
            self._slots[need] = found
        return self._slots[need]

    def bounds(self, need: MemberNeed) -> dict[str, CliqueBounds]:
        """The bounds of each clique for members of one need."""
        if need not in self._bounds:
            slots = self.slots(need)
            self._bounds[need] = {
                name: clique_bounds([slots[at] for at in found], [self.is_empty[at] for at in found])
                for name, found in self.cliques.items()
            }
        return self._bounds[need]

    def vacancies(self, clique: str, needs: tuple[MemberNeed, ...]) -> tuple[TrayVacancy, ...]:
        """What each tray of a clique has left."""
        key = (clique, needs)
        if key not in self._vacancies:
            trays = self.cliques[clique]
            by_need = [self.device_slots(need) for need in needs]
            slots = zip(*([found[at] for at in trays] for found in by_need), strict=True)
            is_empty, free = [self.is_empty[at] for at in trays], [max(0, self.free[at]) for at in trays]
            self._vacancies[key] = tuple(map(TrayVacancy, is_empty, free, slots))
        return self._vacancies[key]


def capacity_for(site: PlacementSite, gang: Gang) -> SiteCapacity:
    """The site as the gang meets it."""
    return SiteCapacity(site, owner=gang.name, exclusive=gang.exclusive)


def _gpus_left(site: PlacementSite, owner: str) -> list[int]:
    """Free GPUs of each tray."""
    left = {tray.name: tray.gpus for tray in site.trays}
    for hold in site.holds:
        if hold.owner != owner and hold.tray in left:
            # A negative number closes the tray to members without GPUs too.
            left[hold.tray] -= _MORE_THAN_ANY if hold.is_whole else hold.gpus
    return [left[tray.name] for tray in site.trays]
