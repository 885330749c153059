"""What is asked for, in one shape: requests and alternatives as asks, refused here if they make no sense."""

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property

import msgspec

from rackloom.claim.allocate.features import Features
from rackloom.claim.allocate.objects import (
    Amount,
    DeviceClass,
    DeviceRequest,
    DeviceSelector,
    DeviceSubRequest,
    DeviceToleration,
    ExactDeviceRequest,
    ResourceClaim,
)
from rackloom.claim.allocate.outcome import Stop

MAX_RESULTS = 32
"""Devices that one claim can hold (AllocationResultsMaxSize of the API)."""


class Ask(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
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
    """Devices asked for; of mode All it is not known here."""
    admin: bool
    tolerations: tuple[DeviceToleration, ...]
    amounts: Mapping[str, Amount]
    """Capacity asked for of each device."""

    @property
    def name(self) -> str:
        """`request` or `request/alternative`, as results name it."""
        return self.request if self.alternative is None else f"{self.request}/{self.alternative}"

    @cached_property
    def likeness(self) -> Hashable:
        """Equal for asks that treat every device the same: requests often repeat."""
        tolerated, amounts = self.tolerations, frozenset(self.amounts.items())
        return self.device_class.metadata.name, self.selectors, tolerated, amounts

    def named_in(self, requests: Sequence[str]) -> bool:
        """Whether a list of request names covers this ask (an empty list covers all)."""
        return not requests or self.request in requests or self.name in requests


Choice = tuple[Ask, ...]
"""The asks of one request of which one is to be met, best first."""


def choices_of(
    claims: Sequence[ResourceClaim], classes: Mapping[str, DeviceClass], features: Features
) -> tuple[tuple[Choice, ...], ...]:
    """Per claim and request, its alternatives. Raises Stop for a request that no node could meet."""
    return tuple(
        tuple(_choice(index, claim, request, classes, features) for request in claim.spec.devices.requests)
        for index, claim in enumerate(claims)
    )


def _choice(
    claim: int,
    owner: ResourceClaim,
    request: DeviceRequest,
    classes: Mapping[str, DeviceClass],
    features: Features,
) -> Choice:
    where = f"claim {title(owner)}, request {request.name}"
    if request.first_available:
        if not features.prioritized_list:
            raise Stop(f"{where}: has alternatives, but the feature PrioritizedList is off")
        return tuple(
            _ask(claim, owner, request.name, one.name, one, classes, features)
            for one in request.first_available
        )
    if request.exactly is None:
        raise Stop(f"{where}: neither exactly nor firstAvailable is set (unsupported request type?)")
    return (_ask(claim, owner, request.name, None, request.exactly, classes, features),)


def _ask(
    claim: int,
    owner: ResourceClaim,
    request: str,
    alternative: str | None,
    wanted: ExactDeviceRequest | DeviceSubRequest,
    classes: Mapping[str, DeviceClass],
    features: Features,
) -> Ask:
    name = request if alternative is None else f"{request}/{alternative}"
    where = f"claim {title(owner)}, request {name}"
    admin = wanted.admin_access if isinstance(wanted, ExactDeviceRequest) else None
    _check_features(where, wanted, admin, features)
    if wanted.allocation_mode not in ("ExactCount", "All"):
        raise Stop(f"{where}: unsupported allocation mode {wanted.allocation_mode or '(none)'}")
    return Ask(
        claim=claim,
        claim_name=title(owner),
        request=request,
        alternative=alternative,
        device_class=_class(where, wanted.device_class_name, classes),
        selectors=wanted.selectors,
        everything=wanted.allocation_mode == "All",
        count=wanted.count,
        admin=bool(admin),
        tolerations=wanted.tolerations,
        amounts=wanted.capacity.requests if wanted.capacity else {},
    )


def _check_features(
    where: str, wanted: ExactDeviceRequest | DeviceSubRequest, admin: bool | None, features: Features
) -> None:
    if wanted.capacity is not None and not features.consumable_capacity:
        raise Stop(f"{where}: has capacity requests, but the feature ConsumableCapacity is off")
    if any(selector.cel is None for selector in wanted.selectors):
        raise Stop(f"{where}: a selector has no CEL expression (unsupported selector type?)")
    if admin is not None and not features.admin_access:
        raise Stop(f"{where}: admin access is requested, but the feature AdminAccess is off")
    if wanted.derived_attributes:
        raise Stop(f"{where}: derived attributes are not supported")


def _class(where: str, name: str, classes: Mapping[str, DeviceClass]) -> DeviceClass:
    if not name:
        raise Stop(f"{where}: no device class is named (unsupported request type?)")
    if name not in classes:
        raise Stop(f"{where}: there is no device class {name}")
    return classes[name]


def title(claim: ResourceClaim) -> str:
    """Name of a claim in messages: with its namespace where it has one."""
    meta = claim.metadata
    name = meta.name or meta.generate_name or "(unnamed)"
    return f"{meta.namespace}/{name}" if meta.namespace else name
