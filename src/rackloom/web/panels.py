"""Free capacity, counted in whole free trays.

A tray with an unknown state counts as not free, and so does an empty tray with GPUs in a partition that
the site did not make: the finding about that partition names it. The largest gang that fits is the most free
trays of one NVLink domain, because GPUs of two domains share no memory. Free GPUs in partly used trays are
stranded.
"""

from collections.abc import Collection, Mapping

import msgspec

from rackloom.core.diagnosis.snapshot import grouped
from rackloom.web.model import MapRack, tray_free, tray_partly_taken

# Free capacity.


class FreeCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Free trays, over the site and in its roomiest domain."""

    free_trays: int
    unknown_trays: int
    """Trays that may or may not be free."""
    gang_trays: int
    """Trays of the largest gang that fits: GPUs of two domains share no memory."""
    gang_gpus: int
    stranded_gpus: int
    """Free GPUs in trays that are partly taken, and so part of no free tray."""


class RackCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """The free capacity of one rack."""

    free_trays: int
    unknown_trays: int
    stranded_gpus: int
    gangs: Mapping[str, tuple[int, int]]
    """Free trays, and the GPUs in them, of each domain."""


def rack_capacity(rack: MapRack) -> RackCapacity:
    """Count the free capacity of one rack. A tray with an unknown state counts as not free."""
    frees = [tray_free(tray) for tray in rack.trays]
    free = [tray for tray, is_free in zip(rack.trays, frees, strict=True) if is_free]
    partly = [tray for tray in rack.trays if tray_partly_taken(tray)]
    gangs: dict[str, tuple[int, int]] = {}
    for tray in free:
        if domain := tray[0].domain:
            trays, gpus = gangs.get(domain, (0, 0))
            gangs[domain] = trays + 1, gpus + len(tray)
    return RackCapacity(
        free_trays=len(free),
        unknown_trays=frees.count(None),
        stranded_gpus=sum(gpu.taken is False for tray in partly for gpu in tray),
        gangs=gangs,
    )


def site_capacity(rooms: Collection[RackCapacity]) -> FreeCapacity:
    """The free capacity of all racks. A domain may lie in several."""
    gangs = grouped(pair for room in rooms for pair in room.gangs.items())
    sums = (tuple(map(sum, zip(*gangs[domain], strict=True))) for domain in sorted(gangs))
    trays, gpus = max(sums, key=lambda gang: gang[1], default=(0, 0))
    return FreeCapacity(
        free_trays=sum(room.free_trays for room in rooms),
        unknown_trays=sum(room.unknown_trays for room in rooms),
        gang_trays=trays,
        gang_gpus=gpus,
        stranded_gpus=sum(room.stranded_gpus for room in rooms),
    )
