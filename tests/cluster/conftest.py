"""A real control plane for the tests of this folder, and simulated nodes on it.

`make test-cluster` sets RACKLOOM_TEST_CLUSTER. Without it, these tests are collected and skipped, so that
`make test` neither builds Kubernetes nor runs one for each of its workers.
"""

import asyncio
import contextlib
import gc
import itertools
import os
import random
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.claim.node.plugin_manager import KubeletPluginManager
from tests.cluster.build import CONTROL_PLANE, MPI_OPERATOR, Tools, made
from tests.cluster.control_plane import ControlPlane
from tests.cluster.credentials import MASTERS
from tests.cluster.custom import MPI_JOB, serve, withdraw
from tests.cluster.installed import applied
from tests.cluster.policies import DAEMONS, DRIVER
from tests.cluster.processes import start
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi, NotFound
from rackloom.claim.kube.client import KubeClient, RateLimiter
from rackloom.claim.kube.connection import http_client
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN_CLIQUE,
    NAMESPACE,
    NODE,
    POD,
    SERVICE_ACCOUNT,
    Object,
    ResourceKind,
)
from rackloom.lab.nodes.kubelets import NodeSpec, SimulatedKubelets
from rackloom.lab.nodes.pods import ContainerRuntime, DeviceManager, IdleContainers, NoDeviceManager

ASKED_BY = "RACKLOOM_TEST_CLUSTER"
_PATIENT = httpx2.Timeout(60.0, pool=None)
"""A thousand pods of one process wait for a hundred connections as long as it takes."""
_UNLIMITED = RateLimiter(10_000.0, 10_000)
_EMPTY_WITHIN = 900.0
"""Seconds: hundreds of pods end one by one on two busy cores."""
_numbers = itertools.count(1)
AddNodes = Callable[..., Awaitable[list[str]]]


_LEFT_TO_THE_COLLECTOR = pytest.mark.filterwarnings(
    r"ignore:Exception ignored in.{2}<(socket\.socket|function _Selector\w*Transport\.__del__) "
    ":pytest.PytestUnraisableExceptionWarning"
)
"""asyncio of Python 3.11 leaves connections with a cancelled opener there. Kubelets end during calls."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """No test here fails because of connections that the kubelets of another test left."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(_LEFT_TO_THE_COLLECTOR)


def pytest_sessionfinish() -> None:
    """Nor does the whole run: pytest collects garbage again at its end, when no marker applies."""
    if os.environ.get(ASKED_BY):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            for _ in range(5):  # Objects that one round frees may hold more.
                gc.collect()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Iterator[None]:
    """A failure shows the ends of the control plane's logs."""
    report: Any = yield
    plane = item.funcargs.get("cluster")
    if report.failed and isinstance(plane, ControlPlane):
        report.sections.append(("control plane", plane.log_tails()))
    return report


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def binaries() -> Callable[[Tools], Path]:
    """Builds Go tools, but only if RACKLOOM_TEST_CLUSTER is set."""
    if not os.environ.get(ASKED_BY):
        pytest.skip(f"needs a real control plane: make test-cluster (it sets {ASKED_BY})")
    return made


@pytest.fixture(scope="session")
def cluster(
    binaries: Callable[[Tools], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    """One control plane for all tests: its URL, an admin's kubeconfig, and kubeconfigs for other users."""
    plane = ControlPlane(binaries(CONTROL_PLANE), tmp_path_factory.mktemp("cluster"))
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()


@contextlib.asynccontextmanager
async def administered(cluster: ControlPlane) -> AsyncIterator[KubeApi]:
    """The cluster as its administrator sees it, at full speed."""
    client = http_client(cluster.admin, None)
    client.timeout = _PATIENT
    async with KubeClient(client, _UNLIMITED) as admin:
        yield admin


@pytest.fixture
async def api(cluster: ControlPlane) -> AsyncIterator[KubeApi]:
    """The cluster as its administrator sees it, at full speed."""
    async with administered(cluster) as admin:
        yield admin


@pytest.fixture
def devices() -> DeviceManager:
    """The manager that prepares claims on the nodes of a test. Tests override it with their plugins."""
    return NoDeviceManager()


@pytest.fixture
def containers() -> ContainerRuntime:
    """The containers in the pods of a test."""
    return IdleContainers()


@pytest.fixture
def kubelets_of_plugins() -> dict[str, KubeletPluginManager]:
    """Kubelets that call plugins over sockets, by node. A module whose `devices` use them adds some."""
    return {}


@contextlib.asynccontextmanager
async def at_work(
    api: KubeApi, devices: DeviceManager, containers: ContainerRuntime
) -> AsyncIterator[SimulatedKubelets]:
    """Running kubelets, without nodes yet."""
    kubelets = SimulatedKubelets(api, time.time, random.Random(1), devices=devices, containers=containers)
    task = asyncio.create_task(kubelets.run())
    yield kubelets
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.fixture
async def kubelets(
    api: KubeApi, devices: DeviceManager, containers: ContainerRuntime
) -> AsyncIterator[SimulatedKubelets]:
    """Running kubelets, without nodes yet."""
    async with at_work(api, devices, containers) as kubelets:
        yield kubelets


@contextlib.asynccontextmanager
async def adding_nodes(api: KubeApi, kubelets: SimulatedKubelets) -> AsyncIterator[AddNodes]:
    """Registers ready nodes, and deletes them at the end."""
    names: list[str] = []

    async def add(count: int, **spec: Any) -> list[str]:
        new = [f"node-{next(_numbers)}" for _ in range(count)]
        names.extend(new)
        await asyncio.gather(*(kubelets.register(NodeSpec(name, **spec)) for name in new))
        await until(lambda: _take_pods(api, new), "new nodes take pods")
        return new

    yield add
    for name in names:
        with contextlib.suppress(NotFound):  # A test may have taken it away.
            await api.delete(NODE, name)


@pytest.fixture
async def add_nodes(api: KubeApi, kubelets: SimulatedKubelets) -> AsyncIterator[AddNodes]:
    """Registers nodes that are ready, `add_nodes(count, labels=...)`, and returns their names."""
    async with adding_nodes(api, kubelets) as add:
        yield add


@pytest.fixture
async def namespace(api: KubeApi, add_nodes: AddNodes) -> AsyncIterator[str]:
    """A namespace that can take pods. At the end, it and its pods are gone, which needs the kubelets."""
    name = f"test-{next(_numbers)}"
    await api.create(NAMESPACE, {"metadata": {"name": name}})
    await until(lambda: has_account(api, name), "the service account of a new namespace")
    yield name
    await api.delete(NAMESPACE, name)
    await until(lambda: _is_empty(api, name), "the pods of a deleted namespace are gone", _EMPTY_WITHIN)


@pytest.fixture
async def base_applied(cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes) -> AsyncIterator[None]:
    """The objects of deploy/kubernetes/base, with a node for its pods."""
    await add_nodes(1)
    async with applied(cluster, api, "base"):
        yield


@pytest.fixture(scope="module")
async def base_of_module(cluster: ControlPlane) -> AsyncIterator[None]:
    """The objects of deploy/kubernetes/base, with a node for its pods, for all tests of a module."""
    async with (
        administered(cluster) as api,
        at_work(api, NoDeviceManager(), IdleContainers()) as kubelets,
        adding_nodes(api, kubelets) as add,
    ):
        await add(1)
        async with applied(cluster, api, "base"):
            yield


@pytest.fixture
async def base_shared(api: KubeApi, base_of_module: None) -> AsyncIterator[None]:
    """The installation of the module. Objects that a test leaves in its namespaces are gone before the next.

    To install and uninstall takes longer than most tests that need no more than the rights and the policies.
    """
    yield
    for kind in (POD, COMPUTE_DOMAIN_CLIQUE):
        for namespace in (DRIVER, DAEMONS):
            for meta in await _made_by_tests(api, kind, namespace):
                await api.delete(kind, meta["name"], namespace)
    await until(lambda: _none_made_by_tests(api), "pods of a test are gone")


async def _made_by_tests(api: KubeApi, kind: ResourceKind, namespace: str) -> list[Object]:
    """The metadata of the objects that no controller of Kubernetes made."""
    found = [obj["metadata"] for obj in (await api.list(kind, namespace)).items]
    return [meta for meta in found if kind is not POD or "ownerReferences" not in meta]


async def _none_made_by_tests(api: KubeApi) -> bool:
    return not any([await _made_by_tests(api, POD, namespace) for namespace in (DRIVER, DAEMONS)])


@pytest.fixture
async def mpi_operator(
    binaries: Callable[[Tools], Path], cluster: ControlPlane, api: KubeApi
) -> AsyncIterator[None]:
    """The MPI operator at work."""
    async with mpi_operator_at_work(binaries, cluster, api):
        yield


@contextlib.asynccontextmanager
async def mpi_operator_at_work(
    binaries: Callable[[Tools], Path], cluster: ControlPlane, api: KubeApi, cluster_domain: str = ""
) -> AsyncIterator[None]:
    """The operator at work. `cluster_domain` is its option --cluster-domain.

    Its CRD here is our own, which accepts any field.
    """
    program = binaries(MPI_OPERATOR) / "mpi-operator"
    await serve(api, MPI_JOB)
    kubeconfig = cluster.kubeconfig("mpi-operator", MASTERS)
    child = start("mpi-operator", [program, kubeconfig, cluster_domain], cluster.logs)
    yield
    child.stop()
    await withdraw(api, MPI_JOB)


async def _take_pods(api: KubeApi, names: list[str]) -> bool:
    """The node controller has seen that they are ready, and taken the taint of new nodes away."""
    taken = {
        node["metadata"]["name"] for node in (await api.list(NODE)).items if "taints" not in node["spec"]
    }
    return taken.issuperset(names)


async def has_account(api: KubeApi, namespace: str) -> bool:
    """Pods can be made in a namespace once it has the account that they run by."""
    try:
        await api.get(SERVICE_ACCOUNT, "default", namespace)
    except NotFound:
        return False
    return True


async def _is_empty(api: KubeApi, namespace: str) -> bool:
    return not (await api.list(POD, namespace)).items
