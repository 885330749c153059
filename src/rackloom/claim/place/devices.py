"""What drivers publish and claims hold, as far as placement counts it."""

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from rackloom.claim.allocate.objects import (
    DeviceClass,
    DeviceRequest,
    Node,
    ResourceClaim,
    ResourceSlice,
)
from rackloom.claim.place.labels import Labels
from rackloom.claim.place.values import Hold

Kinds = Mapping[str, tuple[ResourceClaim, ...]]
"""The claims of one member by `Group.devices`."""


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """What drivers publish, and the claims that hold some of it."""

    nodes: tuple[Node, ...]
    classes: tuple[DeviceClass, ...]
    slices: tuple[ResourceSlice, ...]
    claims: tuple[ResourceClaim, ...] = ()
    """Those that are allocated."""

    def gpus_of_nodes(self, labels: Labels) -> Counter[str]:
        """GPUs that are published, by node."""
        return Counter(
            one.spec.node_name
            for one in self.slices
            if one.spec.driver == labels.gpu_driver and one.spec.node_name
            for _ in one.spec.devices
        )

    def holds(self, labels: Labels) -> tuple[Hold, ...]:
        """GPUs that claims hold, under the name of the pod that uses the claim, else of the claim."""
        pools = {(one.spec.driver, one.spec.pool.name): one.spec.node_name for one in self.slices}
        return tuple(
            Hold(owner=_user(claim), tray=node, gpus=gpus)
            for claim in self.claims
            for node, gpus in self._held(claim, pools, labels).items()
        )

    def _held(
        self, claim: ResourceClaim, pools: Mapping[tuple[str, str], str | None], labels: Labels
    ) -> Counter[str]:
        results = claim.status.allocation.devices.results if claim.status.allocation else ()
        nodes = (
            pools.get((one.driver, one.pool))
            for one in results
            if one.driver == labels.gpu_driver and not one.admin_access
        )
        return Counter(node for node in nodes if node)


def gpus_in(claims: Iterable[ResourceClaim], labels: Labels) -> int:
    """GPUs that claims ask for, by the class of the GPU driver; first alternatives count."""
    return sum(_gpus(one, labels) for claim in claims for one in claim.spec.devices.requests)


def _gpus(request: DeviceRequest, labels: Labels) -> int:
    asked = request.exactly or next(iter(request.first_available), None)
    if asked is None or asked.device_class_name != labels.gpu_driver:
        return 0
    return asked.count


def _user(claim: ResourceClaim) -> str:
    pods = [str(one["name"]) for one in claim.status.reserved_for if one.get("name")]
    return pods[0] if pods else claim.metadata.name
