"""Gangs on a real control plane that serves DeviceTaintRules, and members that move past a full tray.

The control plane is one of this file: before 1.37 the rules are off unless they are switched on.
"""

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from tests.cluster.build import CONTROL_PLANE, MINOR, Tools
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.gangs_at_work import PATIENCE, does_not_fit, gangs_at_work, two_racks
from tests.waiting import until

from rackloom.app.snapshot.assemble import site_snapshot
from rackloom.claim.kube.api import KubeApi, NotFound, list_taint_rules
from rackloom.core.cluster.objects import (
    DEVICE_CLASS,
    DEVICE_TAINT_RULES,
    JOB,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    Object,
    ResourceKind,
)
from rackloom.core.cluster.pods import SIZE_ANNOTATION
from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import examine
from rackloom.lab.nodes.kubelets import NodeSpec, SimulatedKubelets

pytestmark = pytest.mark.anyio
NIC = "nic.test.example.com"
_NEWEST = "1.37"
_OF_MINOR = {"1.34": ("DRADeviceTaints", "v1alpha3"), "1.35": ("DRADeviceTaintRules", "v1alpha3")}


class RuledPlane(ControlPlane):
    """It serves DeviceTaintRules, and its scheduler honours them."""

    def _apiserver(self) -> list[str]:
        _, version = _gate()
        served = [f"--runtime-config=resource.k8s.io/{version}=true"] if version else []
        return [*super()._apiserver(), *self._gates(), *served]

    def _scheduler(self) -> list[str]:
        return [*super()._scheduler(), *self._gates()]

    def _controller_manager(self) -> list[str]:
        return [*super()._controller_manager(), *self._gates()]

    def _gates(self) -> list[str]:
        gate, _ = _gate()
        return [f"--feature-gates={gate}=true"] if gate else []


def _gate() -> tuple[str, str]:
    """The feature gate and the API version to switch on. Empty if both are on by default."""
    minor = os.environ.get(MINOR, "1.36")
    return ("", "") if minor == _NEWEST else _OF_MINOR.get(minor, ("DRADeviceTaintRules", "v1beta2"))


@pytest.fixture(scope="module")
def cluster(
    binaries: Callable[[Tools], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    """A control plane of this file."""
    plane = RuledPlane(binaries(CONTROL_PLANE), tmp_path_factory.mktemp("cluster"))
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()


@pytest.fixture
async def driver(cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes) -> AsyncIterator[None]:
    """The objects of deploy/kubernetes, with the webhook and the controllers at work."""
    async with gangs_at_work(cluster, api, add_nodes):
        yield


@pytest.fixture
async def racks(api: KubeApi, add_nodes: AddNodes) -> AsyncIterator[dict[str, str]]:
    """Two racks of three trays, with two NICs each."""
    selector = {"cel": {"expression": f"device.driver == '{NIC}'"}}
    await api.create(DEVICE_CLASS, {"metadata": {"name": NIC}, "spec": {"selectors": [selector]}})
    found = await two_racks(add_nodes, 3)
    for node in found:
        spec = {
            "driver": NIC,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": "nic-0"}, {"name": "nic-1"}],
        }
        await api.create(RESOURCE_SLICE, {"metadata": {"name": f"{node}-nics"}, "spec": spec})
    yield found
    for node in found:
        await api.delete(RESOURCE_SLICE, f"{node}-nics")
    await api.delete(DEVICE_CLASS, NIC)


async def rule_kind(api: KubeApi) -> ResourceKind:
    """In the version that this server serves."""
    for kind in DEVICE_TAINT_RULES:
        try:
            await api.list(kind)
        except NotFound:
            continue
        return kind
    raise AssertionError("no DeviceTaintRules are served")


async def taint(api: KubeApi, name: str, node: str) -> None:
    """Taint one NIC of a node by a rule."""
    selector = {"driver": NIC, "pool": node, "device": "nic-1"}
    spec = {"deviceSelector": selector, "taint": {"key": "example.com/checked", "effect": "NoSchedule"}}
    await api.create(await rule_kind(api), {"metadata": {"name": name}, "spec": spec})


def job(namespace: str, name: str, pods: int, *, nics: bool = True, cpu: str = "1") -> Object:
    """A gang of which each member takes a tray's GPUs, and perhaps both of its NICs."""
    limits = {"nvidia.com/gpu": "4"}
    container: Object = {"name": "main", "image": "none"}
    container["resources"] = {"limits": limits, "requests": {"cpu": cpu}}
    spec: Object = {"restartPolicy": "Never", "containers": [container]}
    if nics:
        container["resources"]["claims"] = [{"name": "nics"}]
        spec["resourceClaims"] = [{"name": "nics", "resourceClaimTemplateName": "nics"}]
    meta = {
        "labels": {"job": name, "rackloom.dev/gang": name},
        "annotations": {SIZE_ANNOTATION: str(pods)},
    }
    template = {"metadata": meta, "spec": spec}
    return {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"parallelism": pods, "completions": pods, "template": template},
    }


def bound(
    api: KubeApi, namespace: str, name: str, count: int, without: str = ""
) -> Callable[[], Awaitable[set[str]]]:
    """The nodes of a job's pods once there are as many, and none of them is `without`, for `until`."""

    async def look() -> set[str]:
        pods = (await api.list(POD, namespace, labels=f"job={name}")).items
        found = {pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")}
        return found if len(found) == count and without not in found else set()

    return look


async def test_gangs_avoid_trays_that_a_rule_taints_and_the_doctor_names_it(
    driver: None, racks: dict[str, str], api: KubeApi, namespace: str
) -> None:
    request = {"name": "nics", "exactly": {"deviceClassName": NIC, "count": 2}}
    claim = {"devices": {"requests": [request]}}
    meta = {"name": "nics", "namespace": namespace}
    await api.create(RESOURCE_CLAIM_TEMPLATE, {"metadata": meta, "spec": {"spec": claim}})
    first, second, third = (node for node, rack in racks.items() if rack == "1")
    await taint(api, "before", first)
    await api.create(JOB, job(namespace, "whole", 3))
    nodes = await until(bound(api, namespace, "whole", 3), "the first gang is bound", PATIENCE)
    assert {racks[node] for node in nodes} == {"2"}

    await taint(api, "later", second)
    await api.create(JOB, job(namespace, "single", 1))
    assert await until(bound(api, namespace, "single", 1), "the next is bound", PATIENCE) == {third}

    # No tray is left with two free, untainted NICs. kube-scheduler reports the same about this pod.
    meta = {"name": "held", "namespace": namespace}
    await api.create(RESOURCE_CLAIM, {"metadata": meta, "spec": claim})
    container = {"name": "main", "image": "none"}
    claims = [{"name": "nics", "resourceClaimName": "held"}]
    await api.create(POD, {"metadata": meta, "spec": {"containers": [container], "resourceClaims": claims}})
    await until(lambda: is_unschedulable(api, namespace, "held"), "the scheduler refuses the pod", PATIENCE)
    findings = examine(await site_snapshot(time.time(), cluster=api))
    tainted = {found.subject: found for found in findings if found.check == Check.DEVICE_TAINT}
    assert tainted.keys() == {f"{first}/nic-1", f"{second}/nic-1"}
    assert "DeviceTaintRule before keeps workloads off it" in tainted[f"{first}/nic-1"].message
    (waiting,) = (found for found in findings if found.check == Check.CLAIMS)
    assert waiting.subject == f"Pod {namespace}/held"
    assert any(f"DeviceTaintRule {rule} withholds" in waiting.message for rule in ("before", "later"))

    # A gang waits for the same trays, and starts once a rule is deleted.
    await api.delete(POD, "held", namespace, grace_seconds=0)
    await api.delete(RESOURCE_CLAIM, "held", namespace)
    await api.create(JOB, job(namespace, "waits", 1))
    await until(lambda: does_not_fit(api, namespace, "waits"), "the gang is refused", PATIENCE)
    await api.delete(await rule_kind(api), "later")
    assert await until(bound(api, namespace, "waits", 1), "the gang is bound", PATIENCE) == {second}
    await api.delete(await rule_kind(api), "before")
    assert not await list_taint_rules(api.list)
    for name in ("whole", "single", "waits"):
        await api.delete(JOB, name, namespace)


async def is_unschedulable(api: KubeApi, namespace: str, name: str) -> bool:
    pod = await api.get(POD, name, namespace)
    return any(
        condition["type"] == "PodScheduled" and condition["status"] == "False"
        for condition in (pod.get("status") or {}).get("conditions") or ()
    )


async def test_a_member_that_moves_passes_over_a_tray_whose_cpus_are_taken(
    driver: None, add_nodes: AddNodes, api: KubeApi, namespace: str, kubelets: SimulatedKubelets
) -> None:
    racks = await two_racks(add_nodes, 4)
    await api.create(JOB, job(namespace, "pair", 2, nics=False, cpu="60"))
    lost, stays = await until(bound(api, namespace, "pair", 2), "the gang is bound", PATIENCE)
    full, left = (node for node, rack in racks.items() if rack == racks[lost] and node not in (lost, stays))
    resources = {"requests": {"cpu": "50"}}
    spec = {
        "nodeSelector": {"kubernetes.io/hostname": full},
        "containers": [{"name": "main", "image": "none", "resources": resources}],
    }
    meta = {"name": "busy", "namespace": namespace, "labels": {"job": "busy"}}
    await api.create(POD, {"metadata": meta, "spec": spec})
    assert await until(bound(api, namespace, "busy", 1), "the CPUs are taken", PATIENCE) == {full}

    await kubelets.lose(lost)
    await api.delete(NODE, lost)

    moved = await until(bound(api, namespace, "pair", 2, without=lost), "the member moved", PATIENCE)
    assert moved == {stays, left}
    await kubelets.register(NodeSpec(lost))
    await api.delete(JOB, "pair", namespace)
    await api.delete(POD, "busy", namespace, grace_seconds=0)
