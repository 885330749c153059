"""Gangs with pods that choose their nodes, on a real control plane: kube-scheduler binds them as placed."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.gangs_at_work import PATIENCE, gangs_at_work, record, two_racks
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi
from rackloom.core.cluster import names
from rackloom.core.cluster.gang_objects import reserving_plans
from rackloom.core.cluster.objects import JOB, NODE, POD, Object
from rackloom.core.cluster.pods import SIZE_ANNOTATION

pytestmark = pytest.mark.anyio
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
HOST = "kubernetes.io/hostname"
TAINT = {"key": "dedicated", "value": "x", "effect": "NoSchedule"}


@pytest.fixture
async def driver(cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes) -> AsyncIterator[None]:
    """The objects of deploy/kubernetes, with the webhook and the controllers at work."""
    async with gangs_at_work(cluster, api, add_nodes):
        yield


@pytest.fixture
async def racks(add_nodes: AddNodes) -> dict[str, str]:
    """Two racks of three trays: the rack of each node."""
    return await two_racks(add_nodes, 3)


def job(namespace: str, pods: int, gpus: int, how: Mapping[str, Any]) -> Object:
    limits = {"nvidia.com/gpu": str(gpus)}
    container = {"name": "main", "image": "none", "resources": {"limits": limits}}
    meta = {
        "labels": {"job": "big", "rackloom.dev/gang": "big"},
        "annotations": {SIZE_ANNOTATION: str(pods)},
    }
    spec = {"restartPolicy": "Never", "containers": [container], **how}
    return {
        "metadata": {"name": "big", "namespace": namespace},
        "spec": {"parallelism": pods, "completions": pods, "template": {"metadata": meta, "spec": spec}},
    }


def on(*nodes: str) -> Object:
    return {"matchExpressions": [{"key": HOST, "operator": "In", "values": list(nodes)}]}


async def places(api: KubeApi, namespace: str, pods: int) -> set[str]:
    async def bound() -> list[str]:
        found = (await api.list(POD, namespace, labels="job=big")).items
        nodes = [pod["spec"]["nodeName"] for pod in found if pod["spec"].get("nodeName")]
        return nodes if len(nodes) == pods else []

    return set(await until(bound, "the gang is bound", PATIENCE))


async def test_a_gang_goes_to_the_nodes_that_its_pods_choose_and_is_told_of_rules_that_are_not_kept(
    driver: None, racks: dict[str, str], api: KubeApi, namespace: str
) -> None:
    """One after the other, on one control plane."""
    second = [node for node, rack in racks.items() if rack == "2"]
    for node, rack in racks.items():
        if rack == "1":
            await api.patch(NODE, node, None, {"spec": {"taints": [TAINT]}})
    near = {
        "topologyKey": names.GPU_CLIQUE_LABEL,
        "labelSelector": {"matchLabels": {"rackloom.dev/gang": "big"}},
    }
    alone = {"topologyKey": HOST, "labelSelector": {"matchLabels": {"job": "big"}}}
    terms = [on("nobody"), on(*second[1:])]
    affinity = {
        "nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}},
        "podAffinity": {REQUIRED: [near]},
        "podAntiAffinity": {REQUIRED: [alone]},
    }
    tolerated = {"tolerations": [{"key": "dedicated", "operator": "Exists"}]}
    first = [node for node in racks if node not in second]
    for pods, gpus, how, expected in (
        (1, 4, {"nodeSelector": {HOST: second[2]}}, {second[2]}),
        (2, 2, {"affinity": affinity}, set(second[1:])),
        (3, 4, {}, set(second)),
        (1, 4, {"nodeSelector": {HOST: first[1]}, **tolerated}, {first[1]}),
    ):
        await api.create(JOB, job(namespace, pods, gpus, how))
        assert await places(api, namespace, pods) == expected
        reserved = {
            item["metadata"]["name"] for item in (await api.list(NODE)).items if reserving_plans(item)
        }
        assert reserved == expected
        await ended(api, namespace)

    zone = {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
    await api.create(JOB, job(namespace, 1, 4, {"topologySpreadConstraints": [zone]}))

    async def refused() -> str:
        found = await record(api, namespace, "big")
        placed = None if found is None else found.status.condition("Placed")
        return placed.message if placed is not None and placed.reason == "InvalidGang" else ""

    assert "topologySpreadConstraints by zone" in await until(refused, "the gang is told", PATIENCE)
    await ended(api, namespace)


async def ended(api: KubeApi, namespace: str) -> None:
    await api.delete(JOB, "big", namespace, propagation="Background")

    async def is_over() -> bool:
        pods = (await api.list(POD, namespace, labels="job=big")).items
        return not pods and await record(api, namespace, "big") is None

    await until(is_over, "the gang has ended", PATIENCE)
