"""Checks of one host's NICs: their links, and how near they are to the GPUs.

`locate_host` finds out which node of the cluster a host is: the node that publishes most of its GPU
UUIDs; only where one side has no UUIDs, the node of the same name. Names alone are not trusted, because
host and node names are set independently. `HostIdentity` also maps PCI addresses to the cluster's
devices, so that findings of the host and of the cluster about one device can be merged.

`check_host_links` judges the NICs that serve GPUs: the nearest of each GPU, or all RDMA NICs where the
topology is hidden. The RDMA port is read first, since it stays visible when the interface moved into a
pod's network namespace. A link must be up and as fast as the fastest sibling of its link layer. Virtual
functions are left out: their links follow those of the physical functions.

`check_host_nics` reports GPUs whose nearest NIC is at another processor. A host with fewer usable NICs
than processors is built that way and is not reported.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from shlex import quote

import msgspec

from rackloom.core.diagnosis.catalogue import NIC_ALIGNED, NIC_LINK
from rackloom.core.diagnosis.checks.nics import (
    FAR_FROM_NIC,
    LINK_STATE_UNKNOWN,
    are_apart,
    is_link_unknown,
    link_problem,
    slice_evidence,
)
from rackloom.core.diagnosis.findings import Finding, Severity, fails, holds, unique, unknown
from rackloom.core.diagnosis.index import at_device, at_node
from rackloom.core.diagnosis.snapshot import DeviceRecord, SiteSnapshot
from rackloom.topology.affinity import Cell, own_nics
from rackloom.topology.machine import HostReading, Machine, NetDevice, Nic, RdmaDevice, RdmaPort, numa_of

# Which node of the cluster a host is.


class HostIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What findings about a host call it and its devices."""

    name: str
    """`node n1` where its cluster is known, else `host n1`."""
    node: str | None = None
    devices: Mapping[str, tuple[DeviceRecord, ...]] = msgspec.field(default_factory=dict)
    """Its GPUs and NICs in the cluster, by PCI address: several drivers may publish one."""
    held: frozenset[str] = frozenset()
    """PCI addresses of those that a claim holds."""

    def published(self, address: str | None) -> tuple[DeviceRecord, ...]:
        """All that the cluster has of the device at a PCI address."""
        return self.devices.get(address or "", ())

    def places(self, *addresses: str | None) -> tuple[str, ...]:
        """How `Finding.where` names these devices, the host last."""
        known = (at_device(one) for address in addresses for one in self.published(address))
        return unique(*known, self.name)


def locate_host(machine: Machine, name: str, picture: SiteSnapshot) -> HostIdentity:
    """The host that calls itself `name` and has these GPUs and NICs, as the cluster of `picture` knows it."""
    node = _node_of_host(machine, name, picture)
    if node is None:
        return HostIdentity(name=f"host {name}")
    devices: defaultdict[str, tuple[DeviceRecord, ...]] = defaultdict(tuple)
    for one, address in _devices_with_address(picture):
        if one.node == node:
            devices[address] += (one,)
    used = {(use.driver, use.pool, use.device) for use in picture.uses}
    held = (
        at for at, seen in devices.items() if any((one.driver, one.pool, one.name) in used for one in seen)
    )
    return HostIdentity(name=at_node(node), node=node, devices=dict(devices), held=frozenset(held))


def _node_of_host(machine: Machine, name: str, picture: SiteSnapshot) -> str | None:
    """The node with its GPUs; where no UUID is known on one side, the node of its name."""
    own = {gpu.uuid for gpu in machine.gpus if gpu.uuid is not None}
    nodes = {node.name for node in picture.nodes}
    seen = [(one.node, uuid) for one, uuid in _gpus_with_uuid(picture) if one.node in nodes]
    shared = Counter(node for node, uuid in seen if uuid in own)
    if shared:
        return min(shared, key=lambda node: (-shared[node], node))
    contradicted = bool(own) and name in {node for node, _ in seen}
    return None if contradicted or name not in nodes else name


def _gpus_with_uuid(picture: SiteSnapshot) -> Iterator[tuple[DeviceRecord, str]]:
    for device in picture.devices:
        if device.kind == "gpu" and device.key.gpu_uuid is not None:
            yield device, device.key.gpu_uuid.value


def _devices_with_address(picture: SiteSnapshot) -> Iterator[tuple[DeviceRecord, str]]:
    """A PCI address counts within one node, and a share of a GPU has that of the whole."""
    for device in picture.devices:
        if device.kind in ("gpu", "nic") and device.key.pci_address is not None:
            yield device, device.key.pci_address.value


# Links.


_ACTIVE, _ETHERNET = "active", "ethernet"


class _NicLink(msgspec.Struct, frozen=True):
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


def check_host_links(host: HostReading, machine: Machine, here: HostIdentity) -> Iterator[Finding]:
    """Every link of a NIC that serves a GPU of `machine`, which was made of `host`; also those that are well.

    A NIC whose port and interface are in the network namespace of a pod is not seen from the host.
    """
    if not machine.gpus:
        return
    links = [_link_of(host, nic) for nic in _serving_nics(_without_virtual_functions(host, machine))]
    for link in links:
        fastest = max(one.gbps or 0 for one in links if one.layer == link.layer)
        yield _judge_link(link, fastest, here)


def _without_virtual_functions(host: HostReading, machine: Machine) -> Machine:
    """The host hands them to guests; their links are what their physical functions make of them."""
    virtual = {one.address for one in host.pci if one.virtual_function}
    nics = (
        msgspec.structs.replace(nic, excluded="virtual function") if nic.pci_address in virtual else nic
        for nic in machine.nics
    )
    return msgspec.structs.replace(machine, nics=tuple(nics))


def _serving_nics(machine: Machine) -> list[Nic]:
    """NICs that are nearest to a GPU; where it is hidden what is near, all with RDMA that may carry data."""
    nearest = sorted({cell.nic for cell in own_nics(machine).values()})
    if nearest:
        return [machine.nics[index] for index in nearest]
    return [nic for nic in machine.nics if nic.rdma_device is not None and nic.excluded is None]


def _judge_link(link: _NicLink, fastest: int, here: HostIdentity) -> Finding:
    subject, where = f"NIC {link.name} of {here.name}", here.places(link.address)
    told = unique(*link.told, *map(slice_evidence, here.published(link.address)))
    fix = f"{link.look}  # on the host; then its cable and switch port"
    said = link_problem(link.state, link.gbps, fastest)
    if said:
        severity = Severity.ERROR if link.address in here.held else Severity.WARNING
        return fails(NIC_LINK, subject, said, fix, severity=severity, evidence=told, where=where)
    if link.state is None or is_link_unknown(link.state):
        hidden = "neither its port nor its interface is seen on the host: a pod may have it"
        said = hidden if link.state is None else LINK_STATE_UNKNOWN
        return unknown(NIC_LINK, subject, said, fix, evidence=told, where=where)
    return holds(NIC_LINK, subject, f"its link is {link.state}", evidence=told, where=where)


def _link_of(host: HostReading, nic: Nic) -> _NicLink:
    """Its RDMA port's, which shows wherever the interface is; else its interface's."""
    rdma = next((one for one in host.rdma if one.name == nic.rdma_device), None)
    if rdma is not None and rdma.ports:
        return _rdma_link(rdma, nic)
    interface = next((netdev for netdev in host.netdevs if netdev.name == nic.if_name), None)
    if interface is not None:
        return _interface_link(interface, nic)
    name = nic.rdma_device or nic.if_name or nic.pci_address or str(nic.index)
    return _NicLink(
        name, nic.pci_address, None, None, _ETHERNET, (), "ls /sys/class/infiniband /sys/class/net"
    )


def _rdma_link(rdma: RdmaDevice, nic: Nic) -> _NicLink:
    active = [port for port in rdma.ports if port.state == _ACTIVE]
    told = tuple(
        f"host: port {port.number} of {rdma.name} is {port.state}{_physical_state(port)},"
        f" {_rate_text(port.rate_gbps)}"
        for port in rdma.ports
    )
    port = active[0] if active else rdma.ports[0]
    gbps = _fastest_rate(one.rate_gbps for one in active)
    look = f"rdma link show {quote(rdma.name)}"
    return _NicLink(rdma.name, nic.pci_address, port.state, gbps, port.link_layer.lower(), told, look)


def _physical_state(port: RdmaPort) -> str:
    return "" if port.physical is None else f" ({port.physical})"


def _rate_text(gbps: float | None) -> str:
    return "no rate" if gbps is None else f"{gbps:g} Gb/s"


def _interface_link(interface: NetDevice, nic: Nic) -> _NicLink:
    gbps = None if interface.speed_mbps is None else interface.speed_mbps // 1000
    told = (f"host: interface {interface.name} is {interface.state or 'of no state'}, {_rate_text(gbps)}",)
    look = f"ip -s link show dev {quote(interface.name)}"
    state = interface.state or "unknown"
    return _NicLink(interface.name, nic.pci_address, state, gbps, _ETHERNET, told, look)


def _fastest_rate(rates: Iterable[float | None]) -> int | None:
    return max((int(rate) for rate in rates if rate is not None), default=None)


# Distance between GPUs and NICs.


def check_host_nics(machine: Machine, here: HostIdentity) -> Iterator[Finding]:
    """GPUs whose own NIC, the nearest that may carry data, is at another processor; those of one together.

    A host with fewer NICs than processors is made so, and nothing is wrong with it.
    """
    homes = {numa_of(gpu) for gpu in machine.gpus}
    if sum(nic.excluded is None for nic in machine.nics) < len(homes):
        return
    far: defaultdict[int | None, list[Cell]] = defaultdict(list)
    for index, cell in sorted(own_nics(machine).items()):
        home = numa_of(machine.gpus[index])
        if are_apart(home, numa_of(machine.nics[cell.nic]), (cell.path_class,)):
            far[home].append(cell)
    for cells in far.values():
        yield _far_from_nic(machine, cells, here)


def _far_from_nic(machine: Machine, cells: list[Cell], here: HostIdentity) -> Finding:
    gpus = ", ".join(str(cell.gpu) for cell in cells)
    return fails(
        NIC_ALIGNED,
        f"GPU {gpus} of {here.name}",
        FAR_FROM_NIC,
        "rackloom topology discover  # on the host: is a nearer NIC missing or excluded?",
        severity=Severity.WARNING,
        evidence=(*(_path_evidence(machine, cell) for cell in cells), *_excluded_nics(machine, cells)),
        where=here.places(*(machine.gpus[cell.gpu].pci_address for cell in cells)),
    )


def _path_evidence(machine: Machine, cell: Cell) -> str:
    gpu, nic = machine.gpus[cell.gpu], machine.nics[cell.nic]
    there = f"GPU {gpu.pci_address} is at {_numa_text(numa_of(gpu))}"
    return (
        f"host: {there}, its nearest NIC {_nic_name(nic)} at {_numa_text(numa_of(nic))} ({cell.path_class})"
    )


def _excluded_nics(machine: Machine, cells: list[Cell]) -> Iterator[str]:
    """NICs at the GPUs' own processor that may not carry data, and why."""
    homes = {numa_of(machine.gpus[cell.gpu]) for cell in cells} - {None}
    for nic in machine.nics:
        if nic.excluded is not None and numa_of(nic) in homes:
            yield f"host: NIC {_nic_name(nic)} at {_numa_text(numa_of(nic))} is left out: {nic.excluded}"


def _nic_name(nic: Nic) -> str:
    return nic.rdma_device or nic.if_name or nic.pci_address or str(nic.index)


def _numa_text(node: int | None) -> str:
    return "no NUMA node known" if node is None else f"NUMA node {node}"
