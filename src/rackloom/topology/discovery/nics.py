"""What is a NIC of a host, and which of them must not carry tenant data."""

from collections.abc import Iterable

import msgspec

from rackloom.topology.discovery.host import Host, NetDevice, PciFunction, RdmaDevice

MELLANOX, AMAZON = 0x15B3, 0x1D0F
_NETWORK = 0x02
_INFINIBAND = 0x0207
"""Class and subclass of an InfiniBand controller."""


class Candidate(msgspec.Struct, frozen=True):
    """One NIC to be: a PCI function, or a device that has none."""

    function: PciFunction | None
    rdma: RdmaDevice | None
    netdev: NetDevice | None

    @property
    def address(self) -> str | None:
        """Of its PCI function."""
        if self.function is not None:
            return self.function.address
        return self.rdma.pci_address if self.rdma is not None else None

    @property
    def names(self) -> tuple[str, ...]:
        """By what a declaration may call it."""
        named = (self.address, self.rdma and self.rdma.name, self.netdev and self.netdev.name)
        return tuple(name for name in named if name)

    @property
    def line_rate_gbps(self) -> int | None:
        """That of the fastest port of the RDMA device, or the interface's negotiated speed."""
        ports = () if self.rdma is None else self.rdma.ports
        rates = [port.rate_gbps for port in ports if port.rate_gbps]
        if rates:
            return int(min(max(rates), 1e6))
        speed = None if self.netdev is None else self.netdev.speed_mbps
        return None if speed is None else speed // 1000 or None


def candidates_of(host: Host) -> tuple[Candidate, ...]:
    """NICs by PCI address; then RDMA devices whose function has another class (some are 0x00ff)."""
    rdma = {device.pci_address: device for device in host.rdma if device.pci_address}
    netdevs = {device.pci_address: device for device in host.netdevs if device.pci_address}
    functions = [one for one in host.pci if _is_nic(one) or (one.address in rdma and not one.is_lent)]
    found = [Candidate(one, rdma.get(one.address), netdevs.get(one.address)) for one in functions]
    seen = {one.address for one in functions}
    return (*found, *(Candidate(None, one, None) for one in host.rdma if one.pci_address not in seen))


def _is_nic(function: PciFunction) -> bool:
    """A network controller with a driver; its interface may be away, in the namespace of a pod."""
    return function.class_code >> 16 == _NETWORK and function.driver is not None and not function.is_lent


class Reasons:
    """Why a NIC must not carry tenant data."""

    def __init__(self, host: Host, candidates: Iterable[Candidate]) -> None:
        everyone = tuple(candidates)
        self._uplinks = _with_members(host)
        self._any_rdma = any(one.rdma is not None for one in everyone)
        self._any_efa = any(_is_efa(one) for one in everyone)

    def against(self, one: Candidate) -> str | None:
        """The first reason that applies; None: it may."""
        if one.netdev is not None and one.netdev.name in self._uplinks:
            return "carries the default route"
        if self._any_efa and _is_infiniband(one):
            # Amazon's machines have no InfiniBand fabric: on HGX B200 boards it is how the NVLink switches
            # are managed.
            return "carries NVLink management"
        if self._any_rdma and one.rdma is None and one.netdev is not None:
            return "Ethernet without RDMA"
        return None


def _with_members(host: Host) -> frozenset[str]:
    """Uplinks, and what carries their traffic below them: the members of a bond or bridge."""
    found = set(host.uplinks)
    while more := {one.name for one in host.netdevs if one.master in found} - found:
        found |= more
    return frozenset(found)


def _is_efa(one: Candidate) -> bool:
    return one.function is not None and one.function.vendor == AMAZON and one.rdma is not None


def _is_infiniband(one: Candidate) -> bool:
    function = one.function
    return function is not None and function.vendor == MELLANOX and function.class_code >> 8 == _INFINIBAND
