"""The GPU plugin of one node as a process: driver gpu.nvidia.com.

GPUs come from NVML, or from an inventory file on nodes without GPUs. Their place in the PCIe tree comes
from the host's /sys, completed by the vendor's NCCL topology file and by declarations. With `vfio`, GPUs
that are bound to vfio-pci are published too. The lines of XIDs come from the host's /dev/kmsg.

There are two paths to the root of NVIDIA's driver: one in this container, and one on the host. CDI specs
must name the second.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path

import msgspec

from rackloom.app.node.process import NodeOptions, host_of, plugin_listeners, serve_plugin
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.node.cdi import CdiDirectory, DriverFiles, DriverSpec, find_hook_program, workload_edits
from rackloom.claim.node.gpu.driver_programs import DriverPrograms
from rackloom.claim.node.gpu.inventory import DeclaredGpus, GpuSource, ShareSettings, check_declared_gpus
from rackloom.claim.node.gpu.kernel_log import KernelLog
from rackloom.claim.node.gpu.monitor import GpuMonitor, GpuReader
from rackloom.claim.node.gpu.mps_launcher import PodLauncher, daemons_home, launcher_socket
from rackloom.claim.node.gpu.nvml import NvmlGpus
from rackloom.claim.node.gpu.passthrough import NVIDIA_DRIVER, PciBinder, read_vfio
from rackloom.claim.node.gpu.plugin import GPU_DRIVER, GpuPlugin, GpuSettings
from rackloom.claim.node.pci_names import read_pci_names
from rackloom.claim.node.plugin import ContainerEdits
from rackloom.claim.node.run import PluginProcess, run_plugin
from rackloom.errors import Refused
from rackloom.topology.discovery.discover import discover_machine
from rackloom.topology.discovery.nvidia_driver import NvidiaDriver
from rackloom.topology.discovery.sysfs import Sysroot

_PCI = Path("/sys/bus/pci")
"""This container's /sys shows the host's functions. The host's files may be mounted read-only."""


class GpuOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the GPU plugin only."""

    inventory_file: Path | None = None
    """Takes the place of NVML."""
    nccl_topology: Path | None = None
    topology_file: Path | None = None
    vfio: bool = False
    vfio_binding: bool = False
    ignored_xids: tuple[int, ...] = ()
    driver_root: Path = Path("/")
    """Root of NVIDIA's driver in this container."""
    host_driver_root: Path = Path("/")
    """Root of NVIDIA's driver on the host."""
    proc_devices: Path | None = None
    shares: ShareSettings = ShareSettings()
    dynamic_mig: bool = False
    mps_in_pod: bool = False
    """Whether MPS daemons run in the pod of `rackloom node mps`."""


def check_options(options: GpuOptions) -> None:
    """Raise `Refused` for options that do not go together."""
    made = [
        name
        for name, chosen in (
            ("--dynamic-mig", options.dynamic_mig),
            ("--vfio-binding", options.vfio_binding),
        )
        if chosen
    ]
    if len(made) > 1:
        raise Refused(f"{' and '.join(made)} exclude each other", nearest_fix="use each on nodes of its own")
    if made and options.inventory_file is not None:
        raise Refused(
            f"{made[0]} needs NVIDIA's driver, and --inventory-file takes its place",
            nearest_fix="declare the devices in the file",
        )
    if made and options.shares != ShareSettings():
        raise Refused(
            f"{made[0]} and --consumable-shares exclude each other: a claim has such a device alone",
            nearest_fix="leave one of them out",
        )


def run_gpu(common: NodeOptions, options: GpuOptions, announce: Callable[[str], None]) -> None:
    """Serve GPUs until SIGTERM or SIGINT."""
    asyncio.run(serve_plugin(common, GPU_DRIVER, partial(gpu_node, common, options), announce))


@asynccontextmanager
async def gpu_node(common: NodeOptions, options: GpuOptions, api: KubeApi) -> AsyncIterator[PluginProcess]:
    """The GPU plugin of one node, serving while the context is entered. Raises `Refused`."""
    nvml = NvmlGpus(options.driver_root, dynamic_mig=options.dynamic_mig)
    source = nvml if options.inventory_file is None else _declared(options.inventory_file)
    log = KernelLog(common.sysroot / "dev/kmsg", time.monotonic)
    reader = _reader(common, options, source, log)
    monitor = GpuMonitor(reader, frozenset(options.ignored_xids), time.time, time.monotonic)
    driver = _driver_spec(common, options)
    programs = DriverPrograms(options.driver_root, driver)
    settings = _settings(common, options)
    # Needed even if the options are off: a claim may have a device that was made or bound before.
    partitioner = None if options.inventory_file is not None else nvml
    binder = None if partitioner is None else PciBinder(_PCI, common.sysroot / "proc", nvml.closed)
    launcher = PodLauncher(launcher_socket(settings.mps_home)) if options.mps_in_pod else None
    plugin = GpuPlugin(api, settings, monitor, programs, driver, partitioner, launcher, binder)
    with closing(source), closing(log):
        async with run_plugin(plugin, api, host_of(common)) as process, plugin_listeners(common, process):
            yield process


def _declared(file: Path) -> DeclaredGpus:
    check_declared_gpus(file)
    return DeclaredGpus(file)


def _reader(common: NodeOptions, options: GpuOptions, source: GpuSource, log: KernelLog) -> GpuReader:
    topology = {"nccl_topology": options.nccl_topology, "declared": options.topology_file}
    machine = partial(discover_machine, common.sysroot, **topology)
    sysroot = Sysroot(common.sysroot)
    names, driver = read_pci_names(sysroot), NVIDIA_DRIVER if options.vfio_binding else None
    vfio = partial(read_vfio, sysroot, names, binds_from=driver) if options.vfio or driver else tuple
    return GpuReader(source, machine, vfio, log.read)


def _driver_spec(common: NodeOptions, options: GpuOptions) -> DriverSpec:
    base, host_base = options.driver_root, options.host_driver_root

    def make(driver: NvidiaDriver) -> ContainerEdits:
        return workload_edits(driver, find_hook_program(base, host_base))

    return DriverSpec(
        CdiDirectory(common.directories.cdi, GPU_DRIVER),
        make,
        base=base,
        host_base=host_base,
        sysroot=common.sysroot,
        required=options.inventory_file is None,
    )


def _settings(common: NodeOptions, options: GpuOptions) -> GpuSettings:
    return GpuSettings(
        node=common.node,
        mps_home=daemons_home(common.directories.plugins),
        files=DriverFiles(
            proc_devices=options.proc_devices or common.sysroot / "proc/devices",
            capabilities=common.sysroot / "proc/driver/nvidia/capabilities",
            devices=options.driver_root / "dev",
        ),
        shares=options.shares,
    )
