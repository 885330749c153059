"""Network interfaces, RDMA devices and default routes from sysfs and procfs."""

import re

from rackloom.topology.discovery.host import NetDevice, RdmaDevice, RdmaPort
from rackloom.topology.discovery.pci import owner_address
from rackloom.topology.discovery.sysroot import Sysroot

NET, INFINIBAND = "/sys/class/net", "/sys/class/infiniband"
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")
_STATE = re.compile(r"\d+: (\w+)")
_UP = 0x1
"""RTF_UP in /proc/net/route."""
_LOOPBACK = "lo"


def read_netdevs(sysroot: Sysroot) -> tuple[NetDevice, ...]:
    """All interfaces but the loopback."""
    return tuple(_netdev(sysroot, name) for name in sysroot.names(NET) if name != _LOOPBACK)


def read_rdma(sysroot: Sysroot) -> tuple[RdmaDevice, ...]:
    """All RDMA devices."""
    return tuple(_rdma_device(sysroot, name) for name in sysroot.names(INFINIBAND))


def read_uplinks(sysroot: Sysroot) -> frozenset[str]:
    """Interfaces with a default route in the main tables, of either family."""
    return frozenset(_ipv4_uplinks(sysroot.text("/proc/net/route"))) | frozenset(
        _ipv6_uplinks(sysroot.text("/proc/net/ipv6_route"))
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


def _ipv4_uplinks(table: str | None) -> list[str]:
    """Columns: Iface Destination Gateway Flags RefCnt Use Metric Mask ..., numbers in hex."""
    rows = [line.split() for line in (table or "").splitlines()[1:]]
    return [
        row[0]
        for row in rows
        if len(row) >= 8 and row[1] == row[7] == "00000000" and _hex(row[3]) & _UP and row[0] != _LOOPBACK
    ]


def _ipv6_uplinks(table: str | None) -> list[str]:
    """Columns: destination, its length, source, its length, next hop, metric, ..., flags, interface."""
    rows = [line.split() for line in (table or "").splitlines()]
    return [
        row[9]
        for row in rows
        if len(row) == 10 and row[0] == "0" * 32 and row[1] == "00" and row[9] != _LOOPBACK
    ]


def _hex(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return 0
