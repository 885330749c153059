"""How a gang of the upstream MPI operator ends: each tray is given back, and none while a pod is on it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.custom import MPI_JOB
from tests.cluster.gangs_at_work import PATIENCE, gangs_at_work, record, two_racks
from tests.cluster.test_mpi_operator import ROLE, LaunchersEnd
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.gang_objects import GROUP_LABEL, reserving_plans
from rackloom.core.cluster.objects import NODE, POD, Object
from rackloom.core.cluster.pods import SIZE_ANNOTATION
from rackloom.lab.nodes.pods import ContainerRuntime

pytestmark = pytest.mark.anyio
WORKERS = 3
MEMBERS = WORKERS + 1


class EarlyReturns:
    """Looks all the time for a pod of the gang that runs on a tray which is not reserved for it."""

    def __init__(self, api: KubeApi, namespace: str) -> None:
        self._api = api
        self._namespace = namespace
        self.found: list[tuple[str, str]] = []

    async def look_on(self) -> None:
        while True:
            before = await placed(self._api, self._namespace)
            trays = await held(self._api)
            after = await placed(self._api, self._namespace)
            # A pod that was there before and after was there when the trays were read.
            self.found += [
                placement
                for placement in before.items()
                if placement in after.items() and placement[1] not in trays
            ]
            await asyncio.sleep(0.1)


@pytest.fixture
def containers() -> ContainerRuntime:
    return LaunchersEnd()


@pytest.fixture
async def driver(
    cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes, mpi_operator: None
) -> AsyncIterator[None]:
    """The objects of deploy/kubernetes, with the webhook, the controllers and the operator at work."""
    async with gangs_at_work(cluster, api, add_nodes):
        yield


@pytest.fixture
async def early(driver: None, api: KubeApi, namespace: str) -> AsyncIterator[EarlyReturns]:
    """Watches during the test, and checks its findings at the end."""
    found = EarlyReturns(api, namespace)
    task = asyncio.create_task(found.look_on())
    yield found
    assert not task.done(), task.exception()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not found.found, "a tray was given back under a pod"


def mpi_job(namespace: str, policy: str) -> Object:
    """The launcher takes a separate tray."""

    def template(group: str) -> Object:
        meta = {
            "labels": {"job": "ranks", GROUP_LABEL: group, "rackloom.dev/gang": "ranks"},
            "annotations": {SIZE_ANNOTATION: f"launcher=1,worker={WORKERS}"},
        }
        container = {"name": "main", "image": "none", "resources": {"limits": {"nvidia.com/gpu": "4"}}}
        return {"metadata": meta, "spec": {"containers": [container]}}

    return {
        "metadata": {"name": "ranks", "namespace": namespace},
        "spec": {
            "slotsPerWorker": 4,
            "runPolicy": {"cleanPodPolicy": policy},
            "mpiReplicaSpecs": {
                "Launcher": {"replicas": 1, "template": template("launcher")},
                "Worker": {"replicas": WORKERS, "template": template("worker")},
            },
        },
    }


async def placed(api: KubeApi, namespace: str) -> dict[str, str]:
    """The node of each pod that runs, by its UID."""
    pods = (await api.list(POD, namespace, labels="job=ranks")).items
    running = (pod for pod in pods if pod["status"].get("phase") == "Running")
    return {pod["metadata"]["uid"]: pod["spec"]["nodeName"] for pod in running}


async def trays_of(api: KubeApi, namespace: str, role: str) -> dict[str, str]:
    """The node of each pod of a role, by its name."""
    pods = (await api.list(POD, namespace, labels=f"job=ranks,{ROLE}={role}")).items
    return {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in pods}


async def held(api: KubeApi) -> set[str]:
    return {item["metadata"]["name"] for item in (await api.list(NODE)).items if reserving_plans(item)}


def holds(api: KubeApi, trays: set[str]) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return await held(api) == trays

    return look


async def all_run(api: KubeApi, namespace: str) -> dict[str, str]:
    async def look() -> dict[str, str]:
        found = await placed(api, namespace)
        return found if len(found) == MEMBERS else {}

    found = await until(look, "launcher and workers run", PATIENCE)
    assert await held(api) == set(found.values())
    return found


async def begun(add_nodes: AddNodes, api: KubeApi, namespace: str, policy: str) -> dict[str, str]:
    """The job on two racks, once all of it runs: the trays of its pods."""
    await two_racks(add_nodes, MEMBERS)
    await api.create(MPI_JOB, mpi_job(namespace, policy))
    return await all_run(api, namespace)


async def nothing_is_left(api: KubeApi, namespace: str) -> bool:
    return not await held(api) and await record(api, namespace, "ranks") is None


async def has_succeeded(api: KubeApi, namespace: str) -> bool:
    status = (await api.get(MPI_JOB, "ranks", namespace)).get("status", {})
    return any(condition["type"] == "Succeeded" for condition in status.get("conditions", ()))


async def suspend(api: KubeApi, namespace: str, is_suspended: bool) -> None:
    await api.patch(MPI_JOB, "ranks", namespace, {"spec": {"runPolicy": {"suspend": is_suspended}}})


@pytest.mark.parametrize("policy", ["Running", "All"])
async def test_all_trays_are_free_when_the_operator_has_taken_the_workers_of_a_job_that_is_over(
    policy: str,
    early: EarlyReturns,
    add_nodes: AddNodes,
    api: KubeApi,
    namespace: str,
    containers: LaunchersEnd,
) -> None:
    await begun(add_nodes, api, namespace, policy)
    containers.done.set()
    await until(lambda: has_succeeded(api, namespace), "the job succeeded")
    await until(lambda: nothing_is_left(api, namespace), "all trays are given back", PATIENCE)


async def test_workers_that_a_job_leaves_behind_keep_their_trays_until_each_has_ended(
    early: EarlyReturns, add_nodes: AddNodes, api: KubeApi, namespace: str, containers: LaunchersEnd
) -> None:
    await begun(add_nodes, api, namespace, "None")
    workers = await trays_of(api, namespace, "worker")
    containers.done.set()
    await until(lambda: has_succeeded(api, namespace), "the job succeeded")
    left = set(workers.values())
    await until(holds(api, left), "the tray of the launcher is given back, and no other", PATIENCE)

    await api.delete(POD, "ranks-worker-1", namespace)
    left.remove(workers["ranks-worker-1"])
    await until(holds(api, left), "so is that of a worker that was deleted", PATIENCE)
    plan = await record(api, namespace, "ranks")
    assert plan is not None
    assert set(plan.reserved) == left

    await api.delete(MPI_JOB, "ranks", namespace)
    await until(lambda: nothing_is_left(api, namespace), "the rest is given back with the job", PATIENCE)


async def test_a_job_that_is_suspended_has_no_tray_and_all_of_them_when_it_goes_on(
    early: EarlyReturns, add_nodes: AddNodes, api: KubeApi, namespace: str, containers: LaunchersEnd
) -> None:
    first = await begun(add_nodes, api, namespace, "Running")
    await suspend(api, namespace, True)
    await until(lambda: nothing_is_left(api, namespace), "all trays are given back", PATIENCE)

    await suspend(api, namespace, False)
    again = await all_run(api, namespace)
    assert not set(first) & set(again), "the pods are others"
    containers.done.set()
    await until(lambda: has_succeeded(api, namespace), "the job succeeded")
    await until(lambda: nothing_is_left(api, namespace), "all trays are given back", PATIENCE)


async def test_a_worker_that_dies_comes_back_to_its_tray_while_its_job_is_not_over(
    early: EarlyReturns, add_nodes: AddNodes, api: KubeApi, namespace: str, containers: LaunchersEnd
) -> None:
    trays = set((await begun(add_nodes, api, namespace, "Running")).values())
    before = await trays_of(api, namespace, "worker")
    await api.delete(POD, "ranks-worker-1", namespace, grace_seconds=0)
    await all_run(api, namespace)
    assert await trays_of(api, namespace, "worker") == before
    assert await held(api) == trays


async def test_all_trays_are_free_when_a_job_is_deleted_half_way(
    early: EarlyReturns, add_nodes: AddNodes, api: KubeApi, namespace: str
) -> None:
    await begun(add_nodes, api, namespace, "Running")
    await api.delete(MPI_JOB, "ranks", namespace)
    await until(lambda: nothing_is_left(api, namespace), "all trays are given back", PATIENCE)
