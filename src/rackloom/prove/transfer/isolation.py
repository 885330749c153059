"""What an end can reach, against what its claim allocated: a pod must see its own NICs and no others.

RDMA character devices decide what a process can open (`/sys/class/infiniband` lists every HCA of the host
where the RDMA subsystem shares them between namespaces); netdevs are those of the own namespace.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from rackloom.errors import Refused
from rackloom.prove.transfer.links import SYS, pci_address

DEV = Path("/dev")
ROUTES = Path("/proc/net/route")
_SHARED = frozenset({"rdma_cm", "by-ibdev", "by-path"})
"""Entries of /dev/infiniband that belong to no HCA."""
_VERBS = {
    "uverbs": "infiniband_verbs",
    "umad": "infiniband_mad",
    "issm": "infiniband_mad",
    "ucm": "infiniband_cm",
}


class Visible(msgspec.Struct, frozen=True):
    """What one end sees."""

    rdma_files: tuple[str, ...] = ()
    """Names in /dev/infiniband."""
    hcas: tuple[str, ...] = ()
    """HCAs that those files open; a file whose HCA cannot be named stands for itself."""
    netdevs: tuple[str, ...] = ()
    """All but `lo`."""


class Allocated(msgspec.Struct, frozen=True):
    """What a claim allocated, by any name: HCA, netdev or PCI address."""

    names: tuple[str, ...]


def look(sys: Path = SYS, dev: Path = DEV) -> Visible:
    """List /dev/infiniband and the netdevs of this namespace."""
    files = _names(dev / "infiniband")
    hcas = dict.fromkeys(_hca_of(sys, name) for name in files if name not in _SHARED)
    netdevs = tuple(name for name in _names(sys / "class/net") if (sys / "class/net" / name).is_dir())
    return Visible(files, tuple(hcas), tuple(name for name in netdevs if name != "lo"))


def strangers(visible: Visible, allocated: Allocated, sys: Path = SYS, routes: Path = ROUTES) -> list[str]:
    """Devices that are seen but were not allocated. The pod network (default route) is nobody's claim."""
    mine = set(allocated.names)
    hcas = [name for name in visible.hcas if not mine & _names_of_hca(sys, name)]
    free = _default_route_devices(routes)
    netdevs = [
        name for name in visible.netdevs if name not in free and not mine & _names_of_netdev(sys, name)
    ]
    return [*hcas, *netdevs]


def absent(visible: Visible, allocated: Allocated, sys: Path = SYS) -> list[str]:
    """Names of the allocation that nothing here answers to."""
    known: set[str] = set()
    for name in visible.hcas:
        known |= _names_of_hca(sys, name)
    for name in visible.netdevs:
        known |= _names_of_netdev(sys, name)
    return [name for name in allocated.names if name not in known]


def require_isolation(allocated: Allocated | None) -> Visible:
    """What this end sees.

    Raises:
        Refused: it sees a device that was not allocated to it, or lacks one that was. None checks nothing.
    """
    visible = look()
    if allocated is None:
        return visible
    if extra := strangers(visible, allocated):
        raise Refused(
            f"this end sees {', '.join(extra)}, which its claim did not allocate",
            nearest_fix=f"give the pod nothing but {', '.join(allocated.names) or 'its network'}",
        )
    if lacking := absent(visible, allocated):
        raise Refused(
            f"this end does not see {', '.join(lacking)}, which its claim allocated",
            nearest_fix="check that the driver prepared the claim for this pod, and that the names are right",
        )
    return visible


def _names_of_hca(sys: Path, name: str) -> set[str]:
    hca = sys / "class/infiniband" / name
    return _with_address(name, hca) | set(_names(hca / "device/net"))


def _names_of_netdev(sys: Path, name: str) -> set[str]:
    device = sys / "class/net" / name
    return _with_address(name, device) | set(_names(device / "device/infiniband"))


def _with_address(name: str, device: Path) -> set[str]:
    address = pci_address(device) if device.exists() else None
    return {name} if address is None else {name, address}


def _hca_of(sys: Path, file: str) -> str:
    kind = file.rstrip("0123456789")
    try:
        return (sys / "class" / _VERBS.get(kind, kind) / file / "ibdev").read_text().strip()
    except OSError:
        return file


def _default_route_devices(routes: Path) -> Iterable[str]:
    """IPv4 routes to 0.0.0.0/0; columns Iface, Destination, ..., Mask in hexadecimal."""
    try:
        rows = [line.split() for line in routes.read_text().splitlines()[1:]]
    except OSError:
        return ()
    return {row[0] for row in rows if len(row) > 7 and row[1] == "00000000" and row[7] == "00000000"}


def _names(directory: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in directory.iterdir())) if directory.is_dir() else ()
