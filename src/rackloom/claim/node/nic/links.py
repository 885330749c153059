"""Reading the links of a network namespace, and all that hangs on one. Blocks; `OSError` is the kernel's."""

import ipaddress
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rackloom.claim.node.nic import ethtool, messages
from rackloom.claim.node.nic.netlink import Message, Rtnetlink
from rackloom.claim.node.nic.settings import SIZES, Identity, LinkSettings, Sizes
from rackloom.claim.opaque.network import LINK, UNIVERSE, Neighbor, Route, Rule
from rackloom.topology.discovery.host import NetRoute
from rackloom.topology.discovery.nics import POD_ENDS

_UP = 1
_UNICAST = 1
"""RTN_UNICAST."""
_LOOPBACK = 8
_MAIN, _LOCAL, _DEFAULT = 254, 255, 253
_KERNEL = 2
"""RTPROT_KERNEL: the kernel makes such a route itself when the address comes."""
_PERMANENT = 0x80
_ENCAPSULATIONS = {1: "ether", 32: "infiniband", 65534: "none", 772: "loopback"}
"""By ARPHRD_* of linux/if_arp.h."""
_TENTATIVE, _DUPLICATE = 0x40, 0x08
"""IFA_F_TENTATIVE and IFA_F_DADFAILED: an IPv6 address that is not to be used yet, or never."""
SYSCTLS = (
    *("ipv4/arp_ignore", "ipv4/arp_announce", "ipv4/forwarding", "ipv6/forwarding"),
    *("ipv6/accept_ra", "ipv6/dad_transmits", "ipv6/disable_ipv6", "ipv6/addr_gen_mode"),
    *("ipv6/router_solicitation_delay", "ipv6/router_solicitation_interval"),
)
_SYSCTL = Path("/proc/sys/net")
_SYSCTL_OF_HOST = Path("/mnt/proc-sys-net")
"""Where deploy/kubernetes mounts the host's: /proc/sys is read-only in a container that is not privileged.
Through either, the kernel shows the settings of the network namespace of the thread that opens one
(fs/proc/proc_sysctl.c)."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One link of the namespace that was read."""

    index: int
    name: str
    kind: str
    """What made it (`veth`, `macvlan`); empty for hardware."""
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
    parent: str | None
    """Address of the PCI function below it."""
    bus: str | None = None
    """Of the hardware below it: `pci`, `usb`, `virtio`, `vmbus`."""
    loopback: bool
    sizes: Sizes

    def identity(self, *also: LinkSettings) -> Identity:
        """By what it is found again, also with the `also` settings that it is to get."""
        macs = [self.mac, *(one.mac for one in also)]
        return Identity(
            name=self.name,
            kind=self.kind,
            parent=self.parent,
            permanent_mac=self.permanent_mac,
            macs=tuple(dict.fromkeys(mac for mac in macs if mac)),
            names=tuple(dict.fromkeys((self.name, *(one.name for one in also)))),
        )


def read_links(rtnetlink: Rtnetlink) -> tuple[Link, ...]:
    """All links of the namespace."""
    found = rtnetlink.dump(Message("reading links", "link", messages.GETLINK))
    return tuple(_link(one) for one in found)


def find(links: tuple[Link, ...], wanted: Identity) -> Link | None:
    """The link that `wanted` tells of, whatever it is called now."""
    return next((one for one in links if _is(one, wanted)), None)


def _is(link: Link, wanted: Identity) -> bool:
    """Hardware by where it is plugged in (several ports may share a function); what is virtual by its MAC."""
    if link.kind != wanted.kind or link.loopback:
        return False
    if wanted.parent is not None and link.parent is not None:
        same_port = wanted.permanent_mac in (None, link.permanent_mac)
        return link.parent == wanted.parent and same_port
    if wanted.permanent_mac is not None:
        return link.permanent_mac == wanted.permanent_mac
    return link.mac in wanted.macs if wanted.macs else link.name in wanted.names


def read_settings(rtnetlink: Rtnetlink, link: Link, *, features: bool = False) -> LinkSettings:
    """What `link` has now. Its features are read only where they are going to be changed."""
    routes = tuple(_routes(rtnetlink, link.index))
    tables = {one.table for one in routes} - {0, _MAIN, _LOCAL, _DEFAULT}
    return LinkSettings(
        name=link.name,
        mtu=link.mtu,
        mac=link.mac,
        up=link.up,
        sizes=link.sizes,
        addresses=tuple(read_addresses(rtnetlink, link.index)),
        routes=routes,
        rules=tuple(_rules(rtnetlink, tables)),
        neighbors=tuple(_neighbors(rtnetlink, link.index)),
        features=ethtool.features(link.name) if features else {},
        private_flags=ethtool.private_flags(link.name) if features else {},
        sysctls=dict(_sysctls(link.name)),
    )


def sysctl_path(name: str, link: str) -> Path:
    """Where the kernel keeps a setting of a link, in the namespace of the thread that opens it."""
    family, _, setting = name.partition("/")
    root = _SYSCTL_OF_HOST if _SYSCTL_OF_HOST.is_dir() else _SYSCTL
    return root / family / "conf" / link / setting


def _sysctls(link: str) -> Iterator[tuple[str, int]]:
    for name in SYSCTLS:
        path = sysctl_path(name, link)
        if path.exists():
            yield name, int(path.read_text())


def read_addresses(rtnetlink: Rtnetlink, index: int, *, also_expiring: bool = False) -> Iterator[str]:
    """Addresses of universe scope, as CIDRs; those that the kernel will let expire only if asked for."""
    for link, cidr, lasting in read_all_addresses(rtnetlink):
        if link == index and (lasting or also_expiring):
            yield cidr


def read_all_addresses(rtnetlink: Rtnetlink) -> Iterator[tuple[int, str, bool]]:
    """Addresses of universe scope: index of the link, CIDR, and whether the kernel lets it stay."""
    for one in rtnetlink.dump(Message("reading addresses", "address", messages.GETADDR)):
        if one["scope"] == UNIVERSE:
            address = one.get_attr("IFA_LOCAL") or one.get_attr("IFA_ADDRESS")
            lasting = bool((one.get_attr("IFA_FLAGS") or one["flags"]) & _PERMANENT)
            yield one["index"], f"{address}/{one['prefixlen']}", lasting


def read_main_routes(rtnetlink: Rtnetlink, names: Mapping[int, str]) -> Iterator[NetRoute]:
    """The main tables of both families, with the links by their `names`."""
    for one in rtnetlink.dump(Message("reading routes", "route", messages.GETROUTE)):
        if (one.get_attr("RTA_TABLE") or one["table"]) != _MAIN or one["type"] != _UNICAST:
            continue
        hops = one.get_attr("RTA_MULTIPATH") or ()
        indices = [hop["oif"] for hop in hops] or [one.get_attr("RTA_OIF")]
        yield NetRoute(
            f"{one.get_attr('RTA_DST') or _anywhere(one)}/{one['dst_len']}",
            tuple(names[index] for index in indices if index in names),
            one.get_attr("RTA_PRIORITY") or 0,
        )


def read_autoconfigured(rtnetlink: Rtnetlink, index: int) -> tuple[str, ...]:
    """IPv6 addresses of universe scope that may be used now, as CIDRs, whether they last or not."""
    found = rtnetlink.dump(Message("reading addresses", "address", messages.GETADDR))
    return tuple(
        f"{one.get_attr('IFA_ADDRESS')}/{one['prefixlen']}"
        for one in found
        if (one["index"], one["family"], one["scope"]) == (index, messages.INET6, UNIVERSE)
        and not (one.get_attr("IFA_FLAGS") or one["flags"]) & (_TENTATIVE | _DUPLICATE)
    )


def _routes(rtnetlink: Rtnetlink, index: int) -> Iterator[Route]:
    """Those of the claim's kind. What the kernel makes with an address comes again with it."""
    for one in rtnetlink.dump(Message("reading routes", "route", messages.GETROUTE)):
        table = one.get_attr("RTA_TABLE") or one["table"]
        if one.get_attr("RTA_OIF") != index or table == _LOCAL or one["proto"] == _KERNEL:
            continue
        if one["scope"] in (UNIVERSE, LINK) and one["type"] == _UNICAST and not _is_link_local(one):
            yield Route(
                destination=f"{one.get_attr('RTA_DST') or _anywhere(one)}/{one['dst_len']}",
                gateway=one.get_attr("RTA_GATEWAY"),
                source=one.get_attr("RTA_PREFSRC"),
                scope=LINK if one.get_attr("RTA_GATEWAY") is None else one["scope"],
                table=0 if table == _MAIN else table,
            )


def _anywhere(one: Any) -> str:
    return str(ipaddress.IPv4Address(0) if one["family"] == socket.AF_INET else ipaddress.IPv6Address(0))


def _is_link_local(one: Any) -> bool:
    destination = one.get_attr("RTA_DST")
    return destination is not None and ipaddress.ip_address(destination).is_link_local


def _rules(rtnetlink: Rtnetlink, tables: set[int]) -> Iterator[Rule]:
    if not tables:
        return
    for one in rtnetlink.dump(Message("reading rules", "rule", messages.GETRULE)):
        table = one.get_attr("FRA_TABLE") or one["table"]
        if table in tables:
            yield Rule(
                table=table,
                priority=one.get_attr("FRA_PRIORITY") or 0,
                source=_prefix(one.get_attr("FRA_SRC"), one["src_len"]),
                destination=_prefix(one.get_attr("FRA_DST"), one["dst_len"]),
            )


def _prefix(address: str | None, length: int) -> str | None:
    return None if address is None else f"{address}/{length}"


def _neighbors(rtnetlink: Rtnetlink, index: int) -> Iterator[Neighbor]:
    """Permanent ones: the others are learnt again."""
    for one in rtnetlink.dump(Message("reading neighbours", "neighbor", messages.GETNEIGH)):
        destination, mac = one.get_attr("NDA_DST"), one.get_attr("NDA_LLADDR")
        if one["ifindex"] == index and one["state"] & _PERMANENT and destination and mac:
            yield Neighbor(destination=destination, hardware_addr=mac)


def _link(one: Any) -> Link:
    info = one.get_attr("IFLA_LINKINFO")
    kind = (info.get_attr("IFLA_INFO_KIND") if info is not None else None) or ""
    permanent = _mac(one.get_attr("IFLA_PERM_ADDRESS"))
    return Link(
        index=one["index"],
        name=one.get_attr("IFLA_IFNAME"),
        kind=kind,
        mac=_mac(one.get_attr("IFLA_ADDRESS")),
        permanent_mac=permanent,
        mtu=one.get_attr("IFLA_MTU") or 0,
        up=bool(one["flags"] & _UP),
        state=(one.get_attr("IFLA_OPERSTATE") or "UNKNOWN").lower(),
        encapsulation=_ENCAPSULATIONS.get(one["ifi_type"], str(one["ifi_type"])),
        alias=one.get_attr("IFLA_IFALIAS"),
        master=one.get_attr("IFLA_MASTER"),
        lower=_lower(one, kind),
        parent=_pci(one),
        bus=one.get_attr("IFLA_PARENT_DEV_BUS_NAME"),
        loopback=bool(one["flags"] & _LOOPBACK),
        sizes=Sizes(**{name: one.get_attr(f"IFLA_{name.upper()}") for name in SIZES}),
    )


def _lower(one: Any, kind: str) -> int | None:
    """IFLA_LINK is also the other end of a pair, and may be of another namespace, with an index of there."""
    if kind in POD_ENDS or one.get_attr("IFLA_LINK_NETNSID") is not None:
        return None
    return one.get_attr("IFLA_LINK") or None


def _pci(one: Any) -> str | None:
    parent = one.get_attr("IFLA_PARENT_DEV_NAME")
    return parent if one.get_attr("IFLA_PARENT_DEV_BUS_NAME") == "pci" else None


def _mac(value: str | None) -> str | None:
    """Zeros are no address: links without hardware have them for a permanent one."""
    if not value or not value.strip("0:"):
        return None
    return value.lower()
