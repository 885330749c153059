"""The devices of nodes as their slices write them, for the indexes, which read many nodes to find one.

To gather the pools of a node costs several times as much as to look at one attribute of its devices. It can
be left out if all slices near a node name that node: nothing else decides whether they reach it. The slices
then have all devices that the node reaches, and perhaps some of an older generation or of a pool in trouble.
More devices make an index visit more nodes, which changes no answer. If slices near a node select their
nodes, the pools are gathered.

`WrittenDevices` also notes which nodes have a value that cannot be read. `PassingDevices` leaves out the
devices that the selectors before a pin refuse, and runs these once for all devices that are equal in the
values that they read.
"""

from collections.abc import Hashable, Sequence

from rackloom.core.allocate.cel import errors
from rackloom.core.allocate.cel.environment import DeviceView
from rackloom.core.allocate.eligibility import SelectorCache, is_malformed, is_quantity
from rackloom.core.allocate.fleet_nodes import FleetNodes
from rackloom.core.allocate.node_kinds import (
    chosen_values,
    has_malformed,
    names_at,
    reads_of_expressions,
)
from rackloom.core.allocate.objects import Device, ResourceSlice
from rackloom.core.allocate.outcome import AllocationStopped

DevicesByDriver = list[tuple[str, Sequence[Device]]]
"""Devices with their drivers, those of one slice together."""

_UNREAD, _READABLE, _UNREADABLE = 0, 1, 2


class WrittenDevices:
    """The devices of each node of a fleet, and perhaps some that it does not reach."""

    def __init__(self, nodes: FleetNodes) -> None:
        self._nodes = nodes
        self._state = bytearray(len(nodes.nodes))

    def of(self, number: int) -> DevicesByDriver | None:
        """The devices of a node, or None if a search must visit it because a value cannot be read."""
        if self._state[number] == _UNREADABLE:
            return None
        slices = self._nodes.index.near(self._nodes.nodes[number].metadata.name)
        if self._nodes.index.unbound() or any(each.spec.per_device_node_selection for each in slices):
            # Slices that select their nodes: only gathering shows whether their devices reach this one.
            try:
                devices = self._nodes.devices(number)
            except AllocationStopped:
                return None
            if has_malformed(devices):
                return None
            return [(candidate.id.driver, (candidate.device,)) for candidate in devices.candidates]
        if self._state[number] == _UNREAD:
            self._state[number] = _READABLE if _is_readable(slices) else _UNREADABLE
            return self.of(number)
        return [(slice_.spec.driver, slice_.spec.devices) for slice_ in slices]

    def forget(self, number: int) -> None:
        """Note that the devices of a node changed."""
        self._state[number] = _UNREAD


def _is_readable(slices: Sequence[ResourceSlice]) -> bool:
    for slice_ in slices:
        spec = slice_.spec
        if any(is_malformed(spec.driver, device) for device in spec.devices):
            return False
        for counter_set in spec.shared_counters:
            if not all(is_quantity(counter.value) for counter in counter_set.counters.values()):
                return False
    return True


class PassingDevices:
    """The devices of each node that some selectors let through."""

    def __init__(self, written: WrittenDevices, selectors: SelectorCache, earlier: tuple[str, ...]) -> None:
        self._written = written
        self._selectors = selectors
        self._earlier = earlier
        self._reads = reads_of_expressions(earlier)
        self._names: dict[str, tuple[tuple[str, ...] | None, tuple[str, ...] | None]] = {}
        self._verdicts: dict[Hashable, bool | None] = {}

    def of(self, number: int) -> DevicesByDriver | None:
        """The devices of a node, or None if a search must visit it because a value cannot be read."""
        written = self._written.of(number)
        if written is None or not self._earlier:
            return written
        found: DevicesByDriver = []
        for driver, devices in written:
            through = self._through(driver, devices)
            if through is None:
                return None
            if through:
                found.append((driver, through))
        return found

    def _through(self, driver: str, devices: Sequence[Device]) -> list[Device] | None:
        if driver not in self._names:
            reads = self._reads
            self._names[driver] = names_at(driver, reads.attributes), names_at(driver, reads.capacities)
        attributes, capacities = self._names[driver]
        found: list[Device] = []
        for device in devices:
            # The selectors see no more of a device than this.
            key = (
                driver,
                device.allow_multiple_allocations,
                chosen_values(device.attributes, attributes),
                chosen_values(device.capacity, capacities),
            )
            if key not in self._verdicts:
                self._verdicts[key] = self._passes(driver, device)
            passes = self._verdicts[key]
            if passes is None:
                return None
            if passes:
                found.append(device)
        return found

    def _passes(self, driver: str, device: Device) -> bool | None:
        """Whether the selectors let the device through, or None if one of them fails."""
        view = DeviceView.of_device(driver, device)
        for expression in self._earlier:
            result = self._selectors.evaluate(expression, view)
            if isinstance(result, errors.CompileError | errors.EvaluationError):
                return None
            if not result:
                return False
        return True
