"""The plugin of IMEX channels as a process."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec

from rackloom.app.node import NodeOptions, host_of, pages, until_stopped
from rackloom.claim.cluster.settings import DEFAULT_DAEMON_NAMESPACE
from rackloom.claim.domain.isolation import ImexMode, Isolation
from rackloom.claim.domain.names import IMEX_DRIVER
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.node.cdi import CdiDirectory
from rackloom.claim.node.driver import DriverSpec, daemon_edits
from rackloom.claim.node.imex.clique_label import CliqueLabel
from rackloom.claim.node.imex.declared import read_declared
from rackloom.claim.node.imex.fabric import NodeFabric, check_driver
from rackloom.claim.node.imex.host import Kernel
from rackloom.claim.node.imex.nvml import read_nvml
from rackloom.claim.node.imex.plugin import ImexPlugin
from rackloom.claim.node.imex.readiness import HostDaemon
from rackloom.claim.node.imex.settings import ImexSettings
from rackloom.claim.node.imex.view import FabricView
from rackloom.claim.node.run import Running, running
from rackloom.claim.node.tasks import background


class ImexOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What only the IMEX plugin has."""

    namespaces: tuple[str, ...] = (DEFAULT_DAEMON_NAMESPACE,)
    """Where IMEX daemons run: the first is for new ones, the others are of earlier installations."""
    mode: ImexMode = ImexMode.DRIVER_MANAGED
    isolation: Isolation = Isolation.DOMAIN
    clique_label: bool = False
    fabric_file: Path | None = None
    driver_root: Path = Path("/")
    """Where NVIDIA's driver is seen from here."""
    host_driver_root: Path = Path("/")
    """Where the host has it."""
    proc_devices: Path | None = None
    host_socket: str = "/etc/nvidia-imex/imex_ctrl.sock"


def run_imex(common: NodeOptions, options: ImexOptions, announce: Callable[[str], None]) -> None:
    """Serve IMEX channels until SIGTERM or SIGINT."""
    asyncio.run(until_stopped(common, IMEX_DRIVER, partial(imex_node, common, options), announce))


@asynccontextmanager
async def imex_node(common: NodeOptions, options: ImexOptions, api: KubeApi) -> AsyncIterator[Running]:
    """The IMEX plugin of one node, serving while the context is entered.

    Raises `Refused` for a fabric file that cannot be used. What the node lacks is waited for.
    """
    if options.fabric_file is not None:
        read_declared(options.fabric_file)
    settings = _settings(common, options)
    view = FabricView(partial(_read, options, settings), time.time)
    host_daemon = HostDaemon(root=options.driver_root, socket=options.host_socket)
    plugin = ImexPlugin(api, settings, view, host_daemon, _driver_spec(common, options))
    await plugin.start()
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(running(plugin, api, host_of(common)))
        if options.clique_label:
            keep = settings.isolation is Isolation.CHANNEL
            label = CliqueLabel(api, common.node, view, keep=keep)
            await stack.enter_async_context(background(label.run()))
        await stack.enter_async_context(pages(common, one))
        yield one


def _read(options: ImexOptions, settings: ImexSettings) -> NodeFabric:
    """The fabric. Raises `Refused` without a driver that will do, `Retry` while the driver has trouble."""
    settings.kernel.channel_major()
    file = options.fabric_file
    fabric = read_nvml(options.driver_root) if file is None else read_declared(file)
    if options.mode is ImexMode.DRIVER_MANAGED:
        check_driver(fabric)
    return fabric


def _driver_spec(common: NodeOptions, options: ImexOptions) -> DriverSpec:
    return DriverSpec(
        CdiDirectory(common.places.cdi, IMEX_DRIVER),
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
        domains=common.places.home(IMEX_DRIVER) / "domains",
        mode=options.mode,
        isolation=options.isolation,
        kernel=_kernel(common.sysroot, options),
        boot_id=host_of(common).boot_id,
    )


def _kernel(sysroot: Path, options: ImexOptions) -> Kernel:
    return Kernel(
        proc_devices=options.proc_devices or sysroot / "proc/devices",
        imex_capability=sysroot / "proc/driver/nvidia/capabilities/fabric-imex-mgmt",
    )
