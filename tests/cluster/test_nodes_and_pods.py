"""Pods of real controllers, placed by the real scheduler, live and end on simulated nodes."""

import functools
from collections.abc import Awaitable, Callable

import pytest
from tests.cluster.conftest import AddNodes
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster.objects import DAEMON_SET, JOB, NODE, POD, Object, ResourceKind
from rackloom.lab.nodes.pods import ContainerRuntime, IdleContainers

pytestmark = pytest.mark.anyio
DEPLOYMENT = ResourceKind("apps", "v1", "Deployment", "deployments", namespaced=True)
LABELS = {"app": "test"}
POD_SPEC = {"containers": [{"name": "main", "image": "none"}]}


class EndAtOnce:
    """Containers of pods of Jobs succeed, others run until they are deleted."""

    async def run(self, node: str, pod: Object, ready: Callable[[], Awaitable[None]]) -> int:
        if "job-name" in pod["metadata"]["labels"]:
            return 0
        return await IdleContainers().run(node, pod, ready)


@pytest.fixture
def containers() -> ContainerRuntime:
    return EndAtOnce()


def workload(kind: ResourceKind, namespace: str, **spec: object) -> Object:
    template = {"metadata": {"labels": LABELS}, "spec": POD_SPEC}
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {"name": "work", "namespace": namespace},
        "spec": {"template": template, **spec},
    }


async def status_of(api: KubeApi, kind: ResourceKind, namespace: str) -> Object:
    found: Object = (await api.get(kind, "work", namespace)).get("status", {})
    return found


async def test_a_deployment_becomes_available_on_its_nodes(
    api: KubeApi, add_nodes: AddNodes, namespace: str
) -> None:
    nodes = await add_nodes(2)
    selector = {"matchLabels": LABELS}
    await api.create(DEPLOYMENT, workload(DEPLOYMENT, namespace, replicas=5, selector=selector))

    async def available() -> bool:
        return (await status_of(api, DEPLOYMENT, namespace)).get("availableReplicas") == 5

    await until(available, "five available replicas")
    pods = (await api.list(POD, namespace)).items
    assert {pod["spec"]["nodeName"] for pod in pods} <= set(nodes)
    assert len({pod["status"]["podIP"] for pod in pods}) == 5
    assert {pod["status"]["phase"] for pod in pods} == {"Running"}

    await api.patch(DEPLOYMENT, "work", namespace, {"spec": {"replicas": 0}})
    await until(functools.partial(_has_no_pods, api, namespace), "deleted pods are gone")


async def _has_no_pods(api: KubeApi, namespace: str) -> bool:
    return not (await api.list(POD, namespace)).items


async def test_a_job_completes(api: KubeApi, add_nodes: AddNodes, namespace: str) -> None:
    await add_nodes(1)
    job = workload(JOB, namespace, completions=4, parallelism=2)
    job["spec"]["template"]["spec"] = {**POD_SPEC, "restartPolicy": "Never"}
    await api.create(JOB, job)

    async def complete() -> bool:
        return (await status_of(api, JOB, namespace)).get("succeeded") == 4

    await until(complete, "four pods that succeeded")


async def test_a_daemon_set_follows_a_node_label(api: KubeApi, add_nodes: AddNodes, namespace: str) -> None:
    chosen, other = await add_nodes(2)
    daemons = workload(DAEMON_SET, namespace, selector={"matchLabels": LABELS})
    daemons["spec"]["template"]["spec"] = {**POD_SPEC, "nodeSelector": {"wanted": "yes"}}
    await api.create(DAEMON_SET, daemons)
    await api.patch(NODE, chosen, None, {"metadata": {"labels": {"wanted": "yes"}}})

    async def ready() -> bool:
        return (await status_of(api, DAEMON_SET, namespace)).get("numberReady") == 1

    await until(ready, "a daemon on the node with the label")
    (pod,) = (await api.list(POD, namespace)).items
    assert pod["spec"]["nodeName"] == chosen

    await api.patch(NODE, chosen, None, {"metadata": {"labels": {"wanted": None}}})
    await until(functools.partial(_has_no_pods, api, namespace), "no daemon without the label")
    assert other != chosen
