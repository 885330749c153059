"""Read PCI functions, interfaces, RDMA devices, routes and GPUs from /sys and /proc below a root.

The root need not be this machine's own: it may be a copy from elsewhere, and hostile. `Sysroot` follows
symbolic links inside the root only (40 at most, as the kernel does), reads regular files only and up to a
limit, and reports unreadable files as absent.

`read_host` returns a `HostReading`, without interpretation:

- PCI functions with class, vendor, NUMA node, driver, SR-IOV counts and their path from the root complex.
  Below VMBus the hypervisor invents a root per device, so such a function has no path.
- Network interfaces. The kind of a virtual interface is taken from uevent, from files that only one kind
  has, or from its ARPHRD type. A veth is recognised by its partner index. If none of these decides, the
  kind is empty.
- RDMA devices with their ports, routes of the main IPv4 and IPv6 tables, and the GPUs that NVIDIA's
  kernel driver lists under /proc.

`character_devices` parses /proc/devices, in which the driver registers the IMEX channel devices.
"""

import errno
import ipaddress
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from rackloom.errors import Refused, file_error_text
from rackloom.topology.join_key import Source
from rackloom.topology.machine import (
    DriverGpu,
    HostReading,
    NetDevice,
    NetRoute,
    PciePath,
    PciFunction,
    RdmaDevice,
    RdmaPort,
)

# Files below a root that need not be trusted.


OWN_ROOT = Path("/")
"""The root of this machine itself."""
MAX_FILE_BYTES = 64 * 1024
"""Bytes. A sysfs attribute has at most a page."""
MAX_TABLE_BYTES = 16 * 1024 * 1024
"""Bytes. A table of sockets has a line of about 150 for each."""
MAX_LINKS = 40
"""Symbolic links in one path: as many as the kernel itself follows."""


class Sysroot:
    """A directory that holds `sys` and `proc` as a kernel shows them."""

    def __init__(self, root: Path = OWN_ROOT) -> None:
        self.root = root

    def text(self, path: str) -> str | None:
        """A file's content without surrounding space, or None if it does not exist."""
        found = self._read(path, MAX_FILE_BYTES)
        return None if found is None else found.decode(errors="replace").strip()

    def whole(self, path: str) -> str | None:
        """A long file's content. None if it does not exist, or is longer than `MAX_TABLE_BYTES`."""
        found = self._read(path, MAX_TABLE_BYTES + 1)
        return None if found is None or len(found) > MAX_TABLE_BYTES else found.decode(errors="replace")

    def number(self, path: str) -> int | None:
        """A file's content as an integer, decimal or `0x...`, or None if it is not one."""
        text = self.text(path)
        try:
            return None if text is None else int(text, 0)
        except ValueError:
            return None

    def names(self, path: str) -> tuple[str, ...]:
        """The names in a directory, in order. Empty if it does not exist."""
        found = self.real(path)
        try:
            return () if found is None else tuple(sorted(entry.name for entry in self._host(found).iterdir()))
        except OSError:
            return ()

    def real(self, path: str) -> PurePosixPath | None:
        """The path without symbolic links, relative to the root, or None if it does not exist."""
        todo = list(reversed(PurePosixPath(path).parts))
        done: list[str] = []
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
                del done[-1:]
            elif part in ("/", "//"):
                done.clear()
            elif (target := self._link([*done, part])) is None:
                return None
            elif target:
                links += 1
                if links > MAX_LINKS:
                    return None
                todo.extend(reversed(PurePosixPath(target).parts))
            else:
                done.append(part)
        return PurePosixPath("/", *done)

    def _link(self, parts: list[str]) -> str | None:
        """The target of a symbolic link. Empty for another file, None if the path does not exist."""
        try:
            # A look at a machine takes many thousands of parts: one system call for each.
            return str(Path(f"{self.root}/{'/'.join(parts)}").readlink())
        except (OSError, ValueError) as error:
            return "" if isinstance(error, OSError) and error.errno == errno.EINVAL else None

    def _read(self, path: str, most: int) -> bytes | None:
        """Up to `most` bytes of a regular file: a pipe would block, and reading a device may have effects."""
        found = self.real(path)
        with suppress(OSError, ValueError):
            if found is not None and (at := self._host(found)).is_file():
                with at.open("rb") as file:
                    return file.read(most)
        return None

    def _host(self, path: PurePosixPath) -> Path:
        return self.root.joinpath(*path.parts[1:])


def read_named_file(stated: Path) -> bytes:
    """A file that a person named beside the sysroot. Raises `Refused` where it cannot be read."""
    try:
        return stated.read_bytes()
    except OSError as error:
        raise Refused(
            f"{stated} cannot be read: {file_error_text(error)}", nearest_fix="name a file that can be read"
        ) from error


# PCI functions: identity, NUMA node, ancestry, SR-IOV.


PCI_DEVICES = "/sys/bus/pci/devices"
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_PCI_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


def read_pci(sysroot: Sysroot) -> tuple[PciFunction, ...]:
    """All functions that can be read, by address."""
    found = (
        _read_function(sysroot, name) for name in sysroot.names(PCI_DEVICES) if _PCI_ADDRESS.fullmatch(name)
    )
    return tuple(function for function in found if function is not None)


def normal_pci_address(text: str) -> str | None:
    """An address in the kernel's form: nvidia-smi prints capitals and a domain of eight digits."""
    lower = text.strip().lower()
    if not _PCI_ADDRESS.fullmatch(lower):
        return None
    domain, rest = lower.split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"


def owning_pci_address(path: PurePosixPath) -> str | None:
    """The last PCI function on a device's real path: virtio devices are below one."""
    return next((part for part in reversed(path.parts) if _PCI_ADDRESS.fullmatch(part)), None)


def _read_function(sysroot: Sysroot, address: str) -> PciFunction | None:
    at = f"{PCI_DEVICES}/{address}"
    code, vendor, device = (sysroot.number(f"{at}/{name}") for name in ("class", "vendor", "device"))
    if code is None or vendor is None or device is None:
        return None
    driver = sysroot.real(f"{at}/driver")
    return PciFunction(
        address=address,
        class_code=code,
        vendor=vendor,
        device=device,
        numa_node=sysroot.number(f"{at}/numa_node"),
        driver=None if driver is None else driver.name,
        path=_pcie_path(sysroot.real(at)),
        virtual_function=sysroot.real(f"{at}/physfn") is not None,
        vfs=sysroot.number(f"{at}/sriov_numvfs") or 0,
        most_vfs=sysroot.number(f"{at}/sriov_totalvfs") or 0,
    )


def _pcie_path(path: PurePosixPath | None) -> PciePath | None:
    """The path from the root down. Below VMBus, the guest makes up a root for each device."""
    if path is None or path.parts[:3] != ("/", "sys", "devices") or len(path.parts) < 5:
        return None
    root, *bridges = path.parts[3:-1]
    if not _PCI_ROOT.fullmatch(root):
        return None
    between = tuple(part for part in bridges if _PCI_ADDRESS.fullmatch(part))
    return PciePath(root=root, bridges=between, source=Source.SYSFS)


# Network interfaces, RDMA devices and routes.


NET_CLASS, INFINIBAND_CLASS = "/sys/class/net", "/sys/class/infiniband"
UVERBS_CLASS = "/sys/class/infiniband_verbs"
_SUBFUNCTION = re.compile(r"[A-Za-z0-9_]{1,40}\.sf\.[0-9]{1,10}")
"""A subfunction on the auxiliary bus, below its PCI function."""
_PORT_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec")
_PORT_STATE = re.compile(r"\d+: (\w+)")
_ROUTE_UP = 0x1
"""RTF_UP in /proc/net/route."""
_LOOPBACK = "lo"
_LOWER = "lower_"
_DECIMAL = re.compile(r"[0-9]{1,10}")
_HEX_BYTE, _HEX_IPV4, _HEX_IPV6, _HEX_FLAGS = (
    re.compile(rf"[0-9A-Fa-f]{{{digits}}}") for digits in ("2", "8", "32", "1,8")
)
_USB = re.compile(r"usb[0-9]{1,4}")
_DEVTYPE = re.compile(r"^DEVTYPE=([a-z0-9_]{1,15})$", re.MULTILINE)
_KIND_FILES = {"bridge": "bridge", "bond": "bonding", "tun": "tun_flags"}
"""Files and directories that only interfaces of that kind have."""
_HARDWARE_TYPES = {768: "ipip", 769: "ip6tnl", 776: "sit", 778: "gre", 823: "ip6gre"}
"""ARPHRD_* of linux/if_arp.h."""


def read_netdevs(sysroot: Sysroot) -> tuple[NetDevice, ...]:
    """All interfaces but the loopback."""
    names = sysroot.names(NET_CLASS)
    by_index = {sysroot.number(f"{NET_CLASS}/{name}/ifindex"): name for name in names}
    return tuple(_read_netdev(sysroot, name, by_index) for name in names if name != _LOOPBACK)


def read_routes(sysroot: Sysroot) -> tuple[NetRoute, ...]:
    """The routes of the main tables, of either family. Of several next hops, procfs shows the first."""
    return (
        *_ipv4_routes(sysroot.whole("/proc/net/route") or ""),
        *_ipv6_routes(sysroot.whole("/proc/net/ipv6_route") or ""),
    )


def _read_netdev(sysroot: Sysroot, name: str, by_index: dict[int | None, str]) -> NetDevice:
    at = f"{NET_CLASS}/{name}"
    path, device, master = map(sysroot.real, (at, f"{at}/device", f"{at}/master"))
    speed, kind = sysroot.number(f"{at}/speed"), _netdev_kind(sysroot, at, device)
    return NetDevice(
        name=name,
        pci_address=None if device is None else owning_pci_address(device),
        mac=sysroot.text(f"{at}/address") or None,
        mtu=sysroot.number(f"{at}/mtu"),
        state=sysroot.text(f"{at}/operstate"),
        speed_mbps=speed if speed is not None and speed > 0 else None,
        virtual=path is not None and "virtual" in path.parts[:4],
        master=None if master is None else master.name,
        kind=kind,
        lower=_lower_names(sysroot, at) or _parent(sysroot, at, kind, by_index),
        subfunction=_subfunction(sysroot, device),
        dev_port=sysroot.number(f"{at}/dev_port"),
        phys_port_name=sysroot.text(f"{at}/phys_port_name") or None,
        phys_switch_id=sysroot.text(f"{at}/phys_switch_id") or None,
    )


def _netdev_kind(sysroot: Sysroot, at: str, device: PurePosixPath | None) -> str:
    if device is not None:
        return "usb" if any(_USB.fullmatch(part) for part in device.parts) else ""
    stated = _DEVTYPE.search(sysroot.text(f"{at}/uevent") or "")
    if stated is not None:
        return stated[1]
    for kind, sign in _KIND_FILES.items():
        if sysroot.real(f"{at}/{sign}") is not None:
            return kind
    known = _HARDWARE_TYPES.get(sysroot.number(f"{at}/type") or 0)
    if known is not None:
        return known
    # Only the end of a pair has a partner (`iflink`) that is not below it.
    own, partner = sysroot.number(f"{at}/ifindex"), sysroot.number(f"{at}/iflink")
    return "veth" if own != partner and not _lower_names(sysroot, at) else ""


def _lower_names(sysroot: Sysroot, at: str) -> tuple[str, ...]:
    return tuple(
        name.removeprefix(_LOWER) for name in sysroot.names(at) if name.startswith(_LOWER) and name != _LOWER
    )


def _parent(sysroot: Sysroot, at: str, kind: str, by_index: dict[int | None, str]) -> tuple[str, ...]:
    """The parent of an interface without `lower_` links, such as an InfiniBand partition: its `iflink`.

    The other end of a pair is no parent.
    """
    own, parent = sysroot.number(f"{at}/ifindex"), sysroot.number(f"{at}/iflink")
    if not parent or parent == own or kind in ("veth", "netkit"):
        return ()
    return (sysroot.text(f"{at}/parent") or by_index.get(parent, f"interface {parent}"),)


def _subfunction(sysroot: Sysroot, device: PurePosixPath | None) -> str | None:
    """The auxiliary device gets another number at each start, and `sfnum` is the operator's."""
    for at in () if device is None else (device, *device.parents):
        if _SUBFUNCTION.fullmatch(at.name):
            number = sysroot.number(f"{at}/sfnum")
            return at.name if number is None else f"sf{number}"
    return None


def _read_rdma_device(sysroot: Sysroot, name: str, uverbs: bool | None) -> RdmaDevice:
    at = f"{INFINIBAND_CLASS}/{name}"
    device = sysroot.real(f"{at}/device")
    ports = (number for number in sysroot.names(f"{at}/ports") if number.isascii() and number.isdigit())
    return RdmaDevice(
        name=name,
        pci_address=None if device is None else owning_pci_address(device),
        ports=tuple(_read_port(sysroot, f"{at}/ports/{number}", int(number)) for number in ports),
        uverbs=uverbs,
        subfunction=_subfunction(sysroot, device),
        software=sysroot.text(f"{at}/node_desc") in ("rxe", "Software iWARP stack"),
    )


def _read_port(sysroot: Sysroot, at: str, number: int) -> RdmaPort:
    state = _PORT_STATE.match(sysroot.text(f"{at}/state") or "")
    physical = _PORT_STATE.match(sysroot.text(f"{at}/phys_state") or "")
    rate = _PORT_RATE.match(sysroot.text(f"{at}/rate") or "")
    return RdmaPort(
        number=number,
        state="unknown" if state is None else state[1].lower(),
        link_layer=sysroot.text(f"{at}/link_layer") or "unknown",
        rate_gbps=None if rate is None else float(rate[1]),
        physical=None if physical is None else physical[1].lower(),
        netdev=sysroot.text(f"{at}/gid_attrs/ndevs/0") or None,
    )


def _ipv4_routes(table: str) -> Iterator[NetRoute]:
    """Columns: Iface Destination Gateway Flags RefCnt Use Metric Mask ..., in the host's byte order."""
    for row in (line.split() for line in table.splitlines()[1:]):
        if len(row) < 8 or row[0] == _LOOPBACK or not _is_route_up(row[3]) or not _HEX_IPV4.fullmatch(row[1]):
            continue
        length = _prefix_length(row[7])
        if length is not None:
            address = ipaddress.IPv4Address(struct.pack("=I", int(row[1], 16)))
            metric = int(row[6]) if _DECIMAL.fullmatch(row[6]) else 0
            yield NetRoute(f"{address}/{length}", (row[0],), metric)


def _ipv6_routes(table: str) -> Iterator[NetRoute]:
    """Columns: destination, its length, source, its length, next hop, metric, ..., flags, interface."""
    for row in (line.split() for line in table.splitlines()):
        if (
            len(row) != 10
            or row[9] == _LOOPBACK
            or not _is_route_up(row[8])
            or not _HEX_IPV6.fullmatch(row[0])
        ):
            continue
        if _HEX_BYTE.fullmatch(row[1]) and int(row[1], 16) <= 128:
            destination = f"{ipaddress.IPv6Address(bytes.fromhex(row[0]))}/{int(row[1], 16)}"
            yield NetRoute(destination, (row[9],), int(row[5], 16) if _HEX_FLAGS.fullmatch(row[5]) else 0)


def _prefix_length(mask: str) -> int | None:
    """The length of a netmask, or None if it is not one."""
    if not _HEX_IPV4.fullmatch(mask):
        return None
    (number,) = struct.unpack(">I", struct.pack("=I", int(mask, 16)))
    length = number.bit_count()
    return length if number == (1 << 32) - (1 << (32 - length)) else None


def _is_route_up(flags: str) -> bool:
    return bool(_HEX_FLAGS.fullmatch(flags)) and bool(int(flags, 16) & _ROUTE_UP)


# Device numbers that the kernel has given to drivers: /proc/devices.


IMEX_CHANNEL_DEVICES = "nvidia-caps-imex-channels"
"""NVIDIA's driver's name for the devices of IMEX channels."""
_MAJOR_NUMBER = re.compile(r"[0-9]{1,7}")


def character_devices(text: str) -> Iterator[tuple[int, str]]:
    """(major, name) of the character devices section."""
    section = text.partition("Character devices:\n")[2].partition("\n\n")[0]
    for line in section.splitlines():
        major, _, name = line.strip().partition(" ")
        if _MAJOR_NUMBER.fullmatch(major):
            yield int(major), name


# The whole machine.


_MINOR_NUMBER = re.compile(r"[0-9]{1,7}")
DRIVER_GPUS = "/proc/driver/nvidia/gpus"


def read_host(sysroot: Sysroot) -> HostReading:
    """Everything that the kernel and NVIDIA's driver show in files."""
    # All RDMA devices.
    verbs = sysroot.names(UVERBS_CLASS)
    reachable = {sysroot.text(f"{UVERBS_CLASS}/{name}/ibdev") for name in verbs} if verbs else None
    return HostReading(
        name=sysroot.text("/proc/sys/kernel/hostname") or "unknown",
        pci=read_pci(sysroot),
        rdma=tuple(
            _read_rdma_device(sysroot, name, None if reachable is None else name in reachable)
            for name in sysroot.names(INFINIBAND_CLASS)
        ),
        netdevs=read_netdevs(sysroot),
        gpus=tuple(
            _driver_gpu(address, sysroot.text(f"{DRIVER_GPUS}/{name}/information") or "")
            for name in sysroot.names(DRIVER_GPUS)
            if (address := normal_pci_address(name)) is not None
        ),
        routes=read_routes(sysroot),
    )


def _driver_gpu(address: str, information: str) -> DriverGpu:
    """Reads lines of `Name: value`. A GPU that is not initialised has question marks for a UUID."""
    lines = (line.partition(":") for line in information.splitlines())
    values = {name.strip(): value.strip() for name, _, value in lines}
    uuid, minor = values.get("GPU UUID", ""), values.get("Device Minor", "")
    return DriverGpu(
        pci_address=address,
        product=values.get("Model") or None,
        uuid=uuid if uuid and "?" not in uuid else None,
        minor=int(minor) if _MINOR_NUMBER.fullmatch(minor) else None,
    )
