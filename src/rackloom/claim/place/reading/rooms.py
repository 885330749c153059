"""How many members with certain claims each tray can serve, asked of `claim/allocate`."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from rackloom.claim.allocate.fleet import Fleet
from rackloom.claim.allocate.objects import (
    AllocationResult,
    DeviceAllocationResult,
    DeviceResult,
    ResourceClaim,
)
from rackloom.claim.allocate.outcome import Allocation, Fault
from rackloom.claim.place.labels import Labels
from rackloom.claim.place.reading.devices import Devices, Kinds, taken_by
from rackloom.claim.place.values import Room, Site
from rackloom.errors import Refused

InUse = dict[str, list[AllocationResult]]
"""By node."""
MOST = 64
"""Members that a tray is said to serve at most: a device that may be shared, and has no capacity that could
run out, serves any number."""


def with_rooms(
    site: Site,
    devices: Devices,
    kinds: Kinds,
    labels: Labels = Labels(),  # noqa: B008 (a frozen value)
) -> Site:
    """The site with the rooms of every tray for each kind. Raises Refused for claims that cannot be read."""
    busy = _busy(devices, devices.claims)
    staying = _staying(site, devices, labels)
    rooms = {kind: _rooms(kind, devices, claims, busy, staying) for kind, claims in kinds.items()}
    trays = tuple(
        msgspec.structs.replace(
            tray, rooms={kind: of[tray.name] for kind, of in rooms.items() if tray.name in of}
        )
        for tray in site.trays
    )
    return Site(trays, site.holds)


def gpus_given(devices: Devices, claims: Sequence[ResourceClaim], labels: Labels) -> int:
    """GPUs that the allocator gives a member for its claims on an empty tray: the fewest, where trays differ.

    0 where none can serve it. It is asked, not read from the claims: classes have any name, and a request may
    be for all of a tray, whatever that has.
    """
    fleet, gpus, everything = _fleet(devices, {}), devices.gpus(labels), _everything(devices)
    given: dict[str, int] = {}
    while isinstance(found := fleet.place(claims), Allocation) and found.node not in given:
        given[found.node] = taken_by(found.results, gpus)
        fleet.occupy(found.node, [everything[found.node]] if found.node in everything else [])
    return min(given.values(), default=0)


def _rooms(
    kind: str, devices: Devices, claims: Sequence[ResourceClaim], busy: InUse, staying: InUse
) -> dict[str, Room]:
    everything = _everything(devices)
    empty = _filled(kind, _fleet(devices, staying), claims, everything)
    if busy == staying:
        return {node: Room(now=members, empty=members) for node, members in empty.items()}
    now = _filled(kind, _fleet(devices, busy), claims, everything)
    return {node: Room(now=now[node], empty=members) for node, members in empty.items()}


def _fleet(devices: Devices, in_use: InUse) -> Fleet:
    """Slices that name no node (a clique's channels) are served wherever the clique is."""
    slices = [one for one in devices.slices if one.spec.node_name]
    fleet = Fleet(devices.nodes, devices.classes, slices)
    for node, results in in_use.items():
        fleet.occupy(node, results)
    return fleet


def _staying(site: Site, devices: Devices, labels: Labels) -> InUse:
    """What is in use on a tray by those who have none of its GPUs: moves and preemption do not free it."""
    held = {(one.owner, one.tray) for one in site.holds}
    users = devices.users(labels)
    by_owner: dict[str, list[ResourceClaim]] = {}
    for claim, user in zip(devices.claims, users, strict=True):
        by_owner.setdefault(user.owner, []).append(claim)
    found: InUse = {}
    for owner, claims in by_owner.items():
        for node, results in _busy(devices, claims).items():
            if (owner, node) not in held:
                found.setdefault(node, []).extend(results)
    return found


def _everything(devices: Devices) -> dict[str, AllocationResult]:
    """All devices of each node, as a claim for all of them would have them."""
    found: dict[str, list[DeviceResult]] = {}
    for one in devices.slices:
        pool = one.spec.pool.name
        found.setdefault(one.spec.node_name or "", []).extend(
            DeviceResult(request="", driver=one.spec.driver, pool=pool, device=device.name)
            for device in one.spec.devices
        )
    return {
        node: AllocationResult(devices=DeviceAllocationResult(results=tuple(results)))
        for node, results in found.items()
    }


def _busy(devices: Devices, claims: Iterable[ResourceClaim]) -> InUse:
    names = {node.metadata.name for node in devices.nodes}
    nodes = {
        (one.spec.driver, one.spec.pool.name, device.name): one.spec.node_name
        for one in devices.slices
        if one.spec.node_name in names
        for device in one.spec.devices
    }
    found: InUse = {}
    for claim in claims:
        if claim.status.allocation is not None:
            results = claim.status.allocation.devices.results
            for node in {nodes.get((one.driver, one.pool, one.device)) for one in results} - {None}:
                found.setdefault(node or "", []).append(claim.status.allocation)
    return found


def _filled(
    kind: str, fleet: Fleet, claims: Sequence[ResourceClaim], everything: Mapping[str, AllocationResult]
) -> Counter[str]:
    """Members by node when the fleet takes as many as it can, up to `MOST`; `everything`: all of a node."""
    members: Counter[str] = Counter()
    while isinstance(found := fleet.place(claims), Allocation):
        if members[found.node] == MOST:
            fix = "let each of them request a device that it does not share without bound"
            raise Refused(f"claims {kind} take nothing of {found.node}", nearest_fix=fix)
        members[found.node] += 1
        if members[found.node] == MOST:
            fleet.occupy(found.node, [everything[found.node]])
    if isinstance(found, Fault):
        raise Refused(f"claims {kind}: {found.reason}", nearest_fix="run `rackloom claim explain` on them")
    return members
