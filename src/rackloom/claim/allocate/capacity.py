"""How much of a device a request takes: defaults, rounding and limits of consumable capacity."""

from collections.abc import Mapping
from fractions import Fraction

from rackloom.claim.allocate.amounts import in_binary_units, number
from rackloom.claim.allocate.causes import Cause, Kind
from rackloom.claim.allocate.objects import (
    Amount,
    CapacityRange,
    CapacityRequestPolicy,
    Device,
    DeviceCapacity,
)

Consumption = Mapping[str, Amount]
"""Amount per capacity name, as results print it."""


def consumption(amounts: Mapping[str, Amount], device: Device) -> Consumption | Cause:
    """What a share of `device` takes for a request of `amounts`, or why the device cannot serve it."""
    unknown = next((name for name in amounts if name not in device.capacity), None)
    if unknown is not None:
        return Cause(Kind.CAPACITY, f"has no capacity {unknown}")
    taken = {name: _taken(amounts.get(name), one) for name, one in device.capacity.items()}
    for name, amount in taken.items():
        policy = device.capacity[name].request_policy
        if policy is not None and not _allowed(number(amount), policy):
            return Cause(Kind.CAPACITY, f"{name} is not given out in amounts of {amount}")
    return taken


def shortage(device: Device, taken: Mapping[str, Fraction], more: Consumption) -> Cause | None:
    """Which capacity of `device` is short when `taken` is in use and `more` is asked for."""
    for name, amount in more.items():
        left = number(device.capacity[name].value) - taken.get(name, Fraction(0))
        if number(amount) > left:
            return Cause(Kind.CAPACITY, f"{name} short by {in_binary_units(number(amount) - left)}")
    return None


def _taken(asked: Amount | None, capacity: DeviceCapacity) -> Amount:
    policy = capacity.request_policy
    if asked is None:
        return capacity.value if policy is None or policy.default is None else policy.default
    if policy is None:
        return asked
    if policy.valid_range is not None:
        return _into_range(asked, policy.valid_range)
    fitting = (value for value in policy.valid_values or () if number(value) >= number(asked))
    return next(fitting, asked)


def _into_range(asked: Amount, allowed: CapacityRange) -> Amount:
    low, wanted = number(allowed.min), number(asked)
    if wanted <= low:
        return allowed.min
    if not allowed.step or not number(allowed.step):
        return asked
    step = number(allowed.step)
    return in_binary_units(low - (low - wanted) // step * step)


def _allowed(amount: Fraction, policy: CapacityRequestPolicy) -> bool:
    if policy.default is not None and amount == number(policy.default):
        return True
    if policy.valid_range is not None:
        return _within(amount, policy.valid_range)
    return not policy.valid_values or amount in [number(value) for value in policy.valid_values]


def _within(amount: Fraction, allowed: CapacityRange) -> bool:
    if allowed.max is not None and amount > number(allowed.max):
        return False
    step = number(allowed.step) if allowed.step else Fraction(0)
    return not step or (amount - number(allowed.min)) % step == 0
