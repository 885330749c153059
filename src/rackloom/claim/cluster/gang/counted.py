"""What each tray was found to serve: counted again only where something that it is made of has changed."""

from collections.abc import Callable, Mapping, Set

import msgspec
from msgspec.structs import replace

from rackloom.claim.allocate.objects import ResourceClaim
from rackloom.claim.place.reading.devices import Devices
from rackloom.claim.place.reading.rooms import with_rooms
from rackloom.claim.place.values import Room, Site

Claims = tuple[ResourceClaim, ...]
"""Of one member, in the order in which it names them."""
PoolKey = tuple[str, str]
"""Driver and pool name."""
_MOST_KINDS = 8
"""Of claims that are remembered; what has not been asked for longest goes first."""


class Told(msgspec.Struct, frozen=True):
    """All that bears on how many members a tray serves: where it equals what was, so does the count."""

    labels: Mapping[str, str]
    classes: tuple[object, ...]
    pools: tuple[tuple[object, ...], ...]
    """The versions of all slices of the pools that have devices of the tray, on whatever node."""
    taken: tuple[object, ...]
    """The devices of others, as they were allocated."""


class Counted:
    """The memory of one who counts often; for one thread at a time."""

    def __init__(self) -> None:
        self._kinds: dict[bytes, dict[str, tuple[Told, Room | None]]] = {}
        self._states: dict[PoolKey, tuple[object, ...]] = {}

    def same(self, states: Mapping[PoolKey, tuple[object, ...]]) -> Mapping[PoolKey, tuple[object, ...]]:
        """The states of pools, and the very values of before where they are equal: those compare at once.

        A pool may span many trays, and each of them is told all of it.
        """
        before = self._states
        self._states = {key: before[key] if before.get(key) == one else one for key, one in states.items()}
        return self._states

    def furnish(
        self,
        site: Site,
        kinds: Mapping[str, Claims],
        told: Mapping[str, Told],
        devices_on: Callable[[Set[str]], Devices],
    ) -> Site:
        """The site with the room of each tray for each kind of claims; `told` names all of its trays.

        `devices_on` reads what is on some of them. Raises Refused for claims that nobody can serve.
        """
        rooms: dict[str, dict[str, Room]] = {tray.name: {} for tray in site.trays}
        for kind, claims in kinds.items():
            for name, room in self._rooms(site, kind, claims, told, devices_on).items():
                rooms[name][kind] = room
        return Site(tuple(replace(tray, rooms=rooms[tray.name]) for tray in site.trays), site.holds)

    def _rooms(
        self,
        site: Site,
        kind: str,
        claims: Claims,
        told: Mapping[str, Told],
        devices_on: Callable[[Set[str]], Devices],
    ) -> dict[str, Room]:
        key = msgspec.json.encode(claims)
        before = self._kinds.get(key, {})
        now = {name: before[name] for name, one in told.items() if name in before and before[name][0] == one}
        changed = tuple(tray for tray in site.trays if tray.name not in now)
        if changed:
            part = with_rooms(Site(changed), devices_on({one.name for one in changed}), {kind: claims})
            now |= {tray.name: (told[tray.name], tray.rooms.get(kind)) for tray in part.trays}
        self._keep(key, now)
        return {name: room for name, (_, room) in now.items() if room is not None}

    def _keep(self, key: bytes, now: dict[str, tuple[Told, Room | None]]) -> None:
        self._kinds.pop(key, None)
        self._kinds[key] = now
        if len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
