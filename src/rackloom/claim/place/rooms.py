"""How many members with certain claims each tray can serve, asked of `claim/allocate`."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from rackloom.claim.allocate.fleet import Fleet
from rackloom.claim.allocate.objects import AllocationResult, ResourceClaim
from rackloom.claim.allocate.outcome import Allocation, Fault
from rackloom.claim.place.devices import Devices, Kinds
from rackloom.claim.place.values import Room, Site
from rackloom.errors import Refused


def with_rooms(site: Site, devices: Devices, kinds: Kinds) -> Site:
    """The site with the rooms of every tray for each kind. Raises Refused for claims that cannot be read."""
    rooms = {kind: _rooms(kind, devices, claims) for kind, claims in kinds.items()}
    trays = tuple(
        msgspec.structs.replace(
            tray, rooms={kind: of[tray.name] for kind, of in rooms.items() if tray.name in of}
        )
        for tray in site.trays
    )
    return Site(trays, site.holds)


def _rooms(kind: str, devices: Devices, claims: Sequence[ResourceClaim]) -> dict[str, Room]:
    empty = _filled(kind, _fleet(devices), claims)
    busy = _busy(devices)
    if not busy:
        return {node: Room(now=members, empty=members) for node, members in empty.items()}
    fleet = _fleet(devices)
    for node, results in busy.items():
        fleet.occupy(node, results)
    now = _filled(kind, fleet, claims)
    return {node: Room(now=now[node], empty=members) for node, members in empty.items()}


def _fleet(devices: Devices) -> Fleet:
    """Slices that name no node (a clique's channels) are served wherever the clique is."""
    slices = [one for one in devices.slices if one.spec.node_name]
    return Fleet(devices.nodes, devices.classes, slices)


def _busy(devices: Devices) -> dict[str, list[AllocationResult]]:
    names = {node.metadata.name for node in devices.nodes}
    pools = {one.spec.pool.name: one.spec.node_name for one in devices.slices if one.spec.node_name}
    found: dict[str, list[AllocationResult]] = {}
    for claim in devices.claims:
        if claim.status.allocation is not None:
            for pool in {one.pool for one in claim.status.allocation.devices.results}:
                if pools.get(pool) in names:
                    found.setdefault(pools[pool] or "", []).append(claim.status.allocation)
    return found


def _filled(kind: str, fleet: Fleet, claims: Sequence[ResourceClaim]) -> Counter[str]:
    """Members by node when the fleet takes as many as it can."""
    members: Counter[str] = Counter()
    while isinstance(found := fleet.place(claims), Allocation):
        members[found.node] += 1
    if isinstance(found, Fault):
        raise Refused(f"claims {kind}: {found.reason}", nearest_fix="run `rackloom claim explain` on them")
    return members
