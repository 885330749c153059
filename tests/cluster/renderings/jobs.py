"""Jobs that take whole trays, as a user writes them, and a small one that is in their way."""

from pathlib import Path

import yaml
from tests.cluster.renderings.applied import CLIQUE, SMALL

from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.objects import NODE, POD, Object

GPU = "nvidia.com/gpu"
GANG = "rackloom.dev/gang"
_TRAY = {"limits": {GPU: "4", "cpu": "8"}}
_NONE = {"limits": {"cpu": "1"}}
_SOME = {"limits": {GPU: "1", "cpu": "1"}}


def _pod(resources: Object) -> Object:
    return {"containers": [{"name": "main", "image": "none", "resources": resources}]}


def job(folder: Path, namespace: str, members: int) -> Path:
    """The file of an indexed Job, a tray for each member."""
    return _written(folder, "batch/v1", "Job", namespace, _indexed(members))


def pods(folder: Path, namespace: str, members: int) -> Path:
    """The file of pods of one gang without an owner, a tray for each."""
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump_all(_alone(namespace, number) for number in range(members)))
    return file


def _alone(namespace: str, number: int) -> Object:
    metadata = {"name": f"rack-{number}", "namespace": namespace, "labels": {GANG: "rack"}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": _pod(_TRAY)}


def groups(folder: Path, namespace: str, replicas: int, size: int) -> Path:
    """The file of a LeaderWorkerSet, a tray for each pod."""
    template = {"size": size, "workerTemplate": {"spec": _pod(_TRAY)}}
    spec = {"replicas": replicas, "leaderWorkerTemplate": template}
    return _written(folder, "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", namespace, spec)


def mpi_job(folder: Path, namespace: str, workers: int) -> Path:
    """The file of an MPIJob: a launcher without devices, and a tray for each worker."""

    def replicas(count: int, resources: Object) -> Object:
        return {"replicas": count, "template": {"spec": _pod(resources)}}

    roles = {"Launcher": replicas(1, _NONE), "Worker": replicas(workers, _TRAY)}
    spec = {"slotsPerWorker": 4, "mpiReplicaSpecs": roles}
    return _written(folder, "kubeflow.org/v2beta1", "MPIJob", namespace, spec)


def job_set(folder: Path, namespace: str, **members: int) -> Path:
    """The file of a JobSet: for each name a Job, a tray for each member."""
    jobs = [
        {"name": name, "replicas": 1, "template": {"spec": _indexed(count)}}
        for name, count in members.items()
    ]
    return _written(folder, "jobset.x-k8s.io/v1alpha2", "JobSet", namespace, {"replicatedJobs": jobs})


def _indexed(members: int) -> Object:
    return {
        "parallelism": members,
        "completions": members,
        "completionMode": "Indexed",
        "template": {"spec": {"restartPolicy": "Never", **_pod(_TRAY)}},
    }


def _written(folder: Path, version: str, kind: str, namespace: str, spec: Object) -> Path:
    document = {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": "rack", "namespace": namespace},
        "spec": spec,
    }
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


async def occupy(api: KubeApi, namespace: str, clique: str, trays: int) -> None:
    """Put a pod with one GPU on each of the first trays of a clique, past every scheduler."""
    nodes = await _of_clique(api, clique)
    for node in nodes[:trays]:
        metadata = {"name": f"small-{node}", "namespace": namespace, "labels": {SMALL: ""}}
        await api.create(POD, {"metadata": metadata, "spec": {**_pod(_SOME), "nodeName": node}})


async def free(api: KubeApi, namespace: str, clique: str) -> None:
    """Take the small pods of a clique away."""
    nodes = await _of_clique(api, clique)
    for pod in (await api.list(POD, namespace, labels=SMALL)).items:
        if pod["spec"]["nodeName"] in nodes:
            await api.delete(POD, pod["metadata"]["name"], namespace)


async def _of_clique(api: KubeApi, clique: str) -> list[str]:
    return [
        node["metadata"]["name"]
        for node in (await api.list(NODE)).items
        if node["metadata"]["labels"].get(CLIQUE) == clique
    ]
