"""Access rights: RBAC, and tokens of service accounts that are bound to a pod and its node."""

import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi, Rejected
from rackloom.claim.kube.client import connect
from rackloom.core.cluster.objects import CONFIG_MAP, LEASE, POD, Object, ResourceKind

SELF = ResourceKind(
    "authentication.k8s.io", "v1", "SelfSubjectReview", "selfsubjectreviews", namespaced=False
)
pytestmark = pytest.mark.anyio
ROLE = ResourceKind("rbac.authorization.k8s.io", "v1", "Role", "roles", namespaced=True)
ROLE_BINDING = ResourceKind("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings", namespaced=True)


async def running_pod(api: KubeApi, namespace: str) -> Object:
    spec = {"containers": [{"name": "main", "image": "none"}]}
    await api.create(POD, {"metadata": {"name": "bound", "namespace": namespace}, "spec": spec})

    async def running() -> Object | None:
        pod = await api.get(POD, "bound", namespace)
        return pod if pod["status"]["phase"] == "Running" else None

    pod = await until(running, "the pod runs")
    assert pod is not None
    return pod


async def test_a_bound_token_is_its_account_on_the_node_of_its_pod(
    cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes, namespace: str
) -> None:
    (node,) = await add_nodes(1)
    pod = await running_pod(api, namespace)
    token = cluster.bound_token(pod, "default")
    async with connect(cluster.kubeconfig_of_token("bound", token)) as account:
        me = (await account.create(SELF, {"metadata": {}}))["status"]["userInfo"]
        assert me["username"] == f"system:serviceaccount:{namespace}:default"
        assert me["extra"]["authentication.kubernetes.io/node-name"] == [node]
        assert me["extra"]["authentication.kubernetes.io/pod-uid"] == [pod["metadata"]["uid"]]

        with pytest.raises(Rejected) as forbidden:
            await account.list(CONFIG_MAP, namespace)
        assert forbidden.value.code == 403
        await allow_reading(api, namespace)

        async def allowed() -> bool:
            try:
                return bool((await account.list(CONFIG_MAP, namespace)).items)
            except Rejected:
                return False

        await until(allowed, "a role counts")


async def test_a_user_by_certificate_has_the_rights_of_its_groups(cluster: ControlPlane) -> None:
    async with connect(cluster.kubeconfig("system:node:elsewhere", "system:nodes")) as kubelet:
        me = (await kubelet.create(SELF, {"metadata": {}}))["status"]["userInfo"]
        assert (me["username"], "system:nodes" in me["groups"]) == ("system:node:elsewhere", True)
        lease = {"metadata": {"name": "another-node", "namespace": "kube-node-lease"}, "spec": {}}
        with pytest.raises(Rejected, match="lease"):
            await kubelet.create(LEASE, lease)


async def allow_reading(api: KubeApi, namespace: str) -> None:
    meta = {"name": "reader", "namespace": namespace}
    rule = {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list"]}
    await api.create(ROLE, {"metadata": meta, "rules": [rule]})
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": namespace}
    reference = {"apiGroup": ROLE.group, "kind": ROLE.kind, "name": "reader"}
    await api.create(ROLE_BINDING, {"metadata": meta, "subjects": [subject], "roleRef": reference})
