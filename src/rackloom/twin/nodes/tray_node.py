"""One simulated node: a compute tray with the three real plugins, called as kubelet would call them.

The plugins' own loops (looking every few seconds, a watch each) do not run: thousands of them share a
process. Whoever changes something about a tray has it looked at, which is when those loops would find out.
What a plugin does after a failed prepare, and for the pods that wait meanwhile, does run.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from rackloom.claim.domain.names import GPU_CLIQUE_LABEL, IMEX_DRIVER
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.kube.kinds import NODE
from rackloom.claim.node.checkpoint import Checkpoint
from rackloom.claim.node.gpu.condition import HARMLESS_XIDS
from rackloom.claim.node.gpu.declared import DeclaredInventory
from rackloom.claim.node.gpu.driver_files import DriverFiles
from rackloom.claim.node.gpu.plugin import GpuPlugin
from rackloom.claim.node.gpu.programs import Programs
from rackloom.claim.node.gpu.settings import GPU_DRIVER, GpuSettings
from rackloom.claim.node.gpu.view import GpuView, Reading
from rackloom.claim.node.imex.host import Kernel
from rackloom.claim.node.imex.plugin import ImexPlugin
from rackloom.claim.node.imex.readiness import HostDaemon
from rackloom.claim.node.imex.settings import ImexSettings
from rackloom.claim.node.imex.view import FabricView
from rackloom.claim.node.meter import Meter
from rackloom.claim.node.nic.leases import Leases
from rackloom.claim.node.nic.lender import Lender
from rackloom.claim.node.nic.loans import Loans
from rackloom.claim.node.nic.plugin import DRIVER as NIC_DRIVER
from rackloom.claim.node.nic.plugin import NicPlugin, NicSettings
from rackloom.claim.node.plugin import Plugin
from rackloom.claim.node.publisher import Publisher
from rackloom.claim.node.requests import Answer, Requests
from rackloom.claim.node.run import Host, Places, Running
from rackloom.claim.node.values import ClaimRef
from rackloom.errors import Refused, Retry
from rackloom.topology.discovery.nics import NO_CLUSTER, ClusterNetwork
from rackloom.topology.rack import Tray
from rackloom.twin.kubelet.claims import PodClaim
from rackloom.twin.nodes.tray_fabric import clique_label
from rackloom.twin.nodes.tray_gpus import TrayGpus
from rackloom.twin.nodes.tray_host import TrayHost, TrayLook

_AGAIN_S = 1.0


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What all trays of a process share."""

    plugins: KubeApi
    """The API server as the plugins ask it."""
    labels: KubeApi
    """The same as GPU Feature Discovery does."""
    root: Path
    """A directory for each node that has run a pod."""
    host: TrayHost
    gpus: DeclaredInventory
    namespace: str
    """The driver's."""
    wall: Callable[[], float]
    """Seconds since the epoch."""
    meter: Meter
    """Counts for all of them: nobody reads a page of one simulated node."""


class TrayNode:
    """A tray as a node. `domain` is the uuid of its NVLink domain."""

    def __init__(self, name: str, tray: Tray, domain: str, around: Surroundings) -> None:
        self.name = name
        self.tray = tray
        self.domain = domain
        self.boots = 0
        self.gpus = TrayGpus(around.gpus)
        self.nics = TrayLook(around.host, self.gpus.uuids)
        self._around = around
        self.boot()

    def boot(self) -> None:
        """The node starts: its kernel has forgotten all, and its plugins read again what they wrote down."""
        self.boots += 1
        around, places = self._around, self._places
        self._fabric = FabricView(self.gpus.node_fabric, around.wall)
        self._view = GpuView(Reading(self.gpus, lambda: around.host.machine), HARMLESS_XIDS, around.wall)
        plugins: tuple[Plugin, ...] = (
            _imex_plugin(self.name, self._fabric, places, around),
            _gpu_plugin(self.name, self._view, places, around),
            _nic_plugin(self.name, self.nics, places, self._boot_id, around),
        )
        self._plugins = {one.driver: one for one in plugins}
        self._publishers = [Publisher(one, around.plugins, self.name, around.meter) for one in plugins]
        self._running: dict[str, Running] = {}
        self._work: list[asyncio.Task[None]] = []
        self._label: str | None = ""
        """What the node was labelled with since this boot; "" before it was."""

    async def power_off(self) -> None:
        """The node's plugins end where they are."""
        for task in self._work:
            task.cancel()
        for running in self._running.values():
            await running.requests.close()
        self._work.clear()
        self._running.clear()

    def notice_api_server(self) -> None:
        """The API server answers again after a time when it did not, which each plugin's watch would show."""
        for running in self._running.values():
            running.pods.wake()

    @property
    def drivers(self) -> Collection[str]:
        """Those whose plugins are registered with its kubelet."""
        return self._plugins.keys()

    async def look(self) -> None:
        """Have the plugins look, and the API server told what they found.

        Raises `KubeError`. What a plugin cannot say now stays as it was published.
        """
        await self._fabric.look()
        await self._view.look()
        await self._view.listen()
        await self._write_label()
        for one in self._publishers:
            with suppress(Retry, Refused):
                await one.publish()

    async def prepare(self, claims: Sequence[PodClaim]) -> None:
        """What kubelet calls NodePrepareResources. Raises `Retry` with what the plugins said."""
        for driver, refs in _by_driver(claims).items():
            _need_all(await self._requests(driver).prepare(refs))

    async def unprepare(self, claims: Sequence[PodClaim]) -> None:
        """What kubelet calls NodeUnprepareResources. Raises `Retry` with what the plugins said."""
        for driver, refs in _by_driver(claims).items():
            _need_all(await self._requests(driver).unprepare(refs))

    def cdi_files(self, claim_uid: str) -> tuple[Path, ...]:
        """The CDI specs that a claim has here, which a container runtime would read."""
        return tuple(sorted(self._places.cdi.glob(f"*-claim_{claim_uid}.yaml")))

    @property
    def _places(self) -> Places:
        here = self._around.root / self.name
        return Places(registry=here / "registry", plugins=here / "plugins", cdi=here / "cdi")

    @property
    def _boot_id(self) -> str:
        return f"{self.name}-{self.boots}"

    def _requests(self, driver: str) -> Requests:
        """What answers kubelet; made for the first pod, since most nodes of a simulation never have one."""
        if driver not in self._running:
            host = Host(node=self.name, boot_id=self._boot_id, places=self._places, wall=self._around.wall)
            host.places.home(driver).mkdir(parents=True, exist_ok=True)
            running = Running(self._plugins[driver], self._around.plugins, host)
            self._running[driver] = running
            self._work.append(asyncio.create_task(running.pods.run()))
        return self._running[driver].requests

    async def _write_label(self) -> None:
        """GPU Feature Discovery: it reads the same driver, and knows nothing of our plugins."""
        label = clique_label(self.gpus.answering)
        if label != self._label:
            patch = {"metadata": {"labels": {GPU_CLIQUE_LABEL: label}}}
            await self._around.labels.patch(NODE, self.name, None, patch)
            self._label = label


def _imex_plugin(node: str, fabric: FabricView, places: Places, around: Surroundings) -> ImexPlugin:
    kernel = Kernel(proc_devices=around.host.proc_devices, imex_capability=around.host.imex_capability)
    settings = ImexSettings(
        node=node,
        namespaces=(around.namespace,),
        domains=places.home(IMEX_DRIVER) / "domains",
        kernel=kernel,
    )
    return ImexPlugin(around.plugins, settings, fabric, HostDaemon(root=around.host.root))


def _gpu_plugin(node: str, view: GpuView, places: Places, around: Surroundings) -> GpuPlugin:
    root = around.host.root
    files = DriverFiles(
        proc_devices=around.host.proc_devices,
        capabilities=root / "proc/driver/nvidia/capabilities",
        devices=root / "dev",
    )
    settings = GpuSettings(node=node, mps_home=places.home(GPU_DRIVER) / "mps", files=files)
    return GpuPlugin(settings, view, Programs(root))


def _nic_plugin(node: str, look: TrayLook, places: Places, boot_id: str, around: Surroundings) -> NicPlugin:
    home = places.home(NIC_DRIVER)
    lender = Lender(Loans(home / "loans", boot_id), Leases(home / "leases", boot_id), look.check)
    plugin = NicPlugin(NicSettings(node=node), look, lender, around.wall, _no_network)
    plugin.remember(Checkpoint(home / "checkpoint.json", boot_id).claims.values())
    return plugin


async def _no_network() -> ClusterNetwork:
    """A tray's interfaces are in no network namespace: none of them carries anything."""
    return NO_CLUSTER


def _by_driver(claims: Sequence[PodClaim]) -> dict[str, list[ClaimRef]]:
    drivers = sorted({driver for one in claims for driver in one.drivers})
    return {driver: [one.ref for one in claims if driver in one.drivers] for driver in drivers}


def _need_all(answers: Mapping[str, Answer]) -> None:
    problems = [answer.error for answer in answers.values() if answer.error]
    if problems:
        raise Retry("; ".join(problems), after=_AGAIN_S)
