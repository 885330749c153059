"""The readings of the last day, so that the map can be shown as it was.

`SiteHistory` keeps whole site maps. Racks that did not change are the same objects in neighbouring maps
(`model`), so a kept map costs little more than what changed in it. Everything that draws the present
draws the past as well: a kept map is passed to it in place of the newest.

Which maps are kept depends on their age: two neighbours are at least a sixtieth of their age apart, and
never closer than ten seconds. An hour ago is shown to the minute and yesterday to within 24 minutes, with
about 360 maps in all. On a site of more than 250 racks the distances grow with the number of racks. If
racks change so often that the limit on different racks is reached, the oldest maps are dropped. The
history then reaches back only to `oldest`.

The history is in memory. `history_keeper` keeps it in a file too, and `restore` puts the maps of an earlier
process before those of this one. It has gaps for times when the site could not be read or no process ran.
`gap_after` distinguishes a gap from the usual distance.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import msgspec

from rackloom.web.model import MapRack, SiteMap

REACH_SECONDS = 24 * 3600.0
RECORD_SECONDS = 30.0
"""The longest time between two readings, even if no viewer looks."""
CLOSEST_SECONDS = 10.0
FRACTION_OF_AGE = 60.0
"""Neighbours are at least this fraction of their age apart."""
FINE_RACKS = 250
"""Sites of more racks are kept at larger distances: each map refers to all racks."""
RACKS_KEPT = 2000
"""Different racks in all maps together: about 40 KiB for each one in which all GPUs changed."""

T = TypeVar("T")
Gap = tuple[float, float]
"""The times of the last reading before a gap and of the first one after it."""


class PastTime(msgspec.Struct, frozen=True):
    """A time of the history that is shown."""

    asked: float
    """The requested time, in seconds since the epoch."""
    whole: SiteMap
    """The newest map that was read by then."""
    gap: "Gap | None" = None
    """The gap in the history that contains the requested time, if there is one."""


class SiteHistory:
    """Site maps of the last day, the oldest first. `racks_kept` limits the different racks in them."""

    def __init__(self, racks_kept: int = RACKS_KEPT) -> None:
        self._maps: list[SiteMap] = []
        self._racks: Counter[int] = Counter()
        """The number of maps with each rack, by its identity: the maps keep the racks alive."""
        self._racks_kept = racks_kept

    @property
    def maps(self) -> Sequence[SiteMap]:
        """All that are kept, the oldest first."""
        return tuple(self._maps)

    @property
    def oldest(self) -> float | None:
        """The time of the oldest map, in seconds since the epoch, or None if nothing was read yet."""
        return self._maps[0].at if self._maps else None

    def find(self, at: float) -> SiteMap | None:
        """The newest map that was read at this time or before, or None if the history begins later."""
        after = bisect_right(self._maps, at, key=lambda whole: whole.at)
        return self._maps[after - 1] if after else None

    @property
    def gaps(self) -> list[Gap]:
        """The times in which nothing was recorded."""
        now = self._maps[-1].at if self._maps else 0.0
        return [(a.at, b.at) for a, b in pairwise(self._maps) if gap_after(a, b, now)]

    def restore(self, maps: Sequence[SiteMap]) -> None:
        """Put the maps of an earlier process, the oldest first, before those that are kept.

        Maps that are not older than these are left out, such as maps of a clock that was ahead.
        """
        older = [whole for whole in maps if not self._maps or whole.at < self._maps[0].at]
        self._maps[:0] = older
        self._racks.update(id(rack) for whole in older for rack in whole.racks)
        if self._maps:
            self._limit()

    def add(self, whole: SiteMap) -> None:
        """Keep the newest map. One that is not newer than the last is left out."""
        last = self._maps[-1] if self._maps else None
        if last is not None:
            if whole.at <= last.at:
                return
            whole = _sharing_equal_parts(whole, last)
        self._maps.append(whole)
        self._racks.update(id(rack) for rack in whole.racks)
        self._limit()

    def _limit(self) -> None:
        """Drop maps that are too old or too close to their neighbours, then the oldest above the limit."""
        # A map may go if its neighbours are close enough to each other without it.
        now = self._maps[-1].at
        while now - self._maps[0].at > REACH_SECONDS:
            self._drop(0)
        place = 1
        while place < len(self._maps) - 1:
            between = self._maps[place + 1].at - self._maps[place - 1].at
            if between <= _distance(now - self._maps[place].at, len(self._maps[place].racks)):
                self._drop(place)
            else:
                place += 1
        while len(self._racks) > self._racks_kept and len(self._maps) > 1:
            self._drop(0)

    def _drop(self, place: int) -> None:
        self._racks.subtract(id(rack) for rack in self._maps.pop(place).racks)
        self._racks += Counter()


def _distance(age: float, racks: int) -> float:
    """Seconds between the neighbours of a map of this age that make it superfluous."""
    return max(CLOSEST_SECONDS, age / FRACTION_OF_AGE) * max(1.0, racks / FINE_RACKS)


def gap_after(earlier: SiteMap, later: SiteMap, now: float) -> bool:
    """Whether the site was not read between two kept neighbours, for longer than thinning explains."""
    usual = _distance(now - earlier.at, len(earlier.racks)) + 2 * RECORD_SECONDS
    return later.at - earlier.at > 2 * usual


def sharing_racks(maps: Sequence[SiteMap], present: SiteMap) -> tuple[SiteMap, ...]:
    """The maps of an earlier process, with the objects of `present` for racks that did not change."""
    current = {rack.name: rack for rack in present.racks}
    known: dict[int, MapRack] = {}

    def shared(rack: MapRack) -> MapRack:
        if id(rack) not in known:
            now = current.get(rack.name)
            known[id(rack)] = now if now is not None and now == rack else rack
        return known[id(rack)]

    found: list[SiteMap] = []
    for whole in maps:
        same = msgspec.structs.replace(whole, racks=tuple(map(shared, whole.racks)))
        found.append(_sharing_equal_parts(same, found[-1]) if found else same)
    return tuple(found)


def _sharing_equal_parts(whole: SiteMap, last: SiteMap) -> SiteMap:
    """The map with the objects of the last one for equal parts, because each reading makes new objects."""
    same = last.compute_domains == whole.compute_domains
    return msgspec.structs.replace(
        whole,
        compute_domains=last.compute_domains if same else whole.compute_domains,
        findings=None if whole.findings is None else _shared(whole.findings, last.findings or ()),
        happenings=_shared(whole.happenings, last.happenings),
    )


def _shared(parts: tuple[T, ...], before: tuple[T, ...]) -> tuple[T, ...]:
    known = {part: part for part in before}
    return tuple(known.get(part, part) for part in parts)
