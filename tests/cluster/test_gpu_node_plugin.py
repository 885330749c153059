"""`rackloom node gpu` on a real API server: published, allocated by its scheduler, prepared, given back."""

import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.h100_nodes import MACHINE, Files, plug_gpus, plug_kubelet
from tests.cluster.waiting import until

from rackloom.claim.allocate.slices import device_classes
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.kube.kinds import (
    DEVICE_CLASS,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
)
from rackloom.claim.node.gpu.settings import GPU_DRIVER
from rackloom.twin.gpu_inventory import declared_inventory
from rackloom.twin.kubelet.kubelet import Kubelet
from rackloom.twin.nodes.plugins import PluginDevices

pytestmark = pytest.mark.anyio
FAILED = {"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}


@pytest.fixture
def kubelets_of_plugins() -> dict[str, Kubelet]:
    return {}


@pytest.fixture
def devices(kubelets_of_plugins: dict[str, Kubelet]) -> PluginDevices:
    return PluginDevices(kubelets_of_plugins)


@pytest.fixture
async def host(
    api: KubeApi, add_nodes: AddNodes, kubelets_of_plugins: dict[str, Kubelet]
) -> AsyncIterator[tuple[str, Files]]:
    """A node with the plugin, its files, and the driver's class."""
    (node,) = await add_nodes(1)
    classes = [one for one in device_classes() if one.metadata.name == GPU_DRIVER]
    for one in classes:
        await api.create(DEVICE_CLASS, msgspec.to_builtins(one))
    async with AsyncExitStack() as stack:
        files = Files(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl"))))
        await plug_gpus(stack, api, node, files)
        kubelets_of_plugins[node] = await plug_kubelet(stack, api, node, files, (GPU_DRIVER,))
        yield node, files
    for one in classes:
        await api.delete(DEVICE_CLASS, one.metadata.name)


async def published(api: KubeApi, node: str) -> dict[str, Any]:
    """Devices by name."""
    found = (await api.list(RESOURCE_SLICE, fields=f"spec.nodeName={node}")).items
    return {device["name"]: device for one in found for device in one["spec"]["devices"]}


async def test_a_gpu_is_published_allocated_and_prepared(
    api: KubeApi, host: tuple[str, Files], namespace: str
) -> None:
    node, files = host
    gpus = await published(api, node)
    assert list(gpus) == [f"gpu-{index}" for index in range(8)]
    attributes = gpus["gpu-3"]["attributes"]
    assert attributes["resource.kubernetes.io/pciBusID"] == {"string": "0008:00:00.0"}
    assert attributes["resource.kubernetes.io/numaNode"] == {"int": 0}
    assert attributes["nicPartnerClass"] == {"string": "PIX"}
    selector = {"cel": {"expression": f"device.attributes['{GPU_DRIVER}'].nicPartner == 'mlx5_3'"}}
    request = {"name": "gpu", "exactly": {"deviceClassName": GPU_DRIVER, "selectors": [selector]}}
    await api.create(
        RESOURCE_CLAIM_TEMPLATE,
        {
            "metadata": {"name": "gpu", "namespace": namespace},
            "spec": {"spec": {"devices": {"requests": [request]}}},
        },
    )
    container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "gpu"}]}}
    claims = [{"name": "gpu", "resourceClaimTemplateName": "gpu"}]
    await api.create(
        POD,
        {
            "metadata": {"name": "worker", "namespace": namespace},
            "spec": {"containers": [container], "resourceClaims": claims},
        },
    )

    async def runs() -> bool:
        return bool((await api.get(POD, "worker", namespace))["status"]["phase"] == "Running")

    await until(runs, "the pod runs")
    (claim,) = (await api.list(RESOURCE_CLAIM, namespace)).items
    (result,) = claim["status"]["allocation"]["devices"]["results"]
    assert gpus[result["device"]]["attributes"]["nicPartner"] == {"string": "mlx5_3"}
    cdi = files.places.cdi
    spec = json.loads((cdi / f"k8s.{GPU_DRIVER}-claim_{claim['metadata']['uid']}.yaml").read_bytes())
    paths = [one["path"] for one in spec["devices"][0]["containerEdits"]["deviceNodes"]]
    assert f"/dev/nvidia{result['device'].removeprefix('gpu-')}" in paths
    await api.delete(POD, "worker", namespace)

    async def left() -> bool:
        return not list(cdi.glob("*claim*"))

    await until(left, "the GPU is given back")


async def test_the_api_server_takes_every_taint_and_its_end(api: KubeApi, host: tuple[str, Files]) -> None:
    node, files = host

    async def taints() -> list[Any]:
        return [
            {name: value for name, value in taint.items() if name != "timeAdded"}
            for taint in (await published(api, node))["gpu-0"].get("taints", [])
        ]

    async def failed() -> bool:
        return FAILED in await taints()

    async def lost() -> bool:
        return {"key": "gpu.nvidia.com/gpu-lost", "effect": "NoSchedule"} in await taints()

    async def told() -> bool:
        return {**FAILED, "value": "13", "effect": "None"} in await taints()

    async def clean() -> bool:
        return not await taints()

    files.first_gpu(xids=(79,))
    await until(failed, "the error is published")
    whole = declared_inventory(MACHINE)
    files.declare(msgspec.structs.replace(whole, gpus=whole.gpus[1:]))
    await until(lost, "the loss is published")
    files.declare(whole)
    await until(clean, "nothing is left of it")
    files.first_gpu(xids=(13,))
    await until(told, "an error of a program is told without an effect")
