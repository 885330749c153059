"""The right to assign a namespace to an organisation, on a real API server with its real authorizer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tests.cluster.control_plane import ControlPlane
from tests.cluster.kubectl import LEAVE, kubectl
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi, KubeError, Rejected
from rackloom.claim.kube.client import connect
from rackloom.core.cluster.names import ORG_LABEL
from rackloom.core.cluster.objects import NAMESPACE, Object

pytestmark = pytest.mark.anyio
GROUP = "rackloom:org-labels"
"""Of the binding that is shipped."""
RIGHTS = f"""
# Makes and labels namespaces, as tools do that tenants make theirs with.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {{ name: namespaces-all }}
rules: [{{ apiGroups: [""], resources: [namespaces, namespaces/finalize], verbs: ["*"] }}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{ name: namespaces-all }}
roleRef: {{ apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: namespaces-all }}
subjects:
  - {{ apiGroup: rbac.authorization.k8s.io, kind: Group, name: "{GROUP}" }}
  - {{ apiGroup: rbac.authorization.k8s.io, kind: User, name: maker }}
  - {{ apiGroup: rbac.authorization.k8s.io, kind: User, name: blue-admin }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {{ name: blue-labels }}
rules: [{{ apiGroups: [rackloom.dev], resources: [orgs], resourceNames: [blue], verbs: [label] }}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{ name: blue-labels }}
roleRef: {{ apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: blue-labels }}
subjects: [{{ apiGroup: rbac.authorization.k8s.io, kind: User, name: blue-admin }}]
"""
Label = Callable[..., Awaitable[None]]


def says(org: str | None, **labels: str) -> Object:
    return {"metadata": {"labels": {ORG_LABEL: org, **labels}}}


@pytest.fixture
async def as_user(
    cluster: ControlPlane, base_shared: None, namespace: str
) -> AsyncIterator[Callable[..., Label]]:
    """`as_user(name, *groups)` labels the test's namespace with an organisation, as that user."""
    tenant = (
        "create",
        "rolebinding",
        "tenant",
        "--clusterrole=cluster-admin",
        "--user=tenant",
        "-n",
        namespace,
    )
    await asyncio.to_thread(kubectl, cluster, *tenant)
    await asyncio.to_thread(kubectl, cluster, "apply", "-f", "-", given=RIGHTS)

    def of(name: str, *groups: str) -> Label:
        async def label(org: str | None, **labels: str) -> None:
            async with connect(cluster.kubeconfig(name, *groups)) as user:
                await user.patch(NAMESPACE, namespace, None, says(org, **labels))

        return label

    await until(lambda: _is_refused(cluster, namespace), "the policy and the rights count")
    yield of
    await asyncio.to_thread(kubectl, cluster, "delete", "-f", "-", *LEAVE, given=RIGHTS)


async def _is_refused(cluster: ControlPlane, namespace: str) -> bool:
    """Policies and rights take effect only after a moment. This checks by a dry run."""
    probe = {"metadata": {"name": f"{namespace}-probe", "labels": {ORG_LABEL: "probe"}}}
    async with connect(cluster.kubeconfig("maker")) as maker:
        try:
            await maker.create(NAMESPACE, probe, dry_run=True)
        except KubeError as error:
            return "you may not say that a namespace belongs to probe" in error.message
    return False


async def org_of(api: KubeApi, namespace: str) -> str | None:
    labels = (await api.get(NAMESPACE, namespace))["metadata"].get("labels") or {}
    return labels.get(ORG_LABEL)


async def test_a_tenant_with_every_right_in_its_namespace_does_not_say_whose_it_is(
    as_user: Callable[..., Label], api: KubeApi, namespace: str
) -> None:
    tenant, labeller = as_user("tenant"), as_user("operator", GROUP)
    await tenant(None, tier="gold")
    with pytest.raises(Rejected, match="you may not say that a namespace belongs to green"):
        await tenant("green")
    await labeller("blue")
    for other in ("green", None, ""):
        with pytest.raises(Rejected, match="namespace belongs to"):
            await tenant(other)
    await tenant("blue", tier="silver")
    assert await org_of(api, namespace) == "blue"
    await labeller("green")
    await labeller(None)
    assert await org_of(api, namespace) is None


async def test_whoever_makes_namespaces_says_whose_they_are_only_with_that_right(
    as_user: Callable[..., Label], cluster: ControlPlane, api: KubeApi, namespace: str
) -> None:
    made = {"metadata": {"name": f"{namespace}-made", "labels": {ORG_LABEL: "green"}}}
    async with connect(cluster.kubeconfig("maker")) as maker:
        with pytest.raises(Rejected, match="belongs to green"):
            await maker.create(NAMESPACE, made, dry_run=True)
        await maker.create(NAMESPACE, {"metadata": {"name": f"{namespace}-made"}}, dry_run=True)
        found = await maker.get(NAMESPACE, namespace)
        found["metadata"].setdefault("labels", {})[ORG_LABEL] = "green"
        with pytest.raises(Rejected, match="belongs to green"):
            await maker.replace(NAMESPACE, found, subresource="finalize")
    async with connect(cluster.kubeconfig("operator", GROUP)) as operator:
        await operator.create(NAMESPACE, made, dry_run=True)


async def test_a_right_to_one_organisation_neither_gives_nor_takes_namespaces_of_another(
    as_user: Callable[..., Label], api: KubeApi, namespace: str
) -> None:
    blue, labeller = as_user("blue-admin"), as_user("operator", GROUP)
    await blue("blue")
    with pytest.raises(Rejected, match="you may not say that a namespace belongs to green"):
        await blue("green")
    await blue(None)
    await labeller("green")
    for other in ("blue", None):
        with pytest.raises(Rejected, match="this namespace belongs to green"):
            await blue(other)
    assert await org_of(api, namespace) == "green"
