"""Claims: who holds one, and what it holds.

An allocated claim holds its GPUs and its IMEX channel on behalf of its holder: the owner of the pod for which
it is reserved or was made. It holds them until the API server has deallocated it, also after its pod has
ended. Devices that it may only observe (adminAccess) are free for others. An unknown holder has the highest
priority, so that no fix proposes to preempt it.

A part of a GPU keeps others off the whole of it. A claim that counts GPUs holds each once.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import AllocationResult, ResourceClaim, readable
from rackloom.core.cluster import names
from rackloom.core.cluster.metadata import OwnerReference, identity_of
from rackloom.core.cluster.nodes import PublishedDevice, PublishedDevices
from rackloom.core.cluster.objects import JsonMapping, allocated_devices
from rackloom.core.cluster.pods import ApiStruct, PodMetadata, qualified_name
from rackloom.core.cluster.state import HIGHEST_PRIORITY, TrayHold

ClaimUser = str | tuple[str, str]
"""A pod, by UID, or by namespace and name if an object of a file has no UID."""


def claim_users(claim: JsonMapping) -> Iterator[ClaimUser]:
    """Pods that use a claim, and the one it was made for."""
    meta = claim.get("metadata") or {}
    reserved = (claim.get("status") or {}).get("reservedFor") or ()
    for reference in (*reserved, *(meta.get("ownerReferences") or ())):
        if reference.get("uid"):
            yield reference["uid"]
        elif reference.get("name"):
            yield (meta.get("namespace") or "default", reference["name"])


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


def unknown_holder(claim: JsonMapping) -> TrayHold:
    """A user that is not among the pods. The space in its name keeps it apart from every gang."""
    meta = claim.get("metadata") or {}
    reserved = (claim.get("status") or {}).get("reservedFor") or ()
    user = next((f"pod {reference['name']}" for reference in reserved if reference.get("name")), None)
    owner = qualified_name(meta, user or f"claim {meta.get('name')}")
    return TrayHold(owner=owner, tray="", gpus=0, priority=HIGHEST_PRIORITY)


def claim_holds(
    claim: JsonMapping, holder: TrayHold, published: PublishedDevices, driver: str
) -> Iterator[TrayHold]:
    """GPUs and the IMEX channel of a claim, as its holder has them. `driver` is that of GPUs."""
    gpus: dict[str, set[str]] = defaultdict(set)
    for of, pool, name in held_devices(claim):
        if of == driver:
            # A device that is published no more is still held. Drivers name the pool like the node.
            known = published.get((pool, name)) or PublishedDevice(pool, f"{pool}/{name}", is_whole=True)
            gpus[known.node].add(known.gpu)
        elif is_imex_channel(of, name):
            yield replace(holder, tray=pool, channel=True)
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


# Shapes of objects of the allocator. Its values refuse fields that are newer than this program, and the
# devices of such a claim would look free.


class _DeviceResult(ApiStruct, frozen=True):
    driver: str
    pool: str
    device: str
    admin_access: bool | None = None


class _DeviceResults(ApiStruct, frozen=True):
    results: tuple[_DeviceResult, ...] | None = None


class _Allocation(ApiStruct, frozen=True):
    devices: _DeviceResults | None = None


class _ClaimStatus(ApiStruct, frozen=True):
    allocation: _Allocation | None = None
    reserved_for: tuple[OwnerReference, ...] | None = None


class ClaimShape(ApiStruct, frozen=True):
    """A ResourceClaim, as far as its holder and its devices go."""

    metadata: PodMetadata
    status: _ClaimStatus | None = None
