"""Which NICs of a host are offered to claims, under what name, and why the others are not. Pure."""

import base64
import re

import msgspec

from rackloom.claim.node.nic.look import OnLink, Seen
from rackloom.topology.discovery.host import PciFunction, RdmaDevice
from rackloom.topology.machine import Nic

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_IPOIB = "infiniband"


class Offered(msgspec.Struct, frozen=True, kw_only=True):
    """One NIC: a PCI function, an interface without one, or both; an RDMA device may be on it."""

    name: str
    nic: Nic | None = None
    """As the machine's topology knows it."""
    function: PciFunction | None = None
    rdma: RdmaDevice | None = None
    on: OnLink | None = None
    """Its interface, while that is on the host."""
    excluded: str | None = None


def offered(seen: Seen, *, moves_ipoib: bool = True) -> tuple[Offered, ...]:
    """All NICs by name, the `excluded` ones with their reason."""
    movable = [one for one in seen.links if moves_ipoib or one.link.encapsulation != _IPOIB]
    links = {one.link.name: one for one in movable}
    excluded = {interface.name: interface.excluded for interface in seen.machine.interfaces}
    of_nics = [_of_nic(seen, nic, links) for nic in seen.machine.nics]
    taken = {one.on.link.name for one in of_nics if one.on is not None}
    others = (
        Offered(name=device_name(pci_address=None, interface=name), on=on, excluded=excluded.get(name))
        for name, on in links.items()
        if name not in taken
    )
    return tuple(sorted((*of_nics, *others), key=lambda one: one.name))


def device_name(*, pci_address: str | None, interface: str) -> str:
    """`pci-0000-8a-00-0`, or the interface's name where Kubernetes takes it for one, else in base32."""
    if pci_address is not None:
        return f"pci-{pci_address.replace(':', '-').replace('.', '-')}"
    if _DNS_LABEL.fullmatch(interface):
        return interface
    return f"net-{base64.b32encode(interface.encode()).decode().rstrip('=').lower()}"


def _of_nic(seen: Seen, nic: Nic, links: dict[str, OnLink]) -> Offered:
    function = next((one for one in seen.host.pci if one.address == nic.pci_address), None)
    rdma = next((one for one in seen.host.rdma if one.name == nic.rdma_device), None)
    return Offered(
        name=device_name(pci_address=nic.pci_address, interface=nic.rdma_device or nic.if_name or "unnamed"),
        nic=nic,
        function=function,
        rdma=rdma,
        on=links.get(nic.if_name or ""),
        excluded=nic.excluded,
    )
