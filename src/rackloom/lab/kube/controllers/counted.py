"""Counted devices: extended resources that a device class backs (KEP-5004).

A class names the resource (`extendedResourceName`), and each class has the implicit one
`deviceclass.resource.kubernetes.io/<class>`. Where a node has none of the resource itself, the scheduler
makes one claim for all that the pod counts, with a request for each container and resource. Init
containers get requests of their own: upstream lets them use those of later containers.
"""

from collections.abc import Iterable, Mapping

import msgspec

from rackloom.core.allocate.objects import ObjectMeta, ResourceClaim, ResourceClaimSpec
from rackloom.core.allocate.quantity import Quantity
from rackloom.core.kubernetes import objects
from rackloom.core.kubernetes.objects import Object
from rackloom.lab.kube.controllers.workloads import controller_reference

COUNTING_CLAIM = "resource.kubernetes.io/extended-resource-claim"
"""The annotation of a claim that the scheduler made."""
_OF_CLASS = "deviceclass.resource.kubernetes.io/"


class CountedDevices(msgspec.Struct, frozen=True):
    """What a pod's containers count, as requests of a claim."""

    requests: tuple[Object, ...] = ()
    """As in `spec.devices.requests`."""
    mappings: tuple[Object, ...] = ()
    """Which container gets which request, as in the pod's `status.extendedResourceClaimStatus`."""

    def as_claim(self) -> ResourceClaim:
        """For the allocator."""
        spec = msgspec.convert({"devices": {"requests": self.requests}}, ResourceClaimSpec)
        return ResourceClaim(metadata=ObjectMeta(name="counted"), spec=spec)


NOTHING_COUNTED = CountedDevices()


def counted_classes(classes: Iterable[Object]) -> Mapping[str, str]:
    """The class behind each extended resource; of several, the one made last, then the first by name."""
    ordered = sorted(classes, key=lambda klass: str(klass["metadata"]["name"]), reverse=True)
    ordered.sort(key=lambda klass: str(klass["metadata"].get("creationTimestamp") or ""))
    found: dict[str, str] = {}
    for klass in ordered:
        name = klass["metadata"]["name"]
        found[f"{_OF_CLASS}{name}"] = name
        if resource := (klass.get("spec") or {}).get("extendedResourceName"):
            found[resource] = name
    return found


def claimed_resources(node: Object, classes: Mapping[str, str]) -> Mapping[str, str]:
    """Those resources that a pod gets by a claim on this node, since the node has none of them itself."""
    there = (node.get("status") or {}).get("allocatable") or {}
    return {name: klass for name, klass in classes.items() if not _count(there.get(name, 0))}


def counted_devices(spec: Mapping[str, Object], resources: Mapping[str, str]) -> CountedDevices:
    """The requests for what the containers of a pod count of these resources."""
    requests, mappings = [], []
    containers = (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
    for place, container in enumerate(containers):
        amounts = container.get("resources") or {}
        asked = {**(amounts.get("limits") or {}), **(amounts.get("requests") or {})}
        for number, name in enumerate(sorted(asked)):
            if name not in resources or not (count := _count(asked[name])):
                continue
            request = f"container-{place}-request-{number}"
            exactly = {"deviceClassName": resources[name], "allocationMode": "ExactCount", "count": count}
            requests.append({"name": request, "exactly": exactly})
            mappings.append(
                {"containerName": container["name"], "resourceName": name, "requestName": request}
            )
    return CountedDevices(tuple(requests), tuple(mappings))


def counting_claim(pod: Object, counted: CountedDevices) -> Object:
    """The claim of what a pod counts."""
    owner = pod["metadata"]
    metadata = {
        "generateName": f"{owner['name']}-extended-resources-",
        "namespace": owner["namespace"],
        "annotations": {COUNTING_CLAIM: "true"},
        "ownerReferences": controller_reference(objects.POD, pod),
    }
    return {"metadata": metadata, "spec": {"devices": {"requests": [*counted.requests]}}}


def _count(value: str | int | float) -> int:
    try:
        amount = Quantity.parse(value)
    except ValueError:
        return 0
    return int(amount.unscaled * 10**amount.scale) if amount.scale >= 0 else 0
