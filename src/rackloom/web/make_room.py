"""Finds the NVLink domains in which a job of whole trays fits, or those that come nearest.

Trays of one NVLink domain share memory, so a job needs all of its trays in one domain. The search that
places gangs and instances orders the domains where the job fits (`fitting_cliques`). If it fits nowhere,
domains with the most free trays are named. Operators read who holds the other trays of a domain. A tenant
reads which trays are its own. Of the others it reads only that they are not available, because a reserved
tray must look to it like one in use.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from heapq import nlargest
from itertools import islice

import msgspec

from rackloom.core.diagnosis.snapshot import grouped
from rackloom.core.place.search.clique_search import fitting_cliques
from rackloom.core.place.search.gang_needs import tray_group
from rackloom.core.place.search.site_view import CliquePreference, SiteCapacity, SiteView, whole_trays
from rackloom.web.model import MapTray, SiteMap, tray_free

MOST_TRAYS = 10_000
MOST_DOMAINS = 3
"""The number of domains that a plan names at most: those with the most free trays."""


class DomainRoom(msgspec.Struct, frozen=True, kw_only=True):
    """The trays of one NVLink domain."""

    racks: tuple[str, ...]
    trays: int
    free: int
    in_the_way: tuple[tuple[str, int], ...]
    """Each reason why a tray is not free, with its number of trays. The most frequent is first."""


class RoomPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The domains in which a number of trays fit, or the nearest ones."""

    trays: int
    fits: bool
    domains: tuple[DomainRoom, ...]
    """The domains in which they fit, or else the nearest."""
    largest: int
    """Trays of the largest domain: no job can have more."""


def room_plan(whole: SiteMap, trays: int) -> RoomPlan:
    """The domains of a viewer's part of a site in which a job of `trays` whole trays fits, or the nearest."""
    by_domain = grouped((tray[0].domain, tray) for rack in whole.racks for tray in rack.trays)
    rooms = {domain: _domain_room(whole, found) for domain, found in by_domain.items() if domain}
    # The fullest domain with enough room is taken first, as for instances, so that large free regions stay.
    site = SiteView.counted(
        {
            domain: whole_trays(room.free, preference=CliquePreference(then=(room.free,)))
            for domain, room in rooms.items()
        }
    )
    fitting = list(islice(fitting_cliques(SiteCapacity(site), tray_group(trays)), MOST_DOMAINS))
    large_enough = [domain for domain, room in rooms.items() if room.trays >= trays]
    nearest = fitting or nlargest(MOST_DOMAINS, large_enough, key=lambda domain: rooms[domain].free)
    return RoomPlan(
        trays=trays,
        fits=bool(fitting),
        domains=tuple(rooms[domain] for domain in nearest),
        largest=max((room.trays for room in rooms.values()), default=0),
    )


def _domain_room(whole: SiteMap, trays: Iterable[MapTray]) -> DomainRoom:
    found = list(trays)
    others = Counter(_holder(whole, tray) for tray in found if not tray_free(tray))
    return DomainRoom(
        racks=tuple(dict.fromkeys(tray[0].place.rack for tray in found)),
        trays=len(found),
        free=len(found) - others.total(),
        in_the_way=tuple(others.most_common()),
    )


def _holder(whole: SiteMap, tray: MapTray) -> str:
    """The reason why a tray is not free: its tenant or its state."""
    tenants = list(dict.fromkeys(_tenants(tray)))
    if not whole.operator:
        return "by you" if tenants else "not available to you"
    if tenants:
        return " and ".join(f"by tenant {whole.tenants.get(tenant, tenant)}" for tenant in tenants)
    if any(gpu.taken for gpu in tray):
        return "by pods without an instance"
    if reserved := next((gpu.reserved_for for gpu in tray if gpu.reserved_for), None):
        return f"reserved for {whole.tenants.get(reserved, reserved)}"
    return "cordoned, sick or not ready" if any(gpu.held_back for gpu in tray) else "in an unknown state"


def _tenants(tray: MapTray) -> Iterator[str]:
    for gpu in tray:
        if gpu.chain is not None and gpu.chain.machine is not None and gpu.chain.machine.tenant is not None:
            yield gpu.chain.machine.tenant
