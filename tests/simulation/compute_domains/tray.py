"""One tray of a ComputeDomain story: its disk, the real IMEX plugin, and a model of nvidia-imex.

`ImexTray` is a `SimulatedNode` with the IMEX plugin alone. `write_kernel_files` writes the NVIDIA kernel
modules' files under /proc, once for all trays.

`SimulatedImexProgram` stands in for both the supervisor and the control tool of one daemon. It becomes
READY a declared time after it first knows its peers, and then reports a connection to each of them.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from rackloom.claim.imex.nvidia_imex import CONNECTED, READY, ImexConnection, ImexDomain, ImexNode
from rackloom.claim.imex.supervisor import Peers
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.node.cdi import ImexKernel
from rackloom.claim.node.fabric import FabricMonitor, read_declared_fabric
from rackloom.claim.node.imex.devices import ImexSettings
from rackloom.claim.node.imex.domains import HostImexDaemon
from rackloom.claim.node.imex.plugin import ImexPlugin
from rackloom.core.cluster import names
from rackloom.core.cluster.names import ImexIsolation
from rackloom.core.domains.settings import DEFAULT_DAEMON_NAMESPACE
from rackloom.errors import Retry
from rackloom.lab.nodes.node import SimulatedNode
from rackloom.lab.virtual.event_loop import loop_wall_time

CLUSTER_UUID = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31"


def write_kernel_files(root: Path) -> None:
    """Write the NVIDIA kernel modules' files under /proc, once for all trays below `root`."""
    (root / "devices").write_text("Character devices:\n235 nvidia-caps-imex-channels\n236 nvidia-caps\n")
    (root / "capability").write_text("DeviceFileMinor: 512\nDeviceFileMode: 438\n")


class ImexTray(SimulatedNode):
    """One tray of one clique, with its disk below `root` (see `write_kernel_files`)."""

    def __init__(self, root: Path, clique_number: int, number: int) -> None:
        name = f"n{clique_number}-{number}"
        super().__init__(name, root / name, loop_wall_time)
        self.root = root
        self.clique_number = clique_number
        self.clique = f"{CLUSTER_UUID}.{clique_number}"
        """The value of its node's label."""
        self.labels = {names.GPU_CLIQUE_LABEL: self.clique}
        """Of its node, as GPU Feature Discovery writes them."""
        self.domains = self.places.home(names.IMEX_DRIVER) / "domains"
        """The directories of ComputeDomains."""

    def imex_plugin(self, api: KubeApi, isolation: ImexIsolation) -> ImexPlugin:
        """The real plugin, as it comes up after any end."""
        fabric = self.root / f"fabric-{self.clique_number}.json"
        if not fabric.exists():
            declared = {"clusterUUID": CLUSTER_UUID, "cliqueId": self.clique_number, "gpus": [{}]}
            fabric.write_text(json.dumps(declared))
        settings = ImexSettings(
            node=self.name,
            namespaces=(DEFAULT_DAEMON_NAMESPACE,),
            domains=self.domains,
            isolation=isolation,
            kernel=ImexKernel(proc_devices=self.root / "devices", imex_capability=self.root / "capability"),
            boot_id=self.boot_id,
        )
        monitor = FabricMonitor(lambda: read_declared_fabric(fabric), loop_wall_time)
        return ImexPlugin(api, settings, monitor, HostImexDaemon(root=self.disk))


# A model of nvidia-imex and its supervisor.


class SimulatedImexProgram:
    """Stands in for both `Supervisor` and `ImexControl` of one daemon.

    `ready_after` is in seconds. `on_ready` is called when it is READY.
    """

    def __init__(self, ready_after: float, on_ready: Callable[[], None]) -> None:
        self.running_with: Peers | None = None
        self.failure = ""
        self.is_ready = asyncio.Event()
        self._ready_after = ready_after
        self._on_ready = on_ready
        self._started = asyncio.Event()

    def set_peers(self, peers: Peers) -> None:
        """Resolve the peers' names again, without a restart (`dns` mode)."""
        self.running_with = peers
        self._started.set()

    def recheck(self) -> None:
        """Its certificate is as it was."""

    def note_ready(self) -> None:
        """It never fails."""

    async def run(self) -> None:
        """Start, and be READY later."""
        await self._started.wait()
        await asyncio.sleep(self._ready_after)
        self.is_ready.set()
        self._on_ready()
        await asyncio.Event().wait()

    async def local_status(self) -> str:
        """As `nvidia-imex-ctl -q` prints it."""
        if not self.is_ready.is_set():
            raise Retry("not READY yet", after=0.1)
        return READY

    async def domain(self) -> ImexDomain:
        """As `nvidia-imex-ctl -N -j` prints it."""
        peers = self.running_with.addresses if self.running_with else {}
        links = {str(peer): ImexConnection(CONNECTED) for peer in peers}
        return ImexDomain("UP", {str(peer): ImexNode(READY, connections=links) for peer in peers})
