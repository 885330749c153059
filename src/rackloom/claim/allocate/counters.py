"""Shared counters: what is left of a pool's counters, and what a device would draw."""

from collections.abc import Callable, Iterator
from fractions import Fraction

from rackloom.claim.allocate.amounts import in_binary_units, number
from rackloom.claim.allocate.objects import Device
from rackloom.claim.allocate.pools import Pool
from rackloom.claim.allocate.use import DeviceId

CounterKey = tuple[str, str]
"""Counter set and counter."""


def draws(device: Device) -> Iterator[tuple[CounterKey, Fraction]]:
    """What a device draws from the counters of its pool while it is in use."""
    for use in device.consumes_counters:
        for name, counter in use.counters.items():
            yield (use.counter_set, name), number(counter.value)


class CounterBook:
    """What is left of the counters of one pool.

    Devices in use are charged as their driver publishes them now, whatever node they serve. The book may
    start overdrawn (a driver cut a counter under devices in use); then nothing that draws counters is given
    out of the pool, as upstream has it.
    """

    def __init__(self, pool: Pool, in_use: Callable[[DeviceId], bool]) -> None:
        self.left: dict[CounterKey, Fraction] = {
            (one.name, name): number(counter.value)
            for one in pool.counter_sets.values()
            for name, counter in one.counters.items()
        }
        for source in (*pool.slices, *pool.elsewhere):
            for device in source.spec.devices:
                if device.consumes_counters and in_use(DeviceId(pool.driver, pool.name, device.name)):
                    self.charge(device)
        self.at_first = dict(self.left)
        self._overdrawn = [key for key, left in self.left.items() if left < 0]

    def short(self, device: Device) -> str | None:
        """Which counter is short for `device` and by how much; None when there is enough."""
        for key in self._overdrawn:
            return f"{'/'.join(key)} overdrawn by {in_binary_units(-self.left[key])}"
        for key, amount in draws(device):
            if amount > self.left[key]:
                return f"{'/'.join(key)} short by {in_binary_units(amount - self.left[key])}"
        return None

    def tightest(self, device: Device) -> tuple[CounterKey, int] | None:
        """The counter that carries the fewest devices like this one, and how many; None if none does."""
        if self._overdrawn:
            return self._overdrawn[0], 0
        rooms = [(key, int(self.left[key] // amount)) for key, amount in draws(device) if amount]
        return min(rooms, key=lambda room: room[1], default=None)

    def charge(self, device: Device) -> None:
        """Note that `device` came into use."""
        for key, amount in draws(device):
            self.left[key] -= amount

    def refund(self, device: Device) -> None:
        """Note that `device` is free again."""
        for key, amount in draws(device):
            self.left[key] += amount
