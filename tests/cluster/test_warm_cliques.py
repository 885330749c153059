"""Channel mode on a real control plane: jobs share a warm clique, each over its own channel."""

from contextlib import suppress
from uuid import uuid4

import pytest
from tests.cluster.conftest import AddNodes
from tests.cluster.control_plane import ControlPlane
from tests.cluster.installed import controlled
from tests.cluster.policies import CLIQUE, DAEMONS, slice_of
from tests.waiting import until

from rackloom.claim.kube.api import KubeApi, NotFound
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import ComputeDomainClique, ObjectRef, Readiness, clique_json
from rackloom.core.cluster.names import ImexIsolation
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_SLICE,
    Object,
)
from rackloom.core.domains.clique import join_clique, with_daemon_status

pytestmark = pytest.mark.anyio


async def test_two_jobs_in_one_warm_clique_get_two_channels_from_the_real_scheduler(
    cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes, namespace: str, base_applied: None
) -> None:
    """Channel mode: the slice is accepted, the label offers it, and each job's pods share one channel."""
    labels = {names.GPU_CLIQUE_LABEL: CLIQUE, names.ISOLATION_LABEL: "channel"}
    nodes = await add_nodes(2, labels=labels)
    async with controlled(api, cluster):
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
            for item in (await api.list(kind, namespace)).items:
                await api.delete(kind, item["metadata"]["name"], namespace, grace_seconds=0)

        async def none_left() -> bool:
            return not (await api.list(COMPUTE_DOMAIN, namespace)).items

        await until(none_left, "the jobs are gone")
        for node in nodes:
            await api.patch(NODE, node, None, {"metadata": {"labels": {names.ISOLATION_LABEL: "domain"}}})

        await until(lambda: is_withdrawn(api), "nothing of channel mode is left")
        marked = (await api.list(NODE, labels=names.WARM_CLIQUE_LABEL)).items
        assert not marked


async def test_a_warm_daemon_ends_while_gpu_operator_replaces_the_driver(
    cluster: ControlPlane, api: KubeApi, add_nodes: AddNodes, base_applied: None
) -> None:
    """The operator's label ends it on that node alone, through the real DaemonSet controller."""
    labels = {
        names.GPU_CLIQUE_LABEL: CLIQUE,
        names.ISOLATION_LABEL: "channel",
        names.GPU_CLIENT_LABEL: "true",
    }
    nodes = await add_nodes(2, labels=labels)

    async def daemons() -> list[str]:
        pods = (await api.list(POD, DAEMONS, labels=names.COMPUTE_DOMAIN_LABEL)).items
        there = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        # No plugin serves these daemons, so they stay pending. When a node's label changes, the DaemonSet
        # controller of 1.36 looks at once only for pods that are bound. A kubelet reports those at intervals.
        for pod in there:
            report = {"metadata": {"annotations": {"report": str(uuid4())}}}
            with suppress(NotFound):
                await api.patch(POD, pod["metadata"]["name"], DAEMONS, report)
        return sorted(wanted_node(pod) for pod in there)

    async def label(node: str, key: str, value: str) -> None:
        await api.patch(NODE, node, None, {"metadata": {"labels": {key: value}}})

    async with controlled(api, cluster):

        async def on(*wanted: str) -> bool:
            return await daemons() == sorted(wanted)

        await until(lambda: on(*nodes), "a daemon on each node")
        await label(nodes[0], names.GPU_CLIENT_LABEL, names.DRIVER_UPGRADE)
        await until(lambda: on(nodes[1]), "the daemon of the paused node has ended")
        await label(nodes[0], names.GPU_CLIENT_LABEL, "true")
        await until(lambda: on(*nodes), "it is back")
        for node in nodes:
            await label(node, names.ISOLATION_LABEL, "domain")

        await until(lambda: is_withdrawn(api), "nothing of channel mode is left")


async def is_withdrawn(api: KubeApi) -> bool:
    """Whether the warm daemons and the channels of their clique are gone."""
    slices = (await api.list(RESOURCE_SLICE, labels=names.WARM_CLIQUE_LABEL)).items
    return not slices and await warm_domain(api) is None


def wanted_node(pod: Object) -> str:
    """The node that a DaemonSet's pod is for, whether it is bound or not."""
    required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (field,) = required["nodeSelectorTerms"][0]["matchFields"]
    return str(field["values"][0])


async def domain_of_job(api: KubeApi, namespace: str, job: str) -> Object:
    spec = {"channel": {"resourceClaimTemplate": {"name": f"channel-{job}"}}}
    labels = {names.ISOLATION_LABEL: ImexIsolation.CHANNEL.value}
    meta = {"name": job, "namespace": namespace, "labels": labels}
    return await api.create(COMPUTE_DOMAIN, {"metadata": meta, "spec": spec})


async def warm_domain(api: KubeApi) -> Object | None:
    found = (await api.list(COMPUTE_DOMAIN, DAEMONS, labels=names.WARM_CLIQUE_LABEL)).items
    return found[0] if found else None


async def ready_daemons(api: KubeApi, uid: str, nodes: list[str]) -> None:
    """Stand-in for plugin and IMEX: publishes daemon devices, and writes the clique object of ready pods."""
    for node in nodes:
        published = slice_of(node, f"imex-{node}")
        attributes = {"type": {"string": "daemon"}, "id": {"int": 0}}
        published["spec"]["devices"] = [{"name": names.DAEMON_DEVICE, "attributes": attributes}]
        # As a plugin publishes them: they go with their node.
        owner = {"apiVersion": NODE.api_version, "kind": NODE.kind, "name": node}
        uid_of_node = (await api.get(NODE, node))["metadata"]["uid"]
        published["metadata"]["ownerReferences"] = [{**owner, "uid": uid_of_node}]
        await api.create(RESOURCE_SLICE, published)

    async def ready() -> list[Object]:
        pods = (await api.list(POD, DAEMONS, labels=f"{names.COMPUTE_DOMAIN_LABEL}={uid}")).items
        found = [pod for pod in pods if is_ready(pod)]
        return found if len(found) == len(nodes) else []

    value = ComputeDomainClique(compute_domain=uid, clique_id=CLIQUE)
    for pod in await until(ready, "a daemon pod is ready on each node"):
        ref = ObjectRef(pod["metadata"]["name"], pod["metadata"]["uid"])
        node, address = pod["spec"]["nodeName"], pod["status"].get("podIP", "")
        value = join_clique(value, node=node, ip_address=address, pod=ref, max_nodes=18)
        value = with_daemon_status(value, node=node, ip_address=address, status=Readiness.READY)
    await api.create(COMPUTE_DOMAIN_CLIQUE, clique_json(value, DAEMONS))


def is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


async def offered(api: KubeApi, nodes: list[str]) -> bool:
    labelled = (await api.list(NODE, labels=f"{names.CHANNELS_READY_LABEL}={CLIQUE}")).items
    slices = (await api.list(RESOURCE_SLICE, labels=names.WARM_CLIQUE_LABEL)).items
    return {node["metadata"]["name"] for node in labelled} == set(nodes) and len(slices) == 1


async def exists(api: KubeApi, claim: str, namespace: str) -> bool:
    try:
        await api.get(RESOURCE_CLAIM, claim, namespace)
    except NotFound:
        return False
    return True


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
