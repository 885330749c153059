"""One look at the host: sysfs through the discovery room, links through netlink. Blocking."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from rackloom.claim.node.nic.links import Link, read_addresses, read_links
from rackloom.claim.node.nic.namespaces import OWN, inside
from rackloom.claim.node.nic.netlink import Rtnetlink
from rackloom.claim.node.nic.programs import Programs, read_programs
from rackloom.topology.discovery.fuse import machine_of
from rackloom.topology.discovery.host import Host
from rackloom.topology.discovery.nvml import read_nvml
from rackloom.topology.discovery.read import read_host
from rackloom.topology.discovery.statements import (
    NOTHING_DECLARED,
    Declared,
    VendorTopology,
    read_declared,
    read_nccl_topology,
)
from rackloom.topology.discovery.sysroot import Sysroot, content_of
from rackloom.topology.machine import Machine


class OnLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link of the host, and what only netlink knows of it."""

    link: Link
    addresses: tuple[str, ...] = ()
    programs: Programs = Programs()


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The host at one moment."""

    host: Host
    machine: Machine
    links: tuple[OnLink, ...] = ()
    subsystems: Mapping[str, str] = {}
    """Subsystem IDs in hex, by PCI address."""


class Look:
    """Looks at one host."""

    def __init__(
        self, sysroot: Path, *, nccl_topology: Path | None = None, declared: Path | None = None
    ) -> None:
        self.sysroot = Sysroot(sysroot)
        self._is_own = sysroot == Path("/")
        self._vendor: VendorTopology | None = None
        self._declared: Declared = NOTHING_DECLARED
        if nccl_topology is not None:
            self._vendor = read_nccl_topology(content_of(nccl_topology), str(nccl_topology))
        if declared is not None:
            self._declared = read_declared(content_of(declared), str(declared))

    def __call__(self) -> Seen:
        """Look now. Raises `OSError` when the kernel is silent, `Retry` when the GPU driver is."""
        host = read_host(self.sysroot)
        nvml = (read_nvml() or ()) if self._is_own else ()
        return Seen(
            host=host,
            machine=machine_of(host, nvml=nvml, vendor=self._vendor, declared=self._declared),
            links=inside(OWN, _links),
            subsystems=_subsystems(self.sysroot, host),
        )


def _links() -> tuple[OnLink, ...]:
    with Rtnetlink() as rtnetlink:
        return tuple(
            OnLink(
                link=link,
                addresses=tuple(read_addresses(rtnetlink, link.index)),
                programs=read_programs(rtnetlink, link.index),
            )
            for link in read_links(rtnetlink)
            if not link.loopback
        )


def _subsystems(sysroot: Sysroot, host: Host) -> dict[str, str]:
    found = {
        one.address: sysroot.number(f"/sys/bus/pci/devices/{one.address}/subsystem_device")
        for one in host.pci
    }
    return {address: f"{number:04x}" for address, number in found.items() if number is not None}
