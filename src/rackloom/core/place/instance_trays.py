"""Choose trays for new instances: near the tenant's other members, then where the fit is tightest.

Only GPUs of one NVLink domain share memory. `choose_trays` therefore orders the domains: known before not
yet observed, then most GPUs of the same logical partitions, then those with room for all, then the fewest
trays left over (best fit), which keeps the large free regions whole for the next tenant. A request may
ask for one domain, or for the domain of the existing members; otherwise the instances spread over the
domains in this order. Trays with unhealthy GPUs are skipped unless the request allows them; the reason
names them.

A refusal names the shortage and the nearest fix. Fixes are tried before they are named: first every
combination of relaxed options, smallest first, then fewer trays. They use the option names of the REST
API.
"""

from collections.abc import Sequence
from itertools import combinations

import msgspec

from rackloom.errors import Refused

MAX_NAMED_TRAYS = 3
"""Passed-over trays that a sentence names; it counts the others."""
NO_SHARED_MEMORY = "instances in different domains share no GPU memory"


class FreeTray(msgspec.Struct, frozen=True):
    """A tray that carries nothing."""

    tray: str
    sick: str | None = None
    """What is wrong with its GPUs; the tenant may accept it."""
    shut: str | None = None
    """Why nothing may be placed on it, whatever the tenant accepts."""


class DomainFreeTrays(msgspec.Struct, frozen=True):
    """The empty trays of one domain, in the order in which they are to be filled."""

    domain: str | None
    """None: trays of which no switch controller has told the domain yet."""
    trays: tuple[FreeTray, ...]
    members: int
    """GPUs of this domain that are already in the logical partitions of the request."""

    def free(self, *, allow_sick: bool = False) -> tuple[str, ...]:
        """Trays that may be given away."""
        return tuple(
            room.tray for room in self.trays if room.shut is None and (allow_sick or room.sick is None)
        )


class TrayRequest(msgspec.Struct, frozen=True):
    """So many trays."""

    trays: int
    one_domain: bool
    """All in one domain."""
    beside_members: bool = False
    """All in one domain, which is one where the logical partitions already have members, if they have any."""
    allow_sick: bool = False


class TrayChoice(msgspec.Struct, frozen=True):
    """The chosen trays, and one sentence that says why these."""

    trays: tuple[str, ...]
    reason: str


_RELAXATIONS = {
    "beside_members": (False, "requireSameDomain to false"),
    "one_domain": (False, "topologyOptimized to false"),
    "allow_sick": (True, "allowUnhealthyMachine to true"),
}
"""What a caller may give up, and what that is called on the wire."""


class _FreeTrays(msgspec.Struct, frozen=True):
    domain: str | None
    free: tuple[str, ...]
    members: int


def choose_trays(request: TrayRequest, domains: Sequence[DomainFreeTrays]) -> TrayChoice:
    """Choose trays for `request`. Raises Refused with the shortage, and with a fix that was tried, if any."""
    chosen = _choose(request, domains)
    if isinstance(chosen, str):
        raise Refused(chosen, nearest_fix=_nearest_fix(request, domains))
    passed = _unhealthy_passed_over(request, domains)
    return TrayChoice(chosen.trays, f"{chosen.reason}; passed over {passed}" if passed else chosen.reason)


def _choose(request: TrayRequest, domains: Sequence[DomainFreeTrays]) -> TrayChoice | str:
    """A placement, or why there is none."""
    rooms = [
        _FreeTrays(domain.domain, domain.free(allow_sick=request.allow_sick), domain.members)
        for domain in domains
    ]
    ordered = sorted(rooms, key=lambda room: _preference(room, request.trays))
    if request.beside_members:
        return _beside_members(request.trays, ordered)
    free = sum(len(room.free) for room in rooms)
    if free < request.trays:
        return f"Insufficient machines available: requested {request.trays}, available {free}"
    if request.one_domain and request.trays > 1:
        return _in_one(request.trays, ordered)
    return _in_any(request.trays, ordered)


def _nearest_fix(request: TrayRequest, domains: Sequence[DomainFreeTrays]) -> str | None:
    """The smallest change of the request that is accepted."""
    for size in range(1, len(_RELAXATIONS) + 1):
        for fields in combinations(_RELAXATIONS, size):
            eased = msgspec.structs.replace(request, **{field: _RELAXATIONS[field][0] for field in fields})
            if isinstance(_choose(eased, domains), TrayChoice):
                apart = "" if fields == ("allow_sick",) else f": {NO_SHARED_MEMORY}"
                return f"set {' and '.join(_RELAXATIONS[field][1] for field in fields)}{apart}"
    for trays in range(request.trays - 1, 1, -1):
        if isinstance(_choose(msgspec.structs.replace(request, trays=trays), domains), TrayChoice):
            return f"ask for at most {trays}"
    return None


def _preference(room: _FreeTrays, trays: int) -> tuple[bool, int, bool, int, str]:
    """Sorts the best domain first: known, most members, room for all, fewest trays left (or most taken)."""
    left = len(room.free) - trays
    return (room.domain is None, -room.members, left < 0, abs(left), room.domain or "")


def _in_one(trays: int, ordered: Sequence[_FreeTrays]) -> TrayChoice | str:
    known = [room for room in ordered if room.domain is not None]
    best = max((len(room.free) for room in known), default=0)
    return _first_that_holds(trays, known) or (
        f"Topology optimization requires all {trays} machines on same NVLink domain,"
        f" but best domain only has {best} available"
    )


def _beside_members(trays: int, ordered: Sequence[_FreeTrays]) -> TrayChoice | str:
    known = [room for room in ordered if room.domain is not None]
    homes = [room for room in known if room.members]
    names = " or ".join(sorted(room.domain or "" for room in homes))
    where = f"NVLink domain {names}, where the logical partition lives," if homes else "no NVLink domain"
    best = max((len(room.free) for room in homes or known), default=0)
    has = (
        f"has {best} free machines of {trays}" if homes else f"has {trays} free machines, the best has {best}"
    )
    return _first_that_holds(trays, homes or known) or f"requireSameDomain: {where} {has}"


def _first_that_holds(trays: int, rooms: Sequence[_FreeTrays]) -> TrayChoice | None:
    fitting = (room for room in rooms if len(room.free) >= trays)
    room = next(fitting, None)
    return None if room is None else TrayChoice(room.free[:trays], _reason(room, trays))


def _in_any(trays: int, ordered: Sequence[_FreeTrays]) -> TrayChoice:
    chosen: list[str] = []
    used: list[_FreeTrays] = []
    for room in ordered:
        taken = room.free[: trays - len(chosen)]
        chosen += taken
        used += [room] if taken else []
    if len(used) == 1:
        return TrayChoice(tuple(chosen), _reason(used[0], trays))
    names = ", ".join(room.domain or "not yet observed" for room in used)
    return TrayChoice(
        tuple(chosen), f"spread over {len(used)} NVLink domains ({names}): no memory shared between"
    )


def _reason(room: _FreeTrays, trays: int) -> str:
    if room.domain is None:
        return "on machines whose NVLink domain is not yet observed: no machine of a known domain is free"
    left = len(room.free) - trays
    if room.members:
        return (
            f"in NVLink domain {room.domain}: it already holds {room.members} GPUs of the logical partition"
            f" ({left} free machines left)"
        )
    return f"in NVLink domain {room.domain}: the tightest fit ({left} free machines left)"


def _unhealthy_passed_over(request: TrayRequest, domains: Sequence[DomainFreeTrays]) -> str:
    """The empty trays that are not used for what is wrong with their GPUs, in words; empty when none is."""
    if request.allow_sick:
        return ""
    sick = sorted(
        f"{tray.tray} ({tray.sick})"
        for domain in domains
        for tray in domain.trays
        if tray.sick is not None and tray.shut is None
    )
    more = [f"{len(sick) - MAX_NAMED_TRAYS} more"] if len(sick) > MAX_NAMED_TRAYS else []
    return ", ".join(sick[:MAX_NAMED_TRAYS] + more)
