"""The plant of `compute_domains.py`: a Kubernetes in brief, nodes with the real IMEX plugin, modelled IMEX.

Kubernetes in brief makes the calls of the claim, DaemonSet and scheduling controllers and of kubelet, each
when the event that causes it is there, and decides nothing: which pod goes where is given. nvidia-imex is a
model that is READY some time after it was started. Everything else is the production code: the controller,
the plugin's requests, checkpoint, CDI files and waiting, and `ImexDaemon` with its membership and reports.
"""

import asyncio
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The trays are those of the simulation.
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.simulation.compute_domains.tray import ImexTray as Machine
from tests.simulation.compute_domains.tray import SimulatedImexProgram

from rackloom.claim.imex.daemon import ImexDaemon
from rackloom.claim.imex.member import DaemonIdentity
from rackloom.core.cluster import names, objects
from rackloom.core.cluster.claims import ClaimRef
from rackloom.core.cluster.domain_objects import ObjectRef
from rackloom.core.cluster.names import ImexIsolation
from rackloom.core.cluster.objects import Object, ResourceKind
from rackloom.core.domains.settings import DEFAULT_DAEMON_NAMESPACE
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube

POD_START, IMEX_READY = 1.0, 0.5
"""Declared latencies: seconds from a prepared pod to its running containers, and from those to READY."""
NEVER = 1e6
"""Seconds in which nobody waits for an answer."""


class Tray:
    """A node with the real plugin."""

    def __init__(
        self, kube: FakeKube, root: Path, clique: int, number: int, isolation: ImexIsolation
    ) -> None:
        machine = Machine(root, clique, number)
        self.name, self.clique = machine.name, machine.clique
        api = DirectApi(kube, "plugin")
        self.plugin = machine.plugin_process(machine.imex_plugin(api, isolation), api)

    def node(self) -> Object:
        """As its kubelet and the plugin have registered it."""
        return {"metadata": {"name": self.name, "labels": {names.GPU_CLIQUE_LABEL: self.clique}}}


class Kubernetes:
    """What happens to pods between their creation and their containers.

    `waited` has what each pod waited for us, by UID: for its claim or template, and for its channel.
    """

    def __init__(self, kube: FakeKube, trays: dict[str, Tray], places: dict[str, str], seed: int) -> None:
        self._kube = kube
        self._api = DirectApi(kube, "kubernetes")
        self._trays = trays
        self._places = places
        """The node of each workload pod, by name."""
        self._random = random.Random(seed)  # noqa: S311 (reproducible on purpose)
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[tuple[str, str], list[Object]] = defaultdict(list)
        self._daemons: set[tuple[str, str]] = set()
        self._warm_cliques: dict[str, tuple[dict[str, None], dict[str, None]]] = defaultdict(lambda: ({}, {}))
        """Nodes that are kept warm, and the DaemonSets that do so, by clique."""
        self._shared: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._channels: dict[str, Iterator[int]] = defaultdict(lambda: iter(range(1, 129)))
        self._addresses = iter(range(1, 2**24))
        self.waited: dict[str, float] = {}
        self._created: dict[str, float] = {}
        kube.store.listeners.append(self._hear)

    async def stop(self) -> None:
        """End what still runs, daemons above all. The server answers none of them, so that none leaves its
        clique: it would cost as much as coming."""
        self._kube.store.listeners.remove(self._hear)
        self._kube.faults.delay(NEVER)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def failed(self) -> list[BaseException]:
        """What went wrong on the way: nothing should."""
        ended = (task for task in self._tasks if task.done() and not task.cancelled())
        return [error for task in ended if (error := task.exception()) is not None]

    def _do(self, work: Any) -> None:
        self._tasks.add(asyncio.create_task(work))

    def _hear(self, kind: ResourceKind, obj: Object) -> None:
        meta = obj["metadata"]
        if kind == objects.POD and meta["uid"] not in self._created:
            self._created[meta["uid"]] = _now()
            self._claims_of(obj)
        elif kind == objects.RESOURCE_CLAIM_TEMPLATE:
            for pod in self._waiting.pop((meta["namespace"], meta["name"]), ()):
                self._do(self._pod(pod, obj))
        elif kind == objects.RESOURCE_CLAIM:
            for pod in self._waiting.pop((meta["namespace"], f"claim/{meta['name']}"), ()):
                self._do(self._pod(pod, None))
        elif kind in (objects.NODE, objects.DAEMON_SET):
            self._daemon_sets(kind, obj)

    def _claims_of(self, pod: Object) -> None:
        (wanted,) = pod["spec"]["resourceClaims"]
        namespace, template = pod["metadata"]["namespace"], wanted.get("resourceClaimTemplateName")
        if template is None:
            name = wanted["resourceClaimName"]
            self._when(pod, objects.RESOURCE_CLAIM, namespace, name, f"claim/{name}")
        else:
            self._when(pod, objects.RESOURCE_CLAIM_TEMPLATE, namespace, template, template)

    def _when(self, pod: Object, kind: ResourceKind, namespace: str, name: str, key: str) -> None:
        """Go on when the object is there."""
        found = self._kube.store.find(kind, (namespace, name))
        if found is None:
            self._waiting[namespace, key].append(pod)
        else:
            self._do(self._pod(pod, found if kind == objects.RESOURCE_CLAIM_TEMPLATE else None))

    def _daemon_sets(self, kind: ResourceKind, obj: Object) -> None:
        """The DaemonSet controller: a pod where a node and a DaemonSet come together."""
        if kind == objects.NODE:
            labels = obj["metadata"].get("labels") or {}
            uid = labels.get(names.COMPUTE_DOMAIN_LABEL)
            if uid is not None:
                self._start_daemon(names.daemon_name(uid), obj["metadata"]["name"])
            self._warm(labels.get(names.WARM_CLIQUE_LABEL), node=obj["metadata"]["name"])
        else:
            self._warm(_warms(obj), daemon_set=obj["metadata"]["name"])

    def _warm(self, clique: str | None, *, node: str | None = None, daemon_set: str | None = None) -> None:
        """A clique is kept warm on one more node, or by one more DaemonSet."""
        if clique is None:
            return
        nodes, daemon_sets = self._warm_cliques[clique]
        nodes |= {} if node is None else {node: None}
        daemon_sets |= {} if daemon_set is None else {daemon_set: None}
        for made_by in daemon_sets if daemon_set is None else [daemon_set]:
            for where in nodes if node is None else [node]:
                self._start_daemon(made_by, where)

    def _start_daemon(self, daemon_set: str, node: str) -> None:
        if (daemon_set, node) not in self._daemons:
            self._daemons.add((daemon_set, node))
            self._do(self._daemon_pod(daemon_set, node))

    async def _daemon_pod(self, daemon_set: str, node: str) -> None:
        found = self._kube.store.read(objects.DAEMON_SET, (DEFAULT_DAEMON_NAMESPACE, daemon_set))
        template = found["spec"]["template"]
        meta = {"generateName": f"{daemon_set}-", "namespace": DEFAULT_DAEMON_NAMESPACE}
        spec = {**template["spec"], "schedulerName": node}
        await self._api.create(
            objects.POD, {"metadata": {**meta, "labels": template["metadata"]["labels"]}, "spec": spec}
        )

    async def _pod(self, pod: Object, template: Object | None) -> None:
        """A pod whose template or claim is there: claimed, bound, prepared, running."""
        meta = pod["metadata"]
        for_object = _now() - self._created[meta["uid"]]
        daemon = meta["namespace"] == DEFAULT_DAEMON_NAMESPACE
        node = pod["spec"]["schedulerName"] if daemon else self._places[meta["name"]]
        if template is None:
            claim = await self._share(pod, node)
        else:
            claim = await self._claim(pod, template, node, "daemon-0" if daemon else "channel-0")
        await self._api.bind(meta["name"], meta["namespace"], node, uid=meta["uid"])
        asked = _now()
        await self._prepare(pod, node, claim)
        self.waited[meta["uid"]] = for_object + _now() - asked
        await asyncio.sleep(POD_START)
        address = f"10.{(number := next(self._addresses)) >> 16}.{number >> 8 & 255}.{number & 255}"
        conditions = [{"type": "Ready", "status": "True"}]
        status = {"phase": "Running", "podIP": address, "conditions": conditions}
        await self._api.patch(
            objects.POD, meta["name"], meta["namespace"], {"status": status}, subresource="status"
        )
        if daemon:
            await self._daemon(pod, node, address)

    async def _claim(self, pod: Object, template: Object, node: str, device: str) -> Object:
        """A claim of its own: made, named in the pod's status, allocated and reserved."""
        meta = pod["metadata"]
        made = await self._api.create(
            objects.RESOURCE_CLAIM,
            {
                "metadata": {"generateName": f"{meta['name']}-", "namespace": meta["namespace"]},
                "spec": template["spec"]["spec"],
            },
        )
        statuses = [{"name": "channel", "resourceClaimName": made["metadata"]["name"]}]
        patch = {"status": {"resourceClaimStatuses": statuses}}
        await self._api.patch(objects.POD, meta["name"], meta["namespace"], patch, subresource="status")
        return await self._allocate(made, pod, node, device)

    async def _share(self, pod: Object, node: str) -> Object:
        """One more pod for a claim that is there."""
        name = pod["spec"]["resourceClaims"][0]["resourceClaimName"]
        async with self._shared[name]:
            claim = self._kube.store.read(objects.RESOURCE_CLAIM, (pod["metadata"]["namespace"], name))
            clique = self._trays[node].clique
            pool = names.channel_pool_name(clique)
            taken = ((claim.get("status") or {}).get("allocation") or {}).get("devices")
            device = taken["results"][0]["device"] if taken else f"channel-{next(self._channels[clique])}"
            return await self._allocate(claim, pod, pool, device)

    async def _allocate(self, claim: Object, pod: Object, pool: str, device: str) -> Object:
        asked = claim["spec"]["devices"]
        request = asked["requests"][0]["name"]
        result = {"request": request, "driver": names.IMEX_DRIVER, "pool": pool, "device": device}
        configs = [{"source": "FromClaim", **config} for config in asked["config"]]
        user = {"resource": "pods", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        reserved = [*((claim.get("status") or {}).get("reservedFor") or ()), user]
        status = {
            "allocation": {"devices": {"results": [result], "config": configs}},
            "reservedFor": reserved,
        }
        return await self._api.replace(
            objects.RESOURCE_CLAIM, {**claim, "status": status}, subresource="status"
        )

    async def _prepare(self, pod: Object, node: str, claim: Object) -> None:
        meta = claim["metadata"]
        ref = ClaimRef(namespace=meta["namespace"], name=meta["name"], uid=meta["uid"])
        (answer,) = (await self._trays[node].plugin.requests.prepare([ref])).values()
        if answer.error:
            raise RuntimeError(f"{pod['metadata']['name']}: {answer.error}")

    async def _daemon(self, pod: Object, node: str, address: str) -> None:
        meta = pod["metadata"]
        place = DaemonIdentity(
            compute_domain=meta["labels"][names.COMPUTE_DOMAIN_LABEL],
            clique_id=self._trays[node].clique,
            namespace=DEFAULT_DAEMON_NAMESPACE,
            node=node,
            address=address,
            pod=ObjectRef(meta["name"], meta["uid"]),
            max_nodes=names.MAX_NODES_PER_IMEX_DOMAIN,
        )
        imex: Any = SimulatedImexProgram(IMEX_READY, lambda: None)
        await ImexDaemon(DirectApi(self._kube, "daemon"), place, imex, imex, self._random).run()


def _warms(daemon_set: Object) -> str | None:
    """The clique that a DaemonSet keeps warm."""
    selector: dict[str, str] = daemon_set["spec"]["template"]["spec"].get("nodeSelector") or {}
    return selector.get(names.WARM_CLIQUE_LABEL)


def _now() -> float:
    return asyncio.get_running_loop().time()
