"""GPUs that several claims get a share of, by the consumable capacity of Kubernetes 1.34 and later.

The modes, and that in the mode of memory a claim that names none takes all of it, are those of NVIDIA's DRA
driver (ConsumableShares). The scheduler keeps the account: nothing keeps a program from using more memory.
"""

import msgspec

from rackloom.claim.allocate.objects import CapacityRange, CapacityRequestPolicy, Device, DeviceCapacity
from rackloom.errors import Refused

DISABLED, MEMORY, UNLIMITED = "disabled", "memory", "unlimited"
MEBIBYTE = 1 << 20
_MEMORY, _SHARES = "memory", "shares"
_MOST = 10_000


class Shares(msgspec.Struct, frozen=True):
    """How many claims may have one device: one, as many as its memory serves, `count`, or any number."""

    mode: str = DISABLED
    count: int | None = None

    def of(self, device: Device) -> Device:
        """The device as it is published. One for a virtual machine has no memory to share, and one user."""
        memory = device.capacity.get(_MEMORY)
        if self.mode == DISABLED or memory is None:
            return device
        capacity = {**device.capacity, _MEMORY: self._memory(int(str(memory.value)))}
        if self.count is not None:
            capacity[_SHARES] = _counted(self.count)
        return msgspec.structs.replace(device, capacity=capacity, allow_multiple_allocations=True)

    def _memory(self, size: int) -> DeviceCapacity:
        """Only where memory is what is shared does a claim that names none take all of it."""
        least, default = (MEBIBYTE, size // MEBIBYTE * MEBIBYTE) if self.mode == MEMORY else (0, 0)
        steps = CapacityRange(min=str(least), step=str(MEBIBYTE))
        return DeviceCapacity(
            value=str(size), request_policy=CapacityRequestPolicy(default=str(default), valid_range=steps)
        )


def shares_of(text: str) -> Shares:
    """Read `disabled`, `memory`, `unlimited` or a number of claims. Raises `Refused`."""
    if text in (DISABLED, MEMORY, UNLIMITED):
        return Shares(text)
    if text.isascii() and text.isdecimal() and 0 < int(text[:9]) <= _MOST:
        return Shares(_SHARES, int(text[:9]))
    raise Refused(
        f"--consumable-shares is {text!r}",
        nearest_fix=f"say {DISABLED}, {MEMORY}, {UNLIMITED} or a number of 1 to {_MOST}",
    )


def _counted(count: int) -> DeviceCapacity:
    steps = CapacityRange(min="1", step="1")
    return DeviceCapacity(
        value=str(count), request_policy=CapacityRequestPolicy(default="1", valid_range=steps)
    )
