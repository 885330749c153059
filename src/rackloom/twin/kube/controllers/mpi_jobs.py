"""A stand-in for the MPI operator: the objects of a `kubeflow.org/v2beta1` MPIJob, without its programs.

It makes the headless Service, the bare worker pods and the launcher's Job under the names and labels of the
operator, says Created, Running and Succeeded, and cleans up as `cleanPodPolicy` says. Nothing in it runs MPI:
host file, keys and suspension are left out, and so is replacing a worker that failed (the job fails).
"""

import random
from collections.abc import Iterable, Iterator
from typing import Any

from rackloom.claim.kube import kinds
from rackloom.claim.kube.api import Conflict, Kind, NotFound, Object
from rackloom.claim.kube.pods import phase
from rackloom.twin.kube.controllers.loops import work_on_changes
from rackloom.twin.kube.controllers.owning import owned_by, owner_keys
from rackloom.twin.kube.direct import DirectApi
from rackloom.twin.kube.ownership import clone
from rackloom.twin.kube.server import FakeKube
from rackloom.twin.kube.shapes import Shape
from rackloom.twin.kube.store import Key, key_of

MPI_JOB = Kind("kubeflow.org", "v2beta1", "MPIJob", "mpijobs", namespaced=True)
_LABELS = "training.kubeflow.org/"
_WAITS = "WaitForWorkersReady"


class MpiJobs:
    """Each change of a job, of its workers or of its launcher has the whole job looked at again."""

    def __init__(self, kube: FakeKube, rng: random.Random) -> None:
        kube.serve(MPI_JOB, Shape(status=True, generation=True))
        self._store = kube.store
        self._api = DirectApi(kube, "mpi-operator")
        self._random = rng

    async def run(self) -> None:
        """Work until cancelled."""
        first = [key_of(one) for one in self._store.all(MPI_JOB)]
        await work_on_changes(self._store, first, _keys_of, self._do, self._random)

    async def _do(self, key: Key) -> None:
        job = self._store.find(MPI_JOB, key)
        if job is None or "deletionTimestamp" in job["metadata"]:
            return
        workers, launcher = self._workers(job), self._launcher(job)
        if _ended(launcher) is None:
            await self._make(kinds.SERVICE, _service(job))
            for index in sorted(set(range(_count(job))) - workers.keys()):
                await self._make(kinds.POD, _worker(job, index))
            if launcher is None and (_creation(job) != _WAITS or _all_ready(job, workers)):
                await self._make(kinds.JOB, _launcher_job(job))
        else:
            await self._clean(job, workers)
        await self._tell(key)

    async def _make(self, kind: Kind, obj: Object) -> None:
        meta = obj["metadata"]
        if self._store.find(kind, (meta["namespace"], meta["name"])) is None:
            await self._api.create(kind, obj)

    async def _clean(self, job: Object, workers: dict[int, Object]) -> None:
        policy = (job["spec"].get("runPolicy") or {}).get("cleanPodPolicy", "None")
        for pod in workers.values():
            if policy == "All" or (policy == "Running" and phase(pod) in ("Pending", "Running")):
                meta = pod["metadata"]
                try:
                    await self._api.delete(kinds.POD, meta["name"], meta["namespace"], uid=meta["uid"])
                except (NotFound, Conflict):
                    continue

    async def _tell(self, key: Key) -> None:
        job = self._store.find(MPI_JOB, key)
        if job is None:
            return
        conditions = [*_conditions(job, self._workers(job), self._launcher(job))]
        if (job.get("status") or {}).get("conditions") != conditions:
            status = {**(job.get("status") or {}), "conditions": conditions}
            await self._api.replace(MPI_JOB, {**clone(job), "status": status}, subresource="status")

    def _workers(self, job: Object) -> dict[int, Object]:
        pods = (one for kind, one in self._owned(job) if kind == kinds.POD)
        return {int(pod["metadata"]["labels"][_LABELS + "replica-index"]): pod for pod in pods}

    def _launcher(self, job: Object) -> Object | None:
        return next((one for kind, one in self._owned(job) if kind == kinds.JOB), None)

    def _owned(self, job: Object) -> Iterator[tuple[Kind, Object]]:
        for kind, _, obj in self._store.dependents(job["metadata"]["uid"]):
            if "deletionTimestamp" not in obj["metadata"]:
                yield kind, obj


def _keys_of(kind: Kind, obj: Object) -> Iterable[Key]:
    if kind == MPI_JOB:
        return [key_of(obj)]
    return owner_keys(obj, MPI_JOB) if kind in (kinds.POD, kinds.JOB) else ()


def _service(job: Object) -> Object:
    selector = {_LABELS + "operator-name": "mpi-operator", _LABELS + "job-name": job["metadata"]["name"]}
    spec = {"clusterIP": "None", "selector": selector}
    return {"metadata": _metadata(job, job["metadata"]["name"]), "spec": spec}


def _worker(job: Object, index: int) -> Object:
    name = f"{job['metadata']['name']}-worker-{index}"
    template = _template(job, "Worker")
    spec = template["spec"] | {
        "hostname": name,
        "subdomain": job["metadata"]["name"],
        "restartPolicy": "Never",
    }
    labels = _labels(template, job, "worker") | {_LABELS + "replica-index": str(index)}
    return {"metadata": _metadata(job, name, labels, template), "spec": spec}


def _launcher_job(job: Object) -> Object:
    template = _template(job, "Launcher")
    pod = {"labels": _labels(template, job, "launcher")}
    if annotations := (template.get("metadata") or {}).get("annotations"):
        pod["annotations"] = annotations
    spec = template["spec"] | {"restartPolicy": "OnFailure"}
    return {
        "metadata": _metadata(job, f"{job['metadata']['name']}-launcher"),
        "spec": {"template": {"metadata": pod, "spec": spec}, "podReplacementPolicy": "Failed"},
    }


def _template(job: Object, role: str) -> Object:
    found: Object = clone(job["spec"]["mpiReplicaSpecs"][role]["template"])
    return found


def _labels(template: Object, job: Object, role: str) -> dict[str, str]:
    ours = {"operator-name": "mpi-operator", "job-name": job["metadata"]["name"], "job-role": role}
    given = (template.get("metadata") or {}).get("labels") or {}
    return {**given, **{_LABELS + name: value for name, value in ours.items()}}


def _metadata(
    job: Object, name: str, labels: dict[str, str] | None = None, template: Object | None = None
) -> Object:
    meta = job["metadata"]
    annotations = ((template or {}).get("metadata") or {}).get("annotations") or {}
    return {
        "name": name,
        "namespace": meta["namespace"],
        "labels": labels or {"app": meta["name"]},
        "annotations": annotations,
        "ownerReferences": owned_by(MPI_JOB, job),
    }


def _conditions(job: Object, workers: dict[int, Object], launcher: Object | None) -> Iterator[dict[str, Any]]:
    ended = _ended(launcher)
    failed = any(phase(pod) == "Failed" for pod in workers.values()) and ended is None
    running = ended is None and not failed and _all_ready(job, workers) and _is_active(launcher)
    yield _condition("Created", True, "MPIJobCreated")
    yield _condition("Running", running, "MPIJobRunning")
    if ended is not None or failed:
        done = ended or "Failed"
        yield _condition(done, True, f"MPIJob{done}")


def _condition(name: str, holds: bool, reason: str) -> dict[str, Any]:
    return {"type": name, "status": str(holds), "reason": reason}


def _ended(launcher: Object | None) -> str | None:
    """Succeeded or Failed, from the conditions of the launcher's Job."""
    said = {"Complete": "Succeeded", "Failed": "Failed"}
    for one in ((launcher or {}).get("status") or {}).get("conditions") or ():
        if one["status"] == "True" and one["type"] in said:
            return said[one["type"]]
    return None


def _is_active(launcher: Object | None) -> bool:
    return bool(((launcher or {}).get("status") or {}).get("active"))


def _all_ready(job: Object, workers: dict[int, Object]) -> bool:
    return len(workers) == _count(job) and all(phase(pod) == "Running" for pod in workers.values())


def _count(job: Object) -> int:
    return int(job["spec"]["mpiReplicaSpecs"].get("Worker", {}).get("replicas", 0))


def _creation(job: Object) -> str:
    return str(job["spec"].get("launcherCreationPolicy", "AtStartup"))
