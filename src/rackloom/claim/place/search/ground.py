"""What a site has for a gang that has nobody there yet; all searches for that gang share it."""

from collections.abc import Sequence
from functools import cached_property

from rackloom.claim.place.search.loads import Need, Vacancy
from rackloom.claim.place.search.outlook import Outlook, outlook_on
from rackloom.claim.place.values import Gang, Site, Terms

_FULL = 1 << 20
"""More GPUs than a tray has."""
_SHUT = -1
"""Free GPUs of a tray where nothing may go, not even a member without GPUs."""


class Ground:
    """Trays by position, and cliques. Nothing changes it; what was asked once is remembered."""

    def __init__(self, site: Site, *, owner: str = "", exclusive: bool = False) -> None:
        """Holds of `owner` do not count. `exclusive`: trays that somebody else has a part of are full."""
        self.site = site
        self.trays = site.trays
        left = _left(site, owner)
        self._linked = {one.tray for one in site.holds if one.channel and one.owner != owner}
        """Trays of which somebody has the channel."""
        self._is_untouched = [
            gpus == tray.gpus and tray.name not in self._linked
            for gpus, tray in zip(left, site.trays, strict=True)
        ]
        self.free = [
            gpus if gpus >= 0 and tray.shut is None and (untouched or not exclusive) else _SHUT
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
        self._rooms_on_terms: dict[Need, list[int]] = {}
        self._slots: dict[Need, list[int]] = {}
        self._outlooks: dict[Need, dict[str, Outlook]] = {}
        self._vacancies: dict[tuple[str, tuple[Need, ...]], tuple[Vacancy, ...]] = {}

    @cached_property
    def empty(self) -> dict[str, int]:
        """Empty trays by clique."""
        return {name: sum([self.is_empty[at] for at in found]) for name, found in self.cliques.items()}

    def rooms(self, need: Need) -> Sequence[int]:
        """Members that each tray can serve by its devices; without claims, its GPUs. 0 where none may go."""
        if need.terms is None:
            return self._rooms_for(need.devices)
        if need not in self._rooms_on_terms:
            # A member that has nothing but the channel is served by every tray that has one.
            rooms = self._rooms_for(need.devices) if need.gpus or need.devices else [1] * len(self.trays)
            able = [self.why_barred(at, need.terms) is None for at in range(len(self.trays))]
            self._rooms_on_terms[need] = [here if one else 0 for here, one in zip(rooms, able, strict=True)]
        return self._rooms_on_terms[need]

    def why_barred(self, at: int, terms: Terms) -> str | None:
        """Why a member with these terms may not go on a tray; None where it may, as far as they go."""
        tray = self.trays[at]
        if self.free[at] == _SHUT or terms.where in tray.closed:
            return tray.shut or tray.closed.get(terms.where, "in use")
        if not terms.channel:
            return None
        if tray.name in self._linked:
            return "its IMEX channel is in use"
        return None if tray.gpus or tray.clique else "it has no IMEX channel"

    def slots(self, need: Need) -> Sequence[int]:
        """Members that each tray can serve."""
        if need not in self._slots:
            self._slots[need] = self._served_at_once(need)
        return self._slots[need]

    def _served_at_once(self, need: Need) -> list[int]:
        most = 1 if need.bars(need) else _FULL
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

    def outlooks(self, need: Need) -> dict[str, Outlook]:
        """How each clique stands to members of one need."""
        if need not in self._outlooks:
            slots = self.slots(need)
            self._outlooks[need] = {
                name: outlook_on([slots[at] for at in found], [self.is_empty[at] for at in found])
                for name, found in self.cliques.items()
            }
        return self._outlooks[need]

    def vacancies(self, clique: str, needs: tuple[Need, ...]) -> tuple[Vacancy, ...]:
        """What each tray of a clique has left."""
        key = (clique, needs)
        if key not in self._vacancies:
            here = self.cliques[clique]
            rooms = ([some[at] for at in here] for some in [self.rooms(need) for need in needs])
            is_empty, free = [self.is_empty[at] for at in here], [max(0, self.free[at]) for at in here]
            self._vacancies[key] = tuple(map(Vacancy, is_empty, free, zip(*rooms, strict=True)))
        return self._vacancies[key]

    def _served(self, devices: str) -> list[int]:
        rooms = [tray.rooms.get(devices) for tray in self.trays]
        return [
            0 if room is None else room.empty if untouched else room.now
            for room, untouched in zip(rooms, self._is_untouched, strict=True)
        ]


def ground_of(site: Site, gang: Gang) -> Ground:
    """The site as the gang meets it."""
    return Ground(site, owner=gang.name, exclusive=gang.exclusive)


def _left(site: Site, owner: str) -> list[int]:
    """GPUs of each tray that nobody has."""
    left = {tray.name: tray.gpus for tray in site.trays}
    for hold in site.holds:
        if hold.owner != owner and hold.tray in left:
            # Less than none left shuts the tray to members without GPUs too.
            left[hold.tray] -= _FULL if hold.is_whole else hold.gpus
    return [left[tray.name] for tray in site.trays]
