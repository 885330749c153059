"""The stand-in for the MPI operator makes the same pods as the operator, with the same ranks."""

import asyncio
import random
from typing import Any

from rackloom.core.cluster import objects
from rackloom.core.cluster.objects import Object
from rackloom.lab.kube.controllers.mpi_jobs import MPI_JOB, MpiJobController
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual import event_loop

INDEX = "training.kubeflow.org/replica-index"


def mpi_job(name: str, **fields: Any) -> Object:
    template = {"spec": {"containers": [{"name": "main", "image": "x"}]}}
    roles = {"Launcher": {"template": template}, "Worker": {"replicas": 2, "template": template}}
    return {
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"mpiReplicaSpecs": roles, **fields},
    }


def made_for(*jobs: Object) -> FakeKube:
    """The cluster some time after the jobs were created. None of their pods run."""
    kube = FakeKube(seed=0)

    async def story() -> None:
        controller = asyncio.create_task(MpiJobController(kube, random.Random(0)).run())
        user = DirectApi(kube, "user")
        for job in jobs:
            await user.create(MPI_JOB, job)
        await asyncio.sleep(30)
        controller.cancel()
        await asyncio.gather(controller, return_exceptions=True)

    event_loop.run_simulation(0, story)
    return kube


def indexes(kube: FakeKube) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["labels"][INDEX] for pod in kube.store.all(objects.POD)}


def launcher_labels(kube: FakeKube) -> dict[str, str]:
    (job,) = kube.store.all(objects.JOB)
    found: dict[str, str] = job["spec"]["template"]["metadata"]["labels"]
    return found


def test_workers_are_counted_from_0() -> None:
    kube = made_for(mpi_job("m"))
    assert indexes(kube) == {"m-worker-0": "0", "m-worker-1": "1"}
    assert INDEX not in launcher_labels(kube)
    (service,) = kube.store.all(objects.SERVICE)
    assert not service["spec"]["publishNotReadyAddresses"]


def test_a_launcher_that_is_a_worker_is_counted_before_them() -> None:
    kube = made_for(mpi_job("m", runLauncherAsWorker=True))
    assert indexes(kube) == {"m-worker-0": "1", "m-worker-1": "2"}
    assert launcher_labels(kube)[INDEX] == "0"
    (service,) = kube.store.all(objects.SERVICE)
    assert service["spec"]["publishNotReadyAddresses"], "it is named before it is ready"


def test_a_job_of_another_manager_is_left_alone() -> None:
    theirs = mpi_job("theirs", runPolicy={"managedBy": "kueue.x-k8s.io/multikueue"})
    own = mpi_job("own", runPolicy={"managedBy": "kubeflow.org/mpi-operator"})
    kube = made_for(theirs, own)
    assert set(indexes(kube)) == {"own-worker-0", "own-worker-1"}
    assert [service["metadata"]["name"] for service in kube.store.all(objects.SERVICE)] == ["own"]
    jobs = {job["metadata"]["name"]: job for job in kube.store.all(MPI_JOB)}
    assert "status" not in jobs["theirs"]
    assert jobs["own"]["status"]
