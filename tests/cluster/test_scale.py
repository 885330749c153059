"""A hundred simulated nodes and hundreds of pods in one process, on the real control plane."""

import pytest
from tests.cluster.conftest import AddNodes
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.objects import POD, ResourceKind

pytestmark = pytest.mark.anyio
REPLICA_SET = ResourceKind("apps", "v1", "ReplicaSet", "replicasets", namespaced=True)
NODES, PODS = 100, 500
WITHIN = 900.0


async def test_hundreds_of_pods_run_on_a_hundred_nodes(
    api: KubeApi, add_nodes: AddNodes, namespace: str
) -> None:
    await add_nodes(NODES)
    labels = {"app": "many"}
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "main", "image": "none"}]},
    }
    spec = {"replicas": PODS, "selector": {"matchLabels": labels}, "template": template}
    await api.create(REPLICA_SET, {"metadata": {"name": "many", "namespace": namespace}, "spec": spec})

    async def ready() -> bool:
        return (await api.get(REPLICA_SET, "many", namespace)).get("status", {}).get("readyReplicas") == PODS

    await until(ready, f"{PODS} ready pods", WITHIN)
    pods = (await api.list(POD, namespace)).items
    assert len({pod["status"]["podIP"] for pod in pods}) == PODS
