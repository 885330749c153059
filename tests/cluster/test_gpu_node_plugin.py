"""`rackloom node gpu` on a real API server: published, allocated by its scheduler, prepared, given back."""

import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.claim.node.plugin_manager import KubeletPluginManager, SocketDraManager
from tests.cluster.conftest import AddNodes
from tests.cluster.h100_nodes import ALONE, MACHINE, Files, plug_gpus, plug_kubelet
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.claim.node.gpu.inventory import ShareSettings, parse_shares
from rackloom.claim.node.gpu.plugin import GPU_DRIVER
from rackloom.core.allocate.driver_slices import device_classes
from rackloom.core.cluster.objects import (
    DEVICE_CLASS,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    Object,
)
from rackloom.lab.nodes.host_files import declared_inventory

pytestmark = pytest.mark.anyio
FAILED = {"key": "gpu.nvidia.com/xid", "value": "79", "effect": "NoSchedule"}
WANTED = "mlx5_3"
"""The NIC next to the requested GPU. Only one GPU is next to it."""
MADE = {"resourceClaimTemplateName": "gpu"}
MANY = parse_shares("1000")
"""The API server writes it in another way: 1k."""


@pytest.fixture
def devices(kubelets_of_plugins: dict[str, KubeletPluginManager]) -> SocketDraManager:
    return SocketDraManager(kubelets_of_plugins)


@pytest.fixture
def shares() -> ShareSettings:
    """The number of claims that may share one GPU."""
    return ALONE


@pytest.fixture
async def host(
    api: KubeApi,
    add_nodes: AddNodes,
    kubelets_of_plugins: dict[str, KubeletPluginManager],
    shares: ShareSettings,
) -> AsyncIterator[tuple[str, Files]]:
    """A node with the plugin, its files, and the driver's class."""
    (node,) = await add_nodes(1)
    (gpu_class,) = (klass for klass in device_classes() if klass.metadata.name == GPU_DRIVER)
    await api.create(DEVICE_CLASS, msgspec.to_builtins(gpu_class))
    async with AsyncExitStack() as stack:
        files = Files(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl"))))
        await plug_gpus(stack, api, node, files, shares)
        kubelets_of_plugins[node] = await plug_kubelet(stack, api, node, files, (GPU_DRIVER,))
        yield node, files
    await api.delete(DEVICE_CLASS, GPU_DRIVER)


async def published(api: KubeApi, node: str) -> dict[str, Any]:
    """Devices by name."""
    found = (await api.list(RESOURCE_SLICE, fields=f"spec.nodeName={node}")).items
    return {device["name"]: device for slice_ in found for device in slice_["spec"]["devices"]}


def claim_spec() -> Object:
    """For the GPU next to the NIC."""
    selector = {"cel": {"expression": f"device.attributes['{GPU_DRIVER}'].nicPartner == '{WANTED}'"}}
    exactly = {"deviceClassName": GPU_DRIVER, "selectors": [selector]}
    return {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}


async def make_template(api: KubeApi, namespace: str) -> None:
    meta = {"name": "gpu", "namespace": namespace}
    await api.create(RESOURCE_CLAIM_TEMPLATE, {"metadata": meta, "spec": {"spec": claim_spec()}})


async def run_pods(api: KubeApi, namespace: str, *names: str, claim: Object) -> None:
    """Make pods of these names with a claim each, or with one together, and wait until they run."""
    container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "gpu"}]}}
    spec = {"containers": [container], "resourceClaims": [{"name": "gpu"} | claim]}
    for name in names:
        await api.create(POD, {"metadata": {"name": name, "namespace": namespace}, "spec": spec})

    async def all_run() -> bool:
        found = (await api.list(POD, namespace)).items
        return [pod.get("status", {}).get("phase") for pod in found] == ["Running"] * len(names)

    await until(all_run, f"{names} run")


async def results(api: KubeApi, namespace: str) -> list[Object]:
    """The allocation results of the claims of the namespace."""
    claims = (await api.list(RESOURCE_CLAIM, namespace)).items
    return [claim["status"]["allocation"]["devices"]["results"][0] for claim in claims]


def paths(files: Files) -> list[str]:
    """The device files that the claims of the node give to containers."""
    edits = [spec["devices"][0]["containerEdits"] for spec in files.specs().values()]
    return [node["path"] for edit in edits for node in edit["deviceNodes"]]


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
    await make_template(api, namespace)
    await run_pods(api, namespace, "worker", claim=MADE)
    (result,) = await results(api, namespace)
    assert gpus[result["device"]]["attributes"]["nicPartner"] == {"string": WANTED}
    (claim,) = (await api.list(RESOURCE_CLAIM, namespace)).items
    assert list(files.specs()) == [f"k8s.{GPU_DRIVER}-claim_{claim['metadata']['uid']}.yaml"]
    assert f"/dev/nvidia{result['device'].removeprefix('gpu-')}" in paths(files)
    await api.delete(POD, "worker", namespace)

    async def is_left() -> bool:
        return not files.specs()

    await until(is_left, "the GPU is given back")


OWN = f"device.attributes['{GPU_DRIVER}']"
MET = {
    "product": f"{OWN}.productName.lowerAscii().matches('^.*h100.*$')",
    "version": f"{OWN}.driverVersion.isGreaterThan(semver('500.0.0'))",
    "memory": f"device.capacity['{GPU_DRIVER}'].memory.compareTo(quantity('40Gi')) >= 0",
    "architecture": f"{OWN}.architecture == 'Hopper'",
}
"""Selectors as NVIDIA's own tests have them: a pattern, a version, an amount, a text."""


async def test_selectors_on_patterns_versions_and_amounts_are_met(
    api: KubeApi, host: tuple[str, Files], namespace: str
) -> None:
    """One pod has a claim for each selector and gets a GPU for each. A pod that no GPU meets waits."""
    expressions = {**MET, "none": f"{OWN}.productName == 'NVIDIA H300'"}
    for name, expression in expressions.items():
        exactly = {"deviceClassName": GPU_DRIVER, "selectors": [{"cel": {"expression": expression}}]}
        spec = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
        meta = {"name": name, "namespace": namespace}
        await api.create(RESOURCE_CLAIM_TEMPLATE, {"metadata": meta, "spec": {"spec": spec}})
    await make_pod(api, namespace, "met", [*MET])
    await make_pod(api, namespace, "waits", ["none"])

    async def met_runs() -> bool:
        return (await api.get(POD, "met", namespace)).get("status", {}).get("phase") == "Running"

    async def unschedulable() -> Object | None:
        conditions = (await api.get(POD, "waits", namespace)).get("status", {}).get("conditions", ())
        return next((found for found in conditions if found.get("reason") == "Unschedulable"), None)

    await until(met_runs, "each selector is met")
    unmet = await until(unschedulable, "no GPU meets it")
    assert "cannot allocate all claims" in unmet["message"]
    allocated = [
        claim["status"]["allocation"]["devices"]["results"][0]["device"]
        for claim in (await api.list(RESOURCE_CLAIM, namespace)).items
        if "allocation" in claim.get("status", {})
    ]
    assert len(set(allocated)) == len(allocated) == len(MET)


async def make_pod(api: KubeApi, namespace: str, name: str, templates: list[str]) -> None:
    """A pod with one container that has a claim of each template."""
    container = {
        "name": "main",
        "image": "none",
        "resources": {"claims": [{"name": own} for own in templates]},
    }
    claims = [{"name": own, "resourceClaimTemplateName": own} for own in templates]
    spec = {"containers": [container], "resourceClaims": claims}
    await api.create(POD, {"metadata": {"name": name, "namespace": namespace}, "spec": spec})


@pytest.mark.parametrize("shares", [MANY])
async def test_two_claims_have_a_share_of_one_gpu(
    api: KubeApi, host: tuple[str, Files], namespace: str
) -> None:
    node, files = host
    gpus = await published(api, node)
    assert gpus["gpu-0"]["allowMultipleAllocations"]
    assert gpus["gpu-0"]["capacity"]["shares"]["value"] == "1k"
    await make_template(api, namespace)
    await run_pods(api, namespace, "one", "two", claim=MADE)
    found = await results(api, namespace)
    assert {result["device"] for result in found} == {"gpu-3"}
    assert len({result["shareID"] for result in found}) == 2
    assert [result["consumedCapacity"]["shares"] for result in found] == ["1", "1"]
    assert paths(files).count("/dev/nvidia3") == 2


async def test_a_claim_that_two_pods_share_is_given_back_with_the_last_of_them(
    api: KubeApi, host: tuple[str, Files], namespace: str
) -> None:
    _, files = host
    await api.create(
        RESOURCE_CLAIM, {"metadata": {"name": "shared", "namespace": namespace}, "spec": claim_spec()}
    )
    await run_pods(api, namespace, "one", "two", claim={"resourceClaimName": "shared"})
    assert paths(files).count("/dev/nvidia3") == 1

    async def is_alone() -> bool:
        left = (await api.get(RESOURCE_CLAIM, "shared", namespace))["status"]["reservedFor"]
        return [device["name"] for device in left] == ["two"]

    async def is_left() -> bool:
        return not files.specs()

    await api.delete(POD, "one", namespace)
    await until(is_alone, "one has its end")
    assert paths(files).count("/dev/nvidia3") == 1, "the other still uses it"
    await api.delete(POD, "two", namespace)
    await until(is_left, "the GPU is given back")


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

    async def has_weak_taint() -> bool:
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
    await until(has_weak_taint, "an error of a program is told without an effect")
