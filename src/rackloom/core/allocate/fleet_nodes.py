"""The nodes of a fleet, the devices that each reaches, those in use, and logs of the changes.

The devices of a node are gathered when a search first comes to it. A device in use is recorded on every
node that reaches it or draws from the counters of its pool. If the slices of the pool name a node, it is
that node only. If they select nodes by label, or are for all nodes, it may be any node. The use of such
common pools is also kept once for all nodes: a node copies it when a search first comes to it.

Searches remember which nodes refused (`spec_view`). `freed` lists the nodes that they must visit again,
because a device came back, or was taken from outside the fleet. `taken` lists those where the fleet itself
gave devices away. Such a change lets a refusing node serve only in mode All, because its list of devices
leaves out those without capacity. Both logs are bounded, and a reader that falls too far behind starts over.
"""

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from rackloom.core.allocate.inputs import DeviceId, Features
from rackloom.core.allocate.objects import AllocationResult, Node, ObjectMeta, ResourceSlice
from rackloom.core.allocate.occupancy import NodeOccupancy
from rackloom.core.allocate.outcome import AllocationStopped
from rackloom.core.allocate.pools import SliceIndex, pool_key
from rackloom.core.allocate.problem import NodeDevices, devices_on_node

FULL, NOT_FULL = 1, 0
_CHANGES_KEPT = 1 << 16


class ChangeLog:
    """Numbers of nodes in the order in which they changed. Only the latest are kept."""

    def __init__(self) -> None:
        self._first = 0
        self._numbers: list[int] = []

    @property
    def end(self) -> int:
        """The number of changes so far."""
        return self._first + len(self._numbers)

    def add(self, number: int) -> None:
        """Record a change."""
        if len(self._numbers) == _CHANGES_KEPT:
            half = _CHANGES_KEPT // 2
            self._first += half
            del self._numbers[:half]
        self._numbers.append(number)

    def since(self, seen: int) -> list[int] | None:
        """The changes after the first `seen`, or None if some of them are no longer kept."""
        return self._numbers[seen - self._first :] if seen >= self._first else None


class FleetNodes:
    """Nodes by number, in the order in which they are tried."""

    def __init__(
        self, nodes: Sequence[Node], slices: Iterable[ResourceSlice] | SliceIndex, features: Features
    ) -> None:
        self.index = slices if isinstance(slices, SliceIndex) else SliceIndex(slices)
        first: dict[str, Node] = {}
        for node in nodes:
            first.setdefault(node.metadata.name, node)
        self.nodes = tuple(first.values())
        """Only the first of several nodes with one name, because all would have the same devices."""
        self.number = {name: number for number, name in enumerate(first)}
        self.full = bytearray(len(first))
        """For each node, whether every device is held whole."""
        self.freed = ChangeLog()
        self.taken = ChangeLog()
        self.reshaped = ChangeLog()
        """Nodes with changed devices."""
        self.heeds_taints = features.device_taints
        self._features = features
        self._devices: dict[int, NodeDevices] = {}
        self._occupancy: dict[int, NodeOccupancy] = {}
        common = _common_devices(self.index)
        self._common = NodeOccupancy(common) if common.ids else None

    def replace_slice(self, before: ResourceSlice | None, after: ResourceSlice | None) -> Sequence[int]:
        """Record that a slice changed, came or went. Returns the nodes that it affects.

        Devices in use stay so even if they are gone, because they may come back.
        """
        self.index.replace(before, after)
        slices = [slice_ for slice_ in (before, after) if slice_ is not None]
        # The other slices of the pool matter too: whether a pool is complete depends on all of them.
        names = {slice_.spec.node_name for slice_ in slices}
        for slice_ in slices:
            names |= {other.spec.node_name for other in self.index.pool(pool_key(slice_))}
        if all(names):
            numbers = [self.number[name] for name in names if name in self.number]
        else:
            numbers = list(range(len(self.nodes)))
            known = self._common
            devices = _common_devices(self.index)
            self._common = NodeOccupancy(devices if known is None else _with_gone(devices, known))
            if known is not None:
                self._common.take_over(known)
        for number in numbers:
            self._gather_again(number)
            self.reshaped.add(number)
        return numbers

    def _gather_again(self, number: int) -> None:
        self._devices.pop(number, None)
        self.full[number] = NOT_FULL
        before = self._occupancy.get(number)
        if before is None:
            return
        try:
            devices = self.devices(number)
        except AllocationStopped:
            # The use is taken over when the node selectors can be read again.
            return
        devices = self._devices[number] = _with_gone(devices, before)
        occupancy = self._occupancy[number] = NodeOccupancy(devices)
        occupancy.take_over(before)
        self.full[number] = FULL if occupancy.full else NOT_FULL

    def devices(self, number: int) -> NodeDevices:
        """The devices that a node reaches. Raises AllocationStopped if a node selector cannot be read."""
        found = self._devices.get(number)
        if found is None:
            found = self._devices[number] = devices_on_node(self.nodes[number], self.index, self._features)
        return found

    def occupancy(self, number: int) -> NodeOccupancy:
        """The use of a node's devices. Raises AllocationStopped, as `devices` does."""
        found = self._occupancy.get(number)
        if found is None:
            found = self._occupancy[number] = NodeOccupancy(self.devices(number))
            if self._common is not None and found.take_over(self._common):
                self.full[number] = FULL if found.full else NOT_FULL
        return found

    def take(self, results: Sequence[AllocationResult]) -> None:
        """Record devices that a search of this fleet gave."""
        self._change(results, self.taken, added=True)

    def take_outside(self, results: Sequence[AllocationResult]) -> None:
        """Record devices that were given elsewhere."""
        self._change(results, self.freed, added=True)

    def free(self, results: Sequence[AllocationResult]) -> None:
        """Record devices that were given back."""
        self._change(results, self.freed, added=False)

    def _change(self, results: Sequence[AllocationResult], log: ChangeLog, *, added: bool) -> None:
        pools = dict.fromkeys(
            (device.driver, device.pool) for result in results for device in result.devices.results
        )
        numbers: dict[int, None] = {}
        for pool in pools:
            names = {slice_.spec.node_name for slice_ in self.index.pool(pool)}
            # A common pool may affect any node. Update only those that a search has visited: the others take
            # over the use when a search first comes to them.
            known = [self.number[name] for name in names if name in self.number]
            numbers |= dict.fromkeys(known if all(names) else self._occupancy)
        for number in numbers:
            try:
                occupancy = self.occupancy(number)
            except AllocationStopped:
                # Its node selectors cannot be read, so no search gets further on it.
                continue
            self._update(occupancy, results, added=added)
            self.full[number] = FULL if occupancy.full else NOT_FULL
            log.add(number)
        # This comes last, because nodes that were gathered just now took over the use from before.
        if self._common is not None:
            self._update(self._common, results, added=added)

    def _update(self, occupancy: NodeOccupancy, results: Sequence[AllocationResult], *, added: bool) -> None:
        shares = self._features.consumable_capacity
        if added:
            occupancy.add(results, shares=shares)
        else:
            occupancy.remove(results, shares=shares)


def _with_gone(devices: NodeDevices, before: NodeOccupancy) -> NodeDevices:
    """The devices, and those in use that are gone. These have positions, but no search sees them."""
    gone = [device for device in before.devices_in_use() if device not in devices.positions]
    if not gone:
        return devices
    ids = (*devices.ids, *gone)
    return replace(devices, ids=ids, positions={device: at for at, device in enumerate(ids)})


def _common_devices(index: SliceIndex) -> NodeDevices:
    """The devices of pools with slices that name no node."""
    ids = tuple(
        DeviceId(driver, pool, device.name)
        for driver, pool in index.common_pools()
        for slice_ in index.pool((driver, pool))
        for device in slice_.spec.devices
    )
    positions = {device: at for at, device in enumerate(ids)}
    return NodeDevices(Node(metadata=ObjectMeta()), (), (), ids, positions)
