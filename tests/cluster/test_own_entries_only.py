"""The policies of deploy/kubernetes on a real control plane: each program writes about its node only."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.installed import as_account, pod_of
from tests.cluster.policies import CLIQUE, DAEMON_ACCOUNT, DAEMONS, DRIVER, slice_of
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi, Rejected
from rackloom.claim.node.requests import RETRY_ANNOTATION
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import ComputeDomainClique, ObjectRef, clique_json, read_clique
from rackloom.core.cluster.gang_objects import GANG_TAINT
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN_CLIQUE,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_SLICE,
    SECRET,
    Object,
    ResourceKind,
)
from rackloom.core.domains.clique import join_clique, leave_clique

pytestmark = pytest.mark.anyio
CLUSTER_ROLE = ResourceKind(
    "rbac.authorization.k8s.io", "v1", "ClusterRole", "clusterroles", namespaced=False
)
CLUSTER_ROLE_BINDING = ResourceKind(
    "rbac.authorization.k8s.io", "v1", "ClusterRoleBinding", "clusterrolebindings", namespaced=False
)
DOMAIN, FOREIGN = "0b6e5f0a-6a3b-4c55-9a52-1f0d6c3d7a11", "5a4c9d1e-77aa-4b1c-8d8e-2f60c0a4b922"
"""UIDs of two ComputeDomains."""
ACCESS = ResourceKind(
    "authorization.k8s.io", "v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", namespaced=False
)


async def plain_pod(api: KubeApi, name: str, service_account: str, namespace: str = DRIVER) -> Object:
    spec = {"serviceAccountName": service_account, "containers": [{"name": "main", "image": "none"}]}
    await api.create(POD, {"metadata": {"name": name, "namespace": namespace}, "spec": spec})
    return await pod_of(api, name, namespace)


async def daemon_pod(api: KubeApi, uid: str, suffix: str) -> Object:
    """A pod named as a DaemonSet names those of a ComputeDomain."""
    return await plain_pod(api, f"{names.daemon_name(uid)}-{suffix}", DAEMON_ACCOUNT, DAEMONS)


@contextlib.asynccontextmanager
async def as_daemon(api: KubeApi, cluster: ControlPlane, pod: Object) -> AsyncIterator[KubeApi]:
    async with as_account(api, cluster, DAEMON_ACCOUNT, pod["metadata"]["name"], DAEMONS) as daemon:
        yield daemon


def ref_of(pod: Object) -> ObjectRef:
    return ObjectRef(pod["metadata"]["name"], pod["metadata"]["uid"])


async def test_a_daemon_writes_its_own_entry_only(
    cluster: ControlPlane, api: KubeApi, namespace: str, base_shared: None
) -> None:
    # All three exist, because the garbage collector deletes a clique if its only owner does not exist.
    first, two, three = [await daemon_pod(api, DOMAIN, suffix) for suffix in ("aaaa1", "aaaa2", "aaaa3")]
    here, there = ref_of(first), ref_of(three)
    node = first["spec"]["nodeName"]
    value = ComputeDomainClique(compute_domain=DOMAIN, clique_id=CLIQUE)
    by_admin = join_clique(value, node="other", ip_address="10.0.0.9", pod=there, max_nodes=18)
    read = await api.create(COMPUTE_DOMAIN_CLIQUE, clique_json(by_admin, DAEMONS))
    async with as_daemon(api, cluster, first) as daemon:

        async def refused(value: ComputeDomainClique, over: Object, why: str) -> None:
            with pytest.raises(Rejected, match=why):
                await daemon.replace(COMPUTE_DOMAIN_CLIQUE, clique_json(value, DAEMONS, over))

        forged = join_clique(
            read_clique(read), node="elsewhere", ip_address="10.0.0.1", pod=here, max_nodes=18
        )
        await refused(forged, read, "own node only")
        own = join_clique(read_clique(read), node=node, ip_address="10.0.0.1", pod=here, max_nodes=18)
        for owners in ((there,), (there, ref_of(two))):
            for_nobody = msgspec.structs.replace(own, owners=owners)
            await refused(for_nobody, read, r"together with its pod|own pod as owner only")
        entry = msgspec.structs.replace(own.on(node), clique_id=f"{CLIQUE}2")
        elsewhere = msgspec.structs.replace(own, daemons=(*read_clique(read).daemons, entry))
        await refused(elsewhere, read, "of the clique that the object is of")

        written = await daemon.replace(COMPUTE_DOMAIN_CLIQUE, clique_json(own, DAEMONS, read))
        assert [member.node_name for member in read_clique(written).daemons] == ["other", node]
        thrown_out = leave_clique(read_clique(written), node="other", pod=there)
        await refused(thrown_out, written, "own node only")
        alone = msgspec.structs.replace(read_clique(written), owners=(there,))
        await refused(alone, written, "together with its pod")
        for address in (
            "10.0.0.1\n10.0.0.66\tapi.example.com",
            "10.0.0",
            "pod.example.com",
            "",
            "fe80::1%eth0",
        ):
            crafted = join_clique(read_clique(written), node=node, ip_address=address, pod=here, max_nodes=18)
            await refused(crafted, written, r"daemons\[1\]\.ipAddress")
        # An address that the schema accepts and the policy does not.
        mapped = join_clique(
            read_clique(written), node=node, ip_address="::ffff:10.0.0.1", pod=here, max_nodes=18
        )
        await refused(mapped, written, "an IP address, and nothing else")
        moved = join_clique(read_clique(written), node=node, ip_address="fd00::1", pod=here, max_nodes=18)
        written = await daemon.replace(COMPUTE_DOMAIN_CLIQUE, clique_json(moved, DAEMONS, written))
        name = written["metadata"]["name"]
        for change in ({"finalizers": ["example.com/keep"]}, {"annotations": {"a": "b"}}):
            with pytest.raises(Rejected, match="no finalizers and no annotations"):
                await daemon.patch(COMPUTE_DOMAIN_CLIQUE, name, DAEMONS, {"metadata": change})
        left = leave_clique(read_clique(written), node=node, pod=here)
        await daemon.replace(COMPUTE_DOMAIN_CLIQUE, clique_json(left, DAEMONS, written))


async def test_a_daemon_is_held_to_its_own_compute_domain(
    cluster: ControlPlane, api: KubeApi, namespace: str, base_shared: None
) -> None:
    """Its pod is named after the ComputeDomain, and its token names the pod."""
    pod = await daemon_pod(api, DOMAIN, "bbbb1")
    node, here = pod["spec"]["nodeName"], ref_of(pod)
    foreign = ComputeDomainClique(compute_domain=FOREIGN, clique_id=CLIQUE)
    read = await api.create(COMPUTE_DOMAIN_CLIQUE, clique_json(foreign, DAEMONS))

    def entered(value: ComputeDomainClique) -> ComputeDomainClique:
        return join_clique(value, node=node, ip_address="10.0.0.1", pod=here, max_nodes=18)

    async with as_daemon(api, cluster, pod) as daemon:
        with pytest.raises(Rejected, match="own ComputeDomain only: " + DOMAIN):
            await daemon.replace(
                COMPUTE_DOMAIN_CLIQUE, clique_json(entered(read_clique(read)), DAEMONS, read)
            )
        longer = ComputeDomainClique(compute_domain=DOMAIN + "0", clique_id=CLIQUE)
        with pytest.raises(Rejected, match="own ComputeDomain only"):
            await daemon.create(COMPUTE_DOMAIN_CLIQUE, clique_json(entered(longer), DAEMONS))
        own = clique_json(entered(ComputeDomainClique(compute_domain=DOMAIN, clique_id=CLIQUE)), DAEMONS)
        mislabelled = {
            **own,
            "metadata": {**own["metadata"], "labels": {names.COMPUTE_DOMAIN_LABEL: FOREIGN}},
        }
        with pytest.raises(Rejected, match="labelled with its own ComputeDomain"):
            await daemon.create(COMPUTE_DOMAIN_CLIQUE, mislabelled)
        await daemon.create(COMPUTE_DOMAIN_CLIQUE, own)
    stray = await plain_pod(api, "stray", DAEMON_ACCOUNT, DAEMONS)
    async with as_daemon(api, cluster, stray) as daemon:
        value = join_clique(
            ComputeDomainClique(compute_domain=DOMAIN, clique_id=CLIQUE),
            node=node,
            ip_address="10.0.0.1",
            pod=ref_of(stray),
            max_nodes=18,
        )
        with pytest.raises(Rejected, match="own ComputeDomain only"):
            await daemon.create(COMPUTE_DOMAIN_CLIQUE, clique_json(value, DAEMONS))


async def test_a_daemon_says_what_it_sees_on_its_own_pod(
    cluster: ControlPlane, api: KubeApi, namespace: str, base_shared: None
) -> None:
    first, two = [await daemon_pod(api, DOMAIN, suffix) for suffix in ("cccc1", "cccc2")]
    own, other = first["metadata"]["name"], two["metadata"]["name"]
    patch = {
        "metadata": {
            "labels": {names.CLIQUE_ID_LABEL: CLIQUE},
            "annotations": {names.MESH_ANNOTATION: "{}"},
        }
    }
    async with as_daemon(api, cluster, first) as daemon:
        await daemon.patch(POD, own, DAEMONS, patch)
        ended = {"metadata": {"annotations": {names.IMEX_ERROR_ANNOTATION: "exit status 255"}}}
        await daemon.patch(POD, own, DAEMONS, ended)
        with pytest.raises(Rejected, match="own pod only"):
            await daemon.patch(POD, other, DAEMONS, patch)
        for change in (
            {"metadata": {"labels": {names.COMPUTE_DOMAIN_LABEL: FOREIGN}}},
            {"metadata": {"labels": {"a": "b"}}},
            {"metadata": {"annotations": {"a": "b"}}},
            {"metadata": {"finalizers": ["example.com/keep"]}},
            {"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u"}]}},
            {"spec": {"activeDeadlineSeconds": 9}},
        ):
            with pytest.raises(Rejected, match="changes nothing else of its pod"):
                await daemon.patch(POD, own, DAEMONS, change)
        with pytest.raises(Rejected, match="forbidden"):
            await daemon.patch(POD, own, DAEMONS, {"status": {"phase": "Failed"}}, subresource="status")
        for kind, place in ((NODE, None), (SECRET, DAEMONS), (POD, DAEMONS), (SECRET, DRIVER)):
            with pytest.raises(Rejected, match="forbidden"):
                await daemon.list(kind, place)
        with pytest.raises(Rejected, match="forbidden"):
            await daemon.get(SECRET, names.imex_secret_name(DOMAIN), DAEMONS)


async def test_a_plugin_writes_its_own_node_only(
    cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes, base_shared: None
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


@pytest.mark.parametrize("plugin", ["imex", "gpu", "nic"])
async def test_a_plugin_has_kubelet_try_the_pods_of_its_own_node_again_and_changes_nothing_else_of_them(
    cluster: ControlPlane, api: KubeApi, namespace: str, add_nodes: AddNodes, base_shared: None, plugin: str
) -> None:
    account = f"rackloom-node-{plugin}"
    node = (await plain_pod(api, account, account))["spec"]["nodeName"]
    other = next(add_node for add_node in await add_nodes(2) if add_node != node)
    for name, where in (("here", node), ("there", other)):
        main = {"name": "main", "image": "none"}
        meta = {"name": name, "namespace": namespace, "annotations": {"theirs": "1"}, "labels": {"app": "x"}}
        spec = {"nodeName": where, "containers": [main], "tolerations": [{"operator": "Exists"}]}
        await api.create(POD, {"metadata": meta, "spec": spec})
    here = await api.get(POD, "here", namespace)

    async with as_account(api, cluster, account, account) as own:
        listed = await own.list(POD, fields=f"spec.nodeName={node}")
        assert {"here", account} <= {pod["metadata"]["name"] for pod in listed.items}
        assert "there" not in {pod["metadata"]["name"] for pod in listed.items}

        async def annotate(name: str, value: Any, **more: Any) -> Object:
            change = {"metadata": {"annotations": {RETRY_ANNOTATION: value}, **more}}
            return await own.patch(POD, name, namespace, change)

        async def refused(change: Object, why: str) -> None:
            with pytest.raises(Rejected, match=why):
                await own.patch(POD, "here", namespace, change)

        for value in ("2026-01-01T00:00:00.000000Z dra.net", "2026-01-01T00:00:01.000000Z dra.net"):
            written = await annotate("here", value, uid=here["metadata"]["uid"])
            assert written["metadata"]["annotations"] == {"theirs": "1", RETRY_ANNOTATION: value}
        with pytest.raises(Rejected, match="own node only"):
            await annotate("there", "now")
        with pytest.raises(Rejected, match=r"metadata\.uid: Invalid value"):
            await annotate("here", "now", uid="of-another-pod-of-the-name")
        for value in (None, "x" * 129):
            with pytest.raises(Rejected, match="to a time and its driver"):
                await annotate("here", value)
        retry = {"annotations": {RETRY_ANNOTATION: "now"}}
        await refused(
            {"metadata": {"annotations": {RETRY_ANNOTATION: "now", "more": "1"}}},
            "no annotation of a pod but",
        )
        await refused(
            {"metadata": {"annotations": {RETRY_ANNOTATION: "now", "theirs": "2"}}},
            "no annotation of a pod but",
        )
        await refused(
            {"metadata": {"annotations": {RETRY_ANNOTATION: "now", "theirs": None}}},
            "no annotation of a pod but",
        )
        await refused({"metadata": {**retry, "labels": {"app": "y"}}}, "nothing else")
        await refused({"metadata": {**retry, "labels": {"more": "1"}}}, "nothing else")
        await refused({"metadata": {**retry, "finalizers": ["example.com/keep"]}}, "nothing else")
        owner = {"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u"}
        await refused({"metadata": {**retry, "ownerReferences": [owner]}}, "nothing else")
        await refused({"metadata": retry, "spec": {"activeDeadlineSeconds": 1}}, "nothing else")
        image = {"containers": [{**here["spec"]["containers"][0], "image": "evil"}]}
        await refused({"metadata": retry, "spec": image}, "nothing else")
        for verb in (
            lambda: own.get(POD, "here", namespace),
            lambda: own.delete(POD, "here", namespace),
            lambda: own.create(
                POD, {"metadata": {"name": "new", "namespace": namespace}, "spec": here["spec"]}
            ),
            lambda: own.patch(POD, "here", namespace, {"status": {"phase": "Failed"}}, subresource="status"),
            lambda: own.patch(POD, "here", namespace, {"spec": {}}, subresource="ephemeralcontainers"),
        ):
            with pytest.raises(Rejected, match="forbidden"):
                await verb()


async def test_the_controller_changes_its_own_taint_and_labels_of_nodes_only(
    cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes, base_shared: None
) -> None:
    theirs, ours = (
        {"key": "team", "value": "a", "effect": "NoSchedule"},
        {"key": GANG_TAINT, "value": "uid"},
    )
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
    assert [taint["key"] for taint in left["spec"]["taints"]] == ["team"]


async def test_a_plugin_tells_the_status_of_its_own_nics_only(
    cluster: ControlPlane, api: KubeApi, namespace: str, base_shared: None
) -> None:
    pod = await plain_pod(api, "plugin", "rackloom-node-nic")
    node = pod["spec"]["nodeName"]
    await nic_claim(api, namespace, node)
    async with as_account(api, cluster, "rackloom-node-nic", "plugin") as plugin:

        async def report(pool: str, driver: str = "dra.net", **status: Any) -> bool:
            patch = {"status": {"devices": [{"driver": driver, "pool": pool, "device": "nic-0"}], **status}}
            await plugin.patch(RESOURCE_CLAIM, "nic", namespace, patch, subresource="status")
            return True

        await report(node)
        with pytest.raises(Rejected):
            await report(node, driver=names.GPU_DRIVER)
        async with more_rights(api, plugin):
            # Kubernetes 1.36 requires rights that the plugin lacks. Older servers have only the policy.
            with pytest.raises(Rejected, match="NICs of its own node only"):
                await report(node, driver=names.GPU_DRIVER)
            with pytest.raises(Rejected, match="which devices a claim has"):
                await report(node, reservedFor=[{"resource": "pods", "name": "mine", "uid": "mine"}])
            with pytest.raises(Rejected, match="which devices a claim has"):
                await report(node, allocation=None)
        claim = await api.get(RESOURCE_CLAIM, "nic", namespace)
        assert [(device["driver"], device["pool"]) for device in claim["status"]["devices"]] == [
            ("dra.net", node)
        ]
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
    """Rights take effect only a moment after they were given."""
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
    """A claim that has a NIC and a GPU of this node."""
    spec = {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "nic", "count": 2}}]}}
    claim = {"metadata": {"name": "nic", "namespace": namespace}, "spec": spec}
    made = await api.create(RESOURCE_CLAIM, claim)
    status = {"allocation": allocation_of(node)}
    await api.replace(RESOURCE_CLAIM, {**made, "status": status}, subresource="status")
