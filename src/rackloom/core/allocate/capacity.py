"""Consumable capacity and shared counters: the amounts that a device takes, and those that are left.

Consumable capacity belongs to one device that several requests share. `consumption_of` computes the
amount that a share takes: the requested amount, or the default of the request policy, or the whole
capacity. It rounds up to the next valid value or step and checks the limits. `capacity_shortage` names
the capacity that is too small for one more share.

Shared counters belong to a pool. Partitions of a GPU draw from the same counters, so allocating one
partition leaves less for the others. `CounterBook` keeps the amounts that are left of one pool's counters.
Devices in use are charged as their driver publishes them now, on all nodes. A book may start overdrawn,
because a driver can cut a counter under devices in use. Then, as in upstream, no device that draws from
counters is given out.

All arithmetic is exact (Fraction).
"""

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction

from rackloom.core.allocate.inputs import DeviceId
from rackloom.core.allocate.objects import (
    Amount,
    CapacityRequestPolicy,
    Device,
    DeviceCapacity,
)
from rackloom.core.allocate.outcome import Cause, CauseKind
from rackloom.core.allocate.pools import Pool
from rackloom.core.allocate.quantity import exact_value, in_binary_units

# Consumable capacity of one device.


Consumption = Mapping[str, Amount]
"""The amount of each capacity by name, as results print it."""


def consumption_of(amounts: Mapping[str, Amount], device: Device) -> Consumption | Cause:
    """The amounts that a share of `device` takes for a request of `amounts`, or why it cannot serve it."""
    unknown = next((name for name in amounts if name not in device.capacity), None)
    if unknown is not None:
        return Cause(CauseKind.CAPACITY, f"has no capacity {unknown}")
    taken = {name: _amount_taken(amounts.get(name), capacity) for name, capacity in device.capacity.items()}
    # Rounding reaches a valid amount only if there is one. Above the last valid value, or above the range,
    # the requested amount stays as it is.
    for name, amount in taken.items():
        policy = device.capacity[name].request_policy
        if policy is not None and not _policy_allows(exact_value(amount), policy):
            return Cause(CauseKind.CAPACITY, f"{name} is not given out in amounts of {amount}")
    return taken


def capacity_shortage(device: Device, taken: Mapping[str, Fraction], more: Consumption) -> Cause | None:
    """The capacity of `device` that is short if `taken` is in use and `more` is requested."""
    for name, amount in more.items():
        left = exact_value(device.capacity[name].value) - taken.get(name, Fraction(0))
        if exact_value(amount) > left:
            return Cause(CauseKind.CAPACITY, f"{name} short by {in_binary_units(exact_value(amount) - left)}")
    return None


def _amount_taken(asked: Amount | None, capacity: DeviceCapacity) -> Amount:
    policy = capacity.request_policy
    if asked is None:
        return capacity.value if policy is None or policy.default is None else policy.default
    if policy is None:
        return asked
    wanted, allowed = exact_value(asked), policy.valid_range
    if allowed is None:
        # Valid values are in ascending order, so the first that is large enough is the nearest.
        return next((value for value in policy.valid_values or () if exact_value(value) >= wanted), asked)
    low = exact_value(allowed.min)
    if wanted <= low:
        return allowed.min
    if not allowed.step or not exact_value(allowed.step):
        return asked
    step = exact_value(allowed.step)
    # Floor division of a negative number rounds away from zero: up to the next step.
    return in_binary_units(low - (low - wanted) // step * step)


def _policy_allows(amount: Fraction, policy: CapacityRequestPolicy) -> bool:
    # The default is always valid, even outside the range.
    if policy.default is not None and amount == exact_value(policy.default):
        return True
    allowed = policy.valid_range
    if allowed is None:
        return not policy.valid_values or amount in [exact_value(value) for value in policy.valid_values]
    if allowed.max is not None and amount > exact_value(allowed.max):
        return False
    # Steps count from the minimum, not from zero.
    step = exact_value(allowed.step) if allowed.step else Fraction(0)
    return not step or (amount - exact_value(allowed.min)) % step == 0


# Shared counters of a pool.


CounterKey = tuple[str, str]
"""The names of the counter set and the counter."""


def counter_draws(device: Device) -> Iterator[tuple[CounterKey, Fraction]]:
    """The amounts that a device draws from the counters of its pool while it is in use."""
    for use in device.consumes_counters:
        for name, counter in use.counters.items():
            yield (use.counter_set, name), exact_value(counter.value)


class CounterBook:
    """The amounts that are left of the counters of one pool.

    Devices in use are charged as their driver publishes them now, on all nodes. The book may start
    overdrawn if a driver cut a counter under devices in use. Then, as in upstream, no device that draws
    from counters is given out of the pool.
    """

    def __init__(self, pool: Pool, in_use: Callable[[DeviceId], bool]) -> None:
        self.left: dict[CounterKey, Fraction] = {
            (counter_set.name, name): exact_value(counter.value)
            for counter_set in pool.counter_sets.values()
            for name, counter in counter_set.counters.items()
        }
        # Devices of other nodes draw from the same counters, and count as their driver publishes them now.
        for source in (*pool.slices, *pool.elsewhere):
            for device in source.spec.devices:
                if device.consumes_counters and in_use(DeviceId(pool.driver, pool.name, device.name)):
                    self.charge(device)
        self.at_first = dict(self.left)
        self._overdrawn = [key for key, left in self.left.items() if left < 0]

    def short(self, device: Device) -> str | None:
        """The counter that is short for `device` and the missing amount, or None if there is enough."""
        # If any counter of a pool is overdrawn, it gives out nothing: the first such counter is the reason.
        for key in self._overdrawn:
            return f"{'/'.join(key)} overdrawn by {in_binary_units(-self.left[key])}"
        for key, amount in counter_draws(device):
            if amount > self.left[key]:
                return f"{'/'.join(key)} short by {in_binary_units(amount - self.left[key])}"
        return None

    def suffices(self, device: Device) -> bool:
        """Whether there is enough for `device`. If not, `short` names the counter."""
        return not self._overdrawn and all(amount <= self.left[key] for key, amount in counter_draws(device))

    def tightest(self, device: Device) -> tuple[CounterKey, int] | None:
        """The counter that allows the fewest devices like this one, and the number. None if there is none."""
        if self._overdrawn:
            return self._overdrawn[0], 0
        # A counter that the device draws nothing from does not bound it.
        rooms = [(key, int(self.left[key] // amount)) for key, amount in counter_draws(device) if amount]
        return min(rooms, key=lambda room: room[1], default=None)

    def charge(self, device: Device) -> None:
        """Note that `device` came into use."""
        for key, amount in counter_draws(device):
            self.left[key] -= amount

    def refund(self, device: Device) -> None:
        """Note that `device` is free again."""
        for key, amount in counter_draws(device):
            self.left[key] += amount
