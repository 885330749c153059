"""`nvidia.com/gpu: N` without a device plugin: the class of `gpus-by-count`, the real scheduler, our plugin.

The scheduler makes the claim of a pod that counts GPUs. It names the claim in the pod's status, with the
request of each container. The kubelet prepares it like any other.
"""

import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import yaml
from tests.claim.node.plugin_manager import KubeletPluginManager, SocketDraManager
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.h100_nodes import MACHINE, Files, device_nodes, plug_gpus, plug_kubelet
from tests.cluster.installed import DEPLOY
from tests.cluster.kubectl import typed
from tests.documented import commands_of
from tests.waiting import until

from rackloom.app.snapshot.cache import ReadCache
from rackloom.app.snapshot.cluster import allocated_devices as allocated_in_snapshot
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.node.gpu.plugin import GPU_DRIVER
from rackloom.core.cluster.claims import allocated_devices
from rackloom.core.cluster.objects import (
    DEVICE_CLASS,
    NODE,
    POD,
    RESOURCE_CLAIM,
    Object,
    ResourceKind,
    pod_claim_names,
)

pytestmark = pytest.mark.anyio
COUNTED = "nvidia.com/gpu"
BUDGET = ResourceKind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets", namespaced=True)


@pytest.fixture
def devices(kubelets_of_plugins: dict[str, KubeletPluginManager]) -> SocketDraManager:
    return SocketDraManager(kubelets_of_plugins)


@pytest.fixture(scope="module")
def overlay() -> list[Object]:
    """The objects of the overlay."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("NO KUBECTL: the overlay cannot be built")
    done = subprocess.run([kubectl, "kustomize", DEPLOY / "gpus-by-count"], capture_output=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture
async def gpu_class(api: KubeApi, overlay: list[Object]) -> AsyncIterator[Object]:
    """The class gpu.nvidia.com as the overlay has it."""
    (klass,) = (obj for obj in overlay if obj["metadata"]["name"] == GPU_DRIVER)
    yield await api.create(DEVICE_CLASS, klass)
    await api.delete(DEVICE_CLASS, GPU_DRIVER)


@pytest.fixture
def counted() -> dict[str, str]:
    """The resources that a device plugin counts on the node. Empty, since there is no device plugin."""
    return {}


@pytest.fixture
async def host(
    api: KubeApi,
    add_nodes: AddNodes,
    kubelets_of_plugins: dict[str, KubeletPluginManager],
    gpu_class: Object,
    counted: dict[str, str],
) -> AsyncIterator[tuple[str, Files]]:
    """A node with eight GPUs that our plugin publishes."""
    (node,) = await add_nodes(1, capacity={"cpu": "96", "memory": "1000Gi", "pods": "110", **counted})
    async with AsyncExitStack() as stack:
        files = Files(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl"))))
        await plug_gpus(stack, api, node, files)
        kubelets_of_plugins[node] = await plug_kubelet(stack, api, node, files, (GPU_DRIVER,))
        yield node, files


def counting_pod(name: str, namespace: str, **gpus: int) -> Object:
    """A pod with a container for each count of GPUs."""
    containers = [
        {"name": container, "image": "none", "resources": {"limits": {COUNTED: str(count)}}}
        for container, count in gpus.items()
    ]
    return {"metadata": {"name": name, "namespace": namespace}, "spec": {"containers": containers}}


async def running(api: KubeApi, name: str, namespace: str) -> Object:
    async def runs() -> Object | None:
        pod = await api.get(POD, name, namespace)
        return pod if pod["status"].get("phase") == "Running" else None

    pod = await until(runs, f"the pod {name} runs")
    assert pod is not None
    return pod


def gpus_of(claim: Object) -> set[str]:
    """The device files of a claim's devices."""
    return {
        f"/dev/nvidia{result.device.removeprefix('gpu-')}"
        for result in allocated_devices(claim)
        if result.driver == GPU_DRIVER
    }


async def test_counted_gpus_are_claimed_and_prepared(
    api: KubeApi, host: tuple[str, Files], namespace: str
) -> None:
    node, files = host
    assert COUNTED not in (await api.get(NODE, node))["status"]["allocatable"]
    await api.create(POD, counting_pod("job", namespace, train=2))
    pod = await running(api, "job", namespace)
    assert pod["spec"]["nodeName"] == node
    (name,) = pod_claim_names(pod)
    claim = await api.get(RESOURCE_CLAIM, name, namespace)
    assert [user["uid"] for user in claim["status"]["reservedFor"]] == [pod["metadata"]["uid"]]
    (request,) = claim["spec"]["devices"]["requests"]
    assert request["exactly"]["deviceClassName"] == GPU_DRIVER
    gpus = gpus_of(claim)
    assert len(gpus) == 2
    every = {f"/dev/nvidia{gpu.index}" for gpu in MACHINE.gpus}
    assert device_nodes(files.specs()) & every == gpus
    uses = allocated_in_snapshot([claim], [pod], ReadCache())
    assert {f"/dev/nvidia{use.device.removeprefix('gpu-')}" for use in uses} == gpus
    assert {use.pods for use in uses} == {(f"{namespace}/job",)}
    await api.delete(POD, "job", namespace)

    async def given_back() -> bool:
        return not files.specs() and not (await api.list(RESOURCE_CLAIM, namespace)).items

    await until(given_back, "the GPUs are given back with the pod")


async def test_each_container_has_a_request_of_its_own(
    api: KubeApi, host: tuple[str, Files], namespace: str
) -> None:
    await api.create(POD, counting_pod("job", namespace, train=3, watch=1))
    pod = await running(api, "job", namespace)
    status = pod["status"]["extendedResourceClaimStatus"]
    claim = await api.get(RESOURCE_CLAIM, status["resourceClaimName"], namespace)
    requested = {entry["requestName"]: entry["containerName"] for entry in status["requestMappings"]}
    assert {entry["resourceName"] for entry in status["requestMappings"]} == {COUNTED}
    got = [requested[result.request] for result in allocated_devices(claim)]
    assert sorted(got) == ["train", "train", "train", "watch"]


async def test_a_pod_waits_while_too_few_gpus_are_free(
    api: KubeApi, host: tuple[str, Files], namespace: str
) -> None:
    await api.create(POD, counting_pod("first", namespace, train=5))
    await running(api, "first", namespace)
    await api.create(POD, counting_pod("second", namespace, train=4))

    async def waits() -> bool:
        conditions = (await api.get(POD, "second", namespace))["status"].get("conditions") or ()
        return any(condition.get("reason") == "Unschedulable" for condition in conditions)

    await until(waits, "the second is told that it fits nowhere")
    await api.delete(POD, "first", namespace)
    await running(api, "second", namespace)


async def test_a_pod_may_claim_other_devices_beside_what_it_counts(
    api: KubeApi, host: tuple[str, Files], namespace: str
) -> None:
    request = {"name": "gpu", "exactly": {"deviceClassName": GPU_DRIVER}}
    claim = {
        "metadata": {"name": "own", "namespace": namespace},
        "spec": {"devices": {"requests": [request]}},
    }
    await api.create(RESOURCE_CLAIM, claim)
    pod = counting_pod("job", namespace, train=2)
    pod["spec"]["resourceClaims"] = [{"name": "own", "resourceClaimName": "own"}]
    pod["spec"]["containers"][0]["resources"]["claims"] = [{"name": "own"}]
    await api.create(POD, pod)
    pod = await running(api, "job", namespace)
    got = [gpus_of(await api.get(RESOURCE_CLAIM, name, namespace)) for name in pod_claim_names(pod)]
    assert sorted(map(len, got)) == [1, 2]
    assert len(set.union(*got)) == 3


async def test_a_pod_that_counts_is_evicted_as_the_page_says(
    api: KubeApi, cluster: ControlPlane, host: tuple[str, Files], namespace: str
) -> None:
    """A NoExecute taint of a device does not evict it (kubernetes#141290), but the Eviction API does."""
    node, _ = host
    pod = counting_pod("job", namespace, train=2)
    pod["metadata"]["labels"] = {"app": "job"}
    await api.create(POD, pod)
    (claim,) = pod_claim_names(await running(api, "job", namespace))
    names = {"NODE": node, "NAMESPACE": namespace, "POD": "job", "CLAIM": claim}
    listed, devices, evict = commands_of("gpus.md", "### Pods on a tainted GPU", names)
    assert typed(cluster, listed).stdout == f"{namespace} job {claim}\n"
    assert len(typed(cluster, devices).stdout.split()) == 2
    budget = {
        "metadata": {"name": "job", "namespace": namespace},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "job"}}},
    }
    await api.create(BUDGET, budget)

    async def counted_by_its_budget() -> bool:
        status = (await api.get(BUDGET, "job", namespace)).get("status") or {}
        return bool(status.get("currentHealthy"))

    await until(counted_by_its_budget, "the budget counts the pod")
    refused = typed(cluster, evict)
    assert (refused.returncode, "TooManyRequests" in refused.stderr) == (1, True), refused.stderr
    await api.delete(BUDGET, "job", namespace)

    async def evicted() -> bool:
        # The API server learns of the budget's deletion a moment later.
        done = typed(cluster, evict)
        assert done.returncode == 0 or "TooManyRequests" in done.stderr, done.stderr
        return done.returncode == 0

    await until(evicted, "the pod is evicted")


@pytest.mark.parametrize("counted", [{COUNTED: "8"}])
async def test_what_a_device_plugin_counts_is_not_claimed(
    api: KubeApi, host: tuple[str, Files], namespace: str
) -> None:
    """Even if the node publishes GPUs: the device plugin and ours must not serve one node."""
    await api.create(POD, counting_pod("job", namespace, train=2))
    pod = await running(api, "job", namespace)
    assert not list(pod_claim_names(pod))
    assert not (await api.list(RESOURCE_CLAIM, namespace)).items
