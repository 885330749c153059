"""A network interface's settings on the host and in a pod, and the records of an attachment.

`pod_settings` decides the interface's settings: those of the claim's NetworkConfig, and the host's
for all that it leaves open. Routes and rules of the host are kept only together with the host's
addresses, even if the claim itself names these: with other addresses they would lead nowhere.
Permanent neighbours are always kept, since they name the machine that has an address on the wire, whatever
the interface's own address is. A claim's route wins over the host's to the same destination in the same
table. With SLAAC the host's IPv6 addresses are left behind, since the pod learns its own from the router, and
the interface solicits routers at once: the container runtime waits two seconds for the whole sandbox.

An interface changes its name and its namespace, so `LinkIdentity` finds it again: hardware by its PCI
function and permanent MAC (several ports may share a function), a virtual link by the MACs that it has or
is to get. A child of an interface (IPVLAN, MACVLAN) is made for the pod and found by its parent and its
alias. It gets none of the host's settings, since the parent keeps them.

`PreparedNic`, `NicRecord` and `Attachment` are stored as JSON: the first two in the checkpoint, the last
in one file for each NIC. An attachment holds all that is needed to bring the NIC back as it was. Nothing
else has to survive.
"""

import zlib
from collections.abc import Mapping
from ipaddress import ip_interface

import msgspec

from rackloom.core.allocate.objects import Device
from rackloom.core.domains.network_config import (
    SMALLEST_IPV6_MTU,
    Addressing,
    InterfaceConfig,
    NeighborConfig,
    NetworkConfig,
    RouteConfig,
    RuleConfig,
    VrfConfig,
    is_ipv6,
)

# Settings of an interface, and the decision for a pod.


_ROUTER_SYSCTLS = {
    "ipv6/disable_ipv6": 0,
    "ipv6/accept_ra": 2,
    "ipv6/router_solicitation_delay": 0,
    "ipv6/router_solicitation_interval": 1,
}
"""So that a router's answer comes within a second: a runtime waits two for the whole sandbox."""
_WITHOUT_DAD = {"ipv6/dad_transmits": 0}
"""With the host's hardware address the pod gets the host's address, so no other host has it."""
SIZE_NAMES = ("gso_max_size", "gro_max_size", "gso_ipv4_max_size", "gro_ipv4_max_size")


class NicValue(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of the values of this module."""


class LinkIdentity(NicValue, frozen=True, kw_only=True):
    """The properties by which a link is found again in any namespace, under any name."""

    name: str
    kind: str = ""
    """The kind of a virtual link (`veth`, `macvlan`). Empty for hardware."""
    parent: str | None = None
    """Address of its PCI function."""
    permanent_mac: str | None = None
    macs: tuple[str, ...] = ()
    """Addresses that it has on the host and is to get in the pod."""
    names: tuple[str, ...] = ()
    over: int | None = None
    """Of a child in a pod: index of its parent on the host."""


class SegmentationSizes(NicValue, frozen=True, kw_only=True):
    """Segmentation sizes in bytes. None leaves one as it is."""

    gso_max_size: int | None = None
    gro_max_size: int | None = None
    gso_ipv4_max_size: int | None = None
    gro_ipv4_max_size: int | None = None


class LinkSettings(NicValue, frozen=True, kw_only=True):
    """All settings of an interface in one namespace. None leaves a setting as it is."""

    name: str
    mtu: int | None = None
    mac: str | None = None
    up: bool = True
    sizes: SegmentationSizes = SegmentationSizes()
    addresses: tuple[str, ...] = ()
    routes: tuple[RouteConfig, ...] = ()
    rules: tuple[RuleConfig, ...] = ()
    neighbors: tuple[NeighborConfig, ...] = ()
    features: Mapping[str, bool] = {}
    private_flags: Mapping[str, bool] = {}
    sysctls: Mapping[str, int] = {}
    """By `<family>/conf/<setting>`. The name of the interface goes between."""
    vrf: VrfConfig | None = None
    without_ebpf: bool = False
    autoconfigures: bool = False
    """Whether it is to get an IPv6 address from a router's advertisement before it counts as attached."""


def pod_settings(config: NetworkConfig, host: LinkSettings) -> LinkSettings:
    """The settings for the pod: those of the claim, and the host's for all that the claim leaves open.

    Routes and rules of the host go with the host's addresses, copied or named: to others they would lead
    nowhere. Neighbours always go along, but for IPv6 ones to an interface that is to have no IPv6.
    """
    interface = config.interface
    autoconfigures = interface.addressing is Addressing.SLAAC
    host = _without_ipv6(host) if autoconfigures else host
    # Routes and rules that go with the host's addresses. The claim's entries win over them.
    kept = host if _has_host_addresses(interface, host) else LinkSettings(name=host.name)
    no_ipv6 = interface.disable_ipv6 or (interface.mtu is not None and interface.mtu < SMALLEST_IPV6_MTU)
    known = [entry for entry in host.neighbors if not (no_ipv6 and is_ipv6(entry.destination))]
    routes = {(route.destination, route.table): route for route in (*kept.routes, *config.routes)}
    neighbors = {neighbor.destination: neighbor for neighbor in (*known, *config.neighbors)}
    # The kernel's own l3mdev rule selects the table of a VRF.
    rules = () if interface.vrf is not None else (*kept.rules, *config.rules)
    found = {"ipv4/arp_ignore": interface.arp_ignore, "ipv4/arp_announce": interface.arp_announce}
    if interface.forwarding is not None:
        found |= dict.fromkeys(("ipv4/forwarding", "ipv6/forwarding"), int(interface.forwarding))
    if interface.addressing is Addressing.SLAAC:
        found |= _ROUTER_SYSCTLS | ({} if interface.hardware_addr else _WITHOUT_DAD)
    found |= {f"ipv6/{name}": value for name, value in interface.ipv6.items()}
    return LinkSettings(
        name=interface.name or host.name,
        mtu=interface.mtu,
        mac=None if interface.hardware_addr is None else normalize_mac(interface.hardware_addr),
        sizes=SegmentationSizes(**{name: getattr(interface, name) for name in SIZE_NAMES}),
        addresses=interface.addresses or host.addresses,
        routes=tuple(routes.values()),
        rules=tuple(dict.fromkeys(rules)),
        neighbors=tuple(neighbors.values()),
        features=dict(config.ethtool.features),
        private_flags=dict(config.ethtool.private_flags),
        sysctls={name: value for name, value in found.items() if value is not None},
        vrf=interface.vrf,
        without_ebpf=bool(interface.disable_ebpf_programs),
        autoconfigures=autoconfigures,
    )


def _has_host_addresses(interface: InterfaceConfig, host: LinkSettings) -> bool:
    """Whether the pod gets all that the host has: the claim names no addresses, or these among others."""
    if not interface.addresses:
        return True
    if interface.asks_dhcp or not host.addresses:
        return False
    named, own = ({ip_interface(text) for text in texts} for texts in (interface.addresses, host.addresses))
    return own <= named


def child_identity(parent: "NetworkLink", kind: str, device: str) -> LinkIdentity:
    """How the child of `parent` for a NIC is found in a pod.

    It is made under a unique name, which stays as its alias. So a link of the same kind on the
    same parent that a CNI plugin has made is never taken for it.
    """
    made = f"rl-{zlib.crc32(device.encode()):08x}"
    return LinkIdentity(name=made, kind=kind, over=parent.index)


def normalize_mac(text: str) -> str:
    """Lower case, with colons, as the kernel's tools print it."""
    return text.lower().replace("-", ":")


def _without_ipv6(host: LinkSettings) -> LinkSettings:
    """A pod that listens to routers gets from them the IPv6 settings that the host has."""
    return msgspec.structs.replace(
        host,
        addresses=tuple(address for address in host.addresses if not is_ipv6(address)),
        routes=tuple(route for route in host.routes if not is_ipv6(route.destination)),
    )


# A link as netlink shows it, and finding it again.


class NetworkLink(msgspec.Struct, frozen=True, kw_only=True):
    """One link of the namespace that was read."""

    index: int
    name: str
    kind: str
    """The kind of a virtual link (`veth`, `macvlan`). Empty for hardware."""
    mac: str | None
    permanent_mac: str | None
    mtu: int
    up: bool
    state: str
    encapsulation: str
    alias: str | None
    master: int | None
    lower: int | None = None
    """The link of this namespace that its frames go through: the parent of a VLAN, a macvlan, a tunnel."""
    over: int | None = None
    """The same for a link whose parent is in another namespace, by the index there."""
    parent: str | None
    """Address of the PCI function below it."""
    bus: str | None = None
    """Of the hardware below it: `pci`, `usb`, `virtio`, `vmbus`."""
    loopback: bool
    sizes: SegmentationSizes

    def identity(self, *also: LinkSettings) -> LinkIdentity:
        """The identity by which it is found again, also with the `also` settings that it is to get."""
        macs = [self.mac, *(settings.mac for settings in also)]
        return LinkIdentity(
            name=self.name,
            kind=self.kind,
            parent=self.parent,
            permanent_mac=self.permanent_mac,
            macs=tuple(dict.fromkeys(mac for mac in macs if mac)),
            names=tuple(dict.fromkeys((self.name, *(settings.name for settings in also)))),
        )


def find_link(links: tuple[NetworkLink, ...], wanted: LinkIdentity) -> NetworkLink | None:
    """The link that `wanted` identifies, under any name."""
    if wanted.over is not None:
        children = (link for link in links if (link.kind, link.over) == (wanted.kind, wanted.over))
        return next((link for link in children if wanted.name in (link.name, link.alias)), None)
    return next((link for link in links if _is_link(link, wanted)), None)


def _is_link(link: NetworkLink, wanted: LinkIdentity) -> bool:
    """Hardware is matched by its place (several ports may share a function), a virtual link by its MAC."""
    if link.kind != wanted.kind or link.loopback:
        return False
    if wanted.parent is not None and link.parent is not None:
        same_port = wanted.permanent_mac in (None, link.permanent_mac)
        return link.parent == wanted.parent and same_port
    if wanted.permanent_mac is not None:
        return link.permanent_mac == wanted.permanent_mac
    return link.mac in wanted.macs if wanted.macs else link.name in wanted.names


# The outcome of an attachment.


class AttachedLink(NicValue, frozen=True, kw_only=True):
    """An interface's settings in the pod."""

    name: str
    mac: str | None
    addresses: tuple[str, ...]


# Records of prepared and attached NICs.


class PreparedNic(NicValue, frozen=True, kw_only=True):
    """One NIC of a claim, as prepared."""

    device: str
    published: Device
    """As it was in the slice. Attributes that do not show while it is away are published from here."""
    identity: LinkIdentity | None = None
    """None for a NIC without an interface."""
    host: LinkSettings | None = None
    """None too for a child: the interface itself stays on the host as it is."""
    pod: LinkSettings | None = None
    over: LinkIdentity | None = None
    """The host's interface whose child the pod gets. `identity` is then that of the child."""
    rdma: str | None = None
    moves_rdma: bool = False
    below: tuple[str, ...] = ()
    """Devices that it sends through, such as the parent of a VLAN. They stay on the host."""


class NicRecord(NicValue, frozen=True, kw_only=True):
    """The checkpoint's record of a claim for this plugin."""

    pod: str
    """Its UID."""
    nics: tuple[PreparedNic, ...] = ()


class Attachment(NicValue, frozen=True, kw_only=True):
    """One NIC that is in a pod, or on its way there or back."""

    claim: str
    pod: str
    nic: PreparedNic
    netns: str
    """Path of the pod's network namespace."""
    netns_id: int
    """Its inode: the path alone may name another namespace later."""
    boot_id: str
    attached: AttachedLink | None = None
    """Set once all of it is in the pod."""
    address_until: float | None = None
    """The time (seconds since boot) at which the kernel removes its leased address. None for never."""
    returning: bool = False

    @property
    def key(self) -> str:
        """Name of its file."""
        return f"{self.claim}-{self.nic.device}"
