"""The scheduler: devices for the claims of a pod, then a node for the pod.

One pod at a time, on the node with the fewest pods of those with room for it. A pod that fits nowhere is
looked at again, with all others that wait, a second after something changed.
"""

import asyncio
import random
from collections.abc import Iterable, Iterator

import msgspec

from rackloom.claim.allocate.allocator import allocate
from rackloom.claim.allocate.nodes import reaches
from rackloom.claim.allocate.objects import AllocationResult, NodeSelector, ResourceClaim
from rackloom.claim.allocate.outcome import Allocation
from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import Kind, Object
from rackloom.claim.kube.pods import has_ended
from rackloom.claim.kube.queue import WorkQueue
from rackloom.claim.place.reading.node_rules import is_selected
from rackloom.twin.kube.controllers.inventory import Inventory, decoded
from rackloom.twin.kube.controllers.node_fit import (
    allowed_topologies,
    is_near,
    is_tolerated,
    node_value,
)
from rackloom.twin.kube.controllers.node_room import NOTHING, PODS, Amounts, has_room, minus, needs, plus
from rackloom.twin.kube.controllers.pod_claims import FINALIZER, claim_names
from rackloom.twin.kube.direct import DirectApi
from rackloom.twin.kube.ownership import clone
from rackloom.twin.kube.server import FakeKube
from rackloom.twin.kube.store import Key, key_of

AGAIN_SECONDS = 1.0
_NAME = "default-scheduler"
"""Pods that name another are left to it."""
MOST_USERS = 256
"""Pods that one claim can be reserved for (resource.k8s.io/v1, status.reservedFor)."""
_WAKING = (kinds.NODE, kinds.RESOURCE_SLICE, kinds.DEVICE_CLASS, kinds.RESOURCE_CLAIM)


class Scheduler:
    """Binds pods without gates whose claims exist."""

    def __init__(self, kube: FakeKube, rng: random.Random) -> None:
        self._store = kube.store
        self._api = DirectApi(kube, "kube-scheduler")
        self._queue: WorkQueue[Key] = WorkQueue(rng, longest=AGAIN_SECONDS)
        self._inventory = Inventory(kube.store)
        self._waiting: set[Key] = set()
        self._again: asyncio.TimerHandle | None = None
        self._bound: dict[Key, tuple[str, Amounts]] = {}
        self._taken: dict[str, Amounts] = {}

    async def run(self) -> None:
        """Work until cancelled."""
        for pod in self._store.all(kinds.POD):
            self._hear(kinds.POD, pod)
        self._store.listeners.append(self._hear)
        try:
            await self._queue.work(self._do)
        finally:
            self._store.listeners.remove(self._hear)
            if self._again is not None:
                self._again.cancel()

    def _hear(self, kind: Kind, obj: Object) -> None:
        self._inventory.hear(kind, obj)
        if kind == kinds.POD:
            self._hear_of_pod(key_of(obj))
        elif kind in _WAKING:
            self._look_again()

    def _hear_of_pod(self, key: Key) -> None:
        pod = self._store.find(kinds.POD, key)
        is_bound = pod is not None and not has_ended(pod) and bool(pod["spec"].get("nodeName"))
        was_bound = key in self._bound
        if was_bound and not is_bound:
            node, needed = self._bound.pop(key)
            self._taken[node] = minus(self._taken[node], needed)
            self._look_again()
        if pod is not None and is_bound and not was_bound:
            node, needed = self._bound[key] = pod["spec"]["nodeName"], needs(pod["spec"])
            self._taken[node] = plus(self._taken.get(node, NOTHING), needed)
        if pod is not None and _is_to_be_placed(pod):
            self._queue.add(key)

    def _look_again(self) -> None:
        if self._waiting and self._again is None:
            loop = asyncio.get_running_loop()
            self._again = loop.call_later(AGAIN_SECONDS, self._wake_waiting)

    def _wake_waiting(self) -> None:
        self._again = None
        waiting, self._waiting = sorted(self._waiting, key=str), set()
        for key in waiting:
            self._queue.add(key)

    async def _do(self, key: Key) -> None:
        pod = self._store.find(kinds.POD, key)
        if pod is None or not _is_to_be_placed(pod):
            return
        claims = self._claims(pod)
        found = None if claims is None else self._placement(pod, claims)
        if claims is None or found is None:
            self._waiting.add(key)
            await self._tell(pod, "no node fits" if claims is not None else "its claims are not there yet")
            return
        node, results = found
        for claim, result in zip(claims, results, strict=True):
            await self._reserve(pod, claim, result)
        metadata = pod["metadata"]
        await self._api.bind(metadata["name"], metadata["namespace"], node, uid=metadata["uid"])

    def _claims(self, pod: Object) -> list[Object] | None:
        """The claims of a pod, or None while one is missing, going, or has as many users as it can."""
        found = []
        for name in claim_names(pod).values():
            claim = self._store.find(kinds.RESOURCE_CLAIM, (pod["metadata"]["namespace"], name))
            if claim is None or "deletionTimestamp" in claim["metadata"]:
                return None
            users = (claim.get("status") or {}).get("reservedFor") or ()
            if len(users) >= MOST_USERS and not _is_reserved(claim, pod):
                return None
            found.append(claim)
        return found

    def _placement(
        self, pod: Object, claims: list[Object]
    ) -> tuple[str, list[AllocationResult | None]] | None:
        """A node and what each claim gets there (None: it has its devices already)."""
        free = [claim for claim in claims if "allocation" not in (claim.get("status") or {})]
        wanted = [decoded(claim, ResourceClaim) for claim in free]
        used = self._inventory.in_use() if wanted else None
        for node in self._nodes(pod, [claim for claim in claims if claim not in free]):
            if used is None:
                return node["metadata"]["name"], [None] * len(claims)
            inventory = self._inventory
            outcome = allocate(
                node_value(node),
                inventory.classes,
                inventory.index,
                wanted,
                state=used,
                selectors=inventory.selectors,
            )
            if isinstance(outcome, Allocation):
                given = dict(zip((one["metadata"]["uid"] for one in free), outcome.results, strict=True))
                return outcome.node, [given.get(claim["metadata"]["uid"]) for claim in claims]
        return None

    def _nodes(self, pod: Object, allocated: list[Object]) -> Iterator[Object]:
        """The nodes that a pod may go to, the least loaded first."""
        spec, needed = pod["spec"], needs(pod["spec"])
        near = allowed_topologies(pod, self._placed())
        for node in sorted(self._store.all(kinds.NODE), key=self._load):
            fits = is_selected(spec, node) and is_tolerated(spec, node) and is_near(node, near)
            taken = self._taken.get(node["metadata"]["name"], NOTHING)
            if fits and has_room(node, needed, taken) and all(_reaches(one, node) for one in allocated):
                yield node

    def _load(self, node: Object) -> tuple[int, str]:
        name = node["metadata"]["name"]
        return int(self._taken.get(name, NOTHING).get(PODS, 0)), name

    def _placed(self) -> Iterable[tuple[Object, Object]]:
        for key, (name, _) in self._bound.items():
            pod, node = self._store.find(kinds.POD, key), self._store.find(kinds.NODE, (None, name))
            if pod is not None and node is not None:
                yield pod, node

    async def _reserve(self, pod: Object, claim: Object, result: AllocationResult | None) -> None:
        metadata = claim["metadata"]
        if FINALIZER not in (metadata.get("finalizers") or ()):
            held = [*(metadata.get("finalizers") or ()), FINALIZER]
            patch = {"metadata": {"finalizers": held, "resourceVersion": metadata["resourceVersion"]}}
            claim = await self._api.patch(
                kinds.RESOURCE_CLAIM, metadata["name"], metadata["namespace"], patch
            )
        if result is None and _is_reserved(claim, pod):
            return
        status = dict(claim.get("status") or {})
        if result is not None:
            status["allocation"] = msgspec.to_builtins(result)
        user = {"resource": "pods", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        status["reservedFor"] = [*(status.get("reservedFor") or ()), user]
        written = {**clone(claim), "status": status}
        await self._api.replace(kinds.RESOURCE_CLAIM, written, subresource="status")

    async def _tell(self, pod: Object, trouble: str) -> None:
        condition: Object = {"type": "PodScheduled", "status": "False"}
        condition |= {"reason": "Unschedulable", "message": trouble}
        if condition in ((pod.get("status") or {}).get("conditions") or ()):
            return
        metadata = {key: pod["metadata"][key] for key in ("name", "namespace", "uid")}
        status = {"metadata": metadata, "status": {"conditions": [condition]}}
        await self._api.apply(kinds.POD, status, manager="kube-scheduler", force=True, subresource="status")


def _is_to_be_placed(pod: Object) -> bool:
    spec = pod["spec"]
    waits = spec.get("nodeName") or spec.get("schedulingGates") or has_ended(pod)
    is_ours = spec.get("schedulerName") in (None, "", _NAME)
    return is_ours and not waits and "deletionTimestamp" not in pod["metadata"]


def _is_reserved(claim: Object, pod: Object) -> bool:
    users = (claim.get("status") or {}).get("reservedFor") or ()
    return any(user["uid"] == pod["metadata"]["uid"] for user in users)


def _reaches(claim: Object, node: Object) -> bool:
    selector = claim["status"]["allocation"].get("nodeSelector")
    if selector is None:
        return True
    found = msgspec.convert(selector, NodeSelector)
    return reaches(node_value(node), node_name=None, all_nodes=None, selector=found)
