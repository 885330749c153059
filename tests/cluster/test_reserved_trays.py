"""The policy that keeps pods off reserved trays, on a real API server with its real authorizer."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.installed import installed
from tests.cluster.kubectl import kubectl
from tests.waiting import until

from rackloom.claim.cluster.admission.webhook import AdmissionSettings
from rackloom.claim.kube.api import KubeApi, KubeError, Rejected
from rackloom.claim.kube.client import connect
from rackloom.core.cluster.objects import DAEMON_SET, GANG_PLAN, NODE, POD, Object

pytestmark = pytest.mark.anyio
CONTAINERS = [{"name": "main", "image": "none"}]


@pytest.fixture
async def nodes(cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes) -> AsyncIterator[list[str]]:
    """Two nodes of a cluster with deploy/kubernetes installed."""
    found = await add_nodes(2)
    async with installed(cluster, api, AdmissionSettings(), GANG_PLAN):
        yield found


def pod(namespace: str, name: str, *, node: str | None = None, **annotations: str) -> Object:
    spec: Object = {"containers": CONTAINERS} | ({"nodeName": node} if node else {})
    return {"metadata": {"name": name, "namespace": namespace, "annotations": annotations}, "spec": spec}


async def test_a_namespace_admin_makes_no_pod_with_its_node_and_those_who_place_pods_do(
    cluster: ControlPlane, api: KubeApi, nodes: list[str], namespace: str
) -> None:
    rights = ("create", "rolebinding", "tenant", "--clusterrole=admin", "--user=alice", "-n", namespace)
    await asyncio.to_thread(kubectl, cluster, *rights)
    async with connect(cluster.kubeconfig("alice")) as alice:

        async def denied() -> str:
            """A policy takes effect only a moment after it was made."""
            try:
                await alice.create(POD, pod(namespace, "past", node=nodes[0]), dry_run=True)
            except Rejected as error:
                return error.message
            except KubeError:
                return ""
            return ""

        message = await until(denied, "the policy holds")
        assert "spec.nodeName passes by the scheduler" in message
        mirror = {"kubernetes.io/config.mirror": "hash"}
        with pytest.raises(Rejected, match=r"spec\.nodeName passes by"):
            await alice.create(POD, pod(namespace, "false", node=nodes[0], **mirror))
        await alice.create(POD, pod(namespace, "plain"))
    await until(lambda: has_node(api, namespace, "plain"), "the scheduler binds")

    # A user who may bind pods may also create a pod with a node.
    role = ("create", "role", "binder", "--verb=create", "--resource=pods/binding", "-n", namespace)
    given = ("create", "rolebinding", "binder", "--role=binder", "--user=alice", "-n", namespace)
    for words in (role, given):
        await asyncio.to_thread(kubectl, cluster, *words)
    async with connect(cluster.kubeconfig("alice")) as alice:

        async def made() -> bool:
            try:
                await alice.create(POD, pod(namespace, "placed", node=nodes[1]))
            except KubeError:
                return False
            return True

        await until(made, "a right that was just given counts")


async def test_kubelets_mirror_their_pods_and_daemon_sets_reach_every_node(
    cluster: ControlPlane, api: KubeApi, nodes: list[str], namespace: str
) -> None:
    node = nodes[0]
    owner = {"apiVersion": "v1", "kind": "Node", "name": node, "controller": True}
    uid = (await api.get(NODE, node))["metadata"]["uid"]
    mirror = pod(namespace, "static", node=node, **{"kubernetes.io/config.mirror": "hash"})
    mirror["metadata"]["ownerReferences"] = [owner | {"uid": uid}]
    async with connect(cluster.kubeconfig(f"system:node:{node}", "system:nodes")) as kubelet:
        await kubelet.create(POD, mirror)

    labels = {"app": "everywhere"}
    template = {"metadata": {"labels": labels}, "spec": {"containers": CONTAINERS}}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    await api.create(DAEMON_SET, {"metadata": {"name": "every", "namespace": namespace}, "spec": spec})

    async def everywhere() -> bool:
        pods = (await api.list(POD, namespace, labels="app=everywhere")).items
        return set(nodes) <= {pod["spec"].get("nodeName") for pod in pods}

    await until(everywhere, "each node has its pod")
    await api.delete(DAEMON_SET, "every", namespace)
    await api.delete(POD, "static", namespace, grace_seconds=0)


async def has_node(api: KubeApi, namespace: str, name: str) -> bool:
    return bool((await api.get(POD, name, namespace))["spec"].get("nodeName"))
