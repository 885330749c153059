"""The Job controller: as many pods at a time as a Job wants, until enough have succeeded."""

import random
from collections.abc import Iterable

from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import Kind, Object
from rackloom.claim.kube.pods import has_ended, is_ready, phase
from rackloom.twin.kube.controllers.loops import work_on_changes
from rackloom.twin.kube.controllers.owning import owned_by, owner_keys
from rackloom.twin.kube.direct import DirectApi
from rackloom.twin.kube.ownership import clone
from rackloom.twin.kube.server import FakeKube
from rackloom.twin.kube.store import Key, key_of

INDEX = "batch.kubernetes.io/job-completion-index"
_LABELS = {"batch.kubernetes.io/job-name": "name", "batch.kubernetes.io/controller-uid": "uid"}
_BACKOFF_LIMIT = 6
"""The API server's default of spec.backoffLimit."""


class Jobs:
    """A pod that failed, or went before its end, has another in its place."""

    def __init__(self, kube: FakeKube, rng: random.Random) -> None:
        self._store = kube.store
        self._api = DirectApi(kube, "kube-controller-manager")
        self._random = rng

    async def run(self) -> None:
        """Work until cancelled."""
        first = [key_of(one) for one in self._store.all(kinds.JOB)]
        await work_on_changes(self._store, first, self._keys_of, self._do, self._random)

    def _keys_of(self, kind: Kind, obj: Object) -> Iterable[Key]:
        if kind == kinds.JOB:
            return [key_of(obj)]
        return owner_keys(obj, kinds.JOB) if kind == kinds.POD else ()

    async def _do(self, key: Key) -> None:
        job = self._store.find(kinds.JOB, key)
        if job is None or "deletionTimestamp" in job["metadata"] or _is_over(job):
            return
        for pod in missing_pods(job, self._pods(job)):
            await self._api.create(kinds.POD, pod)
        await self._tell(key)

    def _pods(self, job: Object) -> list[Object]:
        found = self._store.dependents(job["metadata"]["uid"])
        return [pod for kind, _, pod in found if kind == kinds.POD]

    async def _tell(self, key: Key) -> None:
        job = self._store.find(kinds.JOB, key)
        if job is None:
            return
        status = job_status(job, self._pods(job))
        if job.get("status") != status:
            written = {**clone(job), "status": status}
            await self._api.replace(kinds.JOB, written, subresource="status")


def missing_pods(job: Object, pods: Iterable[Object]) -> list[Object]:
    """The pods to make now; none once the Job has failed too often."""
    pods = list(pods)
    spec = job["spec"]
    if spec.get("suspend") or _failures(pods) > spec.get("backoffLimit", _BACKOFF_LIMIT):
        return []
    kept = {_index(pod) for pod in pods if phase(pod) != "Failed"}
    active = sum(not has_ended(pod) for pod in pods)
    free = [index for index in range(_completions(spec)) if index not in kept]
    return [_pod(job, index) for index in free[: max(spec.get("parallelism", 1) - active, 0)]]


def job_status(job: Object, pods: Iterable[Object]) -> Object:
    """What has become of a Job, by its pods."""
    pods = list(pods)
    phases = [phase(pod) for pod in pods]
    succeeded, failed = phases.count("Succeeded"), _failures(pods)
    status: Object = {
        "active": len(phases) - succeeded - failed,
        "ready": sum(is_ready(pod) for pod in pods),
        "succeeded": succeeded,
        "failed": failed,
    }
    if succeeded >= _completions(job["spec"]):
        status["conditions"] = [{"type": "Complete", "status": "True"}]
    elif failed > job["spec"].get("backoffLimit", _BACKOFF_LIMIT):
        status["conditions"] = [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]
    return status


def _completions(spec: Object) -> int:
    return int(spec.get("completions") or spec.get("parallelism") or 1)


def _pod(job: Object, index: int) -> Object:
    template, owner = clone(job["spec"]["template"]), job["metadata"]
    metadata = template.get("metadata") or {}
    metadata |= {"generateName": f"{owner['name']}-{index}-", "namespace": owner["namespace"]}
    labels = {label: owner[field] for label, field in _LABELS.items()} | {INDEX: str(index)}
    metadata["labels"] = (metadata.get("labels") or {}) | labels
    metadata["annotations"] = (metadata.get("annotations") or {}) | {INDEX: str(index)}
    metadata["ownerReferences"] = owned_by(kinds.JOB, job)
    return {"metadata": metadata, "spec": template["spec"]}


def _index(pod: Object) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def _failures(pods: Iterable[Object]) -> int:
    return sum(phase(pod) == "Failed" for pod in pods)


def _is_over(job: Object) -> bool:
    conditions = (job.get("status") or {}).get("conditions") or ()
    return any(one["type"] in ("Complete", "Failed") and one["status"] == "True" for one in conditions)
