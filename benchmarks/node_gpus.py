"""The plugin of gpu.nvidia.com on a node of 128 declared GPUs."""

import sys
import time
from pathlib import Path
from typing import Any

# The kubelet is that of the tests.
sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec
from node_kit import NODE_NAME, Counting, claim, claims_measured, cluster, host_below, row
from site_figures import resident_mib
from tests.claim.node.plugin_manager import plugin_manager_on

from rackloom.claim.node.cdi import DriverFiles
from rackloom.claim.node.gpu.driver_programs import DriverPrograms
from rackloom.claim.node.gpu.inventory import DeclaredGpu, DeclaredGpus, DeclaredInventory
from rackloom.claim.node.gpu.monitor import GpuMonitor, GpuReader
from rackloom.claim.node.gpu.plugin import GPU_DRIVER, GpuPlugin, GpuSettings
from rackloom.claim.node.run import run_plugin
from rackloom.topology.machine import Machine

DEVICES = 128
PLUGIN = "gpu"
PROC_DEVICES = "Character devices:\n195 nvidia\n507 nvidia-uvm\n\nBlock devices:\n"


async def measured(root: Path, claims: int) -> list[dict[str, Any]]:
    """Publication from the start of the plugin, claims, a change of one GPU, memory."""
    api, host = await cluster(), host_below(root)
    made = [await claim(api, number, GPU_DRIVER, f"gpu-{number % DEVICES}") for number in range(claims)]
    before, view = resident_mib(), gpus(root)
    start, writes = time.perf_counter(), api.writes
    async with (
        run_plugin(plugin(api, root, view), api, host) as node,
        plugin_manager_on(host.directories.registry, api, NODE_NAME) as kubelet,
    ):
        await node.publisher.published.wait()
        first = row(PLUGIN, "publish", change="first", **published(start, api.writes - writes))
        await kubelet.registered(GPU_DRIVER)
        rows = await claims_measured(PLUGIN, kubelet, made)
        changed = await changing(root, view, node.publisher.publish, api)
        memory = row(PLUGIN, "memory", before_mib=before, resident_mib=resident_mib(), devices=DEVICES)
    return [first, changed, *rows, memory]


async def changing(root: Path, view: GpuMonitor, publish: Any, api: Counting) -> dict[str, Any]:
    """One GPU fails: the look that finds out, and what is written."""
    write_inventory(root, recovery="gpu-reset")
    start, writes = time.perf_counter(), api.writes
    await view.observe()
    await publish()
    return row(PLUGIN, "publish", change="one taint", **published(start, api.writes - writes))


def published(start: float, writes: int) -> dict[str, Any]:
    """What a publication took."""
    return {
        "ms": round((time.perf_counter() - start) * 1e3, 1),
        "api_writes": writes,
        "devices": DEVICES,
    }


def plugin(api: Counting, root: Path, view: GpuMonitor) -> GpuPlugin:
    """The plugin; its claims share nothing, so no program is run."""
    (root / "devices").write_text(PROC_DEVICES)
    files = DriverFiles(proc_devices=root / "devices")
    settings = GpuSettings(node=NODE_NAME, mps_home=root / "mps", files=files)
    return GpuPlugin(api, settings, view, DriverPrograms(Path("/")))


def gpus(root: Path) -> GpuMonitor:
    """A node of 128 GPUs, about whose place nothing is known."""
    write_inventory(root)
    machine = Machine(name=NODE_NAME, note="", origin=(), gpus=(), nics=())
    reading = GpuReader(DeclaredGpus(root / "inventory.json"), lambda: machine)
    return GpuMonitor(reading, frozenset(), time.time, time.monotonic)


def write_inventory(root: Path, recovery: str = "none") -> None:
    """Declare the GPUs; `recovery` is what the first one asks for."""
    declared = [gpu(number, recovery if number == 0 else "none") for number in range(DEVICES)]
    inventory = DeclaredInventory(gpus=tuple(declared), driver_version="580.95.05", cuda_version="13.0")
    (root / "inventory.json").write_bytes(msgspec.json.encode(inventory))


def gpu(number: int, recovery: str) -> DeclaredGpu:
    """One GPU."""
    return DeclaredGpu(
        minor=number,
        uuid=f"GPU-{number:08x}-0000-0000-0000-000000000000",
        pci_address=f"{number:04x}:01:00.0",
        product="NVIDIA H100 80GB HBM3",
        memory_bytes=85520809984,
        brand="Nvidia",
        architecture="Hopper",
        compute_capability="9.0",
        recovery=recovery,
    )
