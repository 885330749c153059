"""One machine as its operating system can see it: NUMA nodes, PCIe ancestry, GPUs and NICs.

Sources differ in how much they reveal, so nearly everything may be absent, and what is present carries
its source. Absent means unknown, never a default.
"""

from enum import StrEnum

import msgspec

from rackloom.topology.facts import Fact, Source


class PathClass(StrEnum):
    """What lies between a GPU and a NIC, in nvidia-smi's letters, nearest first."""

    PIX = "PIX"
    """A common PCIe bridge, and at most one more on either side."""
    PXB = "PXB"
    """A common PCIe bridge, and several more."""
    PHB = "PHB"
    """The host bridge of a common root."""
    NODE = "NODE"
    """Several host bridges of one NUMA node."""
    SYS = "SYS"
    """The link between NUMA nodes."""
    UNKNOWN = "UNKNOWN"
    """Ours: nothing that is known decides it."""


class PciePath(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ancestry of a PCI function, from the root complex down, without the function itself."""

    root: str
    """`pciDDDD:BB`, the first component below /sys/devices (resource.kubernetes.io/pcieRoot)."""
    bridges: tuple[str, ...] | None
    """Addresses of the bridges and switch ports below the root; None when only the root is known."""
    source: Source


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU of a machine. `index` is its position in the profile, not the CUDA order."""

    index: int
    product: str | None = None
    """As the source prints it; drivers and the PCI ID list word it differently."""
    pci_address: str | None = None
    """Lower-case `dddd:bb:dd.f`."""
    pci_id: str | None = None
    """`vendor:device` in lower-case hex, e.g. `10de:2330`."""
    uuid: str | None = None
    memory_mib: int | None = None
    numa_node: Fact[int] | None = None
    pcie: PciePath | None = None
    vendor_switch: Fact[str] | None = None
    """PCIe switch that a vendor topology file names where the guest's own tree hides it."""
    driver_version: str | None = None


class Nic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A NIC or RDMA device of a machine."""

    index: int
    pci_address: str | None = None
    pci_id: str | None = None
    if_name: str | None = None
    rdma_device: str | None = None
    model: str | None = None
    line_rate_gbps: int | None = None
    numa_node: Fact[int] | None = None
    pcie: PciePath | None = None
    vendor_switch: Fact[str] | None = None
    excluded: str | None = None
    """Why the NIC must not carry tenant data (the node's own network, NVLink management); None: it may."""


class Interface(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An interface of a running machine that belongs to no NIC: virtual, or of a device without PCI."""

    name: str
    kind: str = ""
    """What made it, as `ip -details link` says; empty where nothing tells."""
    excluded: str | None = None
    """Why it must not be given to a tenant; None: it may."""


class ClassRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of a GPU x NIC matrix that somebody else observed or declared."""

    gpu: int
    classes: tuple[PathClass, ...]
    """One per NIC index; of NICs past the end nothing is said."""


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine profile."""

    name: str
    note: str
    origin: tuple[str, ...]
    """Where the facts were found (public repository and path)."""
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    interfaces: tuple[Interface, ...] = ()
    """Of a machine that was discovered; a published one has none."""
    declared_classes: tuple[ClassRow, ...] = ()
    """A matrix the origin states (e.g. nvidia-smi output printed in its documentation)."""

    def __post_init__(self) -> None:
        """Refuse a machine whose device indices are not their positions: matrices rely on it."""
        for devices in (self.gpus, self.nics):
            if [device.index for device in devices] != list(range(len(devices))):
                raise ValueError(f"{self.name}: the index of a device is its position, counted from 0")


def numa_of(device: Gpu | Nic) -> int | None:
    """NUMA node of a device. The kernel's -1 (virtual machines, single-node firmware) means not known."""
    node = device.numa_node
    return None if node is None or node.value < 0 else node.value
