"""The facts of a node: whether it is open, its GPUs by each way to get them, its clique.

Open: kube-scheduler puts a pod on a node that is not cordoned and has no NoSchedule or NoExecute taint that
the pod does not tolerate. The node controller repeats the Ready condition as a taint, with a delay. So a node
is closed as well if Ready is not True. A node without a Ready condition is closed: its kubelet has never
reported, and the node controller counts it as Unknown.

GPUs: a pod gets GPUs in one of two ways, and a node may offer a different number by each.

- Counted, by `nvidia.com/gpu` in its limits: the device plugin's number. If that is 0 or missing,
  kube-scheduler makes a claim for the pod (KEP-5004), and the number is that of the slices. Whether a device
  class names the resource, which this needs, is not checked.
- Claimed: the whole GPUs that the DRA driver publishes. A slice lists the MIG devices of a GPU beside the GPU
  itself, and they do not count twice.

Source: kube-scheduler, plugins NodeUnschedulable, TaintToleration and NodeResourcesFit
(`shouldDelegateResourceToDRA`); KEP-5004.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

import msgspec

from rackloom.core.allocate.attributes import is_whole_gpu
from rackloom.core.allocate.objects import Amount
from rackloom.core.cluster import names
from rackloom.core.cluster.metadata import labels_of
from rackloom.core.cluster.objects import JsonMapping, Object
from rackloom.core.cluster.pods import ApiStruct, TaintEffect, Toleration
from rackloom.core.cluster.scheduling import blocking_taints, node_amounts

_CORDON_TAINT = "node.kubernetes.io/unschedulable"
_UNREADY_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""Taints by which the node controller repeats the Ready condition of the node."""


class _Taint(ApiStruct, frozen=True):
    key: str
    effect: TaintEffect
    value: str | None = None


class _NodeSpec(ApiStruct, frozen=True):
    taints: tuple[_Taint, ...] | None = None
    unschedulable: bool | None = None


class _Condition(ApiStruct, frozen=True):
    type: str
    status: str


class _NodeStatus(ApiStruct, frozen=True):
    allocatable: Mapping[str, Amount] | None = None
    capacity: Mapping[str, Amount] | None = None
    conditions: tuple[_Condition, ...] | None = None


class _NodeMetadata(ApiStruct, frozen=True, kw_only=True):
    name: str
    labels: Mapping[str, str] | None = None


class NodeShape(ApiStruct, frozen=True):
    """A node."""

    metadata: _NodeMetadata
    spec: _NodeSpec | None = None
    status: _NodeStatus | None = None


class NodeGpus(msgspec.Struct, frozen=True):
    """GPUs of a node when nothing is in use."""

    counted: int
    """By the extended resource."""
    claimed: int
    """By claims."""

    def usable(self, *, counted: bool, claimed: bool) -> int:
        """The number for a job that asks in these ways: the smaller one if it asks in both.

        A question that is of no job is about the GPUs that are there.
        """
        if counted and claimed:
            return min(self.counted, self.claimed)
        return self.counted if counted else self.claimed if claimed else max(self.counted, self.claimed)


def node_gpus(node: JsonMapping, resource: str, published: int) -> NodeGpus:
    """GPUs of a node; `published`: in slices. Raises ValueError for an unreadable amount."""
    # A kubelet goes on to name 0 of a resource after its device plugin is gone.
    by_plugin = node_amounts(node).get(resource, 0) // 1000
    return NodeGpus(counted=by_plugin or published, claimed=published)


class _Pool(ApiStruct, frozen=True):
    name: str
    generation: int = 0


class _TextValue(ApiStruct, frozen=True):
    string: str | None = None


_NO_TEXT = _TextValue()


class _DeviceAttributes(ApiStruct, frozen=True):
    type: _TextValue = _NO_TEXT
    uuid: _TextValue = _NO_TEXT
    parent_uuid: _TextValue = msgspec.field(default=_NO_TEXT, name="parentUUID")


class _Device(ApiStruct, frozen=True):
    name: str
    attributes: _DeviceAttributes = _DeviceAttributes()


class _SliceSpec(ApiStruct, frozen=True):
    driver: str
    pool: _Pool
    node_name: str | None = None
    devices: tuple[_Device, ...] = ()


class SliceShape(ApiStruct, frozen=True):
    """A ResourceSlice, as far as GPUs are counted in it."""

    spec: _SliceSpec


class PublishedDevice(msgspec.Struct, frozen=True):
    """A device of the GPU driver in a slice."""

    node: str
    gpu: str
    """The UUID of the GPU that it is, or is a part of. Without one, pool and name of the device."""
    is_whole: bool


PublishedDevices = Mapping[tuple[str, str], PublishedDevice]
"""By pool and name."""


def published_devices(pool: Collection[SliceShape]) -> PublishedDevices:
    """GPUs and their parts in the slices of a pool, which counts in its newest generation."""
    # A driver replaces a pool slice by slice, so slices of two generations may be there at once.
    newest = max((slice_.spec.pool.generation for slice_ in pool if slice_.spec.node_name), default=0)
    found = {}
    for spec in (slice_.spec for slice_ in pool):
        for device in spec.devices if spec.node_name and spec.pool.generation == newest else ():
            key, attributes = (spec.pool.name, device.name), device.attributes
            gpu = attributes.parent_uuid.string or attributes.uuid.string or "/".join(key)
            found[key] = PublishedDevice(str(spec.node_name), gpu, is_whole_gpu(attributes.type.string))
    return found


def slice_devices(slice_: JsonMapping) -> tuple[str, tuple[str, str], list[str]]:
    """The node of a slice ("" if it is of several), its driver and pool, and the names of its devices."""
    spec = slice_["spec"]
    devices = [device["name"] for device in spec.get("devices") or ()]
    return spec.get("nodeName") or "", (spec["driver"], spec["pool"]["name"]), devices


def gpus_by_node(published: PublishedDevices) -> Counter[str]:
    """Whole GPUs by node."""
    return Counter(device.node for device in published.values() if device.is_whole)


def node_clique(node: JsonMapping, label: str) -> str | None:
    """The NVLink clique of a node, or None without one.

    A cluster UUID of zeros is no fabric: GPUs behind the NVSwitches of a single machine report it.
    """
    clique = labels_of(node).get(label) or None
    return None if clique is not None and clique.startswith(names.NO_CLUSTER) else clique


def taint_keys(node: JsonMapping) -> Iterator[str]:
    """The keys of the taints of a node."""
    yield from (taint["key"] for taint in (node.get("spec") or {}).get("taints") or ())


def ready_status(node: JsonMapping) -> str | None:
    """The status of its Ready condition, or None if it has none."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    return next((c.get("status") for c in conditions if c.get("type") == "Ready"), None)


def opened_node(node: JsonMapping) -> Object:
    """The node as it is when it is open to all pods."""
    status = {**(node.get("status") or {}), "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": node["metadata"], "spec": {}, "status": status}


def closed_reasons(node: JsonMapping, tolerations: tuple[Toleration, ...] | None) -> Iterator[str]:
    """Why pods with these tolerations may not go to a node.

    None leaves out all taints but those of the node's own state, because pods may tolerate them.
    """
    taints = list(blocking_taints(node, tolerations or ()))
    if (node.get("spec") or {}).get("unschedulable") or _CORDON_TAINT in taints:
        yield "cordoned"
    ready = ready_status(node)
    if ready is None:
        yield "no Ready condition"
    elif ready != "True" or any(taint in _UNREADY_TAINTS for taint in taints):
        yield "not ready"
    if tolerations is not None:
        yield from closing_taints(node, tolerations)


def closing_taints(node: JsonMapping, tolerations: tuple[Toleration, ...]) -> Iterator[str]:
    """The taints that close a node, in words, but for those that repeat a state that has a word."""
    for taint in blocking_taints(node, tolerations):
        if taint not in (_CORDON_TAINT, *_UNREADY_TAINTS):
            yield f"taint {taint}"
