"""Names and attributes of the published devices.

Source: NVIDIA's DRA driver for GPUs, 0.5: names, attributes and capacities of GPUs, MIG and VFIO devices.
Clique, join key and NIC partner are ours.
"""

import re
from collections.abc import Iterator, Mapping

from rackloom.claim.allocate.objects import Device, DeviceAttribute, DeviceCapacity
from rackloom.claim.node.gpu.inventory import Gpu, Inventory, Mig, Vfio
from rackloom.claim.node.gpu.place import NicPartner, Place
from rackloom.claim.node.joinkey import TRAY, Attributes, clique_attributes, gpu_attributes, number, text

STANDARD = "resource.kubernetes.io"
LONGEST_TEXT = 64
"""Bytes of an attribute's string."""
_NUMBERS = re.compile(r"\d+(?:\.\d+){0,2}")
_UNFIT = re.compile(r"[^a-z0-9]+")


def gpu_name(gpu: Gpu) -> str:
    """Name of a whole GPU's device."""
    return f"gpu-{gpu.minor}"


def mig_name(gpu: Gpu, mig: Mig) -> str:
    """Name of a MIG device; one of several in a GPU instance is told apart by its compute instance."""
    profile = _UNFIT.sub("", mig.profile.lower())
    shared = f"-{mig.compute_instance}" if "c." in mig.profile else ""
    return f"gpu-{gpu.minor}-mig-{profile}-{mig.profile_id}-{mig.placement_start}{shared}"


def gpu_device(gpu: Gpu, inventory: Inventory, place: Place) -> Device:
    """A whole GPU."""
    tray = {} if gpu.tray is None else {TRAY: number(gpu.tray)}
    attributes = {
        "type": text("gpu"),
        **_common(gpu, inventory, place),
        **_partner(place.nic),
        **clique_attributes(gpu.clique),
        **gpu_attributes(gpu.key),
        **_fabric_manager(gpu),
        **tray,
        **_texts(uuid=gpu.uuid),
    }
    return Device(name=gpu_name(gpu), attributes=attributes, capacity=_bytes(memory=gpu.memory_bytes))


def mig_device(gpu: Gpu, mig: Mig, inventory: Inventory, place: Place) -> Device:
    """A MIG device, with what it inherits from its GPU."""
    attributes = {
        "type": text("mig"),
        **_common(gpu, inventory, place),
        **_texts(uuid=mig.uuid, parentUUID=gpu.uuid, profile=mig.profile),
    }
    return Device(name=mig_name(gpu, mig), attributes=attributes, capacity=_mig_capacity(mig))


def vfio_name(vfio: Vfio) -> str:
    """Name of a GPU for a virtual machine."""
    return f"gpu-vfio-{vfio.index}"


def vfio_device(vfio: Vfio) -> Device:
    """A GPU for a virtual machine."""
    attributes = {
        "type": text("vfio"),
        "iommuFDEnabled": DeviceAttribute(bool_=vfio.iommufd is not None),
        **_texts(deviceID=vfio.device_id, vendorID=vfio.vendor_id),
        **_position(vfio.pci_address, vfio.pcie_root, vfio.numa_node),
    }
    memory = _bytes(addressableMemory=vfio.addressable_memory)
    return Device(name=vfio_name(vfio), attributes=attributes, capacity=memory)


def version(written: str | None) -> DeviceAttribute | None:
    """A version as semantic versioning wants it: three numbers without leading zeros."""
    found = _NUMBERS.match(written or "")
    if found is None:
        return None
    numbers = [str(int(part)) for part in found[0].split(".")]
    return DeviceAttribute(version=".".join((*numbers, "0", "0")[:3]))


def _common(gpu: Gpu, inventory: Inventory, place: Place) -> Attributes:
    """What a GPU and the MIG devices in it have alike."""
    versions = {
        "cudaComputeCapability": version(gpu.compute_capability),
        "driverVersion": version(inventory.driver_version),
        "cudaDriverVersion": version(inventory.cuda_version),
    }
    return {
        **_texts(
            productName=gpu.product,
            brand=gpu.brand,
            architecture=gpu.architecture,
            addressingMode=gpu.addressing_mode,
        ),
        **{name: value for name, value in versions.items() if value is not None},
        **_position(gpu.pci_address, place.pcie_root, place.numa_node),
    }


def _fabric_manager(gpu: Gpu) -> Attributes:
    """The module once more, under the name by which NVIDIA's driver has it (FabricManagerPartitioning)."""
    return {} if gpu.key.place is None else {"gpuModuleID": number(gpu.key.place.value.module_id)}


def _partner(nic: NicPartner | None) -> Attributes:
    """The GPU's own NIC, and what lies between the two."""
    if nic is None:
        return {}
    return _texts(nicPartner=nic.rdma, nicPartnerPCIBusID=nic.pci_address, nicPartnerClass=nic.path_class)


def _position(address: str, root: str | None, numa_node: int | None) -> Attributes:
    named = {f"{STANDARD}/pciBusID": address, f"{STANDARD}/pcieRoot": root}
    found = _texts(**named)
    return found if numa_node is None else {**found, f"{STANDARD}/numaNode": number(numa_node)}


def _texts(**values: str | None) -> Attributes:
    """Those that are known and fit: half a name would be a wrong one."""
    fit = {name: value for name, value in values.items() if value}
    return {name: text(value) for name, value in fit.items() if len(value.encode()) <= LONGEST_TEXT}


def _bytes(**values: int) -> dict[str, DeviceCapacity]:
    return {name: DeviceCapacity(value=str(value)) for name, value in values.items()}


def _mig_capacity(mig: Mig) -> Mapping[str, DeviceCapacity]:
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


def _memory_slices(mig: Mig) -> Iterator[tuple[str, int]]:
    for index in range(mig.placement_start, mig.placement_start + mig.placement_size):
        yield f"memorySlice{index}", 1
