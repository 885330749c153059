"""A fake cluster under virtual time: its API server, its nodes, and a controller that can be killed."""

import asyncio
import random
from contextlib import suppress

from rackloom.claim.cluster.domain_controller import DomainController
from rackloom.claim.kube.api import Conflict, EventRecorder, NotFound
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import (
    ComputeDomainClique,
    ObjectRef,
    Readiness,
    clique_json,
    read_clique,
    read_compute_domain_status,
)
from rackloom.core.cluster.nodes import read_node
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    DAEMON_SET,
    EVENT,
    NETWORK_POLICY,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    SECRET,
    metav1_time,
)
from rackloom.core.cluster.pods import read_pod
from rackloom.core.cluster.scheduling import is_node_selected
from rackloom.core.domains.clique import join_clique, with_daemon_status
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.virtual.event_loop import loop_wall_time

NAMESPACE = "rackloom-imex"


class DaemonSide:
    """The work of DaemonSet controller, kubelet and IMEX daemon, checked twice a second of virtual time."""

    def __init__(self, kube, clique_id):
        self.api = DirectApi(kube, "nodes")
        self.clique_id = clique_id
        self.silent = set()
        """Nodes without a kubelet, which never end their pods."""

    async def run(self):
        while True:
            with suppress(Conflict, NotFound):
                await self.look()
            await asyncio.sleep(0.5)

    async def look(self):
        nodes = (await self.api.list(NODE)).items
        pods = {
            (item["metadata"]["labels"][names.COMPUTE_DOMAIN_LABEL], item["spec"]["nodeName"]): item
            for item in (await self.api.list(POD, NAMESPACE)).items
        }
        wanted = set()
        for daemons in (await self.api.list(DAEMON_SET, NAMESPACE)).items:
            if "deletionTimestamp" not in daemons["metadata"]:
                wanted |= {(uid_of(daemons), node) for node in self.chosen(daemons, nodes)}
        for key in sorted(wanted - set(pods)):
            await self.start(*key)
        for key in sorted(set(pods) - wanted):
            grace = None if key[1] in self.silent else 0
            await self.api.delete(POD, pods[key]["metadata"]["name"], NAMESPACE, grace_seconds=grace)

    def chosen(self, daemons, nodes):
        spec = read_pod(daemons["spec"]["template"]).spec
        return [node.name for node in map(read_node, nodes) if is_node_selected(spec, node)]

    async def start(self, uid, node):
        address = f"10.0.{len(uid)}.{node.removeprefix('n')}"
        pod = await self.api.create(
            POD,
            {
                "metadata": {
                    "name": f"daemon-{uid}-{node}",
                    "namespace": NAMESPACE,
                    "labels": {names.COMPUTE_DOMAIN_LABEL: uid, names.CLIQUE_ID_LABEL: self.clique_id},
                },
                "spec": {"nodeName": node, "containers": [{"name": "daemon", "image": "daemon"}]},
            },
        )
        conditions = [{"type": "Ready", "status": "True"}]
        status = {"phase": "Running", "podIP": address, "conditions": conditions}
        await self.api.patch(
            POD, pod["metadata"]["name"], NAMESPACE, {"status": status}, subresource="status"
        )
        await self.enter(uid, node, address, ObjectRef(pod["metadata"]["name"], pod["metadata"]["uid"]))

    async def enter(self, uid, node, address, pod):
        value = ComputeDomainClique(compute_domain=uid, clique_id=self.clique_id)
        for _ in range(20):
            try:
                read = await self.api.get(COMPUTE_DOMAIN_CLIQUE, value.name, NAMESPACE)
            except NotFound:
                read = None
            members = read_clique(read) if read else value
            members = join_clique(members, node=node, ip_address=address, pod=pod, max_nodes=18)
            members = with_daemon_status(members, node=node, ip_address=address, status=Readiness.READY)
            obj = clique_json(members, NAMESPACE, read)
            with suppress(Conflict):
                await (
                    self.api.create(COMPUTE_DOMAIN_CLIQUE, obj)
                    if read is None
                    else self.api.replace(COMPUTE_DOMAIN_CLIQUE, obj)
                )
                return


def uid_of(obj):
    return obj["metadata"]["labels"][names.COMPUTE_DOMAIN_LABEL]


class Site:
    """A fake cluster, its nodes, and a controller that can be killed."""

    def __init__(self, settings, clique_id, nodes, seed=1):
        self.kube = FakeKube(namespaces=("default", "team", NAMESPACE), seed=seed)
        self.kube.faults.delay(0.005)
        self.user = DirectApi(self.kube, "user")
        self.settings = settings
        self.clique_id = clique_id
        self.nodes = [f"n{number}" for number in range(nodes)]
        self.rng = random.Random(seed)
        self.controller = None
        self.tasks = []

    async def begin(self):
        for name in self.nodes:
            labels = {names.GPU_CLIQUE_LABEL: self.clique_id}
            ready = {"type": "Ready", "status": "True", "lastTransitionTime": "1970-01-01T00:00:00Z"}
            meta = {"name": name, "labels": labels}
            await self.user.create(NODE, {"metadata": meta, "status": {"conditions": [ready]}})
        self.daemons = DaemonSide(self.kube, self.clique_id)
        self.tasks.append(asyncio.create_task(self.daemons.run()))
        self.start()

    def start(self):
        api = DirectApi(self.kube, "controller")
        recorder = EventRecorder(api, "rackloom-controller", "test", loop_wall_time)
        self.controller = DomainController(api, self.settings, recorder, loop_wall_time, self.rng)
        self.tasks.append(asyncio.create_task(self.controller.run()))

    async def kill(self):
        task = self.tasks.pop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def end(self):
        for task in self.tasks:
            assert not task.done(), task
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def domain(self, name):
        spec = {"channel": {"resourceClaimTemplate": {"name": f"channel-{name}"}}}
        return await self.user.create(
            COMPUTE_DOMAIN, {"metadata": {"name": name, "namespace": "team"}, "spec": spec}
        )

    async def prepare(self, domain, node):
        """As the node plugin does when a channel claim arrives."""
        labels = {names.COMPUTE_DOMAIN_LABEL: domain["metadata"]["uid"]}
        await self.user.patch(NODE, node, None, {"metadata": {"labels": labels}})

    async def use(self, domain, node):
        """A pod that was scheduled there holds its channel."""
        uid = domain["metadata"]["uid"]
        config = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "ComputeDomainChannelConfig"}
        opaque = {"driver": names.IMEX_DRIVER, "parameters": config | {"domainID": uid}}
        request = {"name": "channel", "exactly": {"deviceClassName": names.CHANNEL_CLASS}}
        meta, spec = {"name": f"on-{node}", "namespace": "team"}, {"requests": [request]}
        spec["config"] = [{"opaque": opaque}]
        await self.user.create(RESOURCE_CLAIM, {"metadata": meta, "spec": {"devices": spec}})
        device = {"driver": names.IMEX_DRIVER, "pool": node, "device": "channel-0", "request": "channel"}
        holder = {"resource": "pods", "name": f"pod-{node}", "uid": f"pod-{node}"}
        status = {"allocation": {"devices": {"results": [device]}}, "reservedFor": [holder]}
        patch = {"status": status}
        await self.user.patch(RESOURCE_CLAIM, meta["name"], "team", patch, subresource="status")

    async def release(self, node):
        """The pod is deleted by force, and its claim with it."""
        await self.user.delete(RESOURCE_CLAIM, f"on-{node}", "team")

    async def fall_silent(self, node):
        """The status that the node controller writes for a node whose lease expired."""
        self.daemons.silent.add(node)
        since = {"lastTransitionTime": metav1_time(loop_wall_time())}
        silent = {"status": {"conditions": [{"type": "Ready", "status": "Unknown", **since}]}}
        await self.user.patch(NODE, node, None, silent, subresource="status")
        unready = {"status": {"conditions": [{"type": "Ready", "status": "False", **since}]}}
        for pod in (await self.user.list(POD, NAMESPACE)).items:
            if pod["spec"]["nodeName"] == node:
                name = pod["metadata"]["name"]
                await self.user.patch(POD, name, NAMESPACE, unready, subresource="status")

    async def status(self, name):
        return read_compute_domain_status(await self.user.get(COMPUTE_DOMAIN, name, "team"))

    async def until(self, holds, seconds=120):
        for _ in range(seconds * 2):
            if await holds():
                return
            await asyncio.sleep(0.5)
        raise AssertionError("did not come true")

    async def events(self, reason):
        return [item for item in (await self.user.list(EVENT, "team")).items if item["reason"] == reason]

    async def count(self, kind):
        return len((await self.user.list(kind)).items)


async def has_condition(place, name, reason):
    return any(condition.reason == reason for condition in (await place.status(name)).conditions)


async def is_empty(place):
    kinds = (
        COMPUTE_DOMAIN,
        RESOURCE_CLAIM_TEMPLATE,
        DAEMON_SET,
        NETWORK_POLICY,
        SECRET,
        COMPUTE_DOMAIN_CLIQUE,
    )
    left = [await place.count(kind) for kind in kinds]
    nodes = (await place.user.list(NODE, labels=names.COMPUTE_DOMAIN_LABEL)).items
    return not any(left) and not nodes
