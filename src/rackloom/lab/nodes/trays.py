"""The trays of a simulated site as nodes of a cluster, each with the three production plugins.

`TrayNode` is a `SimulatedNode` with the IMEX, GPU and NIC plugins of one tray. The plugins' periodic
loops do not run, because thousands of them share one process. Instead, a change of a tray is followed by
a call of `look`, which does the work of those loops. Checkpoints and CDI files are real files, so a boot
starts from them. A model of GPU Feature Discovery writes the node label.

`TrayNodes` registers all nodes and follows the switches: each change of a fabric updates the GPUs of
its trays, and the changed trays are checked. It can lose, heal and reboot a node, and notifies the plugins
when the API server answers again.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import structlog

from rackloom.claim.kube.api import Expired, KubeApi, KubeError
from rackloom.claim.node.cdi import DriverFiles, ImexKernel
from rackloom.claim.node.fabric import FabricMonitor
from rackloom.claim.node.gpu.driver_programs import DriverPrograms
from rackloom.claim.node.gpu.inventory import DeclaredInventory
from rackloom.claim.node.gpu.monitor import GpuMonitor, GpuReader
from rackloom.claim.node.gpu.plugin import GPU_DRIVER, GpuPlugin, GpuSettings
from rackloom.claim.node.imex.devices import ImexSettings
from rackloom.claim.node.imex.domains import HostImexDaemon
from rackloom.claim.node.imex.plugin import ImexPlugin
from rackloom.claim.node.nic.attach import AttachmentManager, AttachmentStore
from rackloom.claim.node.nic.leases import LeaseStore
from rackloom.claim.node.nic.plugin import NIC_DRIVER, NicPlugin, NicSettings
from rackloom.claim.node.plugin import NodePlugin
from rackloom.claim.node.prepare import PluginMetrics
from rackloom.claim.node.run import PluginDirectories, PluginProcess
from rackloom.claim.node.slices import RETRY_SECONDS, SlicePublisher
from rackloom.claim.node.storage import Checkpoint
from rackloom.core.cluster.names import GPU_CLIQUE_LABEL, IMEX_DRIVER, SIMULATED_LABEL
from rackloom.core.cluster.objects import NODE, RESOURCE_SLICE
from rackloom.errors import Refused, Retry
from rackloom.lab.nodes.gpus import TrayGpuDriver, clique_label, fabric_slots_of, gpus_of_tray
from rackloom.lab.nodes.host_files import TrayHostFiles, TrayNics
from rackloom.lab.nodes.kubelets import NodeSpec, SimulatedKubelets
from rackloom.lab.nodes.node import CALL_RETRY_SECONDS, SimulatedNode
from rackloom.lab.switches.fabric import FabricSnapshot, SeededNames, SimulatedFabric
from rackloom.topology.nics import NO_CLUSTER_NETWORK, ClusterNetwork
from rackloom.topology.rack import ComputeTray, RackSite

# One tray.


class TrayEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """The part that all trays of a process share."""

    plugins: KubeApi
    """The API server as the plugins use it."""
    labels: KubeApi
    """The API server as GPU Feature Discovery uses it."""
    root: Path
    """A directory for each node that has run a pod."""
    host: TrayHostFiles
    gpus: DeclaredInventory
    namespace: str
    """The driver's."""
    wall: Callable[[], float]
    """Seconds since the epoch."""
    metrics: PluginMetrics
    """One set of metrics for all trays: nothing scrapes a single simulated node."""


class TrayNode(SimulatedNode):
    """A tray as a node. `domain` is the uuid of its NVLink domain."""

    def __init__(self, name: str, tray: ComputeTray, domain: str, shared: TrayEnvironment) -> None:
        super().__init__(name, shared.root / name, shared.wall)
        self.tray = tray
        self.domain = domain
        self.gpus = TrayGpuDriver(shared.gpus)
        self.nics = TrayNics(shared.host, self.gpus.uuids)
        self._environment = shared
        self.boot()

    def boot(self) -> None:
        """The node starts. Its kernel has no state, and its plugins read their checkpoints."""
        self.boots += 1
        shared, places = self._environment, self.places
        self._fabric = FabricMonitor(self.gpus.node_fabric, shared.wall)
        self._monitor = GpuMonitor(
            GpuReader(self.gpus, lambda: shared.host.machine), frozenset(), shared.wall, shared.wall
        )
        home = places.home(NIC_DRIVER)
        attachments = AttachmentManager(
            AttachmentStore(home / "loans", self.boot_id),
            LeaseStore(home / "leases", self.boot_id),
            self.nics.check,
        )
        plugin = NicPlugin(NicSettings(node=self.name), self.nics, attachments, shared.wall, _no_network)
        plugin.remember(Checkpoint(home / "checkpoint.json", self.boot_id).claims.values())
        root = shared.host.root
        files = DriverFiles(
            proc_devices=shared.host.proc_devices,
            capabilities=root / "proc/driver/nvidia/capabilities",
            devices=root / "dev",
        )
        settings = GpuSettings(node=self.name, mps_home=places.home(GPU_DRIVER) / "mps", files=files)
        plugins: tuple[NodePlugin, ...] = (
            _imex_plugin(self.name, self._fabric, places, shared),
            GpuPlugin(shared.plugins, settings, self._monitor, DriverPrograms(root)),
            plugin,
        )
        self._plugins = {plugin.driver: plugin for plugin in plugins}
        self._publishers = [
            SlicePublisher(plugin, shared.plugins, self.name, shared.metrics) for plugin in plugins
        ]
        self._work: list[asyncio.Task[None]] = []
        self._label: str | None = ""
        """The label that the node got since this boot, or "" before it got one."""

    async def power_off(self) -> None:
        """The node's plugins end where they are."""
        for task in self._work:
            task.cancel()
        for running in self.running.values():
            await running.requests.close()
        self._work.clear()
        self.running.clear()

    @property
    def drivers(self) -> Collection[str]:
        """The drivers whose plugins are registered with its kubelet."""
        return self._plugins.keys()

    async def look(self) -> None:
        """Have the plugins read their devices, and publish label and slices.

        Raises `KubeError`. A plugin that cannot read its devices now leaves its slices as they are.
        """
        await self._fabric.observe()
        await self._monitor.observe()
        await self._monitor.listen()
        # Write the label as GPU Feature Discovery does: it reads the same driver, and no plugin.
        label = clique_label(self.gpus.answering)
        if label != self._label:
            patch = {"metadata": {"labels": {GPU_CLIQUE_LABEL: label}}}
            await self._environment.labels.patch(NODE, self.name, None, patch)
            self._label = label
        for publisher in self._publishers:
            with suppress(Retry, Refused):
                await publisher.publish()

    def _plugin(self, driver: str) -> PluginProcess:
        """Made for the first pod, since most nodes of a simulation never have one."""
        if driver not in self.running:
            process = self.plugin_process(self._plugins[driver], self._environment.plugins)
            self.running[driver] = process
            self._work.append(asyncio.create_task(process.pods.run()))
        return self.running[driver]


def _imex_plugin(
    node: str, fabric: FabricMonitor, places: PluginDirectories, shared: TrayEnvironment
) -> ImexPlugin:
    kernel = ImexKernel(proc_devices=shared.host.proc_devices, imex_capability=shared.host.imex_capability)
    settings = ImexSettings(
        node=node,
        namespaces=(shared.namespace,),
        domains=places.home(IMEX_DRIVER) / "domains",
        kernel=kernel,
    )
    return ImexPlugin(shared.plugins, settings, fabric, HostImexDaemon(root=shared.host.root))


async def _no_network() -> ClusterNetwork:
    """A tray's interfaces are in no network namespace: none of them carries anything."""
    return NO_CLUSTER_NETWORK


# All trays of a site.


_NODE_LABELS = {SIMULATED_LABEL: "true", "nvidia.com/gpu.present": "true"}


class NodeRegistration(msgspec.Struct, frozen=True):
    """The registration of the Nodes, besides that of all simulated ones."""

    labels: Mapping[str, str] = msgspec.field(default_factory=dict)
    taints: tuple[Mapping[str, str], ...] = ()


_NO_SLICES = "spec.nodeName=none"
"""Selects no slice: the watch is there to break."""
logger = structlog.get_logger(__name__)


class TrayNodes:
    """The nodes by name and their kubelets. It follows the switches and updates the nodes.

    `api` is the API server as the plugins use it. `off` are the names of those without power. `up` is set
    once all have been registered.
    """

    def __init__(
        self,
        nodes: Iterable[TrayNode],
        kubelets: SimulatedKubelets,
        fabrics: Iterable[SimulatedFabric],
        names: SeededNames,
        api: KubeApi,
        registration: NodeRegistration = NodeRegistration(),  # noqa: B008 (a frozen value)
    ) -> None:
        self._registration = registration
        self.kubelets = kubelets
        self.off: set[str] = set()
        self.up = asyncio.Event()
        self._names = names
        self._api = api
        self._nodes = {node.name: node for node in nodes}
        self._fabrics = {fabric.domain: fabric for fabric in fabrics}
        self._of_domain: dict[str, list[TrayNode]] = defaultdict(list)
        self._snapshots: dict[str, FabricSnapshot] = {}
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        for node in self._nodes.values():
            self._of_domain[node.domain].append(node)
        for fabric in self._fabrics.values():
            self._fabric_changed(fabric.domain, fabric.snapshot())
            fabric.on_change(partial(self._fabric_changed, fabric.domain))

    def __getitem__(self, name: str) -> TrayNode:
        """A node. Raises `KeyError`."""
        return self._nodes[name]

    def __iter__(self) -> Iterator[TrayNode]:
        """All nodes, domain by domain."""
        return iter(self._nodes.values())

    async def run(self) -> None:
        """Register all nodes and keep them in step with their switches, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.kubelets.run())
                tasks.create_task(self._notice_api_server())
                for node in self:
                    await self._until_accepted(self._register, node)
                    # Registering never waits: yield, so that other tasks run.
                    await asyncio.sleep(0)
                self.up.set()
                await self._follow()
        finally:
            await asyncio.gather(*(node.power_off() for node in self))

    async def settle(self) -> None:
        """Wait until every change of the switches has reached labels and slices."""
        await self._settled.wait()

    async def look(self, name: str) -> None:
        """Have a node's plugins read their devices after a change. Raises `KubeError`."""
        await self._nodes[name].look()

    async def lose(self, name: str) -> None:
        """Power failure of a node: no heartbeat, no plugin."""
        self.off.add(name)
        await self.kubelets.lose(name)
        await self._nodes[name].power_off()

    async def heal(self, name: str) -> None:
        """A node that was lost starts again. Raises `KubeError`."""
        self.off.discard(name)
        self._nodes[name].boot()
        await self._register(self._nodes[name])
        await self._nodes[name].look()

    async def reboot(self, name: str) -> None:
        """A node goes and comes back at once."""
        await self.lose(name)
        await self.heal(name)

    def _fabric_changed(self, domain: str, snapshot: FabricSnapshot) -> None:
        """Trays stay where they are when their domain goes by another uuid: `domain` is its first."""
        self._snapshots[domain] = snapshot
        self._settled.clear()
        self._changed.set()

    async def _follow(self) -> None:
        while True:
            while self._snapshots:
                domain = next(iter(self._snapshots))
                snapshot = self._snapshots.pop(domain)
                slots = fabric_slots_of(snapshot)
                for node in self._of_domain[domain]:
                    changed = node.gpus.set_gpus(gpus_of_tray(snapshot.domain, node.tray, slots, self._names))
                    if changed and node.name not in self.off:
                        await self._until_accepted(TrayNode.look, node)
            self._settled.set()
            self._changed.clear()
            await self._changed.wait()

    async def _notice_api_server(self) -> None:
        """Notify the plugins when the API server is back: real ones have a watch each, these share one."""
        is_cut_off = False
        while True:
            try:
                listed = await self._api.list(RESOURCE_SLICE, fields=_NO_SLICES)
                if is_cut_off:
                    for node in self:
                        # The API server answers again after a time when it did not, which each plugin's watch
                        # would show.
                        for running in node.running.values():
                            running.pods.wake()
                is_cut_off = False
                async for _ in self._api.watch(
                    RESOURCE_SLICE, resource_version=listed.resource_version, fields=_NO_SLICES
                ):
                    pass
            except Expired:
                continue
            except KubeError:
                is_cut_off = True
                await asyncio.sleep(RETRY_SECONDS)

    async def _register(self, node: TrayNode) -> None:
        await self.kubelets.register(
            NodeSpec(
                node.name,
                labels={**_NODE_LABELS, **self._registration.labels},
                capacity=_capacity(node),
                boot_id=node.boot_id,
                taints=self._registration.taints,
            )
        )

    async def _until_accepted(self, act: Callable[[TrayNode], Awaitable[None]], node: TrayNode) -> None:
        """Repeat until the API server accepts it, as a kubelet and a plugin do."""
        while True:
            try:
                await act(node)
            except KubeError as error:
                logger.warning("twin.node", node=node.name, reason=str(error))
                await asyncio.sleep(CALL_RETRY_SECONDS)
            else:
                return


def tray_nodes(site: RackSite, names: SeededNames, shared: TrayEnvironment) -> tuple[TrayNode, ...]:
    """A node for each tray of a site."""
    return tuple(
        TrayNode(names.node(tray.chassis_serial, tray.slot), tray, domain.uuid, shared)
        for domain in site.domains
        for tray in domain.trays
    )


def _capacity(node: TrayNode) -> dict[str, str]:
    return {"cpu": "144", "memory": "960Gi", "pods": "110", "nvidia.com/gpu": str(len(node.tray.gpus))}
