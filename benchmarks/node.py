"""How fast a node plugin prepares, publishes and how much memory it holds, one JSON object a row.

    python benchmarks/node.py [--quick]

The plugin is that of gpu.nvidia.com on a node of 128 declared GPUs, behind its real unix socket. kubelet and
the API server are simulated in the same process: their time and memory are part of the figures. Each claim
has one GPU, is prepared by a call of its own and given back before the next one. `publish` is from the start
of the plugin to a complete pool, and then the change of one GPU. `claims` counts samples.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import msgspec
import structlog
from site_figures import load, resident_mib

from rackloom.claim.kube.kinds import NODE, RESOURCE_CLAIM
from rackloom.claim.node.gpu.condition import HARMLESS_XIDS
from rackloom.claim.node.gpu.declared import DeclaredGpu, DeclaredGpus, DeclaredInventory
from rackloom.claim.node.gpu.driver_files import DriverFiles
from rackloom.claim.node.gpu.plugin import GpuPlugin
from rackloom.claim.node.gpu.programs import Programs
from rackloom.claim.node.gpu.settings import GPU_DRIVER, GpuSettings
from rackloom.claim.node.gpu.view import GpuView, Reading
from rackloom.claim.node.run import Host, Places, running
from rackloom.topology.machine import Machine
from rackloom.twin.kube import DirectApi, FakeKube
from rackloom.twin.kubelet.claims import PodClaim, pod_claim
from rackloom.twin.kubelet.kubelet import Kubelet, kubelet_on

DEVICES = 128
CLAIMS, QUICK_CLAIMS = 1000, 20
NODE_NAME = "bench"
PROC_DEVICES = "Character devices:\n195 nvidia\n507 nvidia-uvm\n\nBlock devices:\n"
WRITES = ("create", "replace", "patch", "apply", "delete")


class Counting:
    """An API server's client that counts what it writes."""

    def __init__(self, api: DirectApi) -> None:
        self._api = api
        self.writes = 0

    def __getattr__(self, name: str) -> Any:
        self.writes += name in WRITES
        return getattr(self._api, name)


async def measured(root: Path, claims: int) -> list[dict[str, Any]]:
    """All rows."""
    api = Counting(DirectApi(FakeKube(namespaces=("default",), seed=1), "bench"))
    await api.create(NODE, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE_NAME}})
    made = [await claim(api, number) for number in range(claims)]
    before = resident_mib()
    places = Places(registry=root / "reg", plugins=root / "plug", cdi=root / "cdi")
    host = Host(node=NODE_NAME, boot_id="boot", places=places, wall=time.time)
    view = gpus(root)
    start, writes = time.perf_counter(), api.writes
    async with (
        running(plugin(root, view), api, host) as one,
        kubelet_on(places.registry, api, NODE_NAME) as kubelet,
    ):
        await one.publisher.published.wait()
        first = row("publish", change="first", **published(start, api.writes - writes))
        await kubelet.registered(GPU_DRIVER)
        rows = await claims_measured(kubelet, made)
        changed = await changing(root, view, one.publisher.publish, api)
        memory = row("memory", before_mib=before, resident_mib=resident_mib())
    return [first, changed, *rows, memory]


async def claims_measured(kubelet: Kubelet, made: list[PodClaim]) -> list[dict[str, Any]]:
    """Every claim prepared and given back, one after the other."""
    prepares, unprepares = [], []
    for one in made:
        prepares.append(await timed(kubelet.prepare(one)))
        unprepares.append(await timed(kubelet.unprepare(one)))
    return [
        row(measure, claims=len(times), **percentiles(times))
        for measure, times in (("prepare", prepares), ("unprepare", unprepares))
    ]


async def changing(root: Path, view: GpuView, publish: Any, api: Counting) -> dict[str, Any]:
    """One GPU fails: the look that finds out, and what is written."""
    write_inventory(root, recovery="gpu-reset")
    start, writes = time.perf_counter(), api.writes
    await view.look()
    await publish()
    return row("publish", change="one taint", **published(start, api.writes - writes))


def published(start: float, writes: int) -> dict[str, Any]:
    """What a publication took."""
    return {"ms": round((time.perf_counter() - start) * 1e3, 1), "api_writes": writes}


def plugin(root: Path, view: GpuView) -> GpuPlugin:
    """The plugin; its claims share nothing, so no program is run."""
    (root / "devices").write_text(PROC_DEVICES)
    files = DriverFiles(proc_devices=root / "devices")
    settings = GpuSettings(node=NODE_NAME, mps_home=root / "mps", files=files)
    return GpuPlugin(settings, view, Programs(Path("/")))


def gpus(root: Path) -> GpuView:
    """A node of 128 GPUs, about whose place nothing is known."""
    write_inventory(root)
    machine = Machine(name=NODE_NAME, note="", origin=(), gpus=(), nics=())
    reading = Reading(DeclaredGpus(root / "inventory.json"), lambda: machine)
    return GpuView(reading, HARMLESS_XIDS, time.time)


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


async def claim(api: Any, number: int) -> PodClaim:
    """An allocated claim for one GPU."""
    device = f"gpu-{number % DEVICES}"
    made = await api.create(
        RESOURCE_CLAIM,
        {
            "apiVersion": RESOURCE_CLAIM.api_version,
            "kind": "ResourceClaim",
            "metadata": {"name": f"claim-{number}", "namespace": "default"},
            "spec": {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": GPU_DRIVER}}]}},
        },
    )
    result = {"request": "r", "driver": GPU_DRIVER, "pool": NODE_NAME, "device": device}
    status = {"allocation": {"devices": {"results": [result]}}}
    return pod_claim(await api.replace(RESOURCE_CLAIM, {**made, "status": status}, subresource="status"))


async def timed(work: Awaitable[Any]) -> float:
    """Milliseconds."""
    start = time.perf_counter()
    await work
    return (time.perf_counter() - start) * 1e3


def percentiles(times: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    ordered = sorted(times)
    return {
        "p50_ms": round(ordered[len(ordered) // 2], 3),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)], 3),
    }


def row(measure: str, **figures: Any) -> dict[str, Any]:
    """One row."""
    simulated = "kubelet and API server, in this process"
    return {"measure": measure, "devices": DEVICES, **figures, "simulated": simulated, **load()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few claims: shows that it works, no more")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with tempfile.TemporaryDirectory(prefix="rl") as folder:
        count = QUICK_CLAIMS if options.quick else CLAIMS
        for line in asyncio.run(measured(Path(folder), count)):
            print(json.dumps(line), flush=True)
