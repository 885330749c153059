"""How many members with certain claims each tray can serve, computed by the allocator.

Claims are not counted but allocated: device classes have any name, selectors are CEL, and a request may
be for all devices of a node. `with_claim_capacity` fills each tray with members until the allocator
(`core.allocate.fleet`) finds no place, twice: beside the devices in use now, and as if all holders of the
tray's GPUs were gone. Devices of owners without GPUs on the tray stay in use in both cases, since moves
and preemption do not free them. At most 64 members per tray are counted. A request that consumes nothing
is refused.

`gpus_per_member` finds how many GPUs the allocator gives one member on an empty tray, the fewest if trays
differ. Slices that name no node (the channels of a clique) are left out of both.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from rackloom.core.allocate.fleet import Fleet
from rackloom.core.allocate.objects import (
    AllocationResult,
    DeviceAllocationResult,
    DeviceResult,
    ResourceClaim,
)
from rackloom.core.allocate.outcome import Allocation, Fault
from rackloom.core.cluster.state import ClusterState
from rackloom.core.cluster.trays import ClaimCapacity, ClaimsByKind, DraDevices, PlacementSite
from rackloom.errors import Refused

AllocationsByNode = dict[str, list[AllocationResult]]
MAX_MEMBERS_PER_TRAY = 64
"""Members that are counted per tray at most: a device that may be shared, and has no capacity to run out of,
serves any number."""


def with_claim_capacity(site: PlacementSite, devices: DraDevices, kinds: ClaimsByKind) -> PlacementSite:
    """The site with the capacity of every tray for each kind. Raises Refused for malformed claims."""
    busy, everything = _allocations_by_node(devices, devices.claims), _all_devices(devices)
    # Devices of owners without GPUs on the tray stay in use: moves and preemption do not free them.
    held = {(hold.owner, hold.tray) for hold in site.holds}
    by_owner: dict[str, list[ResourceClaim]] = {}
    for claim in devices.claims:
        key = f"{claim.metadata.namespace or 'default'}/{claim.metadata.name}"
        by_owner.setdefault(devices.owners.get(key, ""), []).append(claim)
    staying: AllocationsByNode = {}
    for owner, owned in by_owner.items():
        for node, results in _allocations_by_node(devices, owned).items():
            if (owner, node) not in held:
                staying.setdefault(node, []).extend(results)
    # Fill every tray twice, or once if no holder would be gone.
    rooms: dict[str, dict[str, ClaimCapacity]] = {}
    for kind, claims in kinds.items():
        empty = now = _fill_fleet(kind, _fleet_with(devices, staying), claims, everything)
        if busy != staying:
            now = _fill_fleet(kind, _fleet_with(devices, busy), claims, everything)
        rooms[kind] = {node: ClaimCapacity(now=now[node], empty=members) for node, members in empty.items()}
    return site.with_trays(
        lambda tray: msgspec.structs.replace(
            tray, rooms={kind: of[tray.name] for kind, of in rooms.items() if tray.name in of}
        )
    )


def gpus_per_member(devices: DraDevices, claims: Sequence[ResourceClaim], state: ClusterState) -> int:
    """GPUs that the allocator gives a member for its claims on an empty tray: the fewest if trays differ.

    0 if no tray can serve it. The number cannot be read from the claims: classes have any name, and a
    request may be for all devices of a tray.
    """
    fleet, everything = _fleet_with(devices, {}), _all_devices(devices)
    whole = {key for key, device in state.published.items() if device.is_whole}
    given: dict[str, int] = {}
    while isinstance(found := fleet.place(claims), Allocation) and found.node not in given:
        given[found.node] = sum(
            device.driver == state.labels.gpu_driver and (device.pool, device.device) in whole
            for result in found.results
            for device in result.devices.results
            if not device.admin_access
        )
        fleet.occupy([everything[found.node]] if found.node in everything else [])
    return min(given.values(), default=0)


def _fleet_with(devices: DraDevices, in_use: AllocationsByNode) -> Fleet:
    """Slices that name no node (a clique's channels) are served wherever the clique is."""
    slices = [slice_ for slice_ in devices.slices if slice_.spec.node_name]
    fleet = Fleet(devices.nodes, devices.classes, slices)
    # An allocation over several nodes is listed for each of them.
    held = {id(result): result for results in in_use.values() for result in results}
    fleet.occupy(list(held.values()))
    return fleet


def _all_devices(devices: DraDevices) -> dict[str, AllocationResult]:
    """All devices of each node, as a claim for all of them would have them."""
    found: dict[str, list[DeviceResult]] = {}
    for slice_ in devices.slices:
        pool = slice_.spec.pool.name
        found.setdefault(slice_.spec.node_name or "", []).extend(
            DeviceResult(request="", driver=slice_.spec.driver, pool=pool, device=device.name)
            for device in slice_.spec.devices
        )
    return {
        node: AllocationResult(devices=DeviceAllocationResult(results=tuple(results)))
        for node, results in found.items()
    }


def _allocations_by_node(devices: DraDevices, claims: Iterable[ResourceClaim]) -> AllocationsByNode:
    names = {node.metadata.name for node in devices.nodes}
    nodes = {
        (slice_.spec.driver, slice_.spec.pool.name, device.name): slice_.spec.node_name
        for slice_ in devices.slices
        if slice_.spec.node_name in names
        for device in slice_.spec.devices
    }
    found: AllocationsByNode = {}
    for claim in claims:
        if claim.status.allocation is not None:
            results = claim.status.allocation.devices.results
            allocated = {(result.driver, result.pool, result.device) for result in results}
            for node in {nodes[device] for device in allocated & nodes.keys()}:
                found.setdefault(node or "", []).append(claim.status.allocation)
    return found


def _fill_fleet(
    kind: str, fleet: Fleet, claims: Sequence[ResourceClaim], everything: Mapping[str, AllocationResult]
) -> Counter[str]:
    """Members by node that the fleet takes, up to the maximum. `everything`: all devices of each node."""
    members: Counter[str] = Counter()
    while isinstance(found := fleet.place(claims), Allocation):
        if members[found.node] == MAX_MEMBERS_PER_TRAY:
            fix = "let each of them request a device that it does not share without bound"
            raise Refused(f"claims {kind} take nothing of {found.node}", nearest_fix=fix)
        members[found.node] += 1
        if members[found.node] == MAX_MEMBERS_PER_TRAY:
            fleet.occupy([everything[found.node]])
    if isinstance(found, Fault):
        raise Refused(f"claims {kind}: {found.reason}", nearest_fix="run `rackloom claim explain` on them")
    return members
