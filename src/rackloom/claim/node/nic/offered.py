"""Which NICs of a host are offered to claims, under what name, and why the others are not. Pure."""

import base64
import re
from collections.abc import Iterator

import msgspec

from rackloom.claim.node.nic.look import OnLink, Seen
from rackloom.topology.discovery.host import PciFunction, RdmaDevice
from rackloom.topology.machine import Nic

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_RUNTIMES_OWN = frozenset({"cilium_net", "cilium_host", "docker0"})
_IPOIB = "infiniband"
LEFT_OUT_KINDS = frozenset({"veth"})
"""Ends of other pods' interfaces: not for lending."""


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


def offered(
    seen: Seen, left_out_kinds: frozenset[str] = LEFT_OUT_KINDS, *, moves_ipoib: bool = True
) -> tuple[Offered, ...]:
    """All NICs by name, the `excluded` ones with their reason."""
    movable = [one for one in seen.links if moves_ipoib or one.link.encapsulation != _IPOIB]
    links = {one.link.name: one for one in movable}
    on_pci = [_of_nic(seen, nic, links) for nic in seen.machine.nics]
    taken = {one.on.link.name for one in on_pci if one.on is not None}
    others = [_of_link(seen, one) for one in movable if one.link.name not in taken]
    kept = [one for one in others if one.on is not None and _may_be_a_nic(one.on, left_out_kinds)]
    return tuple(sorted((*on_pci, *kept), key=lambda one: one.name))


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


def _of_link(seen: Seen, one: OnLink) -> Offered:
    carriers = _carriers(seen)
    excluded = "carries the default route" if one.link.index in carriers else None
    return Offered(name=device_name(pci_address=None, interface=one.link.name), on=one, excluded=excluded)


def _may_be_a_nic(one: OnLink, left_out_kinds: frozenset[str]) -> bool:
    return one.link.name not in _RUNTIMES_OWN and one.link.kind not in left_out_kinds


def _carriers(seen: Seen) -> frozenset[int]:
    """Uplinks and what their traffic runs through: the members of a bond or bridge, to any depth."""
    found = {one.link.index for one in seen.links if one.link.name in seen.host.uplinks}
    while more := set(_members(seen, found)) - found:
        found |= more
    return frozenset(found)


def _members(seen: Seen, masters: set[int]) -> Iterator[int]:
    return (one.link.index for one in seen.links if one.link.master in masters)
