"""Choose trays for new instances: a tenant's request as the search takes it.

Only GPUs of one NVLink domain share memory. `choose_trays` makes each domain a clique of whole trays, and
the search (`choose_cliques`) orders them: known before not yet observed, then most GPUs of the same logical
partitions, then those with room for all, then most trays that are reserved for the tenant, then the
tightest fit, which keeps the large free regions whole for the next tenant. Within a domain the tenant's
reserved trays come first. A request may be for one domain, or for the domain of the existing members.
Otherwise it is cut into parts as large as the domains take, the nearest domains first. A request may limit
how many trays are not reserved for its tenant, if a quota allows no more. Each part then needs some
reserved trays, and if any choice keeps to that limit, one is found.

Trays with unhealthy GPUs are skipped unless the request allows them, and trays that are shut are always
skipped. The reason names both. Trays that are reserved for others are skipped too. A refusal only counts
those that are not shut, because a tenant does not learn of other tenants.

A refusal names the shortage, the trays that are shut, and the nearest fix. Fixes are tried before they
are named: first every combination of relaxed options, smallest first, then fewer trays. They use the
option names of the REST API.

Promises to tenants are machines by allocations, and trays by reservations. An allocation sets how many
machines of an instance type an organisation may use. Trays that are reserved for it and idle will be used, so
they count as well: machines in use and idle reserved ones together may not exceed the number in its
allocations. A new instance on a tray reserved for its organisation does not change that sum, and is possible
if the machines in use alone do not exceed the number. The promise to all tenants is the sum of the machines
that each may still use. A tenant that uses more than it was allocated takes nothing from the promise to
another.

A reservation keeps certain trays for one organisation until a time. `in_force` is the one rule of time: a
reservation counts before its time and not from then on. Every reader of the records applies it, with the time
of that moment, so that a reservation ends without a write, also while no process of the site runs. The owner
gets its own reserved trays before others: otherwise it would use up trays that are open to all while its own
stay idle. GPU memory comes first, however. A reserved tray in another domain is no reason to leave the domain
of the logical partition, or to spread a request that fits into one domain. A reservation that shrinks first
gives up trays without an instance of its owner, the last ones in order.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Generic, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from rackloom.core.place.search.clique_search import CliqueRequest, choose_cliques
from rackloom.core.place.search.gang_needs import ColocationGroup, tray_group
from rackloom.core.place.search.site_view import CliquePreference, SiteCapacity, SiteView, whole_trays
from rackloom.core.place.search.tray_assignment import SearchBudget, TrialPlacement
from rackloom.errors import Refused

MAX_NAMED_TRAYS = 3
"""Passed-over trays that a sentence names. It only counts the others."""
NO_SHARED_MEMORY = "instances in different domains share no GPU memory"
TrayId = TypeVar("TrayId", bound=Hashable)
"""The caller's name of a tray: a machine id, or a value that stands for one of several equal machines.
The choice compares no ids. It prints those of unhealthy trays."""


class FreeTray(msgspec.Struct, Generic[TrayId], frozen=True):
    """A tray that carries nothing, or several that are equal."""

    tray: TrayId
    sick: str | None = None
    """The fault of its GPUs. The tenant may accept it."""
    shut: str | None = None
    """Why nothing may be placed on it, even if the tenant accepts unhealthy trays."""
    owner: str | None = None
    """The only tenant that may have it now. None: any tenant."""
    count: int = 1
    """How many trays this stands for."""

    def is_open_to(self, tenant: str | None) -> bool:
        """Whether it waits for no other tenant."""
        return self.owner in (None, tenant)


class DomainFreeTrays(msgspec.Struct, Generic[TrayId], frozen=True):
    """The empty trays of one domain, in the order in which they are to be filled."""

    domain: str | None
    """None if no switch controller has reported the domain of these trays yet."""
    trays: tuple[FreeTray[TrayId], ...]
    members: int
    """GPUs of this domain that are already in the logical partitions of the request."""

    def free(self, *, tenant: str | None = None, allow_sick: bool = False) -> list[TrayId]:
        """Trays that `tenant` may get, those that are reserved for it first."""
        usable = [tray for tray in self.trays if tray.shut is None and (allow_sick or tray.sick is None)]
        owners = [None] if tenant is None else [tenant, None]
        return [
            tray.tray for owner in owners for tray in usable if tray.owner == owner for _ in range(tray.count)
        ]


class TrayRequest(msgspec.Struct, frozen=True):
    """A number of trays, and limits on their domains."""

    trays: int
    one_domain: bool
    """All in one domain."""
    beside_members: bool = False
    """All in one domain, which must be a domain of the logical partitions' members, if they have any."""
    allow_sick: bool = False
    tenant: str | None = None
    """None: a tenant without reserved trays."""
    most_unreserved: int | None = None
    """The most trays that are not reserved for the tenant. None: any number."""


class TrayChoice(msgspec.Struct, Generic[TrayId], frozen=True):
    """The chosen trays, and the reason for the choice in one sentence."""

    trays: tuple[TrayId, ...]
    reason: str


_RELAXATIONS = {
    "beside_members": (False, "requireSameDomain to false"),
    "one_domain": (False, "topologyOptimized to false"),
    "allow_sick": (True, "allowUnhealthyMachine to true"),
}
"""Requirements that a caller may give up, and the option of each in the REST API."""


class _Room(NamedTuple, Generic[TrayId]):
    """A domain, or one tray of an unknown domain, as a request meets it."""

    near: tuple[bool, int]
    """Less is better: whether its domain is unknown, then the members there."""
    domain: DomainFreeTrays[TrayId]
    kept: int
    """Trays that are reserved for the tenant."""
    free: int
    """Other trays that it may have."""
    most: int
    """The most trays that it may have here."""


def choose_trays(request: TrayRequest, domains: Sequence[DomainFreeTrays[TrayId]]) -> TrayChoice[TrayId]:
    """Choose trays for `request`. Raises Refused with the shortage, and with a fix that was tried, if any."""
    # Trays without a known domain are never promised to share memory: each counts as another domain.
    apart: list[DomainFreeTrays[TrayId]] = []
    for domain in domains:
        if domain.domain is not None:
            apart.append(domain)
            continue
        for tray in domain.trays:
            apart += [replace(domain, trays=(replace(tray, count=1),))] * tray.count
    apart.sort(key=lambda domain: domain.domain or "")
    chosen = _search(request, apart)
    trays = [tray for domain in domains for tray in domain.trays]
    own = [tray for tray in trays if tray.is_open_to(request.tenant)]
    shut = {tray.tray: tray.shut for tray in own if tray.shut is not None}
    if chosen is None:
        # A tenant does not learn of others, so trays that are kept for them are only counted.
        kept = sum(tray.count for tray in trays if tray.shut is None and not tray.is_open_to(request.tenant))
        shortage, most = _shortage(request, apart)
        reason = f"{shortage}; {kept} more machines are not available now" if kept else shortage
        raise Refused(_passing_over(shut, reason), nearest_fix=_nearest_fix(request, apart, most))
    # A refusal need not name unhealthy trays: its fix mentions the option that allows them.
    sick = {tray.tray: tray.sick for tray in own if tray.sick is not None and tray.shut is None}
    unused = shut if request.allow_sick else shut | sick
    machines = tuple([tray for _, taken in chosen for tray in taken])
    return TrayChoice(machines, _passing_over(unused, _reason(request, [room for room, _ in chosen])))


def _rooms(request: TrayRequest, domains: Iterable[DomainFreeTrays[TrayId]]) -> list[_Room[TrayId]]:
    """The rooms in which the request may be placed."""
    rooms: list[_Room[TrayId]] = []
    for domain in domains:
        kept = free = 0
        for tray in domain.trays:
            if tray.shut is None and (tray.sick is None or request.allow_sick):
                if tray.owner is None:
                    free += tray.count
                elif tray.owner == request.tenant:
                    kept += tray.count
        near = (domain.domain is None, -domain.members)
        rooms.append(_Room(near, domain, kept, free, kept + min(free, _most_unreserved(request))))
    # If a domain has members, only it is allowed: memory is shared with them only there.
    if request.beside_members:
        known = [room for room in rooms if room.domain.domain is not None]
        rooms = [room for room in known if room.domain.members] or known
    return rooms


def _search(
    request: TrayRequest, domains: Sequence[DomainFreeTrays[TrayId]]
) -> list[tuple[_Room[TrayId], list[TrayId]]] | None:
    """The trays that the search chooses, by room. None if there are too few."""
    rooms = [room for room in _rooms(request, domains) if room.most]
    if not (parts := _parts(request, rooms)):
        return None
    cliques = {
        str(at): whole_trays(free, kept, CliquePreference(near, (-min(kept, request.trays), kept + free)))
        for at, (near, _, kept, free, _) in enumerate(rooms)
    }
    trial = TrialPlacement(SiteCapacity(SiteView.counted(cliques)))
    chosen = choose_cliques(trial, CliqueRequest(parts, fewest=False), SearchBudget())
    if chosen is None:
        return None
    # The positions in the cliques become trays again.
    numbers: dict[str, list[int]] = {}
    for at in sorted([seat.at for choice in chosen for seat in choice.assignments]):
        numbers.setdefault(at.clique, []).append(at.number)
    found = []
    for clique in dict.fromkeys(choice.clique for choice in chosen):
        room = rooms[int(clique)]
        usable = room.domain.free(tenant=request.tenant, allow_sick=request.allow_sick)
        found.append((room, [usable[number] for number in numbers[clique]]))
    return found


def _parts(request: TrayRequest, rooms: Sequence[_Room[TrayId]]) -> list[ColocationGroup]:
    """The parts that share a domain: all of it, or parts as large as the domains take, the nearest first."""
    left, unreserved = request.trays, _most_unreserved(request)
    if request.one_domain or request.beside_members:
        return [tray_group(left, max(0, left - unreserved))]
    # The nearest and largest first, so that the request is cut into few parts.
    parts = []
    for room in sorted(rooms, key=lambda room: (room.near, -room.most)):
        if trays := min(left, room.kept + min(room.free, unreserved)):
            kept = 0 if request.most_unreserved is None else min(room.kept, trays)
            parts.append(tray_group(trays, kept))
            left, unreserved = left - trays, unreserved - max(0, trays - room.kept)
    return [] if left else parts


def _most_unreserved(request: TrayRequest) -> int:
    return request.trays if request.most_unreserved is None else request.most_unreserved


# In words.


def _reason(request: TrayRequest, rooms: Sequence[_Room[TrayId]]) -> str:
    names = list(dict.fromkeys(room.domain.domain or "not yet observed" for room in rooms))
    if len(names) > 1:
        return f"spread over {len(names)} NVLink domains ({', '.join(names)}): no memory shared between"
    _, domain, kept, free, _ = rooms[0]
    if domain.domain is None:
        return "on machines whose NVLink domain is not yet observed: no machine of a known domain is free"
    if domain.members:
        why = f"it already holds {domain.members} GPUs of the logical partition"
    elif kept:
        why = f"{min(kept, request.trays)} machines are reserved there for the organisation"
    else:
        why = "the tightest fit"
    return f"in NVLink domain {domain.domain}: {why} ({kept + free - request.trays} free machines left)"


def _shortage(request: TrayRequest, domains: Sequence[DomainFreeTrays[TrayId]]) -> tuple[str, int]:
    """Why the request does not fit, and the most trays that might."""
    wanted, rooms = request.trays, _rooms(request, domains)
    best = max((room.most for room in rooms if room.domain.domain is not None), default=0)
    free = sum(room.kept for room in rooms)
    free += min(sum(room.free for room in rooms), _most_unreserved(request))
    if request.beside_members:
        homes = [room.domain.domain or "" for room in rooms if room.domain.members]
        where = f"NVLink domain {' or '.join(homes)}, where the logical partition lives,"
        if homes:
            return f"requireSameDomain: {where} has {best} free machines of {wanted}", best
        return f"requireSameDomain: no NVLink domain has {wanted} free machines, the best has {best}", best
    if free < wanted:
        return f"Insufficient machines available: requested {wanted}, available {free}", free
    return (
        f"Topology optimization requires all {wanted} machines on same NVLink domain,"
        f" but best domain only has {best} available"
    ), best


def _nearest_fix(request: TrayRequest, domains: Sequence[DomainFreeTrays[TrayId]], most: int) -> str | None:
    """The smallest change of the request that is accepted."""
    for size in range(1, len(_RELAXATIONS) + 1):
        for fields in combinations(_RELAXATIONS, size):
            relaxed = replace(request, **{field: _RELAXATIONS[field][0] for field in fields})
            if _search(relaxed, domains):
                apart = "" if fields == ("allow_sick",) else f": {NO_SHARED_MEMORY}"
                return f"set {' and '.join(_RELAXATIONS[field][1] for field in fields)}{apart}"
    for trays in range(min(request.trays - 1, most), 1, -1):
        if _search(replace(request, trays=trays), domains):
            return f"ask for at most {trays}"
    return None


def _passing_over(unused: Mapping[TrayId, str], reason: str) -> str:
    """`reason`, with the empty trays that are not used and why. Only the first few are named."""
    named = sorted(f"{tray} ({why})" for tray, why in unused.items())
    more = [f"{len(named) - MAX_NAMED_TRAYS} more"] if len(named) > MAX_NAMED_TRAYS else []
    return f"{reason}; passed over {', '.join(named[:MAX_NAMED_TRAYS] + more)}" if named else reason


# Promises.


Holder = TypeVar("Holder", bound=Hashable)
"""The holder of an allocation: a tenant, or a tenant and an instance type."""


class AllocationUse(msgspec.Struct, frozen=True):
    """The machines of an instance type that an organisation may use, and those that it uses."""

    allocated: int | None
    """None: it has no allocation of the type."""
    used: int
    """Machines that carry its instances."""
    idle: int
    """Machines that are reserved for it and carry none of its instances."""

    @property
    def unused(self) -> int:
        """How many more machines it may use, including those that are reserved for it. Negative: too many."""
        return (self.allocated or 0) - self.used

    @property
    def unreserved(self) -> int:
        """How many more it may use or reserve besides those that are reserved. Negative: too many."""
        return self.unused - self.idle

    def lacking(self, machines: int, reserved: int) -> int:
        """How many more must be allocated for new instances on `machines`, of which `reserved` are its own.

        `reserved` are trays that wait for this organisation and carry none of its instances yet.
        """
        beside = machines - reserved
        return max(0, beside - self.unreserved if beside else machines - self.unused)

    def largest_request(self, free: int, reserved: int) -> int:
        """The most of `free` machines, of which `reserved` are its own, for which nothing is lacking."""
        return max(0, min(free, self.unused, reserved + max(0, self.unreserved)))


def still_promised(allocated: Mapping[Holder, int], used: Mapping[Holder, int]) -> int:
    """How many machines are promised and not in use."""
    return sum(max(0, machines - used.get(holder, 0)) for holder, machines in allocated.items())


# Reserved trays.


class Reservation(msgspec.Struct, frozen=True):
    """Trays that are kept for an organisation."""

    id: str
    owner: str
    """The tenant."""
    until: float
    """Seconds since the epoch. From then on the trays are free."""


def in_force(reservations: Iterable[Reservation], now: float) -> dict[str, Reservation]:
    """The reservations that count now, by id."""
    return {reservation.id: reservation for reservation in reservations if now < reservation.until}


def owners_of_trays(
    counting: Mapping[str, Reservation], reservation_of_tray: Mapping[str, str]
) -> dict[str, str]:
    """Tray -> the organisation that it is kept for, if its reservation counts."""
    return {tray: counting[of].owner for tray, of in reservation_of_tray.items() if of in counting}


def given_up(trays: Sequence[str], in_use: Collection[str], keep: int) -> list[str]:
    """The trays that a reservation of `trays` gives up to keep `keep`: unused ones first, the last first."""
    last_first = trays[::-1]
    unused = [tray for tray in last_first if tray not in in_use]
    used = [tray for tray in last_first if tray in in_use]
    return (unused + used)[: max(0, len(trays) - keep)]
