"""The nodes of a fleet: what each reaches, what is in use there, and what changed since somebody looked.

The devices of a node are gathered when a search first comes to it. A device in use is noted on every
node that reaches it or draws from the counters of its pool. Where slices name their node that is one
node; where they select nodes by label, or are for all, it may be any. What is in use of such common pools
is also kept once for all nodes: a node takes it over when a search first comes to it.

Searches remember which nodes refused (`spec_view`). `freed` lists the nodes where they must look again:
a device came back, or somebody outside took one. `taken` lists those where the fleet itself gave devices
away. That makes a refusing node serve only in mode All, whose list of devices leaves out those without
capacity. Both are bounded, and who was away for too long starts afresh.
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
    """Numbers of nodes in the order in which they changed; only the latest are kept."""

    def __init__(self) -> None:
        self._first = 0
        self._numbers: list[int] = []

    @property
    def end(self) -> int:
        """How many changes there were."""
        return self._first + len(self._numbers)

    def add(self, number: int) -> None:
        """Note a change."""
        if len(self._numbers) == _CHANGES_KEPT:
            half = _CHANGES_KEPT // 2
            self._first += half
            del self._numbers[:half]
        self._numbers.append(number)

    def since(self, seen: int) -> list[int] | None:
        """The changes after the first `seen`; None if some of them are no longer kept."""
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
        """Of several nodes of one name only the first: they would have the same devices."""
        self.number = {name: number for number, name in enumerate(first)}
        self.full = bytearray(len(first))
        """Of each node, whether every device is held whole."""
        self.freed = ChangeLog()
        self.taken = ChangeLog()
        self.reshaped = ChangeLog()
        """Nodes whose devices changed."""
        self.heeds_taints = features.device_taints
        self._features = features
        self._devices: dict[int, NodeDevices] = {}
        self._occupancy: dict[int, NodeOccupancy] = {}
        common = _common_devices(self.index)
        self._common = NodeOccupancy(common) if common.ids else None

    def replace_slice(self, before: ResourceSlice | None, after: ResourceSlice | None) -> Sequence[int]:
        """Note that a slice changed, came or went. Returns the nodes that it matters to.

        What is in use stays so, also of devices that are gone: they may come back.
        """
        self.index.replace(before, after)
        slices = [slice_ for slice_ in (before, after) if slice_ is not None]
        # The other slices of the pool matter, too: whether a pool is complete depends on all of them.
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
            # What is in use is taken over when its node selectors can be read again.
            return
        devices = self._devices[number] = _with_gone(devices, before)
        occupancy = self._occupancy[number] = NodeOccupancy(devices)
        occupancy.take_over(before)
        self.full[number] = FULL if occupancy.full else NOT_FULL

    def devices(self, number: int) -> NodeDevices:
        """What a node reaches. Raises AllocationStopped where a node selector cannot be read."""
        found = self._devices.get(number)
        if found is None:
            found = self._devices[number] = devices_on_node(self.nodes[number], self.index, self._features)
        return found

    def occupancy(self, number: int) -> NodeOccupancy:
        """What is in use on a node. Raises AllocationStopped, as `devices` does."""
        found = self._occupancy.get(number)
        if found is None:
            found = self._occupancy[number] = NodeOccupancy(self.devices(number))
            if self._common is not None and found.take_over(self._common):
                self.full[number] = FULL if found.full else NOT_FULL
        return found

    def take(self, results: Sequence[AllocationResult]) -> None:
        """Note what a search of this fleet gave."""
        self._change(results, self.taken, added=True)

    def take_outside(self, results: Sequence[AllocationResult]) -> None:
        """Note what was given elsewhere."""
        self._change(results, self.freed, added=True)

    def free(self, results: Sequence[AllocationResult]) -> None:
        """Note what was given back."""
        self._change(results, self.freed, added=False)

    def _change(self, results: Sequence[AllocationResult], log: ChangeLog, *, added: bool) -> None:
        pools = dict.fromkeys(
            (device.driver, device.pool) for result in results for device in result.devices.results
        )
        numbers: dict[int, None] = {}
        for pool in pools:
            names = {slice_.spec.node_name for slice_ in self.index.pool(pool)}
            # A common pool may matter to any node. Only those count that a search came to: the others take
            # over what is in use when one comes to them.
            known = [self.number[name] for name in names if name in self.number]
            numbers |= dict.fromkeys(known if all(names) else self._occupancy)
        for number in numbers:
            try:
                occupancy = self.occupancy(number)
            except AllocationStopped:
                # Its node selectors cannot be read: no search gets further on it.
                continue
            self._update(occupancy, results, added=added)
            self.full[number] = FULL if occupancy.full else NOT_FULL
            log.add(number)
        # Last, because nodes that were gathered just now took over what was in use before.
        if self._common is not None:
            self._update(self._common, results, added=added)

    def _update(self, occupancy: NodeOccupancy, results: Sequence[AllocationResult], *, added: bool) -> None:
        shares = self._features.consumable_capacity
        if added:
            occupancy.add(results, shares=shares)
        else:
            occupancy.remove(results, shares=shares)


def _with_gone(devices: NodeDevices, before: NodeOccupancy) -> NodeDevices:
    """The devices, and those that are in use and gone: these have positions, and no search sees them."""
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
