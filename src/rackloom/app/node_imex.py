"""The plugin of IMEX channels as a process."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec

from rackloom.app.node import NodeOptions, driver_spec, host_of, pages, until_stopped
from rackloom.claim.cluster.settings import DEFAULT_DAEMON_NAMESPACE
from rackloom.claim.domain.isolation import ImexMode, Isolation
from rackloom.claim.domain.names import IMEX_DRIVER
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.node.imex.base import base_edits
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
    """The IMEX plugin of one node, serving while the context is entered."""
    read = (
        partial(read_nvml, options.driver_root)
        if options.fabric_file is None
        else partial(read_declared, options.fabric_file)
    )
    settings = await _settings(common, options, read)
    view = FabricView(read, time.time)
    plugin = ImexPlugin(api, settings, view, HostDaemon(root=options.driver_root, socket=options.host_socket))
    await plugin.start()
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(running(plugin, api, host_of(common)))
        if options.clique_label:
            keep = settings.isolation is Isolation.CHANNEL
            label = CliqueLabel(api, common.node, view, keep=keep)
            await stack.enter_async_context(background(label.run()))
        await stack.enter_async_context(pages(common, one))
        yield one


async def _settings(
    common: NodeOptions, options: ImexOptions, read: Callable[[], NodeFabric]
) -> ImexSettings:
    """Raises `Refused` for a node that cannot serve IMEX as it is."""
    if options.mode is ImexMode.DRIVER_MANAGED:
        check_driver(await asyncio.to_thread(read))
    home = common.places.home(IMEX_DRIVER)
    kernel = _kernel(common.sysroot, options)
    kernel.channel_major()
    return ImexSettings(
        node=common.node,
        namespaces=options.namespaces,
        domains=home / "domains",
        mode=options.mode,
        isolation=options.isolation,
        kernel=kernel,
        daemon_cdi_ids=driver_spec(
            common, IMEX_DRIVER, base_edits(options.driver_root, options.host_driver_root)
        ),
    )


def _kernel(sysroot: Path, options: ImexOptions) -> Kernel:
    return Kernel(
        proc_devices=options.proc_devices or sysroot / "proc/devices",
        imex_capability=sysroot / "proc/driver/nvidia/capabilities/fabric-imex-mgmt",
    )
