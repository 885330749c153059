"""Our plugin over its unix socket: publish, allocation by the real scheduler, prepare, unprepare."""

import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from tests.claim.node.conftest import DRIVER, Toys
from tests.claim.node.plugin_manager import KubeletPluginManager, SocketDraManager, plugin_manager_on
from tests.cluster.conftest import AddNodes
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.claim.node.plugin import DevicePool
from rackloom.claim.node.run import PluginDirectories, PluginHost, run_plugin
from rackloom.core.allocate.objects import Device
from rackloom.core.cluster.objects import (
    DEVICE_CLASS,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    Object,
)

pytestmark = pytest.mark.anyio


class ToysOf(Toys):
    """Toys of a node that the test names."""

    def __init__(self, node: str) -> None:
        super().__init__()
        self._node = node

    async def pools(self) -> tuple[DevicePool, ...]:
        return (DevicePool(name=self._node, devices=tuple(Device(name=name) for name in self.names)),)


class Plugged:
    """Nodes with a kubelet that calls plugins for the devices of every pod of the test."""

    def __init__(self, stack: AsyncExitStack, root: Path, api: KubeApi) -> None:
        self.kubelets: dict[str, KubeletPluginManager] = {}
        self._stack = stack
        self._root = root
        self._api = api

    def places(self, node: str) -> PluginDirectories:
        root = self._root / node
        return PluginDirectories(registry=root / "reg", plugins=root / "plug", cdi=root / "cdi")

    async def plug(self, node: str, toys: Toys) -> None:
        places = self.places(node)
        host = PluginHost(node=node, boot_id="1", directories=places, wall=time.time)
        await self._stack.enter_async_context(run_plugin(toys, self._api, host))
        registry = plugin_manager_on(places.registry, self._api, node)
        self.kubelets[node] = await self._stack.enter_async_context(registry)
        await self.kubelets[node].registered(DRIVER)


@pytest.fixture
async def plugged(api: KubeApi) -> AsyncIterator[Plugged]:
    async with AsyncExitStack() as stack:
        # Paths of unix sockets must be short.
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="rl"))
        yield Plugged(stack, Path(root), api)


@pytest.fixture
def devices(plugged: Plugged) -> SocketDraManager:
    return SocketDraManager(plugged.kubelets)


async def test_a_claim_goes_through_the_plugin_and_back(
    api: KubeApi, add_nodes: AddNodes, namespace: str, plugged: Plugged
) -> None:
    (node,) = await add_nodes(1)
    toys = ToysOf(node)
    await plugged.plug(node, toys)
    await _request(api, namespace)

    async def phase() -> str:
        return str((await api.get(POD, "player", namespace))["status"]["phase"])

    async def runs() -> bool:
        return await phase() == "Running"

    await until(runs, "the pod runs")
    (claim,) = (await api.list(RESOURCE_CLAIM, namespace)).items
    uid = claim["metadata"]["uid"]
    assert toys.prepared == [uid]
    specs = list(plugged.places(node).cdi.iterdir())
    assert [uid in spec.name for spec in specs] == [True]

    await api.delete(POD, "player", namespace)

    async def claims_left() -> bool:
        return not (await api.list(RESOURCE_CLAIM, namespace)).items

    await until(claims_left, "the claim of a template goes with its pod")
    assert toys.unprepared == [uid]
    assert not list(plugged.places(node).cdi.iterdir())
    await api.delete(DEVICE_CLASS, DRIVER)


async def _request(api: KubeApi, namespace: str) -> None:
    """A pod with one toy of a template."""
    selector = {"cel": {"expression": f"device.driver == '{DRIVER}'"}}
    await api.create(DEVICE_CLASS, {"metadata": {"name": DRIVER}, "spec": {"selectors": [selector]}})
    requests = [{"name": "toy", "exactly": {"deviceClassName": DRIVER}}]
    template: Object = {
        "metadata": {"name": "toy", "namespace": namespace},
        "spec": {"spec": {"devices": {"requests": requests}}},
    }
    await api.create(RESOURCE_CLAIM_TEMPLATE, template)
    container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "toy"}]}}
    claims = [{"name": "toy", "resourceClaimTemplateName": "toy"}]
    pod = {
        "metadata": {"name": "player", "namespace": namespace},
        "spec": {"containers": [container], "resourceClaims": claims},
    }
    await api.create(POD, pod)
