"""The real scheduler allocates what `rackloom claim allocate` predicts."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import pytest
import yaml
from tests.cluster.conftest import AddNodes
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.cli import claim_plan
from rackloom.cli.hardware import machine_of
from rackloom.core.allocate.driver_slices import device_classes, slices_of
from rackloom.core.allocate.objects import AllocationResult
from rackloom.core.allocate.planning import PlacedClaim
from rackloom.core.kubernetes.objects import (
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
    answers = claim_plan.allocate_all(claim_plan.read_inputs([*TEMPLATES.values()], PROFILE, 2), "exact")
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
