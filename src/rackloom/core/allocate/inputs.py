"""The inputs of one allocation beside the slices: feature gates, devices in use, and requests.

`Features` are the switches of upstream's allocator. If a feature is off, its fields are refused or
ignored, or its devices are ineligible, exactly as in upstream.

`InUse` records the devices that earlier allocations hold: whole devices, shared devices and the capacity
that their shares took. `in_use_by` derives it from the status of claims. Results with admin access hold
nothing. The allocator reads this record and never changes it.

`alternatives_of` brings claims into one shape. A request becomes a tuple of `RequestAlternative`: one
for `exactly`, or several, best first, for `firstAvailable`. Requests that no node could meet are refused
here: a feature that is off, an unknown class, an allocation mode or selector of an unknown kind.
Alternatives are compared by identity. `likeness` is equal for those that treat every device the same.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec

from rackloom.core.allocate.objects import (
    Amount,
    DeviceClass,
    DeviceResult,
    DeviceSelector,
    DeviceToleration,
    ExactDeviceRequest,
    RequestSpec,
    ResourceClaim,
)
from rackloom.core.allocate.outcome import AllocationStopped
from rackloom.core.allocate.quantity import Quantity

# Feature gates of upstream's allocator.


class Features(msgspec.Struct, frozen=True, kw_only=True, rename="pascal", forbid_unknown_fields=True):
    """Allocator features. The defaults are those of Kubernetes 1.36 and later.

    Compatibility groups and derived attributes are alpha, but on by default. An API server without the
    feature drops the fields, so if they are present, they are meant.
    """

    admin_access: bool = True
    compatibility_groups: bool = True
    consumable_capacity: bool = True
    derived_attributes: bool = True
    device_binding_and_status: bool = True
    device_taints: bool = True
    list_type_attributes: bool = False
    partitionable_devices: bool = True
    prioritized_list: bool = True


# Devices in use before the allocation starts.


class DeviceId(NamedTuple):
    """A device of the cluster: its name is unique within its pool."""

    driver: str
    pool: str
    device: str

    def __str__(self) -> str:
        return "/".join(self)

    @classmethod
    def of(cls, result: DeviceResult) -> "DeviceId":
        """The device that a result names."""
        return cls(result.driver, result.pool, result.device)


class InUse(msgspec.Struct, frozen=True, kw_only=True):
    """Devices that earlier allocations hold."""

    dedicated: frozenset[DeviceId] = frozenset()
    """Devices that are given to one claim."""
    shared: frozenset[DeviceId] = frozenset()
    """Devices that are given in shares."""
    consumed: Mapping[DeviceId, Mapping[str, Amount]] = {}
    """The capacity that the shares of a device took together."""
    holders: Mapping[DeviceId, tuple[str, ...]] = {}
    """The names, if known, of the claims that hold a device. For explanations only."""


def in_use_by(claims: Iterable[ResourceClaim], *, shares: bool = True) -> InUse:
    """The devices that `claims` hold according to their status. Results with admin access hold nothing.

    With `shares` (the feature ConsumableCapacity), a result with a share id is a share. Without it, every
    result holds its whole device.
    """
    dedicated, shared = set[DeviceId](), set[DeviceId]()
    consumed: dict[DeviceId, dict[str, Quantity]] = {}
    holders: dict[DeviceId, list[str]] = {}
    for claim in claims:
        for result in claim.status.allocation.devices.results if claim.status.allocation else ():
            if result.admin_access:
                continue
            device = DeviceId.of(result)
            holders.setdefault(device, []).append(claim.metadata.name)
            if not shares or result.share_id is None:
                dedicated.add(device)
                continue
            shared.add(device)
            for name, amount in (result.consumed_capacity or {}).items():
                taken, more = consumed.setdefault(device, {}), Quantity.parse(str(amount))
                taken[name] = taken[name] + more if name in taken else more
    return InUse(
        dedicated=frozenset(dedicated),
        shared=frozenset(shared),
        consumed={device: {name: str(q) for name, q in taken.items()} for device, taken in consumed.items()},
        holders={device: tuple(names) for device, names in holders.items()},
    )


# Requests of claims in one shape.


MAX_RESULTS = 32
"""The most devices that one claim can hold (AllocationResultsMaxSize of the API)."""


class RequestAlternative(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """A request without alternatives, or one alternative of a request. Compared by identity."""

    claim: int
    claim_name: str
    request: str
    alternative: str | None
    device_class: DeviceClass
    selectors: tuple[DeviceSelector, ...]
    everything: bool
    """Allocation mode All: every matching device or nothing."""
    count: int
    """The number of devices requested. It is not known here for mode All."""
    admin: bool
    tolerations: tuple[DeviceToleration, ...]
    amounts: Mapping[str, Amount]
    """The capacity requested of each device."""
    derived: Mapping[str, str]
    """Expressions of derived attributes, by the name under which constraints compare them."""

    @property
    def name(self) -> str:
        """`request` or `request/alternative`, as results name it."""
        return self.request if self.alternative is None else f"{self.request}/{self.alternative}"

    @cached_property
    def likeness(self) -> Hashable:
        """A key that is equal for alternatives that treat every device the same. Requests often repeat."""
        tolerated, amounts = self.tolerations, frozenset(self.amounts.items())
        return self.device_class.metadata.name, self.selectors, tolerated, amounts

    def named_in(self, requests: Sequence[str]) -> bool:
        """Whether a list of request names covers this alternative. An empty list covers all."""
        return not requests or self.request in requests or self.name in requests


Alternatives = tuple[RequestAlternative, ...]
"""The alternatives of one request, best first. One of them must be met."""


def alternatives_of(
    claims: Sequence[ResourceClaim], classes: Mapping[str, DeviceClass], features: Features
) -> tuple[tuple[Alternatives, ...], ...]:
    """The alternatives by claim and request. Raises AllocationStopped if no node could meet a request."""
    found = []
    for number, claim in enumerate(claims):
        choices = []
        for request in claim.spec.devices.requests:
            where = f"claim {claim_title(claim)}, request {request.name}"
            if request.first_available and not features.prioritized_list:
                raise AllocationStopped(f"{where}: has alternatives, but the feature PrioritizedList is off")
            wanted: Sequence[RequestSpec] = request.first_available
            if not wanted and request.exactly is not None:
                wanted = (request.exactly,)
            # A newer API may have kinds of requests that this decoder drops.
            if not wanted:
                raise AllocationStopped(
                    f"{where}: neither exactly nor firstAvailable is set (unsupported request type?)"
                )
            either = [_alternative(number, claim, request.name, spec, classes, features) for spec in wanted]
            choices.append(tuple(either))
        found.append(tuple(choices))
    return tuple(found)


def _alternative(
    number: int,
    claim: ResourceClaim,
    request: str,
    wanted: RequestSpec,
    classes: Mapping[str, DeviceClass],
    features: Features,
) -> RequestAlternative:
    """A request as the search reads it. Raises AllocationStopped if no node could meet it."""
    alternative = None if isinstance(wanted, ExactDeviceRequest) else wanted.name
    name = request if alternative is None else f"{request}/{alternative}"
    where = f"claim {claim_title(claim)}, request {name}"
    # Fields of a feature that is off cannot be ignored, because another device might be given then.
    if wanted.capacity is not None and not features.consumable_capacity:
        raise AllocationStopped(f"{where}: has capacity requests, but the feature ConsumableCapacity is off")
    if any(selector.cel is None for selector in wanted.selectors):
        raise AllocationStopped(f"{where}: a selector has no CEL expression (unsupported selector type?)")
    admin = wanted.admin_access if isinstance(wanted, ExactDeviceRequest) else None
    if admin is not None and not features.admin_access:
        raise AllocationStopped(f"{where}: admin access is requested, but the feature AdminAccess is off")
    if wanted.derived_attributes and not features.derived_attributes:
        raise AllocationStopped(f"{where}: has derived attributes, but the feature DerivedAttributes is off")
    if wanted.allocation_mode not in ("ExactCount", "All"):
        raise AllocationStopped(f"{where}: unsupported allocation mode {wanted.allocation_mode or '(none)'}")
    device_class = classes.get(wanted.device_class_name)
    if not wanted.device_class_name:
        raise AllocationStopped(f"{where}: no device class is named (unsupported request type?)")
    if device_class is None:
        raise AllocationStopped(f"{where}: there is no device class {wanted.device_class_name}")
    return RequestAlternative(
        claim=number,
        claim_name=claim_title(claim),
        request=request,
        alternative=alternative,
        device_class=device_class,
        selectors=wanted.selectors,
        everything=wanted.allocation_mode == "All",
        count=wanted.count,
        admin=bool(admin),
        tolerations=wanted.tolerations,
        amounts=wanted.capacity.requests if wanted.capacity else {},
        derived={attribute.name: attribute.expression for attribute in wanted.derived_attributes},
    )


def claim_title(claim: ResourceClaim) -> str:
    """The name of a claim in messages, with its namespace if it has one."""
    meta = claim.metadata
    name = meta.name or meta.generate_name or "(unnamed)"
    return f"{meta.namespace}/{name}" if meta.namespace else name
