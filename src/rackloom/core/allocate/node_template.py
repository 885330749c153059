"""Slices of a node that does not exist yet, for an autoscaler that simulates it.

`template_of_slices` makes them from the slices of a node that exists: the same devices, without the values
that identify this node. A value such as a UUID becomes `template-<n>`, the same one at every place, so that
constraints among devices hold and fail as on the node. Taints are dropped: they are a state of that node.

`cluster_api_slices` is all that Cluster Autoscaler's Cluster API provider simulates for an empty group: the
annotations give it a count and one driver (kubernetes/autoscaler, August 2026). `scale_up_answers` shows the
effect on claims. No autoscaler reads slices from a file or an object: a provider makes them in its own
process, Karpenter's too.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.attributes import (
    CHASSIS_SERIAL,
    CLIQUE,
    FABRIC_GUID,
    GPU_UUID,
    is_whole_gpu,
)
from rackloom.core.allocate.driver_slices import local_slice
from rackloom.core.allocate.objects import (
    Device,
    DeviceAttribute,
    DeviceClass,
    Node,
    ObjectMeta,
    ResourceClaim,
    ResourceSlice,
)
from rackloom.core.allocate.planning import PlacedClaim, RefusedClaim, allocate_each
from rackloom.errors import Refused

# From a node that exists.


_IDENTIFYING = frozenset(
    (
        *(CLIQUE, "clusterUUID", CHASSIS_SERIAL, FABRIC_GUID, GPU_UUID, "parentUUID"),
        *("gpuPartner", "mac", "ipv4", "ipv6"),
    )
)
"""Attributes with text that belongs to one node, without their domain. `module<N>UUID` and the like too."""
PLACEHOLDER = "template-{number}"


def template_of_slices(slices: Iterable[ResourceSlice], node: str, group: str) -> tuple[ResourceSlice, ...]:
    """The slices of `node` as those of a new node `group`. Raises Refused if the node has none.

    Devices that are not local to the node are left out: a new node brings none.
    """
    # A driver replaces a pool slice by slice, so void slices of an older generation may be there.
    listed, newest = tuple(slices), dict[tuple[str, str], int]()
    for of in (slice_.spec for slice_ in listed):
        newest[of.driver, of.pool.name] = max(newest.get((of.driver, of.pool.name), 0), of.pool.generation)
    local = [
        slice_
        for slice_ in listed
        if (of := slice_.spec).node_name == node and of.pool.generation == newest[of.driver, of.pool.name]
    ]
    if not local:
        raise Refused(f"no slice is of the node {node}", nearest_fix="name a node whose drivers are at work")
    names: dict[str, str] = {}
    found = []
    for slice_ in local:
        spec = slice_.spec
        devices = tuple(_template_device(device, names) for device in spec.devices)
        name = group if spec.pool.name == node else f"{group}-{spec.pool.name}"
        pool = replace(spec.pool, name=name)
        # The API server's suffix of the name stays: it distinguishes the slices of a driver.
        ending = slice_.metadata.name.rpartition("-")[2]
        template = ResourceSlice(
            metadata=ObjectMeta(name=f"{group}-{spec.driver}-{ending}"),
            spec=replace(spec, pool=pool, node_name=group, devices=devices),
        )
        found.append(template)
    return tuple(found)


def _template_device(device: Device, names: dict[str, str]) -> Device:
    """The device without the values that identify it. `names` has the placeholder of each text so far."""
    attributes = {}
    for name, value in device.attributes.items():
        plain = name.rpartition("/")[2]
        is_of_module = plain.startswith("module") and plain.endswith(("UUID", "FabricGUID"))
        # One text has one placeholder everywhere, so that constraints hold and fail as on the node.
        if value.string is not None and (is_of_module or plain in _IDENTIFYING):
            placeholder = names.setdefault(value.string, PLACEHOLDER.format(number=len(names)))
            attributes[name] = DeviceAttribute(string=placeholder)
        else:
            attributes[name] = value
    return replace(device, attributes=attributes, taints=())


# The slices that Cluster Autoscaler's Cluster API provider makes from annotations.


CAPACITY = "capacity.cluster-autoscaler.kubernetes.io"


def cluster_api_slices(driver: str, count: int, group: str) -> tuple[ResourceSlice, ...]:
    """Devices gpu-0, gpu-1 ... of one driver, with the type and nothing else.

    Releases before the fix of kubernetes/autoscaler issue 10199 gave their pool no slice count. The allocator
    takes such a pool for incomplete, and no claim starts a node.
    """
    is_gpu = {"type": DeviceAttribute(string="gpu")}
    devices = (Device(name=f"gpu-{number}", attributes=is_gpu) for number in range(count))
    return (local_slice(driver, group, devices),) if count else ()


def whole_gpus(slices: Iterable[ResourceSlice], driver: str) -> int:
    """GPUs of a driver that are no partitions."""
    kinds = (
        device.attributes.get("type")
        for slice_ in slices
        if slice_.spec.driver == driver
        for device in slice_.spec.devices
    )
    return sum(is_whole_gpu(None if kind is None else kind.string) for kind in kinds)


def capacity_annotations(
    resources: Mapping[str, str], *, driver: str, gpus: int, labels: Mapping[str, str], taints: Sequence[str]
) -> dict[str, str]:
    """Annotations of a MachineDeployment or MachineSet that describe its nodes while there are none.

    `resources` are those of a node, by name (`cpu`, `memory`, `ephemeral-storage`, `pods`). `taints` have the
    form `key=value:effect`. Raises Refused without CPU and memory: such a group is not scaled from zero.
    """
    if not resources.get("cpu") or not resources.get("memory"):
        raise Refused(
            "the Cluster API provider scales a group from zero only if it knows CPU and memory of a node",
            nearest_fix="say --cpu and --memory",
        )
    keys = {"cpu": "cpu", "memory": "memory", "ephemeral-storage": "ephemeral-disk", "pods": "maxPods"}
    found = {f"{CAPACITY}/{key}": resources[name] for name, key in keys.items() if resources.get(name)}
    if gpus:
        found |= {f"{CAPACITY}/gpu-count": str(gpus), f"{CAPACITY}/dra-driver": driver}
    if labels:
        found[f"{CAPACITY}/labels"] = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    if taints:
        found[f"{CAPACITY}/taints"] = ",".join(taints)
    return found


# The claims that would start a node of an empty group.


class ScaleUpAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a new node would serve a claim, and whether an autoscaler would know."""

    claim: str
    template: PlacedClaim | RefusedClaim
    """On the slices that the node would have."""
    cluster_api: PlacedClaim | RefusedClaim
    """On the slices that the Cluster API provider simulates."""


def scale_up_answers(
    claims: Sequence[ResourceClaim],
    classes: Sequence[DeviceClass],
    slices: Sequence[ResourceSlice],
    group: str,
    driver: str,
) -> tuple[ScaleUpAnswer, ...]:
    """The answer for each claim alone on a new node, by the allocator of `rackloom claim allocate`."""
    node = (Node(metadata=ObjectMeta(name=group)),)
    coarse = cluster_api_slices(driver, whole_gpus(slices, driver), group)
    answers = []
    for claim in claims:
        (on_template,) = allocate_each(node, classes, slices, (claim,))
        (on_coarse,) = allocate_each(node, classes, coarse, (claim,))
        answers.append(ScaleUpAnswer(claim=on_template.claim, template=on_template, cluster_api=on_coarse))
    return tuple(answers)
