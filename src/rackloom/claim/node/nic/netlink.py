"""rtnetlink on the wire: requests as values, a blocking socket, and network namespaces.

A `NetlinkRequest` describes its action in words, for its error message, and names the errors that mean
that nothing has to be done. The functions that build requests are pure. Their numbers are those of the
kernel's uapi headers. pyroute2 encodes and decodes.

The socket (`Rtnetlink`) is blocking and belongs to the network namespace of the thread that opens it,
which is why pyroute2's own is not used. Errors are `OSError` with the kernel's own text (extended ACK). A
dump that the kernel marks as interrupted (NLM_F_DUMP_INTR) has holes. It is read to its end, and then again.
The timeout of 10 s matters only if a driver hangs while it holds the lock that all links share (RTNL).

`in_namespace` calls a function in a new thread that enters the namespace with setns and ends with the
call, so that no other work runs in the wrong namespace.

Two additions to pyroute2: hardware addresses of any length (InfiniBand has 20 bytes), and attributes of
Linux 6.3.
"""

import ctypes
import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from pyroute2.netlink import nla_base_string  # type: ignore[import-untyped]
from pyroute2.netlink.rtnl.fibmsg import fibmsg  # type: ignore[import-untyped]
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg  # type: ignore[import-untyped]
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg  # type: ignore[import-untyped]
from pyroute2.netlink.rtnl.ndmsg import ndmsg  # type: ignore[import-untyped]
from pyroute2.netlink.rtnl.rtmsg import rtmsg  # type: ignore[import-untyped]
from pyroute2.netlink.rtnl.tcmsg import tcmsg  # type: ignore[import-untyped]

from rackloom.core.domains.network_config import (
    LINK_SCOPE,
    MAIN_TABLE,
    NeighborConfig,
    RouteConfig,
    RuleConfig,
    VrfConfig,
)
from rackloom.core.nics.attachment import SIZE_NAMES, LinkSettings, normalize_mac

# Network namespaces.


T = TypeVar("T")

HOST_NAMESPACE = Path("/proc/self/ns/net")
"""The namespace of this process, which is the host's: the plugin runs with hostNetwork."""
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def in_namespace(netns: Path, work: Callable[[], T]) -> T:
    """Call `work` in a new thread that enters `netns` and ends with the call.

    A thread that came back to a pool would run other work in the wrong namespace.

    Raises `OSError` if the namespace cannot be entered, and the errors of `work`.
    """

    def enter_and_work() -> T:
        with open_namespace(netns) as handle:
            if _libc.setns(handle, _CLONE_NEWNET):
                code = ctypes.get_errno()
                raise OSError(code, f"cannot enter network namespace {netns}: {os.strerror(code)}")
        return work()

    with ThreadPoolExecutor(1, "netns") as thread:
        return thread.submit(enter_and_work).result()


def namespace_id(netns: Path) -> int | None:
    """The inode of the namespace, unique among living ones, or None if there is no such namespace."""
    with suppress(OSError):
        return netns.stat().st_ino
    return None


@contextmanager
def open_namespace(netns: Path) -> Iterator[int]:
    """A handle of a namespace, by which the kernel moves devices into it."""
    handle = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield handle
    finally:
        os.close(handle)


# Requests and the socket.


REQUEST, ACK, REPLACE, EXCLUSIVE, CREATE, DUMP = 0x1, 0x4, 0x100, 0x200, 0x400, 0x300
"""NLM_F_* of a request."""
ERROR, DONE = 2, 3
"""NLMSG_* types of the last message of an answer."""
_ACK_TLVS = 0x200
HEADER = struct.Struct("=LHHLL")
"""Of a message: length, type, flags, sequence number, port."""
_SOL_NETLINK, _CAP_ACK, _EXT_ACK = 270, 10, 11
"""With CAP_ACK an error quotes only the header of its request, with EXT_ACK it has attributes after that."""
_RECEIVE = 1 << 18
_DUMP_INTERRUPTED = 0x10
MOST_DUMPS = 20
NETLINK_TIMEOUT_SECONDS = 10.0
"""The kernel answers at once, unless a driver hangs while it holds the lock that all links share."""

Decoded = Any


class _HardwareAddress(nla_base_string):  # type: ignore[misc]
    """An address of any length: the library's own type has no room for the 20 bytes of InfiniBand."""

    def encode(self) -> None:
        self["value"] = bytes.fromhex(self.value.replace(":", ""))
        super().encode()

    def decode(self) -> None:
        super().decode()
        self.value = self["value"].hex(":")


_OF_ANY_LENGTH = frozenset({"IFLA_ADDRESS", "IFLA_BROADCAST", "IFLA_PERM_ADDRESS", "NDA_LLADDR"})


def _with_hardware_addresses(known: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    return tuple((name, "hardware" if name in _OF_ANY_LENGTH else kind) for name, kind in known)


class NeighborMessage(ndmsg):  # type: ignore[misc]
    """A neighbour on any medium."""

    hardware = _HardwareAddress
    nla_map = _with_hardware_addresses(ndmsg.nla_map)


class LinkMessage(ifinfmsg):  # type: ignore[misc]
    """A link, with the attributes (Linux 6.3) that the library does not know yet."""

    hardware = _HardwareAddress
    nla_map = (
        *_with_hardware_addresses(ifinfmsg.nla_map),
        ("IFLA_DEVLINK_PORT", "hex"),
        ("IFLA_GSO_IPV4_MAX_SIZE", "uint32"),
        ("IFLA_GRO_IPV4_MAX_SIZE", "uint32"),
    )


MESSAGE_TYPES: Mapping[str, Any] = {
    "link": LinkMessage,
    "address": ifaddrmsg,
    "route": rtmsg,
    "rule": fibmsg,
    "neighbor": NeighborMessage,
    "traffic": tcmsg,
}

for _message in (NeighborMessage, LinkMessage):
    # The library keeps the compiled table on the class: a subclass inherits its base's, once that is used.
    _message().compile_nla_table()


@dataclass(frozen=True, slots=True)
class NetlinkRequest:
    """One request. `already` are the errors that mean that nothing has to be done."""

    doing: str
    """In words, for the error that it may end in."""
    shape: str
    type: int
    flags: int = 0
    fields: Mapping[str, Any] = field(default_factory=dict)
    attrs: tuple[tuple[str, Any], ...] = ()
    already: frozenset[int] = frozenset()

    def encode(self, sequence: int = 0) -> bytes:
        """The bytes that are sent."""
        body = MESSAGE_TYPES[self.shape]()
        body["header"]["type"] = self.type
        body["header"]["flags"] = REQUEST | self.flags
        body["header"]["sequence_number"] = sequence
        for name, value in self.fields.items():
            body[name] = value
        body["attrs"] = [[name, value] for name, value in self.attrs]
        body.encode()
        return bytes(body.data)


class Rtnetlink:
    """A socket into the network namespace of the calling thread. Errors are `OSError` and name the action."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(_SOL_NETLINK, _CAP_ACK, 1)
        self._socket.setsockopt(_SOL_NETLINK, _EXT_ACK, 1)
        self._socket.settimeout(NETLINK_TIMEOUT_SECONDS)
        self._socket.bind((0, 0))
        self._sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def execute(self, request: NetlinkRequest) -> None:
        """Send a request, and wait until the kernel acknowledges it."""
        for kind, flags, message in self._exchange(request, ACK):
            if kind == ERROR:
                code = error_code(message)
                if code and code not in request.already:
                    reason = _error_text(message) if flags & _ACK_TLVS else ""
                    detail = f"{os.strerror(code)}{f' ({reason})' if reason else ''}"
                    raise OSError(code, f"{request.doing}: {detail}")
                return

    def dump(self, request: NetlinkRequest) -> list[Decoded]:
        """Read all objects of a kind."""
        for _ in range(MOST_DUMPS):
            # NLM_F_DUMP_INTR: the objects changed while the kernel listed them, so the list has holes.
            with suppress(InterruptedError):
                return list(self._dumped(request))
        raise OSError(errno.EAGAIN, f"{request.doing}: it changes all the time")

    def _dumped(self, request: NetlinkRequest) -> Iterator[Decoded]:
        shape, is_interrupted = MESSAGE_TYPES[request.shape], False
        for kind, flags, message in self._exchange(request, DUMP):
            is_interrupted |= bool(flags & _DUMP_INTERRUPTED)
            if kind == DONE and is_interrupted:
                # Not before: the kernel begins no dump on a socket on which another has not ended (EBUSY).
                raise InterruptedError(errno.EINTR, request.doing)
            if kind == DONE:
                return
            if kind == ERROR:
                code = error_code(message)
                raise OSError(code, f"{request.doing}: {os.strerror(code)}")
            decoded = shape(message)
            decoded.decode()
            yield decoded

    def _exchange(self, request: NetlinkRequest, flags: int) -> Iterator[tuple[int, int, bytes]]:
        """Type, flags and bytes of each message that answers the request."""
        self._sequence += 1
        data = bytearray(request.encode(self._sequence))
        # nlmsg_flags: behind the length (4 bytes) and the type (2) of struct nlmsghdr.
        data[6:8] = struct.pack("=H", struct.unpack_from("=H", data, 6)[0] | flags)
        self._socket.send(data)
        while True:
            for message in split_messages(self._socket.recv(_RECEIVE)):
                _, kind, its_flags, sequence, _ = HEADER.unpack_from(message)
                if sequence == self._sequence:
                    yield kind, its_flags, message


def split_messages(data: bytes) -> Iterator[bytes]:
    """The messages of one datagram, with their headers (linux/netlink.h)."""
    at = 0
    while at + HEADER.size <= len(data):
        length = HEADER.unpack_from(data, at)[0]
        if length < HEADER.size:
            return
        yield data[at : at + length]
        at += (length + 3) & ~3


def split_attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and value of each attribute. The two highest bits of a type are flags."""
    at = 0
    while at + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, at)
        if length < 4:
            return
        yield kind & 0x3FFF, data[at + 4 : at + length]
        at += (length + 3) & ~3


def error_code(message: bytes) -> int:
    """The errno of an error message. 0 acknowledges the request."""
    return int(-struct.unpack_from("=i", message, HEADER.size)[0])


def _error_text(message: bytes) -> str:
    """The kernel's own text: attribute 1 after the error code and the header that it quotes."""
    attributes = dict(split_attributes(message[HEADER.size + 4 + HEADER.size :]))
    return attributes.get(1, b"").rstrip(b"\0").decode(errors="replace")


# Builders of requests. Pure.


NEWLINK, DELLINK, GETLINK, NEWADDR, DELADDR, GETADDR = 16, 17, 18, 20, 21, 22
NEWROUTE, GETROUTE, NEWNEIGH, GETNEIGH, NEWRULE, GETRULE = 24, 26, 28, 30, 32, 34
DELQDISC, GETTFILTER = 37, 46
INET, INET6 = 2, 10
UP = 1
"""IFF_UP."""
UNICAST, _STATIC, _TO_TABLE = 1, 4, 1
"""RTN_UNICAST, RTPROT_STATIC and FR_ACT_TO_TBL."""
PERMANENT = 0x80
"""IFA_F_PERMANENT of addresses, and NUD_PERMANENT of neighbours."""
_NO_DAD = 0x02
"""IFA_F_NODAD."""
_CLSACT_PARENT, _CLSACT = 0xFFFFFFF1, 0xFFFF0000
"""TC_H_CLSACT, and the handle that the kernel gives this queueing discipline."""
_BYTE = 255


def move_link(index: int, netns_fd: int, name: str | None = None) -> NetlinkRequest:
    """Into the namespace of the open handle `netns_fd`, as `name` if the link's own name is taken there."""
    renamed = () if name is None else (("IFLA_IFNAME", name),)
    doing = f"moving interface {index} to another namespace"
    return _link_request(index, doing, ("IFLA_NET_NS_FD", netns_fd), *renamed)


_CHILD_MODES: Mapping[str, tuple[str, int]] = {
    "ipvlan": ("IFLA_IPVLAN_MODE", 0),
    "macvlan": ("IFLA_MACVLAN_MODE", 4),
}
"""IPVLAN_MODE_L2 and MACVLAN_MODE_BRIDGE (linux/if_link.h): children of one parent reach each other."""


def make_child(parent: int, kind: str, name: str, mac: str | None, netns_fd: int) -> NetlinkRequest:
    """A child of a link of this namespace, in the namespace of the open handle `netns_fd`."""
    info = {"attrs": [["IFLA_INFO_KIND", kind], ["IFLA_INFO_DATA", {"attrs": [list(_CHILD_MODES[kind])]}]]}
    address = () if mac is None else (("IFLA_ADDRESS", mac),)
    where = (("IFLA_LINK", parent), ("IFLA_IFNAME", name), ("IFLA_NET_NS_FD", netns_fd))
    doing, attrs = f"making {kind} {name} on interface {parent}", (*where, *address, ("IFLA_LINKINFO", info))
    return NetlinkRequest(doing, "link", NEWLINK, CREATE | EXCLUSIVE, {}, attrs)


def set_alias(index: int, alias: str) -> NetlinkRequest:
    """The text that `ip link` shows as `alias`."""
    return _link_request(index, f"giving interface {index} the alias {alias}", ("IFLA_IFALIAS", alias))


def delete_link(index: int) -> NetlinkRequest:
    """For a virtual link."""
    return NetlinkRequest(f"deleting interface {index}", "link", DELLINK, fields={"index": index})


def rename_link(index: int, name: str) -> NetlinkRequest:
    """Only for a link that is down: older kernels refuse it for others."""
    return _link_request(index, f"naming interface {index} {name}", ("IFLA_IFNAME", name))


def set_link_up(index: int, up: bool) -> NetlinkRequest:
    """Switch a link on or off."""
    doing = f"setting interface {index} {'up' if up else 'down'}"
    fields = {"index": index, "flags": UP if up else 0, "change": UP}
    return NetlinkRequest(doing, "link", NEWLINK, fields=fields)


def link_setting_requests(index: int, wanted: LinkSettings) -> Iterator[NetlinkRequest]:
    """The link's own settings, which it must have before it is up."""
    settings = [
        (f"setting the MTU of {wanted.name} to {wanted.mtu}", "IFLA_MTU", wanted.mtu),
        (f"giving {wanted.name} the address {wanted.mac}", "IFLA_ADDRESS", wanted.mac),
    ]
    for name in SIZE_NAMES:
        size = getattr(wanted.sizes, name)
        settings.append((f"setting {name} of {wanted.name} to {size}", f"IFLA_{name.upper()}", size))
    for doing, attribute, value in settings:
        if value is not None:
            yield _link_request(index, doing, (attribute, value))


def address_request(
    index: int, cidr: str, *, remove: bool = False, seconds: int | None = None
) -> NetlinkRequest:
    """An address without duplicate address detection: it was in use on the host a moment ago.

    The kernel removes it after `seconds`, or never if `seconds` is None.
    """
    address = ipaddress.ip_interface(cidr)
    family = _address_family(address.version)
    fields = {"family": family, "prefixlen": address.network.prefixlen, "index": index}
    attrs: tuple[tuple[str, Any], ...] = (("IFA_ADDRESS", str(address.ip)),)
    if address.version == 4:
        attrs = (("IFA_LOCAL", str(address.ip)), *attrs)
    if remove:
        gone = frozenset({errno.EADDRNOTAVAIL})
        return NetlinkRequest(f"removing address {cidr}", "address", DELADDR, 0, fields, attrs, gone)
    flags = (PERMANENT if seconds is None else 0) | (_NO_DAD if address.version == 6 else 0)
    attrs = (*attrs, ("IFA_FLAGS", flags))
    if seconds is not None:
        attrs = (*attrs, ("IFA_CACHEINFO", {"ifa_preferred": seconds, "ifa_valid": seconds}))
    fields["flags"] = flags & _BYTE
    return NetlinkRequest(f"adding address {cidr}", "address", NEWADDR, CREATE | REPLACE, fields, attrs)


def route_requests(
    index: int, wanted: tuple[RouteConfig, ...], table: int | None = None
) -> Iterator[NetlinkRequest]:
    """Routes in the order in which the kernel takes them: a gateway must be reachable before it is named."""
    for route in sorted(wanted, key=lambda route: route.scope != LINK_SCOPE):
        yield _route_request(index, route, route.table or table or MAIN_TABLE)


def rule_request(rule_config: RuleConfig) -> NetlinkRequest:
    """A policy rule. The kernel refuses an equal rule, and then no other is needed."""
    selector = ipaddress.ip_interface(rule_config.source or rule_config.destination or "0.0.0.0/0")
    family = _address_family(selector.version)
    table = rule_config.table or MAIN_TABLE
    fields: dict[str, Any] = {"family": family, "action": _TO_TABLE, "table": _in_a_byte(table)}
    attrs: list[tuple[str, Any]] = [("FRA_TABLE", table)]
    if rule_config.priority:
        attrs.append(("FRA_PRIORITY", rule_config.priority))
    for name, length, text in (
        ("FRA_SRC", "src_len", rule_config.source),
        ("FRA_DST", "dst_len", rule_config.destination),
    ):
        if text is not None:
            network = ipaddress.ip_interface(text).network
            fields[length] = network.prefixlen
            attrs.append((name, str(network.network_address)))
    doing = f"adding a rule for table {table}"
    exists = frozenset({errno.EEXIST})
    return NetlinkRequest(doing, "rule", NEWRULE, CREATE | EXCLUSIVE, fields, tuple(attrs), exists)


def neighbor_request(index: int, neighbor_config: NeighborConfig) -> NetlinkRequest:
    """A permanent neighbour."""
    family = _address_family(ipaddress.ip_address(neighbor_config.destination).version)
    fields = {"family": family, "ifindex": index, "state": PERMANENT}
    attrs = (
        ("NDA_DST", neighbor_config.destination),
        ("NDA_LLADDR", normalize_mac(neighbor_config.hardware_addr)),
    )
    doing = f"adding neighbour {neighbor_config.destination}"
    return NetlinkRequest(doing, "neighbor", NEWNEIGH, CREATE | REPLACE, fields, attrs)


def make_vrf(vrf: VrfConfig) -> NetlinkRequest:
    """A routing domain with its own table, up."""
    data = {"attrs": [["IFLA_VRF_TABLE", vrf.routing_table]]}
    info = {"attrs": [["IFLA_INFO_KIND", "vrf"], ["IFLA_INFO_DATA", data]]}
    doing, fields = f"making VRF {vrf.name}", {"flags": UP, "change": UP}
    attrs = (("IFLA_IFNAME", vrf.name), ("IFLA_LINKINFO", info))
    exists = frozenset({errno.EEXIST})
    return NetlinkRequest(doing, "link", NEWLINK, CREATE | EXCLUSIVE, fields, attrs, exists)


def set_master(index: int, master: int) -> NetlinkRequest:
    """Put a link below another. 0 takes it out."""
    return _link_request(index, f"putting interface {index} below {master}", ("IFLA_MASTER", master))


def detach_xdp(index: int) -> NetlinkRequest:
    """Detach an XDP program."""
    none = {"attrs": [["IFLA_XDP_FD", -1]]}
    unsupported = frozenset({errno.EOPNOTSUPP})
    request = _link_request(index, f"detaching XDP from interface {index}", ("IFLA_XDP", none))
    return replace(request, already=unsupported)


def remove_clsact(index: int) -> NetlinkRequest:
    """Remove the queueing discipline on which traffic control programs hang."""
    fields = {"index": index, "parent": _CLSACT_PARENT, "handle": _CLSACT}
    none = frozenset({errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP})
    doing = f"removing traffic control programs from interface {index}"
    return NetlinkRequest(doing, "traffic", DELQDISC, 0, fields, (("TCA_KIND", "clsact"),), none)


def _link_request(index: int, doing: str, *attrs: tuple[str, Any]) -> NetlinkRequest:
    return NetlinkRequest(doing, "link", NEWLINK, fields={"index": index}, attrs=attrs)


def _route_request(index: int, route_config: RouteConfig, table: int) -> NetlinkRequest:
    network = ipaddress.ip_interface(route_config.destination).network
    fields = {
        "family": _address_family(network.version),
        "dst_len": network.prefixlen,
        "table": _in_a_byte(table),
        "proto": _STATIC,
        "scope": route_config.scope,
        "type": UNICAST,
    }
    attrs: list[tuple[str, Any]] = [("RTA_TABLE", table), ("RTA_OIF", index)]
    if network.prefixlen:
        attrs.append(("RTA_DST", str(network.network_address)))
    if route_config.gateway is not None:
        attrs.append(("RTA_GATEWAY", route_config.gateway))
    if route_config.source is not None:
        attrs.append(("RTA_PREFSRC", route_config.source))
    doing = f"adding the route to {route_config.destination}"
    return NetlinkRequest(doing, "route", NEWROUTE, CREATE | REPLACE, fields, tuple(attrs))


def _address_family(version: int) -> int:
    return INET if version == 4 else INET6


def _in_a_byte(table: int) -> int:
    """A table number over 255 does not fit into the header: it is in an attribute only."""
    return table if table <= _BYTE else 0
