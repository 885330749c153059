"""The policies of deploy/kubernetes on a real control plane: each writes of its own node only."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.installed import as_account, pod_of
from tests.cluster.policies import CLIQUE, DAEMON_ACCOUNT, DRIVER, slice_of
from tests.waiting import until

from rackloom.claim.cluster.gang import marks
from rackloom.claim.domain import names
from rackloom.claim.domain.membership import join, leave
from rackloom.claim.domain.objects import Clique, Ref, clique, clique_json
from rackloom.claim.kube.api import Kind, KubeApi, Object, Rejected
from rackloom.claim.kube.kinds import (
    COMPUTE_DOMAIN_CLIQUE,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_SLICE,
    SECRET,
)

pytestmark = pytest.mark.anyio
CLUSTER_ROLE = Kind("rbac.authorization.k8s.io", "v1", "ClusterRole", "clusterroles", namespaced=False)
CLUSTER_ROLE_BINDING = Kind(
    "rbac.authorization.k8s.io", "v1", "ClusterRoleBinding", "clusterrolebindings", namespaced=False
)
ACCESS = Kind(
    "authorization.k8s.io", "v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", namespaced=False
)


async def plain_pod(api: KubeApi, name: str, service_account: str) -> Object:
    spec = {"serviceAccountName": service_account, "containers": [{"name": "main", "image": "none"}]}
    await api.create(POD, {"metadata": {"name": name, "namespace": DRIVER}, "spec": spec})
    return await pod_of(api, name)


async def test_a_daemon_writes_its_own_entry_only(
    cluster: ControlPlane, api: KubeApi, namespace: str, base_applied: None
) -> None:
    one, two = [await plain_pod(api, f"daemon-{number}", DAEMON_ACCOUNT) for number in (1, 2)]
    here, there = Ref(one["metadata"]["name"], one["metadata"]["uid"]), Ref("daemon-x", "uid-x")
    node = one["spec"]["nodeName"]
    value = Clique(compute_domain="cd", clique_id=CLIQUE)
    by_admin = join(value, node="other", ip_address="10.0.0.9", pod=there, max_nodes=18)
    read = await api.create(COMPUTE_DOMAIN_CLIQUE, clique_json(by_admin, DRIVER))
    async with as_account(api, cluster, DAEMON_ACCOUNT, "daemon-1") as daemon:
        forged = join(clique(read), node="elsewhere", ip_address="10.0.0.1", pod=here, max_nodes=18)
        with pytest.raises(Rejected, match="own node only"):
            await daemon.replace(COMPUTE_DOMAIN_CLIQUE, clique_json(forged, DRIVER, read))

        own = join(clique(read), node=node, ip_address="10.0.0.1", pod=here, max_nodes=18)
        written = await daemon.replace(COMPUTE_DOMAIN_CLIQUE, clique_json(own, DRIVER, read))
        assert [one.node_name for one in clique(written).daemons] == ["other", node]
        thrown_out = leave(clique(written), node="other", pod=there)
        with pytest.raises(Rejected, match="own node only"):
            await daemon.replace(COMPUTE_DOMAIN_CLIQUE, clique_json(thrown_out, DRIVER, written))
        left = leave(clique(written), node=node, pod=here)
        await daemon.replace(COMPUTE_DOMAIN_CLIQUE, clique_json(left, DRIVER, written))

        said = {"metadata": {"labels": {names.CLIQUE_ID_LABEL: CLIQUE}}}
        await daemon.patch(POD, "daemon-1", DRIVER, said)
        with pytest.raises(Rejected, match="own pod only"):
            await daemon.patch(POD, two["metadata"]["name"], DRIVER, said)
        with pytest.raises(Rejected, match="forbidden"):
            await daemon.list(NODE)
        with pytest.raises(Rejected, match="forbidden"):
            await daemon.list(SECRET, DRIVER)


async def test_a_plugin_writes_its_own_node_only(
    cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes, base_applied: None
) -> None:
    (other,) = await add_nodes(1)
    pod = await plain_pod(api, "plugin", "rackloom-node-imex")
    node = pod["spec"]["nodeName"]
    other = other if other != node else (await add_nodes(1))[0]
    label = {"metadata": {"labels": {names.COMPUTE_DOMAIN_LABEL: "cd"}}}
    async with as_account(api, cluster, "rackloom-node-imex", "plugin") as plugin:
        await plugin.patch(NODE, node, None, label)
        with pytest.raises(Rejected, match="own node only"):
            await plugin.patch(NODE, other, None, label)
        with pytest.raises(Rejected, match="no labels but"):
            await plugin.patch(NODE, node, None, {"metadata": {"labels": {"tier": "gold"}}})
        with pytest.raises(Rejected, match="nothing else"):
            await plugin.patch(NODE, node, None, {"spec": {"unschedulable": True}})
        with pytest.raises(Rejected, match="nothing else"):
            await plugin.patch(NODE, node, None, {"metadata": {"annotations": {"a": "b"}}})
        await plugin.patch(NODE, node, None, {"metadata": {"labels": {names.COMPUTE_DOMAIN_LABEL: None}}})

        await plugin.create(RESOURCE_SLICE, slice_of(node, "own"))
        with pytest.raises(Rejected, match="own node only"):
            await plugin.create(RESOURCE_SLICE, slice_of(other, "foreign"))
        await api.create(RESOURCE_SLICE, slice_of(other, "foreign"))
        with pytest.raises(Rejected, match="own node only"):
            await plugin.delete(RESOURCE_SLICE, "foreign")
        await plugin.delete(RESOURCE_SLICE, "own")
        await api.delete(RESOURCE_SLICE, "foreign")
        of_another_driver = slice_of(node, "disks")
        of_another_driver["spec"]["driver"] = "disks.example.com"
        with pytest.raises(Rejected, match="own driver only: compute-domain"):
            await plugin.create(RESOURCE_SLICE, of_another_driver)
        of_another_pool = slice_of(node, "borrowed")
        of_another_pool["spec"]["pool"]["name"] = other
        with pytest.raises(Rejected, match="pool of its own node only"):
            await plugin.create(RESOURCE_SLICE, of_another_pool)


async def test_the_controller_changes_its_own_taint_and_labels_of_nodes_only(
    cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes, base_applied: None
) -> None:
    theirs, ours = {"key": "team", "value": "a", "effect": "NoSchedule"}, {"key": marks.TAINT, "value": "uid"}
    (node,) = await add_nodes(1, labels={names.GPU_CLIQUE_LABEL: CLIQUE})
    await api.patch(NODE, node, None, {"spec": {"taints": [theirs]}})
    await plain_pod(api, "rackloom-controller", "rackloom-controller")

    async with as_account(api, cluster, "rackloom-controller") as own:

        async def refused(change: Object, why: str) -> None:
            with pytest.raises(Rejected, match=why):
                await own.patch(NODE, node, None, change)

        held = {**ours, "effect": "NoSchedule"}
        for name in (names.COMPUTE_DOMAIN_LABEL, names.WARM_CLIQUE_LABEL, names.CHANNELS_READY_LABEL):
            for value in ("x", None):
                await own.patch(NODE, node, None, {"metadata": {"labels": {name: value}}})
        await own.patch(NODE, node, None, {"spec": {"taints": [theirs, held]}})

        for name in (names.GPU_CLIQUE_LABEL, names.ISOLATION_LABEL, "tier"):
            await refused({"metadata": {"labels": {name: "x"}}}, "no labels of a node but")
        await refused({"metadata": {"labels": {names.GPU_CLIQUE_LABEL: None}}}, "no labels of a node but")
        await refused({"spec": {"taints": [held]}}, "no taints of a node but")
        await refused(
            {"spec": {"taints": [theirs, held, {**theirs, "key": "new"}]}}, "no taints of a node but"
        )
        await refused({"spec": {"taints": [theirs, held, {**ours, "effect": "NoExecute"}]}}, "evicts none")
        await refused({"spec": {"unschedulable": True}}, "nothing else")
        await refused({"spec": {"providerID": "x://y"}}, "nothing else")
        await refused({"metadata": {"annotations": {"a": "b"}}}, "nothing else")
        await refused({"metadata": {"finalizers": ["example.com/keep"]}}, "nothing else")
        await own.patch(NODE, node, None, {"spec": {"taints": [theirs]}})
    left = await api.get(NODE, node)
    assert left["metadata"]["labels"][names.GPU_CLIQUE_LABEL] == CLIQUE
    assert [one["key"] for one in left["spec"]["taints"]] == ["team"]


async def test_a_plugin_tells_the_status_of_its_own_nics_only(
    cluster: ControlPlane, api: KubeApi, namespace: str, base_applied: None
) -> None:
    pod = await plain_pod(api, "plugin", "rackloom-node-nic")
    node = pod["spec"]["nodeName"]
    await nic_claim(api, namespace, node)
    async with as_account(api, cluster, "rackloom-node-nic", "plugin") as plugin:

        async def tell(pool: str, driver: str = "dra.net", **status: Any) -> bool:
            told = {"status": {"devices": [{"driver": driver, "pool": pool, "device": "nic-0"}], **status}}
            await plugin.patch(RESOURCE_CLAIM, "nic", namespace, told, subresource="status")
            return True

        await tell(node)
        with pytest.raises(Rejected):
            await tell(node, driver=names.GPU_DRIVER)
        async with more_rights(api, plugin):
            # Kubernetes 1.36 asks for rights that the plugin has not; older servers have the policy alone.
            with pytest.raises(Rejected, match="NICs of its own node only"):
                await tell(node, driver=names.GPU_DRIVER)
            with pytest.raises(Rejected, match="which devices a claim has"):
                await tell(node, reservedFor=[{"resource": "pods", "name": "mine", "uid": "mine"}])
            with pytest.raises(Rejected, match="which devices a claim has"):
                await tell(node, allocation=None)
        claim = await api.get(RESOURCE_CLAIM, "nic", namespace)
        assert [(one["driver"], one["pool"]) for one in claim["status"]["devices"]] == [("dra.net", node)]
        with pytest.raises(Rejected, match="forbidden"):
            await plugin.patch(RESOURCE_CLAIM, "nic", namespace, {"metadata": {"labels": {"a": "b"}}})


@contextlib.asynccontextmanager
async def more_rights(api: KubeApi, plugin: KubeApi) -> AsyncIterator[None]:
    """The plugin's account may say anything in the status of claims, for Kubernetes' own rules."""
    rule = {
        "apiGroups": ["resource.k8s.io"],
        "resources": ["resourceclaims/driver", "resourceclaims/binding"],
        "verbs": ["*"],
    }
    meta = {"name": "more-than-shipped"}
    await api.create(CLUSTER_ROLE, {"metadata": meta, "rules": [rule]})
    subject = {"kind": "ServiceAccount", "name": "rackloom-node-nic", "namespace": DRIVER}
    role = {"apiGroup": CLUSTER_ROLE.group, "kind": CLUSTER_ROLE.kind, "name": meta["name"]}
    await api.create(CLUSTER_ROLE_BINDING, {"metadata": meta, "subjects": [subject], "roleRef": role})
    await until(lambda: may_write(plugin, "driver"), "the rights count")
    yield
    await api.delete(CLUSTER_ROLE_BINDING, meta["name"])
    await api.delete(CLUSTER_ROLE, meta["name"])


async def may_write(plugin: KubeApi, part: str) -> bool:
    """Rights count a moment after they were given."""
    asked = {
        "group": "resource.k8s.io",
        "resource": "resourceclaims",
        "subresource": part,
        "verb": "update",
    }
    answer = await plugin.create(ACCESS, {"metadata": {}, "spec": {"resourceAttributes": asked}})
    return bool(answer["status"]["allowed"])


def allocation_of(node: str) -> Object:
    results = [
        {"request": "r", "driver": driver, "pool": node, "device": "nic-0"}
        for driver in ("dra.net", names.GPU_DRIVER)
    ]
    here = {"key": "metadata.name", "operator": "In", "values": [node]}
    return {"devices": {"results": results}, "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [here]}]}}


async def nic_claim(api: KubeApi, namespace: str, node: str) -> None:
    """A claim that has a NIC of this node, and a GPU of it."""
    spec = {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "nic", "count": 2}}]}}
    claim = {"metadata": {"name": "nic", "namespace": namespace}, "spec": spec}
    made = await api.create(RESOURCE_CLAIM, claim)
    status = {"allocation": allocation_of(node)}
    await api.replace(RESOURCE_CLAIM, {**made, "status": status}, subresource="status")
