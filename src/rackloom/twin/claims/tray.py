"""The machine under a node: the files that the real IMEX plugin reads and writes, and the plugin itself."""

import json
import shutil
from pathlib import Path

from rackloom.claim.cluster.settings import DEFAULT_DAEMON_NAMESPACE
from rackloom.claim.domain import names
from rackloom.claim.domain.isolation import Isolation
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.node.imex.declared import read_declared
from rackloom.claim.node.imex.host import Kernel
from rackloom.claim.node.imex.plugin import ImexPlugin
from rackloom.claim.node.imex.readiness import HostDaemon
from rackloom.claim.node.imex.settings import ImexSettings
from rackloom.claim.node.imex.view import FabricView
from rackloom.claim.node.run import Host, Places, Running
from rackloom.twin.kube.times import loop_time

CLUSTER_UUID = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31"


def install_kernel(root: Path) -> None:
    """What the NVIDIA kernel modules show under /proc, once for all trays below `root`."""
    (root / "devices").write_text("Character devices:\n235 nvidia-caps-imex-channels\n236 nvidia-caps\n")
    (root / "capability").write_text("DeviceFileMinor: 512\nDeviceFileMode: 438\n")


class Tray:
    """One tray of one clique, with its disk below `root` (see `install_kernel`)."""

    def __init__(self, root: Path, clique_number: int, number: int) -> None:
        self.root = root
        self.clique_number = clique_number
        self.name = f"n{clique_number}-{number}"
        """Of its node."""
        self.clique = f"{CLUSTER_UUID}.{clique_number}"
        """As its node's label says."""
        self.labels = {names.GPU_CLIQUE_LABEL: self.clique}
        """Of its node, as GPU Feature Discovery writes them."""
        self.disk = root / self.name
        """All that this tray keeps."""
        self.places = Places(registry=self.disk / "reg", plugins=self.disk / "plug", cdi=self.disk / "cdi")
        """Where the plugin meets kubelet and the runtime."""
        self.domains = self.places.home(names.IMEX_DRIVER) / "domains"
        """The directories of ComputeDomains."""

    def plugin(self, api: KubeApi, isolation: Isolation, boot_id: str = "1") -> ImexPlugin:
        """The real plugin, as it comes up after any end."""
        self.places.home(names.IMEX_DRIVER).mkdir(parents=True, exist_ok=True)
        fabric = self.root / f"fabric-{self.clique_number}.json"
        if not fabric.exists():
            declared = {"clusterUUID": CLUSTER_UUID, "cliqueId": self.clique_number, "gpus": [{}]}
            fabric.write_text(json.dumps(declared))
        settings = ImexSettings(
            node=self.name,
            namespaces=(DEFAULT_DAEMON_NAMESPACE,),
            domains=self.domains,
            isolation=isolation,
            kernel=Kernel(proc_devices=self.root / "devices", imex_capability=self.root / "capability"),
            boot_id=boot_id,
        )
        view = FabricView(lambda: read_declared(fabric), loop_time)
        return ImexPlugin(api, settings, view, HostDaemon(root=self.disk))

    def running(self, plugin: ImexPlugin, api: KubeApi, boot_id: str = "1") -> Running:
        """What answers kubelet, without sockets. Reads the checkpoint that is on the disk."""
        host = Host(node=self.name, boot_id=boot_id, places=self.places, wall=loop_time)
        return Running(plugin, api, host)

    def power_off(self) -> None:
        """What does not outlive the power: /var/run is in memory."""
        shutil.rmtree(self.places.cdi, ignore_errors=True)
