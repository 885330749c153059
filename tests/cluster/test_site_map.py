"""The account of deploy/site/with-cluster on a real API server: it reads the map's objects, no more."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from tests.cluster.control_plane import ControlPlane
from tests.waiting import until

from rackloom.app.site.cluster import ClusterFollower
from rackloom.app.snapshot.assemble import site_snapshot
from rackloom.claim.kube.api import KubeApi, Rejected
from rackloom.claim.kube.client import connect
from rackloom.core.cluster.objects import NAMESPACE, NODE, SECRET, ResourceKind
from rackloom.core.cluster.projection import SNAPSHOT_KINDS, project_object
from rackloom.core.diagnosis.snapshot import Layer, LayerStatus

pytestmark = pytest.mark.anyio
READER = Path(__file__).parents[2] / "deploy" / "site" / "with-cluster" / "cluster-reader.yaml"
RBAC = "rbac.authorization.k8s.io"
ROLES = {
    "ClusterRole": ResourceKind(RBAC, "v1", "ClusterRole", "clusterroles", namespaced=False),
    "ClusterRoleBinding": ResourceKind(
        RBAC, "v1", "ClusterRoleBinding", "clusterrolebindings", namespaced=False
    ),
}


@pytest.fixture
async def account(cluster: ControlPlane, api: KubeApi) -> AsyncIterator[KubeApi]:
    """The service's account, with the rights of the shipped binding."""
    shipped = list(yaml.safe_load_all(READER.read_text()))
    for role in shipped:
        await api.create(ROLES[role["kind"]], role)
    (subject,) = shipped[1]["subjects"]
    user = f"system:serviceaccount:{subject['namespace']}:{subject['name']}"
    async with connect(cluster.kubeconfig(user), keep=project_object) as client:
        yield client
    for role in shipped:
        await api.delete(ROLES[role["kind"]], role["metadata"]["name"])


@pytest.fixture
async def follower(account: KubeApi) -> AsyncIterator[ClusterFollower]:
    found = ClusterFollower(account, time.time, random.Random())
    task = asyncio.create_task(found.run())
    yield found
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_the_account_of_the_site_follows_what_the_map_draws(
    follower: ClusterFollower, api: KubeApi, namespace: str
) -> None:
    async def known() -> LayerStatus | None:
        snapshot = await site_snapshot(time.time(), cluster=follower, reach=follower.reach)
        seen = snapshot.layer(Layer.CLUSTER)
        return seen if seen.unknown_since is None and namespace in snapshot.namespaces else None

    await api.patch(NAMESPACE, namespace, None, {"metadata": {"labels": {"rackloom.dev/org": "blue"}}})
    seen = await until(known, "the cluster is known")
    assert seen is not None
    assert seen.problem == "", "namespaces may be listed"


async def test_it_may_do_nothing_else(account: KubeApi) -> None:
    with pytest.raises(Rejected, match="forbidden"):
        await account.list(SECRET)
    with pytest.raises(Rejected, match="forbidden"):
        await account.create(NAMESPACE, {"metadata": {"name": "made-by-the-map"}})
    with pytest.raises(Rejected, match="forbidden"):
        await account.delete(NODE, "none-such")
    assert SECRET not in SNAPSHOT_KINDS
