"""Which trays carry new instances: near the tenant's other members first, then where the fit is tightest.

Only GPUs of one NVLink domain share memory, so a domain that already holds members of the same logical
partition is worth more than any other; among equals, the fullest domain that still fits keeps the large
holes whole for the next tenant.
"""

from collections.abc import Sequence

import msgspec

from rackloom.errors import Refused


class TrayRoom(msgspec.Struct, frozen=True):
    """A free tray."""

    tray: str
    healthy: bool


class DomainRoom(msgspec.Struct, frozen=True):
    """The free trays of one domain, in the order in which they are to be filled."""

    domain: str | None
    """None: trays of which no switch controller has told the domain yet."""
    trays: tuple[TrayRoom, ...]
    members: int
    """GPUs of this domain that are already in the logical partitions of the request."""

    @property
    def free(self) -> tuple[str, ...]:
        """Trays that may be given away."""
        return tuple(room.tray for room in self.trays if room.healthy)


class TrayRequest(msgspec.Struct, frozen=True):
    """So many trays, all in one domain or not."""

    trays: int
    one_domain: bool


class Placement(msgspec.Struct, frozen=True):
    """The chosen trays, and one sentence that says why these."""

    trays: tuple[str, ...]
    reason: str


def choose_trays(request: TrayRequest, domains: Sequence[DomainRoom]) -> Placement:
    """Choose trays for `request`. Raises Refused with the shortage when they cannot be had."""
    free = sum(len(room.free) for room in domains)
    if free < request.trays:
        raise Refused(f"Insufficient machines available: requested {request.trays}, available {free}")
    ordered = sorted(domains, key=lambda room: _preference(room, request.trays))
    if request.one_domain and request.trays > 1:
        return _in_one(request.trays, ordered)
    return _in_any(request.trays, ordered)


def _preference(room: DomainRoom, trays: int) -> tuple[bool, int, bool, int, str]:
    """Sorts the best domain first: known, most members, room for all, fewest trays left (or most taken)."""
    left = len(room.free) - trays
    return (room.domain is None, -room.members, left < 0, abs(left), room.domain or "")


def _in_one(trays: int, ordered: Sequence[DomainRoom]) -> Placement:
    known = [room for room in ordered if room.domain is not None]
    for room in known:
        if len(room.free) >= trays:
            return Placement(room.free[:trays], _why(room, trays))
    best = max((len(room.free) for room in known), default=0)
    raise Refused(
        f"Topology optimization requires all {trays} machines on same NVLink domain,"
        f" but best domain only has {best} available",
        nearest_fix="set topologyOptimized to false: instances in different domains share no GPU memory",
    )


def _in_any(trays: int, ordered: Sequence[DomainRoom]) -> Placement:
    chosen: list[str] = []
    used: list[DomainRoom] = []
    for room in ordered:
        taken = room.free[: trays - len(chosen)]
        chosen += taken
        used += [room] if taken else []
    if len(used) == 1:
        return Placement(tuple(chosen), _why(used[0], trays))
    names = ", ".join(room.domain or "not yet observed" for room in used)
    return Placement(
        tuple(chosen), f"spread over {len(used)} NVLink domains ({names}): no memory shared between"
    )


def _why(room: DomainRoom, trays: int) -> str:
    if room.domain is None:
        return "on machines whose NVLink domain is not yet observed: no machine of a known domain is free"
    left = len(room.free) - trays
    if room.members:
        return (
            f"in NVLink domain {room.domain}: it already holds {room.members} GPUs of the logical partition"
            f" ({left} free machines left)"
        )
    return f"in NVLink domain {room.domain}: the tightest fit ({left} free machines left)"
