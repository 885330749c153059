"""A small kube-scheduler: devices for a pod's claims, then a node for the pod.

Pods are placed one at a time. A node is feasible when it matches the node selector and affinity, its
taints are tolerated, required pod affinity is met, its free resources suffice (NodeResourcesFit: cpu,
memory, extended resources and pods, with init containers as in PodRequests), and the claims that are
already allocated reach it. The least loaded feasible node comes first. Claims without an allocation get
their devices from the production allocator (`Fleet`), on the first of these nodes that serves them.

The claims are then reserved for the pod, with the delete-protection finalizer written first, and the
pod is bound. A pod that fits nowhere gets a PodScheduled condition and waits. All waiting pods are
tried again a second after a node, slice, class, claim or DeviceTaintRule changed, or a bound pod went.

Pods with scheduling gates or another scheduler's name are left alone. `DeviceInventory` keeps the
allocator in step with the store.
"""

import asyncio
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
import structlog

from rackloom.core.allocate.fleet import Fleet
from rackloom.core.allocate.objects import (
    AllocationResult,
    DeviceClass,
    Node,
    NodeSelector,
    ResourceClaim,
    ResourceSlice,
)
from rackloom.core.allocate.outcome import Allocation, Fault
from rackloom.core.allocate.pools import node_selector_matches
from rackloom.core.allocate.taint_rules import DeviceTaintRule, readable_rules, with_taint_rules
from rackloom.core.cluster import objects
from rackloom.core.cluster.nodes import NodeObject, read_node
from rackloom.core.cluster.objects import Object, ResourceKind, has_pod_ended
from rackloom.core.cluster.pods import PodAffinityTerm, PodObject, read_pod
from rackloom.core.cluster.scheduling import (
    NO_AMOUNTS,
    PODS_RESOURCE,
    ResourceAmounts,
    allocatable_of_node,
    allocator_node,
    is_node_selected,
    pod_requests,
    selector_matches,
)
from rackloom.lab.kube.controllers.claims import CLAIM_FINALIZER, claims_by_entry
from rackloom.lab.kube.controllers.workloads import Controller
from rackloom.lab.kube.managed_fields import clone
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.kube.store import ObjectKey, ObjectStore, key_of

log = structlog.get_logger(__name__)

RETRY_SECONDS = 1.0
_NO_NODE = "no node fits"
_SCHEDULER_NAME = "default-scheduler"
"""Pods that name another are left to it."""
MAX_CLAIM_USERS = 256
"""Pods that one claim can be reserved for (resource.k8s.io/v1, status.reservedFor)."""
_WAKING_KINDS = (
    objects.NODE,
    objects.RESOURCE_SLICE,
    objects.DEVICE_CLASS,
    objects.RESOURCE_CLAIM,
    *objects.DEVICE_TAINT_RULES,
)


class SimulatedScheduler(Controller):
    """Binds pods that have no gates once their claims exist."""

    kinds = (objects.POD,)
    user = "kube-scheduler"
    workers = 1
    longest_retry_s = RETRY_SECONDS

    def __init__(self, kube: FakeKube, rng: random.Random) -> None:
        super().__init__(kube, rng)
        self._inventory = DeviceInventory(kube.store)
        self._waiting: set[ObjectKey] = set()
        self._again: asyncio.TimerHandle | None = None
        self._bound: dict[ObjectKey, tuple[str, ResourceAmounts]] = {}
        self._taken: dict[str, ResourceAmounts] = {}
        """The amounts of bound pods by node, summed as pods come and go, as kube-scheduler's cache does."""

    async def run(self) -> None:
        """Work until cancelled."""
        self._inventory.read_all()
        try:
            await super().run()
        finally:
            if self._again is not None:
                self._again.cancel()

    def _wake(self, kind: ResourceKind, obj: Object) -> None:
        self._inventory.note_change(kind, obj)
        if kind == objects.POD:
            self._note_pod(key_of(obj))
        elif kind in _WAKING_KINDS:
            self._retry_later()

    def _note_pod(self, key: ObjectKey) -> None:
        pod = self._store.find(objects.POD, key)
        is_bound = pod is not None and not has_pod_ended(pod) and bool(pod["spec"].get("nodeName"))
        was_bound = key in self._bound
        if was_bound and not is_bound:
            node, needed = self._bound.pop(key)
            self._taken[node] = self._taken[node] - needed
            self._retry_later()
        if pod is not None and is_bound and not was_bound:
            node, needed = self._bound[key] = pod["spec"]["nodeName"], _requested(pod)
            self._taken[node] = self._taken.get(node, NO_AMOUNTS) + needed
        if pod is not None and _is_schedulable(pod):
            self._queue.add(key)

    def _retry_later(self) -> None:
        # All waiting pods share one timer, so that a burst of changes costs one attempt for each of them.
        if self._waiting and self._again is None:
            loop = asyncio.get_running_loop()
            self._again = loop.call_later(RETRY_SECONDS, self._wake_waiting)

    def _wake_waiting(self) -> None:
        self._again = None
        waiting, self._waiting = sorted(self._waiting, key=str), set()
        for key in waiting:
            self._queue.add(key)

    async def _reconcile(self, key: ObjectKey) -> None:
        pod = self._store.find(objects.POD, key)
        if pod is None or not _is_schedulable(pod):
            return
        claims = self._claims(pod)
        found = "its claims are not there yet" if claims is None else self._placement(pod, claims)
        if claims is None or isinstance(found, str):
            self._waiting.add(key)
            await self._report_unschedulable(pod, str(found))
            return
        node, results = found
        # Claims are reserved before the pod is bound: kubelet prepares only claims that name their pod. A
        # failure in between leaves reservations, which the next attempt finds and keeps.
        for claim, result in zip(claims, results, strict=True):
            await self._reserve(pod, claim, result)
        metadata = pod["metadata"]
        await self._api.bind(metadata["name"], metadata["namespace"], node, uid=metadata["uid"])

    def _claims(self, pod: Object) -> list[Object] | None:
        """The claims of a pod, or None while one is missing, going, or has as many users as it can."""
        found = []
        for name in claims_by_entry(pod).values():
            claim = self._store.find(objects.RESOURCE_CLAIM, (pod["metadata"]["namespace"], name))
            if claim is None or "deletionTimestamp" in claim["metadata"]:
                return None
            users = (claim.get("status") or {}).get("reservedFor") or ()
            if len(users) >= MAX_CLAIM_USERS and not _is_reserved(claim, pod):
                return None
            found.append(claim)
        return found

    def _placement(
        self, pod: Object, claims: list[Object]
    ) -> tuple[str, list[AllocationResult | None]] | str:
        """A node and the result of each claim (None if it is allocated already), or why there is none."""
        # Claims that are allocated already restrict the nodes. Only the others go to the allocator.
        free = [claim for claim in claims if "allocation" not in (claim.get("status") or {})]
        wanted = [decode_as(claim, ResourceClaim) for claim in free]
        nodes = self._nodes(pod, [claim for claim in claims if claim not in free])
        names = (node["metadata"]["name"] for node in nodes)
        if not wanted:
            # Nothing to allocate: the least loaded feasible node is the answer.
            name = next(names, None)
            return _NO_NODE if name is None else (name, [None] * len(claims))
        outcome = self._inventory.fleet.find(wanted, among=names)
        if not isinstance(outcome, Allocation):
            # A fault of the attempt ends it, as upstream: other nodes are not tried.
            return outcome.reason if isinstance(outcome, Fault) else _NO_NODE
        given = dict(zip((claim["metadata"]["uid"] for claim in free), outcome.results, strict=True))
        return outcome.node, [given.get(claim["metadata"]["uid"]) for claim in claims]

    def _nodes(self, pod: Object, allocated: list[Object]) -> Iterator[Object]:
        """The nodes that a pod may go to, the least loaded first."""
        written, spec, needed = pod["spec"], read_pod(pod).spec, _requested(pod)
        near = allowed_topologies(pod, self._placed())
        for obj in sorted(self._store.all(objects.NODE), key=self._load):
            node = read_node(obj)
            fits = is_node_selected(spec, node) and is_tolerated(written, obj) and meets_affinity(node, near)
            taken = self._taken.get(node.name, NO_AMOUNTS)
            if (
                fits
                and fits_node(node, needed, taken)
                and all(_claim_reaches(claim, node) for claim in allocated)
            ):
                yield obj

    def _load(self, node: Object) -> tuple[int, str]:
        name = node["metadata"]["name"]
        return int(self._taken.get(name, NO_AMOUNTS)[PODS_RESOURCE]), name

    def _placed(self) -> Iterable[tuple[Object, Object]]:
        for key, (name, _) in self._bound.items():
            pod, node = self._store.find(objects.POD, key), self._store.find(objects.NODE, (None, name))
            if pod is not None and node is not None:
                yield pod, node

    async def _reserve(self, pod: Object, claim: Object, result: AllocationResult | None) -> None:
        metadata = claim["metadata"]
        if CLAIM_FINALIZER not in (metadata.get("finalizers") or ()):
            held = [*(metadata.get("finalizers") or ()), CLAIM_FINALIZER]
            patch = {"metadata": {"finalizers": held, "resourceVersion": metadata["resourceVersion"]}}
            claim = await self._api.patch(
                objects.RESOURCE_CLAIM, metadata["name"], metadata["namespace"], patch
            )
        if result is None and _is_reserved(claim, pod):
            return
        status = dict(claim.get("status") or {})
        if result is not None:
            status["allocation"] = msgspec.to_builtins(result)
        user = {"resource": "pods", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        status["reservedFor"] = [*(status.get("reservedFor") or ()), user]
        written = {**clone(claim), "status": status}
        await self._api.replace(objects.RESOURCE_CLAIM, written, subresource="status")

    async def _report_unschedulable(self, pod: Object, message: str) -> None:
        condition: Object = {"type": "PodScheduled", "status": "False"}
        condition |= {"reason": "Unschedulable", "message": message}
        if condition in ((pod.get("status") or {}).get("conditions") or ()):
            return
        metadata = {key: pod["metadata"][key] for key in ("name", "namespace", "uid")}
        status = {"metadata": metadata, "status": {"conditions": [condition]}}
        await self._api.apply(objects.POD, status, manager="kube-scheduler", force=True, subresource="status")


def _is_schedulable(pod: Object) -> bool:
    spec = pod["spec"]
    waits = spec.get("nodeName") or spec.get("schedulingGates") or has_pod_ended(pod)
    is_ours = spec.get("schedulerName") in (None, "", _SCHEDULER_NAME)
    return is_ours and not waits and "deletionTimestamp" not in pod["metadata"]


def _is_reserved(claim: Object, pod: Object) -> bool:
    users = (claim.get("status") or {}).get("reservedFor") or ()
    return any(user["uid"] == pod["metadata"]["uid"] for user in users)


def _claim_reaches(claim: Object, node: NodeObject) -> bool:
    selector = claim["status"]["allocation"].get("nodeSelector")
    if selector is None:
        return True
    return node_selector_matches(allocator_node(node), msgspec.convert(selector, NodeSelector))


# The scheduler's cache of devices.


T = TypeVar("T")


def _readable(obj: Any, kind: type[T]) -> T | None:
    """The value. None if the allocator cannot read it: it then counts as absent."""
    try:
        return msgspec.convert(obj, kind)
    except msgspec.ValidationError as error:
        log.warning("scheduler.unreadable", kind=kind.__name__, reason=str(error))
        return None


def decode_as(obj: Object, kind: type[T]) -> T:
    """An API object as the allocator takes it."""
    return msgspec.convert(_bare(obj), kind)


def _bare(obj: Object) -> Object:
    return {key: obj[key] for key in obj if key not in ("apiVersion", "kind")}


class DeviceInventory:
    """The production allocator over the devices, DeviceTaintRules and allocations of the store.

    It follows the store. A claim changes the devices in use, a slice the devices of its nodes. After a change
    of a class, a rule, or the name or labels of a node, the next use rebuilds the allocator.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._fleet: Fleet | None = None
        self._slices: dict[ObjectKey, ResourceSlice] = {}
        self._nodes: dict[ObjectKey, Node] = {}
        self._rules: tuple[DeviceTaintRule, ...] = ()
        self._allocations: dict[ObjectKey, AllocationResult] = {}

    def read_all(self) -> None:
        """Read the objects in the store before its changes are followed."""
        self._read_rules()
        for kind in (objects.RESOURCE_SLICE, objects.NODE, objects.RESOURCE_CLAIM):
            for obj in self._store.all(kind):
                self.note_change(kind, obj)

    def note_change(self, kind: ResourceKind, obj: Object) -> None:
        """Take a change in."""
        key = key_of(obj)
        if kind == objects.RESOURCE_SLICE:
            found = self._store.find(kind, key)
            value = _readable(_bare(found), ResourceSlice) if found else None
            before = self._slices.get(key)
            if _noted(self._slices, key, value) and self._fleet is not None:
                self._fleet.replace_slice(self._tainted(before), self._tainted(value))
        elif kind == objects.NODE:
            found = self._store.find(kind, key)
            if _noted(self._nodes, key, allocator_node(read_node(found)) if found else None):
                self._fleet = None
        elif kind == objects.DEVICE_CLASS:
            self._fleet = None
        elif kind in objects.DEVICE_TAINT_RULES:
            self._read_rules()
        elif kind == objects.RESOURCE_CLAIM:
            self._note_claim(key)

    def _tainted(self, value: ResourceSlice | None) -> ResourceSlice | None:
        return None if value is None else with_taint_rules([value], self._rules)[0]

    def _read_rules(self) -> None:
        rules = (rule for kind in objects.DEVICE_TAINT_RULES for rule in self._store.all(kind))
        self._rules = tuple(readable_rules(rules))
        self._fleet = None

    def _note_claim(self, key: ObjectKey) -> None:
        found = self._store.find(objects.RESOURCE_CLAIM, key)
        written = ((found or {}).get("status") or {}).get("allocation")
        given = _readable(written, AllocationResult) if written else None
        before = self._allocations.get(key)
        if given == before:
            return
        if before is not None:
            del self._allocations[key]
        if given is not None:
            self._allocations[key] = given
        if self._fleet is not None:
            self._fleet.release([before] if before is not None else [])
            self._fleet.occupy([given] if given is not None else [])

    @property
    def fleet(self) -> Fleet:
        """The allocator, with all that is in use."""
        if self._fleet is None:
            classes = self._store.all(objects.DEVICE_CLASS)
            self._fleet = Fleet(
                list(self._nodes.values()),
                [decode_as(device_class, DeviceClass) for device_class in classes],
                with_taint_rules(self._slices.values(), self._rules),
            )
            self._fleet.occupy(list(self._allocations.values()))
        return self._fleet


def _noted(known: dict[ObjectKey, T], key: ObjectKey, value: T | None) -> bool:
    """Store a value, and return whether it is new."""
    if known.get(key) == value:
        return False
    if value is None:
        del known[key]
    else:
        known[key] = value
    return True


# Filters: labels, taints and pod affinity.


def is_tolerated(spec: Mapping[str, Any], node: Object) -> bool:
    """Whether the pod tolerates every taint that keeps pods away."""
    tolerations = spec.get("tolerations") or ()
    taints = [
        taint for taint in node.get("spec", {}).get("taints") or () if taint["effect"] != "PreferNoSchedule"
    ]
    if node.get("spec", {}).get("unschedulable"):
        taints.append({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"})
    return all(any(_tolerates(toleration, taint) for toleration in tolerations) for taint in taints)


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect", taint["effect"]) != taint["effect"]:
        return False
    if toleration.get("operator") == "Exists":
        return bool(toleration.get("key", taint["key"]) == taint["key"])
    return (toleration.get("key"), toleration.get("value", "")) == (taint["key"], taint.get("value", ""))


_Allowed = list[tuple[str, set[str | None]]]
"""Labels of nodes, and the values that are allowed."""


def allowed_topologies(pod: Object, placed: Iterable[tuple[Object, Object]]) -> _Allowed:
    """For each required pod affinity of `pod`: the label of nodes that it is about, and the values allowed.

    `placed` are pods with their nodes. A pod that matches its own term may be the first anywhere: such a term
    is left out.
    """
    mine = read_pod(pod)
    others = [(read_pod(other), read_node(node)) for other, node in placed] if mine.spec.near else []
    allowed = []
    for term in mine.spec.near:
        key = term.topology_key
        values = {node.labels.get(key) for other, node in others if _term_selects(term, mine, other)} - {None}
        if values or not _term_selects(term, mine, mine):
            allowed.append((key, values))
    return allowed


def meets_affinity(node: NodeObject, allowed: _Allowed) -> bool:
    """Whether a node lies where pod affinity allows."""
    return all(node.labels.get(key) in values for key, values in allowed)


def _requested(pod: Object) -> ResourceAmounts:
    """The request of a pod. If it cannot be read (a real API server refuses such a pod), it fits nowhere."""
    try:
        return pod_requests(read_pod(pod).spec)
    except ValueError:
        return ResourceAmounts({"unreadable": 1})


def _term_selects(term: PodAffinityTerm, pod: PodObject, other: PodObject) -> bool:
    named = other.namespace in (term.namespaces or (pod.namespace,))
    return named and selector_matches(term.label_selector, other.labels)


# Filter: free resources (NodeResourcesFit).


def fits_node(node: NodeObject, needed: ResourceAmounts, taken: ResourceAmounts) -> bool:
    """Whether a node has the needed amounts beside those taken. It has none of a resource that it omits."""
    there = allocatable_of_node(node)
    return all(not amount or amount <= there[name] - taken[name] for name, amount in needed.items())
