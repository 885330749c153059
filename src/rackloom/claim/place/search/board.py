"""The trays of a site as bits, while one gang is being placed.

A set of trays is a Python int: how many members a clique can serve is a few ANDs and bit counts, so that
5,000 nodes are looked through in milliseconds.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

from rackloom.claim.place.search.loads import Need, Vacancy
from rackloom.claim.place.search.outlook import Outlook
from rackloom.claim.place.values import Site

_FULL = 1 << 20
"""More GPUs than a tray has."""


class Use(NamedTuple):
    """What is left of a tray, and what this gang put there."""

    free: int
    devices: str | None = None
    members: int = 0


class Board:
    """Free GPUs by tray; members are put on it and taken off again."""

    def __init__(self, site: Site, *, owner: str = "", exclusive: bool = False) -> None:
        """Holds of `owner` do not count. `exclusive`: trays that somebody else has a part of are full."""
        self.trays = site.trays
        self._exclusive = exclusive
        free = {tray.name: tray.gpus for tray in site.trays}
        for hold in site.holds:
            if hold.owner != owner and hold.tray in free:
                # Less than none left shuts the tray to members without GPUs too.
                free[hold.tray] -= _FULL if hold.is_whole else hold.gpus
        self._free = [free[tray.name] for tray in site.trays]
        self._use = [Use(gpus) for gpus in self._free]
        self._untouched = [gpus == tray.gpus for gpus, tray in zip(self._free, site.trays, strict=True)]
        # GPUs of a node without a clique share memory with no other node: it is one by itself.
        self._clique = [tray.clique or tray.name for tray in site.trays]
        positions: dict[str, list[int]] = {}
        for at, name in enumerate(self._clique):
            positions.setdefault(name, []).append(at)
        self._positions = positions
        self._cliques = {name: mask_of(found) for name, found in positions.items()}
        self._capacity: dict[tuple[str, Need], int] = {}
        self._ladders: dict[Need, list[int]] = {}

    @property
    def cliques(self) -> Iterable[str]:
        """In the order of their first trays."""
        return self._cliques

    def positions(self, clique: str) -> list[int]:
        """The trays of a clique."""
        return self._positions[clique]

    def capacity(self, clique: str, need: Need) -> int:
        """Members that the clique can serve."""
        key = (clique, need)
        if key not in self._capacity:
            mask = self._cliques[clique]
            self._capacity[key] = sum((rung & mask).bit_count() for rung in self._ladder(need))
        return self._capacity[key]

    def clique(self, at: int) -> str:
        """That of a tray."""
        return self._clique[at]

    def outlook(self, clique: str, need: Need) -> Outlook:
        """How the clique stands to members of one need."""
        mask, empty = self._cliques[clique], self._empty & self._cliques[clique]
        rungs = [here for rung in self._ladder(need) if (here := rung & mask)]
        return Outlook(
            capacity=sum(rung.bit_count() for rung in rungs),
            in_part=sum((rung & ~empty).bit_count() for rung in rungs),
            on_empty=sum(bool(rung & empty) for rung in rungs),
            is_level=not any(empty & ~rung for rung in rungs),
        )

    def empty(self, clique: str) -> int:
        """Open trays of the clique on which nothing is in use."""
        return (self._empty & self._cliques[clique]).bit_count()

    def is_empty(self, at: int) -> bool:
        """Whether nothing is in use on the tray, and it is open."""
        return bool(self._empty >> at & 1)

    def slots(self, at: int, need: Need) -> int:
        """Members that the tray can serve."""
        tray, use = self.trays[at], self._use[at]
        if tray.shut is not None or use.free < need.gpus:
            return 0
        if self._exclusive and not self._untouched[at]:
            return 0
        if use.members and use.devices != need.devices:
            # Claims of two kinds are not mixed on a tray: whether both fit was not asked.
            return 0
        by_gpus = use.free // need.gpus if need.gpus else None
        if need.devices is None:
            return by_gpus or 0
        by_room = self._room(at, need.devices) - use.members
        return by_room if by_gpus is None else min(by_gpus, by_room)

    def vacancy(self, at: int, needs: Iterable[Need]) -> Vacancy:
        """What a tray has left while this gang has nobody there."""
        tray, free = self.trays[at], self._free[at]
        if tray.shut is not None or free < 0 or (self._exclusive and not self._untouched[at]):
            return Vacancy(False, 0, tuple(0 for _ in needs))
        rooms = (free if need.devices is None else self._room(at, need.devices) for need in needs)
        return Vacancy(0 < tray.gpus == free, free, tuple(rooms))

    def take(self, at: int, need: Need, members: int) -> None:
        """Put members on a tray."""
        before = self._use[at]
        self._set(at, Use(before.free - members * need.gpus, need.devices, before.members + members))

    def put_back(self, at: int, need: Need, members: int) -> None:
        """Undo a `take`."""
        before = self._use[at]
        left = before.members - members
        self._set(at, Use(before.free + members * need.gpus, need.devices if left else None, left))

    def free(self, at: int) -> int:
        """GPUs of the tray that nobody has."""
        return self._use[at].free

    def members(self, at: int) -> int:
        """Members of this gang on the tray."""
        return self._use[at].members

    @cached_property
    def _empty(self) -> int:
        return mask_of(
            at
            for at, tray in enumerate(self.trays)
            if tray.shut is None and 0 < tray.gpus == self._use[at].free
        )

    def _ladder(self, need: Need) -> list[int]:
        """Set k: the trays that can serve more than k members."""
        if need not in self._ladders:
            rungs: list[list[int]] = []
            for at in range(len(self.trays)):
                for step in range(self.slots(at, need)):
                    if step == len(rungs):
                        rungs.append([])
                    rungs[step].append(at)
            self._ladders[need] = [mask_of(rung) for rung in rungs]
        return self._ladders[need]

    def _set(self, at: int, use: Use) -> None:
        self._use[at] = use
        bit = 1 << at
        if "_empty" in self.__dict__:
            is_empty = self.trays[at].shut is None and 0 < self.trays[at].gpus == use.free
            self._empty = self._empty | bit if is_empty else self._empty & ~bit
        for need, ladder in self._ladders.items():
            slots = self.slots(at, need)
            ladder += [0] * (slots - len(ladder))
            for step, rung in enumerate(ladder):
                ladder[step] = rung | bit if step < slots else rung & ~bit
            self._capacity.pop((self._clique[at], need), None)

    def _room(self, at: int, devices: str) -> int:
        room = self.trays[at].rooms.get(devices)
        if room is None:
            return 0
        return room.empty if self._untouched[at] else room.now


def mask_of(positions: Iterable[int]) -> int:
    """The set of the positions. Built from bytes: setting bits one by one copies the int each time."""
    marked = sorted(positions)
    if not marked:
        return 0
    field = bytearray(marked[-1] // 8 + 1)
    for at in marked:
        field[at // 8] |= 1 << at % 8
    return int.from_bytes(field, "little")
