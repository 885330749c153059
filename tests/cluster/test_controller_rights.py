"""The controller's rights on a real API server with its own token, and the calls that are denied."""

import asyncio
import contextlib
import copy
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from tests.cluster.control_plane import ControlPlane
from tests.cluster.installed import SETTINGS, as_account
from tests.cluster.kubectl import tried
from tests.cluster.policies import CLIQUE, DAEMONS, DRIVER, slice_of
from tests.cluster.test_own_entries_only import plain_pod
from tests.waiting import until

from rackloom.claim.cluster.certificates import DaemonCertificates
from rackloom.claim.kube.api import KubeApi, Rejected
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import ComputeDomain, read_compute_domain
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    DAEMON_SET,
    LEASE,
    NETWORK_POLICY,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    SECRET,
    Object,
    ResourceKind,
)
from rackloom.core.domains.channel_mode import channel_slice_manifest, warm_domain_manifest
from rackloom.core.domains.manifests import (
    daemon_set,
    daemon_template,
    network_policy,
    shared_claim,
    workload_template,
)

pytestmark = pytest.mark.anyio
ACCOUNT = "rackloom-controller"
OTHER = "5a4c9d1e-77aa-4b1c-8d8e-2f60c0a4b922"
"""UID of another ComputeDomain."""
Change = Callable[[Any], None]
ROLE_BINDING = ResourceKind("rbac.authorization.k8s.io", "v1", "RoleBinding", "rolebindings", namespaced=True)
PDB = ResourceKind("policy", "v1", "PodDisruptionBudget", "poddisruptionbudgets", namespaced=True)
ROLE = ResourceKind("rbac.authorization.k8s.io", "v1", "Role", "roles", namespaced=True)


@pytest.fixture
async def controller(cluster: ControlPlane, api: KubeApi, base_shared: None) -> AsyncIterator[KubeApi]:
    """The API server with the token of a pod of the controller."""
    await plain_pod(api, ACCOUNT, ACCOUNT)
    async with as_account(api, cluster, ACCOUNT) as own:
        yield own


@pytest.fixture
async def domain(api: KubeApi, controller: KubeApi, namespace: str) -> ComputeDomain:
    """A user's ComputeDomain."""
    spec = {"channel": {"resourceClaimTemplate": {"name": "channel"}}}
    meta = {"name": "job", "namespace": namespace}
    return read_compute_domain(await api.create(COMPUTE_DOMAIN, {"metadata": meta, "spec": spec}))


async def refused(call: Any, why: str) -> None:
    with pytest.raises(Rejected, match=why):
        await call


def changed(obj: Object, change: Change) -> Object:
    new = copy.deepcopy(obj)
    change(new)
    return new


def in_pod(change: Change) -> Change:
    return lambda obj: change(obj["spec"]["template"]["spec"])


def in_container(change: Change) -> Change:
    return in_pod(lambda pod: change(pod["containers"][0]))


def _host_path(pod: Any) -> None:
    pod["volumes"].append({"name": "host", "hostPath": {"path": "/"}})


def _projected_token(pod: Any) -> None:
    token = {"serviceAccountToken": {"path": "token", "audience": "vault"}}
    pod["volumes"].append({"name": "token", "projected": {"sources": [token]}})


def _secret_of_another(pod: Any) -> None:
    (volume,) = (volume for volume in pod["volumes"] if "secret" in volume)
    volume["secret"]["secretName"] = names.imex_authority_name(OTHER)


def _another_name(obj: Any) -> None:
    obj["metadata"]["name"] = "mine"


def _no_label(obj: Any) -> None:
    obj["metadata"]["labels"] = {}


def _variable(name: str, value: str) -> Change:
    return in_container(lambda container: container["env"].append({"name": name, "value": value}))


def _secret_variable(container: Any) -> None:
    reference = {"name": names.imex_authority_name(OTHER), "key": "tls.key"}
    container["env"].append({"name": "LOG_VERBOSITY", "valueFrom": {"secretKeyRef": reference}})


def _all_gpus(container: Any) -> None:
    (variable,) = (each for each in container["env"] if each["name"] == "NVIDIA_VISIBLE_DEVICES")
    variable["value"] = "all"


FORBIDDEN: dict[str, tuple[Change, str]] = {
    "name": (_another_name, "DaemonSets of ComputeDomains"),
    "label": (_no_label, "DaemonSets of ComputeDomains"),
    "image": (
        in_container(lambda container: container.update(image="evil:1")),
        "from the image of the controller",
    ),
    "second container": (
        in_pod(lambda pod: pod["containers"].append({"name": "x", "image": "rackloom:0.1.0"})),
        "one container",
    ),
    "init container": (
        in_pod(lambda pod: pod.update(initContainers=[{"name": "x", "image": "rackloom:0.1.0"}])),
        "one container",
    ),
    "account": (
        in_pod(lambda pod: pod.update(serviceAccountName="default")),
        "run as compute-domain-daemon-service-account",
    ),
    "command": (in_container(lambda container: container.update(command=["sh"])), "rackloom imex run"),
    "arguments": (
        in_container(lambda container: container.update(args=["--program", "sh"])),
        "rackloom imex run",
    ),
    "probe": (
        in_container(lambda container: container.update(livenessProbe={"exec": {"command": ["sh"]}})),
        "requests to the pod",
    ),
    "probe of another host": (
        in_container(lambda container: container["livenessProbe"]["httpGet"].update(host="10.0.0.1")),
        "requests to the pod",
    ),
    "hook": (
        in_container(
            lambda container: container.update(lifecycle={"postStart": {"exec": {"command": ["sh"]}}})
        ),
        "rackloom imex run",
    ),
    "program": (_variable("IMEX_PROGRAM", "sh -c id"), "variables that the controller gives"),
    "variable of a Secret": (in_container(_secret_variable), "variables that the controller gives"),
    "GPUs": (in_container(_all_gpus), "variables that the controller gives"),
    "host path": (in_pod(_host_path), "nothing of the host"),
    "token": (in_pod(_projected_token), "nothing of the host"),
    "Secret of another": (in_pod(_secret_of_another), "certificate of their own"),
    "claim of another": (
        in_pod(lambda pod: pod["resourceClaims"][0].update(resourceClaimTemplateName="channel")),
        "template of their own",
    ),
    "host network": (in_pod(lambda pod: pod.update(hostNetwork=True)), "no namespace of the host"),
    # With processes shared in the pod as well, the API server's own rule would answer first.
    "host processes": (
        in_pod(lambda pod: pod.update(hostPID=True, shareProcessNamespace=False)),
        "no namespace of the host",
    ),
    "node": (in_pod(lambda pod: pod.update(nodeName="n")), "no node without the scheduler"),
    "runtime": (in_pod(lambda pod: pod.update(runtimeClassName="other")), "no other runtime"),
    "annotation": (
        lambda obj: obj["spec"]["template"]["metadata"].update(annotations={"cdi.k8s.io/x": "y/z=all"}),
        "no other runtime",
    ),
    "privileged": (
        in_container(
            lambda container: container["securityContext"].update(
                privileged=True, allowPrivilegeEscalation=True
            )
        ),
        "without capabilities",
    ),
    "capability": (
        in_container(
            lambda container: container["securityContext"]["capabilities"].update(add=["SYS_ADMIN"])
        ),
        "without capabilities",
    ),
    "capabilities kept": (
        in_container(lambda container: container["securityContext"].pop("capabilities")),
        "without capabilities",
    ),
    "seccomp": (
        in_pod(lambda pod: pod["securityContext"]["seccompProfile"].update(type="Unconfined")),
        "seccomp profile",
    ),
    "seccomp of the container": (
        in_container(
            lambda container: container["securityContext"].update(seccompProfile={"type": "Unconfined"})
        ),
        "seccomp profile",
    ),
    "writable image": (
        in_container(lambda container: container["securityContext"].update(readOnlyRootFilesystem=False)),
        "read-only image",
    ),
}


async def test_the_controller_starts_imex_daemons_and_no_other_programs(
    controller: KubeApi, domain: ComputeDomain
) -> None:
    made = daemon_set(domain, SETTINGS, DAEMONS)
    for change, why in FORBIDDEN.values():
        await refused(controller.create(DAEMON_SET, changed(made, change), dry_run=True), why)
    await refused(controller.create(DAEMON_SET, daemon_set(domain, SETTINGS, DRIVER)), "forbidden")

    daemon = msgspec.structs.replace(SETTINGS.daemon, imex_settings={"LOG_LEVEL": "3"})
    chosen = daemon_set(domain, msgspec.structs.replace(SETTINGS, daemon=daemon), DAEMONS)
    await controller.create(DAEMON_SET, chosen, dry_run=True)

    name = names.daemon_name(domain.uid)
    await controller.create(DAEMON_SET, made)
    container = {"name": "compute-domain-daemon", "image": "evil:1"}
    for change in (
        {"spec": {"template": {"spec": {"containers": [container]}}}},
        {"metadata": {"annotations": {"a": "b"}}},
        {"metadata": {"finalizers": [names.FINALIZER, "example.com/keep"]}},
    ):
        await refused(controller.patch(DAEMON_SET, name, DAEMONS, change), "changes nothing else")
    await controller.patch(DAEMON_SET, name, DAEMONS, {"metadata": {"finalizers": []}})
    await controller.delete(DAEMON_SET, name, DAEMONS)


async def test_no_daemon_set_is_made_in_another_namespace_whatever_roles_say(
    api: KubeApi, controller: KubeApi, domain: ComputeDomain
) -> None:
    """To take over daemons of earlier releases, the controller also has a role in their namespace."""
    meta = {"name": "more", "namespace": DRIVER}
    rule = {"apiGroups": ["apps"], "resources": ["daemonsets"], "verbs": ["create"]}
    await api.create(ROLE, {"metadata": meta, "rules": [rule]})
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": DRIVER}
    role = {"apiGroup": ROLE.group, "kind": ROLE.kind, "name": "more"}
    await api.create(ROLE_BINDING, {"metadata": meta, "subjects": [subject], "roleRef": role})

    async def is_held_by_the_policy() -> bool:
        try:
            await controller.create(DAEMON_SET, daemon_set(domain, SETTINGS, DRIVER), dry_run=True)
        except Rejected as error:
            return "in namespace rackloom-imex only" in error.message
        return False

    await until(is_held_by_the_policy, "the role counts, and the policy says no")


async def test_pod_security_keeps_privileged_pods_out_of_the_daemons_namespace(
    api: KubeApi, domain: ComputeDomain
) -> None:
    """Also if an administrator creates them, so a mistake in our code would be refused too."""
    spec = daemon_set(domain, SETTINGS, DAEMONS)["spec"]["template"]["spec"]
    pod = {"metadata": {"name": "probe", "namespace": DAEMONS}, "spec": spec}
    await api.create(POD, pod, dry_run=True)

    def privileged(pod: Any) -> None:
        pod["spec"]["containers"][0]["securityContext"] = {"privileged": True}

    await refused(api.create(POD, changed(pod, privileged), dry_run=True), "violates PodSecurity")


async def test_the_controller_reads_and_writes_certificates_of_daemons_only(
    api: KubeApi, controller: KubeApi, domain: ComputeDomain
) -> None:
    for namespace in (DAEMONS, DRIVER, "kube-system", None):
        await refused(controller.list(SECRET, namespace), "forbidden")
    for namespace in (DRIVER, "kube-system", domain.namespace):
        await refused(controller.get(SECRET, names.imex_secret_name(domain.uid), namespace), "forbidden")

    await DaemonCertificates(controller, lambda: 1.8e9).ensure(domain.uid, DAEMONS)
    made = await controller.get(SECRET, names.imex_secret_name(domain.uid), DAEMONS)
    new = {key: made[key] for key in ("type", "data")}
    new["metadata"] = {key: made["metadata"][key] for key in ("name", "namespace", "labels")}
    name = new["metadata"]["name"]
    token = {**new, "type": "kubernetes.io/service-account-token", "data": {}}
    token["metadata"] = {
        **new["metadata"],
        "name": names.imex_secret_name(OTHER),
        "labels": {names.COMPUTE_DOMAIN_LABEL: OTHER},
        "annotations": {"kubernetes.io/service-account.name": "compute-domain-daemon-service-account"},
    }
    renamed = {**new, "metadata": {**new["metadata"], "name": "pull-secret"}}
    for forbidden in (token, renamed):
        await refused(controller.create(SECRET, forbidden, dry_run=True), "no other Secrets")
    relabelled = {"metadata": {"labels": {names.COMPUTE_DOMAIN_LABEL: OTHER}}}
    await refused(controller.patch(SECRET, name, DAEMONS, relabelled), "no other Secrets")
    noted = {"metadata": {"annotations": {"a": "b"}}}
    await refused(controller.patch(SECRET, name, DAEMONS, noted), "stays that of its ComputeDomain")

    await api.create(SECRET, {"metadata": {"name": "registry", "namespace": DAEMONS}})
    await refused(controller.delete(SECRET, "registry", DAEMONS), "no other Secrets")
    for name in (names.imex_secret_name(domain.uid), names.imex_authority_name(domain.uid)):
        await controller.patch(SECRET, name, DAEMONS, {"metadata": {"finalizers": []}})
        await controller.delete(SECRET, name, DAEMONS)


async def test_the_controller_takes_away_its_own_claims_templates_and_slices_only(
    api: KubeApi, controller: KubeApi, domain: ComputeDomain
) -> None:
    namespace = domain.namespace
    own_claim, own_pool = shared_claim(domain), channel_slice_manifest(CLIQUE)
    own_template = workload_template(domain, SETTINGS)
    for kind, obj in (
        (RESOURCE_CLAIM, own_claim),
        (RESOURCE_SLICE, own_pool),
        (RESOURCE_CLAIM_TEMPLATE, own_template),
        (RESOURCE_CLAIM_TEMPLATE, daemon_template(domain, DAEMONS)),
    ):
        await controller.create(kind, obj)

    users = changed(own_claim, _another_name)
    unowned = changed(own_claim, lambda obj: obj["metadata"].update(ownerReferences=[], namespace="default"))
    for claim in (users, unowned):
        await refused(controller.create(RESOURCE_CLAIM, claim), "that the pods of a ComputeDomain share")
        await api.create(RESOURCE_CLAIM, claim)
        meta = claim["metadata"]
        call = controller.delete(RESOURCE_CLAIM, meta["name"], meta["namespace"])
        await refused(call, "that the pods of a ComputeDomain share")
    await api.delete(RESOURCE_CLAIM, unowned["metadata"]["name"], "default")

    def users_template(template: Any) -> None:
        template["metadata"] = {"name": "users", "namespace": namespace}

    await api.create(RESOURCE_CLAIM_TEMPLATE, changed(own_template, users_template))
    call = controller.delete(RESOURCE_CLAIM_TEMPLATE, "users", namespace)
    await refused(call, "templates of ComputeDomains, and no others")

    await api.create(RESOURCE_SLICE, slice_of("n", "of-a-node"))
    await refused(controller.delete(RESOURCE_SLICE, "of-a-node"), "no devices of a node")
    for forbidden in (
        slice_of("n", "forged"),
        changed(own_pool, lambda obj: obj["spec"]["pool"].update(name="n")),
        changed(own_pool, lambda obj: obj["spec"].update(driver=names.GPU_DRIVER)),
    ):
        await refused(controller.create(RESOURCE_SLICE, forbidden, dry_run=True), "no devices of a node")
    await api.delete(RESOURCE_SLICE, "of-a-node")

    kept = {"metadata": {"finalizers": [names.FINALIZER, "example.com/keep"]}}
    call = controller.patch(RESOURCE_CLAIM_TEMPLATE, domain.template, namespace, kept)
    await refused(call, "lets go of what it made")
    free = {"metadata": {"finalizers": []}}
    for name, place in ((domain.template, namespace), (names.daemon_name(domain.uid), DAEMONS)):
        await controller.patch(RESOURCE_CLAIM_TEMPLATE, name, place, free)
        await controller.delete(RESOURCE_CLAIM_TEMPLATE, name, place)
    await controller.delete(RESOURCE_CLAIM, own_claim["metadata"]["name"], namespace)
    await controller.delete(RESOURCE_SLICE, own_pool["metadata"]["name"])


def _from_anywhere(policy: Any) -> None:
    policy["spec"]["ingress"][0].pop("from")


def _other_port(policy: Any) -> None:
    policy["spec"]["ingress"][0]["ports"].append({"protocol": "TCP", "port": 22})


def _every_namespace(policy: Any) -> None:
    policy["spec"]["ingress"][0]["from"][0]["namespaceSelector"] = {}


def _an_address(policy: Any) -> None:
    policy["spec"]["ingress"][0]["from"].append({"ipBlock": {"cidr": "0.0.0.0/0"}})


def _of_all_pods(policy: Any) -> None:
    policy["spec"]["podSelector"] = {}


def _of_any_daemon(policy: Any) -> None:
    policy["spec"]["ingress"][0]["from"] = [{"podSelector": {}}]


async def test_the_controller_opens_the_ports_of_imex_to_the_same_compute_domain_only(
    api: KubeApi, controller: KubeApi, domain: ComputeDomain
) -> None:
    """The API server checks the policies' form. No network enforces them here."""
    made = network_policy(domain, DAEMONS)
    for change in (_from_anywhere, _other_port, _every_namespace, _an_address, _of_all_pods, _of_any_daemon):
        call = controller.create(NETWORK_POLICY, changed(made, change), dry_run=True)
        await refused(call, "those of their own ComputeDomain, on ports")
    await refused(controller.create(NETWORK_POLICY, changed(made, _another_name)), "and no others")
    await refused(controller.delete(NETWORK_POLICY, "nobody", DAEMONS), "and no others")
    await refused(controller.delete(NETWORK_POLICY, "rackloom-metrics", DRIVER), "forbidden")
    await controller.create(NETWORK_POLICY, made)
    name = made["metadata"]["name"]
    opened = {"spec": {"ingress": [{}]}}
    await refused(controller.patch(NETWORK_POLICY, name, DAEMONS, opened), "changes nothing else")
    await controller.patch(NETWORK_POLICY, name, DAEMONS, {"metadata": {"finalizers": []}})
    await controller.delete(NETWORK_POLICY, name, DAEMONS)


async def test_one_controller_stays_while_nodes_are_drained(
    cluster: ControlPlane, api: KubeApi, base_shared: None
) -> None:
    async def ready() -> list[str]:
        pods = (await api.list(POD, DRIVER, labels="app.kubernetes.io/component=controller")).items
        found = [pod["metadata"]["name"] for pod in pods if is_ready(pod)]
        budget = await api.get(PDB, ACCOUNT, DRIVER)
        seen = budget.get("status", {}).get("currentHealthy") == 2
        return found if len(found) == 2 and seen else []

    both = await until(ready, "both replicas are ready, and counted")
    # A drain cordons first. Without it, a replacement may be ready before the second eviction.
    async with cordoned(api):
        answers = []
        for name in both:
            meta = {"name": name, "namespace": DRIVER}
            body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": meta}
            path = f"/api/v1/namespaces/{DRIVER}/pods/{name}/eviction"
            words = ("create", "--raw", path, "-f", "-")
            answers.append(await asyncio.to_thread(tried, cluster, *words, given=json.dumps(body)))
    assert [answer.returncode for answer in answers] == [0, 1]
    assert "disruption budget" in answers[1].stderr


@contextlib.asynccontextmanager
async def cordoned(api: KubeApi) -> AsyncIterator[None]:
    """No node takes new pods."""
    nodes = [node["metadata"]["name"] for node in (await api.list(NODE)).items]
    for name in nodes:
        await api.patch(NODE, name, None, {"spec": {"unschedulable": True}})
    try:
        yield
    finally:
        # The next test's pods need the node too.
        for name in nodes:
            await api.patch(NODE, name, None, {"spec": {"unschedulable": None}})


def is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


async def test_the_controller_marks_compute_domains_of_users_and_changes_nothing_else(
    controller: KubeApi, domain: ComputeDomain
) -> None:
    where = (COMPUTE_DOMAIN, domain.name, domain.namespace)
    mark = {"finalizers": [names.FINALIZER], "labels": {names.COMPUTE_DOMAIN_LABEL: domain.uid}}
    await controller.patch(*where, {"metadata": mark})
    for change in (
        {"labels": {names.COMPUTE_DOMAIN_LABEL: OTHER}},
        {"labels": {names.WARM_CLIQUE_LABEL: CLIQUE}},
        {"annotations": {names.ALLOW_DELETION_ANNOTATION: "true"}},
        {"finalizers": [names.FINALIZER, "example.com/keep"]},
    ):
        await refused(controller.patch(*where, {"metadata": change}), "and nothing else")
    await controller.patch(*where, {"metadata": {"finalizers": []}})
    await refused(controller.delete(*where), "forbidden")

    warm = warm_domain_manifest(CLIQUE, SETTINGS)
    await refused(
        controller.create(COMPUTE_DOMAIN, changed(warm, _no_label), dry_run=True), "keeps a clique warm"
    )
    await controller.create(COMPUTE_DOMAIN, warm)
    await controller.delete(COMPUTE_DOMAIN, warm["metadata"]["name"], DAEMONS)


async def test_the_controller_has_one_lease(controller: KubeApi) -> None:
    lease = {"metadata": {"name": ACCOUNT, "namespace": DRIVER}, "spec": {}}
    made = await controller.create(LEASE, lease)
    await controller.replace(LEASE, made)
    await refused(controller.get(LEASE, "rackloom-webhook", DRIVER), "forbidden")
