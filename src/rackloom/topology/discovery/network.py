"""Network interfaces, RDMA devices and routes from sysfs and procfs.

What made an interface stands in sysfs for some kinds only. The others are told by what they alone have; what
remains has no kind here (a dummy, a macvlan), and netlink knows better.
"""

import ipaddress
import re
import struct
from collections.abc import Iterator
from pathlib import PurePosixPath

from rackloom.topology.discovery.host import NetDevice, NetRoute, RdmaDevice, RdmaPort
from rackloom.topology.discovery.pci import owner_address
from rackloom.topology.discovery.sysroot import Sysroot

NET, INFINIBAND = "/sys/class/net", "/sys/class/infiniband"
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")
_STATE = re.compile(r"\d+: (\w+)")
_UP = 0x1
"""RTF_UP in /proc/net/route."""
_LOOPBACK = "lo"
_LOWER = "lower_"
_DECIMAL = re.compile(r"[0-9]{1,10}")
_HEX_BYTE, _HEX_IPV4, _HEX_IPV6, _HEX_FLAGS = (
    re.compile(rf"[0-9A-Fa-f]{{{digits}}}") for digits in ("2", "8", "32", "1,8")
)
_USB = re.compile(r"usb[0-9]{1,4}")
_DEVTYPE = re.compile(r"^DEVTYPE=([a-z0-9_]{1,15})$", re.MULTILINE)
_SIGNS = {"bridge": "bridge", "bond": "bonding", "tun": "tun_flags"}
"""Files and directories that only interfaces of that kind have."""
_HARDWARE_TYPES = {768: "ipip", 769: "ip6tnl", 776: "sit", 778: "gre", 823: "ip6gre"}
"""ARPHRD_* of linux/if_arp.h."""


def read_netdevs(sysroot: Sysroot) -> tuple[NetDevice, ...]:
    """All interfaces but the loopback."""
    return tuple(_netdev(sysroot, name) for name in sysroot.names(NET) if name != _LOOPBACK)


def read_rdma(sysroot: Sysroot) -> tuple[RdmaDevice, ...]:
    """All RDMA devices."""
    return tuple(_rdma_device(sysroot, name) for name in sysroot.names(INFINIBAND))


def read_routes(sysroot: Sysroot) -> tuple[NetRoute, ...]:
    """The routes of the main tables, of either family. Of several next hops, procfs shows the first."""
    return (
        *_ipv4_routes(sysroot.whole("/proc/net/route") or ""),
        *_ipv6_routes(sysroot.whole("/proc/net/ipv6_route") or ""),
    )


def _netdev(sysroot: Sysroot, name: str) -> NetDevice:
    at = f"{NET}/{name}"
    path, device, master = (sysroot.real(one) for one in (at, f"{at}/device", f"{at}/master"))
    speed = sysroot.number(f"{at}/speed")
    return NetDevice(
        name=name,
        pci_address=None if device is None else owner_address(device),
        mac=sysroot.text(f"{at}/address") or None,
        mtu=sysroot.number(f"{at}/mtu"),
        state=sysroot.text(f"{at}/operstate"),
        speed_mbps=speed if speed is not None and speed > 0 else None,
        virtual=path is not None and "virtual" in path.parts[:4],
        master=None if master is None else master.name,
        kind=_kind(sysroot, at, device),
        lower=_lower(sysroot, at),
    )


def _kind(sysroot: Sysroot, at: str, device: PurePosixPath | None) -> str:
    if device is not None:
        return "usb" if any(_USB.fullmatch(part) for part in device.parts) else ""
    stated = _DEVTYPE.search(sysroot.text(f"{at}/uevent") or "")
    if stated is not None:
        return stated[1]
    for kind, sign in _SIGNS.items():
        if sysroot.real(f"{at}/{sign}") is not None:
            return kind
    known = _HARDWARE_TYPES.get(sysroot.number(f"{at}/type") or 0)
    if known is not None:
        return known
    # Only the end of a pair has a partner (`iflink`) that is not below it.
    own, partner = sysroot.number(f"{at}/ifindex"), sysroot.number(f"{at}/iflink")
    return "veth" if own != partner and not _lower(sysroot, at) else ""


def _lower(sysroot: Sysroot, at: str) -> tuple[str, ...]:
    return tuple(
        name.removeprefix(_LOWER) for name in sysroot.names(at) if name.startswith(_LOWER) and name != _LOWER
    )


def _rdma_device(sysroot: Sysroot, name: str) -> RdmaDevice:
    at = f"{INFINIBAND}/{name}"
    device = sysroot.real(f"{at}/device")
    ports = (number for number in sysroot.names(f"{at}/ports") if number.isascii() and number.isdigit())
    return RdmaDevice(
        name=name,
        pci_address=None if device is None else owner_address(device),
        ports=tuple(_port(sysroot, f"{at}/ports/{number}", int(number)) for number in ports),
    )


def _port(sysroot: Sysroot, at: str, number: int) -> RdmaPort:
    state = _STATE.match(sysroot.text(f"{at}/state") or "")
    physical = _STATE.match(sysroot.text(f"{at}/phys_state") or "")
    rate = _RATE.match(sysroot.text(f"{at}/rate") or "")
    return RdmaPort(
        number=number,
        state="unknown" if state is None else state[1].lower(),
        link_layer=sysroot.text(f"{at}/link_layer") or "unknown",
        rate_gbps=None if rate is None else float(rate[1]),
        physical=None if physical is None else physical[1].lower(),
    )


def _ipv4_routes(table: str) -> Iterator[NetRoute]:
    """Columns: Iface Destination Gateway Flags RefCnt Use Metric Mask ..., in the host's byte order."""
    for row in (line.split() for line in table.splitlines()[1:]):
        if len(row) < 8 or row[0] == _LOOPBACK or not _is_up(row[3]) or not _HEX_IPV4.fullmatch(row[1]):
            continue
        length = _ones(row[7])
        if length is not None:
            address = ipaddress.IPv4Address(struct.pack("=I", int(row[1], 16)))
            metric = int(row[6]) if _DECIMAL.fullmatch(row[6]) else 0
            yield NetRoute(f"{address}/{length}", (row[0],), metric)


def _ipv6_routes(table: str) -> Iterator[NetRoute]:
    """Columns: destination, its length, source, its length, next hop, metric, ..., flags, interface."""
    for row in (line.split() for line in table.splitlines()):
        if len(row) != 10 or row[9] == _LOOPBACK or not _is_up(row[8]) or not _HEX_IPV6.fullmatch(row[0]):
            continue
        if _HEX_BYTE.fullmatch(row[1]) and int(row[1], 16) <= 128:
            destination = f"{ipaddress.IPv6Address(bytes.fromhex(row[0]))}/{int(row[1], 16)}"
            yield NetRoute(destination, (row[9],), int(row[5], 16) if _HEX_FLAGS.fullmatch(row[5]) else 0)


def _ones(mask: str) -> int | None:
    """The length of a netmask; None where it is none."""
    if not _HEX_IPV4.fullmatch(mask):
        return None
    (number,) = struct.unpack(">I", struct.pack("=I", int(mask, 16)))
    length = number.bit_count()
    return length if number == (1 << 32) - (1 << (32 - length)) else None


def _is_up(flags: str) -> bool:
    return bool(_HEX_FLAGS.fullmatch(flags)) and bool(int(flags, 16) & _UP)
