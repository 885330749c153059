"""One machine as its operating system can see it: NUMA nodes, PCIe ancestry, GPUs and NICs.

Sources differ in how much they reveal, so nearly everything may be absent, and what is present carries
its source. Absent means unknown, never a default.
"""

import msgspec

from rackloom.topology.facts import Fact, Source


class PciePath(msgspec.Struct, frozen=True):
    """Ancestry of a PCI function, from the root complex down, without the function itself."""

    root: str
    """`pciDDDD:BB`, the first component below /sys/devices (resource.kubernetes.io/pcieRoot)."""
    bridges: tuple[str, ...] | None
    """Addresses of the bridges and switch ports below the root; None when only the root is known."""
    source: Source


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU of a machine. `index` is its position in the profile, not the CUDA order."""

    index: int
    product: str | None = None
    pci_address: str | None = None
    uuid: str | None = None
    memory_mib: int | None = None
    numa_node: Fact[int] | None = None
    pcie: PciePath | None = None
    vendor_switch: Fact[str] | None = None
    """PCIe switch that a vendor topology file names where the guest's own tree hides it."""
    driver_version: str | None = None


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    """A NIC or RDMA device of a machine."""

    index: int
    pci_address: str | None = None
    if_name: str | None = None
    rdma_device: str | None = None
    model: str | None = None
    line_rate_gbps: int | None = None
    numa_node: Fact[int] | None = None
    pcie: PciePath | None = None
    vendor_switch: Fact[str] | None = None
    excluded: str | None = None
    """Why the NIC must not carry tenant data (management, default route, NVLink management); None: it may."""


class ClassRow(msgspec.Struct, frozen=True):
    """One row of a GPU x NIC matrix that somebody else observed or declared."""

    gpu: int
    classes: tuple[str, ...]
    """nvidia-smi letters (PIX, PXB, PHB, NODE, SYS), one per NIC index."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine profile."""

    name: str
    note: str
    origin: tuple[str, ...]
    """Where the facts were found (public repository and path)."""
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    declared_classes: tuple[ClassRow, ...] = ()
    """A matrix the origin states (e.g. nvidia-smi output printed in its documentation)."""
