"""The devices of a node in the order in which they are tried, each with what is computed from it once."""

from collections.abc import Sequence
from functools import cached_property

import msgspec

from rackloom.claim.allocate.cel import DeviceView
from rackloom.claim.allocate.features import Features
from rackloom.claim.allocate.objects import Device, DeviceAttribute, ResourceSlice
from rackloom.claim.allocate.pools import Pool, devices_of
from rackloom.claim.allocate.use import DeviceId


class Candidate:
    """A device that a node may reach."""

    def __init__(
        self, pool: Pool, source: ResourceSlice, device: Device, position: int, *, shareable: bool
    ) -> None:
        self.id = DeviceId(pool.driver, pool.name, device.name)
        self.pool = pool
        self.source = source
        self.device = device
        self.position = position
        """Rank in the order of search."""
        self.shareable = shareable
        """Several requests may hold a share of it at once."""

    @cached_property
    def view(self) -> DeviceView:
        """The device as CEL sees it."""
        return DeviceView.of(
            self.id.driver,
            {name: msgspec.to_builtins(value) for name, value in self.device.attributes.items()},
            {name: str(one.value) for name, one in self.device.capacity.items()},
            bool(self.device.allow_multiple_allocations),
        )

    @cached_property
    def content(self) -> bytes:
        """The device without its name: equal contents are equal to every selector."""
        return msgspec.json.encode((self.id.driver, msgspec.structs.replace(self.device, name="")))

    def attribute(self, name: str) -> DeviceAttribute | None:
        """The attribute of a fully qualified name: a name without a domain is in the driver's domain."""
        found = self.device.attributes.get(name)
        domain, slash, identifier = name.partition("/")
        if found is None and slash and domain == self.id.driver:
            return self.device.attributes.get(identifier)
        return found


def candidates_of(pools: Sequence[Pool], features: Features) -> tuple[Candidate, ...]:
    """All devices of sound pools, in order of search. Pools in trouble have none."""
    found: list[Candidate] = []
    for pool in pools:
        for source, device in devices_of(pool):
            shareable = features.consumable_capacity and bool(device.allow_multiple_allocations)
            found.append(Candidate(pool, source, device, len(found), shareable=shareable))
    return tuple(found)
