"""A stand-in for the MPI operator: the objects of a kubeflow.org/v2beta1 MPIJob, without its programs.

It makes the headless Service, the worker pods and the launcher's Job under the operator's names and
labels, reports Created, Running and Succeeded, and cleans up according to cleanPodPolicy. The launcher waits
for ready workers if launcherCreationPolicy requires it, and is counted before them if it is a worker
(runLauncherAsWorker). A job that another controller manages (managedBy) is left alone.

Nothing runs MPI. Host files, keys, suspension and the replacement of failed workers are left out: the
job fails.
"""

import random
from collections.abc import Iterator
from typing import Any

from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object, ResourceKind, pod_phase
from rackloom.core.cluster.workload_kinds import is_launcher_a_worker, other_manager
from rackloom.lab.kube.controllers.workloads import Controller, condition_status, controller_reference
from rackloom.lab.kube.managed_fields import clone
from rackloom.lab.kube.objects import TypeSchema
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.kube.store import ObjectKey

MPI_JOB = ResourceKind("kubeflow.org", "v2beta1", "MPIJob", "mpijobs", namespaced=True)
_LABEL_PREFIX = "training.kubeflow.org/"
_REPLICA_INDEX = _LABEL_PREFIX + "replica-index"
_WAIT_FOR_WORKERS = "WaitForWorkersReady"


class MpiJobController(Controller):
    """A change of a job, of its workers or of its launcher reconciles the whole job."""

    kinds = (MPI_JOB,)
    owned = (objects.POD, objects.JOB)
    user = "mpi-operator"

    def __init__(self, kube: FakeKube, rng: random.Random) -> None:
        kube.serve(MPI_JOB, TypeSchema(status=True, generation=True))
        super().__init__(kube, rng)

    async def _reconcile(self, key: ObjectKey) -> None:
        job = self._store.find(MPI_JOB, key)
        if job is None or "deletionTimestamp" in job["metadata"] or other_manager(job) is not None:
            return
        workers, launcher = self._workers(job), self._launcher(job)
        if _launcher_result(launcher) is None:
            await self._make(objects.SERVICE, _service(job))
            for index in sorted(set(range(_worker_count(job))) - workers.keys()):
                await self._make(objects.POD, _worker(job, index))
            if launcher is None and (_launcher_policy(job) != _WAIT_FOR_WORKERS or _all_ready(job, workers)):
                await self._make(objects.JOB, _launcher_job(job))
        else:
            policy = (job["spec"].get("runPolicy") or {}).get("cleanPodPolicy", "None")
            for pod in workers.values():
                if policy == "All" or (policy == "Running" and pod_phase(pod) in ("Pending", "Running")):
                    await self._delete(objects.POD, pod)
        if (job := self._store.find(MPI_JOB, key)) is not None:
            conditions = [*_conditions(job, self._workers(job), self._launcher(job))]
            await self._update_status(MPI_JOB, job, {**(job.get("status") or {}), "conditions": conditions})

    async def _make(self, kind: ResourceKind, obj: Object) -> None:
        meta = obj["metadata"]
        if self._store.find(kind, (meta["namespace"], meta["name"])) is None:
            await self._api.create(kind, obj)

    def _workers(self, job: Object) -> dict[int, Object]:
        pods = (obj for kind, obj in self._owned(job) if kind == objects.POD)
        first = _first_index(job)
        return {int(pod["metadata"]["labels"][_REPLICA_INDEX]) - first: pod for pod in pods}

    def _launcher(self, job: Object) -> Object | None:
        return next((obj for kind, obj in self._owned(job) if kind == objects.JOB), None)

    def _owned(self, job: Object) -> Iterator[tuple[ResourceKind, Object]]:
        for kind, _, obj in self._store.dependents(job["metadata"]["uid"]):
            if "deletionTimestamp" not in obj["metadata"]:
                yield kind, obj


def _service(job: Object) -> Object:
    selector = {
        _LABEL_PREFIX + "operator-name": "mpi-operator",
        _LABEL_PREFIX + "job-name": job["metadata"]["name"],
    }
    spec = {
        "clusterIP": "None",
        "selector": selector,
        # The hostfile names a launcher that is a worker, and its name is resolved before it is ready.
        "publishNotReadyAddresses": is_launcher_a_worker(job),
    }
    return {"metadata": _metadata(job, job["metadata"]["name"]), "spec": spec}


def _worker(job: Object, index: int) -> Object:
    name = f"{job['metadata']['name']}-worker-{index}"
    template = _template(job, "Worker")
    spec = template["spec"] | {
        "hostname": name,
        "subdomain": job["metadata"]["name"],
        "restartPolicy": "Never",
    }
    labels = _labels(template, job, "worker") | {_REPLICA_INDEX: str(_first_index(job) + index)}
    return {"metadata": _metadata(job, name, labels, template), "spec": spec}


def _launcher_job(job: Object) -> Object:
    template = _template(job, "Launcher")
    index = {_REPLICA_INDEX: "0"} if is_launcher_a_worker(job) else {}
    pod = {"labels": _labels(template, job, "launcher") | index}
    if annotations := (template.get("metadata") or {}).get("annotations"):
        pod["annotations"] = annotations
    spec = template["spec"] | {"restartPolicy": "OnFailure"}
    return {
        "metadata": _metadata(job, f"{job['metadata']['name']}-launcher"),
        "spec": {"template": {"metadata": pod, "spec": spec}, "podReplacementPolicy": "Failed"},
    }


def _first_index(job: Object) -> int:
    """The replica index of worker 0."""
    return 1 if is_launcher_a_worker(job) else 0


def _template(job: Object, role: str) -> Object:
    found: Object = clone(job["spec"]["mpiReplicaSpecs"][role]["template"])
    return found


def _labels(template: Object, job: Object, role: str) -> dict[str, str]:
    ours = {"operator-name": "mpi-operator", "job-name": job["metadata"]["name"], "job-role": role}
    given = (template.get("metadata") or {}).get("labels") or {}
    return {**given, **{_LABEL_PREFIX + name: value for name, value in ours.items()}}


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
        "ownerReferences": controller_reference(MPI_JOB, job),
    }


def _conditions(job: Object, workers: dict[int, Object], launcher: Object | None) -> Iterator[dict[str, Any]]:
    ended = _launcher_result(launcher)
    failed = any(pod_phase(pod) == "Failed" for pod in workers.values()) and ended is None
    is_active = bool(((launcher or {}).get("status") or {}).get("active"))
    running = ended is None and not failed and _all_ready(job, workers) and is_active
    yield _condition("Created", True, "MPIJobCreated")
    yield _condition("Running", running, "MPIJobRunning")
    if ended is not None or failed:
        done = ended or "Failed"
        yield _condition(done, True, f"MPIJob{done}")


def _condition(name: str, holds: bool, reason: str) -> dict[str, Any]:
    return {"type": name, "status": str(holds), "reason": reason}


def _launcher_result(launcher: Object | None) -> str | None:
    """Succeeded or Failed, from the conditions of the launcher's Job."""
    results = {"Complete": "Succeeded", "Failed": "Failed"}
    met = (results[type_] for type_ in results if condition_status(launcher or {}, type_) == "True")
    return next(met, None)


def _all_ready(job: Object, workers: dict[int, Object]) -> bool:
    return len(workers) == _worker_count(job) and all(pod_phase(pod) == "Running" for pod in workers.values())


def _worker_count(job: Object) -> int:
    return int(job["spec"]["mpiReplicaSpecs"].get("Worker", {}).get("replicas", 0))


def _launcher_policy(job: Object) -> str:
    return str(job["spec"].get("launcherCreationPolicy", "AtStartup"))
