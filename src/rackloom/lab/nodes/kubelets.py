"""The kubelets of hundreds of simulated nodes in one process, over any `KubeApi`.

A node is registered, reported Ready, and kept alive by its lease, which is renewed every ten seconds
and counts for forty. Heartbeats go out in groups, so that other work gets its turn. After a late lease, the
node reports its status again, because the node controller has marked it unknown.

All pods are seen through one list and watch. Each pod has one task (`PodWorker`), so its steps are in
order and no pod waits for another. A pod address is never used twice.

`lose` is a power failure: no heartbeat, and pods stop where they are without a further write. The claims
that were prepared stay on the disk. After the node is back, claims of pods that are gone are unprepared
at the reconcile interval of kubelet's DRA manager (60 s).
"""

import asyncio
import contextlib
import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rackloom.claim.kube.api import Conflict, Expired, KubeApi, KubeError, NotFound, WatchEvent
from rackloom.core.cluster.objects import LEASE, NODE, POD, Object, metav1_micro_time, metav1_time
from rackloom.lab.nodes.pods import (
    REAL_TIMING,
    ContainerRuntime,
    DeviceManager,
    IdleContainers,
    NoDeviceManager,
    PodHost,
    PodWorker,
    SyncTiming,
    address_number,
    has_work,
    pod_address,
)

# Nodes and their leases as objects.


LEASE_NAMESPACE = "kube-node-lease"
LEASE_SECONDS = 40
"""How long one heartbeat counts: the kubelet's nodeLeaseDurationSeconds."""
HEARTBEAT_SECONDS = 10.0
"""How often kubelets renew: a quarter of the lease."""
_KUBELET = "v1.36.4"


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node to simulate."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    capacity: Mapping[str, str] = field(
        default_factory=lambda: {"cpu": "96", "memory": "1000Gi", "pods": "110"}
    )
    address: str = "127.0.0.1"
    boot_id: str = "1"
    """Another one after each reboot."""
    taints: tuple[Mapping[str, str], ...] = ()
    """As it is registered with (kubelet's registerWithTaints)."""


def node_object(spec: NodeSpec) -> Object:
    """The Node to register."""
    standard = {
        "kubernetes.io/hostname": spec.name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": spec.name, "labels": {**standard, **spec.labels}},
        **({"spec": {"taints": [dict(taint) for taint in spec.taints]}} if spec.taints else {}),
    }


def node_status(spec: NodeSpec, now: float) -> Object:
    """The status of a node that is ready since `now` (seconds since the epoch)."""
    since = metav1_time(now)
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "KubeletReady",
        "message": "simulated node",
        "lastHeartbeatTime": since,
        "lastTransitionTime": since,
    }
    return {
        "capacity": dict(spec.capacity),
        "allocatable": dict(spec.capacity),
        "conditions": [ready],
        "addresses": [
            {"type": "InternalIP", "address": spec.address},
            {"type": "Hostname", "address": spec.name},
        ],
        "nodeInfo": _node_info(spec),
        "daemonEndpoints": {"kubeletEndpoint": {"Port": 10250}},
    }


def lease_spec(name: str, now: float) -> Object:
    """The spec of a lease that is renewed at `now`."""
    return {
        "holderIdentity": name,
        "leaseDurationSeconds": LEASE_SECONDS,
        "renewTime": metav1_micro_time(now),
    }


def _node_info(spec: NodeSpec) -> Object:
    return {
        "machineID": spec.name,
        "systemUUID": spec.name,
        "bootID": spec.boot_id,
        "kernelVersion": "6.8.0",
        "osImage": "simulated",
        "containerRuntimeVersion": "containerd://2.0.0",
        "kubeletVersion": _KUBELET,
        "kubeProxyVersion": "",
        "operatingSystem": "linux",
        "architecture": "amd64",
    }


_MAX_CONCURRENT_CALLS = 50
"""Half of the connections that a client opens by default."""
_HEARTBEAT_GROUPS = 50
"""The number of groups of nodes. The heartbeats of a group go out together."""
_RECONCILE_S = 60.0
"""Seconds after which a kubelet unprepares claims of pods that are gone (`defaultReconcilePeriod` of its DRA
manager): it learns that they are gone when it is back."""
_RETRY_S = 1.0
"""Between attempts at an API server that does not answer."""


class SimulatedKubelets:
    """The kubelets of simulated nodes. `wall` is seconds since the epoch, `rng` draws the jitter of syncs.

    `on_resync` gets each pod that had its claims prepared only because its resync interval was over.
    """

    def __init__(
        self,
        api: KubeApi,
        wall: Callable[[], float],
        rng: random.Random,
        *,
        devices: DeviceManager | None = None,
        containers: ContainerRuntime | None = None,
        timing: SyncTiming = REAL_TIMING,
        on_resync: Callable[[Object], None] = lambda pod: None,
    ) -> None:
        self._api = api
        self._wall = wall
        turns = asyncio.Semaphore(_MAX_CONCURRENT_CALLS)
        self._host = PodHost(
            api,
            wall,
            devices or NoDeviceManager(),
            containers or IdleContainers(),
            turns,
            rng,
            timing,
            on_resync,
        )
        self._nodes: dict[str, NodeSpec] = {}
        self._beats: dict[str, float] = {}
        self._pods: dict[str, Object] = {}
        self._lives: dict[str, tuple[PodWorker, asyncio.Task[None]]] = {}
        self._done: set[str] = set()
        self._kept: dict[str, dict[str, PodWorker]] = {}
        """For nodes that are off: the pods with claims that were prepared there, by UID."""
        self._newest = 0
        self._tasks: asyncio.TaskGroup | None = None

    async def register(self, spec: NodeSpec) -> None:
        """Make a node, or take over the one of that name, and report it ready. Call it again after a reboot.

        Raises:
            KubeError: the API server did not take it.
        """
        with contextlib.suppress(Conflict):
            await self._api.create(NODE, node_object(spec))
        await self._report(spec)
        self._nodes[spec.name] = spec
        await self._renew(spec)
        for pod in list(self._pods.values()):
            self._lead(pod)
        if self._tasks and spec.name in self._kept:
            self._tasks.create_task(self._reconcile(spec.name))

    async def lose(self, name: str) -> None:
        """Power failure of a node: no heartbeat, and its pods stop without any further write."""
        del self._nodes[name]
        lives = {uid: live for uid, live in self._lives.items() if live[0].node == name}
        self._kept.setdefault(name, {}).update({uid: life for uid, (life, _) in lives.items() if life.claims})
        tasks = [task for _, task in lives.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _reconcile(self, node: str) -> None:
        """Unprepare the claims of pods that were deleted while a node was off."""
        await asyncio.sleep(_RECONCILE_S)
        if node not in self._nodes:
            return  # off again, and still to be done
        gone = [uid for uid in self._kept[node] if uid not in self._pods]
        lives = [self._kept[node].pop(uid) for uid in gone]
        await asyncio.gather(*(life.unprepare() for life in lives))

    async def run(self) -> None:
        """Simulate the nodes until cancelled. A cancellation is the death of all kubelets at once."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._keep_alive())
            tasks.create_task(self._follow())

    async def _keep_alive(self) -> None:
        """Renew in groups: a process that simulates thousands of nodes has other work in between."""
        while True:
            nodes = list(self._nodes.values())
            # Interleaved groups: every node is renewed once per period, and no burst holds up other work.
            groups = [nodes[start::_HEARTBEAT_GROUPS] for start in range(_HEARTBEAT_GROUPS)]
            for group in groups:
                await asyncio.gather(*map(self._try_beat, group))
                await asyncio.sleep(HEARTBEAT_SECONDS / _HEARTBEAT_GROUPS)

    async def _try_beat(self, spec: NodeSpec) -> None:
        if spec.name not in self._nodes:
            return
        with contextlib.suppress(KubeError):
            await self._beat(spec)

    async def _beat(self, spec: NodeSpec) -> None:
        """Renew a node's lease. A late node has been marked not ready, so it reports again."""
        if self._wall() - self._beats[spec.name] > LEASE_SECONDS:
            await self._report(spec)
        await self._renew(spec)
        self._beats[spec.name] = self._wall()

    async def _renew(self, spec: NodeSpec) -> None:
        renewed = {"spec": lease_spec(spec.name, self._wall())}
        try:
            await self._api.patch(LEASE, spec.name, LEASE_NAMESPACE, renewed)
        except NotFound:
            # The heartbeat of a node at `now`, gone with the node.
            node = await self._api.get(NODE, spec.name)
            name = node["metadata"]["name"]
            owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node["metadata"]["uid"]}
            made = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": name, "namespace": LEASE_NAMESPACE, "ownerReferences": [owner]},
                "spec": lease_spec(name, self._wall()),
            }
            with contextlib.suppress(Conflict):
                await self._api.create(LEASE, made)

    async def _report(self, spec: NodeSpec) -> None:
        status = node_status(spec, self._wall())
        await self._api.patch(NODE, spec.name, None, {"status": status}, subresource="status")
        self._beats[spec.name] = self._wall()

    async def _follow(self) -> None:
        """Read every pod: from a list, then from watches, and from a new list after a gap."""
        since = ""
        while True:
            try:
                since = since or await self._list()
                async for change in self._api.watch(POD, resource_version=since):
                    since = change.object["metadata"]["resourceVersion"]
                    self._take(change)
            except Expired:
                since = ""
            except KubeError:
                await asyncio.sleep(_RETRY_S)

    async def _list(self) -> str:
        listed = await self._api.list(POD)
        found = {pod["metadata"]["uid"]: pod for pod in listed.items}
        for uid in self._pods.keys() - found.keys():
            self._forget(uid)
        self._newest = max([self._newest, *map(address_number, found.values())])
        for pod in found.values():
            self._lead(pod)
        return listed.resource_version

    def _take(self, change: WatchEvent) -> None:
        if change.type == "DELETED":
            self._forget(change.object["metadata"]["uid"])
        elif change.type != "BOOKMARK":
            self._lead(change.object)

    def _forget(self, uid: str) -> None:
        self._pods.pop(uid, None)
        self._done.discard(uid)
        if uid in self._lives:
            self._lives[uid][0].note_deleted()

    def _lead(self, pod: Object) -> None:
        """Update the pod's worker, or start one for a pod that is new to a simulated node."""
        uid = pod["metadata"]["uid"]
        self._pods[uid] = pod
        if uid in self._lives:
            self._lives[uid][0].update(pod)
        elif self._tasks and uid not in self._done and self._is_ours(pod):
            kept = self._kept.get(pod["spec"]["nodeName"], {}).pop(uid, None)
            life = PodWorker(self._host, pod, self._address(pod), () if kept is None else kept.claims)
            task = self._tasks.create_task(life.run())
            self._lives[uid] = life, task
            task.add_done_callback(functools.partial(self._let_go, uid))

    def _address(self, pod: Object) -> str:
        """Its present address after a restart of kubelet, or else one that no pod has had yet."""
        number = address_number(pod)
        if not number:
            self._newest = number = self._newest + 1
        return pod_address(number)

    def _is_ours(self, pod: Object) -> bool:
        return pod["spec"].get("nodeName") in self._nodes and has_work(pod)

    def _let_go(self, uid: str, task: asyncio.Task[None]) -> None:
        """A pod that a finalizer keeps is done. A pod of a lost node continues when the node is back."""
        del self._lives[uid]
        if uid in self._pods and not task.cancelled():
            self._done.add(uid)
