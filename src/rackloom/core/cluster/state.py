"""One reading of a cluster: nodes, pods and claims as they were listed, each checked, and what they hold.

`read_state` is the only way from lists of Kubernetes objects to facts about trays. Placement, gangs, Kueue's
check and the command line take its `ClusterState`, so that no two of them can read one cluster differently.

1. Each object is read by itself. One that cannot be read (a field of another type, an amount that is no
   quantity) is named in `unreadable` and left out. No value is guessed for it, and the rest is read on.
2. A pod holds the GPUs that it requests in effect from its node, from when it is bound until it has ended. If
   the scheduler's own claim serves them (KEP-5004), the claim holds them instead.
3. An allocated claim holds its GPUs and its IMEX channel on behalf of its holder: the owner of the pod for
   which it is reserved or was made. Devices that it may only observe (adminAccess) are free for others. An
   unknown holder has the highest priority, so that no fix proposes to preempt it.

A claim holds its devices until the API server has deallocated it, also after its pod has ended.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec
from msgspec.structs import replace

from rackloom.core.cluster import names
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.nodes import (
    NodeGpus,
    NodeShape,
    PublishedDevice,
    PublishedDevices,
    gpus_by_node,
    node_gpus,
    published_devices,
)
from rackloom.core.cluster.objects import JsonMapping, allocated_devices, has_pod_ended, is_resource_claimed
from rackloom.core.cluster.pods import (
    ApiStruct,
    OwnerReference,
    PodMetadata,
    PodObject,
    check_shape,
    object_namespace,
    pod_owner,
    qualified_name,
)
from rackloom.core.cluster.scheduling import requested_devices
from rackloom.errors import Refused

HIGHEST_PRIORITY = 2**31 - 1
"""No priority (an int32) is above it, so nothing may preempt a hold that has it."""


class TrayHold(msgspec.Struct, frozen=True, kw_only=True):
    """What an owner has of a tray: running pods, or a reservation."""

    owner: str
    """The job: holds of one owner move together."""
    tray: str
    gpus: int
    priority: int = 0
    movable: bool = False
    """It may be restarted elsewhere; what is pinned or unknown may not."""
    is_whole: bool = False
    """Nothing else goes on the tray, whatever its GPUs (a tray may have none, only NICs)."""
    channel: bool = False
    """It has the IMEX channel of the tray, of which there is one."""
    requests: tuple[tuple[str, int], ...] = ()
    """What members that are still to come request of the node beside devices: by resource, in thousandths of
    its unit. Pods that are there show it themselves."""
    kept_off: frozenset[str] = frozenset()
    """Trays that it may not use when it moves: labels of nodes, taints, and pods that it is never beside."""
    apart: frozenset[str] = frozenset()
    """Owners, perhaps its own, with which it is on no tray wherever they move."""


class Unreadable(msgspec.Struct, frozen=True):
    """An object that was left out, and why."""

    title: str
    """`Kind namespace/name`."""
    reason: str

    def __str__(self) -> str:
        return f"{self.title} is left out: {self.reason}"


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one reading. Objects that could not be read are in `unreadable` alone."""

    labels: SchedulerLabels = SchedulerLabels()
    nodes: tuple[JsonMapping, ...] = ()
    pods: tuple[JsonMapping, ...] = ()
    claims: tuple[JsonMapping, ...] = ()
    gpus: Mapping[str, NodeGpus] = {}
    """By node."""
    published: PublishedDevices = {}
    holds: tuple[TrayHold, ...] = ()
    """Of pods, then of claims."""
    unreadable: tuple[Unreadable, ...] = ()

    @property
    def bound_pods(self) -> Iterator[JsonMapping]:
        """Pods that are on a node and have not ended."""
        return (pod for pod in self.pods if is_bound_pod(pod))


PodMemory = dict[object, tuple[object, TrayHold | None]]
"""By UID: the version of a pod that was read, and what it holds."""


def read_state(
    nodes: Iterable[JsonMapping] = (),
    pods: Iterable[JsonMapping] = (),
    claims: Iterable[JsonMapping] = (),
    slices: Iterable[JsonMapping] = (),
    labels: SchedulerLabels = SchedulerLabels(),  # noqa: B008 (a frozen value)
    memory: PodMemory | None = None,
) -> ClusterState:
    """The facts of the objects. It refuses nothing: what cannot be read is named.

    `memory` keeps the pods of the last reading, with the same labels: only pods that changed are read again.
    """
    unreadable: list[Unreadable] = []
    before, after = {} if memory is None else memory.copy(), {} if memory is None else memory
    after.clear()

    def each(
        kind: str, objects: Iterable[JsonMapping], read: Callable[[JsonMapping], object]
    ) -> Iterator[JsonMapping]:
        for obj in objects:
            try:
                read(obj)
            except (Refused, ValueError) as error:
                reason = error.reason if isinstance(error, Refused) else str(error)
                unreadable.append(Unreadable(_title(kind, obj), reason))
            else:
                yield obj

    # Slices first: a node that names no GPUs has those that are published on it.
    published = published_devices(
        each("ResourceSlice", slices, lambda obj: check_shape(obj, SliceShape, "its shape")),
        labels.gpu_driver,
    )
    counts = gpus_by_node(published)
    gpus: dict[str, NodeGpus] = {}

    def read_node(node: JsonMapping) -> None:
        check_shape(node, NodeShape, "its shape")
        name = node["metadata"]["name"]
        gpus[name] = node_gpus(node, labels.gpu, counts[name])

    holds: list[TrayHold] = []

    def read_pod(pod: JsonMapping) -> None:
        # The API server versions each state of an object. An object of a file has no version.
        meta = pod.get("metadata")
        meta = meta if isinstance(meta, Mapping) else {}
        uid, version = meta.get("uid"), meta.get("resourceVersion")
        last = before.get(uid)
        if last is not None and last[0] == version:
            hold = last[1]
        else:
            check_shape(pod, PodObject, "its shape")
            # Most pods of a cluster have no GPUs. Their owners matter nowhere here.
            has_gpus = requested_devices(pod.get("spec") or {}, labels.gpu) and is_bound_pod(pod)
            hold = pod_hold(pod, labels) if has_gpus else None
        if uid and version:
            after[uid] = (version, hold)
        if hold is not None and hold.gpus:
            holds.append(hold)

    known = tuple(each("Node", nodes, read_node))
    kept = tuple(each("Pod", pods, read_pod))
    there = tuple(each("ResourceClaim", claims, lambda obj: check_shape(obj, ClaimShape, "its shape")))
    return ClusterState(
        labels=labels,
        nodes=known,
        pods=kept,
        claims=there,
        gpus=gpus,
        published=published,
        holds=(*holds, *claim_holds(there, kept, labels, published)),
        unreadable=tuple(unreadable),
    )


# Holds of pods.


def is_bound_pod(pod: JsonMapping) -> bool:
    """Whether it is on a node and has not ended."""
    return bool((pod.get("spec") or {}).get("nodeName")) and not has_pod_ended(pod)


def pod_hold(pod: JsonMapping, labels: SchedulerLabels) -> TrayHold:
    """What a pod has of its node by its own requests. Raises ValueError for an unreadable amount."""
    spec, metadata = pod.get("spec") or {}, pod.get("metadata") or {}
    marks = (metadata.get("annotations") or {}, metadata.get("labels") or {})
    gpus = requested_devices(spec, labels.gpu)
    return TrayHold(
        owner=pod_owner(pod, labels.gang).text,
        tray=spec.get("nodeName") or "",
        gpus=0 if is_resource_claimed(pod, labels.gpu) else gpus,
        priority=spec.get("priority") or 0,
        movable=next((m[labels.movable] for m in marks if labels.movable in m), "") == "true",
    )


# Holds of claims.


def claim_holds(
    claims: Iterable[JsonMapping],
    pods: Iterable[JsonMapping],
    labels: SchedulerLabels,
    published: PublishedDevices,
) -> Iterator[TrayHold]:
    """GPUs and IMEX channels of allocated claims, as their holders have them."""
    for claim, holder in claim_holders(claims, pods, labels):
        gpus: dict[str, set[str]] = defaultdict(set)
        for device in allocated_devices(claim):
            key = (device["pool"], device["device"])
            if device["driver"] == labels.gpu_driver and not device.get("adminAccess"):
                # A part of a GPU keeps others off the whole of it. A device that is published no more is
                # still held; drivers name the pool like the node.
                known = published.get(key) or PublishedDevice(key[0], "/".join(key), is_whole=True)
                gpus[known.node].add(known.gpu)
            elif is_imex_channel(device["driver"], device["device"]):
                yield replace(holder, tray=device["pool"], gpus=0, channel=True)
        yield from (replace(holder, tray=node, gpus=len(held)) for node, held in gpus.items())


def claim_holders(
    claims: Iterable[JsonMapping], pods: Iterable[JsonMapping], labels: SchedulerLabels
) -> Iterator[tuple[JsonMapping, TrayHold]]:
    """Each claim with its holder, as a hold on no tray."""
    found = list(claims)
    if not found:
        return
    users = [list(_users(claim)) for claim in found]
    wanted = {user for named in users for user in named}
    by_user: dict[object, JsonMapping] = {}
    for pod in pods:
        meta = pod.get("metadata") or {}
        for key in (meta.get("uid"), (meta.get("namespace") or "default", meta.get("name"))):
            if key in wanted:
                by_user[key] = pod
    for claim, named in zip(found, users, strict=True):
        using = [by_user[user] for user in named if user in by_user]
        holder = replace(pod_hold(using[0], labels), tray="", gpus=0) if using else _unknown_holder(claim)
        yield claim, holder


def owners_of_claims(state: ClusterState) -> dict[str, str]:
    """The owner of each claim, by `namespace/name`."""
    return {
        f"{object_namespace(claim['metadata'])}/{claim['metadata'].get('name')}": holder.owner
        for claim, holder in claim_holders(state.claims, state.pods, state.labels)
    }


def _users(claim: JsonMapping) -> Iterator[object]:
    """Pods that use a claim, and the one it was made for: by UID, or by name if a file has no UIDs."""
    meta = claim.get("metadata") or {}
    reserved = (claim.get("status") or {}).get("reservedFor") or ()
    for reference in (*reserved, *(meta.get("ownerReferences") or ())):
        if reference.get("uid"):
            yield reference["uid"]
        elif reference.get("name"):
            yield (meta.get("namespace") or "default", reference["name"])


def _unknown_holder(claim: JsonMapping) -> TrayHold:
    """A user that is not among the pods. The space in its name keeps it apart from every gang."""
    meta = claim.get("metadata") or {}
    reserved = (claim.get("status") or {}).get("reservedFor") or ()
    user = next((f"pod {reference['name']}" for reference in reserved if reference.get("name")), None)
    owner = qualified_name(meta, user or f"claim {meta.get('name')}")
    return TrayHold(owner=owner, tray="", gpus=0, priority=HIGHEST_PRIORITY)


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
    """A ResourceClaim, as far as it says who holds what."""

    metadata: PodMetadata
    status: _ClaimStatus | None = None


class _Pool(ApiStruct, frozen=True):
    name: str
    generation: int | None = None


class _TextValue(ApiStruct, frozen=True):
    string: str | None = None


class _DeviceAttributes(ApiStruct, frozen=True):
    type: _TextValue | None = None
    uuid: _TextValue | None = None
    parent_uuid: _TextValue | None = msgspec.field(default=None, name="parentUUID")


class _Device(ApiStruct, frozen=True):
    name: str
    attributes: _DeviceAttributes | None = None


class _SliceSpec(ApiStruct, frozen=True):
    driver: str
    pool: _Pool
    node_name: str | None = None
    devices: tuple[_Device, ...] | None = None


class SliceShape(ApiStruct, frozen=True):
    """A ResourceSlice, as far as GPUs are counted in it."""

    spec: _SliceSpec


def _title(kind: str, obj: JsonMapping) -> str:
    meta = obj.get("metadata")
    meta = meta if isinstance(meta, Mapping) else {}
    name = meta.get("name", "(unnamed)")
    return f"{kind} {meta['namespace']}/{name}" if meta.get("namespace") else f"{kind} {name}"
