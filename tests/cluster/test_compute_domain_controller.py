"""What deploy/kubernetes installs, on a real control plane.

The controller with just its own rights, and the policies that hold daemons and plugins to their own node.
"""

import asyncio
import contextlib
import json
import random
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.waiting import LEAVE, until

from rackloom.claim.cluster.controller import Controller
from rackloom.claim.cluster.settings import DaemonSettings, Settings
from rackloom.claim.domain import names
from rackloom.claim.domain.isolation import Isolation
from rackloom.claim.domain.membership import join, leave, with_status
from rackloom.claim.domain.objects import Clique, Readiness, Ref, clique, clique_json, read_status
from rackloom.claim.kube.api import Kind, KubeApi, KubeError, NotFound, Object, Rejected
from rackloom.claim.kube.events import Recorder
from rackloom.claim.kube.kinds import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    DAEMON_SET,
    EVENT,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    SECRET,
)
from rackloom.claim.kube.lightkube_api import LightkubeApi, connect

pytestmark = pytest.mark.anyio
BASE = Path(__file__).parents[2] / "deploy" / "kubernetes" / "base"
DRIVER = "rackloom-system"
CLUSTER_ROLE = Kind("rbac.authorization.k8s.io", "v1", "ClusterRole", "clusterroles", namespaced=False)
CLUSTER_ROLE_BINDING = Kind(
    "rbac.authorization.k8s.io", "v1", "ClusterRoleBinding", "clusterrolebindings", namespaced=False
)
CLIQUE = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31.1"
SETTINGS = Settings(daemon=DaemonSettings(image="rackloom:test"))
DAEMON_ACCOUNT = "compute-domain-daemon-service-account"


def kubectl(cluster: ControlPlane, *words: str) -> str:
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("there is no kubectl on the PATH")
    command = [program, "--kubeconfig", str(cluster.admin), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
async def installed(cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes) -> AsyncIterator[None]:
    """deploy/kubernetes, with nodes for its controller's pods."""
    await add_nodes(1)
    await asyncio.to_thread(kubectl, cluster, "apply", "--server-side", "-k", str(BASE))
    await until(lambda: is_served(api), "the new types are served")
    await until(lambda: asyncio.to_thread(policies_count, cluster), "the policies count")
    yield
    await asyncio.to_thread(kubectl, cluster, "delete", "-k", str(BASE), *LEAVE)
    await asyncio.to_thread(kubectl, cluster, "wait", "--for=delete", f"namespace/{DRIVER}", "--timeout=120s")


async def is_served(api: KubeApi) -> bool:
    """A type that was just installed answers "storage is (re)initializing" for a moment."""
    try:
        await api.list(COMPUTE_DOMAIN)
        await api.list(COMPUTE_DOMAIN_CLIQUE)
    except KubeError:
        return False
    return True


def policies_count(cluster: ControlPlane) -> bool:
    """A policy counts a moment after it was made. An account without a token of a pod is refused by each."""
    program = shutil.which("kubectl") or "kubectl"
    accounts = ("rackloom-node-imex", DAEMON_ACCOUNT)
    plugin, daemon = (f"system:serviceaccount:{DRIVER}:{name}" for name in accounts)
    label = ("label", "--overwrite", "--dry-run=server")
    create = ("create", "--dry-run=server", "-f", "-")
    clique_object = clique_json(Clique(compute_domain="probe", clique_id=CLIQUE), DRIVER)
    published = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", **slice_of("none", "probe")}
    probes = (
        (plugin, (*label, "nodes", "--all", "probe=1"), None),
        (plugin, create, published),
        (daemon, create, clique_object),
        (daemon, (*label, "pods", "--all", "-n", DRIVER, "probe=1"), None),
    )
    for account_, words, body in probes:
        command = [program, "--kubeconfig", str(cluster.admin), f"--as={account_}", *words]
        text = None if body is None else json.dumps(body)
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
        if "ValidatingAdmissionPolicy" not in done.stderr:
            return False
    return True


async def pod_of(api: KubeApi, prefix: str) -> Object:
    async def running() -> Object | None:
        for pod in (await api.list(POD, DRIVER)).items:
            if pod["metadata"]["name"].startswith(prefix) and pod["status"]["phase"] == "Running":
                return pod
        return None

    pod = await until(running, f"a pod {prefix}* runs")
    assert pod is not None
    return pod


async def account(api: KubeApi, cluster: ControlPlane, pod: str, name: str) -> LightkubeApi:
    found = await pod_of(api, pod)
    token = await asyncio.to_thread(cluster.bound_token, found, name)
    return connect(cluster.kubeconfig_of_token(f"{pod}-{time.monotonic_ns()}", token))


async def plain_pod(api: KubeApi, name: str, service_account: str) -> Object:
    spec = {"serviceAccountName": service_account, "containers": [{"name": "main", "image": "none"}]}
    await api.create(POD, {"metadata": {"name": name, "namespace": DRIVER}, "spec": spec})
    return await pod_of(api, name)


@contextlib.asynccontextmanager
async def controller(
    api: KubeApi, cluster: ControlPlane, settings: Settings = SETTINGS
) -> AsyncIterator[None]:
    """The controller, with the token of its own pod."""
    async with await account(api, cluster, "rackloom-controller", "rackloom-controller") as own:
        recorder = Recorder(own, "rackloom-controller", "test", time.time)
        one = Controller(own, settings, recorder, time.time, random.Random(1))
        task = asyncio.create_task(one.run())
        try:
            yield
        finally:
            assert not task.done(), task.exception()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def domain(api: KubeApi, namespace: str, name: str = "job", **labels: str) -> Object:
    spec = {"channel": {"resourceClaimTemplate": {"name": "imex-channel-0"}}}
    meta = {"name": name, "namespace": namespace, "labels": labels}
    return await api.create(COMPUTE_DOMAIN, {"metadata": meta, "spec": spec})


async def has_reason(api: KubeApi, namespace: str, reason: str, name: str = "job") -> bool:
    status = read_status(await api.get(COMPUTE_DOMAIN, name, namespace))
    return any(one.reason == reason for one in status.conditions)


async def is_gone(api: KubeApi, kind: Any, name: str, namespace: str | None) -> bool:
    try:
        await api.get(kind, name, namespace)
    except NotFound:
        return True
    return False


async def test_the_life_of_a_compute_domain_with_the_controllers_own_rights(
    cluster: ControlPlane, api: KubeApi, namespace: str, installed: None
) -> None:
    async with controller(api, cluster):
        made = await domain(api, namespace)
        uid = made["metadata"]["uid"]
        await until(lambda: has_reason(api, namespace, "NoNodes"), "the status is told")
        template = await api.get(RESOURCE_CLAIM_TEMPLATE, "imex-channel-0", namespace)
        assert template["metadata"]["finalizers"] == [names.FINALIZER]
        daemons = await api.get(DAEMON_SET, names.daemon_name(uid), DRIVER)
        assert daemons["status"]["desiredNumberScheduled"] == 0
        assert (await api.get(SECRET, names.imex_secret_name(uid), DRIVER))["type"] == "kubernetes.io/tls"
        shown = await asyncio.to_thread(kubectl, cluster, "get", "computedomains", "-A")
        assert "NotReady" in shown
        assert "imex-channel-0" in shown

        second = await domain(api, namespace, "second")
        await until(lambda: has_reason(api, namespace, "TemplateNameTaken", "second"), "a collision is told")
        events = (await api.list(EVENT, namespace, fields="involvedObject.name=second")).items
        assert {one["reason"] for one in events} >= {"TemplateNameTaken"}
        with pytest.raises(Rejected, match="immutable"):
            await api.patch(COMPUTE_DOMAIN, "second", namespace, {"spec": {"numNodes": 3}})

        await api.delete(COMPUTE_DOMAIN, "job", namespace)
        await until(lambda: is_gone(api, COMPUTE_DOMAIN, "job", namespace), "the domain is gone")
        assert await is_gone(api, DAEMON_SET, names.daemon_name(uid), DRIVER)
        assert await is_gone(api, SECRET, names.imex_authority_name(uid), DRIVER)

        async def healed() -> bool:
            found = await api.get(RESOURCE_CLAIM_TEMPLATE, "imex-channel-0", namespace)
            return bool(found["metadata"]["labels"][names.COMPUTE_DOMAIN_LABEL] == second["metadata"]["uid"])

        async def template_of_second() -> bool:
            with contextlib.suppress(NotFound):
                return await healed()
            return False

        await until(template_of_second, "the second gets the name when the first is gone")
        await api.delete(COMPUTE_DOMAIN, "second", namespace)
        await until(lambda: is_gone(api, COMPUTE_DOMAIN, "second", namespace), "the second is gone")


async def test_a_daemon_writes_its_own_entry_only(
    cluster: ControlPlane, api: KubeApi, namespace: str, installed: None
) -> None:
    one, two = [await plain_pod(api, f"daemon-{number}", DAEMON_ACCOUNT) for number in (1, 2)]
    here, there = Ref(one["metadata"]["name"], one["metadata"]["uid"]), Ref("daemon-x", "uid-x")
    node = one["spec"]["nodeName"]
    value = Clique(compute_domain="cd", clique_id=CLIQUE)
    by_admin = join(value, node="other", ip_address="10.0.0.9", pod=there, max_nodes=18)
    read = await api.create(COMPUTE_DOMAIN_CLIQUE, clique_json(by_admin, DRIVER))
    async with await account(api, cluster, "daemon-1", DAEMON_ACCOUNT) as daemon:
        forged = join(clique(read), node="elsewhere", ip_address="10.0.0.1", pod=here, max_nodes=18)
        with pytest.raises(Rejected, match="own node only"):
            await daemon.replace(COMPUTE_DOMAIN_CLIQUE, clique_json(forged, DRIVER, read))

        own = join(clique(read), node=node, ip_address="10.0.0.1", pod=here, max_nodes=18)
        written = await daemon.replace(COMPUTE_DOMAIN_CLIQUE, clique_json(own, DRIVER, read))
        assert [one.node_name for one in clique(written).daemons] == ["other", node]
        thrown_out = leave(clique(written), node="other", pod=there)
        with pytest.raises(Rejected, match="own node only"):
            await daemon.replace(COMPUTE_DOMAIN_CLIQUE, clique_json(thrown_out, DRIVER, written))
        left = leave(clique(written), node=node, pod=here)
        await daemon.replace(COMPUTE_DOMAIN_CLIQUE, clique_json(left, DRIVER, written))

        said = {"metadata": {"labels": {names.CLIQUE_ID_LABEL: CLIQUE}}}
        await daemon.patch(POD, "daemon-1", DRIVER, said)
        with pytest.raises(Rejected, match="own pod only"):
            await daemon.patch(POD, two["metadata"]["name"], DRIVER, said)
        with pytest.raises(Rejected, match="forbidden"):
            await daemon.list(NODE)
        with pytest.raises(Rejected, match="forbidden"):
            await daemon.list(SECRET, DRIVER)


def slice_of(node: str, name: str) -> Object:
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    return {
        "metadata": {"name": name},
        "spec": {"driver": names.IMEX_DRIVER, "nodeName": node, "pool": pool, "devices": []},
    }


async def test_a_plugin_writes_its_own_node_only(
    cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes, installed: None
) -> None:
    (other,) = await add_nodes(1)
    pod = await plain_pod(api, "plugin", "rackloom-node-imex")
    node = pod["spec"]["nodeName"]
    other = other if other != node else (await add_nodes(1))[0]
    label = {"metadata": {"labels": {names.COMPUTE_DOMAIN_LABEL: "cd"}}}
    async with await account(api, cluster, "plugin", "rackloom-node-imex") as plugin:
        await plugin.patch(NODE, node, None, label)
        with pytest.raises(Rejected, match="own node only"):
            await plugin.patch(NODE, other, None, label)
        with pytest.raises(Rejected, match="no labels but"):
            await plugin.patch(NODE, node, None, {"metadata": {"labels": {"tier": "gold"}}})
        with pytest.raises(Rejected, match="nothing else"):
            await plugin.patch(NODE, node, None, {"spec": {"unschedulable": True}})
        await plugin.patch(NODE, node, None, {"metadata": {"labels": {names.COMPUTE_DOMAIN_LABEL: None}}})

        await plugin.create(RESOURCE_SLICE, slice_of(node, "own"))
        with pytest.raises(Rejected, match="own node only"):
            await plugin.create(RESOURCE_SLICE, slice_of(other, "foreign"))
        await api.create(RESOURCE_SLICE, slice_of(other, "foreign"))
        with pytest.raises(Rejected, match="own node only"):
            await plugin.delete(RESOURCE_SLICE, "foreign")
        await plugin.delete(RESOURCE_SLICE, "own")
        await api.delete(RESOURCE_SLICE, "foreign")
        of_another_driver = slice_of(node, "disks")
        of_another_driver["spec"]["driver"] = "disks.example.com"
        with pytest.raises(Rejected, match="own driver only: compute-domain"):
            await plugin.create(RESOURCE_SLICE, of_another_driver)
        of_another_pool = slice_of(node, "borrowed")
        of_another_pool["spec"]["pool"]["name"] = other
        with pytest.raises(Rejected, match="pool of its own node only"):
            await plugin.create(RESOURCE_SLICE, of_another_pool)


async def test_a_plugin_tells_the_status_of_its_own_nics_only(
    cluster: ControlPlane, api: KubeApi, namespace: str, installed: None
) -> None:
    pod = await plain_pod(api, "plugin", "rackloom-node-nic")
    node = pod["spec"]["nodeName"]
    await nic_claim(api, namespace, node)
    async with await account(api, cluster, "plugin", "rackloom-node-nic") as plugin:

        async def tell(pool: str, driver: str = "dra.net", **status: Any) -> bool:
            told = {"status": {"devices": [{"driver": driver, "pool": pool, "device": "nic-0"}], **status}}
            await plugin.patch(RESOURCE_CLAIM, "nic", namespace, told, subresource="status")
            return True

        await tell(node)
        with pytest.raises(Rejected):
            await tell(node, driver=names.GPU_DRIVER)
        async with more_rights(api):
            # Kubernetes 1.36 asks for rights that the plugin has not; older servers have the policy alone.
            with pytest.raises(Rejected, match="NICs of its own node only"):
                await tell(node, driver=names.GPU_DRIVER)
            with pytest.raises(Rejected, match="which devices a claim has"):
                await tell(node, reservedFor=[{"resource": "pods", "name": "mine", "uid": "mine"}])
            with pytest.raises(Rejected, match="which devices a claim has"):
                await tell(node, allocation=None)
        claim = await api.get(RESOURCE_CLAIM, "nic", namespace)
        assert [(one["driver"], one["pool"]) for one in claim["status"]["devices"]] == [("dra.net", node)]
        with pytest.raises(Rejected, match="forbidden"):
            await plugin.patch(RESOURCE_CLAIM, "nic", namespace, {"metadata": {"labels": {"a": "b"}}})


@contextlib.asynccontextmanager
async def more_rights(api: KubeApi) -> AsyncIterator[None]:
    """The plugin's account may say anything in the status of claims, for Kubernetes' own rules."""
    rule = {
        "apiGroups": ["resource.k8s.io"],
        "resources": ["resourceclaims/driver", "resourceclaims/binding"],
        "verbs": ["*"],
    }
    meta = {"name": "more-than-shipped"}
    await api.create(CLUSTER_ROLE, {"metadata": meta, "rules": [rule]})
    subject = {"kind": "ServiceAccount", "name": "rackloom-node-nic", "namespace": DRIVER}
    role = {"apiGroup": CLUSTER_ROLE.group, "kind": CLUSTER_ROLE.kind, "name": meta["name"]}
    await api.create(CLUSTER_ROLE_BINDING, {"metadata": meta, "subjects": [subject], "roleRef": role})
    await asyncio.sleep(2.0)  # Rights count a moment after they were given, and nothing tells when.
    yield
    await api.delete(CLUSTER_ROLE_BINDING, meta["name"])
    await api.delete(CLUSTER_ROLE, meta["name"])


def allocation_of(node: str) -> Object:
    results = [
        {"request": "r", "driver": driver, "pool": node, "device": "nic-0"}
        for driver in ("dra.net", names.GPU_DRIVER)
    ]
    here = {"key": "metadata.name", "operator": "In", "values": [node]}
    return {"devices": {"results": results}, "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [here]}]}}


async def nic_claim(api: KubeApi, namespace: str, node: str) -> None:
    """A claim that has a NIC of this node, and a GPU of it."""
    spec = {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "nic", "count": 2}}]}}
    claim = {"metadata": {"name": "nic", "namespace": namespace}, "spec": spec}
    made = await api.create(RESOURCE_CLAIM, claim)
    status = {"allocation": allocation_of(node)}
    await api.replace(RESOURCE_CLAIM, {**made, "status": status}, subresource="status")


async def test_two_jobs_in_one_warm_clique_get_two_channels_from_the_real_scheduler(
    cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes, namespace: str, installed: None
) -> None:
    """Channel mode: the slice is accepted, the label offers it, and each job's pods share one channel."""
    labels = {names.GPU_CLIQUE_LABEL: CLIQUE, names.ISOLATION_LABEL: "channel"}
    nodes = await add_nodes(2, labels=labels)
    async with controller(api, cluster):
        warm = await until(lambda: warm_domain(api), "a warm domain")
        assert warm is not None
        await ready_daemons(api, warm["metadata"]["uid"], nodes)
        await until(lambda: offered(api, nodes), "the channels are offered on both nodes")
        channels = set()
        for job in ("one", "two"):
            made = await domain_of_job(api, namespace, job)
            shared = names.shared_claim_name(made["metadata"]["uid"])
            await until(lambda shared=shared: exists(api, shared, namespace), "the shared claim")
            for number in range(2):
                await claiming_pod(api, namespace, f"{job}-{number}", shared)
            device = await until(lambda shared=shared: allocated(api, shared, namespace), "it is allocated")
            channels.add(device)
        assert len(channels) == 2
        assert names.channel_device_name(0) not in channels
        for kind in (POD, COMPUTE_DOMAIN):
            for one in (await api.list(kind, namespace)).items:
                await api.delete(kind, one["metadata"]["name"], namespace, grace_seconds=0)

        async def none_left() -> bool:
            return not (await api.list(COMPUTE_DOMAIN, namespace)).items

        await until(none_left, "the jobs are gone")
        for node in nodes:
            await api.patch(NODE, node, None, {"metadata": {"labels": {names.ISOLATION_LABEL: "domain"}}})

        async def withdrawn() -> bool:
            slices = (await api.list(RESOURCE_SLICE, labels=names.WARM_CLIQUE_LABEL)).items
            return not slices and await warm_domain(api) is None

        await until(withdrawn, "nothing of channel mode is left")
        marked = (await api.list(NODE, labels=names.WARM_CLIQUE_LABEL)).items
        assert not marked


async def domain_of_job(api: KubeApi, namespace: str, job: str) -> Object:
    spec = {"channel": {"resourceClaimTemplate": {"name": f"channel-{job}"}}}
    labels = {names.ISOLATION_LABEL: Isolation.CHANNEL.value}
    meta = {"name": job, "namespace": namespace, "labels": labels}
    return await api.create(COMPUTE_DOMAIN, {"metadata": meta, "spec": spec})


async def warm_domain(api: KubeApi) -> Object | None:
    found = (await api.list(COMPUTE_DOMAIN, DRIVER, labels=names.WARM_CLIQUE_LABEL)).items
    return found[0] if found else None


async def ready_daemons(api: KubeApi, uid: str, nodes: list[str]) -> None:
    """Stand-in for plugin and IMEX: publishes daemon devices, and writes the clique object of ready pods."""
    for node in nodes:
        published = slice_of(node, f"imex-{node}")
        attributes = {"type": {"string": "daemon"}, "id": {"int": 0}}
        published["spec"]["devices"] = [{"name": names.DAEMON_DEVICE, "attributes": attributes}]
        await api.create(RESOURCE_SLICE, published)

    async def ready() -> list[Object]:
        pods = (await api.list(POD, DRIVER, labels=f"{names.COMPUTE_DOMAIN_LABEL}={uid}")).items
        found = [pod for pod in pods if is_ready(pod)]
        return found if len(found) == len(nodes) else []

    value = Clique(compute_domain=uid, clique_id=CLIQUE)
    for pod in await until(ready, "a daemon pod is ready on each node"):
        ref = Ref(pod["metadata"]["name"], pod["metadata"]["uid"])
        node, address = pod["spec"]["nodeName"], pod["status"].get("podIP", "")
        value = join(value, node=node, ip_address=address, pod=ref, max_nodes=18)
        value = with_status(value, node=node, status=Readiness.READY)
    await api.create(COMPUTE_DOMAIN_CLIQUE, clique_json(value, DRIVER))


def is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


async def offered(api: KubeApi, nodes: list[str]) -> bool:
    labelled = (await api.list(NODE, labels=f"{names.CHANNELS_READY_LABEL}={CLIQUE}")).items
    slices = (await api.list(RESOURCE_SLICE, labels=names.WARM_CLIQUE_LABEL)).items
    return {one["metadata"]["name"] for one in labelled} == set(nodes) and len(slices) == 1


async def exists(api: KubeApi, claim: str, namespace: str) -> bool:
    return not await is_gone(api, RESOURCE_CLAIM, claim, namespace)


async def claiming_pod(api: KubeApi, namespace: str, name: str, claim: str) -> None:
    spec = {
        "containers": [{"name": "main", "image": "none", "resources": {"claims": [{"name": "channel"}]}}],
        "resourceClaims": [{"name": "channel", "resourceClaimName": claim}],
    }
    await api.create(POD, {"metadata": {"name": name, "namespace": namespace}, "spec": spec})


async def allocated(api: KubeApi, claim: str, namespace: str) -> str | None:
    status = (await api.get(RESOURCE_CLAIM, claim, namespace)).get("status") or {}
    results = ((status.get("allocation") or {}).get("devices") or {}).get("results") or ()
    both = len(status.get("reservedFor") or ()) == 2
    return str(results[0]["device"]) if results and both else None
