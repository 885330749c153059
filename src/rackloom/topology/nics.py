"""Which devices of a host are NICs, and which interfaces must not be given to a tenant.

An interface that moves into a pod disappears from the host, with its addresses, its routes and everything
that is stacked on it. `excluded_interfaces` therefore excludes an interface for the first of these facts
that holds:

1. It carries the node's own network: a default route, an address of the node, or the route to the API
   server.
2. It carries the pod network: an address or a route within the node's pod CIDRs. Both apply down the
   stack: to the members of a bond or bridge and to the parent of a VLAN.
3. It belongs to a bond, a bridge or a VRF, and would not return to it.
4. Its kind is excluded: pod interfaces (veth, netkit), tunnels, USB, and devices that the kernel does not
   move between namespaces (bridge, bond: IFLA_NETNS_IMMUTABLE).
5. It is virtual and has a name that container networks use.

Rules 4 and 5 are a policy (`ExclusionPolicy`) that an operator can change. The route to the API server is
found as the kernel does it: longest prefix, then lowest metric, then first in order.

`nic_candidates` joins PCI functions, RDMA devices and interfaces by PCI address. `NicExclusions` adds
what only a NIC has: all ports of one function move together; on Amazon's HGX B200 boards InfiniBand
functions manage the NVLink switches; beside RDMA NICs, plain Ethernet is left out.
"""

import ipaddress
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import TypeVar

import msgspec

from rackloom.topology.machine import HostReading, NetDevice, NetRoute, PciFunction, RdmaDevice

MELLANOX, AMAZON = 0x15B3, 0x1D0F
_NETWORK = 0x02
_INFINIBAND = 0x0207
"""Class and subclass of an InfiniBand controller."""
T = TypeVar("T")
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
DEFAULT_ROUTE = "carries the default route"
POD_INTERFACE_KINDS = frozenset({"veth", "netkit"})
"""Pairs, one end of which is in a pod: they come and go with pods."""
_TUNNELS = frozenset(
    {
        *("vxlan", "geneve", "gre", "gretap", "erspan", "ip6gre", "ip6gretap", "ip6erspan"),
        *("ipip", "ip6tnl", "sit", "vti", "vti6", "xfrm", "wireguard", "tun", "gtp", "bareudp"),
    }
)
_IMMOVABLE = frozenset({"bridge", "bond", "team", "vrf", "openvswitch"})
_REASON_BY_KIND: Mapping[str, str] = {
    **dict.fromkeys(POD_INTERFACE_KINDS, "is one end of a pair ({kind}), as pods have"),
    **dict.fromkeys(_TUNNELS, "is a tunnel ({kind})"),
    **dict.fromkeys(_IMMOVABLE, "is a {kind}, which cannot leave the host"),
    "usb": "hangs on USB, as the board's own management controller does",
}
_CONTAINER_NETWORK_NAMES = (
    *("cni*", "cbr*", "flannel*", "kube-*", "cilium*", "lxc*", "cali*", "vxlan*", "genev_sys*", "tunl*"),
    *("antrea-*", "weave*", "vethwe*", "ovs-*", "br-int", "br-ex", "ovn-*", "nodelocaldns", "docker*"),
    *("podman*", "virbr*", "lxdbr*", "bwp*", "ifb*"),
)


class ExclusionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Interfaces that must not be given to a tenant by their kind or name; an operator can change both."""

    kinds: frozenset[str] = POD_INTERFACE_KINDS | _TUNNELS | _IMMOVABLE | {"usb", "ifb", "macvtap", "ipvtap"}
    """As `ip -details link` prints them; `usb` is hardware on that bus."""
    names: tuple[str, ...] = _CONTAINER_NETWORK_NAMES
    """Patterns for interfaces without hardware: names that well-known container networks use."""


DEFAULT_EXCLUSION_POLICY = ExclusionPolicy()


class ClusterNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """What Kubernetes reports of one node's network. Malformed addresses are ignored."""

    node_addresses: tuple[str, ...] = ()
    api_servers: tuple[str, ...] = ()
    pod_cidrs: tuple[str, ...] = ()


NO_CLUSTER_NETWORK = ClusterNetwork()


class Exclusion(msgspec.Struct, frozen=True):
    """Why an interface is not for tenants: a sentence about it without its subject, and what changes that."""

    reason: str
    fix: str
    needed: bool = False
    """Whether the node or its pods would be cut off."""


class NicCandidate(msgspec.Struct, frozen=True):
    """One NIC to be: a PCI function, or a device that has none."""

    function: PciFunction | None
    rdma: RdmaDevice | None
    netdev: NetDevice | None

    @property
    def address(self) -> str | None:
        """Of its PCI function."""
        if self.function is not None:
            return self.function.address
        return self.rdma.pci_address if self.rdma is not None else None

    @property
    def names(self) -> tuple[str, ...]:
        """By what a declaration may call it."""
        named = (self.address, self.rdma and self.rdma.name, self.netdev and self.netdev.name)
        return tuple(name for name in named if name)

    @property
    def line_rate_gbps(self) -> int | None:
        """That of the fastest port of the RDMA device, or the interface's negotiated speed."""
        ports = () if self.rdma is None else self.rdma.ports
        rates = [port.rate_gbps for port in ports if port.rate_gbps]
        if rates:
            return int(min(max(rates), 1e6))
        speed = None if self.netdev is None else self.netdev.speed_mbps
        return None if speed is None else speed // 1000 or None


def nic_candidates(host: HostReading) -> tuple[NicCandidate, ...]:
    """NICs by PCI address; then RDMA devices whose function has another class (some are 0x00ff)."""
    rdma = {device.pci_address: device for device in host.rdma if device.pci_address}
    netdevs = {device.pci_address: device for device in host.netdevs if device.pci_address}
    functions = [
        function
        for function in host.pci
        if _is_nic(function) or (function.address in rdma and not function.is_passed_through)
    ]
    found = [
        NicCandidate(function, rdma.get(function.address), netdevs.get(function.address))
        for function in functions
    ]
    listed = {function.address for function in functions}
    others = (device for device in host.rdma if device.pci_address not in listed)
    return (*found, *(NicCandidate(None, device, None) for device in others))


def _is_nic(function: PciFunction) -> bool:
    """A network controller with a driver; its interface may be away, in the namespace of a pod."""
    return (
        function.class_code >> 16 == _NETWORK
        and function.driver is not None
        and not function.is_passed_through
    )


def excluded_interfaces(
    netdevs: Sequence[NetDevice],
    routes: Sequence[NetRoute],
    cluster: ClusterNetwork = NO_CLUSTER_NETWORK,
    left_out: ExclusionPolicy = DEFAULT_EXCLUSION_POLICY,
) -> dict[str, Exclusion]:
    """The interfaces of a host that must not be given away, by name."""
    known = {netdev.name: netdev for netdev in netdevs}
    found: dict[str, Exclusion] = {}
    for reason, carriers in _carriers(netdevs, routes, cluster):
        for name in _with_lower_interfaces(carriers & known.keys(), known):
            found.setdefault(name, Exclusion(reason, _FIX_OTHER_NIC, needed=True))
    for netdev in netdevs:
        exclusion = _exclusion_by_kind(netdev, known, left_out)
        if exclusion is not None:
            found.setdefault(netdev.name, exclusion)
    return found


_FIX_OTHER_NIC = "claim another NIC, or let another interface of the node carry that"


def _carriers(
    netdevs: Sequence[NetDevice], routes: Sequence[NetRoute], cluster: ClusterNetwork
) -> Iterator[tuple[str, set[str]]]:
    """The traffic that the node and its pods need, and the interfaces that carry it."""
    ways = [(network, route) for route in routes for network in _networks((route.destination,))]
    own = [
        (interface.network, interface.ip, netdev.name)
        for netdev in netdevs
        for interface in _parsed(netdev.addresses, ipaddress.ip_interface)
    ]
    yield DEFAULT_ROUTE, {name for network, way in ways if not network.prefixlen for name in way.interfaces}
    for node in _parsed(cluster.node_addresses, ipaddress.ip_address):
        yield f"has the node's address {node}", {name for _, address, name in own if address == node}
    for server in _parsed(cluster.api_servers, ipaddress.ip_address):
        yield f"carries the route to the API server at {server}", _route_interfaces(server, ways)
    for pods in _networks(cluster.pod_cidrs):
        names = {name for network, _, name in own if _is_within(network, pods)}
        names |= {name for _, address, name in own if address in pods}
        names |= {name for network, way in ways if _is_within(network, pods) for name in way.interfaces}
        yield f"carries the pods' network {pods}", names


def _is_within(network: _Network, pods: _Network) -> bool:
    """Whether a network lies in the pods' network; a wider one, such as the default route, does not count."""
    return (
        network.version == pods.version
        and network.prefixlen >= pods.prefixlen
        and network.network_address in pods
    )


def _route_interfaces(server: _Address, ways: Sequence[tuple[_Network, NetRoute]]) -> set[str]:
    """The kernel's route lookup: the longest prefix, then the lowest metric, then the first in order."""
    fitting = [(-network.prefixlen, route.metric, route) for network, route in ways if server in network]
    nearest = min(fitting, key=lambda rank: rank[:2], default=None)
    return set() if nearest is None else set(nearest[2].interfaces)


def _with_lower_interfaces(tops: Iterable[str], known: Mapping[str, NetDevice]) -> set[str]:
    """Interfaces, and all below them that carry their frames: the transitive closure."""
    found = set(tops)
    while more := {name for name in _lower_interfaces(found, known) if name in known} - found:
        found |= more
    return found


def _lower_interfaces(names: set[str], known: Mapping[str, NetDevice]) -> Iterator[str]:
    for name in names:
        yield from known[name].lower
    yield from (netdev.name for netdev in known.values() if netdev.master in names)


def _exclusion_by_kind(
    netdev: NetDevice, known: Mapping[str, NetDevice], left_out: ExclusionPolicy
) -> Exclusion | None:
    if netdev.master is not None:
        master = known.get(netdev.master)
        kind = master.kind if master is not None else ""
        fix = f"claim another NIC, or take it out on the node: ip link set {netdev.name} nomaster"
        return Exclusion(f"belongs to {kind or 'interface'} {netdev.master}", fix)
    if netdev.kind in left_out.kinds:
        words = _REASON_BY_KIND.get(netdev.kind, "is of a kind that is left out ({kind})")
        fix = f"claim another NIC, or give `rackloom node nic` all kinds to --leave-out but {netdev.kind}"
        return Exclusion(words.format(kind=netdev.kind), fix)
    if netdev.virtual and (pattern := _matching(netdev.name, left_out.names)) is not None:
        fix = "claim another NIC, rename it, or give `rackloom node nic` the kinds to --leave-out"
        return Exclusion(f"has a name that container networks use ({pattern})", fix)
    return None


def _matching(name: str, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)


def _networks(texts: Iterable[str]) -> Iterator[_Network]:
    return _parsed(texts, partial(ipaddress.ip_network, strict=False))


def _parsed(texts: Iterable[str], parse: Callable[[str], T]) -> Iterator[T]:
    """What can be read of some texts; malformed ones are left out."""
    for text in texts:
        with suppress(ValueError):
            yield parse(text)


class NicExclusions:
    """Why a NIC of a host must not carry tenant data."""

    def __init__(
        self, host: HostReading, candidates: Iterable[NicCandidate], excluded: Mapping[str, Exclusion]
    ) -> None:
        nics = tuple(candidates)
        self._excluded = excluded
        self._functions: dict[str, list[str]] = {}
        for netdev in host.netdevs:
            if netdev.pci_address is not None:
                self._functions.setdefault(netdev.pci_address, []).append(netdev.name)
        self._any_rdma = any(nic.rdma is not None for nic in nics)
        self._any_efa = any(_is_efa(nic) for nic in nics)

    def against(self, nic: NicCandidate) -> str | None:
        """The first reason that applies; None: it may."""
        if nic.netdev is not None and nic.netdev.name in self._excluded:
            return self._excluded[nic.netdev.name].reason
        for name in self._functions.get(nic.address or "", ()):
            # Some functions have several ports (ConnectX-3), and go away with all of them.
            if name in self._excluded and self._excluded[name].needed:
                return self._excluded[name].reason
        if self._any_efa and _is_infiniband(nic):
            # Amazon's machines have no InfiniBand fabric: on HGX B200 boards it is how the NVLink switches
            # are managed.
            return "carries NVLink management"
        if self._any_rdma and nic.rdma is None and nic.netdev is not None:
            return "Ethernet without RDMA"
        return None


def _is_efa(nic: NicCandidate) -> bool:
    return nic.function is not None and nic.function.vendor == AMAZON and nic.rdma is not None


def _is_infiniband(nic: NicCandidate) -> bool:
    function = nic.function
    return function is not None and function.vendor == MELLANOX and function.class_code >> 8 == _INFINIBAND
