"""GPUs that several claims share: the real API server takes the policy, the real scheduler counts."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.h100_nodes import Files, plug_gpus, plug_kubelet
from tests.cluster.waiting import until

from rackloom.claim.allocate.slices import device_classes
from rackloom.claim.kube.api import KubeApi, Object
from rackloom.claim.kube.kinds import (
    DEVICE_CLASS,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
)
from rackloom.claim.node.gpu.settings import GPU_DRIVER
from rackloom.claim.node.gpu.shares import shares_of
from rackloom.twin.kubelet.kubelet import Kubelet
from rackloom.twin.nodes.plugins import PluginDevices

pytestmark = pytest.mark.anyio
SHARES = 1000
"""The API server writes it in another way: 1k."""


@pytest.fixture
def kubelets_of_plugins() -> dict[str, Kubelet]:
    return {}


@pytest.fixture
def devices(kubelets_of_plugins: dict[str, Kubelet]) -> PluginDevices:
    return PluginDevices(kubelets_of_plugins)


@pytest.fixture
async def shared_node(
    api: KubeApi, add_nodes: AddNodes, kubelets_of_plugins: dict[str, Kubelet]
) -> AsyncIterator[tuple[str, Files]]:
    """A node whose GPUs are shared by up to a thousand claims."""
    (node,) = await add_nodes(1)
    (gpu_class,) = (one for one in device_classes() if one.metadata.name == GPU_DRIVER)
    await api.create(DEVICE_CLASS, msgspec.to_builtins(gpu_class))
    async with AsyncExitStack() as stack:
        files = Files(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl"))))
        await plug_gpus(stack, api, node, files, shares_of(str(SHARES)))
        kubelets_of_plugins[node] = await plug_kubelet(stack, api, node, files, (GPU_DRIVER,))
        yield node, files
    await api.delete(DEVICE_CLASS, GPU_DRIVER)


async def test_two_pods_have_a_share_of_one_gpu(
    api: KubeApi, shared_node: tuple[str, Files], namespace: str
) -> None:
    node, files = shared_node
    (made,) = (await api.list(RESOURCE_SLICE, fields=f"spec.nodeName={node}")).items
    assert made["spec"]["devices"][0]["allowMultipleAllocations"]
    assert made["spec"]["devices"][0]["capacity"]["shares"]["value"] == "1k"
    selector = {"cel": {"expression": f"device.attributes['{GPU_DRIVER}'].nicPartner == 'mlx5_3'"}}
    request = {"name": "gpu", "exactly": {"deviceClassName": GPU_DRIVER, "selectors": [selector]}}
    await api.create(
        RESOURCE_CLAIM_TEMPLATE,
        {
            "metadata": {"name": "gpu", "namespace": namespace},
            "spec": {"spec": {"devices": {"requests": [request]}}},
        },
    )
    for name in ("one", "two"):
        await api.create(POD, pod(name, namespace))

    async def both_run() -> bool:
        found = (await api.list(POD, namespace)).items
        return [one.get("status", {}).get("phase") for one in found] == ["Running", "Running"]

    await until(both_run, "both pods run")
    claims = (await api.list(RESOURCE_CLAIM, namespace)).items
    results = [one["status"]["allocation"]["devices"]["results"][0] for one in claims]
    assert {one["device"] for one in results} == {"gpu-3"}
    assert len({one["shareID"] for one in results}) == 2
    assert [one["consumedCapacity"]["shares"] for one in results] == ["1", "1"]
    paths = [
        one["path"]
        for spec in files.specs().values()
        for one in spec["devices"][0]["containerEdits"]["deviceNodes"]
    ]
    assert paths.count("/dev/nvidia3") == 2


def pod(name: str, namespace: str) -> Object:
    container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "gpu"}]}}
    return {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "containers": [container],
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "gpu"}],
        },
    }
