"""The links of one host's NICs that serve its GPUs, as the kernel shows them."""

from collections.abc import Iterable, Iterator
from shlex import quote

import msgspec

from rackloom.prove.doctor.checks.here import Here
from rackloom.prove.doctor.checks.nics import LINK_UNTOLD, is_untold, told_by_slice, trouble_with
from rackloom.prove.doctor.findings import Finding, Severity, fails, holds, unknown
from rackloom.prove.doctor.names import NIC_LINK
from rackloom.prove.doctor.words import unique
from rackloom.topology.affinity import own_nics
from rackloom.topology.discovery.host import Host, NetDevice, RdmaDevice, RdmaPort
from rackloom.topology.machine import Machine, Nic

_ACTIVE, _ETHERNET = "active", "ethernet"


class _Link(msgspec.Struct, frozen=True):
    """What carries the data of one NIC."""

    name: str
    address: str | None
    state: str | None
    gbps: int | None
    layer: str
    """InfiniBand and Ethernet have rates of their own."""
    told: tuple[str, ...]
    look: str
    """A command that shows it."""


def check_host_links(host: Host, machine: Machine, here: Here) -> Iterator[Finding]:
    """Every link of a NIC that serves a GPU of `machine`, which was made of `host`; also those that are well.

    A NIC whose port and interface are in the network namespace of a pod is not seen from the host.
    """
    if not machine.gpus:
        return
    links = [_link(host, nic) for nic in _serving(_without_virtual_functions(host, machine))]
    for link in links:
        fastest = max(one.gbps or 0 for one in links if one.layer == link.layer)
        yield _judged(link, fastest, here)


def _without_virtual_functions(host: Host, machine: Machine) -> Machine:
    """The host hands them to guests; their links are what their physical functions make of them."""
    virtual = {one.address for one in host.pci if one.virtual_function}
    nics = (
        msgspec.structs.replace(nic, excluded="virtual function") if nic.pci_address in virtual else nic
        for nic in machine.nics
    )
    return msgspec.structs.replace(machine, nics=tuple(nics))


def _serving(machine: Machine) -> list[Nic]:
    """NICs that are nearest to a GPU; where it is hidden what is near, all with RDMA that may carry data."""
    nearest = sorted({cell.nic for cell in own_nics(machine).values()})
    if nearest:
        return [machine.nics[index] for index in nearest]
    return [nic for nic in machine.nics if nic.rdma_device is not None and nic.excluded is None]


def _judged(link: _Link, fastest: int, here: Here) -> Finding:
    subject, where = f"NIC {link.name} of {here.name}", here.places(link.address)
    told = unique(*link.told, *map(told_by_slice, here.published(link.address)))
    fix = f"{link.look}  # on the host; then its cable and switch port"
    said = trouble_with(link.state, link.gbps, fastest)
    if said:
        severity = Severity.ERROR if link.address in here.held else Severity.WARNING
        return fails(NIC_LINK, subject, said, fix, severity=severity, evidence=told, where=where)
    if link.state is None or is_untold(link.state):
        hidden = "neither its port nor its interface is seen on the host: a pod may have it"
        said = hidden if link.state is None else LINK_UNTOLD
        return unknown(NIC_LINK, subject, said, fix, evidence=told, where=where)
    return holds(NIC_LINK, subject, f"its link is {link.state}", evidence=told, where=where)


def _link(host: Host, nic: Nic) -> _Link:
    """Its RDMA port's, which shows wherever the interface is; else its interface's."""
    rdma = next((one for one in host.rdma if one.name == nic.rdma_device), None)
    if rdma is not None and rdma.ports:
        return _of_rdma(rdma, nic)
    interface = next((one for one in host.netdevs if one.name == nic.if_name), None)
    if interface is not None:
        return _of_interface(interface, nic)
    name = nic.rdma_device or nic.if_name or nic.pci_address or str(nic.index)
    return _Link(name, nic.pci_address, None, None, _ETHERNET, (), "ls /sys/class/infiniband /sys/class/net")


def _of_rdma(rdma: RdmaDevice, nic: Nic) -> _Link:
    active = [port for port in rdma.ports if port.state == _ACTIVE]
    told = tuple(
        f"host: port {port.number} of {rdma.name} is {port.state}{_wire(port)}, {_rate(port.rate_gbps)}"
        for port in rdma.ports
    )
    port = active[0] if active else rdma.ports[0]
    gbps = _gbps(one.rate_gbps for one in active)
    look = f"rdma link show {quote(rdma.name)}"
    return _Link(rdma.name, nic.pci_address, port.state, gbps, port.link_layer.lower(), told, look)


def _wire(port: RdmaPort) -> str:
    return "" if port.physical is None else f" ({port.physical})"


def _rate(gbps: float | None) -> str:
    return "no rate" if gbps is None else f"{gbps:g} Gb/s"


def _of_interface(interface: NetDevice, nic: Nic) -> _Link:
    gbps = None if interface.speed_mbps is None else interface.speed_mbps // 1000
    told = (f"host: interface {interface.name} is {interface.state or 'of no state'}, {_rate(gbps)}",)
    look = f"ip -s link show dev {quote(interface.name)}"
    state = interface.state or "unknown"
    return _Link(interface.name, nic.pci_address, state, gbps, _ETHERNET, told, look)


def _gbps(rates: Iterable[float | None]) -> int | None:
    return max((int(one) for one in rates if one is not None), default=None)
