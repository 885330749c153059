"""Network devices that one end sees: links, byte counters, and whether its claim allocated exactly these.

`read_links` describes every netdev and every port of an RDMA device from sysfs: state, rate, MTU, NUMA
node, PCI address, current and best PCIe link. None stands for values that the kernel does not report. The
speed of a virtual device is left out, because the kernel prints one that means nothing.

`read_counters` reads the bytes that each device moved. /sys/class/net/<device>/statistics counts bytes
with headers in the network namespace of the reader.
/sys/class/infiniband/<hca>/ports/<n>/counters/port_xmit_data counts 4-byte words.

`require_isolation` refuses to measure if a pod sees a device that was not allocated, or lacks one that
was. The character devices in /dev/infiniband decide which HCAs a process can open: /sys/class/infiniband
lists every HCA of the host if the RDMA subsystem shares them between namespaces. Netdevs are those of
the process's network namespace. The device of the default route is the pod network and belongs to no
claim. A device may be named as HCA, netdev or PCI address.

`read_allocation` reads the allocated NICs from ResourceClaim objects, as `kubectl get resourceclaims -o
yaml` prints them.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from re import fullmatch
from typing import Any

import msgspec

from rackloom.core.transfer.proof import DeviceCounters, DeviceKind
from rackloom.core.transfer.values import AllocatedDevices, Link, VisibleDevices
from rackloom.errors import Refused, Undecodable, file_error_text
from rackloom.runtime.foreign_text import decode_yaml
from rackloom.topology.discovery.sysfs import owning_pci_address

# Links.


SYSFS_ROOT = Path("/sys")


def pci_address_of(device: Path) -> str | None:
    """Address of the PCI function behind a class device."""
    return owning_pci_address(PurePosixPath(device.resolve()))


def read_links(sys: Path = SYSFS_ROOT) -> tuple[Link, ...]:
    """All netdevs but `lo`, then all RDMA ports. Those that cannot be read are left out."""
    return (*_netdevs(sys / "class/net"), *_rdma_ports(sys / "class/infiniband"))


def sysfs_entries(directory: Path) -> list[Path]:
    """The entries of a directory of sysfs, by name, or none if there is no such directory."""
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _netdevs(directory: Path) -> Iterator[Link]:
    for device in sysfs_entries(directory):
        if device.name == "lo" or not device.is_dir():  # bonding_masters is a file
            continue
        virtual = "virtual" in device.resolve().parts
        speed = None if virtual else _sysfs_number(device / "speed")
        link = Link(
            name=device.name,
            kind="netdev",
            state=_sysfs_text(device / "operstate"),
            mtu=_sysfs_number(device / "mtu"),
            gigabits=None if speed is None or speed <= 0 else speed / 1000,
        )
        yield _with_pci_facts(link, device)


def _rdma_ports(directory: Path) -> Iterator[Link]:
    for hca in sysfs_entries(directory):
        for port in sysfs_entries(hca / "ports"):
            rate = (_sysfs_text(port / "rate") or "").split(" ", 1)[0]
            link = Link(
                name=f"{hca.name}:{port.name}",
                kind="rdma",
                state=(_sysfs_text(port / "state") or "").partition(": ")[2] or None,
                gigabits=float(rate) if fullmatch(r"\d+(\.\d+)?", rate) else None,
            )
            yield _with_pci_facts(link, hca)


def _with_pci_facts(link: Link, device: Path) -> Link:
    """The link with the facts of its PCI function. Virtual devices have none."""
    function = device / "device"
    node = _sysfs_number(function / "numa_node")
    return msgspec.structs.replace(
        link,
        numa_node=None if node is None or node < 0 else node,
        pci_address=pci_address_of(device),
        pcie=_pcie(function, "current"),
        pcie_best=_pcie(function, "max"),
    )


def _pcie(function: Path, which: str) -> str | None:
    speed, width = (_sysfs_text(function / f"{which}_link_{part}") for part in ("speed", "width"))
    return f"{speed.removesuffix(' PCIe')} x{width}" if speed and width else None


def _sysfs_text(file: Path) -> str | None:
    # The kernel answers EINVAL for the speed of a link that is down.
    with suppress(OSError, UnicodeDecodeError):
        return file.read_text().strip() or None
    return None


def _sysfs_number(file: Path) -> int | None:
    text = _sysfs_text(file)
    return int(text) if text and fullmatch(r"-?\d+", text) else None


# Byte counters.


_RDMA_WORD_BYTES = 4
"""The unit of port_xmit_data and port_rcv_data."""


def read_counters(sys: Path = SYSFS_ROOT) -> DeviceCounters:
    """The byte counters of all devices visible here. Devices that vanish while reading are left out."""
    counters: dict[tuple[DeviceKind, str], tuple[int, int]] = {}
    for device in sysfs_entries(sys / "class/net"):
        with suppress(OSError, ValueError):
            files = device / "statistics"
            counters["netdev", device.name] = _counter_pair(files / "tx_bytes", files / "rx_bytes", 1)
    for hca in sysfs_entries(sys / "class/infiniband"):
        for port in sysfs_entries(hca / "ports"):
            with suppress(OSError, ValueError):
                words = port / "counters"
                pair = _counter_pair(words / "port_xmit_data", words / "port_rcv_data", _RDMA_WORD_BYTES)
                counters["rdma", f"{hca.name}:{port.name}"] = pair
    return counters


def _counter_pair(sent: Path, received: Path, unit: int) -> tuple[int, int]:
    return int(sent.read_text()) * unit, int(received.read_text()) * unit


# Isolation: visible devices against allocated ones.


DEV_ROOT = Path("/dev")
ROUTE_TABLE = Path("/proc/net/route")
_SHARED = frozenset({"rdma_cm", "by-ibdev", "by-path"})
"""Entries of /dev/infiniband that belong to no HCA."""
_VERBS = {
    "uverbs": "infiniband_verbs",
    "umad": "infiniband_mad",
    "issm": "infiniband_mad",
    "ucm": "infiniband_cm",
}


def visible_devices(sys: Path = SYSFS_ROOT, dev: Path = DEV_ROOT) -> VisibleDevices:
    """List /dev/infiniband and the netdevs of this namespace."""
    files = _entry_names(dev / "infiniband")
    hcas = dict.fromkeys(_hca_of(sys, name) for name in files if name not in _SHARED)
    netdevs = tuple(name for name in _entry_names(sys / "class/net") if (sys / "class/net" / name).is_dir())
    return VisibleDevices(files, tuple(hcas), tuple(name for name in netdevs if name != "lo"))


def unallocated_devices(
    visible: VisibleDevices, allocated: AllocatedDevices, sys: Path = SYSFS_ROOT, routes: Path = ROUTE_TABLE
) -> list[str]:
    """Visible devices that were not allocated. The pod network (default route) belongs to no claim."""
    mine = set(allocated.names)
    hcas = [name for name in visible.hcas if not mine & _names_of_hca(sys, name)]
    free = _default_route_devices(routes)
    netdevs = [
        name for name in visible.netdevs if name not in free and not mine & _names_of_netdev(sys, name)
    ]
    return [*hcas, *netdevs]


def missing_devices(
    visible: VisibleDevices, allocated: AllocatedDevices, sys: Path = SYSFS_ROOT
) -> list[str]:
    """Names of the allocation that no visible device has."""
    hcas = (_names_of_hca(sys, name) for name in visible.hcas)
    known = set[str]().union(*hcas, *(_names_of_netdev(sys, name) for name in visible.netdevs))
    return [name for name in allocated.names if name not in known]


def require_isolation(allocated: AllocatedDevices | None) -> VisibleDevices:
    """The devices that this end sees.

    Raises:
        Refused: it sees a device that was not allocated to it, or lacks one that was. None checks nothing.
    """
    visible = visible_devices()
    if allocated is None:
        return visible
    if extra := unallocated_devices(visible, allocated):
        raise Refused(
            f"this end sees {', '.join(extra)}, which its claim did not allocate",
            nearest_fix=f"give the pod nothing but {', '.join(allocated.names) or 'its network'}",
        )
    if lacking := missing_devices(visible, allocated):
        raise Refused(
            f"this end does not see {', '.join(lacking)}, which its claim allocated",
            nearest_fix="check that the driver prepared the claim for this pod, and that the names are right",
        )
    return visible


def _names_of_hca(sys: Path, name: str) -> set[str]:
    hca = sys / "class/infiniband" / name
    return _with_address(name, hca) | set(_entry_names(hca / "device/net"))


def _names_of_netdev(sys: Path, name: str) -> set[str]:
    device = sys / "class/net" / name
    return _with_address(name, device) | set(_entry_names(device / "device/infiniband"))


def _with_address(name: str, device: Path) -> set[str]:
    address = pci_address_of(device) if device.exists() else None
    return {name} if address is None else {name, address}


def _hca_of(sys: Path, file: str) -> str:
    kind = file.rstrip("0123456789")
    try:
        return (sys / "class" / _VERBS.get(kind, kind) / file / "ibdev").read_text().strip()
    except OSError:
        return file


def _default_route_devices(routes: Path) -> Iterable[str]:
    """IPv4 routes to 0.0.0.0/0, with the columns Iface, Destination, ..., Mask in hexadecimal."""
    try:
        rows = [line.split() for line in routes.read_text().splitlines()[1:]]
    except OSError:
        return ()
    return {row[0] for row in rows if len(row) > 7 and row[1] == "00000000" and row[7] == "00000000"}


def _entry_names(directory: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in directory.iterdir())) if directory.is_dir() else ()


# Allocated devices out of ResourceClaims.


NIC_DRIVER = "dra.net"
_PCI_NAME = re.compile(r"pci-([0-9a-f]{4,})-([0-9a-f]{2})-([0-9a-f]{2})-([0-7])")
"""The driver's name of a PCI device: `pci-0000-8a-00-0`."""


class _AllocationResult(msgspec.Struct, frozen=True):
    driver: str
    device: str


class _AllocatedResults(msgspec.Struct, frozen=True):
    results: tuple[_AllocationResult, ...] = ()


class _Allocation(msgspec.Struct, frozen=True):
    devices: _AllocatedResults = _AllocatedResults()


class _ClaimStatus(msgspec.Struct, frozen=True):
    allocation: _Allocation | None = None


class _Claim(msgspec.Struct, frozen=True):
    status: _ClaimStatus = _ClaimStatus()


def read_allocation(file: Path) -> AllocatedDevices:
    """The NICs of the claims in `file`: one ResourceClaim, a List or several documents, as YAML or JSON.

    `kubectl get resourceclaims -o yaml` prints such a file.

    Raises:
        Refused: the file cannot be read, or no claim in it is allocated.
    """
    try:
        documents = decode_yaml(file.read_bytes(), str(file))
    except (OSError, Undecodable) as error:
        problem = (
            f"cannot be read: {file_error_text(error)}"
            if isinstance(error, OSError)
            else f"is not YAML: {error.reason}"
        )
        raise Refused(f"{file} {problem}", nearest_fix="name a file with ResourceClaims") from error
    try:
        claims = [
            msgspec.convert(claim, _Claim) for document in documents for claim in _resource_claims(document)
        ]
    except msgspec.ValidationError as error:
        raise Refused(
            f"{file}: {error}", nearest_fix="save it with `kubectl get resourceclaims -o yaml`"
        ) from error
    found = [claim.status.allocation for claim in claims if claim.status.allocation is not None]
    if not found:
        raise Refused(
            f"{file} holds no ResourceClaim that is allocated",
            nearest_fix="save it once the pod is scheduled, with `kubectl get resourceclaims -o yaml`",
        )
    results = (result for allocation in found for result in allocation.devices.results)
    return AllocatedDevices(
        tuple(_device_on_host(result.device) for result in results if result.driver == NIC_DRIVER)
    )


def _resource_claims(document: Any) -> Iterator[Any]:
    if isinstance(document, dict) and document.get("kind") == "ResourceClaim":
        yield document
    elif isinstance(document, dict) and isinstance(document.get("items"), list):
        for item in document["items"]:
            yield from _resource_claims(item)


def _device_on_host(device: str) -> str:
    """The PCI address in the name of a PCI device. Other devices are named after their interface."""
    found = _PCI_NAME.fullmatch(device)
    return device if found is None else "{}:{}:{}.{}".format(*found.groups())
