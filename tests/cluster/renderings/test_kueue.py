"""Kueue's topology-aware scheduling with its rendered objects: the Topology and the annotations."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from tests.cluster.control_plane import ControlPlane
from tests.cluster.renderings.applied import SMALL, apply, landed, planned, rendered, spread
from tests.cluster.renderings.build import KUEUE, QUEUES, source
from tests.cluster.renderings.conftest import TRAYS, AddRack
from tests.cluster.renderings.jobs import GPU, job, job_set, mpi_job, occupy, pods
from tests.cluster.renderings.operators import Operator, installed
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.objects import POD, Object, ResourceKind

pytestmark = pytest.mark.anyio
SEGMENT = 16
ROLE = "training.kubeflow.org/job-role"
REPLICATED = "jobset.sigs.k8s.io/replicatedjob-name"
WORKLOAD = ResourceKind("kueue.x-k8s.io", "v1beta2", "Workload", "workloads", namespaced=True)
FRAMEWORKS = ["batch/job", "kubeflow.org/mpijob", "jobset.x-k8s.io/jobset", "pod"]
CONFIG: Object = {
    "apiVersion": "config.kueue.x-k8s.io/v1beta2",
    "kind": "Configuration",
    "namespace": "kueue-system",
    "integrations": {"frameworks": FRAMEWORKS},
}


class UntilTold:
    """Containers that succeed when a test ends them."""

    def __init__(self) -> None:
        self.done = asyncio.Event()

    async def run(self, node: str, pod: Object, ready: Callable[[], Awaitable[None]]) -> int:
        await ready()
        await self.done.wait()
        return 0


@pytest.fixture
def containers() -> UntilTold:
    return UntilTold()


@pytest.fixture
async def kueue(
    operators: Path, mpi_jobs: None, job_sets: None, cluster: ControlPlane, api: KubeApi
) -> AsyncIterator[None]:
    """Kueue beside the controllers of the jobs that it admits."""
    operator = Operator("kueue", operators / "kueue", source(QUEUES, KUEUE), CONFIG)
    async with installed(operator, cluster, api):
        yield
        # Kueue 0.19.0 may crash on a nil pointer if it finds an admitted workload when it starts.
        await until(lambda: _has_no_workload(api), "the workloads are gone")


async def _has_no_workload(api: KubeApi) -> bool:
    return not (await api.list(WORKLOAD)).items


def queues(namespace: str, topology: str) -> list[Object]:
    """An administrator's additions to the Topology: a flavor on it, and a queue with room for everything."""
    quotas = [{"name": name, "nominalQuota": quota} for name, quota in ((GPU, "999"), ("cpu", "9999"))]
    version = "kueue.x-k8s.io/v1beta2"
    flavor = {"nodeLabels": {"kubernetes.io/os": "linux"}, "topologyName": topology}
    group = {"coveredResources": [GPU, "cpu"], "flavors": [{"name": topology, "resources": quotas}]}
    return [
        {"apiVersion": version, "kind": "ResourceFlavor", "metadata": {"name": topology}, "spec": flavor},
        {
            "apiVersion": version,
            "kind": "ClusterQueue",
            "metadata": {"name": "all"},
            "spec": {"namespaceSelector": {}, "resourceGroups": [group]},
        },
        {
            "apiVersion": version,
            "kind": "LocalQueue",
            "metadata": {"name": "default", "namespace": namespace},
            "spec": {"clusterQueue": "all"},
        },
    ]


async def test_a_full_rack_job_lands_in_the_one_clique_that_is_whole(
    kueue: None, cluster: ControlPlane, api: KubeApi, add_rack: AddRack, namespace: str, tmp_path: Path
) -> None:
    split, whole = await add_rack(), await add_rack()
    await occupy(api, namespace, split, 1)
    file = job(tmp_path, namespace, TRAYS)
    assert planned(cluster, file)["cliques"] == [whole]

    submit(cluster, namespace, rendered(cluster, file, "kueue"))

    pods = await landed(api, namespace, TRAYS)
    assert await spread(api, pods) == {(whole,): TRAYS}


async def test_the_ranks_of_a_segment_share_a_clique(
    kueue: None, cluster: ControlPlane, api: KubeApi, add_rack: AddRack, namespace: str, tmp_path: Path
) -> None:
    racks = [await add_rack() for _ in range(3)]
    await occupy(api, namespace, racks[0], 3)
    file = job(tmp_path, namespace, 2 * SEGMENT)

    submit(cluster, namespace, rendered(cluster, file, "kueue", "--segment", str(SEGMENT)))

    pods = await landed(api, namespace, 2 * SEGMENT)
    await assert_segments(api, pods, "batch.kubernetes.io/job-completion-index", racks[1:])


async def assert_segments(api: KubeApi, pods: Sequence[Object], index: str, cliques: Sequence[str]) -> None:
    """Each run of ranks has one of the cliques to itself."""
    for pod in pods:
        labels = pod["metadata"]["labels"]
        labels["segment"] = str(int(labels[index]) // SEGMENT)
    found = await spread(api, pods, "segment")
    assert list(found.values()) == [SEGMENT] * len(cliques)
    assert sorted(clique for _, clique in found) == sorted(cliques)


def submit(cluster: ControlPlane, namespace: str, documents: Sequence[Object]) -> None:
    (topology,) = [document["metadata"]["name"] for document in documents if document["kind"] == "Topology"]
    apply(cluster, queues(namespace, topology))
    apply(cluster, documents)


async def test_a_launcher_lands_beside_its_workers(
    kueue: None, cluster: ControlPlane, api: KubeApi, add_rack: AddRack, namespace: str, tmp_path: Path
) -> None:
    split, whole = await add_rack(), await add_rack()
    await occupy(api, namespace, split, 1)
    file = mpi_job(tmp_path, namespace, TRAYS)
    assert planned(cluster, file)["cliques"] == [whole]

    submit(cluster, namespace, rendered(cluster, file, "kueue"))

    pods = await landed(api, namespace, TRAYS + 1)
    assert await spread(api, pods, ROLE) == {("worker", whole): TRAYS, ("launcher", whole): 1}


async def test_the_workers_of_a_segment_share_a_clique(
    kueue: None, cluster: ControlPlane, api: KubeApi, add_rack: AddRack, namespace: str, tmp_path: Path
) -> None:
    racks = [await add_rack() for _ in range(3)]
    await occupy(api, namespace, racks[0], 3)
    file = mpi_job(tmp_path, namespace, 2 * SEGMENT)

    submit(cluster, namespace, rendered(cluster, file, "kueue", "--segment", str(SEGMENT)))

    pods = await landed(api, namespace, 2 * SEGMENT + 1)
    workers = [pod for pod in pods if pod["metadata"]["labels"][ROLE] == "worker"]
    await assert_segments(api, workers, "training.kubeflow.org/replica-index", racks[1:])


async def test_two_groups_apart_land_in_a_clique_each(
    kueue: None, cluster: ControlPlane, api: KubeApi, add_rack: AddRack, namespace: str, tmp_path: Path
) -> None:
    racks = [await add_rack() for _ in range(3)]
    await occupy(api, namespace, racks[0], 3)
    file = job_set(tmp_path, namespace, prefill=SEGMENT, decode=TRAYS)

    submit(cluster, namespace, rendered(cluster, file, "kueue", "--apart"))

    pods = await landed(api, namespace, SEGMENT + TRAYS)
    found = await spread(api, pods, REPLICATED)
    assert sorted((name, count) for (name, _), count in found.items()) == [
        ("decode", TRAYS),
        ("prefill", SEGMENT),
    ]
    assert {clique for _, clique in found} == set(racks[1:])


async def test_pods_of_a_gang_land_in_the_one_clique_that_is_whole(
    kueue: None,
    cluster: ControlPlane,
    api: KubeApi,
    add_rack: AddRack,
    namespace: str,
    tmp_path: Path,
    containers: UntilTold,
) -> None:
    split, whole = await add_rack(), await add_rack()
    await occupy(api, namespace, split, 1)
    file = pods(tmp_path, namespace, TRAYS)
    assert planned(cluster, file)["cliques"] == [whole]

    submit(cluster, namespace, rendered(cluster, file, "kueue"))

    found = await landed(api, namespace, TRAYS)
    assert await spread(api, found) == {(whole,): TRAYS}
    await finish(api, namespace, containers)


async def test_the_pods_of_a_segment_share_a_clique(
    kueue: None,
    cluster: ControlPlane,
    api: KubeApi,
    add_rack: AddRack,
    namespace: str,
    tmp_path: Path,
    containers: UntilTold,
) -> None:
    racks = [await add_rack() for _ in range(3)]
    await occupy(api, namespace, racks[0], 3)
    file = pods(tmp_path, namespace, 2 * SEGMENT)

    submit(cluster, namespace, rendered(cluster, file, "kueue", "--segment", str(SEGMENT)))

    found = await landed(api, namespace, 2 * SEGMENT)
    await assert_segments(api, found, "kueue.x-k8s.io/pod-group-pod-index", racks[1:])
    await finish(api, namespace, containers)


async def finish(api: KubeApi, namespace: str, containers: UntilTold) -> None:
    """Kueue does not let go of the pods of a group before all of them have succeeded."""
    containers.done.set()
    await until(lambda: _have_succeeded(api, namespace), "the pods have succeeded")


async def _have_succeeded(api: KubeApi, namespace: str) -> bool:
    pods = (await api.list(POD, namespace, labels=f"!{SMALL}")).items
    return all(pod["status"]["phase"] == "Succeeded" for pod in pods)


async def test_two_groups_in_one_clique_are_more_than_kueue_groups(
    cluster: ControlPlane, add_rack: AddRack, namespace: str, tmp_path: Path
) -> None:
    await add_rack()
    file = job_set(tmp_path, namespace, prefill=4, decode=8)
    with pytest.raises(AssertionError, match="one of them a single pod"):
        rendered(cluster, file, "kueue")
