"""The stand-in for kubelet acts like kubelet when plugins come, go and claim versions that they lack."""

import asyncio
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.claim.node.plugin_manager import NotPrepared, PluginManagerTiming, plugin_manager_on

from rackloom.claim.node.run import Registrar, serve_on_socket
from rackloom.core.cluster.claims import ClaimRef
from rackloom.core.cluster.objects import RESOURCE_SLICE
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.nodes.dra_manager import PodClaim

DRIVER = "toy.example.com"
HURRY = PluginManagerTiming(scan=0.01, call=5.0, wipe=0.3)
CLAIM = PodClaim(ref=ClaimRef(namespace="n", name="c", uid="u"), drivers=frozenset({DRIVER}))


@pytest.fixture
def registry():
    with tempfile.TemporaryDirectory(prefix="rl") as root:
        yield Path(root)


def slice_of(driver, node, name):
    return {
        "apiVersion": RESOURCE_SLICE.api_version,
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [],
        },
    }


@asynccontextmanager
async def registrar(registry):
    found = Registrar(DRIVER, registry / "dra.sock")
    async with serve_on_socket(registry / f"{DRIVER}-reg.sock", (found.handler(),)):
        yield found


def test_a_plugin_is_registered_and_told_so(registry):
    async def story():
        api = DirectApi(FakeKube(seed=1), "kubelet")
        async with (
            plugin_manager_on(registry, api, "n1", timing=HURRY) as kubelet,
            registrar(registry) as found,
        ):
            await kubelet.registered(DRIVER)
            while found.registered is None:
                await asyncio.sleep(0.01)
            assert found.registered is True

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_version_that_the_plugin_lacks_is_refused(registry):
    async def story():
        api = DirectApi(FakeKube(seed=1), "kubelet")
        async with (
            plugin_manager_on(registry, api, "n1", timing=HURRY, version="v1beta1") as kubelet,
            registrar(registry) as found,
        ):
            del found._info.supported_versions[1:]
            while found.registered is None:
                await asyncio.sleep(0.01)
            assert found.registered is False
            assert kubelet.plugins == {}

    asyncio.run(asyncio.wait_for(story(), 60))


def test_slices_of_a_plugin_that_stays_away_are_wiped_and_no_others(registry):
    async def story():
        api = DirectApi(FakeKube(seed=1), "kubelet")
        for driver, node, name in ((DRIVER, "n1", "a"), (DRIVER, "n2", "b"), ("other", "n1", "c")):
            await api.create(RESOURCE_SLICE, slice_of(driver, node, name))
        async with plugin_manager_on(registry, api, "n1", timing=HURRY) as kubelet:
            async with registrar(registry):
                await kubelet.registered(DRIVER)
            await kubelet.gone(DRIVER)
            with pytest.raises(NotPrepared, match=f"DRA driver {DRIVER} is not registered"):
                await kubelet.prepare(CLAIM)
            while len(left := (await api.list(RESOURCE_SLICE)).items) == 3:
                await asyncio.sleep(0.01)
            assert [slice_["metadata"]["name"] for slice_ in left] == ["b", "c"]

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_plugin_that_comes_back_in_time_keeps_its_slices(registry):
    async def story():
        api = DirectApi(FakeKube(seed=1), "kubelet")
        await api.create(RESOURCE_SLICE, slice_of(DRIVER, "n1", "a"))
        timing = PluginManagerTiming(scan=0.01, wipe=60.0)
        async with plugin_manager_on(registry, api, "n1", timing=timing) as kubelet:
            for _ in range(2):
                async with registrar(registry):
                    await kubelet.registered(DRIVER)
                await kubelet.gone(DRIVER)
            async with registrar(registry):
                await kubelet.registered(DRIVER)
                await asyncio.sleep(0.2)
                assert len((await api.list(RESOURCE_SLICE)).items) == 1

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_plugin_that_cannot_be_reached_prepares_nothing(registry):
    async def story():
        api = DirectApi(FakeKube(seed=1), "kubelet")
        async with plugin_manager_on(registry, api, "n1", timing=HURRY) as kubelet, registrar(registry):
            await kubelet.registered(DRIVER)
            with pytest.raises(NotPrepared, match="UNAVAILABLE"):
                await kubelet.prepare(CLAIM)

    asyncio.run(asyncio.wait_for(story(), 60))
