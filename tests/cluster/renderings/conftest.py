"""Racks of simulated trays on a separate control plane, which takes all installed objects with it."""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from tests.cluster.build import CONTROL_PLANE, MPI_OPERATOR, NotBuilt, Tools
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.credentials import MASTERS
from tests.cluster.kubectl import kubectl
from tests.cluster.processes import start
from tests.cluster.renderings.applied import CLIQUE, established
from tests.cluster.renderings.build import JOB_SET, KAI_PARTS, LWS, MPI, QUEUES, built, source
from tests.cluster.renderings.operators import Operator, installed
from tests.cluster.renderings.plane import GatedPlane

from rackloom.claim.kube.api import KubeApi

TRAYS = 18
GPUS = 4
_racks = itertools.count(1)
AddRack = Callable[..., Awaitable[str]]
_ROOM = {"cpu": "96", "memory": "1000Gi", "pods": "110", "nvidia.com/gpu": str(GPUS)}


@pytest.fixture(scope="module")
def cluster(
    binaries: Callable[[Tools], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    """A control plane of a test file, with PodGroups."""
    plane = GatedPlane(binaries(CONTROL_PLANE), tmp_path_factory.mktemp("cluster"))
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="session")
def operators(binaries: Callable[[Tools], Path]) -> Path:
    """The folder of Kueue and the controllers of jobs, which are built on request only."""
    return _built(QUEUES)


@pytest.fixture(scope="session")
def kai_programs(binaries: Callable[[Tools], Path]) -> Path:
    """The folder of KAI's parts, which are built on request only."""
    return _built(KAI_PARTS)


def _built(tools: Tools) -> Path:
    try:
        return built(tools)
    except NotBuilt as error:
        pytest.skip(str(error))


@pytest.fixture
async def lws(operators: Path, cluster: ControlPlane, api: KubeApi) -> AsyncIterator[None]:
    """LeaderWorkerSet at work."""
    config = {"apiVersion": "config.lws.x-k8s.io/v1alpha1", "kind": "Configuration"}
    async with installed(Operator("lws", operators / "lws", source(QUEUES, LWS), config), cluster, api):
        yield


@pytest.fixture
async def job_sets(operators: Path, cluster: ControlPlane, api: KubeApi) -> AsyncIterator[None]:
    """JobSet at work."""
    config = {
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "internalCertManagement": {"enable": False},
    }
    program, home = operators / "jobset", source(QUEUES, JOB_SET)
    operator = Operator("jobset", program, home, config, makes_certificate=False)
    async with installed(operator, cluster, api):
        yield


@pytest.fixture
async def mpi_jobs(
    binaries: Callable[[Tools], Path], cluster: ControlPlane, api: KubeApi
) -> AsyncIterator[None]:
    """The MPI operator at work, with the schema of its project."""
    crd = source(QUEUES, MPI) / "manifests" / "base" / "kubeflow.org_mpijobs.yaml"
    kubectl(cluster, "apply", "--server-side", "-f", str(crd))
    await established(api)
    program = binaries(MPI_OPERATOR) / "mpi-operator"
    child = start("mpi-operator", [program, cluster.kubeconfig("mpi-operator", MASTERS)], cluster.logs)
    yield
    child.stop()


@pytest.fixture
def add_rack(add_nodes: AddNodes) -> AddRack:
    """Registers a rack of trays and returns its clique."""

    async def add(trays: int = TRAYS) -> str:
        clique = f"00000000-0000-4000-8000-{next(_racks):012d}.1"
        await add_nodes(trays, labels={CLIQUE: clique}, capacity=_ROOM)
        return clique

    return add
