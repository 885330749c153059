"""Observing the NICs of a host: sysfs and netlink, the node's cluster network, changes, and health.

`HostScanner` takes one `HostSnapshot`. `topology.discovery` reads sysfs. netlink gives links, addresses and
routes, which it knows better. eBPF programs are read link by link, only for NICs that may be published.

Some interfaces must stay on the host: those that carry the node's own traffic. That is decided from the
snapshot and from the cluster's data about the node's network (`NodeNetwork`: node addresses, pod CIDRs,
and the API servers' addresses from the EndpointSlice of `kubernetes`, read again every ten minutes). It
is decided again when a NIC is about to be moved (`check`): since its preparation the default route may
have come to it.

`link_changes` listens to the netlink group RTMGRP_LINK and yields once for each burst of changes. A lost
message is a change too. A NIC is healthy when its RDMA port is active, or without one when its interface
is up. A NIC that is not published is unknown, and its message gives the reason.
"""

import asyncio
import dataclasses
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

from rackloom.claim.kube.api import KubeApi, KubeError, NotFound, Rejected
from rackloom.claim.node.nic.datapath import read_ebpf_programs
from rackloom.claim.node.nic.links import read_all_addresses, read_links, read_main_routes
from rackloom.claim.node.nic.netlink import HOST_NAMESPACE, Rtnetlink, in_namespace
from rackloom.claim.node.plugin import DeviceHealth, Health
from rackloom.claim.node.tasks import pause_until
from rackloom.core.cluster.nodes import node_addresses, pod_networks
from rackloom.core.cluster.objects import ENDPOINT_SLICE, NODE, Object
from rackloom.core.nics.attachment import NetworkLink, PreparedNic, find_link
from rackloom.core.nics.devices import EbpfPrograms, HostLink, HostNic, NicSnapshot
from rackloom.errors import Refused, Retry
from rackloom.topology.discovery.discover import (
    NOTHING_DECLARED,
    Declaration,
    VendorTopology,
    build_machine,
    read_declaration,
    read_nccl_topology,
)
from rackloom.topology.discovery.nvidia_driver import read_nvml
from rackloom.topology.discovery.sysfs import INFINIBAND_CLASS, Sysroot, read_host, read_named_file
from rackloom.topology.machine import HostReading, NetDevice, NetRoute
from rackloom.topology.nics import (
    DEFAULT_EXCLUSION_POLICY,
    NO_CLUSTER_NETWORK,
    ClusterNetwork,
    Exclusion,
    ExclusionPolicy,
    excluded_interfaces,
)

# Scanning the host.


NETWORK_SECONDS = 600.0
"""How long the API server's answer is used: a node's addresses change rarely."""
NETWORK_RETRY_SECONDS = 5.0


class HostScanner:
    """Reads the NICs and networks of one host."""

    def __init__(
        self,
        sysroot: Path,
        *,
        nccl_topology: Path | None = None,
        declared: Path | None = None,
        left_out: ExclusionPolicy = DEFAULT_EXCLUSION_POLICY,
    ) -> None:
        self.sysroot = Sysroot(sysroot)
        self.cluster = NO_CLUSTER_NETWORK
        """The node's network according to Kubernetes. The plugin sets it before each scan."""
        self._left_out = left_out
        self._is_own = sysroot == Path("/")
        self._vendor: VendorTopology | None = None
        self._declared: Declaration = NOTHING_DECLARED
        if nccl_topology is not None:
            self._vendor = read_nccl_topology(read_named_file(nccl_topology), str(nccl_topology))
        if declared is not None:
            self._declared = read_declaration(read_named_file(declared), str(declared))

    def __call__(self) -> NicSnapshot:
        """Scan now. Raises `OSError` of the kernel, and `Retry` when the GPU driver does not answer."""
        network = in_namespace(HOST_NAMESPACE, _read_network)
        host = network.added_to(read_host(self.sysroot))
        nvml = (read_nvml() or ()) if self._is_own else ()
        excluded = self._exclusions(host)
        return NicSnapshot(
            host=host,
            machine=build_machine(
                host, nvml=nvml, vendor=self._vendor, declared=self._declared, excluded=excluded
            ),
            links=in_namespace(HOST_NAMESPACE, lambda: _with_programs(network, excluded)),
            subsystems=_subsystems(self.sysroot, host),
        )

    def check(self, nic: PreparedNic) -> None:
        """Raises `Refused` when a NIC that is on the host must stay there, and `OSError`.

        A child leaves its NIC on the host.
        """
        if nic.over is not None:
            return
        moved = self.sysroot.names(f"{INFINIBAND_CLASS}/{nic.rdma}/device/net") if nic.moves_rdma else ()
        network = in_namespace(HOST_NAMESPACE, _read_network)
        own = None if nic.identity is None else find_link(network.links, nic.identity)
        found = self._exclusions(network.added_to(HostReading(name="")))
        for name in (*moved, *(() if own is None else (own.name,))):
            if name in found:
                raise Refused(
                    f"NIC {nic.device} is not for pods now: interface {name} {found[name].reason}",
                    nearest_fix=found[name].fix,
                )

    def _exclusions(self, host: HostReading) -> Mapping[str, Exclusion]:
        return excluded_interfaces(host.netdevs, host.routes, self.cluster, self._left_out)


class NodeNetwork:
    """The node's network according to Kubernetes, read again every ten minutes."""

    def __init__(self, api: KubeApi, node: str, clock: Callable[[], float]) -> None:
        self._api = api
        self._node = node
        self._clock = clock
        self._known: ClusterNetwork | None = None
        self._asked_at = 0.0

    async def __call__(self) -> ClusterNetwork:
        """The network, or the last known one if a reading fails. Raises `Retry` if none is known."""
        if self._known is None or self._clock() - self._asked_at > NETWORK_SECONDS:
            try:
                self._known = await self._read()
                self._asked_at = self._clock()
            except KubeError as error:
                if self._known is None:
                    reason = f"the network of node {self._node} is not known: {error.message}"
                    raise Retry(reason, after=NETWORK_RETRY_SECONDS) from error
                log.warning("nic.node-network-not-read", reason=error.message)
        return self._known

    async def _read(self) -> ClusterNetwork:
        node = await self._api.get(NODE, self._node)
        return ClusterNetwork(
            node_addresses=node_addresses(node),
            api_servers=await self._api_servers(),
            pod_cidrs=pod_networks(node),
        )

    async def _api_servers(self) -> tuple[str, ...]:
        """The servers' own addresses: the Service's is on no host, so no route to it shows an interface."""
        try:
            known: Object = await self._api.get(ENDPOINT_SLICE, "kubernetes", "default")
        except (NotFound, Rejected) as error:
            log.info("nic.api-servers-not-read", reason=error.message)
            return ()
        return tuple(
            address for endpoint in known.get("endpoints") or () for address in endpoint["addresses"]
        )


class _NetlinkSnapshot(msgspec.Struct, frozen=True):
    """The state of a namespace according to netlink."""

    links: tuple[NetworkLink, ...]
    addresses: Mapping[int, Sequence[tuple[str, bool]]]
    """CIDRs, and whether the kernel lets them stay."""
    routes: tuple[NetRoute, ...]

    def added_to(self, host: HostReading) -> HostReading:
        """The host, with the values that netlink reports more exactly than sysfs."""
        files = {netdev.name: netdev for netdev in host.netdevs}
        names = {link.index: link.name for link in self.links}
        from_netlink = {link.name: self._netdev(link, files.get(link.name), names) for link in self.links}
        netdevs = (
            *from_netlink.values(),
            *(netdev for netdev in host.netdevs if netdev.name not in from_netlink),
        )
        return dataclasses.replace(host, netdevs=netdevs, routes=(*self.routes, *host.routes))

    def _netdev(self, link: NetworkLink, file: NetDevice | None, names: Mapping[int, str]) -> NetDevice:
        bus = link.bus if link.bus == "usb" else ""
        read = file or NetDevice(link.name, link.parent, None, None, None, None, bool(link.kind), None)
        # sysfs doesn't show that a parent is in another namespace. An interface here may have its number.
        below = names.get(link.lower or 0, f"interface {link.over or link.lower}")
        lower = (below,) if link.over or link.lower else read.lower
        return dataclasses.replace(
            read,
            mac=link.mac,
            mtu=link.mtu,
            state=link.state,
            master=None if link.master is None else names.get(link.master),
            kind=link.kind or bus or read.kind,
            lower=lower,
            addresses=tuple(cidr for cidr, _ in self.addresses.get(link.index, ())),
        )


def _read_network() -> _NetlinkSnapshot:
    with Rtnetlink() as rtnetlink:
        links = tuple(link for link in read_links(rtnetlink) if not link.loopback)
        addresses: dict[int, list[tuple[str, bool]]] = {}
        for index, cidr, lasting in read_all_addresses(rtnetlink):
            addresses.setdefault(index, []).append((cidr, lasting))
        names = {link.index: link.name for link in links}
        return _NetlinkSnapshot(links, addresses, tuple(read_main_routes(rtnetlink, names)))


def _with_programs(network: _NetlinkSnapshot, excluded: Mapping[str, Exclusion]) -> tuple[HostLink, ...]:
    """The links with their eBPF programs, read link by link: a node has hundreds of excluded links."""
    with Rtnetlink() as rtnetlink:
        return tuple(
            HostLink(
                link=link,
                addresses=tuple(cidr for cidr, lasting in network.addresses.get(link.index, ()) if lasting),
                programs=EbpfPrograms()
                if link.name in excluded
                else read_ebpf_programs(rtnetlink, link.index),
            )
            for link in network.links
        )


def _subsystems(sysroot: Sysroot, host: HostReading) -> dict[str, str]:
    found = {
        function.address: sysroot.number(f"/sys/bus/pci/devices/{function.address}/subsystem_device")
        for function in host.pci
    }
    return {address: f"{number:04x}" for address, number in found.items() if number is not None}


log = structlog.get_logger(__name__)


# Health.


def nic_health(host_nic: HostNic, pool: str, at: float) -> DeviceHealth:
    """Whether a NIC has a link. A NIC that is not published is unknown, and the message gives the reason."""
    health, message = _health(host_nic)
    return DeviceHealth(pool=pool, device=host_nic.name, health=health, observed_at=at, message=message)


def _health(host_nic: HostNic) -> tuple[Health, str]:
    """By the RDMA port, which shows wherever the interface is, else by the interface."""
    if host_nic.excluded is not None:
        return Health.UNKNOWN, f"not published: {host_nic.excluded}"
    if host_nic.rdma is not None and host_nic.rdma.ports:
        states = {port.state for port in host_nic.rdma.ports}
        return _health_by_state(states, good="active", what=f"RDMA device {host_nic.rdma.name}")
    if host_nic.on is None:
        return Health.UNKNOWN, "neither its interface nor an RDMA device with uverbs is on the host"
    return _health_by_state({host_nic.on.link.state}, good="up", what=f"interface {host_nic.on.link.name}")


def _health_by_state(states: set[str], *, good: str, what: str) -> tuple[Health, str]:
    if good in states:
        return Health.HEALTHY, ""
    if states <= {"unknown"}:
        return Health.UNKNOWN, f"{what} does not tell its state"
    return Health.UNHEALTHY, f"{what} is {', '.join(sorted(states))}"


# Changes.


_LINKS = 1
"""RTMGRP_LINK: the kernel reports every link that comes, goes or changes."""


async def link_changes(*, settle: float, at_least_every: float) -> AsyncIterator[None]:
    """Yield at the start, `settle` seconds into each burst of changes, and every `at_least_every` seconds."""
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC) as handle:
        handle.setblocking(False)
        handle.bind((0, _LINKS))
        loop.add_reader(handle, _drain, handle, changed)
        try:
            while True:
                yield
                await asyncio.sleep(settle)
                await pause_until(changed, at_least_every)
        finally:
            loop.remove_reader(handle)


def _drain(handle: socket.socket, changed: asyncio.Event) -> None:
    """Drop the messages: that there are any is enough. A lost one (ENOBUFS) is a change too."""
    changed.set()
    with suppress(OSError):
        while handle.recv(1 << 16):
            pass
