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

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.attributes import is_whole_gpu
from rackloom.core.allocate.objects import Amount, convert_object
from rackloom.core.cluster import names
from rackloom.core.cluster.objects import JsonMapping
from rackloom.core.cluster.pods import ApiStruct, TaintEffect, Toleration, check_shape

V = TypeVar("V")
_CORDON_TAINT = "node.kubernetes.io/unschedulable"
_UNREADY_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""Taints by which the node controller repeats the Ready condition of the node."""


class Taint(ApiStruct, frozen=True, omit_defaults=True):
    """A taint of a node, or of a device."""

    key: str
    effect: str
    value: str = ""
    time_added: str | None = None

    @property
    def text(self) -> str:
        """`key=value:effect`."""
        return f"{self.key}{f'={self.value}' if self.value else ''}:{self.effect}"


class _NodeTaint(Taint, frozen=True):
    effect: TaintEffect


class _NodeSpec(ApiStruct, frozen=True):
    taints: tuple[_NodeTaint, ...] | None = None
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


class NodeObject(ApiStruct, frozen=True):
    """A node."""

    metadata: _NodeMetadata
    spec: _NodeSpec = _NodeSpec()
    status: _NodeStatus = _NodeStatus()

    @property
    def name(self) -> str:
        """Its name."""
        return self.metadata.name

    @property
    def labels(self) -> Mapping[str, str]:
        """Its labels."""
        return self.metadata.labels or {}

    @property
    def taints(self) -> tuple[Taint, ...]:
        """Its taints."""
        return self.spec.taints or ()

    @property
    def is_cordoned(self) -> bool:
        """Whether its spec keeps new pods off it."""
        return bool(self.spec.unschedulable)

    @property
    def amounts(self) -> Mapping[str, Amount]:
        """What pods may request of it, as it writes it; capacity if it names nothing allocatable."""
        return self.status.allocatable or self.status.capacity or {}


def read_node(obj: JsonMapping) -> NodeObject:
    """A node. Raises Refused for one that no API server would send."""
    return check_shape(obj, NodeObject, "its shape")


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


class SlicePool(msgspec.Struct, frozen=True):
    """The pool of a slice."""

    driver: str
    name: str
    generation: int
    count: int
    """The slices that the pool has in this generation."""


def slice_pool(slice_: JsonMapping) -> SlicePool:
    """The pool that a slice is a part of. It counts in its newest generation, once all its slices exist."""
    spec = slice_["spec"]
    pool = spec["pool"]
    return SlicePool(
        spec["driver"], pool["name"], pool.get("generation") or 0, pool.get("resourceSliceCount") or 0
    )


def node_of_slice(slice_: JsonMapping) -> str:
    """The node of the devices of a slice, or an empty text if several nodes have them."""
    return slice_["spec"].get("nodeName") or ""


def device_names(slice_: JsonMapping) -> list[str]:
    """The names of the devices of a slice."""
    return [device["name"] for device in slice_["spec"].get("devices") or ()]


def newest_slices(slices: Iterable[JsonMapping]) -> Iterator[JsonMapping]:
    """The slices of the newest generation of each pool, pool by pool.

    A driver replaces a pool slice by slice, so slices of two generations may be there at once.
    """
    pools: dict[tuple[str, str], list[tuple[int, JsonMapping]]] = defaultdict(list)
    for slice_ in slices:
        pool = slice_pool(slice_)
        pools[pool.driver, pool.name].append((pool.generation, slice_))
    for found in pools.values():
        yield from _newest(found)


def _newest(pool: Collection[tuple[int, V]]) -> Iterator[V]:
    """The slices of the newest of these generations."""
    newest = max((generation for generation, _ in pool), default=0)
    return (slice_ for generation, slice_ in pool if generation == newest)


def slice_content(slice_: JsonMapping) -> JsonMapping:
    """The fields of a slice that name devices and counters.

    Kubernetes 1.34 has null in place of an empty list.
    """
    return {key: slice_["spec"].get(key) or () for key in ("devices", "sharedCounters")}


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
    found = {}
    local = [(slice_.spec.pool.generation, slice_.spec) for slice_ in pool if slice_.spec.node_name]
    for spec in _newest(local):
        for device in spec.devices:
            key, attributes = (spec.pool.name, device.name), device.attributes
            gpu = attributes.parent_uuid.string or attributes.uuid.string or "/".join(key)
            found[key] = PublishedDevice(str(spec.node_name), gpu, is_whole_gpu(attributes.type.string))
    return found


def gpus_by_node(published: PublishedDevices) -> Counter[str]:
    """Whole GPUs by node."""
    return Counter(device.node for device in published.values() if device.is_whole)


def node_clique(labels: Mapping[str, str], label: str) -> str | None:
    """The NVLink clique of a node with these labels, or None without one.

    A cluster UUID of zeros is no fabric: GPUs behind the NVSwitches of a single machine report it.
    """
    clique = labels.get(label) or None
    return None if clique is not None and clique.startswith(names.NO_CLUSTER) else clique


def taints_of(node: JsonMapping) -> tuple[Taint, ...]:
    """The taints of a node."""
    return tuple(convert_object(taint, Taint) for taint in (node.get("spec") or {}).get("taints") or ())


def container_runtime(node: JsonMapping) -> str | None:
    """The container runtime of a node, such as containerd://2.0.1, or None if it is not known."""
    info = (node.get("status") or {}).get("nodeInfo") or {}
    return info.get("containerRuntimeVersion") or None


def node_addresses(node: JsonMapping) -> tuple[str, ...]:
    """The IP addresses of a node, inside the cluster and outside."""
    addresses = (node.get("status") or {}).get("addresses") or ()
    return tuple(address["address"] for address in addresses if address["type"].endswith("IP"))


def pod_networks(node: JsonMapping) -> tuple[str, ...]:
    """The networks from which the pods of a node get their addresses, as CIDRs."""
    spec = node.get("spec") or {}
    return tuple(spec.get("podCIDRs") or filter(None, [spec.get("podCIDR")]))


def opened_node(node: NodeObject) -> NodeObject:
    """The node as it is when it is open to all pods."""
    ready = _Condition(type="Ready", status="True")
    return replace(node, spec=_NodeSpec(), status=replace(node.status, conditions=(ready,)))


def closed_reasons(node: NodeObject, tolerations: tuple[Toleration, ...] | None) -> Iterator[str]:
    """Why pods with these tolerations may not go to a node.

    None leaves out all taints but those of the node's own state, because pods may tolerate them.
    """
    taints = list(blocking_taints(node, tolerations or ()))
    if node.is_cordoned or _CORDON_TAINT in taints:
        yield "cordoned"
    ready = next((entry for entry in node.status.conditions or () if entry.type == "Ready"), None)
    if ready is None:
        yield "no Ready condition"
    elif ready.status != "True" or any(taint in _UNREADY_TAINTS for taint in taints):
        yield "not ready"
    if tolerations is not None:
        yield from closing_taints(node, tolerations)


def closing_taints(node: NodeObject, tolerations: tuple[Toleration, ...]) -> Iterator[str]:
    """The taints that close a node, in words, but for those that repeat a state that has a word."""
    for taint in blocking_taints(node, tolerations):
        if taint not in (_CORDON_TAINT, *_UNREADY_TAINTS):
            yield f"taint {taint}"


def blocking_taints(node: NodeObject, tolerations: tuple[Toleration, ...]) -> Iterator[str]:
    """Taints of a node that keep a pod off, as `key=value`."""
    for taint in node.taints:
        if taint.effect in ("NoSchedule", "NoExecute") and not any(
            _covers(toleration, taint) for toleration in tolerations
        ):
            yield f"{taint.key}={taint.value}" if taint.value else taint.key


def _covers(toleration: Toleration, taint: Taint) -> bool:
    """Whether a pod with a toleration may stay."""
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.operator == "Exists":
        return not toleration.key or toleration.key == taint.key
    is_equal = toleration.operator in ("", "Equal")
    return is_equal and (toleration.key, toleration.value) == (taint.key, taint.value)
