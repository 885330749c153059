"""A machine: what its kernel and drivers report, and the profile that is derived from it.

`Machine` is the profile: GPUs and NICs with PCI path, NUMA node and identifiers, virtual interfaces, and
an optional GPU x NIC matrix that the origin states. Nearly every field may be absent, because sources
differ in how much they reveal. Absent means unknown, never a default, and each placement fact carries its
source. The index of a device is its position. The constructor refuses any other, because matrices rely on
it.

`PathClass` uses the letters of `nvidia-smi topo`: PIX, PXB, PHB, NODE, SYS. The kernel's NUMA node -1
(virtual machines, single-node firmware) means that the node is not known.

`HostReading` holds the raw readings of one host (PCI functions, RDMA devices, interfaces, routes, GPUs of
the NVIDIA driver) before any conclusion is drawn. `topology.discovery` fills it. `topology.nics` and
the profile builder interpret it.
"""

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from rackloom.topology.join_key import Fact, Source


class PathClass(StrEnum):
    """The path between a GPU and a NIC, in nvidia-smi's letters, nearest first."""

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
    """An addition of Rackloom: no known fact decides the class."""


class PciePath(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Ancestry of a PCI function, from the root complex down, without the function itself."""

    root: str
    """`pciDDDD:BB`, the first component below /sys/devices (resource.kubernetes.io/pcieRoot)."""
    bridges: tuple[str, ...] | None
    """Addresses of the bridges and switch ports below the root. None if only the root is known."""
    source: Source


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU of a machine. `index` is its position in the profile, not the CUDA order."""

    index: int
    product: str | None = None
    """As the source prints it. Drivers and the PCI ID list word it differently."""
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
    subfunction: str | None = None
    """The PCI function and the number of a subfunction: `0000:08:00.0/sf88`. It has no `pci_address`."""
    pci_id: str | None = None
    if_name: str | None = None
    rdma_device: str | None = None
    rdma_ports: tuple[int, ...] = ()
    """Numbers of the ports that carry its data, if not all ports of the RDMA device do."""
    model: str | None = None
    line_rate_gbps: int | None = None
    numa_node: Fact[int] | None = None
    pcie: PciePath | None = None
    vendor_switch: Fact[str] | None = None
    excluded: str | None = None
    """The reason to carry no tenant data (the node's own network, NVLink management), or None."""


class Interface(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An interface of a running machine that belongs to no NIC: virtual, or of a device without PCI."""

    name: str
    kind: str = ""
    """Its type, as `ip -details link` prints it. Empty if it is not known."""
    excluded: str | None = None
    """The reason to give it to no tenant, or None."""


class ClassRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of a GPU x NIC matrix that was observed elsewhere or declared."""

    gpu: int
    classes: tuple[PathClass, ...]
    """One per NIC index. NICs past the end are not covered."""


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine profile."""

    name: str
    note: str
    origin: tuple[str, ...]
    """The origin of the facts (public repository and path)."""
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    interfaces: tuple[Interface, ...] = ()
    """Of a machine that was discovered. A published one has none."""
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


# Raw readings of one host, before anything is concluded from them.


_PASSTHROUGH_DRIVERS = frozenset({"vfio-pci", "uio_pci_generic", "igb_uio", "pci-stub"})


@dataclass(frozen=True, slots=True)
class PciFunction:
    """One PCI function.

    `class_code` has 24 bits: class, subclass, interface. A `numa_node` of -1 is kept as read.
    """

    address: str
    class_code: int
    vendor: int
    device: int
    numa_node: int | None
    driver: str | None
    path: PciePath | None
    """None if the hypervisor puts it below a bus without a PCI root (VMBus)."""
    virtual_function: bool = False
    vfs: int = 0
    """Virtual functions switched on."""
    most_vfs: int = 0

    @property
    def pci_id(self) -> str:
        """`vendor:device` in lower-case hex."""
        return f"{self.vendor:04x}:{self.device:04x}"

    @property
    def is_passed_through(self) -> bool:
        """Whether its driver only reserves it for another user (a virtual machine, DPDK)."""
        return self.driver in _PASSTHROUGH_DRIVERS


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA device. Counters are read elsewhere.

    States are the kernel's words in lower case: `state` is the link's (active, down, init, armed), `physical`
    the wire's (linkup, polling, disabled), or None if the device does not report it.
    """

    number: int
    state: str
    link_layer: str
    rate_gbps: float | None
    physical: str | None = None
    netdev: str | None = None
    """The interface of its first GID: on Ethernet, the interface of the port."""


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """One RDMA device and the PCI function it is on (None for a software device)."""

    name: str
    pci_address: str | None
    ports: tuple[RdmaPort, ...]
    uverbs: bool | None = None
    """Whether it has a uverbs device, by which programs reach it. None if the host shows no such class."""
    subfunction: str | None = None
    software: bool = False
    """Whether the kernel describes it as software (rxe, siw) on an interface."""


@dataclass(frozen=True, slots=True)
class NetDevice:
    """One network interface of the namespace that was read."""

    name: str
    pci_address: str | None
    mac: str | None
    mtu: int | None
    state: str | None
    speed_mbps: int | None
    """As negotiated. None if the driver does not know it (link down, virtual)."""
    virtual: bool
    master: str | None
    """The bond, bridge or VRF that it belongs to."""
    kind: str = ""
    """Its type, as `ip -details link` prints it (`bridge`, `vxlan`), or `usb` for devices on that bus. Empty
    for other hardware, and if it is not known."""
    lower: tuple[str, ...] = ()
    """The interfaces that its frames go through: the parent of a VLAN or of a partition (pkey), the members
    of a bond. A parent in another namespace has no name here, but it is listed."""
    addresses: tuple[str, ...] = ()
    """CIDRs. Empty if netlink was not read."""
    subfunction: str | None = None
    """The number of its subfunction (`sf88`), or the auxiliary device (`mlx5_core.sf.4`) if it shows none."""
    dev_port: int | None = None
    """Which port of its function, counted from 0."""
    phys_port_name: str | None = None
    """`p0` for a port of the card, `pf0vf3` for a representor of a virtual function (devlink's names)."""
    phys_switch_id: str | None = None
    """The switch of the card that it is a port of, in switchdev mode."""


@dataclass(frozen=True, slots=True)
class NetRoute:
    """One route of the host's main routing tables, in the order of the kernel."""

    destination: str
    """CIDR. `0.0.0.0/0` and `::/0` are the default routes."""
    interfaces: tuple[str, ...]
    """Several of a route with several next hops."""
    metric: int = 0
    """Of two routes to one destination the kernel takes the lower."""


@dataclass(frozen=True, slots=True)
class DriverGpu:
    """One GPU as NVIDIA's kernel driver lists it under /proc."""

    pci_address: str
    product: str | None
    uuid: str | None
    minor: int | None


@dataclass(frozen=True, slots=True)
class HostReading:
    """One machine, as read."""

    name: str
    pci: tuple[PciFunction, ...] = ()
    rdma: tuple[RdmaDevice, ...] = ()
    netdevs: tuple[NetDevice, ...] = ()
    gpus: tuple[DriverGpu, ...] = ()
    routes: tuple[NetRoute, ...] = ()
