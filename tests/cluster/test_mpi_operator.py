"""The upstream MPI operator makes the pods of an MPIJob here, and observes that they run."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.custom import MPI_JOB
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.objects import POD, Object
from rackloom.lab.nodes.pods import ContainerRuntime, IdleContainers

pytestmark = pytest.mark.anyio
ROLE = "training.kubeflow.org/job-role"
WORKERS = 4


class LaunchersEnd:
    """The launcher ends when the test marks the ranks as done. Workers serve until they are deleted."""

    def __init__(self) -> None:
        self.done = asyncio.Event()

    async def run(self, node: str, pod: Object, ready: Callable[[], Awaitable[None]]) -> int:
        await ready()
        if pod["metadata"].get("labels", {}).get(ROLE) == "launcher":
            await self.done.wait()
            return 0
        return await IdleContainers().run(node, pod, ready)


@pytest.fixture
def containers() -> ContainerRuntime:
    return LaunchersEnd()


def mpi_job(namespace: str) -> Object:
    template = {"spec": {"containers": [{"name": "main", "image": "none"}]}}
    return {
        "metadata": {"name": "ranks", "namespace": namespace},
        "spec": {
            "slotsPerWorker": 4,
            "runPolicy": {"cleanPodPolicy": "Running"},
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "template": template},
                "Worker": {"replicas": WORKERS, "template": template},
            },
        },
    }


async def test_a_job_has_its_workers_and_its_launcher(
    mpi_operator: None, api: KubeApi, add_nodes: AddNodes, namespace: str, containers: LaunchersEnd
) -> None:
    await add_nodes(2)
    await api.create(MPI_JOB, mpi_job(namespace))

    async def running() -> list[str]:
        pods = (await api.list(POD, namespace)).items
        roles = [pod["metadata"]["labels"][ROLE] for pod in pods if pod["status"]["phase"] == "Running"]
        return sorted(roles) if len(roles) > WORKERS else []

    assert await until(running, "launcher and workers run") == ["launcher"] + ["worker"] * WORKERS
    names = {
        pod["metadata"]["name"] for pod in (await api.list(POD, namespace, labels=f"{ROLE}=worker")).items
    }
    assert names == {f"ranks-worker-{index}" for index in range(WORKERS)}

    containers.done.set()

    async def succeeded() -> bool:
        status = (await api.get(MPI_JOB, "ranks", namespace)).get("status", {})
        return any(condition["type"] == "Succeeded" for condition in status.get("conditions", ()))

    await until(succeeded, "the job succeeded")
