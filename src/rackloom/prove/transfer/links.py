"""The network devices of a host as its kernel describes them: part of the record of every measurement."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from re import fullmatch
from typing import Literal

import msgspec

from rackloom.topology.discovery.pci import owner_address

SYS = Path("/sys")


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One netdev or one port of an RDMA device. None stands for what the kernel does not say."""

    name: str
    """`rdma0`, or `mlx5_0:1` with the port."""
    kind: Literal["netdev", "rdma"]
    state: str | None = None
    mtu: int | None = None
    gigabits: float | None = None
    """Current rate. None for virtual devices: the rate that the kernel prints for a veth means nothing."""
    numa_node: int | None = None
    pci_address: str | None = None
    pcie: str | None = None
    """Current PCIe link, such as `32.0 GT/s x16`."""
    pcie_best: str | None = None
    """What both ends of that PCIe link could do."""


def read_links(sys: Path = SYS) -> tuple[Link, ...]:
    """All netdevs but `lo`, then all RDMA ports; what cannot be read is left out."""
    return (*_netdevs(sys / "class/net"), *_ports(sys / "class/infiniband"))


def pci_address(device: Path) -> str | None:
    """Address of the PCI function behind a class device."""
    return owner_address(PurePosixPath(device.resolve()))


def children(directory: Path) -> list[Path]:
    """What is in a directory of sysfs, by name; nothing where there is no such directory."""
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _netdevs(directory: Path) -> Iterator[Link]:
    for device in children(directory):
        if device.name == "lo" or not device.is_dir():  # bonding_masters is a file
            continue
        virtual = "virtual" in device.resolve().parts
        speed = None if virtual else _number(device / "speed")
        link = Link(
            name=device.name,
            kind="netdev",
            state=_text(device / "operstate"),
            mtu=_number(device / "mtu"),
            gigabits=None if speed is None or speed <= 0 else speed / 1000,
        )
        yield _with_pci(link, device)


def _ports(directory: Path) -> Iterator[Link]:
    for hca in children(directory):
        for port in children(hca / "ports"):
            rate = (_text(port / "rate") or "").split(" ", 1)[0]
            link = Link(
                name=f"{hca.name}:{port.name}",
                kind="rdma",
                state=(_text(port / "state") or "").partition(": ")[2] or None,
                gigabits=float(rate) if fullmatch(r"\d+(\.\d+)?", rate) else None,
            )
            yield _with_pci(link, hca)


def _with_pci(link: Link, device: Path) -> Link:
    """The link with what its PCI function says; virtual devices have none."""
    function = device / "device"
    node = _number(function / "numa_node")
    return msgspec.structs.replace(
        link,
        numa_node=None if node is None or node < 0 else node,
        pci_address=pci_address(device),
        pcie=_pcie(function, "current"),
        pcie_best=_pcie(function, "max"),
    )


def _pcie(function: Path, which: str) -> str | None:
    speed, width = _text(function / f"{which}_link_speed"), _text(function / f"{which}_link_width")
    return f"{speed.removesuffix(' PCIe')} x{width}" if speed and width else None


def _text(file: Path) -> str | None:
    with suppress(
        OSError, UnicodeDecodeError
    ):  # the kernel answers EINVAL for the speed of a link that is down
        return file.read_text().strip() or None
    return None


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text and fullmatch(r"-?\d+", text) else None
