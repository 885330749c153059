"""The rtnetlink requests that bring an interface into a state. Pure: numbers of the kernel's uapi headers."""

import errno
import ipaddress
from collections.abc import Iterator
from typing import Any

from rackloom.claim.node.nic.netlink import CREATE, EXCLUSIVE, REPLACE, Message
from rackloom.claim.node.nic.settings import SIZES, LinkSettings, normal_mac
from rackloom.claim.opaque.network import LINK, Neighbor, Route, Rule, Vrf
from rackloom.claim.opaque.network_rules import MAIN_TABLE

NEWLINK, GETLINK, NEWADDR, DELADDR, GETADDR = 16, 18, 20, 21, 22
DELLINK = 17
NEWROUTE, GETROUTE, NEWNEIGH, GETNEIGH, NEWRULE, GETRULE = 24, 26, 28, 30, 32, 34
DELQDISC, GETTFILTER = 37, 46
INET, INET6 = 2, 10
_UP = 1
_UNICAST, _STATIC, _TO_TABLE = 1, 4, 1
_PERMANENT = 0x80
_NO_DAD = 0x02
_CLSACT = 0xFFFF0000
_BYTE = 255


def move(index: int, netns_fd: int, name: str | None = None) -> Message:
    """Into the namespace of the open handle `netns_fd`; `name` for where the link's own is taken there."""
    attrs: list[tuple[str, Any]] = [("IFLA_NET_NS_FD", netns_fd)]
    if name is not None:
        attrs.append(("IFLA_IFNAME", name))
    return _link(index, f"moving interface {index} to another namespace", *attrs)


def rename(index: int, name: str) -> Message:
    """Only for a link that is down: older kernels refuse it for others."""
    return _link(index, f"naming interface {index} {name}", ("IFLA_IFNAME", name))


def set_up(index: int, up: bool) -> Message:
    """Switch a link on or off."""
    fields = {"index": index, "flags": _UP if up else 0, "change": _UP}
    return Message(f"setting interface {index} {'up' if up else 'down'}", "link", NEWLINK, fields=fields)


def of_link(index: int, wanted: LinkSettings) -> Iterator[Message]:
    """The link's own settings, which it must have before it is up."""
    if wanted.mtu is not None:
        yield _link(index, f"setting the MTU of {wanted.name} to {wanted.mtu}", ("IFLA_MTU", wanted.mtu))
    if wanted.mac is not None:
        yield _link(index, f"giving {wanted.name} the address {wanted.mac}", ("IFLA_ADDRESS", wanted.mac))
    for name in SIZES:
        size = getattr(wanted.sizes, name)
        if size is not None:
            yield _link(index, f"setting {name} of {wanted.name} to {size}", (f"IFLA_{name.upper()}", size))


def address(index: int, cidr: str, *, remove: bool = False, seconds: int | None = None) -> Message:
    """An address without duplicate address detection: it was in use on the host a moment ago.

    After `seconds` the kernel itself removes it; None lets it stay.
    """
    one = ipaddress.ip_interface(cidr)
    fields = {"family": _family(one.version), "prefixlen": one.network.prefixlen, "index": index}
    attrs: tuple[tuple[str, Any], ...] = (("IFA_ADDRESS", str(one.ip)),)
    if one.version == 4:
        attrs = (("IFA_LOCAL", str(one.ip)), *attrs)
    if remove:
        gone = frozenset({errno.EADDRNOTAVAIL})
        return Message(
            f"removing address {cidr}", "address", DELADDR, fields=fields, attrs=attrs, already=gone
        )
    flags = (_PERMANENT if seconds is None else 0) | (_NO_DAD if one.version == 6 else 0)
    attrs = (*attrs, ("IFA_FLAGS", flags))
    if seconds is not None:
        attrs = (*attrs, ("IFA_CACHEINFO", {"ifa_preferred": seconds, "ifa_valid": seconds}))
    doing = f"adding address {cidr}"
    return Message(doing, "address", NEWADDR, CREATE | REPLACE, {**fields, "flags": flags & _BYTE}, attrs)


def routes(index: int, wanted: tuple[Route, ...], table: int | None = None) -> Iterator[Message]:
    """Routes in the order in which the kernel takes them: a gateway must be reachable before it is named."""
    for one in sorted(wanted, key=lambda route: route.scope != LINK):
        yield _route(index, one, one.table or table or MAIN_TABLE)


def rule(one: Rule) -> Message:
    """A policy rule; an equal one is refused by the kernel, and is enough."""
    family = _family(ipaddress.ip_interface(one.source or one.destination or "0.0.0.0/0").version)
    table = one.table or MAIN_TABLE
    fields: dict[str, Any] = {"family": family, "action": _TO_TABLE, "table": _in_a_byte(table)}
    attrs: list[tuple[str, Any]] = [("FRA_TABLE", table)]
    if one.priority:
        attrs.append(("FRA_PRIORITY", one.priority))
    for name, length, text in (("FRA_SRC", "src_len", one.source), ("FRA_DST", "dst_len", one.destination)):
        if text is not None:
            network = ipaddress.ip_interface(text).network
            fields[length] = network.prefixlen
            attrs.append((name, str(network.network_address)))
    doing = f"adding a rule for table {table}"
    exists = frozenset({errno.EEXIST})
    return Message(doing, "rule", NEWRULE, CREATE | EXCLUSIVE, fields, tuple(attrs), exists)


def neighbor(index: int, one: Neighbor) -> Message:
    """A permanent neighbour."""
    family = _family(ipaddress.ip_address(one.destination).version)
    fields = {"family": family, "ifindex": index, "state": _PERMANENT}
    attrs = (("NDA_DST", one.destination), ("NDA_LLADDR", normal_mac(one.hardware_addr)))
    return Message(
        f"adding neighbour {one.destination}", "neighbor", NEWNEIGH, CREATE | REPLACE, fields, attrs
    )


def make_vrf(vrf: Vrf) -> Message:
    """A routing domain with a table of its own, up."""
    data = {"attrs": [["IFLA_VRF_TABLE", vrf.routing_table]]}
    info = {"attrs": [["IFLA_INFO_KIND", "vrf"], ["IFLA_INFO_DATA", data]]}
    return Message(
        f"making VRF {vrf.name}",
        "link",
        NEWLINK,
        CREATE | EXCLUSIVE,
        {"flags": _UP, "change": _UP},
        (("IFLA_IFNAME", vrf.name), ("IFLA_LINKINFO", info)),
        frozenset({errno.EEXIST}),
    )


def enslave(index: int, master: int) -> Message:
    """Put a link below another; 0 takes it out."""
    return _link(index, f"putting interface {index} below {master}", ("IFLA_MASTER", master))


def without_xdp(index: int) -> Message:
    """Detach an XDP program."""
    none = {"attrs": [["IFLA_XDP_FD", -1]]}
    unsupported = frozenset({errno.EOPNOTSUPP})
    message = _link(index, f"detaching XDP from interface {index}", ("IFLA_XDP", none))
    return Message(message.doing, "link", NEWLINK, 0, message.fields, message.attrs, unsupported)


def without_clsact(index: int) -> Message:
    """Remove the queueing discipline on which traffic control programs hang."""
    fields = {"index": index, "parent": 0xFFFFFFF1, "handle": _CLSACT}
    none = frozenset({errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP})
    doing = f"removing traffic control programs from interface {index}"
    return Message(doing, "traffic", DELQDISC, fields=fields, attrs=(("TCA_KIND", "clsact"),), already=none)


def _link(index: int, doing: str, *attrs: tuple[str, Any]) -> Message:
    return Message(doing, "link", NEWLINK, fields={"index": index}, attrs=attrs)


def _route(index: int, one: Route, table: int) -> Message:
    network = ipaddress.ip_interface(one.destination).network
    fields = {
        "family": _family(network.version),
        "dst_len": network.prefixlen,
        "table": _in_a_byte(table),
        "proto": _STATIC,
        "scope": one.scope,
        "type": _UNICAST,
    }
    attrs: list[tuple[str, Any]] = [("RTA_TABLE", table), ("RTA_OIF", index)]
    if network.prefixlen:
        attrs.append(("RTA_DST", str(network.network_address)))
    if one.gateway is not None:
        attrs.append(("RTA_GATEWAY", one.gateway))
    if one.source is not None:
        attrs.append(("RTA_PREFSRC", one.source))
    return Message(
        f"adding the route to {one.destination}", "route", NEWROUTE, CREATE | REPLACE, fields, tuple(attrs)
    )


def _family(version: int) -> int:
    return INET if version == 4 else INET6


def _in_a_byte(table: int) -> int:
    """A table that the header has no room for stands in an attribute alone."""
    return table if table <= _BYTE else 0
