"""What is in use before an allocation starts: the books that the allocator adds to and never edits."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from rackloom.claim.allocate.objects import Amount, DeviceResult, ResourceClaim
from rackloom.claim.allocate.quantity import Quantity


class DeviceId(NamedTuple):
    """A device of the cluster: its name is unique within its pool."""

    driver: str
    pool: str
    device: str

    def __str__(self) -> str:
        return "/".join(self)


class InUse(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that earlier allocations hold."""

    dedicated: frozenset[DeviceId] = frozenset()
    """Given to one claim."""
    shared: frozenset[DeviceId] = frozenset()
    """Of which shares were given."""
    consumed: Mapping[DeviceId, Mapping[str, Amount]] = {}
    """Capacity that the shares of a device took together."""
    holders: Mapping[DeviceId, tuple[str, ...]] = {}
    """Names of the claims that hold a device, where known: for explanations."""


def in_use_by(claims: Iterable[ResourceClaim], *, shares: bool = True) -> InUse:
    """The books of `claims`, as their status has them. Results with admin access hold nothing.

    With `shares` (the feature ConsumableCapacity), a result with a share id is a share; without it, every
    result holds its whole device.
    """
    dedicated, shared = set[DeviceId](), set[DeviceId]()
    consumed: dict[DeviceId, dict[str, Quantity]] = {}
    holders: dict[DeviceId, list[str]] = {}
    for claim in claims:
        for result in claim.status.allocation.devices.results if claim.status.allocation else ():
            if result.admin_access:
                continue
            device = DeviceId(result.driver, result.pool, result.device)
            holders.setdefault(device, []).append(claim.metadata.name)
            if shares and result.share_id is not None:
                shared.add(device)
                _add(consumed, device, result)
            else:
                dedicated.add(device)
    return InUse(
        dedicated=frozenset(dedicated),
        shared=frozenset(shared),
        consumed={device: {name: str(q) for name, q in book.items()} for device, book in consumed.items()},
        holders={device: tuple(names) for device, names in holders.items()},
    )


def _add(consumed: dict[DeviceId, dict[str, Quantity]], device: DeviceId, result: DeviceResult) -> None:
    if not result.consumed_capacity:
        return
    book = consumed.setdefault(device, {})
    for name, amount in result.consumed_capacity.items():
        more = Quantity.parse(str(amount))
        book[name] = book[name] + more if name in book else more
