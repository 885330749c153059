"""What is left of the site: whole free trays, and the largest gang that still fits into one NVLink domain."""

from collections import defaultdict
from collections.abc import Collection, Mapping

import msgspec

from rackloom.web.racks import tray_free
from rackloom.web.scene import RackSeats


class RoomLeft(msgspec.Struct, frozen=True, kw_only=True):
    """Free trays, over the site and in its roomiest domain."""

    free_trays: int
    unknown_trays: int
    """Trays of which nobody can say whether they are free."""
    gang_trays: int
    """Trays of the largest gang that fits: GPUs of two domains share no memory."""
    gang_gpus: int
    stranded_gpus: int
    """Free GPUs in trays that are partly taken: no whole tray can be had of them."""


class RackRoom(msgspec.Struct, frozen=True, kw_only=True):
    """What is free in one rack."""

    free_trays: int
    unknown_trays: int
    stranded_gpus: int
    gangs: Mapping[str, tuple[int, int]]
    """Free trays, and the GPUs in them, of each domain."""


def rack_room(rack: RackSeats) -> RackRoom:
    """Count what is free in one rack. A tray that nobody can vouch for counts as not free."""
    free = [tray for tray in rack.trays if tray_free(tray)]
    partly = [tray for tray in rack.trays if tray_free(tray) is False and any(seat.taken for seat in tray)]
    gangs: dict[str, tuple[int, int]] = {}
    for tray in free:
        if domain := tray[0].domain:
            trays, gpus = gangs.get(domain, (0, 0))
            gangs[domain] = trays + 1, gpus + len(tray)
    return RackRoom(
        free_trays=len(free),
        unknown_trays=sum(tray_free(tray) is None for tray in rack.trays),
        stranded_gpus=sum(seat.taken is False for tray in partly for seat in tray),
        gangs=gangs,
    )


def room_left(rooms: Collection[RackRoom]) -> RoomLeft:
    """What is free in all racks; a domain may lie in several."""
    gangs: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for room in rooms:
        for domain, gang in room.gangs.items():
            gangs[domain].append(gang)
    sums = (tuple(map(sum, zip(*gangs[domain], strict=True))) for domain in sorted(gangs))
    trays, gpus = max(sums, key=lambda gang: gang[1], default=(0, 0))
    return RoomLeft(
        free_trays=sum(room.free_trays for room in rooms),
        unknown_trays=sum(room.unknown_trays for room in rooms),
        gang_trays=trays,
        gang_gpus=gpus,
        stranded_gpus=sum(room.stranded_gpus for room in rooms),
    )
