"""The real scheduler allocates as `rackloom claim allocate` predicts."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import pytest
import yaml
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.cli import claim_plan
from rackloom.cli.claim_options import HardwareParameters
from rackloom.cli.hardware import machine_of
from rackloom.core.allocate.driver_slices import device_classes, slices_of
from rackloom.core.allocate.objects import AllocationResult
from rackloom.core.allocate.planning import PlacedClaim
from rackloom.core.cluster.objects import (
    DEVICE_CLASS,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    Object,
)

pytestmark = pytest.mark.anyio
EXAMPLE = Path(__file__).parents[2] / "examples" / "nixl-kv-transfer"
TEMPLATES = {
    name: EXAMPLE / f"resource-claim-template-{name.rpartition('-')[2]}.yaml"
    for name in ("h100-4gpu-4nic-numa-aligned", "h100-4gpu-4nic-numa-unaligned")
}
PROFILE = "azure-nd96isr-h100-v5"
Devices = list[tuple[str, str, str]]


def predicted() -> Mapping[str, Devices]:
    """By template: request, driver and device of each result, in order."""
    hardware = HardwareParameters(profile=PROFILE)
    answers = claim_plan.allocate_all(claim_plan.read_inputs([*TEMPLATES.values()], hardware, 2), "exact")
    return {
        answer.claim: devices_of(answer.allocation) for answer in answers if isinstance(answer, PlacedClaim)
    }


def devices_of(allocation: AllocationResult) -> Devices:
    return [(result.request, result.driver, result.device) for result in allocation.devices.results]


@pytest.fixture
async def azure_nodes(api: KubeApi, add_nodes: AddNodes) -> AsyncIterator[list[str]]:
    """Two nodes with the slices that their GPU and NIC drivers would publish, and the drivers' classes."""
    nodes = await add_nodes(2)
    classes = [(DEVICE_CLASS, klass) for klass in device_classes()]
    slices = [(RESOURCE_SLICE, slice_) for node in nodes for slice_ in slices_of(machine_of(PROFILE), node)]
    for kind, obj in (*classes, *slices):
        await api.create(kind, msgspec.to_builtins(obj))
    yield nodes
    for kind, obj in (*classes, *slices):
        await api.delete(kind, obj.metadata.name)


def pod_of(template: str, namespace: str) -> Object:
    container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "devices"}]}}
    return {
        "metadata": {"name": template, "namespace": namespace},
        "spec": {
            "containers": [container],
            "resourceClaims": [{"name": "devices", "resourceClaimTemplateName": template}],
        },
    }


async def run_pod(api: KubeApi, template: str, namespace: str) -> tuple[Object, Object]:
    """The running pod of a template, and its claim."""
    await api.create(
        RESOURCE_CLAIM_TEMPLATE,
        {
            **yaml.safe_load(TEMPLATES[template].read_text()),
            "metadata": {"name": template, "namespace": namespace},
        },
    )
    await api.create(POD, pod_of(template, namespace))

    async def running() -> Object | None:
        pod = await api.get(POD, template, namespace)
        return pod if pod["status"]["phase"] == "Running" else None

    pod = await until(running, f"the pod {template} runs")
    assert pod is not None
    (made,) = pod["status"]["resourceClaimStatuses"]
    return pod, await api.get(RESOURCE_CLAIM, made["resourceClaimName"], namespace)


async def test_both_example_templates_get_the_predicted_devices(
    api: KubeApi, azure_nodes: list[str], namespace: str
) -> None:
    expected, used = predicted(), []
    assert expected.keys() == TEMPLATES.keys()
    for template, devices in expected.items():
        pod, claim = await run_pod(api, template, namespace)
        used.append(pod["spec"]["nodeName"])
        results = claim["status"]["allocation"]["devices"]["results"]
        assert devices_of(msgspec.convert(claim["status"]["allocation"], AllocationResult)) == devices
        assert {result["pool"] for result in results} == {used[-1]}
        assert [user["uid"] for user in claim["status"]["reservedFor"]] == [pod["metadata"]["uid"]]
    assert set(used) == set(azure_nodes)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl on the PATH")
async def test_the_plugin_of_kubectl_sees_what_is_left(
    api: KubeApi,
    azure_nodes: list[str],
    namespace: str,
    cluster: ControlPlane,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After the first pod has its devices, `kubectl rackloom` plans the same claim for the other node."""
    template = "h100-4gpu-4nic-numa-aligned"
    pod, _ = await run_pod(api, template, namespace)
    program = tmp_path / "kubectl-rackloom"
    program.write_text(f"#!{sys.executable}\nfrom rackloom.cli.program import main\nmain()\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", str(cluster.admin))
    command = ("kubectl", "rackloom", "claim", "allocate", str(TEMPLATES[template]), "-o", "json")
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (answer,) = json.loads(done.stdout)
    assert {pod["spec"]["nodeName"], answer["node"]} == set(azure_nodes)
