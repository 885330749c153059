"""The claims of nixl-kv-transfer on two H100 nodes with our own plugins: predicted, allocated, prepared.

Only the device classes are written by hand. The GPU and the NIC plugin publish the devices in the files of
the H100 machine, the real scheduler allocates, and the plugins prepare over their sockets.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from tests.claim.node.plugin_manager import KubeletPluginManager, SocketDraManager
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.h100_nodes import MACHINE, Files, device_nodes, plug
from tests.cluster.kubectl import kubectl
from tests.cluster.test_nixl_example import EXAMPLES
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.core.allocate.driver_slices import device_classes
from rackloom.core.cluster.objects import (
    DEVICE_CLASS,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    Object,
)

pytestmark = pytest.mark.anyio
RACKLOOM = Path(sys.executable).with_name("rackloom")
EXAMPLE = EXAMPLES / "nixl-kv-transfer"
NIC_NUMA = {"aligned": 0, "unaligned": 1}
FOUR = ("--gpus", "4", "--nics", "4", "--align", "numa")
Devices = list[tuple[str, str, str]]
"""Request, driver and device of each result, in order."""


@pytest.fixture
def devices(kubelets_of_plugins: dict[str, KubeletPluginManager]) -> SocketDraManager:
    return SocketDraManager(kubelets_of_plugins)


@pytest.fixture
async def h100_nodes(
    api: KubeApi, add_nodes: AddNodes, kubelets_of_plugins: dict[str, KubeletPluginManager]
) -> AsyncIterator[dict[str, Files]]:
    """Two nodes with both plugins, and the classes that the example's templates name."""
    nodes = await add_nodes(2)
    classes = device_classes()
    for klass in classes:
        await api.create(DEVICE_CLASS, msgspec.to_builtins(klass))
    async with AsyncExitStack() as stack:
        # Paths of unix sockets must be short.
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rl")))
        found = {node: Files(root / str(number)) for number, node in enumerate(nodes)}
        for node, files in found.items():
            kubelets_of_plugins[node] = await plug(stack, api, node, files)
        yield found
    for klass in classes:
        await api.delete(DEVICE_CLASS, klass.metadata.name)


async def rackloom(*words: str | Path) -> str:
    """The command's output, as a person would run it."""
    program = await asyncio.create_subprocess_exec(
        RACKLOOM, *map(str, words), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    printed, complaint = await program.communicate()
    assert program.returncode == 0, complaint.decode()
    return printed.decode()


async def dumped(api: KubeApi, nodes: Sequence[str]) -> str:
    """The cluster's own slices and classes, as `kubectl get -o json` has them."""
    slices = [item for item in (await api.list(RESOURCE_SLICE)).items if item["spec"]["nodeName"] in nodes]
    classes = (await api.list(DEVICE_CLASS)).items
    kinds = [
        {"apiVersion": kind.api_version, "kind": kind.kind} | item
        for kind, items in ((RESOURCE_SLICE, slices), (DEVICE_CLASS, classes))
        for item in items
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": kinds})


def written(text: str, at: Path) -> Path:
    at.write_text(text)
    return at


def renamed(template: Path, name: str, namespace: str) -> Object:
    return {**yaml.safe_load(template.read_text()), "metadata": {"name": name, "namespace": namespace}}


def devices_of(allocation: Any) -> Devices:
    return [
        (result["request"], result["driver"], result["device"]) for result in allocation["devices"]["results"]
    ]


async def predicted(template: Path, slices: Path) -> Devices:
    """By `rackloom claim allocate`, from the same slices."""
    (answer,) = json.loads(
        await rackloom("claim", "allocate", "-f", template, "--slices", slices, "-o", "json")
    )
    assert answer["outcome"] == "placed"
    return devices_of(answer["allocation"])


async def templates(folder: Path, slices: Path) -> dict[str, tuple[str, Path]]:
    """The example's two templates and those the command writes for the same slices, with their arms."""
    found = {f"example-{arm}": (arm, EXAMPLE / f"resource-claim-template-{arm}.yaml") for arm in NIC_NUMA}
    for arm, more in (("aligned", ()), ("unaligned", ("--unaligned",))):
        made = await rackloom("claim", "template", *FOUR, *more, "--slices", slices)
        found[f"ours-{arm}"] = (arm, written(made, folder / f"{arm}.yaml"))
    return found


async def ran(api: KubeApi, namespace: str, name: str, template: Path) -> tuple[Object, Object]:
    """The running pod of a template, and its claim."""
    await api.create(RESOURCE_CLAIM_TEMPLATE, renamed(template, name, namespace))
    container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "devices"}]}}
    claims = [{"name": "devices", "resourceClaimTemplateName": name}]
    pod: Object = {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"containers": [container], "resourceClaims": claims},
    }
    await api.create(POD, pod)
    return await running(api, namespace, name)


async def running(api: KubeApi, namespace: str, name: str) -> tuple[Object, Object]:
    async def runs() -> Object | None:
        pod = await api.get(POD, name, namespace)
        return pod if pod["status"]["phase"] == "Running" else None

    pod = await until(runs, f"the pod {name} runs")
    assert pod is not None
    (made,) = pod["status"]["resourceClaimStatuses"]
    return pod, await api.get(RESOURCE_CLAIM, made["resourceClaimName"], namespace)


def expected(numa: int) -> set[str]:
    """RDMA devices of one NUMA node, by the machine's profile."""
    return {
        str(nic.rdma_device)
        for nic in MACHINE.nics
        if nic.numa_node is not None and nic.numa_node.value == numa and nic.rdma_device
    }


def check_prepared(claim: Object, files: Files, arm: str) -> None:
    """The containers get the files of the four GPUs and of the four NICs of the arm, and no others."""
    uid = claim["metadata"]["uid"]
    paths = device_nodes({name: spec for name, spec in files.specs().items() if uid in name})
    gpus = {
        f"/dev/nvidia{device.removeprefix('gpu-')}"
        for _, driver, device in devices_of(claim["status"]["allocation"])
        if driver == "gpu.nvidia.com"
    }
    every_gpu = {f"/dev/nvidia{gpu.index}" for gpu in MACHINE.gpus}
    assert paths & every_gpu == gpus
    assert len(gpus) == 4
    known = [nic.rdma_device for nic in MACHINE.nics if nic.rdma_device is not None]
    wanted = {f"/dev/infiniband/uverbs{known.index(name)}" for name in expected(NIC_NUMA[arm])}
    assert {path for path in paths if "uverbs" in path} == wanted
    assert len(wanted) == 4


async def test_all_four_templates_get_what_is_predicted(
    api: KubeApi, h100_nodes: dict[str, Files], namespace: str, tmp_path: Path
) -> None:
    slices = written(await dumped(api, list(h100_nodes)), tmp_path / "slices.json")
    for name, (arm, template) in (await templates(tmp_path, slices)).items():
        awaited = await predicted(template, slices)
        assert len(awaited) == 8
        pod, claim = await ran(api, namespace, name, template)
        assert devices_of(claim["status"]["allocation"]) == awaited, name
        check_prepared(claim, h100_nodes[pod["spec"]["nodeName"]], arm)
        await api.delete(POD, name, namespace)

        async def given_back() -> bool:
            claims = (await api.list(RESOURCE_CLAIM, namespace)).items
            return not claims and not any(files.specs() for files in h100_nodes.values())

        await until(given_back, f"the devices of {name} are given back, so that the next finds all of them")


async def test_the_example_runs_on_both_nodes(
    cluster: ControlPlane, api: KubeApi, h100_nodes: dict[str, Files], namespace: str, tmp_path: Path
) -> None:
    slices = written(await dumped(api, list(h100_nodes)), tmp_path / "slices.json")
    awaited = await predicted(EXAMPLE / "resource-claim-template-aligned.yaml", slices)
    await asyncio.to_thread(kubectl, cluster, "-n", namespace, "apply", "-k", str(EXAMPLE))
    on = set()
    for name in ("nixl-kv-target", "nixl-kv-initiator"):
        pod, claim = await running(api, namespace, name)
        assert devices_of(claim["status"]["allocation"]) == awaited
        check_prepared(claim, h100_nodes[pod["spec"]["nodeName"]], "aligned")
        on.add(pod["spec"]["nodeName"])
    assert on == set(h100_nodes)
    shown = await asyncio.to_thread(kubectl, cluster, "-n", namespace, "get", "resourceclaims", "-o", "yaml")
    assert all(device in shown for _, _, device in awaited)
    await asyncio.to_thread(kubectl, cluster, "-n", namespace, "delete", "--wait=false", "-k", str(EXAMPLE))
