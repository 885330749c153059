"""The GPUs of a node: their values, the source that needs no driver, and the devices that they become.

`GpuInventory` lists the GPUs that answer, with their MIG devices, join keys and fabric state. None always
means that the driver does not report the value. `GpuSource` is the interface of the sources: NVML
(`nvml`) or a declaration. Its methods block and belong in a thread.

`DeclaredGpus` reads a file in place of a driver, for rehearsals, simulated nodes and tests:

    {"driverVersion": "580.95.05", "cudaVersion": "13.0",
     "gpus": [{"minor": 0, "uuid": "GPU-...", "pciAddress": "0001:00:00.0",
               "product": "NVIDIA H100 80GB HBM3", "memoryBytes": 85899345920, "computeCapability": "9.0"}]}

docs/gpus.md names every field. The file is read again each time: a number that appears among a GPU's
`xids` is an error that happens now, and a GPU that disappears is lost.

Names, attributes and capacities of the devices are those of NVIDIA's DRA driver for GPUs 0.5. Clique,
join key and NIC partner are additions. `gpu_locations` takes the PCIe root, the NUMA node and
the nearest NIC of each GPU from the machine's topology. The NIC partner is the NIC to claim together
with the GPU. To add an attribute, add it to the function of its kind of device. A value from sysfs gets
there by `PciFunction` (`topology.discovery.sysfs`), `Gpu` (`topology.machine`) and `GpuLocation`.

`ShareSettings` lets several claims have one device by the consumable capacity of Kubernetes 1.34 and
later. In mode `memory` a claim that names no memory takes all of it. In mode `unlimited` it takes none. A
number limits the claims. The scheduler keeps the account: nothing keeps a program from using more memory.
Modes and defaults are those of NVIDIA's DRA driver (ConsumableShares).

The checkpoint records which GPUs and MIG devices a claim has, before it gets them (`partitions_of`,
`passed_through`).
"""

import re
import time
from collections.abc import Collection, Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import msgspec

from rackloom.claim.node.plugin import CheckpointEntry, Health, NodeValue, PrepareState
from rackloom.core.allocate.attributes import (
    STANDARD_DOMAIN,
    TRAY,
    AttributeValues,
    clique_attributes,
    device_attributes,
    gpu_attributes,
)
from rackloom.core.allocate.objects import (
    CapacityRange,
    CapacityRequestPolicy,
    Device,
    DeviceAttribute,
    DeviceCapacity,
)
from rackloom.errors import Refused, Retry, Undecodable
from rackloom.runtime.foreign_text import decode_json
from rackloom.topology.affinity import Cell, own_nics
from rackloom.topology.join_key import GpuKey, declared_key
from rackloom.topology.machine import Machine, numa_of

# The values.


class RecoveryAction(IntEnum):
    """The action that the driver requires before the GPU works again (NVML_GPU_RECOVERY_ACTION_*)."""

    NONE = 0
    GPU_RESET = 1
    NODE_REBOOT = 2
    DRAIN_P2P = 3
    DRAIN_AND_RESET = 4
    RECOVER_IMEX_DOMAIN = 5
    BUS_RESET = 6
    SYSTEM_REBOOT = 7


class MigDevice(
    NodeValue, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True, omit_defaults=True
):
    """One MIG device: a compute instance in a GPU instance. Also its form in an inventory file."""

    uuid: str
    profile: str
    """As NVML prints it: `1g.10gb`, `1g.10gb+me`, `1c.2g.20gb`."""
    gpu_instance: int
    compute_instance: int = 0
    profile_id: int
    """Of the GPU instance."""
    placement_start: int
    """First memory slice."""
    placement_size: int = 1
    memory_bytes: int
    multiprocessors: int = 0
    copy_engines: int = 0
    decoders: int = 0
    encoders: int = 0
    jpeg_engines: int = 0
    ofa_engines: int = 0


class MigPartition(NodeValue, frozen=True, kw_only=True):
    """A MIG device that could be made: a profile at one of its places. JSON in the checkpoint.

    GPU, profile and place identify the device while it exists: NVML gives its instances other numbers and
    another UUID each time.
    """

    gpu: str
    """UUID of the GPU."""
    profile: str
    """As `MigDevice.profile`."""
    profile_id: int
    """Of the GPU instance."""
    placement_start: int
    """First memory slice."""
    placement_size: int
    compute_slices: int
    """Of the GPU instance. Its only compute instance has all of them."""
    memory_bytes: int
    multiprocessors: int = 0
    copy_engines: int = 0
    decoders: int = 0
    encoders: int = 0
    jpeg_engines: int = 0
    ofa_engines: int = 0

    def is_place_of(self, mig: MigDevice) -> bool:
        """Whether a MIG device of the same GPU is the one that is made here."""
        return (self.profile_id, self.placement_start) == (mig.profile_id, mig.placement_start)

    def overlaps(self, other: "MigPartition") -> bool:
        """Whether both need a memory slice of one GPU."""
        first, last = self.placement_start, self.placement_start + self.placement_size
        starts_before = other.placement_start < last
        return (
            self.gpu == other.gpu and starts_before and first < other.placement_start + other.placement_size
        )


class GpuFacts(NodeValue, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The values of a GPU that both a driver and an inventory file can report. None means not reported."""

    minor: int
    """N of /dev/nvidiaN."""
    uuid: str
    pci_address: str
    """Lower-case `dddd:bb:dd.f`."""
    product: str
    memory_bytes: int
    brand: str | None = None
    architecture: str | None = None
    compute_capability: str | None = None
    """`9.0`."""
    addressing_mode: str | None = None
    mig_mode: bool = False
    migs: tuple[MigDevice, ...] = ()
    clique: str = ""
    """`<clusterUUID>.<cliqueId>`, or nothing for a GPU without an NVLink fabric beyond its machine."""
    tray: int | None = None
    fabric_health: Health = Health.UNKNOWN


class NodeGpu(GpuFacts, frozen=True, kw_only=True):
    """One GPU of the node."""

    key: GpuKey = GpuKey()
    recovery: RecoveryAction | None = None
    fabric_message: str = ""
    fabric_joining: bool = False
    """Whether it still registers with its NVLink fabric."""
    partitions: tuple[MigPartition, ...] = ()
    """MIG devices that may be made on it. Empty if that is switched off, or impossible on this GPU."""
    mig_switchable: bool = False
    """Whether MIG mode is switched without a reset of the GPU (Hopper and later)."""

    @property
    def is_partitionable(self) -> bool:
        """Whether MIG devices are made on it on demand: only if others made none (`migs`)."""
        return bool(self.partitions) and not self.migs

    @property
    def is_published_whole(self) -> bool:
        """A GPU in MIG mode is not, unless it leaves the mode when a claim needs the whole."""
        return not self.mig_mode or (self.mig_switchable and self.is_partitionable)


class GpuInventory(NodeValue, frozen=True, kw_only=True):
    """All GPUs that answer."""

    gpus: tuple[NodeGpu, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    """Newest CUDA that the driver runs: `13.0`."""


class XidError(NodeValue, frozen=True, kw_only=True):
    """An error that the driver reports of one GPU."""

    uuid: str
    number: int


# The interface of a source.


class GpuSource(Protocol):
    """The GPUs of this node. Every method blocks, and belongs in a thread."""

    def read(self) -> GpuInventory:
        """All GPUs that answer. Raises `Retry` when that is unknown, `Refused` without a driver."""

    def wait(self, seconds: float) -> tuple[XidError, ...]:
        """Errors that happen within `seconds`. Returns at the first. Raises `Retry`."""

    def unmonitored(self) -> frozenset[str]:
        """UUIDs of GPUs that do not report their errors."""

    def close(self) -> None:
        """Release the driver."""


class PlaceTaken(Retry):
    """A MIG device that another program made is in the way of the new one."""


class GpuPartitioner(Protocol):
    """Makes MIG devices. Every method blocks, and belongs in a thread.

    Each can be repeated: its result does not depend on the remains of an earlier attempt.
    """

    def make(self, partition: MigPartition, *, began: bool) -> MigDevice:
        """Make a MIG device, in MIG mode. Raises `Retry` or `Refused`.

        A device at its place is completed if an attempt for the claim `began` before. Otherwise the device
        belongs to another program: `PlaceTaken`.
        """

    def destroy(self, partition: MigPartition) -> None:
        """Destroy a MIG device if it is there, and end MIG mode after the last. Raises `Retry`."""

    def leave_mig_mode(self, uuid: str) -> None:
        """Take a whole GPU out of MIG mode. Raises `Retry` while it has MIG devices or is in use."""


# A file in place of a driver.


_RECOVERIES = {action.name.lower().replace("_", "-"): action for action in RecoveryAction}


class DeclaredGpu(GpuFacts, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU of an inventory file."""

    chassis_serial: str | None = None
    slot: int | None = None
    module_id: int | None = None
    fabric_guid: str | None = None
    recovery: str | None = None
    xids: tuple[int, ...] = ()


class DeclaredInventory(
    NodeValue, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True, omit_defaults=True
):
    """An inventory file."""

    gpus: tuple[DeclaredGpu, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None


class DeclaredGpus:
    """A file in the place of NVIDIA's driver."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reported: frozenset[XidError] = frozenset()

    def read(self) -> GpuInventory:
        """The GPUs that the file declares now. Raises `Retry` with the fault: a writer may be at work."""
        file = self._file()
        try:
            return GpuInventory(
                gpus=tuple(map(_declared_gpu, file.gpus)),
                driver_version=file.driver_version,
                cuda_version=file.cuda_version,
            )
        except (ValueError, KeyError) as error:
            raise Retry(f"cannot use inventory {self._path}: {error!r}", after=1.0) from error

    def wait(self, seconds: float) -> tuple[XidError, ...]:
        """Errors that are new in the file after `seconds`."""
        time.sleep(seconds)
        xids = frozenset(XidError(uuid=gpu.uuid, number=xid) for gpu in self._file().gpus for xid in gpu.xids)
        new = xids - self._reported
        self._reported = xids
        return tuple(sorted(new, key=lambda xid: (xid.uuid, xid.number)))

    def unmonitored(self) -> frozenset[str]:
        """Every GPU of the file can be listened to."""
        return frozenset()

    def close(self) -> None:
        """Nothing is held."""

    def _file(self) -> DeclaredInventory:
        try:
            return decode_json(self._path.read_bytes(), self._path.name, DeclaredInventory)
        except (OSError, Undecodable) as error:
            raise Retry(f"cannot use inventory {self._path}: {error}", after=1.0) from error


def check_declared_gpus(path: Path) -> None:
    """Raise `Refused` if the file cannot be used as it is."""
    try:
        DeclaredGpus(path).read()
    except Retry as retry:
        raise Refused(retry.reason, nearest_fix="docs/gpus.md shows its format") from retry


def _declared_gpu(gpu: DeclaredGpu) -> NodeGpu:
    return NodeGpu(
        **{name: getattr(gpu, name) for name in GpuFacts.__struct_fields__},
        recovery=None if gpu.recovery is None else _RECOVERIES[gpu.recovery],
        key=declared_key(
            uuid=gpu.uuid,
            pci_address=gpu.pci_address,
            chassis_serial=gpu.chassis_serial,
            slot=gpu.slot,
            module_id=gpu.module_id,
            fabric_guid=gpu.fabric_guid,
        ),
        fabric_message="declared",
    )


# The place of a GPU in its machine, and its NIC.


class NicPartner(NodeValue, frozen=True, kw_only=True):
    """The NIC of a GPU. `path_class` is the path between them, in nvidia-smi's notation."""

    rdma: str | None
    pci_address: str | None
    path_class: str


class GpuLocation(NodeValue, frozen=True, kw_only=True):
    """The place of a GPU. None means unknown."""

    pcie_root: str | None = None
    numa_node: int | None = None
    nic: NicPartner | None = None


UNKNOWN_LOCATION = GpuLocation()


def gpu_locations(machine: Machine) -> Mapping[str, GpuLocation]:
    """The location of each GPU, by PCI address."""
    own = own_nics(machine)
    return {
        gpu.pci_address: GpuLocation(
            pcie_root=None if gpu.pcie is None else gpu.pcie.root,
            numa_node=numa_of(gpu),
            nic=_nic_partner(machine, own.get(gpu.index)),
        )
        for gpu in machine.gpus
        if gpu.pci_address is not None
    }


def _nic_partner(machine: Machine, cell: Cell | None) -> NicPartner | None:
    if cell is None:
        return None
    nic = machine.nics[cell.nic]
    rdma = nic.rdma_device or nic.if_name
    return NicPartner(rdma=rdma, pci_address=nic.pci_address, path_class=cell.path_class.value)


# Names and attributes.


_NUMBERS = re.compile(r"\d+(?:\.\d+){0,2}")
_UNFIT = re.compile(r"[^a-z0-9]+")


def gpu_name(gpu: NodeGpu) -> str:
    """Name of a whole GPU's device."""
    return f"gpu-{gpu.minor}"


def mig_name(gpu: NodeGpu, mig: MigDevice) -> str:
    """Name of a MIG device. The compute instance distinguishes several devices in one GPU instance."""
    name = mig_device_name(gpu.minor, mig.profile, mig.profile_id, mig.placement_start)
    return f"{name}-{mig.compute_instance}" if "c." in mig.profile else name


def mig_device_name(minor: int, profile: str, profile_id: int, placement_start: int) -> str:
    """Name of the MIG device that has a GPU instance alone."""
    return f"gpu-{minor}-mig-{_UNFIT.sub('', profile.lower())}-{profile_id}-{placement_start}"


def gpu_device(gpu: NodeGpu, inventory: GpuInventory, location: GpuLocation) -> Device:
    """A whole GPU."""
    nic = location.nic or NicPartner(rdma=None, pci_address=None, path_class="")
    attributes = device_attributes(
        {
            "type": "gpu",
            **_common_attributes(gpu, inventory, location),
            "nicPartner": nic.rdma,
            "nicPartnerPCIBusID": nic.pci_address,
            "nicPartnerClass": nic.path_class,
            **clique_attributes(gpu.clique),
            **gpu_attributes(gpu.key),
            "uuid": gpu.uuid,
            # The module again, under the name of NVIDIA's driver (FabricManagerPartitioning).
            "gpuModuleID": None if gpu.key.place is None else gpu.key.place.value.module_id,
            TRAY: gpu.tray,
        }
    )
    return Device(name=gpu_name(gpu), attributes=attributes, capacity=quantities(memory=gpu.memory_bytes))


def mig_device(gpu: NodeGpu, mig: MigDevice, inventory: GpuInventory, location: GpuLocation) -> Device:
    """A MIG device, with the attributes that it inherits from its GPU."""
    slices = range(mig.placement_start, mig.placement_start + mig.placement_size)
    capacity = quantities(
        memory=mig.memory_bytes,
        multiprocessors=mig.multiprocessors,
        copyEngines=mig.copy_engines,
        decoders=mig.decoders,
        encoders=mig.encoders,
        jpegEngines=mig.jpeg_engines,
        ofaEngines=mig.ofa_engines,
        **{f"memorySlice{index}": 1 for index in slices},
    )
    attributes = mig_attributes(gpu, mig.profile, inventory, location, uuid=mig.uuid)
    return Device(name=mig_name(gpu, mig), attributes=attributes, capacity=capacity)


def mig_attributes(
    gpu: NodeGpu, profile: str, inventory: GpuInventory, location: GpuLocation, uuid: str | None = None
) -> dict[str, DeviceAttribute]:
    """Of a MIG device. One that does not exist yet has no UUID."""
    common = _common_attributes(gpu, inventory, location)
    own = {"uuid": uuid, "parentUUID": gpu.uuid, "profile": profile}
    return device_attributes({"type": "mig", **common, **own})


def semantic_version(written: str | None) -> DeviceAttribute | None:
    """A version as semantic versioning wants it: three numbers without leading zeros."""
    found = _NUMBERS.match(written or "")
    if found is None:
        return None
    numbers = [str(int(part)) for part in found[0].split(".")]
    return DeviceAttribute(version=".".join((*numbers, "0", "0")[:3]))


def _common_attributes(gpu: NodeGpu, inventory: GpuInventory, location: GpuLocation) -> AttributeValues:
    """The attributes that a GPU and the MIG devices in it have in common."""
    return {
        "productName": gpu.product,
        "brand": gpu.brand,
        "architecture": gpu.architecture,
        "addressingMode": gpu.addressing_mode,
        "cudaComputeCapability": semantic_version(gpu.compute_capability),
        "driverVersion": semantic_version(inventory.driver_version),
        "cudaDriverVersion": semantic_version(inventory.cuda_version),
        **pci_attributes(gpu.pci_address, location.pcie_root, location.numa_node),
    }


def pci_attributes(address: str, root: str | None, numa_node: int | None) -> AttributeValues:
    """The place of the function, by Kubernetes' own names."""
    return {
        f"{STANDARD_DOMAIN}/pciBusID": address,
        f"{STANDARD_DOMAIN}/pcieRoot": root,
        f"{STANDARD_DOMAIN}/numaNode": numa_node,
    }


def quantities(**values: int) -> dict[str, DeviceCapacity]:
    """Capacities of whole numbers."""
    return {name: DeviceCapacity(value=str(value)) for name, value in values.items()}


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
        size = int(str(memory.value))
        # A claim that names no memory takes all of it only if memory is the shared capacity.
        least, default = (MEBIBYTE, size // MEBIBYTE * MEBIBYTE) if self.mode == SHARES_MEMORY else (0, 0)
        capacity = {**device.capacity, _MEMORY: _shared_capacity(size, default, least, MEBIBYTE)}
        if self.count is not None:
            capacity[_SHARES] = _shared_capacity(self.count, 1, 1, 1)
        return msgspec.structs.replace(device, capacity=capacity, allow_multiple_allocations=True)


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


def _shared_capacity(size: int, default: int, least: int, step: int) -> DeviceCapacity:
    steps = CapacityRange(min=str(least), step=str(step))
    return DeviceCapacity(
        value=str(size), request_policy=CapacityRequestPolicy(default=str(default), valid_range=steps)
    )


# GPUs that claims have, by the checkpoint.


PARTITIONS, UUIDS = "partitions", "uuids"
"""Keys of a checkpoint entry's record: the partitions of the claim, and the UUID of each of its devices."""
PASSED_THROUGH, PERSISTENT = "passedThrough", "persistent"
"""Keys, too: PCI addresses of the GPUs that the claim has bound to vfio-pci, or may have, and of those that
get persistence mode back."""


def partitions_of(entry: CheckpointEntry) -> tuple[MigPartition, ...]:
    """The MIG devices that the claim has, or may have: they are recorded before they are made."""
    return msgspec.convert(entry.record.get(PARTITIONS, ()), tuple[MigPartition, ...])


def passed_through(entries: Collection[CheckpointEntry]) -> frozenset[str]:
    """PCI addresses of all GPUs that claims have bound, or may have: they are recorded before the binding."""
    return frozenset(address for entry in entries for address in entry.record.get(PASSED_THROUGH, ()))


def made_by_others(
    gpu_uuid: str, migs: Iterable[MigDevice], entries: Collection[CheckpointEntry]
) -> tuple[MigDevice, ...]:
    """The MIG devices of a GPU that no claim made: an entry goes only after its devices were destroyed."""
    made = [part for entry in entries for part in partitions_of(entry) if part.gpu == gpu_uuid]
    return tuple(mig for mig in migs if not any(part.is_place_of(mig) for part in made))


def held_uuids(entry: CheckpointEntry) -> frozenset[str]:
    """UUIDs of the GPUs and MIG devices that a prepared claim has, without those that it only observes."""
    known = entry.record.get(UUIDS, {})
    return frozenset(known.get(device.device, "") for device in entry.devices if not device.admin_access)


def has_another_claim(uid: str, wanted: MigPartition, entries: Iterable[CheckpointEntry]) -> bool:
    """Whether a claim besides `uid` has the same MIG device, or may have it soon.

    A claim that is being unprepared does not count: two of them would each leave the device to the other.
    """
    place = (wanted.gpu, wanted.profile_id, wanted.placement_start)
    return any(
        (part.gpu, part.profile_id, part.placement_start) == place
        for entry in entries
        if entry.ref.uid != uid and not entry.undoing
        for part in partitions_of(entry)
    )


def blocking_claim(
    uid: str, wanted: Collection[MigPartition], whole: Collection[str], entries: Iterable[CheckpointEntry]
) -> CheckpointEntry | None:
    """A prepared claim besides `uid` that has a part of the wanted partitions or `whole` GPUs.

    Two claims for one whole GPU are the same device to the scheduler, and do not matter here.
    """
    for entry in entries:
        if entry.ref.uid == uid or entry.state is not PrepareState.COMPLETED:
            continue
        parts, uuids = partitions_of(entry), held_uuids(entry)
        if any(part.gpu in uuids or any(part.overlaps(other) for other in parts) for part in wanted):
            return entry
        if any(part.gpu in whole for part in parts):
            return entry
    return None
