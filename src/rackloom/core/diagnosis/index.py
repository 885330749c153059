"""A snapshot with the indexes that several checks share, and the names of places in findings.

`SnapshotIndex` builds each index on first use: chains by node, domains, logical partitions, nodes, devices
and their allocations by name, and the machine that a node runs on, if their GPUs show it. `can_see` returns
whether a layer was read, so that something missing in it is really missing. `is_fresh` returns whether the
reading of an NVLink domain shows its present state. A check must not judge a domain that is not fresh.

The functions `at_...` spell the entries of `Finding.where`. Two findings that share an entry concern the
same thing, and `examination` folds one under the other by comparing these strings, so every check has to
use them. For people, `gpu_part`, `slot_part`, `tray_part` and `device_part` name GPUs, trays and devices.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property

import msgspec

from rackloom.core.diagnosis.join import Rails, gpu_chains
from rackloom.core.diagnosis.snapshot import (
    DeviceId,
    DeviceRecord,
    DeviceUse,
    GpuChain,
    Layer,
    LogicalPartitionRecord,
    MachineRecord,
    NodeRecord,
    NvlinkDomainRecord,
    SiteSnapshot,
    grouped,
)
from rackloom.topology.join_key import SlotKey
from rackloom.topology.part_names import PartName, read_part_name

DeviceKind = tuple[str, str]
"""Driver and kind."""
BLOCKING_EFFECTS = ("NoSchedule", "NoExecute")
"""Effects of taints that keep new pods away."""


def blocking_taints(taints: Iterable[str]) -> tuple[str, ...]:
    """Those of `key=value:effect` that keep new pods away."""
    return tuple(taint for taint in taints if taint.rpartition(":")[2] in BLOCKING_EFFECTS)


class SnapshotIndex:
    """One snapshot with the lookups that checks share."""

    def __init__(self, snapshot: SiteSnapshot, joined: tuple[GpuChain, ...] | None = None) -> None:
        self.snapshot = snapshot
        self._joined = joined
        self._names_of_node: dict[str, tuple[PartName, Mapping[DeviceId, str]]] = {}

    def can_see(self, layer: Layer) -> bool:
        """Whether a layer was read, so that a record missing in it is really missing."""
        status = self.snapshot.layer(layer)
        return status is not None and status.unknown_since is None

    def is_fresh(self, domain: str) -> bool:
        """Whether the reading of a domain shows its present state."""
        return domain in self._fresh

    @cached_property
    def chains(self) -> tuple[GpuChain, ...]:
        """Every GPU through all layers."""
        return gpu_chains(self.snapshot) if self._joined is None else self._joined

    @cached_property
    def by_node(self) -> Mapping[str, tuple[GpuChain, ...]]:
        """The GPUs of each node that the fabric knows too."""
        known = grouped((chain.device.node, chain) for chain in self.chains if chain.device and chain.fabric)
        return {node: tuple(gpus) for node, gpus in known.items()}

    @cached_property
    def domains(self) -> Mapping[str, NvlinkDomainRecord]:
        """NVLink domains by uuid."""
        return {domain.uuid: domain for domain in self.snapshot.domains}

    @cached_property
    def logicals(self) -> Mapping[str, LogicalPartitionRecord]:
        """Logical partitions by id."""
        return {logical.id: logical for logical in self.snapshot.logicals}

    @cached_property
    def nodes(self) -> Mapping[str, NodeRecord]:
        """Nodes by name."""
        return {node.name: node for node in self.snapshot.nodes}

    @cached_property
    def rails(self) -> Rails:
        """Which NICs serve which GPU."""
        return Rails(self.snapshot.devices)

    @cached_property
    def devices(self) -> Mapping[DeviceId, DeviceRecord]:
        """Published devices."""
        return {device.device_id: device for device in self.snapshot.devices}

    @cached_property
    def uses(self) -> Mapping[DeviceId, DeviceUse]:
        """Allocated devices."""
        return {use.device_id: use for use in self.snapshot.uses}

    @cached_property
    def free_devices(self) -> Mapping[str, Counter[DeviceKind]]:
        """Free devices without blocking taints, for every node."""
        found: dict[str, Counter[DeviceKind]] = {node: Counter() for node in self.nodes}
        for device in self.snapshot.devices:
            if not blocking_taints(device.taints) and device.device_id not in self.uses:
                found.setdefault(device.node, Counter())[device.driver, device.kind] += 1
        return found

    def device(self, device_id: DeviceId) -> DeviceRecord | None:
        """The published device of an allocation."""
        return self.devices.get(device_id)

    def chains_near(self, nodes: Collection[str], domains: Collection[str]) -> tuple[GpuChain, ...]:
        """At least the GPUs of these nodes and NVLink domains."""
        return self.chains if nodes or domains else ()

    @cached_property
    def _fresh(self) -> frozenset[str]:
        return frozenset(domain.uuid for domain in self.snapshot.domains if domain.unknown_since is None)

    @cached_property
    def node_of_machine(self) -> Mapping[str, str]:
        """The node that runs on each machine, as far as their GPUs identify it."""
        pairs = ((chain.machine, chain.device) for chain in self.chains)
        return {machine.id: device.node for machine, device in pairs if machine and device}

    @cached_property
    def machine_of_node(self) -> Mapping[str, str]:
        """The machine that each node runs on, as far as their GPUs identify it."""
        return {node: machine for machine, node in self.node_of_machine.items()}

    @cached_property
    def racks(self) -> Mapping[str, str]:
        """The rack of each chassis in the site's records."""
        return {machine.chassis_serial: machine.rack for machine in self.snapshot.machines}

    def gpu_part(self, chain: GpuChain) -> PartName:
        """The name of a GPU."""
        return gpu_part(chain, self.racks)

    def device_part(self, device: DeviceRecord) -> str:
        """The name of a GPU, or of a NIC that serves one. Another device has its tray's name and its own."""
        if device.node not in self._names_of_node:
            near = self.chains_near((device.node,), ())
            gpus_of = grouped((chain.device.node, chain) for chain in near if chain.device)
            nodes = {device.node, *gpus_of}
            self._names_of_node |= {node: self._named(node, gpus_of[node]) for node in nodes}
        tray, names = self._names_of_node[device.node]
        return names.get(device.device_id) or f"{tray}/{device.name}"

    def _named(self, node: str, gpus: list[GpuChain]) -> tuple[PartName, Mapping[DeviceId, str]]:
        """The tray of a node with these GPUs, and the names of the GPUs and of the NICs that serve them."""
        tray = self.gpu_part(gpus[0]).tray if gpus else PartName(node)
        names = {nic: str(part) for nic, part in tray_nics(gpus, tray).items()}
        for chain in reversed(gpus):
            if chain.device is not None:
                names[chain.device.device_id] = str(self.gpu_part(chain))
        return tray, names

    def at_tray(self, node: str) -> tuple[str, ...]:
        """The names of a node and, if known, its machine in `Finding.where`."""
        machine = self.machine_of_node.get(node)
        return (at_node(node),) if machine is None else (at_node(node), at_machine(machine))


def places_around(gpus: Iterable[GpuChain]) -> tuple[str, ...]:
    """Everything that a fault of these GPUs concerns, for `Finding.where`."""
    places: list[str] = []
    for chain in gpus:
        if chain.device is not None:
            places += (at_device(chain.device), at_node(chain.device.node))
        if chain.machine is not None:
            places.append(at_machine(chain.machine.id))
        if chain.partition is not None:
            places.append(at_partition(chain.partition.domain, chain.partition.name))
        if chain.fabric is not None:
            places.append(at_gpu(chain.fabric.domain, chain.fabric.guid))
    return tuple(dict.fromkeys(places))


def at_device(device: DeviceRecord) -> str:
    """The name of a device in `Finding.where`. Device names are unique per driver and node only."""
    return f"device {device.node}/{device.driver}/{device.name}"


def at_node(name: str) -> str:
    """How `Finding.where` names a node."""
    return f"node {name}"


def at_domain(uuid: str) -> str:
    """How `Finding.where` names an NVLink domain."""
    return f"domain {uuid}"


def at_machine(id_: str) -> str:
    """How `Finding.where` names a machine."""
    return f"machine {id_}"


def at_partition(domain: str, name: str) -> str:
    """How `Finding.where` names a physical partition."""
    return f"partition {domain}/{name}"


def at_logical(id_: str) -> str:
    """How `Finding.where` names a logical partition."""
    return f"logical partition {id_}"


def at_pod(key: str) -> str:
    """How `Finding.where` names a pod, `namespace/name`."""
    return f"pod {key}"


def at_gpu(domain: str, guid: int) -> str:
    """How `Finding.where` names a GPU."""
    return f"gpu {domain}/0x{guid:016x}"


def gpu_part(chain: GpuChain, racks: Mapping[str, str]) -> PartName:
    """The name of a GPU. `racks` has the rack of each chassis."""
    place = slot_key(chain)
    if chain.machine is not None:
        return msgspec.structs.replace(tray_part(chain.machine), gpu=place and place.module_id - 1)
    if place is not None:
        return slot_part(place, racks)
    # Only the cluster knows it. Its node and device have the form of a name already.
    device = chain.device
    return PartName("") if device is None else read_part_name(f"{device.node}/{device.name}")


def slot_key(chain: GpuChain) -> SlotKey | None:
    """The slot of a GPU from any layer, the fabric first."""
    if chain.fabric is not None:
        return chain.fabric.place
    return chain.key.place.value if chain.key.place else None


def slot_part(place: SlotKey, racks: Mapping[str, str]) -> PartName:
    """The name of the GPU in a slot. If no record has its chassis, the serial stands for the rack."""
    rack = racks.get(place.chassis_serial, place.chassis_serial)
    return PartName(rack, place.slot, gpu=place.module_id - 1)


def tray_nics(gpus: Iterable[GpuChain], tray: PartName) -> Mapping[DeviceId, PartName]:
    """The names of the NICs that serve the GPUs of a tray. They count in the order of their PCI addresses."""
    nics = {nic.device_id: nic.key.pci_address for chain in gpus for nic in chain.nics}
    order = sorted(nics, key=lambda nic: (((address := nics[nic]) and address.value) or "", nic))
    return {nic: msgspec.structs.replace(tray, nic=number) for number, nic in enumerate(order)}


def tray_part(machine: MachineRecord) -> PartName:
    """The name of a tray."""
    return PartName(machine.rack, machine.slot)
