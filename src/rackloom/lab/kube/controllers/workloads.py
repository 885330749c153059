"""The workload and node controllers of kube-controller-manager: DaemonSets, Jobs, node lifecycle.

`run_controller` is their common loop: each change of the store queues the keys of the owners that it
concerns, and a rate-limited work queue reconciles them one key at a time.

- `DaemonSetController` keeps one pod on every node that the template selects. The pod names its node by
  affinity, as the real one does. A changed template is used for new pods only (OnDelete).
- `JobController` replaces failed pods until enough have succeeded, or the back-off limit is exceeded.
- `NodeLifecycleController` compares each node's lease with the time. A node without a heartbeat gets
  Ready Unknown and the unreachable taints. Its pods stay: eviction after tolerationSeconds is not simulated.
"""

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import datetime

from rackloom.claim.cluster.controller_runtime import WorkQueue
from rackloom.claim.kube.api import Conflict, KubeError, NotFound
from rackloom.core.cluster import objects
from rackloom.core.cluster.nodes import read_node
from rackloom.core.cluster.objects import (
    Object,
    ResourceKind,
    has_pod_ended,
    is_pod_ready,
    metav1_time,
    pod_phase,
)
from rackloom.core.cluster.pods import REQUIRED, read_pod
from rackloom.core.cluster.scheduling import is_node_selected
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.managed_fields import clone
from rackloom.lab.kube.objects import owner_references
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.kube.store import ObjectKey, key_of


class Controller(ABC):
    """A reconcile loop over the store: a work queue of keys, filled by existing objects and by changes.

    Existing objects of `kinds` are reconciled at the start, a change of one in `owned` reconciles its owner,
    and `user` is the name under which it writes.
    """

    kinds: tuple[ResourceKind, ...]
    owned: tuple[ResourceKind, ...] = (objects.POD,)
    user = "kube-controller-manager"
    workers = 4
    longest_retry_s = 5.0
    """Writes that failed come back soon: a simulation is short."""

    def __init__(self, kube: FakeKube, rng: random.Random) -> None:
        self._store = kube.store
        self._api = DirectApi(kube, self.user)
        self._queue: WorkQueue[ObjectKey] = WorkQueue(rng, longest=self.longest_retry_s)

    async def run(self) -> None:
        """Work until cancelled."""
        for kind in self.kinds:
            for obj in self._store.all(kind):
                self._wake(kind, obj)
        self._store.listeners.append(self._wake)
        try:
            await self._queue.work(self._reconcile, workers=self.workers)
        finally:
            self._store.listeners.remove(self._wake)

    def _wake(self, kind: ResourceKind, obj: Object) -> None:
        for key in self._keys_of(kind, obj):
            self._queue.add(key)

    def _keys_of(self, kind: ResourceKind, obj: Object) -> Iterable[ObjectKey]:
        """The keys that a change of an object reconciles."""
        if kind == self.kinds[0]:
            return [key_of(obj)]
        return owner_keys(obj, self.kinds[0]) if kind in self.owned else ()

    @abstractmethod
    async def _reconcile(self, key: ObjectKey) -> None:
        """Compare the object of this key with its desired state, and write the difference."""

    async def _update_status(self, kind: ResourceKind, obj: Object, status: Object) -> Object:
        """Write the status of an object if it differs."""
        if obj.get("status") == status:
            return obj
        return await self._api.replace(kind, {**clone(obj), "status": status}, subresource="status")

    async def _delete(self, kind: ResourceKind, obj: Object) -> None:
        """Ask for the deletion of this very object, once."""
        metadata = obj["metadata"]
        if "deletionTimestamp" not in metadata:
            with suppress(NotFound, Conflict):
                await self._api.delete(kind, metadata["name"], metadata["namespace"], uid=metadata["uid"])


def controller_reference(kind: ResourceKind, owner: Object) -> list[Object]:
    """The ownerReferences of an object that is made for `owner`, of this kind."""
    metadata = owner["metadata"]
    reference = {"apiVersion": kind.api_version, "kind": kind.kind}
    reference |= {"name": metadata["name"], "uid": metadata["uid"]}
    return [reference | {"controller": True, "blockOwnerDeletion": True}]


def owner_keys(obj: Object, kind: ResourceKind) -> Iterator[ObjectKey]:
    """The owners of this kind that an object names."""
    for owner in owner_references(obj):
        if owner["kind"] == kind.kind:
            yield obj["metadata"].get("namespace"), owner["name"]


def condition_status(obj: Object, type_: str) -> str:
    """The status of a condition, or Unknown if it is absent."""
    conditions = (obj.get("status") or {}).get("conditions") or ()
    return next((str(found["status"]) for found in conditions if found["type"] == type_), "Unknown")


# DaemonSets.


_GENERATION_LABEL = "pod-template-generation"


class DaemonSetController(Controller):
    """Pods come and go with labels of nodes. A changed template is for new pods only (OnDelete)."""

    kinds = (objects.DAEMON_SET,)

    def _keys_of(self, kind: ResourceKind, obj: Object) -> Iterable[ObjectKey]:
        if kind == objects.NODE:
            return [key_of(daemon_set) for daemon_set in self._store.all(objects.DAEMON_SET)]
        return super()._keys_of(kind, obj)

    async def _reconcile(self, key: ObjectKey) -> None:
        daemon_set = self._store.find(objects.DAEMON_SET, key)
        if daemon_set is None or "deletionTimestamp" in daemon_set["metadata"]:
            return
        spec = read_pod(daemon_set["spec"]["template"]).spec
        nodes = map(read_node, self._store.all(objects.NODE))
        wanted = {node.name for node in nodes if is_node_selected(spec, node)}
        for node, pods in self._pods(daemon_set).items():
            surplus = pods[1:] if node in wanted else pods
            for pod in [*surplus, *(pod for pod in pods[:1] if has_pod_ended(pod))]:
                await self._delete(objects.POD, pod)
        for node in sorted(wanted - self._pods(daemon_set).keys()):
            await self._api.create(objects.POD, _daemon_pod(daemon_set, node))
        if (daemon_set := self._store.find(objects.DAEMON_SET, key)) is not None:
            await self._update_status(objects.DAEMON_SET, daemon_set, self._status(daemon_set, wanted))

    def _pods(self, daemon_set: Object) -> dict[str, list[Object]]:
        found: dict[str, list[Object]] = {}
        for kind, _, pod in self._store.dependents(daemon_set["metadata"]["uid"]):
            if kind == objects.POD:
                found.setdefault(_daemon_node(pod), []).append(pod)
        return found

    def _status(self, daemon_set: Object, wanted: set[str]) -> Object:
        pods = [pods[0] for node, pods in self._pods(daemon_set).items() if node in wanted]
        ready = sum(is_pod_ready(pod) for pod in pods)
        return {
            "currentNumberScheduled": len(pods),
            "desiredNumberScheduled": len(wanted),
            "numberAvailable": ready,
            "numberMisscheduled": 0,
            "numberReady": ready,
            "observedGeneration": daemon_set["metadata"]["generation"],
        }


def _daemon_pod(daemon_set: Object, node: str) -> Object:
    """The pod for one node: bound there by the scheduler, through its name (as the real controller does)."""
    template, owner = clone(daemon_set["spec"]["template"]), daemon_set["metadata"]
    spec, metadata = template["spec"], template.get("metadata") or {}
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    here = {"key": "metadata.name", "operator": "In", "values": [node]}
    affinity[REQUIRED] = {"nodeSelectorTerms": [{"matchFields": [here]}]}
    spec.setdefault("tolerations", []).append({"operator": "Exists"})
    metadata |= {"generateName": f"{owner['name']}-", "namespace": owner["namespace"]}
    metadata["labels"] = (metadata.get("labels") or {}) | {_GENERATION_LABEL: str(owner["generation"])}
    metadata["ownerReferences"] = controller_reference(objects.DAEMON_SET, daemon_set)
    return {"metadata": metadata, "spec": spec}


def _daemon_node(pod: Object) -> str:
    terms = pod["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    return str(terms[0]["matchFields"][0]["values"][0])


# Jobs.


COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
_JOB_LABELS = {"batch.kubernetes.io/job-name": "name", "batch.kubernetes.io/controller-uid": "uid"}
_BACKOFF_LIMIT = 6
"""The API server's default of spec.backoffLimit."""


class JobController(Controller):
    """A pod that failed, or went before its end, is replaced."""

    kinds = (objects.JOB,)

    async def _reconcile(self, key: ObjectKey) -> None:
        job = self._store.find(objects.JOB, key)
        if job is None or "deletionTimestamp" in job["metadata"] or _has_finished(job):
            return
        for pod in missing_pods(job, self._pods(job)):
            await self._api.create(objects.POD, pod)
        if (job := self._store.find(objects.JOB, key)) is not None:
            await self._update_status(objects.JOB, job, job_status(job, self._pods(job)))

    def _pods(self, job: Object) -> list[Object]:
        found = self._store.dependents(job["metadata"]["uid"])
        return [pod for kind, _, pod in found if kind == objects.POD]


def missing_pods(job: Object, pods: Iterable[Object]) -> list[Object]:
    """The pods to make now. None once the Job has failed too often."""
    pods = list(pods)
    spec = job["spec"]
    if spec.get("suspend") or _failed_pods(pods) > spec.get("backoffLimit", _BACKOFF_LIMIT):
        return []
    kept = {_completion_index(pod) for pod in pods if pod_phase(pod) != "Failed"}
    active = sum(not has_pod_ended(pod) for pod in pods)
    free = [index for index in range(_wanted_completions(spec)) if index not in kept]
    return [_job_pod(job, index) for index in free[: max(spec.get("parallelism", 1) - active, 0)]]


def job_status(job: Object, pods: Iterable[Object]) -> Object:
    """The status of a Job, from its pods."""
    pods = list(pods)
    phases = [pod_phase(pod) for pod in pods]
    succeeded, failed = phases.count("Succeeded"), _failed_pods(pods)
    status: Object = {
        "active": len(phases) - succeeded - failed,
        "ready": sum(is_pod_ready(pod) for pod in pods),
        "succeeded": succeeded,
        "failed": failed,
    }
    if succeeded >= _wanted_completions(job["spec"]):
        status["conditions"] = [{"type": "Complete", "status": "True"}]
    elif failed > job["spec"].get("backoffLimit", _BACKOFF_LIMIT):
        status["conditions"] = [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]
    return status


def _wanted_completions(spec: Object) -> int:
    return int(spec.get("completions") or spec.get("parallelism") or 1)


def _job_pod(job: Object, index: int) -> Object:
    template, owner = clone(job["spec"]["template"]), job["metadata"]
    metadata = template.get("metadata") or {}
    metadata |= {"generateName": f"{owner['name']}-{index}-", "namespace": owner["namespace"]}
    labels = {label: owner[field] for label, field in _JOB_LABELS.items()} | {COMPLETION_INDEX: str(index)}
    metadata["labels"] = (metadata.get("labels") or {}) | labels
    metadata["annotations"] = (metadata.get("annotations") or {}) | {COMPLETION_INDEX: str(index)}
    metadata["ownerReferences"] = controller_reference(objects.JOB, job)
    return {"metadata": metadata, "spec": template["spec"]}


def _completion_index(pod: Object) -> int:
    return int(pod["metadata"]["annotations"][COMPLETION_INDEX])


def _failed_pods(pods: Iterable[Object]) -> int:
    return sum(pod_phase(pod) == "Failed" for pod in pods)


def _has_finished(job: Object) -> bool:
    return "True" in (condition_status(job, "Complete"), condition_status(job, "Failed"))


# Node lifecycle.


MONITOR_SECONDS = 5.0
"""kube-controller-manager's --node-monitor-period."""
LEASE_NAMESPACE = "kube-node-lease"
UNREACHABLE_TAINT = "node.kubernetes.io/unreachable"
_TAINT_EFFECTS = ("NoSchedule", "NoExecute")


class NodeLifecycleController:
    """Compares each node's lease with the time. `wall` is seconds since the epoch."""

    def __init__(self, kube: FakeKube, wall: Callable[[], float]) -> None:
        self._store = kube.store
        self._api = DirectApi(kube, "kube-controller-manager")
        self._wall = wall

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await asyncio.sleep(MONITOR_SECONDS)
            await self.check()

    async def check(self) -> None:
        """Compare every lease with the time once."""
        for node in self._store.all(objects.NODE):
            name = node["metadata"]["name"]
            lease = self._store.find(objects.LEASE, (LEASE_NAMESPACE, name))
            if lease is None:
                continue
            with suppress(KubeError):
                await self._update(node, silent=is_lease_late(lease, self._wall()))

    async def _update(self, node: Object, *, silent: bool) -> None:
        if silent and condition_status(node, "Ready") != "Unknown":
            await self._set_unknown(node)
        taints = node.get("spec", {}).get("taints") or ()
        others = [taint for taint in taints if taint["key"] != UNREACHABLE_TAINT]
        if silent != (len(others) < len(taints)):
            ours = [{"key": UNREACHABLE_TAINT, "effect": effect} for effect in _TAINT_EFFECTS if silent]
            patch = {"spec": {"taints": others + ours}}
            await self._api.patch(objects.NODE, node["metadata"]["name"], None, patch)

    async def _set_unknown(self, node: Object) -> None:
        others = [condition for condition in node["status"]["conditions"] if condition["type"] != "Ready"]
        unknown = {
            "type": "Ready",
            "status": "Unknown",
            "reason": "NodeStatusUnknown",
            "message": "Kubelet stopped posting node status.",
            "lastTransitionTime": metav1_time(self._wall()),
        }
        patch = {"status": {"conditions": [*others, unknown]}}
        await self._api.patch(objects.NODE, node["metadata"]["name"], None, patch, subresource="status")


def is_lease_late(lease: Object, now: float) -> bool:
    """Whether a heartbeat is older than it counts."""
    renewed = datetime.fromisoformat(lease["spec"]["renewTime"]).timestamp()
    return now - renewed > float(lease["spec"]["leaseDurationSeconds"])
