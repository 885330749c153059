"""Claims: the holder of each, and the devices that it holds.

An allocated claim holds its GPUs and its IMEX channel on behalf of its holder: the owner of the pod for which
it is reserved or was made. It holds them until the API server has deallocated it, also after its pod has
ended. Devices that it may only observe (adminAccess) are free for others. An unknown holder has the highest
priority, so that no fix proposes to preempt it.

A part of a GPU keeps others off the whole of it. A claim that counts GPUs holds each once.

The driver of a node reads its own part of a claim as an `AllocatedClaim`.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import (
    AllocationResult,
    Amount,
    ObjectMeta,
    ResourceClaim,
    ResourceClaimSpec,
    readable,
)
from rackloom.core.cluster import names
from rackloom.core.cluster.nodes import PublishedDevice, PublishedDevices
from rackloom.core.cluster.objects import (
    Condition,
    JsonMapping,
    OwnerReference,
    annotations_of,
    conditions_of,
    identity_of,
    owners_of,
)
from rackloom.core.cluster.pods import ApiStruct, PodMetadata, qualified_name
from rackloom.core.cluster.state import HIGHEST_PRIORITY, TrayHold
from rackloom.errors import Refused

ClaimUser = str | tuple[str, str]
"""A pod, by UID, or by namespace and name if an object of a file has no UID."""


def is_allocated(claim: JsonMapping) -> bool:
    """Whether a claim has the devices that it needs, which may be none."""
    status = claim.get("status")
    return isinstance(status, Mapping) and status.get("allocation") is not None


def read_allocations(claims: Iterable[JsonMapping]) -> Iterator[AllocationResult]:
    """The allocations of claims, as the allocator takes them."""
    written = ((claim.get("status") or {}).get("allocation") for claim in claims)
    return readable(filter(None, written), AllocationResult)


def allocated_devices(claim: JsonMapping) -> "tuple[AllocatedDevice, ...]":
    """The devices that are allocated to a claim, also those that it may only observe."""
    allocation = (claim.get("status") or {}).get("allocation") or {}
    results = (allocation.get("devices") or {}).get("results") or ()
    return msgspec.convert(results, tuple[AllocatedDevice, ...])


def held_devices(claim: JsonMapping) -> "Iterator[AllocatedDevice]":
    """The devices that a claim keeps from others."""
    return (device for device in allocated_devices(claim) if not device.admin_access)


def unready_devices(claim: JsonMapping) -> Iterator[tuple[str, Condition]]:
    """Devices of a claim that their driver reports as unusable, or as perhaps unusable soon.

    A driver repeats one cause in several conditions, and it counts once. The only types of conditions that
    drivers agree on end in Ready.
    """
    for device in (claim.get("status") or {}).get("devices") or ():
        not_ready = (
            condition
            for condition in conditions_of({"status": device})
            if condition.type.endswith("Ready") and condition.status != "True"
        )
        causes = {(condition.reason, condition.message): condition for condition in not_ready}
        yield from ((device.get("device") or "", condition) for condition in causes.values())


def allocator_claim(devices: "Iterable[AllocatedDevice]", obj: JsonMapping) -> ResourceClaim:
    """A claim that holds devices, as the allocator takes it. `obj` gives its name.

    Fields that are newer than this program are left out. The allocator would refuse them, and the devices
    would look free.
    """
    status = {"allocation": {"devices": {"results": list(map(msgspec.to_builtins, devices))}}}
    metadata = identity_of(obj, "name", "namespace")
    return msgspec.convert({"metadata": metadata, "status": status}, ResourceClaim)


def class_selectors(device_class: JsonMapping) -> Iterator[str]:
    """The CEL expressions by which a device class selects its devices."""
    for selector in (device_class.get("spec") or {}).get("selectors") or ():
        yield (selector.get("cel") or {}).get("expression") or ""


def unknown_holder(claim: "ClaimShape") -> TrayHold:
    """A user that is not among the pods. The space in its name keeps it apart from every gang."""
    users = (f"pod {reference.name}" for reference in claim.status.reserved_for if reference.name)
    owner = qualified_name(claim.namespace, next(users, f"claim {claim.metadata.name}"))
    return TrayHold(owner=owner, tray="", gpus=0, priority=HIGHEST_PRIORITY)


def claim_holds(
    claim: "ClaimShape", holder: TrayHold, published: PublishedDevices, driver: str
) -> Iterator[TrayHold]:
    """GPUs and the IMEX channel of a claim, as its holder has them. `driver` is that of GPUs."""
    gpus: dict[str, set[str]] = defaultdict(set)
    for device in claim.devices:
        key = (device.pool, device.device)
        if device.admin_access:
            continue
        if device.driver == driver:
            # A device that is no longer published is still held. Drivers name the pool like the node.
            known = published.get(key) or PublishedDevice(device.pool, "/".join(key), is_whole=True)
            gpus[known.node].add(known.gpu)
        elif is_imex_channel(device.driver, device.device):
            yield replace(holder, tray=device.pool, channel=True)
    yield from (replace(holder, tray=node, gpus=len(held)) for node, held in gpus.items())


def claims_to_allocate(
    claims: Iterable[JsonMapping], templates: Iterable[JsonMapping]
) -> Iterator[ResourceClaim]:
    """The claims that pods may name, as they are before an allocation. A template has a claim of its name.

    One that the allocator cannot read is left out.
    """
    named = [(obj, (obj.get("spec") or {}).get("spec") or {}) for obj in templates]
    named += [(obj, obj.get("spec") or {}) for obj in claims]
    yield from readable(
        ({"metadata": identity_of(obj, "name", "namespace"), "spec": spec} for obj, spec in named),
        ResourceClaim,
    )


def is_imex_channel(driver: str, device: str) -> bool:
    """Whether a device is the IMEX channel of its node, which has the name of the pool."""
    return (driver, device) == (names.IMEX_DRIVER, names.CHANNEL_DEVICE)


# The requests of a claim.


_CHANNEL_CLASSES = (names.CHANNEL_CLASS, names.ISOLATED_CHANNEL_CLASS)


class GpuDemand(msgspec.Struct, frozen=True):
    """The demand of a pod, or of one claim."""

    gpus: int = 0
    whole: bool = False
    """A dedicated tray: all of its GPUs, or its IMEX channel, of which a node has one (`channel-0`)."""

    def __add__(self, other: "GpuDemand") -> "GpuDemand":
        return GpuDemand(self.gpus + other.gpus, self.whole or other.whole)


class ClaimRequest(msgspec.Struct, frozen=True):
    """The requests of a ResourceClaim, or of the claims that a template makes."""

    spec: JsonMapping

    @property
    def takes_devices(self) -> bool:
        """Channels count with the tray, and requests with adminAccess take no device."""
        return any(map(_takes_device, self._wanted()))

    @property
    def demand(self) -> GpuDemand:
        """The GPUs by the class `gpu.nvidia.com`, and a tray by the class of channels."""
        demand = GpuDemand()
        for wanted in self._wanted():
            if wanted.get("deviceClassName") == names.CHANNEL_CLASS:
                demand += GpuDemand(whole=True)
            elif wanted.get("deviceClassName") == names.GPU_DRIVER and _takes_device(wanted):
                is_all = wanted.get("allocationMode") == "All"
                demand += GpuDemand(whole=True) if is_all else GpuDemand(int(wanted.get("count", 1)))
        return demand

    def claim(self, name: str) -> ResourceClaim:
        """The claim as the allocator takes it. Raises msgspec.ValidationError."""
        spec = msgspec.convert(self.spec, ResourceClaimSpec)
        return ResourceClaim(metadata=ObjectMeta(name=name), spec=spec)

    def _wanted(self) -> Iterator[JsonMapping]:
        """The first of several alternatives."""
        for request in (self.spec.get("devices") or {}).get("requests") or ():
            alternatives: Sequence[JsonMapping] = request.get("firstAvailable") or ({},)
            yield request.get("exactly") or alternatives[0]


def _takes_device(wanted: JsonMapping) -> bool:
    return wanted.get("deviceClassName") not in _CHANNEL_CLASSES and not wanted.get("adminAccess")


def claim_request(obj: JsonMapping) -> ClaimRequest:
    """The requests of a ResourceClaim, or of the claims that a ResourceClaimTemplate makes."""
    spec = obj["spec"]
    return ClaimRequest(spec.get("spec", spec))


# Shapes of objects of the allocator. Its values refuse fields that are newer than this program, and the
# devices of such a claim would look free.


class AllocatedDevice(ApiStruct, frozen=True, omit_defaults=True):
    """A device that the scheduler allocated to a claim, with the fields that bear on other claims."""

    driver: str
    pool: str
    device: str
    request: str = ""
    """As allocated, `request` or `request/subrequest`."""
    admin_access: bool | None = None
    share_id: str | None = msgspec.field(default=None, name="shareID")
    consumed_capacity: Mapping[str, Amount] | None = None

    @property
    def main_request(self) -> str:
        """The request without its subrequest, as kubelet wants it."""
        return self.request.partition("/")[0]


class _DeviceResults(ApiStruct, frozen=True):
    results: tuple[AllocatedDevice, ...] = ()


class _Allocation(ApiStruct, frozen=True):
    devices: _DeviceResults = _DeviceResults()


class _ClaimStatus(ApiStruct, frozen=True):
    allocation: _Allocation = _Allocation()
    reserved_for: tuple[OwnerReference, ...] = ()


class ClaimShape(ApiStruct, frozen=True):
    """A ResourceClaim, as far as its holder and its devices go."""

    metadata: PodMetadata
    status: _ClaimStatus = _ClaimStatus()

    @property
    def namespace(self) -> str:
        """Its namespace. kubectl takes the default namespace if none is written."""
        return self.metadata.namespace or "default"

    @property
    def devices(self) -> tuple[AllocatedDevice, ...]:
        """The devices that are allocated to it."""
        return self.status.allocation.devices.results

    @property
    def users(self) -> Iterator[ClaimUser]:
        """Pods that use it, and the one it was made for."""
        for reference in (*self.status.reserved_for, *(self.metadata.owner_references or ())):
            if reference.uid:
                yield reference.uid
            elif reference.name:
                yield self.namespace, reference.name


# Claims as the driver of a node sees them.


class ClaimRef(msgspec.Struct, frozen=True, kw_only=True):
    """A claim as kubelet names it."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        """`namespace/name`, for messages."""
        return f"{self.namespace}/{self.name}"


class OpaqueConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One opaque configuration for this driver, of the device class or of the claim."""

    source: Literal["FromClass", "FromClaim"]
    requests: tuple[str, ...]
    """Requests that it is for. Empty means all."""
    parameters: Mapping[str, Any]

    def applies_to(self, result: AllocatedDevice) -> bool:
        """Whether it was written for the request of `result`, or for all."""
        return not self.requests or result.request in self.requests or result.main_request in self.requests


class ClaimConsumer(msgspec.Struct, frozen=True, kw_only=True):
    """An object that may use a claim. `resource` is `pods` for a pod."""

    resource: str = ""
    name: str = ""
    uid: str = ""


class AllocatedClaim(msgspec.Struct, frozen=True, kw_only=True):
    """An allocated claim, as far as this driver is concerned."""

    ref: ClaimRef
    results: tuple[AllocatedDevice, ...]
    configs: tuple[OpaqueConfig, ...]
    """In order of precedence: a later one wins."""
    fingerprint: str
    """Changes with the allocation and with its consumers."""
    of_pod: str | None = None
    """The pod for which it was made from a template, or None for a claim that a user created."""
    consumers: tuple[ClaimConsumer, ...] = ()

    def configs_for(self, result: AllocatedDevice) -> tuple[OpaqueConfig, ...]:
        """Configurations of one result, the one that wins last."""
        return tuple(config for config in self.configs if config.applies_to(result))


def claim_consumers(claim: JsonMapping) -> tuple[ClaimConsumer, ...]:
    """The pods for which a claim is reserved."""
    return msgspec.convert((claim.get("status") or {}).get("reservedFor") or (), tuple[ClaimConsumer, ...])


POD_CLAIM_NAME = "resource.kubernetes.io/pod-claim-name"
"""Annotation that the control plane puts on a claim which it made from a template."""


def read_claim(obj: JsonMapping, ref: ClaimRef, driver: str) -> AllocatedClaim:
    """The part of a ResourceClaim that concerns `driver`. Raises Refused if it is not allocated."""
    status = obj.get("status") or {}
    devices = (status.get("allocation") or {}).get("devices")
    if devices is None:
        raise Refused(
            f"claim {ref} is not allocated",
            nearest_fix="let the scheduler place the pod: spec.nodeName must not be set by hand",
        )
    results = tuple(device for device in allocated_devices(obj) if device.driver == driver)
    configs = [
        OpaqueConfig(
            source=entry["source"],
            requests=tuple(entry.get("requests") or ()),
            parameters=entry["opaque"]["parameters"],
        )
        for entry in devices.get("config") or ()
        if (entry.get("opaque") or {}).get("driver") == driver
    ]
    # Drivers write `status.devices` while they prepare, so the fingerprint leaves it out.
    fixed = {part: status.get(part) for part in ("allocation", "reservedFor")}
    # A claim made from a template has its pod as its owner, and an annotation. Either is enough.
    pods = [owner.name for owner in owners_of(obj) if owner.kind == "Pod"]
    return AllocatedClaim(
        ref=ref,
        results=results,
        # Those of the device class come first, so that those of the claim win.
        configs=tuple(sorted(configs, key=lambda config: config.source == "FromClaim")),
        fingerprint=hashlib.sha256(msgspec.json.encode(fixed, order="sorted")).hexdigest(),
        of_pod=pods[0] if pods else "unknown" if POD_CLAIM_NAME in annotations_of(obj) else None,
        consumers=claim_consumers(obj),
    )
