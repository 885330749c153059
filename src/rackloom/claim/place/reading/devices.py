"""What drivers publish and claims hold, as far as placement counts it."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping

import msgspec
from msgspec.structs import replace

from rackloom.claim.allocate.objects import (
    AllocationResult,
    Device,
    DeviceClass,
    Node,
    ResourceClaim,
    ResourceSlice,
)
from rackloom.claim.domain import names
from rackloom.claim.place.labels import Labels
from rackloom.claim.place.reading.jobs import in_namespace
from rackloom.claim.place.reading.observed import hold_of
from rackloom.claim.place.reading.pods import Json
from rackloom.claim.place.values import Hold

DeviceId = tuple[str, str, str]
"""Driver, pool and name."""
HIGHEST = 2**31 - 1
"""No priority (an int32) is above it, so nobody is told to preempt whoever has it."""

Kinds = Mapping[str, tuple[ResourceClaim, ...]]
"""The claims of one member by `Group.devices`."""


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """What drivers publish, and the claims that hold some of it."""

    nodes: tuple[Node, ...]
    classes: tuple[DeviceClass, ...]
    slices: tuple[ResourceSlice, ...]
    claims: tuple[ResourceClaim, ...] = ()
    """Those that are allocated."""

    pods: tuple[Json, ...] = ()
    """Those that may have the claims."""

    def gpus_of_nodes(self, labels: Labels) -> Counter[str]:
        """GPUs that are published, by node."""
        return Counter(self.gpus(labels).values())

    def gpus(self, labels: Labels) -> dict[DeviceId, str]:
        """The node of every GPU; of a GPU in parts its parts are listed beside it, and are none."""
        return {
            (one.spec.driver, one.spec.pool.name, device.name): one.spec.node_name
            for one in self.slices
            if one.spec.driver == labels.gpu_driver and one.spec.node_name
            for device in one.spec.devices
            if _is_whole(device)
        }

    def holds(self, labels: Labels) -> tuple[Hold, ...]:
        """GPUs and IMEX channels that claims hold, as the pod that uses the claim would."""
        nodes, users = self.gpus(labels), self.users(labels)
        found = list(zip(self.claims, users, strict=True))
        gpus = (
            replace(user, tray=node, gpus=gpus)
            for claim, user in found
            for node, gpus in _held(claim, nodes).items()
        )
        channels = (
            replace(user, tray=node, gpus=0, channel=True) for claim, user in found for node in _linked(claim)
        )
        return (*gpus, *channels)

    def users(self, labels: Labels) -> list[Hold]:
        """Who has each claim, as a hold on no tray; whoever is not known is not to be preempted or moved."""
        pods = {_key(pod.get("metadata") or {}): pod for pod in self.pods}
        return [_user(claim, pods, labels) for claim in self.claims]


def taken_by(allocated: Iterable[AllocationResult], gpus: Container[DeviceId]) -> int:
    """How many of the GPUs were given; administrators look at devices without taking them."""
    return sum(
        (one.driver, one.pool, one.device) in gpus and not one.admin_access
        for result in allocated
        for one in result.devices.results
    )


def takes_devices(claim: ResourceClaim) -> bool:
    """Whether it keeps anything from others: administrators do not."""
    requests = claim.spec.devices.requests
    return any(one.exactly is None or not one.exactly.admin_access for one in requests)


def _is_whole(device: Device) -> bool:
    kind = device.attributes.get("type")
    return kind is None or kind.string in (None, "gpu")


def is_channel(driver: str, device: str) -> bool:
    """Whether a device is the IMEX channel of its node, after which its pool is called."""
    return (driver, device) == (names.IMEX_DRIVER, names.CHANNEL_DEVICE)


def _linked(claim: ResourceClaim) -> list[str]:
    """The nodes of which it has the channel."""
    results = claim.status.allocation.devices.results if claim.status.allocation else ()
    return [one.pool for one in results if is_channel(one.driver, one.device)]


def _held(claim: ResourceClaim, nodes: Mapping[DeviceId, str]) -> Counter[str]:
    results = claim.status.allocation.devices.results if claim.status.allocation else ()
    devices = ((one.driver, one.pool, one.device) for one in results if not one.admin_access)
    return Counter(nodes[one] for one in devices if one in nodes)


def _user(claim: ResourceClaim, pods: Mapping[tuple[str, str], Json], labels: Labels) -> Hold:
    meta = claim.metadata
    users = [str(one["name"]) for one in claim.status.reserved_for if one.get("name")]
    known = next((pod for name in users if (pod := pods.get((meta.namespace or "default", name)))), None)
    if known is not None:
        return hold_of(known, labels)
    # No word with a space is a name, so it is not taken for a job that is to be placed.
    called = f"pod {users[0]}" if users else f"claim {meta.name}"
    return Hold(owner=in_namespace({"namespace": meta.namespace}, called), tray="", gpus=0, priority=HIGHEST)


def _key(metadata: Json) -> tuple[str, str]:
    return metadata.get("namespace") or "default", metadata.get("name", "")
