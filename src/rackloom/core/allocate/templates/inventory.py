"""The hardware that templates are made for: node types with topology and published devices.

A `NodeType` joins two views of like nodes. The topology shows which devices belong together. The
published attributes are the names that a selector can use. A GPU or NIC has one index in both.

`inventory_of_machine` takes a machine profile and the slices that its drivers would publish.
`inventory_of_slices` takes real ResourceSlices. Nodes form one type if their devices differ only in
identifiers that no template reads. The most frequent type comes first. `machine_from_slices` derives a
topology from attributes. It knows less than a profile: drivers publish no bridges, older GPU drivers no
NUMA node, and no driver marks the NICs that must not carry data. NICs without RDMA, or of a rarer model
than the node's other RDMA devices, are therefore excluded. `with_profile_topology` adds the topology of a
profile to devices at the same PCI address.

Constants name the attributes that distinguish devices. UUIDs, MAC and IP addresses are left out on
purpose: they exist on one machine only.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import compress

import msgspec

from rackloom.core.allocate.driver_slices import (
    GPU_DRIVER,
    NIC_DRIVER,
    NIC_NUMA_NODE,
    NUMA_NODE,
    PCI_BUS_ID,
    PCIE_ROOT,
    device_classes,
    slices_of,
)
from rackloom.core.allocate.eligibility import CandidateDevice, candidates_of
from rackloom.core.allocate.fleet import Fleet
from rackloom.core.allocate.inputs import Features
from rackloom.core.allocate.objects import DeviceClass, Node, ObjectMeta, ResourceSlice
from rackloom.core.allocate.pools import SliceIndex, gather_pools
from rackloom.topology.join_key import Fact, Source
from rackloom.topology.machine import ClassRow, Gpu, Machine, Nic, PathClass, PciePath

# Attributes that distinguish devices.


RDMA = "dra.net/rdma"

GPU_TRAITS = ("gpu.nvidia.com/type", NUMA_NODE, PCIE_ROOT)
GPU_IDS = (PCI_BUS_ID, "gpu.nvidia.com/pciBusID")
GPU_MODEL = "gpu.nvidia.com/productName"
NIC_TRAITS = (RDMA, NIC_NUMA_NODE, NUMA_NODE, PCIE_ROOT, "dra.net/pciDevice")
NIC_IDS = ("dra.net/pciAddress", PCI_BUS_ID, "dra.net/rdmaDevice", "dra.net/ifName")
NIC_MODEL = ("dra.net/pciVendor", "dra.net/pciDevice")
DISTINGUISHING = tuple(dict.fromkeys((*GPU_TRAITS, *GPU_IDS, GPU_MODEL, *NIC_TRAITS, *NIC_IDS, *NIC_MODEL)))

Scalar = str | int | bool


def scalar_attribute(device: CandidateDevice, name: str) -> Scalar | None:
    """The value of a scalar attribute, or None if it is missing or a list, which nothing equals."""
    found = device.attribute(name)
    values = () if found is None else (found.bool_, found.int_, found.string)
    return next((value for value in values if value is not None), None)


def first_string_attribute(device: CandidateDevice, names: tuple[str, ...]) -> str | None:
    """The first of the named attributes with a string value."""
    return next((value for name in names if isinstance(value := scalar_attribute(device, name), str)), None)


# A machine as its own ResourceSlices show it.


_ADDRESSES = ("dra.net/pciAddress", PCI_BUS_ID)


def machine_from_slices(
    node: str, gpus: Sequence[CandidateDevice], nics: Sequence[CandidateDevice]
) -> Machine:
    """The machine of a node, from the published attributes of its devices, in their order."""
    return Machine(
        name=node,
        note="From ResourceSlices.",
        origin=(),
        gpus=tuple(_observed_gpu(index, gpu) for index, gpu in enumerate(gpus)),
        nics=tuple(_observed_nic(index, nic, why) for index, (nic, why) in enumerate(_with_exclusions(nics))),
    )


def with_profile_topology(observed: Machine, known: Machine) -> Machine:
    """`observed`, with the topology of `known` for devices at the same PCI address (or RDMA device)."""
    gpu_at: dict[str | None, Gpu] = {gpu.pci_address: gpu for gpu in known.gpus if gpu.pci_address}
    nic_at = {nic.pci_address or nic.rdma_device: nic for nic in known.nics}
    gpus = [(gpu, gpu_at.get(gpu.pci_address)) for gpu in observed.gpus]
    nics = [(nic, nic_at.get(nic.pci_address) or nic_at.get(nic.rdma_device)) for nic in observed.nics]
    # Declared classes are by index, and indices differ between the two machines.
    declared = {row.gpu: row.classes for row in reversed(known.declared_classes)}
    rows = []
    for gpu, of in gpus if declared else ():
        if of is not None:
            row = declared.get(of.index, ())
            found = [row[nic.index] if nic and nic.index < len(row) else PathClass.UNKNOWN for _, nic in nics]
            rows.append(ClassRow(gpu=gpu.index, classes=tuple(found)))
    return msgspec.structs.replace(
        observed,
        name=f"{observed.name} ({known.name})",
        gpus=tuple(msgspec.structs.replace(more, index=gpu.index) if more else gpu for gpu, more in gpus),
        nics=tuple(msgspec.structs.replace(more, index=nic.index) if more else nic for nic, more in nics),
        declared_classes=tuple(rows),
    )


def _observed_gpu(index: int, device: CandidateDevice) -> Gpu:
    return Gpu(
        index=index,
        product=first_string_attribute(device, (GPU_MODEL,)),
        pci_address=first_string_attribute(device, GPU_IDS),
        numa_node=_numa_fact(device, (NUMA_NODE,)),
        pcie=_pcie_path(device),
    )


def _observed_nic(index: int, device: CandidateDevice, excluded: str | None) -> Nic:
    return Nic(
        index=index,
        pci_address=first_string_attribute(device, _ADDRESSES),
        if_name=first_string_attribute(device, ("dra.net/ifName",)),
        rdma_device=first_string_attribute(device, ("dra.net/rdmaDevice",)),
        model=first_string_attribute(device, ("dra.net/pciDevice",)),
        numa_node=_numa_fact(device, (NIC_NUMA_NODE, NUMA_NODE)),
        pcie=_pcie_path(device),
        excluded=excluded,
    )


def _with_exclusions(nics: Sequence[CandidateDevice]) -> list[tuple[CandidateDevice, str | None]]:
    """Each NIC with the reason why it must not carry data, as far as that can be observed.

    A machine's data NICs are of one kind. Next to eight EFA, two ConnectX-7 manage the NVLink switches (HGX
    B200). Next to eight ConnectX-8, a BlueField is the management network (GB200).
    """
    models = [tuple(scalar_attribute(nic, name) for name in NIC_MODEL) for nic in nics]
    able = [bool(scalar_attribute(nic, RDMA)) for nic in nics]
    kinds = Counter(compress(models, able))
    most = max(kinds.values(), default=0)
    found: list[tuple[CandidateDevice, str | None]] = []
    for nic, model, is_able in zip(nics, models, able, strict=True):
        why = None if is_able else "not an RDMA device"
        if is_able and kinds[model] < most:
            why = f"another kind of RDMA device than {most} others of the node"
        found.append((nic, why))
    return found


def _numa_fact(device: CandidateDevice, names: Sequence[str]) -> Fact[int] | None:
    for name in names:
        found = device.attribute(name)
        listed = () if found is None else found.ints or ()
        value = listed[0] if listed else scalar_attribute(device, name)
        if isinstance(value, int):
            return Fact(value, Source.SYSFS)
    return None


def _pcie_path(device: CandidateDevice) -> PciePath | None:
    root = scalar_attribute(device, PCIE_ROOT)
    return PciePath(root=root, bridges=None, source=Source.SYSFS) if isinstance(root, str) else None


# Node types and the inventory.


_FRESH_NODES = 2
"""A profile is planned on both ends of a transfer."""


@dataclass(frozen=True, slots=True, eq=False)
class NodeType:
    """Nodes that are alike."""

    machine: Machine
    nodes: tuple[Node, ...]
    devices: tuple[CandidateDevice, ...]
    """All that the first node reaches, of any driver, in the order in which the allocator tries them."""

    @property
    def gpus(self) -> tuple[CandidateDevice, ...]:
        """The GPUs by index."""
        return tuple(device for device in self.devices if device.id.driver == GPU_DRIVER)

    @property
    def nics(self) -> tuple[CandidateDevice, ...]:
        """The NICs by index."""
        return tuple(device for device in self.devices if device.id.driver == NIC_DRIVER)

    @property
    def usable(self) -> tuple[int, ...]:
        """Indices of the NICs that may carry data."""
        return tuple(nic.index for nic in self.machine.nics if nic.excluded is None)


@dataclass(frozen=True, slots=True, eq=False)
class HardwareInventory:
    """The hardware on which a template must work."""

    kinds: tuple[NodeType, ...]
    """The most frequent kind of node first."""
    classes: tuple[DeviceClass, ...]
    fleet: Fleet
    """The first node of each kind: the others answer alike."""
    source: str
    """The origin of the inventory, in words."""
    observed: bool
    """From slices: a missing attribute is not published. A profile may just not know it."""


def inventory_of_machine(machine: Machine) -> HardwareInventory:
    """Fresh nodes of a machine profile, with the slices that its drivers would publish."""
    names = tuple(f"node-{number}" for number in range(_FRESH_NODES))
    index = SliceIndex(slice_ for name in names for slice_ in slices_of(machine, name))
    nodes = tuple(_node_named(name) for name in names)
    kind = NodeType(machine, nodes, _devices_of_node(nodes[0], index))
    return HardwareInventory(
        (kind,),
        device_classes(),
        fleet_of((kind,), device_classes(), index),
        f"the machine profile {machine.name}",
        observed=False,
    )


def inventory_of_slices(
    slices: Sequence[ResourceSlice],
    classes: Iterable[DeviceClass] = (),
    nodes: Iterable[Node] = (),
    *,
    machine: Machine | None = None,
) -> HardwareInventory:
    """The nodes that `slices` name, with all devices free.

    If `machine` has a device at the same address, its topology is used for that device.
    """
    index = SliceIndex(slices)
    named = [name for slice_ in slices for name in _node_names(slice_)]
    known = {node.metadata.name: node for node in nodes}
    alike: dict[bytes, list[Node]] = {}
    for node in (known.get(name) or _node_named(name) for name in sorted({*named, *known})):
        # Nodes are alike if their devices differ only in attributes that no template reads (UUIDs, IPs).
        shapes = []
        for device in _devices_of_node(node, index):
            read = {name: value for name in DISTINGUISHING if (value := device.attribute(name)) is not None}
            shapes.append((device.id.driver, msgspec.structs.replace(device.device, attributes=read)))
        alike.setdefault(msgspec.json.encode(shapes, order="sorted"), []).append(node)
    kinds = []
    for group in alike.values():
        devices = _devices_of_node(group[0], index)
        gpus, nics = (
            [device for device in devices if device.id.driver == driver]
            for driver in (GPU_DRIVER, NIC_DRIVER)
        )
        observed = machine_from_slices(group[0].metadata.name, gpus, nics)
        topology = with_profile_topology(observed, machine) if machine else observed
        kinds.append(NodeType(topology, tuple(group), devices))
    kinds.sort(key=lambda kind: (-len(kind.nodes), kind.nodes[0].metadata.name))
    own = tuple({klass.metadata.name: klass for klass in (*device_classes(), *classes)}.values())
    with_profile = f" and the machine profile {machine.name}" if machine else ""
    return HardwareInventory(
        tuple(kinds), own, fleet_of(kinds, own, index), f"ResourceSlices{with_profile}", observed=True
    )


def fleet_of(kinds: Iterable[NodeType], classes: Iterable[DeviceClass], index: SliceIndex) -> Fleet:
    """The first node of each kind, with all devices free."""
    return Fleet([kind.nodes[0] for kind in kinds], classes, index)


def _devices_of_node(node: Node, index: SliceIndex) -> tuple[CandidateDevice, ...]:
    features = Features()
    return candidates_of(gather_pools(node, index, features), features)


def _node_names(resource_slice: ResourceSlice) -> list[str]:
    names = [resource_slice.spec.node_name, *(device.node_name for device in resource_slice.spec.devices)]
    return [name for name in names if name]


def _node_named(name: str) -> Node:
    return Node(metadata=ObjectMeta(name=name, labels={"kubernetes.io/hostname": name}))
