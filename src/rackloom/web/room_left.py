"""What is left of the site: whole free trays, and the largest gang that still fits into one NVLink domain."""

from collections.abc import Sequence
from itertools import groupby

import msgspec

from rackloom.web.racks import by_rack, tray_free
from rackloom.web.scene import Scene, Seat


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


def room_left(whole: Scene) -> RoomLeft:
    """Count what is free. A tray that nobody can vouch for counts as not free."""
    trays = [tray for rack in by_rack(whole).values() for tray in rack]
    free = [tray for tray in trays if tray_free(tray)]
    gang = max(_by_domain(free), key=_gpus, default=[])
    partly = [tray for tray in trays if tray_free(tray) is False and any(seat.taken for seat in tray)]
    return RoomLeft(
        free_trays=len(free),
        unknown_trays=sum(tray_free(tray) is None for tray in trays),
        gang_trays=len(gang),
        gang_gpus=_gpus(gang),
        stranded_gpus=sum(seat.taken is False for tray in partly for seat in tray),
    )


def _by_domain(trays: Sequence[tuple[Seat, ...]]) -> list[list[tuple[Seat, ...]]]:
    known = sorted((tray for tray in trays if tray[0].domain), key=_domain)
    return [list(group) for _, group in groupby(known, key=_domain)]


def _domain(tray: tuple[Seat, ...]) -> str:
    return tray[0].domain


def _gpus(trays: Sequence[tuple[Seat, ...]]) -> int:
    return sum(len(tray) for tray in trays)
