"""What a site has left for one gang: slots per tray, loads of a tray, and counting bounds per clique.

`SiteCapacity` is immutable and remembers each answer, so all searches for a gang share it. Holds of the
gang itself do not count. A closed tray has no slots; an exclusive gang sees only empty trays. A tray with
claimed devices uses the capacity computed for the empty tray only if nothing on it is in use.

A `MemberNeed` is what one member takes: GPUs, a kind of claims, terms. Three levels of answers follow,
each cheaper than a search:

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

# What one tray can carry of members that are unlike.


CACHED_TRAYS = 4096
"""Trays whose loads are remembered: those of a site are mostly alike."""


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


MAX_NEEDS = 8
"""With more kinds of members the loads of one tray are too many to be looked through."""

TrayLoad = tuple[int, ...]
"""Members of each need."""


class TrayVacancy(NamedTuple):
    """What is left of a tray; trays with the same are alike."""

    is_empty: bool
    """Nothing is in use."""
    free: int
    """GPUs; 0 where nothing may go."""
    rooms: tuple[int, ...]
    """By need: members that its devices can serve, whatever their GPUs; 0 where none may go."""


def ordered_needs(wanted: Mapping[MemberNeed, int]) -> tuple[MemberNeed, ...]:
    """The needs, those of most members last: the others make the states of a search."""
    return tuple(
        sorted(wanted, key=lambda need: (wanted[need], need.gpus, need.devices or "", str(need.terms)))
    )


@lru_cache(CACHED_TRAYS)
def tray_loads(vacancy: TrayVacancy, needs: tuple[MemberNeed, ...], most: TrayLoad) -> frozenset[TrayLoad]:
    """Every load that the tray can carry, with at most so many members of each need.

    Claims of two kinds are not mixed on a tray: whether both fit was not asked.
    """
    kinds = {need.devices for need in needs}
    foes = [(a, b) for b in range(len(needs)) for a in range(b + 1) if needs[a].bars(needs[b])]
    loads = (load for kind in kinds for load in _loads_of_kind(kind, vacancy, needs, most))
    return frozenset(load for load in loads if not foes or _is_compatible(load, foes))


@lru_cache(CACHED_TRAYS)
def maximal_loads(loads: frozenset[TrayLoad]) -> tuple[TrayLoad, ...]:
    """Those to which nobody can be added."""
    return tuple(
        load
        for load in sorted(loads)
        if not any((*load[:at], load[at] + 1, *load[at + 1 :]) in loads for at in range(len(load)))
    )


def _loads_of_kind(
    kind: str | None, vacancy: TrayVacancy, needs: tuple[MemberNeed, ...], most: TrayLoad
) -> Iterator[TrayLoad]:
    rooms = [room if need.devices == kind else 0 for need, room in zip(needs, vacancy.rooms, strict=True)]
    # What is counted shares GPUs alone.
    shared = max(rooms) if kind is not None else sum(most)
    loads: list[tuple[TrayLoad, int, int]] = [((), vacancy.free, shared)]
    for need, members, room in zip(needs, most, rooms, strict=True):
        top = min(members, room)
        loads = [
            ((*load, here), gpus - here * need.gpus, seats - here)
            for load, gpus, seats in loads
            for here in range(min(top, seats) + 1)
            if here * need.gpus <= gpus
        ]
    return (load for load, _, _ in loads)


def _is_compatible(load: TrayLoad, foes: Sequence[tuple[int, int]]) -> bool:
    """No two of its members bar each other."""
    return not any(load[a] > 1 if a == b else load[a] and load[b] for a, b in foes)


# Bounds of a clique, by counting.


class CliqueBounds(NamedTuple):
    """What a clique has for members of one need while the gang has nobody there."""

    capacity: int
    """Members on all trays."""
    in_part: int
    """Those of them on trays of which a part is in use."""
    on_empty: int
    """Members on the empty tray that takes most."""
    is_level: bool
    """No tray takes more members than any empty one: it does not matter which of these are used."""


BoundsByNeed = Mapping[MemberNeed, CliqueBounds]


def clique_bounds(slots: Sequence[int], is_empty: Sequence[bool]) -> CliqueBounds:
    """That of a clique of which each tray can serve so many members."""
    on_empty = [here for here, empty in zip(slots, is_empty, strict=True) if empty]
    return CliqueBounds(
        capacity=sum(slots),
        in_part=sum(slots) - sum(on_empty),
        on_empty=max(on_empty, default=0),
        is_level=not on_empty or min(on_empty) == max(slots),
    )


def min_opened_trays(outlooks: BoundsByNeed, wanted: Mapping[MemberNeed, int]) -> int | None:
    """Empty trays that the members use at least; None where they cannot fit."""
    most = 0
    for need in wanted:
        outlook, places = outlooks[need], _slots_used(need, wanted)
        if places > outlook.capacity:
            return None
        if places > outlook.in_part:
            most = max(most, -(-(places - outlook.in_part) // outlook.on_empty))
    return most


def max_groups_that_fit(
    outlooks: BoundsByNeed, inside: Mapping[MemberNeed, int], block: Mapping[MemberNeed, int]
) -> int:
    """How many blocks that are alike fit at most beside the members that are `inside`."""
    together = {**block, **inside}
    return min(
        (outlooks[need].capacity - _slots_used(need, inside)) // places
        for need in together
        if (places := _slots_used(need, block))
    )


def is_counting_exact(outlooks: BoundsByNeed, wanted: Iterable[MemberNeed], spares: int) -> bool:
    """Whether counting tells if, and with how many empty trays, members fit, however they are seated.

    Larger ones have to be seated first, on the tray with least room for them.
    """
    needs = list(wanted)
    if spares or not all(outlooks[need].is_level for need in needs):
        return False
    sizes = sorted(need.gpus for need in needs)
    counted = all(need.devices is None and need.terms is None for need in needs)
    return len(needs) == 1 or (counted and all(large % small == 0 for small, large in pairwise(sizes)))


def _slots_used(need: MemberNeed, wanted: Mapping[MemberNeed, int]) -> int:
    """Places for a member of `need` that members of its size, and of multiples of it, take."""
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
    """Trays by position, and cliques. Nothing changes it; what was asked once is remembered."""

    def __init__(self, site: PlacementSite, *, owner: str = "", exclusive: bool = False) -> None:
        """Holds of `owner` do not count. `exclusive`: trays that somebody else has a part of are full."""
        self.site = site
        self.trays = site.trays
        left = _gpus_left(site, owner)
        self._linked = {hold.tray for hold in site.holds if hold.channel and hold.owner != owner}
        """Trays of which somebody has the channel."""
        self._is_untouched = [
            gpus == tray.gpus and tray.name not in self._linked
            for gpus, tray in zip(left, site.trays, strict=True)
        ]
        self.free = [
            gpus if gpus >= 0 and tray.shut is None and (untouched or not exclusive) else _CLOSED
            for gpus, tray, untouched in zip(left, site.trays, self._is_untouched, strict=True)
        ]
        """GPUs that nobody has; less than 0 where nothing may go."""
        self.is_empty = [
            0 < tray.gpus == free and untouched
            for tray, free, untouched in zip(site.trays, self.free, self._is_untouched, strict=True)
        ]
        """Nothing is in use on the tray, and it is open."""
        self.clique = [tray.sharing for tray in site.trays]
        """That of each tray."""
        self.cliques: dict[str, list[int]] = {}
        """Their trays, in the order of their first ones."""
        for at, name in enumerate(self.clique):
            self.cliques.setdefault(name, []).append(at)
        self._rooms: dict[str | None, list[int]] = {}
        self._rooms_on_terms: dict[MemberNeed, list[int]] = {}
        self._slots: dict[MemberNeed, list[int]] = {}
        self._outlooks: dict[MemberNeed, dict[str, CliqueBounds]] = {}
        self._vacancies: dict[tuple[str, tuple[MemberNeed, ...]], tuple[TrayVacancy, ...]] = {}

    @cached_property
    def empty(self) -> dict[str, int]:
        """Empty trays by clique."""
        return {name: sum([self.is_empty[at] for at in found]) for name, found in self.cliques.items()}

    def rooms(self, need: MemberNeed) -> Sequence[int]:
        """Members that each tray can serve by its devices; without claims, its GPUs. 0 where none may go."""
        if need.terms is None:
            return self._rooms_for(need.devices)
        if need not in self._rooms_on_terms:
            # A member that has nothing but the channel is served by every tray that has one.
            rooms = self._rooms_for(need.devices) if need.gpus or need.devices else [1] * len(self.trays)
            able = [self.why_barred(at, need.terms) is None for at in range(len(self.trays))]
            self._rooms_on_terms[need] = [here if one else 0 for here, one in zip(rooms, able, strict=True)]
        return self._rooms_on_terms[need]

    def why_barred(self, at: int, terms: PlacementTerms) -> str | None:
        """Why a member with these terms may not go on a tray; None where it may, as far as they go."""
        tray = self.trays[at]
        if self.free[at] == _CLOSED or terms.where in tray.closed:
            return tray.shut or tray.closed.get(terms.where, "in use")
        if not terms.channel:
            return None
        if tray.name in self._linked:
            return "its IMEX channel is in use"
        return None if tray.gpus or tray.clique else "it has no IMEX channel"

    def slots(self, need: MemberNeed) -> Sequence[int]:
        """Members that each tray can serve."""
        if need not in self._slots:
            self._slots[need] = self._served_at_once(need)
        return self._slots[need]

    def _served_at_once(self, need: MemberNeed) -> list[int]:
        most = 1 if need.bars(need) else _MORE_THAN_ANY
        if not need.gpus:
            return [min(here, most) for here in self.rooms(need)]
        by_gpus = [free // need.gpus if free >= need.gpus else 0 for free in self.free]
        if need.devices is None and need.terms is None:
            return by_gpus
        return [min(here, room, most) for here, room in zip(by_gpus, self.rooms(need), strict=True)]

    def _rooms_for(self, devices: str | None) -> Sequence[int]:
        if devices not in self._rooms:
            most = self.free if devices is None else self._served(devices)
            self._rooms[devices] = [
                here if free >= 0 else 0 for here, free in zip(most, self.free, strict=True)
            ]
        return self._rooms[devices]

    def outlooks(self, need: MemberNeed) -> dict[str, CliqueBounds]:
        """How each clique stands to members of one need."""
        if need not in self._outlooks:
            slots = self.slots(need)
            self._outlooks[need] = {
                name: clique_bounds([slots[at] for at in found], [self.is_empty[at] for at in found])
                for name, found in self.cliques.items()
            }
        return self._outlooks[need]

    def vacancies(self, clique: str, needs: tuple[MemberNeed, ...]) -> tuple[TrayVacancy, ...]:
        """What each tray of a clique has left."""
        key = (clique, needs)
        if key not in self._vacancies:
            here = self.cliques[clique]
            rooms = ([some[at] for at in here] for some in [self.rooms(need) for need in needs])
            is_empty, free = [self.is_empty[at] for at in here], [max(0, self.free[at]) for at in here]
            self._vacancies[key] = tuple(map(TrayVacancy, is_empty, free, zip(*rooms, strict=True)))
        return self._vacancies[key]

    def _served(self, devices: str) -> list[int]:
        rooms = [tray.rooms.get(devices) for tray in self.trays]
        return [
            0 if room is None else room.empty if untouched else room.now
            for room, untouched in zip(rooms, self._is_untouched, strict=True)
        ]


def capacity_for(site: PlacementSite, gang: Gang) -> SiteCapacity:
    """The site as the gang meets it."""
    return SiteCapacity(site, owner=gang.name, exclusive=gang.exclusive)


def _gpus_left(site: PlacementSite, owner: str) -> list[int]:
    """GPUs of each tray that nobody has."""
    left = {tray.name: tray.gpus for tray in site.trays}
    for hold in site.holds:
        if hold.owner != owner and hold.tray in left:
            # Less than none left shuts the tray to members without GPUs too.
            left[hold.tray] -= _MORE_THAN_ANY if hold.is_whole else hold.gpus
    return [left[tray.name] for tray in site.trays]
