"""Compute trays of NVLink cliques: the files that a node plugin finds on each, and its kubelet."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.claim.node.plugin_manager import KubeletPluginManager, plugin_manager_on

from rackloom.claim.kube.api import KubeApi
from rackloom.claim.node.plugin import PrepareState
from rackloom.claim.node.run import PluginDirectories
from rackloom.claim.node.storage import decode_checkpoint
from rackloom.core.cluster.names import IMEX_DRIVER

CLUSTER_UUID = "7b968a6d-c8aa-45e1-9e07-e1e51be99c31"
GPUS_PER_TRAY = 4
PROC_DEVICES = "Character devices:\n235 nvidia-caps-imex-channels\n236 nvidia-caps\n\nBlock devices:\n"
IMEX_CAPABILITY = "DeviceFileMinor: 512\nDeviceFileMode: 438\nDeviceFileModify: 1\n"
FOR_TRAYS = {"nvidia.com/gpu.present": "true"}
"""Node label by which the DaemonSet of deploy/kubernetes finds nodes."""
CAPACITY = {"cpu": "96", "memory": "1000Gi", "pods": "110", "nvidia.com/gpu": str(GPUS_PER_TRAY)}


def clique_name(number: int) -> str:
    """The n-th clique of the fabric."""
    return f"{CLUSTER_UUID}.{number}"


@dataclass(frozen=True)
class Tray:
    """The part of one node's file system that the programs here read or write."""

    root: Path
    clique: int
    slot: int

    @property
    def places(self) -> PluginDirectories:
        return PluginDirectories(
            registry=self.root / "reg", plugins=self.root / "plug", cdi=self.root / "cdi"
        )

    @property
    def fabric(self) -> Path:
        return self.root / "fabric.json"

    def furnish(self) -> None:
        """Write the files that stand for the kernel and NVML."""
        random = self.root / "proc/sys/kernel/random"
        random.mkdir(parents=True)
        self.places.registry.mkdir()
        (self.root / "proc/devices").write_text(PROC_DEVICES)
        capability = self.root / "proc/driver/nvidia/capabilities/fabric-imex-mgmt"
        capability.parent.mkdir(parents=True)
        capability.write_text(IMEX_CAPABILITY)
        self.boot(1)
        gpus = [self._gpu(module) for module in range(1, GPUS_PER_TRAY + 1)]
        self.fabric.write_text(
            json.dumps({"clusterUUID": CLUSTER_UUID, "cliqueId": self.clique, "gpus": gpus})
        )

    def boot(self, number: int) -> None:
        """The kernel's boot id changes with each boot."""
        (self.root / "proc/sys/kernel/random/boot_id").write_text(f"boot-{number}\n")

    def cdi_files(self) -> list[str]:
        """CDI specs of claims."""
        return sorted(path.name for path in self.places.cdi.glob("*-claim_*"))

    def prepared(self) -> list[str]:
        """UIDs of the claims in the plugin's checkpoint, without those that it remembers to refuse them."""
        path = self.places.home(IMEX_DRIVER) / "checkpoint.json"
        claims = decode_checkpoint(path.read_bytes(), path).claims if path.exists() else {}
        return sorted(uid for uid, claim in claims.items() if claim.state is not PrepareState.ABORTED)

    def edits(self, claim_uid: str) -> dict[str, list[object]]:
        """The edits that the container runtime reads from a claim's CDI spec."""
        (path,) = self.places.cdi.glob(f"*-claim_{claim_uid}.yaml")
        (device,) = json.loads(path.read_text())["devices"]
        edits: dict[str, list[object]] = device["containerEdits"]
        return edits

    def _gpu(self, module: int) -> dict[str, object]:
        number = self.clique * 1000 + self.slot * 10 + module
        place = {"chassisSerial": f"chassis-{self.clique}", "slot": self.slot, "tray": self.slot}
        return {"uuid": f"GPU-{number}", "moduleId": module, "fabricGuid": f"0x{number}", **place}


@asynccontextmanager
async def kubelets_of(
    trays: Mapping[str, Tray], api: KubeApi
) -> AsyncIterator[dict[str, KubeletPluginManager]]:
    """The part of each node's kubelet that finds plugins and calls them."""
    async with AsyncExitStack() as stack:
        yield {
            node: await stack.enter_async_context(plugin_manager_on(tray.places.registry, api, node))
            for node, tray in trays.items()
        }
