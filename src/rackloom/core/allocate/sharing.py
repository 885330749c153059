"""Equal parts of many slices kept once: most devices of a cluster differ in a UUID and little else.

`SharedParts.of` gives a slice equal to the one passed in. Its attributes, capacities, taints and counters
are those of earlier slices if they are written alike. Values are immutable, so only memory use shows the
difference: of five attributes and a capacity, a device keeps the two attributes that are unique to it.

Keep a `SharedParts` while decoding many slices.
"""

from sys import intern
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import Device, ResourceSlice

T = TypeVar("T")


class SharedParts:
    """The parts of slices seen so far."""

    def __init__(self) -> None:
        self._values: dict[bytes, object] = {}

    def of(self, resource_slice: ResourceSlice) -> ResourceSlice:
        """An equal slice that shares its parts with earlier slices if possible."""
        spec = resource_slice.spec
        devices = tuple(map(self._device, spec.devices))
        counters = tuple(map(self._shared, spec.shared_counters))
        return replace(
            resource_slice,
            spec=replace(spec, driver=intern(spec.driver), devices=devices, shared_counters=counters),
        )

    def _device(self, device: Device) -> Device:
        # A node has few devices, so their names repeat on every node.
        return replace(
            device,
            name=intern(device.name),
            attributes={intern(name): self._shared(value) for name, value in device.attributes.items()},
            capacity=self._shared(device.capacity),
            taints=self._shared(device.taints),
            consumes_counters=self._shared(device.consumes_counters),
        )

    def _shared(self, value: T) -> T:
        # Values are shared only if they are written alike: 1 and 1.0 are equal, but not in messages.
        return self._values.setdefault(_written(value), value)  # type: ignore[return-value]


def _written(value: object) -> bytes:
    return type(value).__name__.encode() + msgspec.json.encode(value)
