"""The GPU plugin of one node as a process."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec

from rackloom.app.node import NodeOptions, host_of, pages, until_stopped
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.node.cdi import CdiDirectory
from rackloom.claim.node.driver import DriverSpec, find_hook, workload_edits
from rackloom.claim.node.gpu.condition import HARMLESS_XIDS
from rackloom.claim.node.gpu.declared import DeclaredGpus, check_declared
from rackloom.claim.node.gpu.driver_files import DriverFiles
from rackloom.claim.node.gpu.nvml_events import NvmlGpus
from rackloom.claim.node.gpu.plugin import GpuPlugin
from rackloom.claim.node.gpu.programs import Programs
from rackloom.claim.node.gpu.settings import GPU_DRIVER, GpuSettings
from rackloom.claim.node.gpu.shares import Shares
from rackloom.claim.node.gpu.source import GpuSource
from rackloom.claim.node.gpu.vfio import read_vfio
from rackloom.claim.node.gpu.view import GpuView, Reading
from rackloom.claim.node.run import Running, running
from rackloom.claim.node.values import Edits
from rackloom.topology.discovery.discover import discover
from rackloom.topology.discovery.driver import Driver
from rackloom.topology.discovery.sysroot import Sysroot


class GpuOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What only the GPU plugin has."""

    inventory_file: Path | None = None
    """Takes the place of NVML."""
    nccl_topology: Path | None = None
    topology_file: Path | None = None
    vfio: bool = False
    ignored_xids: tuple[int, ...] = ()
    driver_root: Path = Path("/")
    """Where NVIDIA's driver is seen from here."""
    host_driver_root: Path = Path("/")
    """Where the host has it."""
    proc_devices: Path | None = None
    shares: Shares = Shares()


def run_gpu(common: NodeOptions, options: GpuOptions, announce: Callable[[str], None]) -> None:
    """Serve GPUs until SIGTERM or SIGINT."""
    asyncio.run(until_stopped(common, GPU_DRIVER, partial(gpu_node, common, options), announce))


@asynccontextmanager
async def gpu_node(common: NodeOptions, options: GpuOptions, api: KubeApi) -> AsyncIterator[Running]:
    """The GPU plugin of one node, serving while the context is entered. Raises `Refused`."""
    source = _source(options)
    harmless = HARMLESS_XIDS | set(options.ignored_xids)
    view = GpuView(_reading(common, options, source), harmless, time.time)
    driver = _driver_spec(common, options)
    plugin = GpuPlugin(_settings(common, options), view, Programs(options.driver_root, driver), driver)
    async with AsyncExitStack() as stack:
        stack.callback(source.close)
        one = await stack.enter_async_context(running(plugin, api, host_of(common)))
        await stack.enter_async_context(pages(common, one))
        yield one


def _source(options: GpuOptions) -> GpuSource:
    if options.inventory_file is None:
        return NvmlGpus(options.driver_root)
    check_declared(options.inventory_file)
    return DeclaredGpus(options.inventory_file)


def _reading(common: NodeOptions, options: GpuOptions, source: GpuSource) -> Reading:
    machine = partial(
        discover, common.sysroot, nccl_topology=options.nccl_topology, declared=options.topology_file
    )
    if not options.vfio:
        return Reading(source, machine)
    return Reading(source, machine, partial(read_vfio, Sysroot(common.sysroot)))


def _driver_spec(common: NodeOptions, options: GpuOptions) -> DriverSpec:
    base, host_base = options.driver_root, options.host_driver_root

    def make(driver: Driver) -> Edits:
        return workload_edits(driver, find_hook(base, host_base))

    return DriverSpec(
        CdiDirectory(common.places.cdi, GPU_DRIVER),
        make,
        base=base,
        host_base=host_base,
        sysroot=common.sysroot,
        required=options.inventory_file is None,
    )


def _settings(common: NodeOptions, options: GpuOptions) -> GpuSettings:
    return GpuSettings(
        node=common.node,
        mps_home=common.places.home(GPU_DRIVER) / "mps",
        files=DriverFiles(
            proc_devices=options.proc_devices or common.sysroot / "proc/devices",
            capabilities=common.sysroot / "proc/driver/nvidia/capabilities",
            devices=options.driver_root / "dev",
        ),
        shares=options.shares,
    )
