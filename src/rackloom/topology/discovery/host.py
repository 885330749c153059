"""What a kernel and its drivers say of a machine, before anything is concluded from it."""

from dataclasses import dataclass

from rackloom.topology.machine import PciePath

_PASSED_ON = frozenset({"vfio-pci", "uio_pci_generic", "igb_uio", "pci-stub"})


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
    """None where the hypervisor hangs it below something that is no PCI root (VMBus)."""
    virtual_function: bool = False
    vfs: int = 0
    """Virtual functions switched on."""
    most_vfs: int = 0

    @property
    def pci_id(self) -> str:
        """`vendor:device` in lower-case hex."""
        return f"{self.vendor:04x}:{self.device:04x}"

    @property
    def is_lent(self) -> bool:
        """Whether its driver only holds it for somebody else (a virtual machine, DPDK)."""
        return self.driver in _PASSED_ON


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port of an RDMA device; counters are read elsewhere.

    States are the kernel's words in lower case: `state` is the link's (active, down, init, armed), `physical`
    the wire's (linkup, polling, disabled), None where the device does not tell.
    """

    number: int
    state: str
    link_layer: str
    rate_gbps: float | None
    physical: str | None = None


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """One RDMA device and the PCI function it is on (None for a software device)."""

    name: str
    pci_address: str | None
    ports: tuple[RdmaPort, ...]


@dataclass(frozen=True, slots=True)
class NetDevice:
    """One network interface of the namespace that was read."""

    name: str
    pci_address: str | None
    mac: str | None
    mtu: int | None
    state: str | None
    speed_mbps: int | None
    """As negotiated; None where the driver does not know (link down, virtual)."""
    virtual: bool
    master: str | None
    """The bond, bridge or VRF that it belongs to."""
    kind: str = ""
    """What made it, as `ip -details link` says (`bridge`, `vxlan`); `usb` for what hangs on that bus; empty
    for other hardware, and where nothing tells."""
    lower: tuple[str, ...] = ()
    """The interfaces that its frames go through: the parent of a VLAN, the members of a bond."""
    addresses: tuple[str, ...] = ()
    """CIDRs; only where netlink was asked."""


@dataclass(frozen=True, slots=True)
class NetRoute:
    """One route of the host's main routing tables, in the order in which the kernel tells them."""

    destination: str
    """CIDR; `0.0.0.0/0` and `::/0` are the default routes."""
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
class Host:
    """One machine, as read."""

    name: str
    pci: tuple[PciFunction, ...] = ()
    rdma: tuple[RdmaDevice, ...] = ()
    netdevs: tuple[NetDevice, ...] = ()
    gpus: tuple[DriverGpu, ...] = ()
    routes: tuple[NetRoute, ...] = ()
