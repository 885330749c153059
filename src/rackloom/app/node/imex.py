"""The plugin of IMEX channels as a process: driver compute-domain.nvidia.com.

The NVLink fabric of the node is read through NVML, or from a fabric file on nodes without GPUs. In mode
driverManaged each reading refuses a driver whose IMEX daemon cannot follow its peers by DNS name. A
fabric file that cannot be used is refused at the start. The plugin waits for a driver or a device that is
missing.

With `clique_label` the plugin writes the node label nvidia.com/gpu.clique while no other writer does, and
keeps it in channel isolation.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec

from rackloom.app.node.process import NodeOptions, host_of, plugin_listeners, serve_plugin
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.node.cdi import CdiDirectory, DriverSpec, ImexKernel, daemon_edits
from rackloom.claim.node.fabric import (
    FabricMonitor,
    NodeFabric,
    check_fabric_driver,
    read_declared_fabric,
    read_nvml_fabric,
)
from rackloom.claim.node.imex.devices import ImexSettings
from rackloom.claim.node.imex.domains import HostImexDaemon
from rackloom.claim.node.imex.labels import CliqueLabel
from rackloom.claim.node.imex.plugin import ImexPlugin
from rackloom.claim.node.run import PluginProcess, run_plugin
from rackloom.claim.node.tasks import run_background
from rackloom.core.cluster.names import IMEX_DRIVER, ImexIsolation, ImexMode
from rackloom.core.domains.settings import DEFAULT_DAEMON_NAMESPACE


class ImexOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the IMEX plugin only."""

    namespaces: tuple[str, ...] = (DEFAULT_DAEMON_NAMESPACE,)
    """Namespaces of IMEX daemons: the first is for new ones, the others are of earlier installations."""
    mode: ImexMode = ImexMode.DRIVER_MANAGED
    isolation: ImexIsolation = ImexIsolation.DOMAIN
    clique_label: bool = False
    fabric_file: Path | None = None
    driver_root: Path = Path("/")
    """Root of NVIDIA's driver in this container."""
    host_driver_root: Path = Path("/")
    """Root of NVIDIA's driver on the host."""
    proc_devices: Path | None = None
    host_socket: str = "/etc/nvidia-imex/imex_ctrl.sock"


def run_imex(common: NodeOptions, options: ImexOptions, announce: Callable[[str], None]) -> None:
    """Serve IMEX channels until SIGTERM or SIGINT."""
    asyncio.run(serve_plugin(common, IMEX_DRIVER, partial(imex_node, common, options), announce))


@asynccontextmanager
async def imex_node(common: NodeOptions, options: ImexOptions, api: KubeApi) -> AsyncIterator[PluginProcess]:
    """The IMEX plugin of one node, serving while the context is entered.

    Raises `Refused` for a fabric file that cannot be used. Waits for a missing driver or device.
    """
    if options.fabric_file is not None:
        read_declared_fabric(options.fabric_file)
    settings = _settings(common, options)
    fabric = FabricMonitor(partial(_read, options, settings), time.time)
    host_daemon = HostImexDaemon(root=options.driver_root, socket=options.host_socket)
    plugin = ImexPlugin(api, settings, fabric, host_daemon, _driver_spec(common, options))
    await plugin.start()
    label = CliqueLabel(api, common.node, fabric, keep=settings.isolation is ImexIsolation.CHANNEL)
    async with (
        run_plugin(plugin, api, host_of(common)) as process,
        run_background(*([label.run()] if options.clique_label else [])),
        plugin_listeners(common, process),
    ):
        yield process


def _read(options: ImexOptions, settings: ImexSettings) -> NodeFabric:
    """The fabric. Raises `Refused` without a driver that will do, `Retry` while the driver has trouble."""
    settings.kernel.channel_major()
    file = options.fabric_file
    fabric = read_nvml_fabric(options.driver_root) if file is None else read_declared_fabric(file)
    if options.mode is ImexMode.DRIVER_MANAGED:
        check_fabric_driver(fabric)
    return fabric


def _driver_spec(common: NodeOptions, options: ImexOptions) -> DriverSpec:
    return DriverSpec(
        CdiDirectory(common.directories.cdi, IMEX_DRIVER),
        daemon_edits,
        base=options.driver_root,
        host_base=options.host_driver_root,
        sysroot=common.sysroot,
        required=options.fabric_file is None,
    )


def _settings(common: NodeOptions, options: ImexOptions) -> ImexSettings:
    return ImexSettings(
        node=common.node,
        namespaces=options.namespaces,
        domains=common.directories.home(IMEX_DRIVER) / "domains",
        mode=options.mode,
        isolation=options.isolation,
        kernel=ImexKernel(
            proc_devices=options.proc_devices or common.sysroot / "proc/devices",
            imex_capability=common.sysroot / "proc/driver/nvidia/capabilities/fabric-imex-mgmt",
        ),
        boot_id=host_of(common).boot_id,
    )
