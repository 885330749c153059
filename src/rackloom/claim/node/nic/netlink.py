"""rtnetlink on the wire: requests as values, a blocking socket, and network namespaces.

A `NetlinkRequest` says in words what it does, for the error that it may end in, and which errors mean
that nothing has to be done. The functions that build requests are pure; their numbers are those of the
kernel's uapi headers. pyroute2 encodes and decodes.

The socket (`Rtnetlink`) is blocking and belongs to the network namespace of the thread that opens it,
which is why pyroute2's own is not used. Errors are `OSError` with the kernel's own text (extended ACK). A
dump that the kernel marks as interrupted (NLM_F_DUMP_INTR) has holes and is read again. The timeout of 10
s matters only where a driver hangs while it holds the lock that all links share (RTNL).

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
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
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
    """Call `work` in a thread that is in `netns` and ends with it, so that no other work is ever misled.

    Raises `OSError` where the namespace cannot be entered, and what `work` raises.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def enter() -> None:
        try:
            _enter_namespace(netns)
            done.append(work())
        except BaseException as error:
            # Whatever it is, it is the caller's.
            failed.append(error)

    thread = threading.Thread(target=enter, name="netns", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return done[0]


def namespace_id(netns: Path) -> int | None:
    """A number of the namespace that no other living one has; None where there is none."""
    with suppress(OSError):
        return netns.stat().st_ino
    return None


def _enter_namespace(netns: Path) -> None:
    handle = os.open(netns, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(handle, _CLONE_NEWNET):
            code = ctypes.get_errno()
            raise OSError(code, f"cannot enter network namespace {netns}: {os.strerror(code)}")
    finally:
        os.close(handle)


# Requests and the socket.


REQUEST, ACK, REPLACE, EXCLUSIVE, CREATE, DUMP = 0x1, 0x4, 0x100, 0x200, 0x400, 0x300
"""NLM_F_* of a request."""
_ERROR, _DONE = 2, 3
_ACK_TLVS = 0x200
_HEADER = struct.Struct("=LHHLL")
_SOL_NETLINK, _CAP_ACK, _EXT_ACK = 270, 10, 11
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
    """One request. `already` are the errors that say that it is so without it."""

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
    """A socket into the network namespace of the calling thread. Errors are `OSError` and say what failed."""

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

    def tell(self, message: NetlinkRequest) -> None:
        """Have something done."""
        for code, reason in self._answers(message, ACK):
            if code and code not in message.already:
                said = f"{os.strerror(code)}{f' ({reason})' if reason else ''}"
                raise OSError(code, f"{message.doing}: {said}")

    def dump(self, message: NetlinkRequest) -> list[Decoded]:
        """Read all there is of a kind."""
        for _ in range(MOST_DUMPS):
            # Something may change under the kernel's hands (NLM_F_DUMP_INTR): what it told then has holes.
            with suppress(InterruptedError):
                return list(self._dumped(message))
        raise OSError(errno.EAGAIN, f"{message.doing}: it changes all the time")

    def _dumped(self, message: NetlinkRequest) -> Iterator[Decoded]:
        shape = MESSAGE_TYPES[message.shape]
        for kind, flags, part in self._parts(message, DUMP):
            if kind == _DONE:
                return
            if kind == _ERROR:
                code = -struct.unpack_from("=i", part, _HEADER.size)[0]
                raise OSError(code, f"{message.doing}: {os.strerror(code)}")
            if flags & _DUMP_INTERRUPTED:
                raise InterruptedError(errno.EINTR, message.doing)
            found = shape(part)
            found.decode()
            yield found

    def _answers(self, message: NetlinkRequest, flags: int) -> Iterator[tuple[int, str]]:
        for kind, told, part in self._parts(message, flags):
            if kind == _ERROR:
                code = -struct.unpack_from("=i", part, _HEADER.size)[0]
                yield code, _error_text(part) if told & _ACK_TLVS else ""
                return

    def _parts(self, message: NetlinkRequest, flags: int) -> Iterator[tuple[int, int, bytes]]:
        self._sequence += 1
        data = bytearray(message.encode(self._sequence))
        data[6:8] = struct.pack("=H", struct.unpack_from("=H", data, 6)[0] | flags)
        self._socket.send(data)
        while True:
            data = bytearray(self._socket.recv(_RECEIVE))
            at = 0
            while at + _HEADER.size <= len(data):
                length, kind, told, sequence, _ = _HEADER.unpack_from(data, at)
                if sequence == self._sequence:
                    yield kind, told, bytes(data[at : at + length])
                at += (length + 3) & ~3


def _error_text(part: bytes) -> str:
    """The kernel's own words: attribute 1 after the error code and the header that it quotes."""
    at = _HEADER.size + 4 + _HEADER.size
    while at + 4 <= len(part):
        length, kind = struct.unpack_from("=HH", part, at)
        if length < 4:
            break
        if kind & 0x3FFF == 1:
            return part[at + 4 : at + length].rstrip(b"\0").decode(errors="replace")
        at += (length + 3) & ~3
    return ""


# Builders of requests. Pure.


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


def move_link(index: int, netns_fd: int, name: str | None = None) -> NetlinkRequest:
    """Into the namespace of the open handle `netns_fd`; `name` for where the link's own is taken there."""
    attrs: list[tuple[str, Any]] = [("IFLA_NET_NS_FD", netns_fd)]
    if name is not None:
        attrs.append(("IFLA_IFNAME", name))
    return _link_request(index, f"moving interface {index} to another namespace", *attrs)


def rename_link(index: int, name: str) -> NetlinkRequest:
    """Only for a link that is down: older kernels refuse it for others."""
    return _link_request(index, f"naming interface {index} {name}", ("IFLA_IFNAME", name))


def set_link_up(index: int, up: bool) -> NetlinkRequest:
    """Switch a link on or off."""
    fields = {"index": index, "flags": _UP if up else 0, "change": _UP}
    return NetlinkRequest(
        f"setting interface {index} {'up' if up else 'down'}", "link", NEWLINK, fields=fields
    )


def link_setting_requests(index: int, wanted: LinkSettings) -> Iterator[NetlinkRequest]:
    """The link's own settings, which it must have before it is up."""
    if wanted.mtu is not None:
        yield _link_request(
            index, f"setting the MTU of {wanted.name} to {wanted.mtu}", ("IFLA_MTU", wanted.mtu)
        )
    if wanted.mac is not None:
        yield _link_request(
            index, f"giving {wanted.name} the address {wanted.mac}", ("IFLA_ADDRESS", wanted.mac)
        )
    for name in SIZE_NAMES:
        size = getattr(wanted.sizes, name)
        if size is not None:
            yield _link_request(
                index, f"setting {name} of {wanted.name} to {size}", (f"IFLA_{name.upper()}", size)
            )


def address_request(
    index: int, cidr: str, *, remove: bool = False, seconds: int | None = None
) -> NetlinkRequest:
    """An address without duplicate address detection: it was in use on the host a moment ago.

    After `seconds` the kernel itself removes it; None lets it stay.
    """
    one = ipaddress.ip_interface(cidr)
    fields = {"family": _address_family(one.version), "prefixlen": one.network.prefixlen, "index": index}
    attrs: tuple[tuple[str, Any], ...] = (("IFA_ADDRESS", str(one.ip)),)
    if one.version == 4:
        attrs = (("IFA_LOCAL", str(one.ip)), *attrs)
    if remove:
        gone = frozenset({errno.EADDRNOTAVAIL})
        return NetlinkRequest(
            f"removing address {cidr}", "address", DELADDR, fields=fields, attrs=attrs, already=gone
        )
    flags = (_PERMANENT if seconds is None else 0) | (_NO_DAD if one.version == 6 else 0)
    attrs = (*attrs, ("IFA_FLAGS", flags))
    if seconds is not None:
        attrs = (*attrs, ("IFA_CACHEINFO", {"ifa_preferred": seconds, "ifa_valid": seconds}))
    doing = f"adding address {cidr}"
    return NetlinkRequest(
        doing, "address", NEWADDR, CREATE | REPLACE, {**fields, "flags": flags & _BYTE}, attrs
    )


def route_requests(
    index: int, wanted: tuple[RouteConfig, ...], table: int | None = None
) -> Iterator[NetlinkRequest]:
    """Routes in the order in which the kernel takes them: a gateway must be reachable before it is named."""
    for one in sorted(wanted, key=lambda route: route.scope != LINK_SCOPE):
        yield _route_request(index, one, one.table or table or MAIN_TABLE)


def rule_request(rule_config: RuleConfig) -> NetlinkRequest:
    """A policy rule; an equal one is refused by the kernel, and is enough."""
    family = _address_family(
        ipaddress.ip_interface(rule_config.source or rule_config.destination or "0.0.0.0/0").version
    )
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
    fields = {"family": family, "ifindex": index, "state": _PERMANENT}
    attrs = (
        ("NDA_DST", neighbor_config.destination),
        ("NDA_LLADDR", normalize_mac(neighbor_config.hardware_addr)),
    )
    return NetlinkRequest(
        f"adding neighbour {neighbor_config.destination}",
        "neighbor",
        NEWNEIGH,
        CREATE | REPLACE,
        fields,
        attrs,
    )


def make_vrf(vrf: VrfConfig) -> NetlinkRequest:
    """A routing domain with a table of its own, up."""
    data = {"attrs": [["IFLA_VRF_TABLE", vrf.routing_table]]}
    info = {"attrs": [["IFLA_INFO_KIND", "vrf"], ["IFLA_INFO_DATA", data]]}
    return NetlinkRequest(
        f"making VRF {vrf.name}",
        "link",
        NEWLINK,
        CREATE | EXCLUSIVE,
        {"flags": _UP, "change": _UP},
        (("IFLA_IFNAME", vrf.name), ("IFLA_LINKINFO", info)),
        frozenset({errno.EEXIST}),
    )


def set_master(index: int, master: int) -> NetlinkRequest:
    """Put a link below another; 0 takes it out."""
    return _link_request(index, f"putting interface {index} below {master}", ("IFLA_MASTER", master))


def detach_xdp(index: int) -> NetlinkRequest:
    """Detach an XDP program."""
    none = {"attrs": [["IFLA_XDP_FD", -1]]}
    unsupported = frozenset({errno.EOPNOTSUPP})
    message = _link_request(index, f"detaching XDP from interface {index}", ("IFLA_XDP", none))
    return NetlinkRequest(message.doing, "link", NEWLINK, 0, message.fields, message.attrs, unsupported)


def remove_clsact(index: int) -> NetlinkRequest:
    """Remove the queueing discipline on which traffic control programs hang."""
    fields = {"index": index, "parent": 0xFFFFFFF1, "handle": _CLSACT}
    none = frozenset({errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP})
    doing = f"removing traffic control programs from interface {index}"
    return NetlinkRequest(
        doing, "traffic", DELQDISC, fields=fields, attrs=(("TCA_KIND", "clsact"),), already=none
    )


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
        "type": _UNICAST,
    }
    attrs: list[tuple[str, Any]] = [("RTA_TABLE", table), ("RTA_OIF", index)]
    if network.prefixlen:
        attrs.append(("RTA_DST", str(network.network_address)))
    if route_config.gateway is not None:
        attrs.append(("RTA_GATEWAY", route_config.gateway))
    if route_config.source is not None:
        attrs.append(("RTA_PREFSRC", route_config.source))
    return NetlinkRequest(
        f"adding the route to {route_config.destination}",
        "route",
        NEWROUTE,
        CREATE | REPLACE,
        fields,
        tuple(attrs),
    )


def _address_family(version: int) -> int:
    return INET if version == 4 else INET6


def _in_a_byte(table: int) -> int:
    """A table that the header has no room for stands in an attribute alone."""
    return table if table <= _BYTE else 0
