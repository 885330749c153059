"""Checks of one host's NICs: their links, and how near they are to the GPUs.

`locate_host` finds the cluster node of a host: the node that publishes most of its GPU UUIDs. If one side has
no UUIDs, it is the node of the same name. Names alone are not trusted, because host and node names are set
independently. `HostIdentity` also maps PCI addresses to the cluster's devices, so that findings of the host
and of the cluster about one device can be merged.

`check_host_links` judges the NICs that serve GPUs: the nearest of each GPU, or all RDMA NICs if the topology
is hidden. The RDMA port is read first, since it stays visible when the interface moved into a pod's network
namespace. A link must be up and as fast as the fastest sibling of its link layer. Virtual functions are left
out: their links follow those of the physical functions.

`check_host_nics` reports GPUs with their nearest NIC at another processor. A host with fewer usable NICs
than processors is built that way and is not reported.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from shlex import quote

import msgspec

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.checks.nics import (
    FAR_FROM_NIC,
    LINK_STATE_UNKNOWN,
    are_apart,
    is_link_unknown,
    link_problem,
    numa_text,
    slice_evidence,
)
from rackloom.core.diagnosis.findings import Finding, Severity, fails, holds, unique, unknown
from rackloom.core.diagnosis.index import SnapshotIndex, at_device, at_node
from rackloom.core.diagnosis.snapshot import DeviceRecord, SiteSnapshot, grouped
from rackloom.topology.affinity import Cell, own_nics
from rackloom.topology.machine import HostReading, Machine, NetDevice, Nic, RdmaDevice, numa_of
from rackloom.topology.nics import data_rdma

# The cluster node of a host.


class HostIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A host as findings name it, and its devices in the cluster."""

    name: str
    """`node n1` if its cluster is known, else `host n1`."""
    node: str | None = None
    devices: Mapping[str, Sequence[DeviceRecord]] = msgspec.field(default_factory=dict)
    """Its GPUs and NICs in the cluster, by PCI address: several drivers may publish one."""
    parts: Mapping[str, str] = msgspec.field(default_factory=dict)
    """The names of these devices, by PCI address."""
    held: frozenset[str] = frozenset()
    """PCI addresses of those that a claim holds."""

    def published(self, address: str | None) -> Sequence[DeviceRecord]:
        """All that the cluster has of the device at a PCI address."""
        return self.devices.get(address or "", ())

    def places(self, *addresses: str | None) -> tuple[str, ...]:
        """How `Finding.where` names these devices, the host last."""
        known = (at_device(device) for address in addresses for device in self.published(address))
        return unique(*known, self.name)


def locate_host(machine: Machine, name: str, snapshot: SiteSnapshot) -> HostIdentity:
    """The host named `name` with these GPUs and NICs, as the cluster of `snapshot` knows it."""
    node = _node_of_host(machine, name, snapshot)
    if node is None:
        return HostIdentity(name=f"host {name}")
    # A PCI address counts within one node only. A share of a GPU (MIG) has the address of the whole GPU.
    devices = grouped(
        (device.key.pci_address.value, device)
        for device in snapshot.devices
        if device.node == node and device.kind in ("gpu", "nic") and device.key.pci_address is not None
    )
    used = {use.device_id for use in snapshot.uses}
    held = (
        address for address, found in devices.items() if any(device.device_id in used for device in found)
    )
    index = SnapshotIndex(snapshot)
    parts = {address: index.device_part(found[0]) for address, found in devices.items()}
    return HostIdentity(name=at_node(node), node=node, devices=devices, parts=parts, held=frozenset(held))


def _node_of_host(machine: Machine, name: str, snapshot: SiteSnapshot) -> str | None:
    """The node that publishes most of its GPUs, or the node of the same name if one side has no UUIDs."""
    own = {gpu.uuid for gpu in machine.gpus if gpu.uuid is not None}
    nodes = {node.name for node in snapshot.nodes}
    published = [
        (device.node, device.key.gpu_uuid.value)
        for device in snapshot.devices
        if device.kind == "gpu" and device.node in nodes and device.key.gpu_uuid is not None
    ]
    shared = Counter(node for node, uuid in published if uuid in own)
    if shared:
        return min(shared, key=lambda node: (-shared[node], node))
    # The node of this name has other GPUs: it is another machine with the same name.
    contradicted = bool(own) and name in {node for node, _ in published}
    return None if contradicted or name not in nodes else name


# Links.


_ACTIVE, _ETHERNET = "active", "ethernet"


class _NicLink(msgspec.Struct, frozen=True):
    """The link that carries the data of one NIC."""

    name: str
    address: str | None
    state: str | None
    gbps: int | None
    layer: str
    """InfiniBand or Ethernet: rates are compared within one link layer."""
    evidence: tuple[str, ...]
    show: str
    """A command that shows it."""


def check_host_links(host: HostReading, machine: Machine, here: HostIdentity) -> Iterator[Finding]:
    """Every link, healthy or not, of a NIC that serves a GPU of `machine`, which was made from `host`.

    A NIC whose port and interface are in the network namespace of a pod is not seen from the host.
    """
    if not machine.gpus:
        return
    # Virtual functions are left out: their links follow those of the physical functions.
    virtual = {function.address for function in host.pci if function.virtual_function}
    nics = [
        msgspec.structs.replace(nic, excluded="virtual function") if nic.pci_address in virtual else nic
        for nic in machine.nics
    ]
    nearest = {cell.nic for cell in own_nics(msgspec.structs.replace(machine, nics=tuple(nics))).values()}
    serving = [nics[index] for index in sorted(nearest)]
    # If the topology is hidden, no NIC is nearer than another: any RDMA NIC may serve a GPU.
    if not serving:
        serving = [nic for nic in nics if nic.rdma_device is not None and nic.excluded is None]
    links = [_link_of(host, nic) for nic in serving]
    for link in links:
        fastest = max(sibling.gbps or 0 for sibling in links if sibling.layer == link.layer)
        yield _judge_link(link, fastest, here)


def _judge_link(link: _NicLink, fastest: int, here: HostIdentity) -> Finding:
    subject = here.parts.get(link.address or "", f"NIC {link.name} of {here.name}")
    where = here.places(link.address)
    evidence = unique(*link.evidence, *map(slice_evidence, here.published(link.address)))
    fix = f"{link.show}  # on the host; then its cable and switch port"
    message = link_problem(link.state, link.gbps, fastest)
    if message:
        severity = Severity.ERROR if link.address in here.held else Severity.WARNING
        return fails(Check.NIC_LINK, subject, message, fix, severity=severity, evidence=evidence, where=where)
    if link.state is None or is_link_unknown(link.state):
        hidden = "neither its port nor its interface is seen on the host: a pod may have it"
        message = hidden if link.state is None else LINK_STATE_UNKNOWN
        return unknown(Check.NIC_LINK, subject, message, fix, evidence=evidence, where=where)
    return holds(Check.NIC_LINK, subject, f"its link is {link.state}", evidence=evidence, where=where)


def _link_of(host: HostReading, nic: Nic) -> _NicLink:
    """The link of its RDMA port, which stays visible when a pod has the interface, else the interface's."""
    rdma = data_rdma(host, nic)
    if rdma is not None and rdma.ports:
        return _rdma_link(rdma, nic)
    interface = next((netdev for netdev in host.netdevs if netdev.name == nic.if_name), None)
    if interface is not None:
        return _interface_link(interface, nic)
    show = "ls /sys/class/infiniband /sys/class/net"
    return _NicLink(_nic_name(nic), nic.pci_address, None, None, _ETHERNET, (), show)


def _rdma_link(rdma: RdmaDevice, nic: Nic) -> _NicLink:
    active = [port for port in rdma.ports if port.state == _ACTIVE]
    evidence = tuple(
        f"host: port {port.number} of {rdma.name} is {port.state}"
        f"{f' ({port.physical})' if port.physical else ''}, {_rate_text(port.rate_gbps)}"
        for port in rdma.ports
    )
    port = active[0] if active else rdma.ports[0]
    gbps = max((int(port.rate_gbps) for port in active if port.rate_gbps is not None), default=None)
    show = f"rdma link show {quote(rdma.name)}"
    return _NicLink(rdma.name, nic.pci_address, port.state, gbps, port.link_layer.lower(), evidence, show)


def _rate_text(gbps: float | None) -> str:
    return "no rate" if gbps is None else f"{gbps:g} Gb/s"


def _interface_link(interface: NetDevice, nic: Nic) -> _NicLink:
    gbps = None if interface.speed_mbps is None else interface.speed_mbps // 1000
    evidence = (
        f"host: interface {interface.name} is {interface.state or 'of no state'}, {_rate_text(gbps)}",
    )
    show = f"ip -s link show dev {quote(interface.name)}"
    state = interface.state or "unknown"
    return _NicLink(interface.name, nic.pci_address, state, gbps, _ETHERNET, evidence, show)


# Distance between GPUs and NICs.


def check_host_nics(machine: Machine, here: HostIdentity) -> Iterator[Finding]:
    """GPUs with their nearest data NIC at another processor. GPUs at one processor are one finding.

    A host with fewer NICs than processors is built that way and is not reported.
    """
    homes = {numa_of(gpu) for gpu in machine.gpus}
    if sum(nic.excluded is None for nic in machine.nics) < len(homes):
        return
    far = grouped(
        (home, cell)
        for gpu, cell in sorted(own_nics(machine).items())
        if are_apart(home := numa_of(machine.gpus[gpu]), numa_of(machine.nics[cell.nic]), (cell.path_class,))
    )
    for cells in far.values():
        yield _far_from_nic(machine, cells, here)


def _far_from_nic(machine: Machine, cells: list[Cell], here: HostIdentity) -> Finding:
    addresses = {cell.gpu: machine.gpus[cell.gpu].pci_address for cell in cells}
    host = here.name.rpartition(" ")[2]
    gpus = [here.parts.get(at or "", f"{host}/gpu-{gpu}") for gpu, at in addresses.items()]
    evidence = []
    for cell in cells:
        gpu, nic = machine.gpus[cell.gpu], machine.nics[cell.nic]
        near = f"its nearest NIC {_nic_name(nic)} at {numa_text(numa_of(nic))} ({cell.path_class})"
        evidence.append(f"host: GPU {gpu.pci_address} is at {numa_text(numa_of(gpu))}, {near}")
    # A NIC beside the GPUs that is left out may be the one that they lack.
    homes = {numa_of(machine.gpus[cell.gpu]) for cell in cells} - {None}
    for nic in machine.nics:
        if nic.excluded is not None and numa_of(nic) in homes:
            left_out = f"NIC {_nic_name(nic)} at {numa_text(numa_of(nic))} is left out: {nic.excluded}"
            evidence.append(f"host: {left_out}")
    return fails(
        Check.NIC_ALIGNED,
        ", ".join(gpus),
        FAR_FROM_NIC,
        "rackloom topology discover  # on the host: is a nearer NIC missing or excluded?",
        severity=Severity.WARNING,
        evidence=tuple(evidence),
        where=here.places(*addresses.values()),
    )


def _nic_name(nic: Nic) -> str:
    return nic.rdma_device or nic.if_name or nic.pci_address or str(nic.index)
