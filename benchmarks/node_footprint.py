"""What each node plugin holds in memory, alone and as one process for all three, one JSON object a row.

    python benchmarks/node_footprint.py [--quick]

Each row is `rackloom node imex`, `gpu`, `nic` or `all` on a GB200 tray as files, connected to an API server
in this process, over TLS; no kubelet, no runtime. It is read when every plugin has published its slices and
listens for probes, after some seconds of rest. `resident_mib` counts pages that other processes share too
(the interpreter, libraries); `own_mib` is what the process alone holds (its private pages).
"""

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import goals
import msgspec
from site_figures import load

from rackloom.app.twin.up import served_api
from rackloom.core.cluster.objects import NODE, RESOURCE_SLICE
from rackloom.lab.kube.direct import DirectApi
from rackloom.lab.kube.server import FakeKube
from rackloom.lab.nodes.host_files import declared_inventory, host_files, write_sysroot
from rackloom.topology import profiles

PROFILE = "oci-bm.gpu.gb200-v3.4"
FABRIC = {
    "clusterUUID": "7b968a6d-c8aa-45e1-9e07-e1e51be99c31",
    "cliqueId": 1,
    "driverVersion": "580.95.05",
    "gpus": [{}],
}
DEVICES = "Character devices:\n195 nvidia\n235 nvidia-caps-imex-channels\n236 nvidia-caps\n\nBlock devices:\n"
GOALS = {"imex": 45, "gpu": 45, "nic": 60, "all": 80}
DRIVERS = {"imex": 1, "gpu": 1, "nic": 0, "all": 2}
"""Drivers whose slices are waited for; a tray as files may show no NIC."""
RUN = "from rackloom.cli.main import main; main()"
REST, QUICK_REST = 5.0, 1.0
START_SECONDS = 120


def host(root: Path) -> None:
    """A tray as files."""
    machine = profiles.load_machine(PROFILE)
    write_sysroot(host_files(machine), root)
    for folder in ("proc/sys/kernel/random", "proc/driver/nvidia/capabilities", "usr/lib64"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "proc/sys/kernel/random/boot_id").write_text("boot-1\n")
    (root / "proc/devices").write_text(DEVICES)
    (root / "usr/lib64/libcuda.so.1").touch()
    (root / "fabric.json").write_text(json.dumps(FABRIC))
    (root / "inventory.json").write_bytes(msgspec.json.encode(declared_inventory(machine)))


def arguments(which: str, root: Path) -> list[str]:
    """The command line of a plugin."""

    def before(plugin: str, option: str) -> str:
        return f"--{plugin}.{option}" if which == "all" else f"--{option}"

    own = {
        "imex": [before("imex", "fabric-file"), str(root / "fabric.json")],
        "gpu": [before("gpu", "inventory-file"), str(root / "inventory.json")],
        "nic": [before("nic", "nri-socket"), str(root / "nri.sock")],
    }
    own["all"] = [*own["imex"], *own["gpu"], *own["nic"]]
    common = ["--node", "n1", "--sysroot", str(root), "--registry", str(root / "reg")]
    common += ["--plugins", str(root / "plug"), "--cdi-root", str(root / "cdi")]
    common += ["--listen", "127.0.0.1:0", "--kubeconfig", str(root / "kubeconfig")]
    driver = [] if which == "nic" else ["--driver-root", str(root)]
    return ["node", which, *common, *driver, *own[which]]


async def measured(which: str, rest: float) -> dict[str, Any]:
    """The memory of one process."""
    with tempfile.TemporaryDirectory(prefix="rl") as name:
        root = Path(name)
        host(root)
        kube = FakeKube(namespaces=("default", "rackloom-imex"), seed=1)
        api = DirectApi(kube, "bench")
        await api.create(NODE, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}})
        async with served_api(kube, "plugin", root / "kubeconfig"):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", RUN, *arguments(which, root)), stdout=asyncio.subprocess.PIPE
            )
            try:
                await asyncio.wait_for(_serving(process, api, DRIVERS[which]), START_SECONDS)
                await asyncio.sleep(rest)
                used = memory(process.pid)
            finally:
                if process.returncode is None:
                    process.terminate()
                await process.wait()
    return {
        "benchmark": "node footprint",
        "process": f"rackloom node {which}",
        **used,
        "goal_mib": GOALS[which],
        "simulated": "API server: another process; kubelet and runtime: none",
        **load(),
    }


async def _serving(process: asyncio.subprocess.Process, api: DirectApi, drivers: int) -> None:
    assert process.stdout is not None
    if not await process.stdout.readline():
        raise RuntimeError(f"the plugin ended with {await process.wait()}")
    published: set[str] = set()
    while len(published) < drivers:
        await asyncio.sleep(0.2)
        published = {item["spec"]["driver"] for item in (await api.list(RESOURCE_SLICE)).items}


def memory(pid: int) -> dict[str, float]:
    """Mebibytes of a process."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()

    kib = {name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+)", text, re.MULTILINE)}

    def mib(*names: str) -> float:
        return round(sum(kib[name] for name in names) / 1024, 1)

    return {"resident_mib": mib("Rss"), "own_mib": mib("Private_Clean", "Private_Dirty")}


async def rows(which: Sequence[str], rest: float) -> None:
    """Print a row for each."""
    for process in which:
        print(json.dumps(goals.judged("node_footprint", await measured(process, rest))), flush=True)


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one process, less rest: shows that it works")
    quick = parser.parse_args().quick
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    asyncio.run(rows(("all",) if quick else tuple(GOALS), QUICK_REST if quick else REST))


if __name__ == "__main__":
    main()
