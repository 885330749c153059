"""The NIC plugin as a process: kubelet on one side, the container runtime's NRI on the other."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
from prometheus_client import Gauge

from rackloom.app.node import NodeOptions, host_of, pages, until_stopped
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.node.checkpoint import Checkpoint
from rackloom.claim.node.nic.lender import Lender
from rackloom.claim.node.nic.loans import Loans
from rackloom.claim.node.nic.look import Look
from rackloom.claim.node.nic.offered import LEFT_OUT_KINDS
from rackloom.claim.node.nic.pci_names import read_pci_names
from rackloom.claim.node.nic.plugin import DRIVER, NicPlugin, NicSettings
from rackloom.claim.node.nic.sandboxes import Sandboxes
from rackloom.claim.node.nic.status import StatusWriter
from rackloom.claim.node.nri.client import SOCKET, NriPlugin
from rackloom.claim.node.run import Host, Running, running
from rackloom.claim.node.tasks import background


class NicOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What only the NIC plugin has."""

    nri_socket: Path = SOCKET
    left_out_kinds: frozenset[str] = LEFT_OUT_KINDS
    nccl_topology: Path | None = None
    declared: Path | None = None


def run_nic(common: NodeOptions, options: NicOptions, announce: Callable[[str], None]) -> None:
    """Serve NICs until SIGTERM or SIGINT."""
    asyncio.run(until_stopped(common, DRIVER, partial(nic_node, common, options), announce))


class NicParts(msgspec.Struct, frozen=True, kw_only=True):
    """What the plugin is made of: one half for kubelet, the other for the runtime."""

    plugin: NicPlugin
    lender: Lender
    sandboxes: Sandboxes


def nic_parts(common: NodeOptions, options: NicOptions, api: KubeApi, host: Host) -> NicParts:
    """The parts, with all that an earlier life of the plugin wrote down."""
    home = common.places.home(DRIVER)
    home.mkdir(parents=True, exist_ok=True, mode=0o750)
    look = Look(common.sysroot, nccl_topology=options.nccl_topology, declared=options.declared)
    lender = Lender(Loans(home / "loans", host.boot_id))
    settings = NicSettings(
        node=common.node, left_out_kinds=options.left_out_kinds, names=read_pci_names(look.sysroot)
    )
    plugin = NicPlugin(settings, look, lender, host.wall)
    status = StatusWriter(api, common.node, lender.loans, host.wall)
    plugin.remember(Checkpoint(home / "checkpoint.json", host.boot_id).claims.values())
    return NicParts(plugin=plugin, lender=lender, sandboxes=Sandboxes(lender, plugin.prepared, status.told))


@asynccontextmanager
async def nic_node(common: NodeOptions, options: NicOptions, api: KubeApi) -> AsyncIterator[Running]:
    """The NIC plugin of one node, serving while the context is entered.

    What is in pods stays there when it ends: their sandboxes go on without it.
    """
    host = host_of(common)
    parts = nic_parts(common, options, api, host)
    nri = NriPlugin(DRIVER, parts.sandboxes, options.nri_socket)
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(running(parts.plugin, api, host))
        _count(one, nri, parts.lender)
        await stack.enter_async_context(background(nri.run()))
        await stack.enter_async_context(pages(common, one))
        yield one


def _count(one: Running, nri: NriPlugin, lender: Lender) -> None:
    """A plugin that the runtime does not call looks well in every other respect."""
    connected = Gauge(
        "rackloom_nri_connected",
        "Whether the container runtime calls the plugin for new pods",
        registry=one.meter.registry,
    )
    connected.set_function(nri.connected.is_set)
    lent = Gauge(
        "rackloom_nics_lent", "NICs in pods, or on their way there or back", registry=one.meter.registry
    )
    lent.set_function(lambda: len(lender.loans.all()))
