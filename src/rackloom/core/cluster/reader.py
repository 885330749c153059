"""One reading of a cluster: its objects, each checked, become a `ClusterState`.

`ClusterReader` is the only way from Kubernetes objects to facts about trays. It follows a cluster, and a
change costs the objects that it touches:

1. Each object is read alone, when it is new or has another version. One that cannot be read (a field of
   another type, an amount that is no quantity) is named in `unreadable` and left out. No value is guessed for
   it, and the rest is read on.
2. Some facts come from several objects. A node has the GPUs that are published on it. A claim holds the GPUs
   behind its devices, for the owner of the pod that uses it. A change marks such facts of other objects, by
   pool, node and user. The next `state` finds each of them once, however many changes marked it.
3. `state` copies the values that changed since the last one. A state never changes afterwards.

`read_state` reads lists once, for example those of files.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, TypeVar

import msgspec
from msgspec.structs import asdict, replace

from rackloom.core.cluster.claims import ClaimShape, ClaimUser, claim_holds, unknown_holder
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.nodes import (
    NodeGpus,
    NodeObject,
    PublishedDevice,
    SliceShape,
    gpus_by_node,
    published_devices,
)
from rackloom.core.cluster.objects import (
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_SLICE,
    JsonMapping,
    ResourceKind,
)
from rackloom.core.cluster.pods import PodObject, check_shape, is_bound_pod, is_resource_claimed, pod_owner
from rackloom.core.cluster.scheduling import node_amounts, requested_devices
from rackloom.core.cluster.state import BoundPods, ClusterState, TrayHold, Unreadable
from rackloom.errors import Refused

K = TypeVar("K")
V = TypeVar("V")
ReadObject = JsonMapping | NodeObject | PodObject
"""An object as it was sent, or one that was decoded straight into its value."""
ObjectKey = str | tuple[object, ...]
"""The UID. An object of a file has none: its namespace, name and place in the list."""


_SHAPES: Mapping[ResourceKind, type[msgspec.Struct]] = {
    RESOURCE_SLICE: SliceShape,
    NODE: NodeObject,
    POD: PodObject,
    RESOURCE_CLAIM: ClaimShape,
}


class _Followed(msgspec.Struct):
    """The objects of one kind, in the order of the last list."""

    read: Callable[[ObjectKey, Any], None]
    """Takes the facts of an object. Raises Refused or ValueError before it changes anything."""
    forget: Callable[[ObjectKey, Any], None]
    """Takes back the facts of an object that was read."""
    versions: dict[ObjectKey, str | None] = {}
    """Of every object, also of those that cannot be read."""
    objects: dict[ObjectKey, Any] = {}
    """Those that can be read. Claims as they were sent, others as typed values."""
    unreadable: dict[ObjectKey, Unreadable] = {}


class ClusterReader:
    """Follows the nodes, pods, claims and slices of a cluster. For one thread at a time."""

    def __init__(self, labels: SchedulerLabels = SchedulerLabels()) -> None:  # noqa: B008 (a frozen value)
        self._labels = labels
        # Unreadable objects are reported in this order.
        self._kinds = {
            RESOURCE_SLICE: _Followed(self._read_slice, self._forget_slice),
            NODE: _Followed(self._read_node, self._forget_node),
            POD: _Followed(self._read_pod, self._forget_pod),
            RESOURCE_CLAIM: _Followed(self._read_claim, self._forget_claim),
        }
        self._last = ClusterState(labels=labels)
        self._last_claim_holds: tuple[TrayHold, ...] = ()
        self._has_changed_holds = False
        # Kinds of which an object came, changed or went since the last state.
        self._changed: set[ResourceKind] = set()
        # Slices by pool, and the devices and the number of whole GPUs that they publish.
        self._slices: dict[ObjectKey, SliceShape] = {}
        self._pools: dict[str, dict[ObjectKey, SliceShape]] = defaultdict(dict)
        self._devices: dict[str, Mapping[tuple[str, str], PublishedDevice]] = {}
        self._published: dict[tuple[str, str], PublishedDevice] = {}
        self._counts: Counter[str] = Counter()
        # Nodes by name.
        self._nodes: dict[str, NodeObject] = {}
        self._gpus: dict[str, NodeGpus] = {}
        # Bound pods that have not ended, by node.
        self._bound: dict[str, dict[ObjectKey, PodObject]] = defaultdict(dict)
        # Claims, and holds by pod and by claim.
        self._claims: dict[ObjectKey, ClaimShape] = {}
        self._pod_holds: dict[ObjectKey, TrayHold] = {}
        self._holders: dict[ObjectKey, TrayHold] = {}
        self._claim_holds: dict[ObjectKey, tuple[TrayHold, ...]] = {}
        self._claims_of_user: dict[ClaimUser, set[ObjectKey]] = defaultdict(set)
        self._claims_of_pool: dict[str, set[ObjectKey]] = defaultdict(set)
        # Facts to find again.
        self._changed_pools: set[str] = set()
        self._changed_nodes: set[str] = set()
        self._changed_claims: set[ObjectKey] = set()

    # Changes.

    def take(self, kind: ResourceKind, obj: ReadObject) -> None:
        """Read an object that is new or has changed."""
        self._take(kind, *_identity(obj), obj)

    def drop(self, kind: ResourceKind, obj: ReadObject) -> None:
        """Forget an object that is gone."""
        self._drop(self._kinds[kind], _identity(obj)[0], kind)

    def read(self, lists: Mapping[ResourceKind, Iterable[ReadObject]]) -> ClusterState:
        """The facts of whole lists. Objects of a version that was read before are not read again."""
        for kind, listed in lists.items():
            followed, order = self._kinds[kind], dict[ObjectKey, None]()
            for place, obj in enumerate(listed):
                key, version = _identity(obj)
                # Files may repeat a name, or have none.
                if key in order:
                    key = (key, place)
                order[key] = None
                if version is None or followed.versions.get(key) != version:
                    self._take(kind, key, version, obj)
            for key in followed.versions.keys() - order.keys():
                self._drop(followed, key, kind)
            # Holds and trays come in the order of the list, not of the changes.
            _reorder(followed.objects, order)
            _reorder(followed.unreadable, order)
            if kind == POD:
                _reorder(self._pod_holds, order)
        return self.state()

    def _take(self, kind: ResourceKind, key: ObjectKey, version: str | None, obj: ReadObject) -> None:
        followed = self._kinds[kind]
        before = followed.objects.pop(key, None)
        if before is not None:
            followed.forget(key, before)
        self._changed.add(kind)
        try:
            value = check_shape(obj, _SHAPES[kind], "its shape") if isinstance(obj, Mapping) else obj
            followed.read(key, value)
        except (Refused, ValueError) as error:
            followed.unreadable[key] = _unreadable(kind, obj, error)
        else:
            followed.unreadable.pop(key, None)
            followed.objects[key] = obj if kind == RESOURCE_CLAIM else value
        followed.versions[key] = version

    def _drop(self, followed: _Followed, key: ObjectKey, kind: ResourceKind) -> None:
        self._changed.add(kind)
        followed.versions.pop(key, None)
        followed.unreadable.pop(key, None)
        before = followed.objects.pop(key, None)
        if before is not None:
            followed.forget(key, before)

    # The facts of one object, and the facts of other objects that it changes.

    def _read_slice(self, key: ObjectKey, slice_: SliceShape) -> None:
        if slice_.spec.driver == self._labels.gpu_driver:
            self._slices[key] = slice_
            self._pools[slice_.spec.pool.name][key] = slice_
            self._changed_pools.add(slice_.spec.pool.name)

    def _forget_slice(self, key: ObjectKey, slice_: SliceShape) -> None:
        # That of another driver was not taken.
        if self._slices.pop(key, None) is not None:
            del self._pools[slice_.spec.pool.name][key]
            self._changed_pools.add(slice_.spec.pool.name)

    def _read_node(self, _: ObjectKey, node: NodeObject) -> None:
        self._gpus[node.name] = node_gpus(node, self._labels.gpu, self._counts[node.name])
        self._nodes[node.name] = node

    def _forget_node(self, _: ObjectKey, node: NodeObject) -> None:
        # A new node may come under the name before the old one goes.
        if self._nodes.get(node.name) is node:
            del self._nodes[node.name], self._gpus[node.name]

    def _read_pod(self, key: ObjectKey, pod: PodObject) -> None:
        # Most pods of a cluster have no GPUs. Their owners matter only to claims.
        gpus = counted_gpus(pod, self._labels)
        if is_bound_pod(pod):
            self._bound[pod.node][key] = pod
            self._changed_nodes.add(pod.node)
            if gpus:
                self._pod_holds[key] = pod_hold(pod, self._labels, gpus)
                self._has_changed_holds = True
        self._mark_claims_of(pod)

    def _forget_pod(self, key: ObjectKey, pod: PodObject) -> None:
        if self._pod_holds.pop(key, None) is not None:
            self._has_changed_holds = True
        if self._bound.get(pod.node, {}).pop(key, None) is not None:
            self._changed_nodes.add(pod.node)
        self._mark_claims_of(pod)

    def _mark_claims_of(self, pod: PodObject) -> None:
        if self._claims_of_user:
            for user in _names_of_user(pod):
                self._changed_claims |= self._claims_of_user.get(user, set())

    def _read_claim(self, key: ObjectKey, claim: ClaimShape) -> None:
        self._claims[key] = claim
        for user in claim.users:
            self._claims_of_user[user].add(key)
        for device in claim.devices:
            self._claims_of_pool[device.pool].add(key)
        self._changed_claims.add(key)

    def _forget_claim(self, key: ObjectKey, _: JsonMapping) -> None:
        claim = self._claims.pop(key)
        for user in claim.users:
            _unlink(self._claims_of_user, user, key)
        for device in claim.devices:
            _unlink(self._claims_of_pool, device.pool, key)
        self._changed_claims.add(key)

    # The facts of several objects.

    def state(self) -> ClusterState:
        """The facts of all objects that were taken and not dropped."""
        # Only values that changed are copied: most changes are of one pod among tens of thousands.
        last, slices, nodes, pods, claims = self._last, *self._kinds.values()
        if self._changed_pools:
            self._settle_pools()
            last = replace(last, published=self._published.copy(), gpus=self._gpus.copy())
        if NODE in self._changed:
            last = replace(last, nodes=tuple(nodes.objects.values()), gpus=self._gpus.copy())
        if POD in self._changed:
            last = replace(last, pods=tuple(pods.objects.values()))
        if self._changed_nodes:
            last = replace(last, bound=self._settle_bound(last.bound))
        if self._changed_claims:
            self._settle_claims()
            last = replace(
                last,
                claims=tuple(claims.objects.values()),
                holders=tuple(map(self._holders.__getitem__, claims.objects)),
            )
            by_claim = map(self._claim_holds.__getitem__, claims.objects)
            self._last_claim_holds = tuple(chain.from_iterable(by_claim))
            self._has_changed_holds = True
        if self._has_changed_holds:
            last = replace(last, holds=(*self._pod_holds.values(), *self._last_claim_holds))
        if self._changed:
            unreadable = (followed.unreadable.values() for followed in (slices, nodes, pods, claims))
            last = replace(last, unreadable=tuple(chain.from_iterable(unreadable)))
        self._has_changed_holds = False
        self._changed.clear()
        self._last = last
        return last

    def _settle_pools(self) -> None:
        changed_nodes: set[str] = set()
        for pool in self._changed_pools:
            # A pool counts in its newest generation, so one slice decides over the others.
            before = self._devices.pop(pool, {})
            after = published_devices(self._pools[pool].values())
            if not self._pools[pool]:
                del self._pools[pool]
            for key in before:
                del self._published[key]
            self._published |= after
            if after:
                self._devices[pool] = after
            self._counts.subtract(gpus_by_node(before))
            self._counts.update(gpus_by_node(after))
            changed_nodes |= {device.node for device in (*before.values(), *after.values())}
            # A claim names devices, and holds the GPUs that these are.
            self._changed_claims |= self._claims_of_pool.get(pool, set())
        self._changed_pools.clear()
        for name in changed_nodes:
            # A node that names no GPUs has those that are published on it.
            if name in self._nodes:
                self._gpus[name] = node_gpus(self._nodes[name], self._labels.gpu, self._counts[name])
            if not self._counts[name]:
                del self._counts[name]

    def _settle_bound(self, last: BoundPods) -> BoundPods:
        bound = dict(last)
        for name in self._changed_nodes:
            if self._bound[name]:
                bound[name] = self._bound[name].copy()
            else:
                del self._bound[name]
                bound.pop(name, None)
        self._changed_nodes.clear()
        return bound

    def _settle_claims(self) -> None:
        pods = self._kinds[POD].objects
        by_name: dict[ClaimUser, PodObject] | None = None
        for key in self._changed_claims:
            claim = self._claims.get(key)
            if claim is None:
                self._holders.pop(key, None)
                self._claim_holds.pop(key, None)
                continue
            using = None
            for user in claim.users:
                using = pods.get(user) if isinstance(user, str) else None
                # Only objects of files are known by name.
                if using is None and not isinstance(user, str):
                    by_name = by_name or {_names_of_user(pod)[1]: pod for pod in pods.values()}
                    using = by_name.get(user)
                if using is not None:
                    break
            known = None if using is None else replace(pod_hold(using, self._labels, 0), tray="")
            holder = known or unknown_holder(claim)
            self._holders[key] = holder
            self._claim_holds[key] = tuple(
                claim_holds(claim, holder, self._published, self._labels.gpu_driver)
            )
        self._changed_claims.clear()


def read_state(
    nodes: Iterable[ReadObject] = (),
    pods: Iterable[ReadObject] = (),
    claims: Iterable[JsonMapping] = (),
    slices: Iterable[JsonMapping] = (),
    labels: SchedulerLabels = SchedulerLabels(),  # noqa: B008 (a frozen value)
) -> ClusterState:
    """The facts of the objects. It refuses nothing: objects that cannot be read are named."""
    return ClusterReader(labels).read(
        {RESOURCE_SLICE: slices, NODE: nodes, POD: pods, RESOURCE_CLAIM: claims}
    )


def find_fault(kind: ResourceKind, obj: JsonMapping) -> Unreadable | None:
    """The reason why `ClusterReader` leaves out an object of one of its kinds, or None if it can be read."""
    try:
        value = check_shape(obj, _SHAPES[kind], "its shape")
        if isinstance(value, NodeObject):
            node_amounts(value)
        elif isinstance(value, PodObject):
            counted_gpus(value, SchedulerLabels())
    except (Refused, ValueError) as error:
        return _unreadable(kind, obj, error)
    return None


def _unreadable(kind: ResourceKind, obj: ReadObject, error: Exception) -> Unreadable:
    meta = _metadata(obj)
    within = f"{meta['namespace']}/" if meta.get("namespace") else ""
    title = f"{kind.kind} {within}{meta.get('name') or '(unnamed)'}"
    return Unreadable(title, error.reason if isinstance(error, Refused) else str(error))


# GPUs of nodes and holds of pods. A pod holds the GPUs that it requests in effect from its node, from when it
# is bound until it has ended. If the scheduler's own claim serves them (KEP-5004), the claim holds them
# instead.


def node_gpus(node: NodeObject, resource: str, published: int) -> NodeGpus:
    """GPUs of a node. `published`: in slices. Raises ValueError for an unreadable amount."""
    # A kubelet goes on to name 0 of a resource after its device plugin is gone.
    by_plugin = node_amounts(node).get(resource, 0) // 1000
    return NodeGpus(counted=by_plugin or published, claimed=published)


def counted_gpus(pod: PodObject, labels: SchedulerLabels) -> int:
    """The GPUs that a pod has by counting them. Raises ValueError for an unreadable amount."""
    gpus = requested_devices(pod.spec, labels.gpu)
    return 0 if gpus and is_resource_claimed(pod, labels.gpu) else gpus


def pod_hold(pod: PodObject, labels: SchedulerLabels, gpus: int) -> TrayHold:
    """A hold of the job of a pod on the pod's node."""
    marks = (pod.annotations, pod.labels)
    return TrayHold(
        owner=pod_owner(pod, labels.gang).text,
        tray=pod.node,
        gpus=gpus,
        priority=pod.spec.priority or 0,
        movable=next((m[labels.movable] for m in marks if labels.movable in m), "") == "true",
    )


# Names of objects, which may have any shape.


def _metadata(obj: ReadObject) -> JsonMapping:
    if not isinstance(obj, Mapping):
        return asdict(obj.metadata)
    found = obj.get("metadata")
    return found if isinstance(found, dict) else {}


def _identity(obj: ReadObject) -> tuple[ObjectKey, str | None]:
    """The key of an object, and the version that the API server gave to this state of it, if one did."""
    meta = _metadata(obj)
    uid, version = meta.get("uid"), meta.get("resourceVersion")
    if uid and isinstance(uid, str):
        return uid, version if isinstance(version, str) else None
    return (str(meta.get("namespace")), str(meta.get("name"))), None


def _names_of_user(pod: PodObject) -> tuple[ClaimUser, ClaimUser]:
    return pod.metadata.uid, (pod.namespace, pod.metadata.name)


def _unlink(index: dict[K, set[ObjectKey]], value: K, key: ObjectKey) -> None:
    """Takes a key out of an index. Values come and go while the process runs, so none stays empty."""
    keys = index.get(value, set())
    keys.discard(key)
    if not keys:
        index.pop(value, None)


def _reorder(values: dict[ObjectKey, V], order: Iterable[ObjectKey]) -> None:
    known = values.copy()
    values.clear()
    values.update((key, known[key]) for key in order if key in known)
