"""The GPUs of a node as values, and the sources that do not need NVIDIA's driver.

`GpuInventory` lists the GPUs that answer, with their MIG devices, join keys and fabric state. None always
means that the driver does not tell. `GpuSource` is the interface of whatever reads them: NVML (`nvml`) or
a declaration. Its methods block and belong in a thread.

`DeclaredGpus` reads a file in place of a driver, for rehearsals, simulated nodes and tests:

    {"driverVersion": "580.95.05", "cudaVersion": "13.0",
     "gpus": [{"minor": 0, "uuid": "GPU-...", "pciAddress": "0001:00:00.0",
               "product": "NVIDIA H100 80GB HBM3", "memoryBytes": 85899345920, "computeCapability": "9.0"}]}

docs/gpus.md names every field. The file is read again at each look: a number that appears among a GPU's
`xids` is an error that happens now, and a GPU that disappears is lost.

`read_vfio` finds GPUs that are bound to vfio-pci, so that NVIDIA's driver does not know them, in sysfs.
They are numbered by PCI address among all NVIDIA GPUs, so that names stay when another GPU is bound.
"""

import time
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import msgspec

from rackloom.claim.node.fabric import declared_key
from rackloom.claim.node.plugin import Health, NodeValue
from rackloom.errors import Refused, Retry
from rackloom.topology.discovery.discover import NVIDIA
from rackloom.topology.discovery.sysfs import PCI_DEVICES, Sysroot, read_pci
from rackloom.topology.join_key import GpuKey
from rackloom.topology.machine import PciFunction

# The values.


class RecoveryAction(IntEnum):
    """What the driver wants done before the GPU works again (NVML_GPU_RECOVERY_ACTION_*)."""

    NONE = 0
    GPU_RESET = 1
    NODE_REBOOT = 2
    DRAIN_P2P = 3
    DRAIN_AND_RESET = 4
    RECOVER_IMEX_DOMAIN = 5
    BUS_RESET = 6
    SYSTEM_REBOOT = 7


class MigDevice(NodeValue, frozen=True, kw_only=True):
    """One MIG device: a compute instance in a GPU instance."""

    uuid: str
    profile: str
    """As NVML prints it: `1g.10gb`, `1g.10gb+me`, `1c.2g.20gb`."""
    gpu_instance: int
    compute_instance: int
    profile_id: int
    """Of the GPU instance."""
    placement_start: int
    """First memory slice."""
    placement_size: int
    memory_bytes: int
    multiprocessors: int = 0
    copy_engines: int = 0
    decoders: int = 0
    encoders: int = 0
    jpeg_engines: int = 0
    ofa_engines: int = 0


class NodeGpu(NodeValue, frozen=True, kw_only=True):
    """One GPU. None is what the driver does not tell."""

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
    key: GpuKey = GpuKey()
    clique: str = ""
    """`<clusterUUID>.<cliqueId>`, or nothing for a GPU without an NVLink fabric beyond its machine."""
    tray: int | None = None
    recovery: RecoveryAction | None = None
    fabric_health: Health = Health.UNKNOWN
    fabric_message: str = ""


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


class VfioGpu(NodeValue, frozen=True, kw_only=True):
    """A GPU that is bound to vfio-pci, so that NVIDIA's driver does not know it."""

    index: int
    """Place among all GPUs of NVIDIA by PCI address, so that names stay when another GPU is bound."""
    pci_address: str
    vendor_id: str
    device_id: str
    """Both as `0x10de`."""
    group: int
    addressable_memory: int
    """Bytes of its largest memory window."""
    pcie_root: str | None = None
    numa_node: int | None = None
    iommufd: str | None = None
    """Name of its device below /dev/vfio/devices; None without IOMMUFD."""


# The interface of a source.


class GpuSource(Protocol):
    """The GPUs of this node. Every method blocks, and belongs in a thread."""

    def read(self) -> GpuInventory:
        """All GPUs that answer. Raises `Retry` when that is unknown, `Refused` without a driver."""
        ...

    def wait(self, seconds: float) -> tuple[XidError, ...]:
        """Errors that happen within `seconds`; returns at the first. Raises `Retry`."""
        ...

    def unmonitored(self) -> frozenset[str]:
        """UUIDs of GPUs whose errors cannot be listened to."""
        ...

    def close(self) -> None:
        """Let go of the driver."""
        ...


# A file in place of a driver.


_RECOVERIES = {one.name.lower().replace("_", "-"): one for one in RecoveryAction}


class _DeclaredValue(
    msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True, omit_defaults=True
):
    """Base of what the file holds."""


class DeclaredMig(_DeclaredValue, frozen=True, kw_only=True):
    """A MIG device, as `inventory.Mig`."""

    uuid: str
    profile: str
    gpu_instance: int
    compute_instance: int = 0
    profile_id: int
    placement_start: int
    placement_size: int = 1
    memory_bytes: int
    multiprocessors: int = 0
    copy_engines: int = 0
    decoders: int = 0
    encoders: int = 0
    jpeg_engines: int = 0
    ofa_engines: int = 0


class DeclaredGpu(_DeclaredValue, frozen=True, kw_only=True):
    """A GPU, as `inventory.Gpu`."""

    minor: int
    uuid: str
    pci_address: str
    product: str
    memory_bytes: int
    brand: str | None = None
    architecture: str | None = None
    compute_capability: str | None = None
    addressing_mode: str | None = None
    mig_mode: bool = False
    migs: tuple[DeclaredMig, ...] = ()
    clique: str = ""
    chassis_serial: str | None = None
    slot: int | None = None
    tray: int | None = None
    module_id: int | None = None
    fabric_guid: str | None = None
    fabric_health: Health = Health.UNKNOWN
    recovery: str | None = None
    xids: tuple[int, ...] = ()


class DeclaredInventory(_DeclaredValue, frozen=True, kw_only=True):
    """The whole file."""

    gpus: tuple[DeclaredGpu, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None


class DeclaredGpus:
    """A file in the place of NVIDIA's driver."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._told: frozenset[XidError] | None = None

    def read(self) -> GpuInventory:
        """What the file says now. Raises `Retry` naming what is wrong with it: it may be in the making."""
        file = self._file()
        try:
            return GpuInventory(
                gpus=tuple(_declared_gpu(one) for one in file.gpus),
                driver_version=file.driver_version,
                cuda_version=file.cuda_version,
            )
        except (ValueError, KeyError) as error:
            raise Retry(f"cannot use inventory {self._path}: {error!r}", after=1.0) from error

    def wait(self, seconds: float) -> tuple[XidError, ...]:
        """Errors that the file tells of for the first time, after `seconds`."""
        time.sleep(seconds)
        told = frozenset(XidError(uuid=gpu.uuid, number=xid) for gpu in self._file().gpus for xid in gpu.xids)
        new = told - (self._told or frozenset())
        self._told = told
        return tuple(sorted(new, key=lambda xid: (xid.uuid, xid.number)))

    def unmonitored(self) -> frozenset[str]:
        """Every GPU of the file can be listened to."""
        return frozenset()

    def close(self) -> None:
        """Nothing is held."""

    def _file(self) -> DeclaredInventory:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=DeclaredInventory)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Retry(f"cannot use inventory {self._path}: {error}", after=1.0) from error


def check_declared_gpus(path: Path) -> None:
    """Raise `Refused` for a file that cannot be used as it is."""
    try:
        DeclaredGpus(path).read()
    except Retry as retry:
        raise Refused(retry.reason, nearest_fix="docs/gpus.md shows its format") from retry


def _declared_gpu(declared_gpu: DeclaredGpu) -> NodeGpu:
    plain = {
        name: getattr(declared_gpu, name) for name in NodeGpu.__struct_fields__ if hasattr(declared_gpu, name)
    }
    told = {
        "migs": tuple(MigDevice(**msgspec.structs.asdict(mig)) for mig in declared_gpu.migs),
        "recovery": None if declared_gpu.recovery is None else _RECOVERIES[declared_gpu.recovery],
        "key": declared_key(
            uuid=declared_gpu.uuid,
            pci_address=declared_gpu.pci_address,
            chassis_serial=declared_gpu.chassis_serial,
            slot=declared_gpu.slot,
            module_id=declared_gpu.module_id,
            fabric_guid=declared_gpu.fabric_guid,
        ),
        "fabric_message": "declared",
    }
    return NodeGpu(**{**plain, **told})


# GPUs that are bound to vfio-pci.


def read_vfio(sysroot: Sysroot) -> tuple[VfioGpu, ...]:
    """NVIDIA GPUs that wait for a virtual machine, by PCI address."""
    gpus = [one for one in read_pci(sysroot) if _is_gpu(one)]
    found = (_vfio_gpu(sysroot, index, one) for index, one in enumerate(gpus) if one.driver == VFIO_DRIVER)
    return tuple(one for one in found if one is not None)


VFIO_DRIVER = "vfio-pci"
_DISPLAY = 0x03
_MEMORY_WINDOW = 0x200
"""Flag of a resource that is memory (IORESOURCE_MEM); ports have another."""


def _is_gpu(function: PciFunction) -> bool:
    return function.vendor == NVIDIA and function.class_code >> 16 == _DISPLAY


def _vfio_gpu(sysroot: Sysroot, index: int, function: PciFunction) -> VfioGpu | None:
    at = f"{PCI_DEVICES}/{function.address}"
    group = sysroot.real(f"{at}/iommu_group")
    if group is None or not group.name.isdecimal():
        return None
    numa = function.numa_node
    return VfioGpu(
        index=index,
        pci_address=function.address,
        vendor_id=f"0x{function.vendor:04x}",
        device_id=f"0x{function.device:04x}",
        group=int(group.name),
        addressable_memory=max(_memory_windows(sysroot.text(f"{at}/resource") or ""), default=0),
        pcie_root=None if function.path is None else function.path.root,
        numa_node=numa if numa is not None and numa >= 0 else None,
        iommufd=next(iter(sysroot.names(f"{at}/vfio-dev")), None),
    )


def _memory_windows(resource: str) -> Iterator[int]:
    """Sizes of the memory windows of a `resource` file: first, last and flags of each, in hex."""
    for line in resource.splitlines():
        try:
            first, last, flags = (int(word, 16) for word in line.split())
        except ValueError:
            continue
        if flags & _MEMORY_WINDOW and last > first:
            yield last - first + 1
