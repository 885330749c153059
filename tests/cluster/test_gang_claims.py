"""A gang whose members claim NICs, on a real control plane: kube-scheduler allocates what was counted on."""

from collections.abc import AsyncIterator

import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.installed import installed, led
from tests.cluster.waiting import until

from rackloom.claim.cluster.admission.desk import AdmissionSettings
from rackloom.claim.cluster.gang import marks
from rackloom.claim.cluster.gang.record import record_of
from rackloom.claim.domain import names
from rackloom.claim.kube.api import KubeApi, NotFound, Object
from rackloom.claim.kube.kinds import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    DEVICE_CLASS,
    GANG_PLAN,
    JOB,
    POD,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
)

pytestmark = pytest.mark.anyio
NIC = "nic.test.example.com"
CLUSTER_UUID = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31"
CAPACITY = {"cpu": "96", "memory": "1000Gi", "pods": "110", "nvidia.com/gpu": "4"}
PATIENCE = 300.0
"""Seconds: a busy machine."""


@pytest.fixture
async def driver(cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes) -> AsyncIterator[None]:
    """What deploy/kubernetes installs, with the webhook asked and the controllers at work."""
    await add_nodes(1)
    kinds = (COMPUTE_DOMAIN, COMPUTE_DOMAIN_CLIQUE, GANG_PLAN)
    async with installed(cluster, api, AdmissionSettings(), *kinds), led(api, cluster):
        yield
        await until(lambda: has_no_plans(api), "the gang controller has ended all gangs", PATIENCE)


async def has_no_plans(api: KubeApi) -> bool:
    return not (await api.list(GANG_PLAN)).items


@pytest.fixture
async def racks(api: KubeApi, add_nodes: AddNodes) -> AsyncIterator[dict[str, str]]:
    """Two racks of three trays, with two NICs each; one tray of the first rack has none."""
    selector = {"cel": {"expression": f"device.driver == '{NIC}'"}}
    await api.create(DEVICE_CLASS, {"metadata": {"name": NIC}, "spec": {"selectors": [selector]}})
    found = {}
    for rack in ("1", "2"):
        labels = {names.GPU_CLIQUE_LABEL: f"{CLUSTER_UUID}.{rack}"}
        found |= dict.fromkeys(await add_nodes(3, labels=labels, capacity=CAPACITY), rack)
    publishing = list(found)[1:]
    for node in publishing:
        spec = {
            "driver": NIC,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "nic-0"}, {"name": "nic-1"}],
        }
        await api.create(RESOURCE_SLICE, {"metadata": {"name": f"{node}-nics"}, "spec": spec})
    yield found
    for node in publishing:
        await api.delete(RESOURCE_SLICE, f"{node}-nics")
    await api.delete(DEVICE_CLASS, NIC)


def job(namespace: str, name: str, pods: int) -> Object:
    """A gang of which each member takes a tray's GPUs and both of its NICs."""
    claims = [{"name": "nics"}]
    resources = {"limits": {"nvidia.com/gpu": "4"}, "claims": claims}
    spec = {
        "restartPolicy": "Never",
        "containers": [{"name": "main", "image": "none", "resources": resources}],
        "resourceClaims": [{"name": "nics", "resourceClaimTemplateName": "nics"}],
    }
    meta = {
        "labels": {"job": name, "rackloom.dev/gang": name},
        "annotations": {marks.SIZE_ANNOTATION: str(pods)},
    }
    template = {"metadata": meta, "spec": spec}
    return {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"parallelism": pods, "completions": pods, "template": template},
    }


async def test_a_gang_comes_to_the_rack_whose_trays_have_what_its_members_claim(
    driver: None, racks: dict[str, str], api: KubeApi, namespace: str
) -> None:
    request = {"name": "nics", "exactly": {"deviceClassName": NIC, "count": 2}}
    await api.create(
        RESOURCE_CLAIM_TEMPLATE,
        {
            "metadata": {"name": "nics", "namespace": namespace},
            "spec": {"spec": {"devices": {"requests": [request]}}},
        },
    )
    await api.create(JOB, job(namespace, "first", 3))

    async def bound() -> set[str]:
        pods = (await api.list(POD, namespace, labels="job=first")).items
        found = {one["spec"]["nodeName"] for one in pods if one["spec"].get("nodeName")}
        return found if len(found) == 3 else set()

    nodes = await until(bound, "the gang is bound", PATIENCE)
    assert {racks[node] for node in nodes} == {"2"}

    # The other rack has three empty trays, and NICs on two of them.
    await api.create(JOB, job(namespace, "second", 3))

    async def refused() -> str:
        try:
            placed = record_of(await api.get(GANG_PLAN, "second", namespace)).condition("Placed")
        except NotFound:
            return ""
        return placed.message if placed is not None and placed.reason == "DoesNotFit" else ""

    await until(refused, "the second gang is told", PATIENCE)
    pods = (await api.list(POD, namespace, labels="job=second")).items
    assert all(one["spec"].get("schedulingGates") for one in pods)
    for name in ("first", "second"):
        await api.delete(JOB, name, namespace)
