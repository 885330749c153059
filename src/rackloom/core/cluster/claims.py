"""Claims: who holds one, and what it holds.

An allocated claim holds its GPUs and its IMEX channel on behalf of its holder: the owner of the pod for which
it is reserved or was made. It holds them until the API server has deallocated it, also after its pod has
ended. Devices that it may only observe (adminAccess) are free for others. An unknown holder has the highest
priority, so that no fix proposes to preempt it.

A part of a GPU keeps others off the whole of it. A claim that counts GPUs holds each once.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import (
    AllocationResult,
    ObjectMeta,
    ResourceClaim,
    ResourceClaimSpec,
    readable,
)
from rackloom.core.cluster import names
from rackloom.core.cluster.metadata import OwnerReference, identity_of
from rackloom.core.cluster.nodes import PublishedDevice, PublishedDevices
from rackloom.core.cluster.objects import JsonMapping, allocated_devices
from rackloom.core.cluster.pods import ApiStruct, PodMetadata, qualified_name
from rackloom.core.cluster.state import HIGHEST_PRIORITY, TrayHold

ClaimUser = str | tuple[str, str]
"""A pod, by UID, or by namespace and name if an object of a file has no UID."""


class ClaimConsumer(ApiStruct, frozen=True, kw_only=True):
    """An object that may use a claim; `resource` is `pods` for a pod."""

    resource: str = ""
    name: str = ""
    uid: str = ""


def claim_consumers(claim: JsonMapping) -> tuple[ClaimConsumer, ...]:
    """The pods for which a claim is reserved."""
    return msgspec.convert((claim.get("status") or {}).get("reservedFor") or (), tuple[ClaimConsumer, ...])


def is_allocated(claim: JsonMapping) -> bool:
    """Whether a claim has what it needs, which may be no device."""
    return (claim.get("status") or {}).get("allocation") is not None


def read_allocations(claims: Iterable[JsonMapping]) -> Iterator[AllocationResult]:
    """What claims have, as the allocator takes it."""
    written = ((claim.get("status") or {}).get("allocation") for claim in claims)
    return readable(filter(None, written), AllocationResult)


def held_devices(claim: JsonMapping) -> Iterator[tuple[str, str, str]]:
    """Driver, pool and name of each device that a claim keeps from others."""
    for device in allocated_devices(claim):
        if not device.get("adminAccess"):
            yield device["driver"], device["pool"], device["device"]


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
        if device.driver == driver and not device.admin_access:
            # A device that is published no more is still held. Drivers name the pool like the node.
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
    """Whether a device is the IMEX channel of its node, whose name is that of the pool."""
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
        """Of several alternatives, the first."""
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


class _DeviceResult(ApiStruct, frozen=True):
    driver: str
    pool: str
    device: str
    admin_access: bool | None = None


class _DeviceResults(ApiStruct, frozen=True):
    results: tuple[_DeviceResult, ...] = ()


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
    def devices(self) -> tuple[_DeviceResult, ...]:
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
