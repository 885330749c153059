"""Racks of simulated trays on a control plane of their own: what is installed there is gone with it."""

import itertools
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from tests.cluster.build import CONTROL_PLANE, NotBuilt, Tools
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.renderings.applied import CLIQUE
from tests.cluster.renderings.build import QUEUES, built
from tests.cluster.renderings.plane import GatedPlane

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
    """The folder of Kueue and LeaderWorkerSet, which are built on request only."""
    try:
        return built(QUEUES)
    except NotBuilt as error:
        pytest.skip(str(error))


@pytest.fixture
def add_rack(add_nodes: AddNodes) -> AddRack:
    """Registers a rack of trays and returns its clique."""

    async def add(trays: int = TRAYS) -> str:
        clique = f"00000000-0000-4000-8000-{next(_racks):012d}.1"
        await add_nodes(trays, labels={CLIQUE: clique}, capacity=_ROOM)
        return clique

    return add
