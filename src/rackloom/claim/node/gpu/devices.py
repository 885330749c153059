"""One GPU as a DRA device: its name, attributes, capacity and consumable shares.

Names, attributes and capacities of GPUs, MIG devices and VFIO devices are those of NVIDIA's DRA driver
for GPUs 0.5. Clique, join key and NIC partner are additions. A text of more than 64 bytes is left out:
the API server refuses longer ones, and half a name would be a wrong one.

`gpu_locations` takes the PCIe root, the NUMA node and the nearest NIC of each GPU from the machine's
topology. The NIC partner says which NIC to claim together with the GPU.

`ShareSettings` lets several claims have one device by the consumable capacity of Kubernetes 1.34 and
later. In mode `memory` a claim that names no memory takes all of it; in mode `unlimited` it takes none; a
number limits the claims. The scheduler keeps the account: nothing keeps a program from using more memory.
Modes and defaults are those of NVIDIA's DRA driver (ConsumableShares). To add an attribute, add it to the
function of its kind of device.
"""

import re
from collections.abc import Iterator, Mapping

import msgspec

from rackloom.claim.node.gpu.inventory import GpuInventory, MigDevice, NodeGpu, VfioGpu
from rackloom.claim.node.joinkey import (
    TRAY,
    DeviceAttributes,
    clique_attributes,
    gpu_attributes,
    number_attribute,
    text_attribute,
)
from rackloom.claim.node.plugin import NodeValue
from rackloom.core.allocate.objects import (
    CapacityRange,
    CapacityRequestPolicy,
    Device,
    DeviceAttribute,
    DeviceCapacity,
)
from rackloom.errors import Refused
from rackloom.topology.affinity import Cell, own_nics
from rackloom.topology.machine import Gpu, Machine, numa_of

# Where a GPU is in its machine, and its NIC.


class NicPartner(NodeValue, frozen=True, kw_only=True):
    """The NIC of a GPU. `path_class` is what lies between them, in nvidia-smi's letters."""

    rdma: str | None
    pci_address: str | None
    path_class: str


class GpuLocation(NodeValue, frozen=True, kw_only=True):
    """Where a GPU sits; None is not known."""

    pcie_root: str | None = None
    numa_node: int | None = None
    nic: NicPartner | None = None


UNKNOWN_LOCATION = GpuLocation()


def gpu_locations(machine: Machine) -> Mapping[str, GpuLocation]:
    """The place of each GPU, by PCI address."""
    own = own_nics(machine)
    return {
        gpu.pci_address: _location(machine, gpu, own.get(gpu.index))
        for gpu in machine.gpus
        if gpu.pci_address is not None
    }


def _location(machine: Machine, gpu: Gpu, cell: Cell | None) -> GpuLocation:
    return GpuLocation(
        pcie_root=None if gpu.pcie is None else gpu.pcie.root,
        numa_node=numa_of(gpu),
        nic=None if cell is None else _nic_partner(machine, cell),
    )


def _nic_partner(machine: Machine, cell: Cell) -> NicPartner:
    nic = machine.nics[cell.nic]
    return NicPartner(
        rdma=nic.rdma_device or nic.if_name, pci_address=nic.pci_address, path_class=cell.path_class.value
    )


# Names and attributes.


STANDARD_DOMAIN = "resource.kubernetes.io"
LONGEST_ATTRIBUTE = 64
"""Bytes of an attribute's string."""
_NUMBERS = re.compile(r"\d+(?:\.\d+){0,2}")
_UNFIT = re.compile(r"[^a-z0-9]+")


def gpu_name(gpu: NodeGpu) -> str:
    """Name of a whole GPU's device."""
    return f"gpu-{gpu.minor}"


def mig_name(gpu: NodeGpu, mig: MigDevice) -> str:
    """Name of a MIG device; one of several in a GPU instance is told apart by its compute instance."""
    profile = _UNFIT.sub("", mig.profile.lower())
    shared = f"-{mig.compute_instance}" if "c." in mig.profile else ""
    return f"gpu-{gpu.minor}-mig-{profile}-{mig.profile_id}-{mig.placement_start}{shared}"


def gpu_device(gpu: NodeGpu, inventory: GpuInventory, place: GpuLocation) -> Device:
    """A whole GPU."""
    tray = {} if gpu.tray is None else {TRAY: number_attribute(gpu.tray)}
    attributes = {
        "type": text_attribute("gpu"),
        **_common_attributes(gpu, inventory, place),
        **_partner_attributes(place.nic),
        **clique_attributes(gpu.clique),
        **gpu_attributes(gpu.key),
        **_fabric_manager(gpu),
        **tray,
        **_texts(uuid=gpu.uuid),
    }
    return Device(name=gpu_name(gpu), attributes=attributes, capacity=_bytes(memory=gpu.memory_bytes))


def mig_device(gpu: NodeGpu, mig: MigDevice, inventory: GpuInventory, place: GpuLocation) -> Device:
    """A MIG device, with what it inherits from its GPU."""
    attributes = {
        "type": text_attribute("mig"),
        **_common_attributes(gpu, inventory, place),
        **_texts(uuid=mig.uuid, parentUUID=gpu.uuid, profile=mig.profile),
    }
    return Device(name=mig_name(gpu, mig), attributes=attributes, capacity=_mig_capacity(mig))


def vfio_name(vfio: VfioGpu) -> str:
    """Name of a GPU for a virtual machine."""
    return f"gpu-vfio-{vfio.index}"


def vfio_device(vfio: VfioGpu) -> Device:
    """A GPU for a virtual machine."""
    attributes = {
        "type": text_attribute("vfio"),
        "iommuFDEnabled": DeviceAttribute(bool_=vfio.iommufd is not None),
        **_texts(deviceID=vfio.device_id, vendorID=vfio.vendor_id),
        **_pci_attributes(vfio.pci_address, vfio.pcie_root, vfio.numa_node),
    }
    memory = _bytes(addressableMemory=vfio.addressable_memory)
    return Device(name=vfio_name(vfio), attributes=attributes, capacity=memory)


def semantic_version(written: str | None) -> DeviceAttribute | None:
    """A version as semantic versioning wants it: three numbers without leading zeros."""
    found = _NUMBERS.match(written or "")
    if found is None:
        return None
    numbers = [str(int(part)) for part in found[0].split(".")]
    return DeviceAttribute(version=".".join((*numbers, "0", "0")[:3]))


def _common_attributes(gpu: NodeGpu, inventory: GpuInventory, place: GpuLocation) -> DeviceAttributes:
    """What a GPU and the MIG devices in it have alike."""
    versions = {
        "cudaComputeCapability": semantic_version(gpu.compute_capability),
        "driverVersion": semantic_version(inventory.driver_version),
        "cudaDriverVersion": semantic_version(inventory.cuda_version),
    }
    return {
        **_texts(
            productName=gpu.product,
            brand=gpu.brand,
            architecture=gpu.architecture,
            addressingMode=gpu.addressing_mode,
        ),
        **{name: value for name, value in versions.items() if value is not None},
        **_pci_attributes(gpu.pci_address, place.pcie_root, place.numa_node),
    }


def _fabric_manager(gpu: NodeGpu) -> DeviceAttributes:
    """The module once more, under the name by which NVIDIA's driver has it (FabricManagerPartitioning)."""
    return {} if gpu.key.place is None else {"gpuModuleID": number_attribute(gpu.key.place.value.module_id)}


def _partner_attributes(nic: NicPartner | None) -> DeviceAttributes:
    """The GPU's own NIC, and what lies between the two."""
    if nic is None:
        return {}
    return _texts(nicPartner=nic.rdma, nicPartnerPCIBusID=nic.pci_address, nicPartnerClass=nic.path_class)


def _pci_attributes(address: str, root: str | None, numa_node: int | None) -> DeviceAttributes:
    named = {f"{STANDARD_DOMAIN}/pciBusID": address, f"{STANDARD_DOMAIN}/pcieRoot": root}
    found = _texts(**named)
    return (
        found if numa_node is None else {**found, f"{STANDARD_DOMAIN}/numaNode": number_attribute(numa_node)}
    )


def _texts(**values: str | None) -> DeviceAttributes:
    """Those that are known and fit: half a name would be a wrong one."""
    fit = {name: value for name, value in values.items() if value}
    return {
        name: text_attribute(value) for name, value in fit.items() if len(value.encode()) <= LONGEST_ATTRIBUTE
    }


def _bytes(**values: int) -> dict[str, DeviceCapacity]:
    return {name: DeviceCapacity(value=str(value)) for name, value in values.items()}


def _mig_capacity(mig: MigDevice) -> Mapping[str, DeviceCapacity]:
    return _bytes(
        memory=mig.memory_bytes,
        multiprocessors=mig.multiprocessors,
        copyEngines=mig.copy_engines,
        decoders=mig.decoders,
        encoders=mig.encoders,
        jpegEngines=mig.jpeg_engines,
        ofaEngines=mig.ofa_engines,
        **dict(_memory_slices(mig)),
    )


def _memory_slices(mig: MigDevice) -> Iterator[tuple[str, int]]:
    for index in range(mig.placement_start, mig.placement_start + mig.placement_size):
        yield f"memorySlice{index}", 1


# Consumable shares.


SHARES_DISABLED, SHARES_MEMORY, SHARES_UNLIMITED = "disabled", "memory", "unlimited"
MEBIBYTE = 1 << 20
_MEMORY, _SHARES = "memory", "shares"
_MOST_SHARES = 10_000


class ShareSettings(msgspec.Struct, frozen=True):
    """How many claims may have one device: one, as many as its memory serves, `count`, or any number."""

    mode: str = SHARES_DISABLED
    count: int | None = None

    def of(self, device: Device) -> Device:
        """The device as it is published. One for a virtual machine has no memory to share, and one user."""
        memory = device.capacity.get(_MEMORY)
        if self.mode == SHARES_DISABLED or memory is None:
            return device
        capacity = {**device.capacity, _MEMORY: self._memory(int(str(memory.value)))}
        if self.count is not None:
            capacity[_SHARES] = _counted(self.count)
        return msgspec.structs.replace(device, capacity=capacity, allow_multiple_allocations=True)

    def _memory(self, size: int) -> DeviceCapacity:
        """Only where memory is what is shared does a claim that names none take all of it."""
        least, default = (MEBIBYTE, size // MEBIBYTE * MEBIBYTE) if self.mode == SHARES_MEMORY else (0, 0)
        steps = CapacityRange(min=str(least), step=str(MEBIBYTE))
        return DeviceCapacity(
            value=str(size), request_policy=CapacityRequestPolicy(default=str(default), valid_range=steps)
        )


def parse_shares(text: str) -> ShareSettings:
    """Read `disabled`, `memory`, `unlimited` or a number of claims. Raises `Refused`."""
    if text in (SHARES_DISABLED, SHARES_MEMORY, SHARES_UNLIMITED):
        return ShareSettings(text)
    if text.isascii() and text.isdecimal() and 0 < int(text[:9]) <= _MOST_SHARES:
        return ShareSettings(_SHARES, int(text[:9]))
    raise Refused(
        f"--consumable-shares is {text!r}",
        nearest_fix=f"say {SHARES_DISABLED}, {SHARES_MEMORY}, {SHARES_UNLIMITED} "
        f"or a number of 1 to {_MOST_SHARES}",
    )


def _counted(count: int) -> DeviceCapacity:
    steps = CapacityRange(min="1", step="1")
    return DeviceCapacity(
        value=str(count), request_policy=CapacityRequestPolicy(default="1", valid_range=steps)
    )
