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

A PCI function has any number of RDMA devices, interfaces and ports. `nic_candidates` makes one NIC of each
function, and of each subfunction, because these facts decide which parts can be divided:

- A process that opens the uverbs device of an RDMA device reaches all ports of it. The RDMA device and the
  interfaces on its ports therefore have one owner. A ConnectX-3 function with two ports is one NIC.
- An RDMA device without uverbs carries no data of programs. The `smi` device of a ConnectX-8 manages the
  planes of the data device, for instance.
- In switchdev mode a representor is the host's end of a virtual function. A child (pkey, VLAN, MACsec)
  sends through the port of its parent. A software RDMA device (rxe, siw) does too.
- One port has two owners in this model: the representor of a virtual function. The uplink's RDMA device has
  it as a port, and the virtual function is another NIC. The kernel steers the traffic of both.
- An interface in a pod does not show on the host. If each port were a NIC, a port could take the name of a
  port that is away.

The NIC is the RDMA device with uverbs, and the interface on its first port. Speed and health are those of
this port. Everything else of the function stays on the host (`owned_interfaces`). If two RDMA devices have
uverbs, or two interfaces may be on the first port, the part that carries data is not known. Such a NIC is
left out with this reason.

`NicExclusions` adds the rules for whole NICs: on Amazon's HGX B200 boards InfiniBand functions manage the
NVLink switches, and beside RDMA NICs plain Ethernet is left out.
"""

import dataclasses
import ipaddress
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import TypeVar

import msgspec

from rackloom.topology.machine import HostReading, NetDevice, NetRoute, Nic, PciFunction, RdmaDevice, RdmaPort

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
    """Kinds and names of interfaces that no tenant may get. An operator can change both."""

    kinds: frozenset[str] = POD_INTERFACE_KINDS | _TUNNELS | _IMMOVABLE | {"usb", "ifb", "macvtap", "ipvtap"}
    """As `ip -details link` prints them. `usb` is hardware on that bus."""
    names: tuple[str, ...] = _CONTAINER_NETWORK_NAMES
    """Patterns for interfaces without hardware: names that well-known container networks use."""


DEFAULT_EXCLUSION_POLICY = ExclusionPolicy()


class ClusterNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """The network of one node, as Kubernetes reports it. Malformed addresses are ignored."""

    node_addresses: tuple[str, ...] = ()
    api_servers: tuple[str, ...] = ()
    pod_cidrs: tuple[str, ...] = ()


NO_CLUSTER_NETWORK = ClusterNetwork()


class Exclusion(msgspec.Struct, frozen=True):
    """The reason to keep an interface from tenants, a sentence without its subject, and the remedy."""

    reason: str
    fix: str
    needed: bool = False
    """Whether the node or its pods would be cut off."""


class NicCandidate(msgspec.Struct, frozen=True):
    """One NIC to be: a PCI function or a subfunction of it, or an RDMA device without one."""

    function: PciFunction | None
    address: str | None
    """Of its PCI function. A subfunction has none: the NIC of the function has it."""
    rdma: RdmaDevice | None
    """The device that carries its data, with the ports that do."""
    netdev: NetDevice | None
    ports: tuple[str, ...] = ()
    """All its interfaces that are ports: they have the same owner."""
    others: tuple[str, ...] = ()
    """Children of these interfaces, and representors."""
    unclear: str | None = None
    """Why the part that carries data is not known, or has another owner."""
    rdma_ports: tuple[int, ...] = ()
    """Numbers of the RDMA device's ports that carry its data, if not all do."""
    subfunction: str | None = None
    """Its PCI function and its number there: `0000:08:00.0/sf88`."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which a declaration may call it."""
        parts = (part.name for part in (self.rdma, self.netdev) if part is not None)
        return tuple(name for name in (self.address, self.subfunction, *parts, *self.ports) if name)

    @property
    def line_rate_gbps(self) -> int | None:
        """The rate of its fastest RDMA port that carries data, or the interface's negotiated speed."""
        ports = () if self.rdma is None else self.rdma.ports
        rates = [port.rate_gbps for port in ports if port.rate_gbps]
        if rates:
            return int(min(max(rates), 1e6))
        speed = None if self.netdev is None else self.netdev.speed_mbps
        return None if speed is None else speed // 1000 or None


def nic_candidates(host: HostReading, without: Container[str] = ()) -> tuple[NicCandidate, ...]:
    """NICs by PCI address, then subfunctions, and RDMA devices of functions that are not listed.

    `without` names RDMA devices that a declaration excludes: they are not the data part of their function.
    """
    rdma: dict[tuple[str | None, str | None], list[RdmaDevice]] = {}
    netdevs: dict[tuple[str | None, str | None], list[NetDevice]] = {}
    for device in host.rdma:
        rdma.setdefault((device.pci_address, device.subfunction), []).append(device)
    for netdev in host.netdevs:
        netdevs.setdefault((netdev.pci_address, netdev.subfunction), []).append(netdev)
    functions = {
        (function.address, None): function
        for function in host.pci
        if _is_nic(function) or ((function.address, None) in rdma and not function.is_passed_through)
    }
    by_address = {function.address: function for function in host.pci}
    # A subfunction may have an interface alone. Other devices without a listed function need RDMA to be NICs.
    below = dict.fromkeys([*rdma, *(key for key in netdevs if key[1] is not None)])
    edges = lower_interfaces(host.netdevs)
    owned = {netdev.name for key in (*functions, *below) for netdev in netdevs.get(key, ()) if any(key)}
    found: list[NicCandidate] = []
    for key in (*functions, *(key for key in below if key not in functions)):
        if key == (None, None):
            found += (_without_function(device, edges, owned) for device in rdma[key])
            continue
        address, subfunction = key
        of = subfunction and f"{address}/{subfunction}"
        bare = NicCandidate(
            by_address.get(address or ""), None if of else address, None, None, subfunction=of
        )
        found.append(_with_data_part(bare, rdma.get(key, []), netdevs.get(key, []), without))
    return tuple(found)


def _without_function(device: RdmaDevice, below: dict[str, set[str]], owned: set[str]) -> NicCandidate:
    """An RDMA device without a PCI function. Software devices (rxe, siw) send through an interface."""
    names = tuple(port.netdev for port in device.ports if port.netdev in below)
    through = reachable(names, below) & owned
    unclear = f"sends through {min(through)}, which belongs to another NIC" if through else None
    return NicCandidate(None, None, device, None, ports=names, unclear=unclear)


def _with_data_part(
    bare: NicCandidate, rdma: Sequence[RdmaDevice], netdevs: Sequence[NetDevice], without: Container[str]
) -> NicCandidate:
    """The NIC of one function: its data device, the first port of that, and the interface on this port."""
    # Before two parts are called unclear: management devices, children and representors carry no data. A
    # software device (rxe, siw) uses the port of the hardware.
    data = [device for device in rdma if device.uverbs is not False]
    data = [part for part in data if not (part.software or part.name.startswith(("rxe", "siw")))] or data
    if len(data) > 1:
        data = [device for device in data if device.name not in without] or data
    ports = [netdev for netdev in netdevs if not netdev.lower and not _represents(netdev)]
    named = tuple(netdev.name for netdev in ports)
    others = tuple(netdev.name for netdev in netdevs if netdev.name not in named)
    bare = msgspec.structs.replace(bare, ports=named, others=others)
    if len(data) > 1:
        return _unclear(bare, "RDMA devices with uverbs", data)
    device = data[0] if data else None
    rdma_ports = device.ports if device is not None else ()
    numbers = {netdev.name: _port_number(netdev, rdma_ports, len(ports) == 1) for netdev in ports}
    # Some drivers (nfp) give all ports dev_port 0. Their names have the order of the ports.
    by_name = {tuple(map(int, re.findall(r"\d+", netdev.phys_port_name or ""))): netdev for netdev in ports}
    is_tied = len({*numbers.values()} - {None}) < len(ports)
    if is_tied and not rdma_ports and () not in by_name and len(by_name) == len(ports):
        numbers = {by_name[order].name: rank for rank, order in enumerate(sorted(by_name), start=1)}
    known = [port.number for port in rdma_ports] or [number for number in numbers.values() if number]
    first = min(known, default=1)
    on_first = [netdev for netdev in ports if numbers[netdev.name] in (first, None)]
    if len(on_first) > 1 or None in numbers.values():
        return _unclear(bare, f"interfaces that may be on port {first}", on_first)
    bare = msgspec.structs.replace(bare, netdev=on_first[0] if on_first else None)
    if device is None:
        return bare
    # The first port carries the data also while its interface is away. Other ports may be representors'.
    carrying = tuple(port for port in rdma_ports if port.number == first)
    if carrying and carrying[0].netdev in others:
        return _unclear(bare, "ports, the first of another interface", [device])
    chosen = () if carrying == rdma_ports else (first,)
    data_device = dataclasses.replace(device, ports=carrying)
    return msgspec.structs.replace(bare, rdma=data_device, rdma_ports=chosen)


def _unclear(bare: NicCandidate, several: str, parts: Sequence[RdmaDevice | NetDevice]) -> NicCandidate:
    names = ", ".join(part.name for part in parts)
    reason = f"has several {several} ({names}), and its data part is not known"
    return msgspec.structs.replace(bare, netdev=None, unclear=reason)


_PHYSICAL_PORT = re.compile(r"p\d+(s\d+)?")
_REPRESENTOR = re.compile(r"(c\d+)?pf\d+((vf|sf)\d+)?")
"""Names that devlink gives to ports. Older drivers number their representors."""


def _represents(netdev: NetDevice) -> bool:
    """Whether an interface is the host's end of a virtual function, in the switch of the card."""
    name = netdev.phys_port_name or ""
    is_in_switch = netdev.phys_switch_id is not None and bool(name)
    return bool(_REPRESENTOR.fullmatch(name)) or (is_in_switch and not _PHYSICAL_PORT.fullmatch(name))


def _port_number(netdev: NetDevice, ports: Sequence[RdmaPort], is_alone: bool) -> int | None:
    """The port of an interface: by the GIDs of the RDMA device, then by `dev_port`, which counts from 0."""
    named = next((port.number for port in ports if port.netdev == netdev.name), None)
    if named is not None:
        return named
    # A card with a function for each port may give dev_port 1 to the only port of its second function.
    if is_alone and len(ports) <= 1:
        return ports[0].number if ports else 1
    return None if netdev.dev_port is None else netdev.dev_port + 1


def data_rdma(host: HostReading, nic: Nic) -> RdmaDevice | None:
    """The RDMA device of a NIC with the ports that carry its data, or None if it has none or it is away."""
    device = next((device for device in host.rdma if device.name == nic.rdma_device), None)
    if device is None or not nic.rdma_ports:
        return device
    ports = tuple(port for port in device.ports if port.number in nic.rdma_ports)
    return dataclasses.replace(device, ports=ports)


def _is_nic(function: PciFunction) -> bool:
    """Whether it is a network controller with a driver. Its interface may be in the namespace of a pod."""
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
    below = lower_interfaces(netdevs)
    found: dict[str, Exclusion] = {}
    for reason, carriers in _carriers(netdevs, routes, cluster):
        for name in reachable(carriers, below) & known.keys():
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
    """Whether a network lies in the pods' network. A wider one, such as the default route, does not."""
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


def lower_interfaces(netdevs: Sequence[NetDevice]) -> dict[str, set[str]]:
    """The interfaces right below each interface: its parent, or the members of a bond or bridge."""
    below = {netdev.name: set(netdev.lower) for netdev in netdevs}
    for netdev in netdevs:
        if netdev.master in below:
            below[netdev.master].add(netdev.name)
    return below


def reachable(starts: Iterable[str], edges: Mapping[str, Iterable[str]]) -> set[str]:
    """The transitive closure: interfaces, and all that the edges lead to from them."""
    found: set[str] = set()
    waiting = list(starts)
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += edges.get(name, ())
    return found


def _exclusion_by_kind(
    netdev: NetDevice, known: Mapping[str, NetDevice], left_out: ExclusionPolicy
) -> Exclusion | None:
    if netdev.master is not None:
        master = known.get(netdev.master)
        kind = master.kind if master is not None else ""
        fix = f"claim another NIC, or take it out on the node: ip link set {netdev.name} nomaster"
        return Exclusion(f"belongs to {kind or 'interface'} {netdev.master}", fix)
    if _represents(netdev):
        fix = "claim the virtual function: its own NIC is at another PCI address"
        return Exclusion(f"is the host's end of {netdev.phys_port_name} in a switch of the card", fix)
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
    """The texts that can be parsed. Malformed ones are left out."""
    for text in texts:
        with suppress(ValueError):
            yield parse(text)


def owned_interfaces(
    netdevs: Sequence[NetDevice], candidates: Iterable[NicCandidate], offered: Iterable[NicCandidate]
) -> dict[str, str]:
    """Interfaces on ports with an owner, with the reason. `offered` are the NICs that tenants can get.

    Every interface above an offered NIC counts (VLAN, MACsec, tunnel). Pairs have none below them.
    """
    lent = {name for nic in offered for name in (*nic.ports, *nic.others)}
    found = {
        name: f"belongs to NIC {'/'.join(nic.names[:2])}, which has one owner"
        for nic in candidates
        for name in (*nic.ports, *nic.others)
    }
    edges = lower_interfaces(netdevs)
    for name, below in edges.items():
        if parents := reachable(below, edges) & lent:
            found.setdefault(name, f"sends through {min(parents)}, which belongs to an offered NIC")
    return found


class NicExclusions:
    """Why a NIC of a host must not carry tenant data."""

    def __init__(
        self, host: HostReading, candidates: Iterable[NicCandidate], excluded: Mapping[str, Exclusion]
    ) -> None:
        nics = tuple(candidates)
        self._excluded = excluded
        self._any_rdma = any(device.uverbs is not False for device in host.rdma)
        self._any_efa = any(_is_efa(nic) for nic in nics)

    def against(self, nic: NicCandidate) -> str | None:
        """The first reason that applies, or None."""
        # Some functions have several ports (ConnectX-3), and a tenant's RDMA device reaches all of them.
        for name in (*nic.ports, *nic.others):
            if name in self._excluded and (name in nic.ports or self._excluded[name].needed):
                return self._excluded[name].reason
        if nic.unclear is not None:
            return nic.unclear
        if self._any_efa and _is_infiniband(nic):
            # Amazon's machines have no InfiniBand fabric: on HGX B200 boards it is how the NVLink switches
            # are managed.
            return "carries NVLink management"
        if nic.rdma is not None and not nic.rdma.uverbs:
            return f"has RDMA device {nic.rdma.name} without uverbs: load ib_uverbs on the node"
        if self._any_rdma and nic.rdma is None and nic.netdev is not None:
            return "Ethernet without RDMA"
        return None


def _is_efa(nic: NicCandidate) -> bool:
    return nic.function is not None and nic.function.vendor == AMAZON and nic.rdma is not None


def _is_infiniband(nic: NicCandidate) -> bool:
    function = nic.function
    return function is not None and function.vendor == MELLANOX and function.class_code >> 8 == _INFINIBAND
