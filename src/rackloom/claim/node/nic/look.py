"""One look at the host: sysfs through the discovery room, links through netlink. Blocking.

What must not be given away is decided from both, and from what Kubernetes says of the node's network
(`NodeNetwork`). It is decided anew when a NIC is about to be moved (`Look.check`): between its preparation
and its pod somebody may have put the default route on it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import structlog

from rackloom.claim.kube.api import KubeApi, KubeError, NotFound, Object, Rejected
from rackloom.claim.kube.kinds import ENDPOINT_SLICE, NODE
from rackloom.claim.node.nic.links import Link, find, read_all_addresses, read_links, read_main_routes
from rackloom.claim.node.nic.loans import Held
from rackloom.claim.node.nic.namespaces import OWN, inside
from rackloom.claim.node.nic.netlink import Rtnetlink
from rackloom.claim.node.nic.programs import Programs, read_programs
from rackloom.errors import Refused, Retry
from rackloom.topology.discovery.fuse import machine_of
from rackloom.topology.discovery.host import Host, NetDevice, NetRoute
from rackloom.topology.discovery.network import INFINIBAND
from rackloom.topology.discovery.nics import (
    LEFT_OUT,
    NO_CLUSTER,
    ClusterNetwork,
    Exclusion,
    LeftOut,
    exclusions,
)
from rackloom.topology.discovery.nvml import read_nvml
from rackloom.topology.discovery.read import read_host
from rackloom.topology.discovery.statements import (
    NOTHING_DECLARED,
    Declared,
    VendorTopology,
    read_declared,
    read_nccl_topology,
)
from rackloom.topology.discovery.sysroot import Sysroot, content_of
from rackloom.topology.machine import Machine

log = structlog.get_logger(__name__)

KEPT_SECONDS = 600.0
"""How long what the API server said counts: a node's addresses change with its network, which is rare."""
AGAIN_SECONDS = 5.0


class OnLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link of the host, and what only netlink knows of it."""

    link: Link
    addresses: tuple[str, ...] = ()
    programs: Programs = Programs()


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The host at one moment."""

    host: Host
    machine: Machine
    links: tuple[OnLink, ...] = ()
    subsystems: Mapping[str, str] = {}
    """Subsystem IDs in hex, by PCI address."""


class Look:
    """Looks at one host."""

    def __init__(
        self,
        sysroot: Path,
        *,
        nccl_topology: Path | None = None,
        declared: Path | None = None,
        left_out: LeftOut = LEFT_OUT,
    ) -> None:
        self.sysroot = Sysroot(sysroot)
        self.cluster = NO_CLUSTER
        """What is known of the node's network besides what the host shows; whoever learns more sets it."""
        self._left_out = left_out
        self._is_own = sysroot == Path("/")
        self._vendor: VendorTopology | None = None
        self._declared: Declared = NOTHING_DECLARED
        if nccl_topology is not None:
            self._vendor = read_nccl_topology(content_of(nccl_topology), str(nccl_topology))
        if declared is not None:
            self._declared = read_declared(content_of(declared), str(declared))

    def __call__(self) -> Seen:
        """Look now. Raises `OSError` when the kernel is silent, `Retry` when the GPU driver is."""
        network = inside(OWN, _read_network)
        host = network.added_to(read_host(self.sysroot))
        nvml = (read_nvml() or ()) if self._is_own else ()
        excluded = self._exclusions(host)
        return Seen(
            host=host,
            machine=machine_of(
                host, nvml=nvml, vendor=self._vendor, declared=self._declared, excluded=excluded
            ),
            links=inside(OWN, lambda: _with_programs(network, excluded)),
            subsystems=_subsystems(self.sysroot, host),
        )

    def check(self, nic: Held) -> None:
        """Raises `Refused` when a NIC that is on the host must stay there, and `OSError`."""
        moved = self.sysroot.names(f"{INFINIBAND}/{nic.rdma}/device/net") if nic.moves_rdma else ()
        network = inside(OWN, _read_network)
        own = None if nic.identity is None else find(network.links, nic.identity)
        found = self._exclusions(network.added_to(Host(name="")))
        for name in (*moved, *(() if own is None else (own.name,))):
            if name in found:
                raise Refused(
                    f"NIC {nic.device} is not for pods now: interface {name} {found[name].reason}",
                    nearest_fix=found[name].fix,
                )

    def _exclusions(self, host: Host) -> Mapping[str, Exclusion]:
        return exclusions(host.netdevs, host.routes, self.cluster, self._left_out)


class NodeNetwork:
    """What Kubernetes says of the node's network, asked for anew every ten minutes."""

    def __init__(self, api: KubeApi, node: str, clock: Callable[[], float]) -> None:
        self._api = api
        self._node = node
        self._clock = clock
        self._known: ClusterNetwork | None = None
        self._asked_at = 0.0

    async def __call__(self) -> ClusterNetwork:
        """As it is, or was when it could be read last. Raises `Retry` where it never could."""
        if self._known is None or self._clock() - self._asked_at > KEPT_SECONDS:
            try:
                self._known = await self._read()
                self._asked_at = self._clock()
            except KubeError as error:
                if self._known is None:
                    reason = f"the network of node {self._node} is not known: {error.message}"
                    raise Retry(reason, after=AGAIN_SECONDS) from error
                log.warning("nic.node-network-not-read", reason=error.message)
        return self._known

    async def _read(self) -> ClusterNetwork:
        node = await self._api.get(NODE, self._node)
        spec, addresses = node.get("spec") or {}, (node.get("status") or {}).get("addresses") or ()
        return ClusterNetwork(
            node_addresses=tuple(one["address"] for one in addresses if one["type"].endswith("IP")),
            api_servers=await self._api_servers(),
            pod_cidrs=tuple(spec.get("podCIDRs") or filter(None, [spec.get("podCIDR")])),
        )

    async def _api_servers(self) -> tuple[str, ...]:
        """Its own addresses: that of its Service is nowhere, and says nothing of the way."""
        try:
            known: Object = await self._api.get(ENDPOINT_SLICE, "kubernetes", "default")
        except (NotFound, Rejected) as error:
            log.info("nic.api-servers-not-read", reason=error.message)
            return ()
        return tuple(address for one in known.get("endpoints") or () for address in one["addresses"])


class _Network(msgspec.Struct, frozen=True):
    """What netlink says of a namespace."""

    links: tuple[Link, ...]
    addresses: Mapping[int, Sequence[tuple[str, bool]]]
    """CIDRs, and whether the kernel lets them stay."""
    routes: tuple[NetRoute, ...]

    def added_to(self, host: Host) -> Host:
        """The host with what netlink knows better."""
        files = {netdev.name: netdev for netdev in host.netdevs}
        names = {link.index: link.name for link in self.links}
        told = {link.name: self._netdev(link, files.get(link.name), names) for link in self.links}
        netdevs = (*told.values(), *(netdev for netdev in host.netdevs if netdev.name not in told))
        return dataclasses.replace(host, netdevs=netdevs, routes=(*self.routes, *host.routes))

    def _netdev(self, link: Link, file: NetDevice | None, names: Mapping[int, str]) -> NetDevice:
        bus = link.bus if link.bus == "usb" else ""
        lower = None if link.lower is None else names.get(link.lower)
        return NetDevice(
            name=link.name,
            pci_address=link.parent if file is None else file.pci_address,
            mac=link.mac,
            mtu=link.mtu,
            state=link.state,
            speed_mbps=None if file is None else file.speed_mbps,
            virtual=bool(link.kind) if file is None else file.virtual,
            master=None if link.master is None else names.get(link.master),
            kind=link.kind or bus or ("" if file is None else file.kind),
            lower=() if lower is None else (lower,),
            addresses=tuple(cidr for cidr, _ in self.addresses.get(link.index, ())),
        )


def _read_network() -> _Network:
    with Rtnetlink() as rtnetlink:
        links = tuple(link for link in read_links(rtnetlink) if not link.loopback)
        addresses: dict[int, list[tuple[str, bool]]] = {}
        for index, cidr, lasting in read_all_addresses(rtnetlink):
            addresses.setdefault(index, []).append((cidr, lasting))
        names = {link.index: link.name for link in links}
        return _Network(links, addresses, tuple(read_main_routes(rtnetlink, names)))


def _with_programs(network: _Network, excluded: Mapping[str, Exclusion]) -> tuple[OnLink, ...]:
    """Programs are asked for link by link: a node has hundreds that are not for lending."""
    with Rtnetlink() as rtnetlink:
        return tuple(
            OnLink(
                link=link,
                addresses=tuple(cidr for cidr, lasting in network.addresses.get(link.index, ()) if lasting),
                programs=Programs() if link.name in excluded else read_programs(rtnetlink, link.index),
            )
            for link in network.links
        )


def _subsystems(sysroot: Sysroot, host: Host) -> dict[str, str]:
    found = {
        one.address: sysroot.number(f"/sys/bus/pci/devices/{one.address}/subsystem_device")
        for one in host.pci
    }
    return {address: f"{number:04x}" for address, number in found.items() if number is not None}
