"""A gang with claims for NICs, on a real control plane: kube-scheduler allocates the planned devices."""

from collections.abc import AsyncIterator

import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.gangs_at_work import PATIENCE, does_not_fit, gangs_at_work, two_racks
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.objects import (
    DEVICE_CLASS,
    JOB,
    POD,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    Object,
)
from rackloom.core.cluster.pods import SIZE_ANNOTATION

pytestmark = pytest.mark.anyio
NIC = "nic.test.example.com"


@pytest.fixture
async def driver(cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes) -> AsyncIterator[None]:
    """The objects of deploy/kubernetes, with the webhook and the controllers at work."""
    async with gangs_at_work(cluster, api, add_nodes):
        yield


@pytest.fixture
async def racks(api: KubeApi, add_nodes: AddNodes) -> AsyncIterator[dict[str, str]]:
    """Two racks of three trays, with two NICs each, but one tray of the first rack has none."""
    selector = {"cel": {"expression": f"device.driver == '{NIC}'"}}
    await api.create(DEVICE_CLASS, {"metadata": {"name": NIC}, "spec": {"selectors": [selector]}})
    found = await two_racks(add_nodes, 3)
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
        "annotations": {SIZE_ANNOTATION: str(pods)},
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
        found = {pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")}
        return found if len(found) == 3 else set()

    nodes = await until(bound, "the gang is bound", PATIENCE)
    assert {racks[node] for node in nodes} == {"2"}

    # The other rack has three empty trays, and NICs on two of them.
    await api.create(JOB, job(namespace, "second", 3))

    await until(lambda: does_not_fit(api, namespace, "second"), "the second gang is told", PATIENCE)
    pods = (await api.list(POD, namespace, labels="job=second")).items
    assert all(pod["spec"].get("schedulingGates") for pod in pods)
    for name in ("first", "second"):
        await api.delete(JOB, name, namespace)
