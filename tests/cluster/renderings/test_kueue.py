"""Kueue's topology-aware scheduling, given what is rendered for it: the Topology and the annotations."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from tests.cluster.control_plane import ControlPlane
from tests.cluster.renderings.applied import apply, kubectl, landed, planned, rendered, spread
from tests.cluster.renderings.build import KUEUE, QUEUES, source
from tests.cluster.renderings.conftest import TRAYS, AddRack
from tests.cluster.renderings.jobs import GPU, job, job_set, mpi_job, occupy
from tests.cluster.renderings.operators import Operator, installed

from rackloom.claim.kube.api import KubeApi, Object

pytestmark = pytest.mark.anyio
SEGMENT = 16
INDEX = "batch.kubernetes.io/job-completion-index"
JOBS = {
    "github.com/kubeflow/mpi-operator": "manifests/base/kubeflow.org_mpijobs.yaml",
    "sigs.k8s.io/jobset": "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml",
}
"""The definitions of jobs that Kueue admits, of the versions that it asks for."""
CONFIG: Object = {
    "apiVersion": "config.kueue.x-k8s.io/v1beta2",
    "kind": "Configuration",
    "namespace": "kueue-system",
    "integrations": {"frameworks": ["batch/job", "kubeflow.org/mpijob", "jobset.x-k8s.io/jobset"]},
}


@pytest.fixture
async def kueue(operators: Path, cluster: ControlPlane, api: KubeApi) -> AsyncIterator[None]:
    for module, crd in JOBS.items():
        kubectl(cluster, "apply", "--server-side", "-f", str(source(QUEUES, module) / crd))
    operator = Operator("kueue", operators / "kueue", source(QUEUES, KUEUE), CONFIG)
    async with installed(operator, cluster, api):
        yield


def queues(namespace: str, topology: str) -> list[Object]:
    """What an administrator adds to the Topology: a flavor on it, and a queue with room for everything."""
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
    assert await spread(api, pods) == {(racks[1],): SEGMENT, (racks[2],): SEGMENT}
    for pod in pods:
        index = int(pod["metadata"]["labels"][INDEX])
        pod["metadata"]["labels"]["segment"] = str(index // SEGMENT)
    assert list((await spread(api, pods, "segment")).values()) == [SEGMENT, SEGMENT]


def submit(cluster: ControlPlane, namespace: str, documents: Sequence[Object]) -> None:
    (topology,) = [one["metadata"]["name"] for one in documents if one["kind"] == "Topology"]
    apply(cluster, queues(namespace, topology))
    apply(cluster, documents)


@pytest.mark.parametrize("words", [(), ("--segment", str(SEGMENT))])
async def test_a_launcher_beside_its_workers_is_admitted(
    kueue: None,
    cluster: ControlPlane,
    add_rack: AddRack,
    namespace: str,
    tmp_path: Path,
    words: tuple[str, ...],
) -> None:
    await add_rack()
    documents = rendered(cluster, mpi_job(tmp_path, namespace, SEGMENT), "kueue", *words)
    apply(cluster, documents, "--dry-run=server")


async def test_two_groups_apart_are_admitted(
    kueue: None, cluster: ControlPlane, add_rack: AddRack, namespace: str, tmp_path: Path
) -> None:
    await add_rack()
    await add_rack()
    file = job_set(tmp_path, namespace, prefill=4, decode=8)
    apply(cluster, rendered(cluster, file, "kueue", "--apart"), "--dry-run=server")


async def test_two_groups_in_one_clique_are_more_than_kueue_groups(
    cluster: ControlPlane, add_rack: AddRack, namespace: str, tmp_path: Path
) -> None:
    await add_rack()
    file = job_set(tmp_path, namespace, prefill=4, decode=8)
    with pytest.raises(AssertionError, match="one of them a single pod"):
        rendered(cluster, file, "kueue")
