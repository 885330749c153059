"""Slurm's blocks from the nodes of a cluster, kept up to date (`core.place.slurm_topology`).

`SlurmController` follows the nodes and gives their topology to a publisher whenever one changes. A cluster
without any block, or one whose API server does not answer, changes nothing: Slurm keeps its topology, and
the log has the time since when the source is unknown.

`SlinkyTopology` is the publisher for Slinky's slurm-operator. The ConfigMap has `topology.yaml` with the
names of the blocks only: slurm-operator mounts it, and each change of it reconfigures slurmctld or restarts
it. A node joins its block by the annotation `topology.slinky.slurm.net/spec` of the Kubernetes node, which
slurm-operator gives to the Slurm node that runs there (slurm-operator 1.1). A block is added before a node
names it, and removed when no node does. The operator reports whether jobs run on a node as conditions of the
node's slurmd pod.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable

import msgspec
import structlog

from rackloom.claim.cluster.controller_runtime import ControllerRuntime
from rackloom.claim.kube.api import KubeApi, NotFound
from rackloom.claim.kube.informer import CacheSet, Informer
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.objects import (
    CONFIG_MAP,
    NODE,
    POD,
    Object,
    ResourceKind,
    annotations_of,
    data_of,
    has_condition,
    name_of,
    uid_of,
)
from rackloom.core.cluster.pods import node_of
from rackloom.core.cluster.reader import ReadObject
from rackloom.core.place.slurm_topology import (
    SLURM_TAINT,
    TOPOLOGY_NAME,
    SlurmTopology,
    TopologyStep,
    next_topology,
    topology_of_nodes,
    topology_text,
)
from rackloom.errors import Refused, Retry

log = structlog.get_logger(__name__)

FIELD_MANAGER = "rackloom-slurm"
"""The manager of the ConfigMap."""
SETTLE_SECONDS = 1.0
"""Nodes that change together cause one topology."""
WAITING_SECONDS = 30.0
"""Between two attempts while nodes wait for their jobs to end, or the source shows nothing."""
WATCH_SECONDS = 5.0
"""Between two looks at whether the API server can be followed."""


class SlurmRule(msgspec.Struct, frozen=True, kw_only=True):
    """Which nodes are Slurm's, and how large its base block is."""

    labels: SchedulerLabels = SchedulerLabels()
    taint: str | None = SLURM_TAINT
    """Key of the taint of Slurm's nodes. None: all nodes with a clique are Slurm's."""
    block_size: int | None = None

    def topology_of(self, nodes: Iterable[ReadObject]) -> SlurmTopology:
        """The topology of nodes. Raises Refused for nodes that cannot be read, or names that clash."""
        return topology_of_nodes(nodes, self.labels, taint=self.taint, block_size=self.block_size)


class SourceLog:
    """Logs once when the source of the topology becomes unknown, and once when it is known again.

    `wall` gives seconds since the epoch.
    """

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self.unknown_since: float | None = None

    def lost(self, why: str, *, ago: float = 0.0) -> None:
        """The source has not been known for `ago` seconds."""
        if self.unknown_since is None:
            self.unknown_since = self._wall() - ago
            log.warning("slurm.source_unknown", since=_utc(self.unknown_since), why=why)

    def found(self) -> None:
        """The source is known."""
        if self.unknown_since is not None:
            log.info("slurm.source_known", since=_utc(self.unknown_since))
            self.unknown_since = None


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def log_step(step: TopologyStep) -> None:
    """Say which nodes change their block, and which wait for their jobs."""
    for move in step.moved:
        log.warning("slurm.node_moved", node=move.node, source=move.source, target=move.target)
    if step.waiting:
        log.warning("slurm.nodes_waiting", nodes=", ".join(step.waiting))


# The controller.


SLURMD_PODS = "app.kubernetes.io/name=slurmd"
"""Selects the pods of Slinky's NodeSets."""
_KEY = "topology"
"""There is one topology, so one key."""


class SlurmCaches(CacheSet):
    """The nodes, and `with_pods` the slurmd pods on them."""

    def __init__(self, api: KubeApi, rng: random.Random, *, with_pods: bool) -> None:
        informers = {NODE: (Informer(api, NODE, rng=rng),)}
        if with_pods:
            informers[POD] = (Informer(api, POD, labels=SLURMD_PODS, rng=rng),)
        super().__init__(informers)


class SlurmController:
    """Calls `publish` with the topology of the nodes. `wall`: seconds since the epoch, `rng`: jitter.

    `publish` raises KubeError or Retry if it has to be called again.
    """

    def __init__(
        self,
        api: KubeApi,
        caches: SlurmCaches,
        rule: SlurmRule,
        publish: Callable[[SlurmTopology], Awaitable[None]],
        wall: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self._caches = caches
        self._rule = rule
        self._publish = publish
        self._source = SourceLog(wall)
        self._runtime: ControllerRuntime[str] = ControllerRuntime("slurm", api, caches, rng, self._reconcile)
        caches.on_change(self._changed)

    @property
    def unknown_since(self) -> float | None:
        """Since when the topology may be old, in seconds since the epoch. None: it is current."""
        return self._source.unknown_since

    async def run(self) -> None:
        """Keep the topology up to date, until cancelled."""
        self._runtime.queue.add(_KEY)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._runtime.run(workers=1))
            tasks.create_task(self._watch_source())

    def _changed(self, _kind: ResourceKind, _obj: Object) -> None:
        self._runtime.queue.add_after(_KEY, SETTLE_SECONDS)

    async def _reconcile(self, _key: str) -> float | None:
        if self._caches.unknown_since() is not None:
            # The cache may be old. Slurm keeps its topology until the API server answers.
            return WATCH_SECONDS
        try:
            found = self._rule.topology_of(self._caches.all(NODE))
        except Refused as refused:
            self._source.lost(str(refused))
            return WAITING_SECONDS
        if not found.blocks:
            self._source.lost("no node of Slurm has a clique")
            return WAITING_SECONDS
        self._source.found()
        await self._publish(found)
        return None

    async def _watch_source(self) -> None:
        """A broken watch changes no node, so nothing else notices it."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            since = self._caches.unknown_since()
            if since is not None:
                ago = asyncio.get_running_loop().time() - since
                self._source.lost("the API server could not be followed", ago=ago)


# For Slinky's slurm-operator.


SPEC_ANNOTATION = "topology.slinky.slurm.net/spec"
FILE_NAME = "topology.yaml"
_BUSY_STATES = ("SlurmNodeStateAllocated", "SlurmNodeStateMixed", "SlurmNodeStateCompleting")
"""Conditions of a slurmd pod on a node with jobs."""


class SlinkyTopology:
    """Writes the ConfigMap `namespace`/`name`, and the annotation of each node."""

    def __init__(self, api: KubeApi, caches: SlurmCaches, namespace: str, name: str) -> None:
        self._api = api
        self._caches = caches
        self._namespace = namespace
        self._name = name

    async def publish(self, found: SlurmTopology) -> None:
        """Write ConfigMap and annotations. Raises KubeError, and Retry while nodes wait for jobs."""
        nodes = {name_of(node): node for node in self._caches.all(NODE)}
        last = annotated_topology(nodes.values())
        step = next_topology(last, found, busy_nodes(self._caches.all(POD)))
        log_step(step)
        await self._write_blocks(found, last)
        if step.topology is not None:
            after = step.topology.block_of
            for name, node in nodes.items():
                await self._annotate(name, node, after.get(name))
        if step.waiting:
            raise Retry("nodes wait for their jobs", after=WAITING_SECONDS)

    async def _write_blocks(self, found: SlurmTopology, last: SlurmTopology | None) -> None:
        """A block that a node still names stays: slurmctld would refuse the node."""
        named = dict.fromkeys((*found.blocks, *(last.blocks if last else ())))
        text = topology_text(SlurmTopology(blocks=dict.fromkeys(named, ()), block_size=found.block_size))
        try:
            written = await self._api.get(CONFIG_MAP, self._name, self._namespace)
        except NotFound:
            written = {}
        if data_of(written).get(FILE_NAME) == text:
            return
        obj = {
            "apiVersion": CONFIG_MAP.api_version,
            "kind": CONFIG_MAP.kind,
            "metadata": {"name": self._name, "namespace": self._namespace},
            "data": {FILE_NAME: text},
        }
        await self._api.apply(CONFIG_MAP, obj, manager=FIELD_MANAGER, force=True)
        log.info("slurm.topology_written", to=f"{self._namespace}/{self._name}", blocks=len(named))

    async def _annotate(self, name: str, node: Object, block: str | None) -> None:
        written = annotations_of(node).get(SPEC_ANNOTATION)
        spec = with_block(written, block)
        if spec == written:
            return
        meta = {"uid": uid_of(node), "annotations": {SPEC_ANNOTATION: spec}}
        try:
            await self._api.patch(NODE, name, None, {"metadata": meta})
        except NotFound:
            return
        log.info("slurm.node_annotated", node=name, block=block)


def annotated_topology(nodes: Iterable[Object]) -> SlurmTopology | None:
    """The topology in the annotations of the nodes. None if no node names a block of Rackloom."""
    blocks: dict[str, list[str]] = {}
    for node in nodes:
        block = _block_in(annotations_of(node).get(SPEC_ANNOTATION))
        if block is not None:
            blocks.setdefault(block, []).append(name_of(node))
    if not blocks:
        return None
    return SlurmTopology(blocks={block: tuple(names) for block, names in blocks.items()}, block_size=1)


def busy_nodes(pods: Iterable[Object]) -> frozenset[str]:
    """The Kubernetes nodes on which jobs run, by the conditions of their slurmd pods."""
    return frozenset(node_of(pod) for pod in pods if node_of(pod) and has_condition(pod, *_BUSY_STATES))


def with_block(spec: str | None, block: str | None) -> str | None:
    """The annotation with this block in our topology, beside other topologies. None: no annotation."""
    others = [part for part in _parts(spec) if not part.startswith(f"{TOPOLOGY_NAME}:")]
    own = [] if block is None else [f"{TOPOLOGY_NAME}:{block}"]
    return ",".join((*others, *own)) or None


def _block_in(spec: str | None) -> str | None:
    own = [part.partition(":")[2] for part in _parts(spec) if part.startswith(f"{TOPOLOGY_NAME}:")]
    return own[0] if own else None


def _parts(spec: str | None) -> list[str]:
    return [part for part in (spec or "").split(",") if part]
