"""The NIC plugin of one node as a process: driver dra.net, between kubelet and the container runtime.

kubelet calls the DRA plugin to prepare claims. The runtime calls the NRI plugin when a pod sandbox starts
or stops, and NICs move into and out of the pod's network namespace then. `nic_parts` builds both halves
over the same attachments and DHCP leases, which are kept on disk and read back after a restart. Records
of an earlier boot do not count. NICs in pods stay there when the plugin ends.

DHCP leases are kept on the boot clock, which no time correction moves. `wall_of` converts them for
status and events. Metrics count attachments, leases by state, and whether the runtime calls the plugin at
all: without that call a plugin looks healthy in every other respect.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from rackloom.app.node.process import NodeOptions, host_of, plugin_listeners, serve_plugin
from rackloom.claim.kube.api import EventRecorder, KubeApi
from rackloom.claim.node.nic.attach import AttachmentManager, AttachmentStore, NicSandboxHooks
from rackloom.claim.node.nic.config import (
    NO_PROFILES,
    compile_filter,
    publish_everything,
    read_profiles,
    read_stated_attributes,
)
from rackloom.claim.node.nic.inventory import HostScanner, NodeNetwork
from rackloom.claim.node.nic.leases import LeaseStore, boot_seconds
from rackloom.claim.node.nic.metadata import METADATA_SERVICE, CloudWatcher, detect_cloud
from rackloom.claim.node.nic.plugin import NIC_DRIVER, NicPlugin, NicSettings
from rackloom.claim.node.nic.renewal import LeaseKeeper, exchange_dhcp
from rackloom.claim.node.nic.status import (
    AttachmentReporter,
    LeaseReporter,
    LeaseStatus,
    StatusWriter,
    lease_status,
)
from rackloom.claim.node.nri.client import NRI_SOCKET, HookMetrics, NriPlugin
from rackloom.claim.node.pci_names import read_pci_names
from rackloom.claim.node.run import PluginHost, PluginProcess, run_plugin
from rackloom.claim.node.storage import Checkpoint
from rackloom.claim.node.tasks import run_background
from rackloom.core.nics.cloud import Cloud
from rackloom.core.nics.lease import LeaseState
from rackloom.topology.nics import DEFAULT_EXCLUSION_POLICY, ExclusionPolicy

CloudChoice = Literal["auto", "none", "gke", "azure", "aws", "oke"]
"""The cloud with the metadata service to read. `auto`: the cloud that firmware names, if any."""


class NicOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the NIC plugin only."""

    nri_socket: Path = NRI_SOCKET
    left_out: ExclusionPolicy = DEFAULT_EXCLUSION_POLICY
    filter: str | None = None
    """A CEL expression. None publishes all that are not left out."""
    moves_ipoib: bool = True
    nccl_topology: Path | None = None
    declared: Path | None = None
    profiles: Path | None = None
    attributes: Path | None = None
    cloud: CloudChoice = "auto"
    metadata_service: str = METADATA_SERVICE


def run_nic(common: NodeOptions, options: NicOptions, announce: Callable[[str], None]) -> None:
    """Serve NICs until SIGTERM or SIGINT."""
    asyncio.run(serve_plugin(common, NIC_DRIVER, partial(nic_node, common, options), announce))


class NicParts(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the plugin: one half for kubelet, the other for the runtime."""

    plugin: NicPlugin
    manager: AttachmentManager
    sandboxes: NicSandboxHooks
    keeper: LeaseKeeper
    counters: tuple[Counter, ...]


def nic_parts(common: NodeOptions, options: NicOptions, api: KubeApi, host: PluginHost) -> NicParts:
    """The parts, with the state that an earlier process of the plugin left on disk."""
    home = common.directories.home(NIC_DRIVER)
    home.mkdir(parents=True, exist_ok=True, mode=0o750)
    scanner = HostScanner(
        common.sysroot,
        nccl_topology=options.nccl_topology,
        declared=options.declared,
        left_out=options.left_out,
    )
    attachments = AttachmentStore(home / "loans", host.boot_id)
    leases = LeaseStore(home / "leases", host.boot_id)
    manager = AttachmentManager(attachments, leases, scanner.check)
    network = NodeNetwork(api, common.node, time.monotonic)
    settings = _settings(common, options, scanner)
    cloud = _cloud_watcher(options, scanner)
    plugin = NicPlugin(settings, scanner, manager, host.wall, network, cloud)
    plugin.remember(Checkpoint(home / "checkpoint.json", host.boot_id).claims.values())

    def wall_of(at: float) -> float:
        return host.wall() + at - boot_seconds()

    def lease_states(claim: str) -> dict[str, LeaseStatus]:
        return {record.nic.device: lease_status(record.lease, wall_of) for record in leases.of_claim(claim)}

    status = StatusWriter(api, common.node, attachments, lease_states, host.wall)
    events = EventRecorder(api, NIC_DRIVER, common.node, host.wall)
    reporter = AttachmentReporter(status.write, events)
    report = LeaseReporter(status.write, events, wall_of).report
    keeper = LeaseKeeper(manager, exchange_dhcp, report, boot_seconds)
    return NicParts(
        plugin=plugin,
        manager=manager,
        sandboxes=NicSandboxHooks(manager, plugin.prepared, reporter.report),
        keeper=keeper,
        counters=(reporter.attachments, keeper.requests),
    )


def _settings(common: NodeOptions, options: NicOptions, scanner: HostScanner) -> NicSettings:
    """Raises `Refused` for a file or a filter that cannot be used."""
    return NicSettings(
        node=common.node,
        moves_ipoib=options.moves_ipoib,
        is_published=publish_everything if options.filter is None else compile_filter(options.filter),
        names=read_pci_names(scanner.sysroot),
        profiles=NO_PROFILES if options.profiles is None else read_profiles(options.profiles),
        extras={} if options.attributes is None else read_stated_attributes(options.attributes),
    )


def _cloud_watcher(options: NicOptions, scanner: HostScanner) -> CloudWatcher | None:
    if options.cloud == "none":
        return None
    cloud = detect_cloud(scanner.sysroot) if options.cloud == "auto" else Cloud(options.cloud)
    return None if cloud is None else CloudWatcher(cloud, options.metadata_service)


@asynccontextmanager
async def nic_node(common: NodeOptions, options: NicOptions, api: KubeApi) -> AsyncIterator[PluginProcess]:
    """The NIC plugin of one node, serving while the context is entered.

    NICs in pods stay there when it ends: their sandboxes go on without it.
    """
    host = host_of(common)
    parts = nic_parts(common, options, api, host)
    async with run_plugin(parts.plugin, api, host) as process:
        measure = HookMetrics(process.metrics.registry, time.perf_counter).measure
        nri = NriPlugin(NIC_DRIVER, parts.sandboxes, options.nri_socket, measure)
        _register_metrics(process.metrics.registry, nri, parts)
        async with run_background(nri.run(), parts.keeper.run()), plugin_listeners(common, process):
            yield process


def _register_metrics(registry: CollectorRegistry, nri: NriPlugin, parts: NicParts) -> None:
    """A plugin that the runtime does not call looks healthy in every other respect."""
    help_text = "Whether the container runtime calls the plugin for new pods"
    Gauge("rackloom_nri_connected", help_text, registry=registry).set_function(nri.connected.is_set)
    attached = Gauge("rackloom_nics_lent", "NICs in pods, or on their way there or back", registry=registry)
    attached.set_function(lambda: len(parts.manager.attachments.all()))
    leases = Gauge("rackloom_nic_dhcp_leases", "DHCP leases of NICs", ("state",), registry=registry)
    for state in LeaseState:
        leases.labels(state).set_function(partial(_count_leases, parts.manager.leases, state))
    for counter in parts.counters:
        registry.register(counter)


def _count_leases(leases: LeaseStore, state: LeaseState) -> int:
    return sum(record.lease.state is state for record in leases.all())
