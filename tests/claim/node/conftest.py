"""A node with a fake API server, a kubelet over real sockets, and a plugin that a test controls."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.claim.node import cdi_library
from tests.claim.node.cdi_library import ReadSpecs
from tests.claim.node.plugin_manager import KubeletPluginManager, PluginManagerTiming, plugin_manager_on

from rackloom.claim.node.plugin import (
    CheckpointEntry,
    ContainerEdits,
    DeviceHealth,
    DevicePool,
    Health,
    PreparedClaim,
    PreparedDevice,
)
from rackloom.claim.node.run import PluginDirectories, PluginHost, PluginProcess, run_plugin
from rackloom.core.allocate.objects import Device, DeviceAttribute
from rackloom.core.cluster.claims import AllocatedClaim
from rackloom.core.cluster.objects import NODE, RESOURCE_CLAIM
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.nodes.dra_manager import PodClaim, pod_claim
from rackloom.lab.nodes.kubelets import LEASE_NAMESPACE

DRIVER = "toy.example.com"
NODE_NAME = "node-a"
HURRY = PluginManagerTiming(scan=0.01, call=60.0, wipe=0.2)


class Toys:
    """A plugin whose devices are environment variables. `trouble` is raised by the next prepares."""

    driver = DRIVER
    kinds = ("toy",)

    def __init__(self) -> None:
        self.names = ["toy-0", "toy-1"]
        self.lacking: str | None = None
        self.trouble: dict[str, Exception] = {}
        self.prepared: list[str] = []
        self.unprepared: list[str] = []
        self.others: list[list[str]] = []
        self.woken: asyncio.Queue[None] = asyncio.Queue()

    def missing(self) -> str | None:
        return self.lacking

    def resume(self, claims: Callable[[], Collection[CheckpointEntry]]) -> None:
        self.claims = claims

    async def pools(self) -> tuple[DevicePool, ...]:
        devices = tuple(
            Device(name=name, attributes={"color": DeviceAttribute(string="red")}) for name in self.names
        )
        return (DevicePool(name=NODE_NAME, devices=devices),)

    def intent(self, claim: AllocatedClaim) -> Mapping[str, Any]:
        return {"devices": [result.device for result in claim.results]}

    async def prepare(self, claim: AllocatedClaim) -> PreparedClaim:
        self.prepared.append(claim.ref.uid)
        if claim.ref.name in self.trouble:
            raise self.trouble[claim.ref.name]
        return PreparedClaim(
            devices=tuple(
                PreparedDevice(result=result, kind="toy", edits=ContainerEdits(env=(f"TOY={result.device}",)))
                for result in claim.results
            )
        )

    async def changes(self, claim: AllocatedClaim) -> AsyncIterator[None]:
        while True:
            yield await self.woken.get()

    async def unprepare(self, entry: CheckpointEntry, others: Any) -> None:
        self.unprepared.append(entry.ref.uid)
        self.others.append([entry.ref.name for entry in others])
        await asyncio.sleep(0)
        if entry.ref.name in self.trouble:
            raise self.trouble[entry.ref.name]

    async def tidy(self, claims: Any) -> None:
        pass

    async def run(self, wake: Any) -> None:
        self.wake = wake
        await asyncio.Event().wait()

    async def health(self) -> tuple[DeviceHealth, ...]:
        return tuple(
            DeviceHealth(pool=NODE_NAME, device=name, health=Health.HEALTHY, observed_at=1.0)
            for name in self.names
        )


class NodeKit:
    """One node below a short temporary directory (socket paths are limited)."""

    driver = DRIVER
    node = NODE_NAME

    def __init__(self, root: Path) -> None:
        self.places = PluginDirectories(registry=root / "reg", plugins=root / "plug", cdi=root / "cdi")
        namespaces = ("default", "rackloom-system", "rackloom-imex", LEASE_NAMESPACE)
        self.kube = FakeKube(namespaces=namespaces, seed=1)
        self.api = DirectApi(self.kube, "plugin")
        self.boot_id = "boot-1"
        self.now = 1000.0
        self.toys = Toys()

    def host(self) -> PluginHost:
        return PluginHost(
            node=NODE_NAME, boot_id=self.boot_id, directories=self.places, wall=lambda: self.now
        )

    @asynccontextmanager
    async def plugin(self, plugin: Any = None) -> AsyncIterator[PluginProcess]:
        async with run_plugin(plugin or self.toys, self.api, self.host()) as process:
            yield process

    @asynccontextmanager
    async def kubelet(
        self, version: str = "v1", timing: PluginManagerTiming = HURRY
    ) -> AsyncIterator[KubeletPluginManager]:
        registry = self.places.registry
        async with plugin_manager_on(
            registry, self.api, NODE_NAME, timing=timing, version=version
        ) as manager:
            yield manager

    async def boot(self) -> None:
        await self.api.create(NODE, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE_NAME}})

    async def claim(self, name: str, *devices: str, **extra: Any) -> PodClaim:
        """An allocated claim of this driver."""
        return pod_claim(await self.allocated(name, allocation(*(devices or ("toy-0",)), **extra)))

    async def allocated(self, name: str, status: Any, **metadata: Any) -> Any:
        obj = {
            "apiVersion": RESOURCE_CLAIM.api_version,
            "kind": "ResourceClaim",
            "metadata": {"name": name, "namespace": "default", **metadata},
            "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "toy"}}]}},
        }
        made = await self.api.create(RESOURCE_CLAIM, obj)
        return await self.api.replace(RESOURCE_CLAIM, {**made, "status": status}, subresource="status")


def allocation(
    *devices: str, driver: str = DRIVER, configs: tuple[Any, ...] = (), pool: str = NODE_NAME
) -> Any:
    results = [{"request": "r", "driver": driver, "pool": pool, "device": device} for device in devices]
    return {
        "allocation": {
            "devices": {
                "results": results,
                "config": [
                    {
                        "source": "FromClaim",
                        "requests": [],
                        "opaque": {"driver": driver, "parameters": config},
                    }
                    for config in configs
                ],
            }
        },
        "reservedFor": [{"resource": "pods", "name": "p", "uid": "p-uid"}],
    }


@pytest.fixture
def kit() -> Iterator[NodeKit]:
    with tempfile.TemporaryDirectory(prefix="rl") as root:
        yield NodeKit(Path(root))


@pytest.fixture(scope="session")
def read_specs() -> ReadSpecs:
    """Reads a directory of CDI specs the way containerd does."""
    return partial(cdi_library.read_specs, cdi_library.program())
