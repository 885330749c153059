"""The NIC plugin as a process: kubelet on one side, the container runtime's NRI on the other."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
from prometheus_client import Counter, Gauge

from rackloom.app.node import NodeOptions, host_of, pages, until_stopped
from rackloom.claim.kube.api import KubeApi
from rackloom.claim.kube.events import Recorder
from rackloom.claim.node.checkpoint import Checkpoint
from rackloom.claim.node.nic.dhcp import boot_seconds
from rackloom.claim.node.nic.extras import read_extras
from rackloom.claim.node.nic.filtering import everything, filter_of
from rackloom.claim.node.nic.lease import Outlook
from rackloom.claim.node.nic.leases import Leases
from rackloom.claim.node.nic.lender import Lender
from rackloom.claim.node.nic.loans import Loans
from rackloom.claim.node.nic.look import Look, NodeNetwork
from rackloom.claim.node.nic.pci_names import read_pci_names
from rackloom.claim.node.nic.plugin import DRIVER, NicPlugin, NicSettings
from rackloom.claim.node.nic.profiles import NO_PROFILES, read_profiles
from rackloom.claim.node.nic.renewing import Keeper, exchange
from rackloom.claim.node.nic.sandboxes import Sandboxes
from rackloom.claim.node.nic.standing import Standing, WallOf, standing
from rackloom.claim.node.nic.status import StatusWriter
from rackloom.claim.node.nic.telling import Teller
from rackloom.claim.node.nic.telling_leases import LeaseTeller
from rackloom.claim.node.nri.client import SOCKET, NriPlugin
from rackloom.claim.node.nri.measured import Measured
from rackloom.claim.node.run import Host, Running, running
from rackloom.claim.node.tasks import background
from rackloom.topology.discovery.nics import LEFT_OUT, LeftOut


class NicOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What only the NIC plugin has."""

    nri_socket: Path = SOCKET
    left_out: LeftOut = LEFT_OUT
    filter: str | None = None
    """A CEL expression; None publishes all that are not left out."""
    moves_ipoib: bool = True
    nccl_topology: Path | None = None
    declared: Path | None = None
    profiles: Path | None = None
    attributes: Path | None = None


def run_nic(common: NodeOptions, options: NicOptions, announce: Callable[[str], None]) -> None:
    """Serve NICs until SIGTERM or SIGINT."""
    asyncio.run(until_stopped(common, DRIVER, partial(nic_node, common, options), announce))


class NicParts(msgspec.Struct, frozen=True, kw_only=True):
    """What the plugin is made of: one half for kubelet, the other for the runtime."""

    plugin: NicPlugin
    lender: Lender
    sandboxes: Sandboxes
    keeper: Keeper
    counters: tuple[Counter, ...]


def nic_parts(common: NodeOptions, options: NicOptions, api: KubeApi, host: Host) -> NicParts:
    """The parts, with all that an earlier life of the plugin wrote down."""
    home = common.places.home(DRIVER)
    home.mkdir(parents=True, exist_ok=True, mode=0o750)
    look = Look(
        common.sysroot,
        nccl_topology=options.nccl_topology,
        declared=options.declared,
        left_out=options.left_out,
    )
    loans, leases = Loans(home / "loans", host.boot_id), Leases(home / "leases", host.boot_id)
    lender = Lender(loans, leases, look.check)
    network = NodeNetwork(api, common.node, time.monotonic)
    plugin = NicPlugin(_settings(common, options, look), look, lender, host.wall, network)
    plugin.remember(Checkpoint(home / "checkpoint.json", host.boot_id).claims.values())
    wall_of = partial(_wall_of, host)
    status = StatusWriter(
        api, common.node, lender.loans, partial(_standings, lender.leases, wall_of), host.wall
    )
    events = Recorder(api, DRIVER, common.node, host.wall)
    teller = Teller(status.told, events)
    keeper = Keeper(lender, exchange, LeaseTeller(status.told, events, wall_of).told, boot_seconds)
    return NicParts(
        plugin=plugin,
        lender=lender,
        sandboxes=Sandboxes(lender, plugin.prepared, teller.told),
        keeper=keeper,
        counters=(teller.attachments, keeper.requests),
    )


def _wall_of(host: Host, at: float) -> float:
    return host.wall() + at - boot_seconds()


def _standings(leases: Leases, wall_of: WallOf, claim: str) -> Mapping[str, Standing]:
    return {one.nic.device: standing(one.lease, wall_of) for one in leases.of_claim(claim)}


def _settings(common: NodeOptions, options: NicOptions, look: Look) -> NicSettings:
    """Raises `Refused` for a file or a filter that cannot be used."""
    return NicSettings(
        node=common.node,
        moves_ipoib=options.moves_ipoib,
        is_published=everything if options.filter is None else filter_of(options.filter),
        names=read_pci_names(look.sysroot),
        profiles=NO_PROFILES if options.profiles is None else read_profiles(options.profiles),
        extras={} if options.attributes is None else read_extras(options.attributes),
    )


@asynccontextmanager
async def nic_node(common: NodeOptions, options: NicOptions, api: KubeApi) -> AsyncIterator[Running]:
    """The NIC plugin of one node, serving while the context is entered.

    What is in pods stays there when it ends: their sandboxes go on without it.
    """
    host = host_of(common)
    parts = nic_parts(common, options, api, host)
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(running(parts.plugin, api, host))
        hooks = Measured(parts.sandboxes, one.meter.registry, time.perf_counter)
        nri = NriPlugin(DRIVER, hooks, options.nri_socket)
        _count(one, nri, parts)
        await stack.enter_async_context(background(nri.run(), parts.keeper.run()))
        await stack.enter_async_context(pages(common, one))
        yield one


def _count(one: Running, nri: NriPlugin, parts: NicParts) -> None:
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
    lent.set_function(lambda: len(parts.lender.loans.all()))
    leases = Gauge("rackloom_nic_dhcp_leases", "DHCP leases of NICs", ("state",), registry=one.meter.registry)
    for state in Outlook:
        leases.labels(state).set_function(partial(_leases_that_are, parts.lender.leases, state))
    for counter in parts.counters:
        one.meter.registry.register(counter)


def _leases_that_are(leases: Leases, state: Outlook) -> int:
    return sum(one.lease.outlook is state for one in leases.all())
