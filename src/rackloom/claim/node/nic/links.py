"""One network interface: reading its settings, moving it between namespaces, configuring it.

`attach_link` and `detach_link` move a link between the host and a pod and make it as wanted. The kernel
carries out each request whole. After a crash between two requests, the link is found again by its identity,
in the pod's namespace or on the host, and the work continues there. So every step can be the last before a
crash, and all steps can be repeated.

The kernel fixes the order of steps. The link goes down, since name and hardware address change only
then. It gets its name, loses eBPF programs, gets MTU, address, sizes, VRF, sysctls, addresses and ethtool
settings. It comes up. Then routes, rules and neighbours follow, routes of link scope before those with a
gateway. Values that the link has already are not set again: some links take no hardware address (IPoIB),
and some are reset by setting any MTU.

An interface that configures itself (SLAAC) counts as attached once it has an address from a router's
advertisement, for which 1.5 s are allowed: runtimes give a plugin two seconds for a sandbox. A virtual
link dies with the namespace that it is in.

`attach_child` makes a child of an interface (IPVLAN, MACVLAN) in the pod instead and configures it by the
same steps. `remove_child` deletes it. The interface stays on the host as it is.

All functions block. `OSError` is the kernel's.
"""

import errno
import ipaddress
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rackloom.claim.node.nic import datapath, netlink
from rackloom.claim.node.nic.datapath import detach_tcx
from rackloom.claim.node.nic.netlink import (
    HOST_NAMESPACE,
    NetlinkRequest,
    Rtnetlink,
    in_namespace,
    open_namespace,
)
from rackloom.core.domains.network_config import (
    LINK_SCOPE,
    MAIN_TABLE,
    RESERVED_TABLES,
    UNIVERSE_SCOPE,
    NeighborConfig,
    RouteConfig,
    RuleConfig,
)
from rackloom.core.nics.attachment import (
    SIZE_NAMES,
    AttachedLink,
    LinkIdentity,
    LinkSettings,
    NetworkLink,
    SegmentationSizes,
    find_link,
)
from rackloom.topology.machine import NetRoute
from rackloom.topology.nics import POD_INTERFACE_KINDS

# Reading.


_LOOPBACK = 8
_LOCAL_TABLE = 255
_KERNEL = 2
"""RTPROT_KERNEL: the kernel makes such a route itself when the address comes."""
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
"""The host's, as deploy/kubernetes mounts it: /proc/sys is read-only in an unprivileged container.
Through either, the kernel shows the settings of the network namespace of the thread that opens one
(fs/proc/proc_sysctl.c)."""


def read_links(rtnetlink: Rtnetlink) -> tuple[NetworkLink, ...]:
    """All links of the namespace."""
    found = rtnetlink.dump(NetlinkRequest("reading links", "link", netlink.GETLINK))
    return tuple(_link(message) for message in found)


def read_settings(rtnetlink: Rtnetlink, link: NetworkLink, *, features: bool = False) -> LinkSettings:
    """The current settings of `link`. Its features are read only if they are going to be changed."""
    routes = tuple(_routes(rtnetlink, link.index))
    tables = {route.table for route in routes} - {0, *RESERVED_TABLES}
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
        features=datapath.read_features(link.name) if features else {},
        private_flags=datapath.read_private_flags(link.name) if features else {},
        sysctls=dict(_sysctls(link.name)),
    )


def sysctl_path(name: str, link: str) -> Path:
    """The file of a link's setting, in the namespace of the thread that opens it."""
    family, _, setting = name.partition("/")
    root = _SYSCTL_OF_HOST if _SYSCTL_OF_HOST.is_dir() else _SYSCTL
    return root / family / "conf" / link / setting


def _sysctls(link: str) -> Iterator[tuple[str, int]]:
    for name in SYSCTLS:
        path = sysctl_path(name, link)
        if path.exists():
            yield name, int(path.read_text())


def read_addresses(rtnetlink: Rtnetlink, index: int, *, also_expiring: bool = False) -> Iterator[str]:
    """Addresses of universe scope, as CIDRs. With `also_expiring`, those that will expire too."""
    for link, cidr, lasting in read_all_addresses(rtnetlink):
        if link == index and (lasting or also_expiring):
            yield cidr


def read_all_addresses(rtnetlink: Rtnetlink) -> Iterator[tuple[int, str, bool]]:
    """Addresses of universe scope: index of the link, CIDR, and whether the kernel lets it stay."""
    for message in rtnetlink.dump(NetlinkRequest("reading addresses", "address", netlink.GETADDR)):
        if message["scope"] == UNIVERSE_SCOPE:
            # On a link with a peer IFA_ADDRESS is the peer's address. IPv6 has IFA_LOCAL only there.
            address = message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS")
            lasting = bool((message.get_attr("IFA_FLAGS") or message["flags"]) & netlink.PERMANENT)
            yield message["index"], f"{address}/{message['prefixlen']}", lasting


def read_main_routes(rtnetlink: Rtnetlink, names: Mapping[int, str]) -> Iterator[NetRoute]:
    """The main tables of both families, with the links by their `names`."""
    for route in rtnetlink.dump(NetlinkRequest("reading routes", "route", netlink.GETROUTE)):
        if (route.get_attr("RTA_TABLE") or route["table"]) != MAIN_TABLE or route["type"] != netlink.UNICAST:
            continue
        hops = route.get_attr("RTA_MULTIPATH") or ()
        indices = [hop["oif"] for hop in hops] or [route.get_attr("RTA_OIF")]
        yield NetRoute(
            f"{route.get_attr('RTA_DST') or _anywhere(route)}/{route['dst_len']}",
            tuple(names[index] for index in indices if index in names),
            route.get_attr("RTA_PRIORITY") or 0,
        )


def read_autoconfigured(rtnetlink: Rtnetlink, index: int) -> tuple[str, ...]:
    """IPv6 addresses of universe scope that may be used now, as CIDRs, whether they last or not."""
    found = rtnetlink.dump(NetlinkRequest("reading addresses", "address", netlink.GETADDR))
    return tuple(
        f"{address.get_attr('IFA_ADDRESS')}/{address['prefixlen']}"
        for address in found
        if (address["index"], address["family"], address["scope"]) == (index, netlink.INET6, UNIVERSE_SCOPE)
        and not (address.get_attr("IFA_FLAGS") or address["flags"]) & (_TENTATIVE | _DUPLICATE)
    )


def _routes(rtnetlink: Rtnetlink, index: int) -> Iterator[RouteConfig]:
    """Routes that a claim could request. The kernel adds the others again with the address."""
    for route in rtnetlink.dump(NetlinkRequest("reading routes", "route", netlink.GETROUTE)):
        table = route.get_attr("RTA_TABLE") or route["table"]
        if route.get_attr("RTA_OIF") != index or table == _LOCAL_TABLE or route["proto"] == _KERNEL:
            continue
        if (
            route["scope"] in (UNIVERSE_SCOPE, LINK_SCOPE)
            and route["type"] == netlink.UNICAST
            and not _is_link_local(route)
        ):
            yield RouteConfig(
                destination=f"{route.get_attr('RTA_DST') or _anywhere(route)}/{route['dst_len']}",
                gateway=route.get_attr("RTA_GATEWAY"),
                source=route.get_attr("RTA_PREFSRC"),
                scope=LINK_SCOPE if route.get_attr("RTA_GATEWAY") is None else route["scope"],
                table=0 if table == MAIN_TABLE else table,
            )


def _anywhere(route: Any) -> str:
    return str(ipaddress.IPv4Address(0) if route["family"] == socket.AF_INET else ipaddress.IPv6Address(0))


def _is_link_local(route: Any) -> bool:
    destination = route.get_attr("RTA_DST")
    return destination is not None and ipaddress.ip_address(destination).is_link_local


def _rules(rtnetlink: Rtnetlink, tables: set[int]) -> Iterator[RuleConfig]:
    if not tables:
        return
    for rule in rtnetlink.dump(NetlinkRequest("reading rules", "rule", netlink.GETRULE)):
        table = rule.get_attr("FRA_TABLE") or rule["table"]
        if table in tables:
            yield RuleConfig(
                table=table,
                priority=rule.get_attr("FRA_PRIORITY") or 0,
                source=_prefix(rule.get_attr("FRA_SRC"), rule["src_len"]),
                destination=_prefix(rule.get_attr("FRA_DST"), rule["dst_len"]),
            )


def _prefix(address: str | None, length: int) -> str | None:
    return None if address is None else f"{address}/{length}"


def _neighbors(rtnetlink: Rtnetlink, index: int) -> Iterator[NeighborConfig]:
    """Permanent neighbours. The kernel discovers the others again."""
    for neighbor in rtnetlink.dump(NetlinkRequest("reading neighbours", "neighbor", netlink.GETNEIGH)):
        destination, mac = neighbor.get_attr("NDA_DST"), neighbor.get_attr("NDA_LLADDR")
        if neighbor["ifindex"] == index and neighbor["state"] & netlink.PERMANENT and destination and mac:
            yield NeighborConfig(destination=destination, hardware_addr=mac)


def _link(message: Any) -> NetworkLink:
    info = message.get_attr("IFLA_LINKINFO")
    kind = (info.get_attr("IFLA_INFO_KIND") if info is not None else None) or ""
    bus = message.get_attr("IFLA_PARENT_DEV_BUS_NAME")
    # IFLA_LINK also names the peer of a pair, and may be an index of another namespace.
    below = None if kind in POD_INTERFACE_KINDS else message.get_attr("IFLA_LINK") or None
    is_far = message.get_attr("IFLA_LINK_NETNSID") is not None
    return NetworkLink(
        index=message["index"],
        name=message.get_attr("IFLA_IFNAME"),
        kind=kind,
        mac=_mac(message.get_attr("IFLA_ADDRESS")),
        permanent_mac=_mac(message.get_attr("IFLA_PERM_ADDRESS")),
        mtu=message.get_attr("IFLA_MTU") or 0,
        up=bool(message["flags"] & netlink.UP),
        state=(message.get_attr("IFLA_OPERSTATE") or "UNKNOWN").lower(),
        encapsulation=_ENCAPSULATIONS.get(message["ifi_type"], str(message["ifi_type"])),
        alias=message.get_attr("IFLA_IFALIAS"),
        master=message.get_attr("IFLA_MASTER"),
        lower=None if is_far else below,
        over=below if is_far else None,
        parent=message.get_attr("IFLA_PARENT_DEV_NAME") if bus == "pci" else None,
        bus=bus,
        loopback=bool(message["flags"] & _LOOPBACK),
        sizes=SegmentationSizes(**{name: message.get_attr(f"IFLA_{name.upper()}") for name in SIZE_NAMES}),
    )


def _mac(value: str | None) -> str | None:
    """Zeros are no address: links without hardware have them for a permanent one."""
    if not value or not value.strip("0:"):
        return None
    return value.lower()


# Moving and configuring.


ADVERTISEMENT_SECONDS = 1.5
"""Less than the two seconds that runtimes give a plugin for a sandbox."""
_ADVERTISEMENT_POLL_SECONDS = 0.05
_IF_THERE = frozenset({"ipv6/forwarding"})
"""Follows from a setting that is of IPv4 too."""


def attach_link(identity: LinkIdentity, wanted: LinkSettings, netns: Path) -> AttachedLink:
    """Bring the link into `netns` and configure it as `wanted`. `detach_link` undoes it. Raises `OSError`."""
    # An earlier attempt may have moved it and been cut off: then it is configured from there.
    if not in_namespace(netns, lambda: _is_in_namespace(identity)):
        with open_namespace(netns) as handle:
            if not _move_if_here(identity, handle, identity.names[-1]):
                raise FileNotFoundError(f"interface {identity.name} is neither on the host nor in the pod")
    return in_namespace(netns, lambda: _configure_in_pod(identity, wanted))


def detach_link(identity: LinkIdentity, host: LinkSettings, netns: Path | None) -> bool:
    """Bring the link back to the host, if it is in `netns` or there already, and restore its settings.

    False when it is not found anywhere: a virtual link dies with the namespace that it is in.
    """
    if netns is not None:
        with open_namespace(HOST_NAMESPACE) as handle:
            in_namespace(netns, lambda: _move_if_here(identity, handle, host.name))
    return in_namespace(HOST_NAMESPACE, lambda: _restore_on_host(identity, host))


def attach_child(
    parent: LinkIdentity, child: LinkIdentity, wanted: LinkSettings, netns: Path
) -> AttachedLink:
    """Make a child of `parent` in `netns`, or find it there, and configure it. Raises `OSError`.

    `remove_child` undoes it.
    """
    if not in_namespace(netns, lambda: _is_in_namespace(child)):
        with open_namespace(netns) as handle:
            in_namespace(HOST_NAMESPACE, lambda: _make_child(parent, child, wanted, handle))
    in_namespace(netns, lambda: _mark_child(child))
    return in_namespace(netns, lambda: _configure_in_pod(child, wanted))


def remove_child(child: LinkIdentity, netns: Path) -> None:
    """Delete the child in `netns`, if it is there. Raises `OSError`."""

    def work() -> None:
        with Rtnetlink() as rtnetlink:
            link = find_link(read_links(rtnetlink), child)
            if link is not None:
                rtnetlink.execute(netlink.delete_link(link.index))

    in_namespace(netns, work)


def _make_child(parent: LinkIdentity, child: LinkIdentity, wanted: LinkSettings, handle: int) -> None:
    with Rtnetlink() as rtnetlink:
        above = _require_link(rtnetlink, parent)
        if above.index != child.over:
            raise FileNotFoundError(f"interface {parent.name} was made anew since the claim was prepared")
        rtnetlink.execute(netlink.make_child(above.index, child.kind, child.name, wanted.mac, handle))


def _mark_child(child: LinkIdentity) -> None:
    """Before the rename: its alias then distinguishes it from other pods' links."""
    with Rtnetlink() as rtnetlink:
        link = _require_link(rtnetlink, child)
        if link.alias != child.name:
            rtnetlink.execute(netlink.set_alias(link.index, child.name))


def set_link_address(
    identity: LinkIdentity, wanted: LinkSettings, netns: Path, address: str, seconds: int
) -> tuple[str, ...]:
    """Give the link in `netns` an address for `seconds`, with the routes that depend on it. 0 removes it.

    Returns the addresses that it then has. Raises `OSError`. With its last address an interface loses its
    routes too.
    """

    def work() -> tuple[str, ...]:
        with Rtnetlink() as rtnetlink:
            index = _require_link(rtnetlink, identity).index
            rtnetlink.execute(netlink.address_request(index, address, remove=not seconds, seconds=seconds))
            for message in _when_up(index, wanted) if seconds else ():
                rtnetlink.execute(message)
            return tuple(read_addresses(rtnetlink, index, also_expiring=True))

    return in_namespace(netns, work)


def link_name_in(identity: LinkIdentity, netns: Path) -> str:
    """The link's name in `netns`. Raises `OSError` if it is not there."""

    def find() -> str:
        with Rtnetlink() as rtnetlink:
            return _require_link(rtnetlink, identity).name

    return in_namespace(netns, find)


def _is_in_namespace(identity: LinkIdentity) -> bool:
    with Rtnetlink() as rtnetlink:
        return find_link(read_links(rtnetlink), identity) is not None


def _move_if_here(identity: LinkIdentity, handle: int, name: str) -> bool:
    """Move a link of this thread's namespace to that of `handle`, as `name`. Returns whether it was here."""
    with Rtnetlink() as rtnetlink:
        link = find_link(read_links(rtnetlink), identity)
        if link is None:
            return False
        rtnetlink.execute(netlink.set_link_up(link.index, up=False))
        rtnetlink.execute(netlink.move_link(link.index, handle, name))
        return True


def _configure_in_pod(identity: LinkIdentity, wanted: LinkSettings) -> AttachedLink:
    with Rtnetlink() as rtnetlink:
        _apply(rtnetlink, _require_link(rtnetlink, identity), wanted)
        # A kernel without IPv6, or an interface too small for it, has no files for its settings.
        for name, value in wanted.sysctls.items():
            if value and name not in _IF_THERE and not sysctl_path(name, wanted.name).exists():
                raise FileNotFoundError(errno.ENOENT, f"setting {name} of {wanted.name}: it has no IPv6")
        link = _require_link(rtnetlink, identity)
        addresses = tuple(read_addresses(rtnetlink, link.index))
        learnt = _autoconfigured(rtnetlink, link) if wanted.autoconfigures else ()
        return AttachedLink(
            name=link.name, mac=link.mac, addresses=tuple(dict.fromkeys((*addresses, *learnt)))
        )


def _autoconfigured(rtnetlink: Rtnetlink, link: NetworkLink) -> tuple[str, ...]:
    """Wait for an address from a router's advertisement."""
    until = time.monotonic() + ADVERTISEMENT_SECONDS
    while not (found := read_autoconfigured(rtnetlink, link.index)):
        if time.monotonic() > until:
            reason = f"no router has advertised a prefix on {link.name} within {ADVERTISEMENT_SECONDS} s"
            raise TimeoutError(errno.ETIMEDOUT, reason)
        time.sleep(_ADVERTISEMENT_POLL_SECONDS)
    return found


def _restore_on_host(identity: LinkIdentity, host: LinkSettings) -> bool:
    with Rtnetlink() as rtnetlink:
        link = find_link(read_links(rtnetlink), identity)
        if link is None:
            return False
        _apply(rtnetlink, link, host)
        return True


def _require_link(rtnetlink: Rtnetlink, identity: LinkIdentity) -> NetworkLink:
    link = find_link(read_links(rtnetlink), identity)
    if link is None:
        raise FileNotFoundError(f"interface {identity.name} is not in this namespace any more")
    return link


def _apply(rtnetlink: Rtnetlink, link: NetworkLink, wanted: LinkSettings) -> None:
    """Bring the link from any state to the wanted settings."""
    for step in _steps(rtnetlink, link, wanted):
        step()


def _steps(rtnetlink: Rtnetlink, link: NetworkLink, wanted: LinkSettings) -> Iterator[Callable[[], None]]:
    def request(message: NetlinkRequest) -> Callable[[], None]:
        return lambda: rtnetlink.execute(message)

    index = link.index
    # Down first: the kernel changes names and hardware addresses only then, and setting it down removes the
    # routes, so that none of the host's is left in the pod.
    yield request(netlink.set_link_up(index, up=False))
    if link.name != wanted.name:
        yield request(netlink.rename_link(index, wanted.name))
    if wanted.without_ebpf:
        yield request(netlink.detach_xdp(index))
        yield request(netlink.remove_clsact(index))
        yield lambda: detach_tcx(index)
    # MTU before addresses: below 1280 bytes an interface has no IPv6, and loses the addresses that it has.
    for message in netlink.link_setting_requests(index, _without_unchanged(link, wanted)):
        yield request(message)
    if (vrf := wanted.vrf) is not None:
        yield request(netlink.make_vrf(vrf))
        master = next(found.index for found in read_links(rtnetlink) if found.name == vrf.name)
        yield request(netlink.set_master(index, master))
    for name, value in wanted.sysctls.items():
        yield lambda name=name, value=value: _set_sysctl(name, wanted.name, value)  # type: ignore[misc]
    # Sysctls before addresses: duplicate address detection starts when an address is added.
    for stale in set(read_addresses(rtnetlink, index)) - set(wanted.addresses):
        yield request(netlink.address_request(index, stale, remove=True))
    for cidr in wanted.addresses:
        yield request(netlink.address_request(index, cidr))
    yield lambda: datapath.set_features(wanted.name, wanted.features)
    yield lambda: datapath.set_private_flags(wanted.name, wanted.private_flags)
    if wanted.up:
        yield from map(request, _when_up(index, wanted))


def _without_unchanged(link: NetworkLink, wanted: LinkSettings) -> LinkSettings:
    """Without settings that are so already: IPoIB takes no address, and some drivers reset at any MTU."""
    same_sizes = [name for name in SIZE_NAMES if getattr(wanted.sizes, name) == getattr(link.sizes, name)]
    return msgspec.structs.replace(
        wanted,
        mtu=None if wanted.mtu == link.mtu else wanted.mtu,
        mac=None if wanted.mac == link.mac else wanted.mac,
        sizes=msgspec.structs.replace(wanted.sizes, **dict.fromkeys(same_sizes)),
    )


def _when_up(index: int, wanted: LinkSettings) -> Iterator[NetlinkRequest]:
    yield netlink.set_link_up(index, up=True)
    table = None if wanted.vrf is None else wanted.vrf.routing_table
    yield from netlink.route_requests(index, wanted.routes, table)
    yield from map(netlink.rule_request, wanted.rules)
    for neighbor in wanted.neighbors:
        yield netlink.neighbor_request(index, neighbor)


def _set_sysctl(name: str, link: str, value: int) -> None:
    path = sysctl_path(name, link)
    if path.exists():
        path.write_text(f"{value}\n")
