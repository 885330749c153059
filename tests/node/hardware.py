"""The hardware of a real node, as the files that kernel and driver would show of it.

A node is one H100 machine of the NIXL example (its sysfs: GPUs, RDMA NICs, NUMA nodes) that is at the same
time a tray of an NVLink rack (NVML: one clique, IMEX channels), so that one node serves all examples. Our
programs are the real ones, and find all of it where they find it on a host: NVIDIA's libraries and programs
below the root, /proc/devices, /proc/driver/nvidia, /sys and /dev. The stand-ins are driver/nvml.c,
driver/imex.c, driver/mps.c and driver/nvidia-smi.
"""

import os
import shutil
import subprocess
from pathlib import Path

import msgspec

from rackloom.lab.nodes.host_files import declared_inventory, host_files, write_sysroot
from rackloom.topology import profiles

SOURCES = Path(__file__).parent / "driver"
REAL_IMEX = "RACKLOOM_NVIDIA_IMEX"
"""A folder with NVIDIA's own nvidia-imex and nvidia-imex-ctl, to use instead of the stand-in."""
DRIVER = "580.95.05"
MACHINE = "azure-nd96isr-h100-v5"
CLUSTER_UUID = "7b968a6dc8aa45e19e07e1e51be99c31"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
_HOPPER = 9
_PROC_DEVICES = """Character devices:
  1 mem
195 nvidia
231 infiniband_verbs
507 nvidia-uvm
508 nvidia-caps
509 nvidia-caps-imex-channels

Block devices:
"""
_CAPABILITY = "DeviceFileMinor: 323\nDeviceFileMode: 256\nDeviceFileModify: 1\n"
_NVIDIA, _UVM = 195, 507
_MIG_INSTANCES, _FIRST_MIG_MINOR = 8, 400
"""As in driver/nvml.c."""


def lay_out(folder: Path, index: int, *, clique: int = 1, driver: bool = True) -> None:
    """Write the hardware of node `index` (1 for the first) below `folder`, for boot.sh.

    `clique` is its NVLink clique. Without `driver` NVIDIA's driver is not installed, and `install_driver`
    adds it.
    """
    machine = profiles.load_machine(MACHINE)
    files = folder / "files"
    write_sysroot(host_files(machine), files)
    (files / "sys").rename(folder / "sys")
    (folder / "proc").mkdir()
    driver_entries = files / "proc/driver"
    capabilities = driver_entries / "nvidia/capabilities"
    capabilities.mkdir(parents=True)
    (capabilities / "fabric-imex-mgmt").write_text(_CAPABILITY)
    for minor in range(len(machine.gpus)):
        _write_mig_capabilities(capabilities / f"gpu{minor}/mig", minor)
    driver_entries.rename(folder / "proc/driver")
    (folder / "proc/devices").write_text(_PROC_DEVICES)
    (folder / "root").mkdir()
    gpus = len(machine.gpus)
    nodes = [("nvidiactl", _NVIDIA, 255), ("nvidia-uvm", _UVM, 0), ("nvidia-uvm-tools", _UVM, 1)]
    nodes += [(f"nvidia{minor}", _NVIDIA, minor) for minor in range(gpus)]
    (folder / "devices").write_text("".join(f"{name} {major} {minor}\n" for name, major, minor in nodes))
    if driver:
        install_driver(folder / "root", index, clique)


def install_driver(root: Path, index: int, clique: int, version: str = DRIVER) -> None:
    """NVIDIA's libraries and programs, below `root`: at boot that is the node's root."""
    programs = root / "usr/bin"
    programs.mkdir(parents=True, exist_ok=True)
    install_nvml(root, gpu_table(index, clique, version))
    cuda = root / LIBRARIES / f"libcuda.so.{version}"
    _compile("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", cuda, "-x", "c", os.devnull)
    (root / LIBRARIES / "libcuda.so.1").symlink_to(cuda.name)
    imex = programs / "nvidia-imex"
    _compile("-static", "-o", imex, SOURCES / "imex.c")
    shutil.copy(imex, programs / "nvidia-imex-ctl")
    _compile("-static", "-o", programs / "nvidia-cuda-mps-control", SOURCES / "mps.c")
    shutil.copy(SOURCES / "nvidia-smi", programs / "nvidia-smi")
    if real := os.environ.get(REAL_IMEX):
        for name in ("nvidia-imex", "nvidia-imex-ctl"):
            shutil.copy(Path(real) / name, programs / f"{name}.real")


def _write_mig_capabilities(folder: Path, gpu: int) -> None:
    """Write those of every possible MIG device: the plugin's pod sees the host's /proc and can't write it."""
    for instance in range(1, _MIG_INSTANCES + 1):
        first = _FIRST_MIG_MINOR + 2 * (gpu * _MIG_INSTANCES + instance)
        for part, minor in ((f"gi{instance}", first), (f"gi{instance}/ci0", first + 1)):
            (folder / part).mkdir(parents=True)
            text = f"DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
            (folder / part / "access").write_text(text)


def install_nvml(root: Path, table: str) -> None:
    """The NVML stand-in, below `root`, with the version and the GPUs of `table`."""
    libraries = root / LIBRARIES
    libraries.mkdir(parents=True, exist_ok=True)
    nvml = libraries / f"libnvidia-ml.so.{table.splitlines()[0]}"
    _compile("-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", nvml, SOURCES / "nvml.c")
    (libraries / "libnvidia-ml.so.1").symlink_to(nvml.name)
    (libraries / "libnvidia-ml.gpus").write_text(table)


def gpu_table(index: int, clique: int, version: str = DRIVER) -> str:
    """The table from which the NVML stand-in of node `index` answers."""
    inventory = declared_inventory(profiles.load_machine(MACHINE))
    rows = [version]
    for number, gpu in enumerate(inventory.gpus):
        uuid = f"GPU-{index:08d}-0000-4000-8000-{number:012d}"
        capability = (gpu.compute_capability or "9.0").split(".")
        guid = f"{0x7C0A000000000000 + index * 16 + number:x}"
        row = (gpu.minor, uuid, gpu.pci_address, gpu.product, gpu.memory_bytes, *capability, _HOPPER)
        tray = ("1820325190001", index, index, number % 4 + 1, guid, CLUSTER_UUID, clique, 3, 1)
        rows.append("\t".join(map(str, (*row, *tray))))
    return "\n".join(rows) + "\n"


def kubelet_configuration(cgroup: str, authority: Path, dns: str) -> bytes:
    """kubelet's configuration file for a node whose cgroups are below `cgroup`."""
    return msgspec.json.encode(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(authority)},
            },
            "authorization": {"mode": "Webhook"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{cgroup}",
            "failCgroupV1": False,
            "clusterDNS": [dns],
            "clusterDomain": "cluster.local",
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "failSwapOn": False,
            "oomScoreAdj": 0,
            "evictionHard": {"nodefs.available": "1%", "memory.available": "100Mi"},
            "imageGCHighThresholdPercent": 100,
            "makeIPTablesUtilChains": False,
            "localStorageCapacityIsolation": False,
        }
    )


def _compile(*words: str | Path) -> None:
    subprocess.run(["cc", "-O2", *map(str, words)], check=True)
