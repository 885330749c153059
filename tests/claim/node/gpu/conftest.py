"""A node with the GPUs of a machine profile, and programs in the place of NVIDIA's."""

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.waiting import until_so

from rackloom.claim.node.cdi import CdiDirectory, DriverFiles, DriverSpec, workload_edits
from rackloom.claim.node.gpu.driver_programs import DriverPrograms
from rackloom.claim.node.gpu.inventory import DeclaredGpus, DeclaredInventory
from rackloom.claim.node.gpu.monitor import GpuMonitor, GpuReader
from rackloom.claim.node.gpu.mps_launcher import MpsLauncher, PodLauncher, launcher_socket, serve_launches
from rackloom.claim.node.gpu.nvml import NvmlGpus
from rackloom.claim.node.gpu.passthrough import read_vfio
from rackloom.claim.node.gpu.plugin import GPU_DRIVER, GpuPlugin, GpuSettings
from rackloom.core.cluster.objects import RESOURCE_CLAIM
from rackloom.lab.nodes.dra_manager import PodClaim, pod_claim
from rackloom.lab.nodes.host_files import declared_inventory, host_files, write_sysroot
from rackloom.topology import profiles
from rackloom.topology.discovery.discover import discover_machine
from rackloom.topology.discovery.sysfs import Sysroot
from rackloom.topology.machine import Machine

H100 = "azure-nd96isr-h100-v5"
PROC_DEVICES = (
    "Character devices:\n  1 mem\n195 nvidia\n195 nvidia-modeset\n195 nvidiactl\n236 nvidia-caps\n"
    "507 nvidia-uvm\n\nBlock devices:\n  8 sd\n"
)
SMI = """#!/bin/sh
echo "nvidia-smi $*" >> "$LOG"
if [ -e "$STATE/smi-fails" ]; then echo "Insufficient Permissions"; exit 4; fi
"""
# The daemon runs while the file `running` is in its pipe directory.
CONTROL = """#!/bin/sh
if [ "$1" = "-d" ]; then
  shift
  echo "start $CUDA_VISIBLE_DEVICES $*" >> "$LOG"
  touch "$CUDA_MPS_PIPE_DIRECTORY/running"
  exit 0
fi
read -r command
if [ ! -e "$CUDA_MPS_PIPE_DIRECTORY/running" ]; then echo "Cannot find MPS control daemon process"; exit 1; fi
case "$command" in
  quit) echo "quit" >> "$LOG"; rm "$CUDA_MPS_PIPE_DIRECTORY/running" ;;
  get_*) echo 100.0 ;;
  *) echo "$command" >> "$LOG" ;;
esac
"""
# Runs the command without a namespace: not every user who runs the tests may make one.
UNSHARE = """#!/bin/sh
shift 4
exec sh -c 'shift; exec nvidia-cuda-mps-control -d "$@"' "$@"
"""


class GpuKit:
    """`kit` is the node without a plugin. `root` has the files of its GPUs."""

    def __init__(self, kit: Any, root: Path, programs: Path, profile: str = H100) -> None:
        self.kit, self.api, self.root, self.programs = kit, kit.api, root, programs
        self.sysroot = programs.parent / f"host-{profile}"
        self.vfio_root = self.sysroot
        self.inventory_file = root / "inventory.json"
        self.machine = profiles.load_machine(profile)
        files = host_files(self.machine)
        if not self.sysroot.exists():
            write_sysroot(files, self.sysroot)
        self._vendor = _written(programs.parent / f"{profile}.xml", files.nccl_topology)
        declared = msgspec.json.encode(files.declared).decode()
        self._declared = _written(programs.parent / f"{profile}.json", declared)
        (root / "devices").write_text(PROC_DEVICES)
        self.declare(declared_inventory(self.machine))
        self.driver = self._driver_below(root / "driver")

    def _driver_below(self, base: Path) -> DriverSpec:
        library = base / "usr/lib64/libcuda.so.580.95.05"
        library.parent.mkdir(parents=True)
        library.touch()
        return DriverSpec(CdiDirectory(self.kit.places.cdi, GPU_DRIVER), workload_edits, base=base)

    @property
    def log(self) -> list[str]:
        """The commands for the driver's programs, in order."""
        path = self.programs / "log"
        return path.read_text().splitlines() if path.exists() else []

    def forget_log(self) -> None:
        (self.programs / "log").unlink(missing_ok=True)

    def programs_fail(self, fail: bool) -> None:
        mark = self.programs / "smi-fails"
        mark.touch() if fail else mark.unlink()

    def declare(self, inventory: DeclaredInventory) -> None:
        self.inventory = inventory
        # Whole or not at all, as in any change under a running plugin.
        partial = self.inventory_file.with_suffix(".partial")
        partial.write_bytes(msgspec.json.encode(inventory))
        partial.replace(self.inventory_file)

    def change(self, index: int, **changes: Any) -> None:
        """One GPU becomes another."""
        gpus = list(self.inventory.gpus)
        gpus[index] = msgspec.structs.replace(gpus[index], **changes)
        self.declare(msgspec.structs.replace(self.inventory, gpus=tuple(gpus)))

    def discovered(self) -> Machine:
        """The devices that discovery finds. They do not change while a test runs."""
        return _discovered(self.sysroot, self._vendor, self._declared)

    def view(self) -> GpuMonitor:
        reading = GpuReader(
            DeclaredGpus(self.inventory_file), self.discovered, lambda: read_vfio(Sysroot(self.vfio_root))
        )
        return GpuMonitor(reading, frozenset(), lambda: self.kit.now, lambda: self.kit.now)

    def plugin(
        self, view: GpuMonitor | None = None, launcher: MpsLauncher | None = None, **changes: Any
    ) -> GpuPlugin:
        plain = {
            "node": self.kit.node,
            "mps_home": self.kit.places.home(GPU_DRIVER) / "mps",
            "files": DriverFiles(
                proc_devices=self.root / "devices",
                capabilities=self.root / "capabilities",
                devices=self.root / "dev",
            ),
        }
        settings = GpuSettings(**{**plain, **changes})
        programs = DriverPrograms(Path("/"))
        return GpuPlugin(self.api, settings, view or self.view(), programs, self.driver, launcher=launcher)

    async def claim(self, name: str, *devices: str, configs: Any = (), **result: Any) -> PodClaim:
        """A claim for the devices, each by a separate request: `r0`, `r1`..."""
        results = [
            {"request": f"r{i}", "driver": GPU_DRIVER, "pool": self.kit.node, "device": device, **result}
            for i, device in enumerate(devices)
        ]
        config = [
            {
                "source": source,
                "requests": requests,
                "opaque": {"driver": GPU_DRIVER, "parameters": parameters},
            }
            for source, requests, parameters in configs
        ]
        requests = [{"name": f"r{i}", "exactly": {"deviceClassName": "c"}} for i in range(len(devices))]
        made = await self.api.create(
            RESOURCE_CLAIM,
            {
                "apiVersion": RESOURCE_CLAIM.api_version,
                "kind": "ResourceClaim",
                "metadata": {"name": name, "namespace": "default"},
                "spec": {"devices": {"requests": requests}},
            },
        )
        status = {"allocation": {"devices": {"results": results, "config": config}}}
        return pod_claim(
            await self.api.replace(RESOURCE_CLAIM, {**made, "status": status}, subresource="status")
        )

    def edits(self, uid: str) -> list[Any]:
        """The containerEdits of a claim's devices."""
        spec = self.kit.places.cdi / f"k8s.{GPU_DRIVER}-claim_{uid}.yaml"
        return [device["containerEdits"] for device in json.loads(spec.read_bytes())["devices"]]


@cache
def _discovered(sysroot: Path, vendor: Path | None, declared: Path | None) -> Machine:
    return discover_machine(sysroot, nccl_topology=vendor, declared=declared)


def _written(path: Path, content: str | None) -> Path | None:
    if content is not None:
        path.write_text(content)
    return None if content is None else path


@pytest.fixture(autouse=True)
def nvml_sessions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test leaves one open: the library of another driver is loaded only when there is none."""
    open_sources: list[NvmlGpus] = []
    listen = NvmlGpus._listen

    def recorded(source: NvmlGpus) -> None:
        open_sources.append(source)
        listen(source)

    monkeypatch.setattr(NvmlGpus, "_listen", recorded)
    yield
    for source in open_sources:
        source.close()


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Programs that are found before NVIDIA's own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in (("nvidia-smi", SMI), ("nvidia-cuda-mps-control", CONTROL), ("unshare", UNSHARE)):
        # Programs get a clean environment, so what they need of the test is written into them.
        head = f'#!/bin/sh\nLOG="{folder}/log"\nSTATE="{folder}"\n'
        (folder / name).write_text(script.replace("#!/bin/sh\n", head, 1))
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    yield folder
    for left in Path("/dev/shm").glob("rackloom-mps-*"):
        shutil.rmtree(left, ignore_errors=True)


@asynccontextmanager
async def launcher_pod(home: Path) -> AsyncIterator[PodLauncher]:
    """`rackloom node mps` for the daemons in `home`, and the way to it."""
    path = launcher_socket(home)
    serving = asyncio.create_task(serve_launches(path, DriverPrograms(Path("/"))))
    await until_so(path.exists, "it listens")
    try:
        yield PodLauncher(path)
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


@pytest.fixture
def gpus(kit: Any, programs: Path, tmp_path: Path) -> GpuKit:
    return GpuKit(kit, tmp_path, programs)


@pytest.fixture
def make_gpus(kit: Any, programs: Path, tmp_path: Path) -> Callable[..., GpuKit]:
    """Nodes that have nothing in common but the programs."""
    numbers = itertools.count()

    def make(profile: str = H100) -> GpuKit:
        root = tmp_path / f"node-{next(numbers)}"
        root.mkdir()
        return GpuKit(type(kit)(root), root, programs, profile)

    return make
