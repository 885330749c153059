"""The NIC plugin's calls to the API server besides claims and slices, with the rights of the manifests."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubectl import kubectl, tried
from tests.waiting import until

from rackloom.claim.kube.api import EventRecorder, KubeApi
from rackloom.claim.kube.client import connect
from rackloom.claim.node.nic.inventory import NodeNetwork
from rackloom.claim.node.nic.status import AttachmentReporter
from rackloom.claim.node.nri.client import PodSandbox
from rackloom.core.allocate.objects import Device
from rackloom.core.cluster.claims import ClaimRef
from rackloom.core.cluster.objects import ENDPOINT_SLICE, EVENT, NODE, POD, Object
from rackloom.core.nics.attachment import LinkIdentity, PreparedNic
from rackloom.errors import Refused

pytestmark = pytest.mark.anyio
RIGHTS = Path(__file__).parents[2] / "deploy/kubernetes/base/rbac-node.yaml"
ACCOUNT = "system:serviceaccount:rackloom-system:rackloom-node-nic"
REF = ClaimRef(namespace="default", name="c", uid="u")


@pytest.fixture
async def rights(cluster: ControlPlane, tmp_path: Path) -> AsyncIterator[None]:
    """The cluster-wide rights of the plugin's account."""
    documents = [
        document
        for document in yaml.safe_load_all(RIGHTS.read_text())
        if document["kind"].startswith("ClusterRole")
    ]
    file = tmp_path / "rights.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    await asyncio.to_thread(kubectl, cluster, "apply", "-f", str(file))
    asked = ("auth", "can-i", "create", "events", f"--as={ACCOUNT}")

    async def counts() -> bool:
        return (await asyncio.to_thread(tried, cluster, *asked)).returncode == 0

    await until(counts, "the rights count, which is a moment after they were written")
    yield
    await asyncio.to_thread(kubectl, cluster, "delete", "-f", str(file))


@pytest.mark.usefixtures("rights")
async def test_a_failed_attachment_is_an_event_on_the_pod(
    cluster: ControlPlane, api: KubeApi, namespace: str
) -> None:
    spec = {"containers": [{"name": "main", "image": "none"}]}
    pod = await api.create(POD, {"metadata": {"name": "worker", "namespace": namespace}, "spec": spec})
    sandbox = PodSandbox(
        id="s", pod=pod["metadata"]["uid"], namespace=namespace, name="worker", netns="/var/run/netns/x"
    )
    nic = PreparedNic(device="nic0", published=Device(name="nic0"), identity=LinkIdentity(name="eth1"))
    async with connect(cluster.kubeconfig(ACCOUNT)) as plugin:
        reporter = AttachmentReporter(lambda *_: None, EventRecorder(plugin, "dra.net", "n", time.time))
        reporter.report(
            REF, nic, sandbox, Refused("NIC nic0 was not attached", nearest_fix="choose another name")
        )
        event = await until(lambda: failure_of(api, namespace), "the event is there")
    assert event is not None
    assert event["involvedObject"]["uid"] == pod["metadata"]["uid"]
    assert event["message"] == "NIC nic0 was not attached; choose another name"
    shown = await asyncio.to_thread(kubectl, cluster, "-n", namespace, "describe", "pod", "worker")
    assert "NetworkDeviceAttachFailed" in shown


@pytest.mark.usefixtures("rights")
async def test_the_plugin_learns_what_the_nodes_network_is(cluster: ControlPlane, api: KubeApi) -> None:
    """An API server writes its own address, but not if it listens on loopback, as here."""
    name = "with-a-network"
    itself = {
        "metadata": {"name": "kubernetes", "namespace": "default"},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.3.0.10"]}],
    }
    await api.create(ENDPOINT_SLICE, itself)
    await api.create(NODE, {"metadata": {"name": name}, "spec": {"podCIDRs": ["10.244.1.0/24"]}})
    addresses = [{"type": "Hostname", "address": name}, {"type": "InternalIP", "address": "10.0.0.5"}]
    await api.patch(NODE, name, None, {"status": {"addresses": addresses}}, subresource="status")
    try:
        async with connect(cluster.kubeconfig(ACCOUNT)) as plugin:
            known = await NodeNetwork(plugin, name, time.monotonic)()
        slices = await asyncio.to_thread(kubectl, cluster, "get", "endpointslices")
    finally:
        await api.delete(NODE, name)
        await api.delete(ENDPOINT_SLICE, "kubernetes", "default")
    assert known.node_addresses == ("10.0.0.5",)
    assert known.pod_cidrs == ("10.244.1.0/24",)
    assert known.api_servers == ("10.3.0.10",)
    assert [line.split()[:4] for line in slices.splitlines()][1] == [
        "kubernetes",
        "IPv4",
        "<unset>",
        "10.3.0.10",
    ]


async def failure_of(api: KubeApi, namespace: str) -> Object | None:
    found = (await api.list(EVENT, namespace)).items
    return next((event for event in found if event["reason"] == "NetworkDeviceAttachFailed"), None)
