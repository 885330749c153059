"""Choose trays for new instances: near the tenant's other members, then where the fit is tightest.

Only GPUs of one NVLink domain share memory. `choose_trays` therefore orders the domains: known before not
yet observed, then most GPUs of the same logical partitions, then those with room for all, then most trays
that are reserved for the tenant, then the fewest trays left over (best fit), which keeps the large free
regions whole for the next tenant. Within a domain the tenant's reserved trays come first. A request may ask
for one domain, or for the domain of the existing members; otherwise the instances spread over the domains
in this order. A request may limit how many trays are not reserved for its tenant, where a quota allows no
more: if any choice keeps to that limit, one is found.

Trays with unhealthy GPUs are skipped unless the request allows them, and trays that are shut are always
skipped; the reason names both. Trays that are reserved for somebody else are skipped too; a refusal only
counts those that are not shut, because a tenant does not learn of other tenants.

A refusal names the shortage, the trays that are shut, and the nearest fix. Fixes are tried before they
are named: first every combination of relaxed options, smallest first, then fewer trays. They use the
option names of the REST API.
"""

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import Generic, TypeVar

import msgspec

from rackloom.errors import Refused

MAX_NAMED_TRAYS = 3
"""Passed-over trays that a sentence names; it counts the others."""
NO_SHARED_MEMORY = "instances in different domains share no GPU memory"
TrayId = TypeVar("TrayId", bound=Hashable)
"""What the caller names a tray by: a machine id, or a value that stands for one of several equal machines.
The choice compares no ids; it prints those of unhealthy trays."""


class FreeTray(msgspec.Struct, Generic[TrayId], frozen=True):
    """A tray that carries nothing."""

    tray: TrayId
    sick: str | None = None
    """What is wrong with its GPUs; the tenant may accept it."""
    shut: str | None = None
    """Why nothing may be placed on it, whatever the tenant accepts."""
    owner: str | None = None
    """The only tenant that may have it now; None: any."""

    def is_open_to(self, tenant: str | None) -> bool:
        """Whether it waits for nobody else than `tenant`."""
        return self.owner in (None, tenant)


class DomainFreeTrays(msgspec.Struct, Generic[TrayId], frozen=True):
    """The empty trays of one domain, in the order in which they are to be filled."""

    domain: str | None
    """None: trays whose domain no switch controller has reported yet."""
    trays: tuple[FreeTray[TrayId], ...]
    members: int
    """GPUs of this domain that are already in the logical partitions of the request."""

    def free(self, *, tenant: str | None = None, allow_sick: bool = False) -> tuple[TrayId, ...]:
        """Trays that `tenant` may get, those that are reserved for it first."""
        reserved = self._usable(tenant, allow_sick) if tenant is not None else []
        return (*reserved, *self._usable(None, allow_sick))

    def reserved(self, tenant: str | None, *, allow_sick: bool = False) -> int:
        """How many of the trays that `tenant` may get are reserved for it."""
        return len(self._usable(tenant, allow_sick)) if tenant is not None else 0

    def _usable(self, owner: str | None, allow_sick: bool) -> list[TrayId]:
        return [
            tray.tray
            for tray in self.trays
            if tray.owner == owner and tray.shut is None and (allow_sick or tray.sick is None)
        ]


class TrayRequest(msgspec.Struct, frozen=True):
    """A number of trays, and where they have to be."""

    trays: int
    one_domain: bool
    """All in one domain."""
    beside_members: bool = False
    """All in one domain, which is one where the logical partitions already have members, if they have any."""
    allow_sick: bool = False
    tenant: str | None = None
    """For whom; None: for a tenant without reserved trays."""
    most_unreserved: int | None = None
    """At most so many trays that are not reserved for the tenant; None: any number."""


class TrayChoice(msgspec.Struct, Generic[TrayId], frozen=True):
    """The chosen trays, and one sentence that says why these."""

    trays: tuple[TrayId, ...]
    reason: str


_RELAXATIONS = {
    "beside_members": (False, "requireSameDomain to false"),
    "one_domain": (False, "topologyOptimized to false"),
    "allow_sick": (True, "allowUnhealthyMachine to true"),
}
"""What a caller may give up, and the name of the option in the REST API."""


class _Candidate(msgspec.Struct, Generic[TrayId], frozen=True):
    """A domain with the trays that the request may have."""

    domain: str | None
    free: tuple[TrayId, ...]
    reserved: int
    """The first trays of `free` are reserved for the tenant: so many."""
    members: int
    most_unreserved: int
    """How many of the other trays the request may have."""

    @property
    def room(self) -> int:
        """The most trays that the request may have here."""
        return min(len(self.free), self.reserved + self.most_unreserved)

    def rank(self, trays: int) -> tuple[bool, int, bool, int, int, str]:
        """Less is better: known, most members, room for all, most reserved, fewest left (or most taken)."""
        left, reserved = len(self.free) - trays, min(self.reserved, trays)
        too_small = self.room < trays
        return (self.domain is None, -self.members, too_small, -reserved, abs(left), self.domain or "")

    def choice(self, trays: int) -> TrayChoice[TrayId]:
        """All trays in this domain."""
        left = len(self.free) - trays
        if self.domain is None:
            reason = (
                "on machines whose NVLink domain is not yet observed: no machine of a known domain is free"
            )
        elif self.members:
            reason = (
                f"in NVLink domain {self.domain}: it already holds {self.members} GPUs of the logical"
                f" partition ({left} free machines left)"
            )
        elif self.reserved:
            reason = (
                f"in NVLink domain {self.domain}: {min(self.reserved, trays)} machines are reserved there for"
                f" the organisation ({left} free machines left)"
            )
        else:
            reason = f"in NVLink domain {self.domain}: the tightest fit ({left} free machines left)"
        return TrayChoice(self.free[:trays], reason)


def choose_trays(request: TrayRequest, domains: Sequence[DomainFreeTrays[TrayId]]) -> TrayChoice[TrayId]:
    """Choose trays for `request`. Raises Refused with the shortage, and with a fix that was tried, if any."""
    chosen = _choose(request, domains)
    trays = [tray for domain in domains for tray in domain.trays]
    shut = {
        tray.tray: tray.shut for tray in trays if tray.shut is not None and tray.is_open_to(request.tenant)
    }
    if isinstance(chosen, str):
        kept = sum(tray.shut is None and not tray.is_open_to(request.tenant) for tray in trays)
        reason = f"{chosen}; {kept} more machines are not available now" if kept else chosen
        raise Refused(_passing_over(shut, reason), nearest_fix=_nearest_fix(request, domains))
    # A refusal need not name unhealthy trays: its fix says that they may be allowed.
    sick = {
        tray.tray: tray.sick
        for tray in trays
        if tray.sick is not None and tray.shut is None and tray.is_open_to(request.tenant)
    }
    return TrayChoice(chosen.trays, _passing_over(shut if request.allow_sick else shut | sick, chosen.reason))


def _choose(request: TrayRequest, domains: Sequence[DomainFreeTrays[TrayId]]) -> TrayChoice[TrayId] | str:
    """A placement, or why there is none."""
    wanted = request.trays
    candidates = [_candidate(request, domain) for domain in domains]
    candidates.sort(key=lambda candidate: candidate.rank(wanted))
    # Trays without a known domain are never promised to share memory.
    known = [candidate for candidate in candidates if candidate.domain is not None]
    if request.beside_members:
        return _beside_members(wanted, known)
    reserved = sum(candidate.reserved for candidate in candidates)
    unreserved = sum(len(candidate.free) for candidate in candidates) - reserved
    free = reserved + min(unreserved, _most_unreserved(request))
    if free < wanted:
        return f"Insufficient machines available: requested {wanted}, available {free}"
    if request.one_domain and wanted > 1:
        best = max((candidate.room for candidate in known), default=0)
        return _in_first_that_fits(wanted, known) or (
            f"Topology optimization requires all {wanted} machines on same NVLink domain,"
            f" but best domain only has {best} available"
        )
    return _spread(wanted, candidates, _most_unreserved(request))


def _most_unreserved(request: TrayRequest) -> int:
    return request.trays if request.most_unreserved is None else request.most_unreserved


def _candidate(request: TrayRequest, domain: DomainFreeTrays[TrayId]) -> _Candidate[TrayId]:
    return _Candidate(
        domain.domain,
        domain.free(tenant=request.tenant, allow_sick=request.allow_sick),
        domain.reserved(request.tenant, allow_sick=request.allow_sick),
        domain.members,
        _most_unreserved(request),
    )


def _nearest_fix(request: TrayRequest, domains: Sequence[DomainFreeTrays[TrayId]]) -> str | None:
    """The smallest change of the request that is accepted."""
    for size in range(1, len(_RELAXATIONS) + 1):
        for fields in combinations(_RELAXATIONS, size):
            relaxed = msgspec.structs.replace(request, **{field: _RELAXATIONS[field][0] for field in fields})
            if isinstance(_choose(relaxed, domains), TrayChoice):
                apart = "" if fields == ("allow_sick",) else f": {NO_SHARED_MEMORY}"
                return f"set {' and '.join(_RELAXATIONS[field][1] for field in fields)}{apart}"
    for trays in range(request.trays - 1, 1, -1):
        if isinstance(_choose(msgspec.structs.replace(request, trays=trays), domains), TrayChoice):
            return f"ask for at most {trays}"
    return None


def _beside_members(trays: int, known: Sequence[_Candidate[TrayId]]) -> TrayChoice[TrayId] | str:
    homes = [candidate for candidate in known if candidate.members]
    best = max((candidate.room for candidate in homes or known), default=0)
    if chosen := _in_first_that_fits(trays, homes or known):
        return chosen
    if not homes:
        return f"requireSameDomain: no NVLink domain has {trays} free machines, the best has {best}"
    names = " or ".join(sorted(home.domain or "" for home in homes))
    where = f"NVLink domain {names}, where the logical partition lives,"
    return f"requireSameDomain: {where} has {best} free machines of {trays}"


def _in_first_that_fits(trays: int, candidates: Sequence[_Candidate[TrayId]]) -> TrayChoice[TrayId] | None:
    return next((candidate.choice(trays) for candidate in candidates if candidate.room >= trays), None)


def _spread(trays: int, candidates: Sequence[_Candidate[TrayId]], most_unreserved: int) -> TrayChoice[TrayId]:
    """Fill the domains in order; what the request may have of them together is known to be enough."""
    chosen: list[TrayId] = []
    used: list[_Candidate[TrayId]] = []
    for candidate in candidates:
        if taken := candidate.free[: candidate.reserved + most_unreserved][: trays - len(chosen)]:
            chosen += taken
            most_unreserved -= max(0, len(taken) - candidate.reserved)
            used.append(candidate)
    if len(used) == 1:
        return used[0].choice(trays)
    names = ", ".join(candidate.domain or "not yet observed" for candidate in used)
    reason = f"spread over {len(used)} NVLink domains ({names}): no memory shared between"
    return TrayChoice(tuple(chosen), reason)


def _passing_over(unused: Mapping[TrayId, str], reason: str) -> str:
    """`reason`, with the empty trays that are not used and why; the first few by name."""
    named = sorted(f"{tray} ({why})" for tray, why in unused.items())
    more = [f"{len(named) - MAX_NAMED_TRAYS} more"] if len(named) > MAX_NAMED_TRAYS else []
    return f"{reason}; passed over {', '.join(named[:MAX_NAMED_TRAYS] + more)}" if named else reason
