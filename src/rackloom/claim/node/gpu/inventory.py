"""What a driver, or a declaration in its place, says of the GPUs of a node."""

from enum import IntEnum

from rackloom.claim.node.values import Health, Value
from rackloom.topology.identity import GpuKey


class Recovery(IntEnum):
    """What the driver wants done before the GPU works again (NVML_GPU_RECOVERY_ACTION_*)."""

    NONE = 0
    GPU_RESET = 1
    NODE_REBOOT = 2
    DRAIN_P2P = 3
    DRAIN_AND_RESET = 4
    RECOVER_IMEX_DOMAIN = 5
    BUS_RESET = 6
    SYSTEM_REBOOT = 7


class Mig(Value, frozen=True, kw_only=True):
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


class Gpu(Value, frozen=True, kw_only=True):
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
    migs: tuple[Mig, ...] = ()
    key: GpuKey = GpuKey()
    clique: str = ""
    """`<clusterUUID>.<cliqueId>`, or nothing for a GPU without an NVLink fabric beyond its machine."""
    tray: int | None = None
    recovery: Recovery | None = None
    fabric_health: Health = Health.UNKNOWN
    fabric_message: str = ""


class Inventory(Value, frozen=True, kw_only=True):
    """All GPUs that answer."""

    gpus: tuple[Gpu, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    """Newest CUDA that the driver runs: `13.0`."""


class Xid(Value, frozen=True, kw_only=True):
    """An error that the driver reports of one GPU."""

    uuid: str
    number: int


class Vfio(Value, frozen=True, kw_only=True):
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
