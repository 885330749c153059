"""`rackloom uninstall` on a real control plane: its blockers, removed objects, and objects that stay.

Webhook, controller and gang controller work with the rights of their manifests. The plugins' pods are
simulated, and their slices are published here under the plugins' name.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.gangs_at_work import CAPACITY, CLUSTER_UUID, PATIENCE
from tests.cluster.installed import DEPLOY, installed, led
from tests.cluster.kubectl import kubectl
from tests.cluster.policies import DAEMONS, DRIVER, slice_of
from tests.cluster.uninstalled import is_admitted, remains
from tests.waiting import until

from rackloom.claim.cluster.admission.webhook import AdmissionSettings
from rackloom.claim.kube.api import KubeApi, NotFound
from rackloom.claim.kube.client import KubeClient, connect
from rackloom.core.cluster import names
from rackloom.core.cluster.gang_objects import reserving_plans
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    CONFIG_MAP,
    DEVICE_CLASS,
    GANG_PLAN,
    MUTATING_WEBHOOK,
    NAMESPACE,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    Object,
)
from rackloom.core.cluster.pods import SIZE_ANNOTATION

pytestmark = pytest.mark.anyio
CLIQUE = f"{CLUSTER_UUID}.1"
HARDWARE = {names.GPU_CLIQUE_LABEL: CLIQUE, "nvidia.com/gpu.present": "true"}
TYPES = (COMPUTE_DOMAIN, COMPUTE_DOMAIN_CLIQUE, GANG_PLAN)


@pytest.fixture
async def plugin(cluster: ControlPlane) -> AsyncIterator[KubeApi]:
    """A client under the name that the IMEX plugin has at the API server."""
    async with connect(cluster.admin, user_agent=f"rackloom-{names.IMEX_DRIVER}") as api:
        yield api


@pytest.fixture
async def nodes(add_nodes: AddNodes) -> list[str]:
    """Four trays of one clique."""
    return await add_nodes(4, labels=HARDWARE, capacity=CAPACITY)


@pytest.fixture
async def driver(cluster: ControlPlane, api: KubeApi, nodes: list[str]) -> AsyncIterator[None]:
    """Base and webhook are installed and at work."""
    async with installed(cluster, api, AdmissionSettings(), *TYPES), led(api, cluster):
        yield


async def uninstall(cluster: ControlPlane, *options: str) -> tuple[int, Any, str]:
    """The command as a user calls it: its exit code, its JSON output, and its standard error."""
    command = [sys.executable, "-m", "rackloom.cli.main", "uninstall", "-o", "json", *options]
    if "--kubeconfig" not in options:
        command += ["--kubeconfig", str(cluster.admin)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=600)
    return done.returncode, json.loads(done.stdout or "null"), done.stderr


async def publish(plugin: KubeApi, nodes: list[str]) -> None:
    """A channel and a daemon device on each node."""
    for node in nodes:
        published = slice_of(node, f"imex-{node}")
        published["spec"]["devices"] = [
            {"name": f"{type_}-0", "attributes": {"type": {"string": type_}, "id": {"int": 0}}}
            for type_ in ("channel", "daemon")
        ]
        await plugin.create(RESOURCE_SLICE, published)


async def live_domain(api: KubeApi, plugin: KubeApi, namespace: str) -> str:
    """A ComputeDomain with a pod that holds its channel, and a daemon on the pod's node. Returns the UID."""
    spec = {"channel": {"resourceClaimTemplate": {"name": "channel"}}}
    made = await api.create(
        COMPUTE_DOMAIN, {"metadata": {"name": "cd", "namespace": namespace}, "spec": spec}
    )
    uid = str(made["metadata"]["uid"])
    await until(lambda: exists(api, namespace), "its template")
    container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "channel"}]}}
    claims = [{"name": "channel", "resourceClaimTemplateName": "channel"}]
    worker: Object = {
        "metadata": {"name": "worker", "namespace": namespace},
        "spec": {"containers": [container], "resourceClaims": claims},
    }
    await api.create(POD, worker)
    await until(lambda: runs(api, namespace, "worker"), "the worker runs", PATIENCE)
    node = (await api.get(POD, "worker", namespace))["spec"]["nodeName"]
    await plugin.patch(NODE, node, None, {"metadata": {"labels": {names.COMPUTE_DOMAIN_LABEL: uid}}})
    await until(lambda: has_daemon(api, uid), "its daemon runs", PATIENCE)
    return uid


async def gang(api: KubeApi, namespace: str) -> None:
    """Two pods that are placed together, on trays that are theirs."""
    for number in range(2):
        meta = {
            "name": f"member-{number}",
            "namespace": namespace,
            "labels": {"rackloom.dev/gang": "g"},
            "annotations": {SIZE_ANNOTATION: "2"},
        }
        container = {"name": "main", "image": "none", "resources": {"limits": {"nvidia.com/gpu": "4"}}}
        await api.create(POD, {"metadata": meta, "spec": {"containers": [container]}})
    for number in range(2):
        name = f"member-{number}"
        await until(lambda name=name: runs(api, namespace, name), f"{name} runs", PATIENCE)  # type: ignore[misc]


async def exists(api: KubeApi, namespace: str) -> bool:
    with contextlib.suppress(NotFound):
        await api.get(RESOURCE_CLAIM_TEMPLATE, "channel", namespace)
        return True
    return False


async def runs(api: KubeApi, namespace: str, name: str) -> bool:
    return bool((await api.get(POD, name, namespace))["status"].get("phase") == "Running")


async def has_daemon(api: KubeApi, uid: str) -> bool:
    pods = (await api.list(POD, labels=f"{names.COMPUTE_DOMAIN_LABEL}={uid}")).items
    return any(pod["status"].get("phase") == "Running" for pod in pods)


async def no_pods(api: KubeApi, namespace: str) -> bool:
    return (
        not (await api.list(POD, namespace)).items and not (await api.list(RESOURCE_CLAIM, namespace)).items
    )


async def end_all(api: KubeApi, namespace: str) -> None:
    for pod in (await api.list(POD, namespace)).items:
        await api.delete(POD, pod["metadata"]["name"], namespace)
    await until(lambda: no_pods(api, namespace), "the pods and their claims are gone", PATIENCE)


def blocked(answer: Any) -> dict[str, str]:
    return {blocker["what"]: blocker["fix"] for step in answer["steps"] for blocker in step["blockers"]}


async def test_it_holds_while_pods_use_anything_and_then_removes_all(
    cluster: ControlPlane,
    api: KubeClient,
    plugin: KubeApi,
    nodes: list[str],
    driver: None,
    namespace: str,
) -> None:
    await publish(plugin, nodes)
    uid = await live_domain(api, plugin, namespace)
    await gang(api, namespace)
    before = await remains(api)
    assert any("our class" in line for line in before), "the check sees what is there"

    code, planned, _ = await uninstall(cluster)
    assert code == 1
    pods = {f"Pod {namespace}/{name}" for name in ("worker", "member-0", "member-1")}
    assert blocked(planned).keys() == pods
    assert f"kubectl delete pod -n {namespace} worker" in blocked(planned).values()
    code, outcome, _ = await uninstall(cluster, "--yes")
    assert (code, outcome["done"]) == (1, [])
    assert await remains(api) == before
    assert await runs(api, namespace, "worker")

    await end_all(api, namespace)
    code, planned, _ = await uninstall(cluster)
    assert (code, planned["blocked"]) == (0, False)
    assert await has_domain(api, uid), "a plan changes nothing"
    code, outcome, complaint = await uninstall(cluster, "--yes")
    assert (code, outcome["rest"]["steps"]) == (0, []), complaint
    assert await remains(api) == []
    assert not [node for node in (await api.list(NODE)).items if reserving_plans(node)]
    assert await is_admitted(api, namespace)
    code, planned, _ = await uninstall(cluster)
    assert (code, planned["steps"]) == (0, [])


async def has_domain(api: KubeApi, uid: str) -> bool:
    return any(item["metadata"]["uid"] == uid for item in (await api.list(COMPUTE_DOMAIN)).items)


async def test_an_installation_that_was_deleted_under_a_compute_domain_is_freed(
    cluster: ControlPlane,
    api: KubeClient,
    plugin: KubeApi,
    nodes: list[str],
    driver: None,
    namespace: str,
) -> None:
    await publish(plugin, nodes)
    await live_domain(api, plugin, namespace)
    await gang(api, namespace)
    await end_all(api, namespace)
    await asyncio.to_thread(kubectl, cluster, "delete", "-k", str(DEPLOY / "base"), "--wait=false")
    await until(lambda: has_no_pods_of_ours(api), "our programs are gone", PATIENCE)
    assert (await api.get(NAMESPACE, DAEMONS))["status"]["phase"] == "Terminating"
    assert (await api.list(COMPUTE_DOMAIN)).items, "its finalizer holds it, and nobody takes it off"
    await until(lambda: is_admitted(api, namespace), "pods are not refused for want of a webhook")
    assert (await api.get(MUTATING_WEBHOOK, "rackloom-webhook"))["webhooks"]

    code, outcome, complaint = await uninstall(cluster, "--yes")
    assert (code, outcome["rest"]["steps"]) == (0, []), complaint
    assert await remains(api) == []
    assert await is_admitted(api, namespace)


async def has_no_pods_of_ours(api: KubeApi) -> bool:
    pods = (await api.list(POD, DRIVER)).items
    return not [pod for pod in pods if "app.kubernetes.io/component" in (pod["metadata"].get("labels") or {})]


async def test_a_webhook_without_that_condition_and_without_pods_is_taken_away_though_pods_wait(
    cluster: ControlPlane, api: KubeClient, driver: None, namespace: str
) -> None:
    """One that was installed earlier refuses all pods with claims when its pods are gone."""
    await half_a_gang(api, namespace)
    found = await api.get(MUTATING_WEBHOOK, "rackloom-webhook")
    for index, hook in enumerate(found["webhooks"]):
        kept = [
            condition for condition in hook["matchConditions"] if condition["name"] != "base-is-installed"
        ]
        change = {"op": "replace", "path": f"/webhooks/{index}/matchConditions", "value": kept}
        address = {
            "op": "replace",
            "path": f"/webhooks/{index}/clientConfig/url",
            "value": "https://localhost:1/x",
        }
        await api.patch(MUTATING_WEBHOOK, "rackloom-webhook", None, (change, address))
    await asyncio.to_thread(kubectl, cluster, "delete", "deployment", "-n", DRIVER, "--all")
    await until(lambda: has_no_webhook(api), "the webhook's pods are gone", PATIENCE)
    await until(lambda: is_refused(api, namespace), "pods with claims are refused", PATIENCE)
    code, outcome, _ = await uninstall(cluster, "--yes")
    assert code == 1
    assert [step["phase"] for step in outcome["done"]] == ["webhooks"]
    assert blocked(outcome["rest"]).keys() == {f"Pod {namespace}/waits"}
    await until(lambda: is_admitted(api, namespace), "and then they are not")
    await end_all(api, namespace)
    code, outcome, complaint = await uninstall(cluster, "--yes")
    assert (code, outcome["rest"]["steps"]) == (0, []), complaint
    assert await remains(api) == []


async def half_a_gang(api: KubeApi, namespace: str) -> None:
    """One of two members: the webhook gives it the gate, and it waits for the other."""
    meta = {
        "name": "waits",
        "namespace": namespace,
        "labels": {"rackloom.dev/gang": "half"},
        "annotations": {SIZE_ANNOTATION: "2"},
    }
    await api.create(POD, {"metadata": meta, "spec": {"containers": [{"name": "main", "image": "none"}]}})
    await until(lambda: has_plan(api), "the controller has a plan for it", PATIENCE)


async def has_plan(api: KubeApi) -> bool:
    return bool((await api.list(GANG_PLAN)).items)


async def has_no_webhook(api: KubeApi) -> bool:
    pods = (await api.list(POD, DRIVER, labels="app.kubernetes.io/component=webhook")).items
    return not pods


async def is_refused(api: KubeApi, namespace: str) -> bool:
    return not await is_admitted(api, namespace)


async def test_what_is_not_ours_stays(
    cluster: ControlPlane, api: KubeClient, driver: None, namespace: str
) -> None:
    """A Helm release, one of our names without our label, and a foreign object in our namespace."""
    label = {"labels": {"app.kubernetes.io/part-of": None}}
    await api.patch(DEVICE_CLASS, "gpu.nvidia.com", None, {"metadata": label})
    release = {"annotations": {"meta.helm.sh/release-name": "nvidia-dra-driver-gpu"}}
    await api.patch(DEVICE_CLASS, "mig.nvidia.com", None, {"metadata": release})
    await api.create(CONFIG_MAP, {"metadata": {"name": "notes", "namespace": DRIVER}})
    try:
        code, outcome, complaint = await uninstall(cluster, "--yes")
        assert (code, outcome["rest"]["steps"]) == (0, []), complaint
        left = {entry["what"]: entry["why"] for entry in outcome["rest"]["left"]}
        assert left["DeviceClass gpu.nvidia.com"] == "has a name of ours, but not our label"
        assert left["DeviceClass mig.nvidia.com"] == "belongs to the Helm release nvidia-dra-driver-gpu"
        assert left[f"Namespace {DRIVER}"] == f"holds what is not ours: ConfigMap {DRIVER}/notes"
        stays = {"gpu.nvidia.com", "mig.nvidia.com", DRIVER, "notes", "kube-root-ca.crt", "default"}
        assert await remains(api, besides=stays) == []
        assert await api.get(CONFIG_MAP, "notes", DRIVER)
    finally:
        for name in ("gpu.nvidia.com", "mig.nvidia.com"):
            await api.delete(DEVICE_CLASS, name)
        await api.delete(NAMESPACE, DRIVER)


async def test_who_may_not_look_is_told_so_without_a_traceback(cluster: ControlPlane) -> None:
    code, answer, complaint = await uninstall(cluster, "--kubeconfig", str(cluster.kubeconfig("nobody")))
    assert (code, answer) == (1, None)
    assert "Traceback" not in complaint
    assert "this account may not" in complaint
    assert "administrator" in complaint
