"""Discovery of one machine: read all sources, and fuse them into a machine profile.

`discover_machine` reads the kernel's files, NVML (only on this machine itself), and two optional files: a
NCCL topology file of the vendor and a declaration by the operator. `build_machine` then decides each fact. A
declaration wins, because a person wrote it since the machine was wrong. The kernel comes next. A vendor file
only fills in facts that the kernel hides. A NUMA node of -1 counts as hidden.

A GPU is a display or accelerator function of NVIDIA or AMD that is not bound to a passthrough driver, and
every GPU that the driver, NVML or the declaration lists. Devices are ordered by PCI address. NICs
without an address are last.

Raises Refused for a root without /sys, for an unreadable file, and for a declaration that names a device
that the machine does not have. NCCL files must be UTF-8, below 4 MiB and without a document type
declaration, because entity expansion can make a small XML file arbitrarily large.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec

from rackloom.errors import Refused, Undecodable
from rackloom.runtime.foreign_text import decode_json
from rackloom.topology.discovery.nvidia_driver import NvmlGpu, read_nvml
from rackloom.topology.discovery.sysfs import (
    OWN_ROOT,
    Sysroot,
    normal_pci_address,
    read_host,
    read_named_file,
)
from rackloom.topology.join_key import Fact, Source
from rackloom.topology.machine import (
    ClassRow,
    DriverGpu,
    Gpu,
    HostReading,
    Interface,
    Machine,
    Nic,
    PathClass,
    PciePath,
    PciFunction,
    RdmaDevice,
)
from rackloom.topology.nics import (
    Exclusion,
    NicCandidate,
    NicExclusions,
    excluded_interfaces,
    nic_candidates,
    owned_interfaces,
)

# Files beside the kernel: a vendor topology (NCCL XML) and a declaration (JSON).


MAX_NCCL_FILE_BYTES = 4 * 1024 * 1024
_NCCL_FIX = "give the file that NCCL_TOPO_FILE names"


class VendorTopology(msgspec.Struct, frozen=True):
    """Of a NCCL topology file: the PCIe switch above each device, and the NUMA node of its processor."""

    switches: Mapping[str, str] = {}
    numa_nodes: Mapping[str, int] = {}


class DeclaredDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The declared facts of one device. A field of None declares nothing."""

    product: str | None = None
    numa_node: int | None = None
    pcie_root: str | None = None
    bridges: tuple[str, ...] | None = None
    line_rate_gbps: int | None = None
    excluded: str | None = None

    @property
    def pcie(self) -> PciePath | None:
        """The declared ancestry."""
        if self.pcie_root is None:
            return None
        return PciePath(root=self.pcie_root, bridges=self.bridges, source=Source.DECLARED)


class Declaration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A declaration: devices by PCI address or name, and a matrix by the same names.

    A GPU that the kernel does not list (it has no driver yet) is added.
    """

    gpus: Mapping[str, DeclaredDevice] = {}
    nics: Mapping[str, DeclaredDevice] = {}
    classes: Mapping[str, Mapping[str, PathClass]] = {}


NOTHING_DECLARED = Declaration()


def read_declaration(content: bytes, name: str) -> Declaration:
    """Read a declaration from JSON. Raises Refused, which names the field."""
    try:
        return decode_json(content, name, Declaration)
    except Undecodable as error:
        raise Refused(
            f"{name}: {error.reason}", nearest_fix="docs/topology.md shows what a declaration may hold"
        ) from error


def read_nccl_topology(content: bytes, name: str) -> VendorTopology:
    """Read a NCCL topology file (XML of `cpu`, `pci`, `gpu` and `nic` elements). Raises Refused.

    Document type declarations are refused: they can make a small file expand without end.
    """
    try:
        # Only UTF-8 is searched for declarations, so only UTF-8 may reach the parser, which knows others by
        # their zero bytes.
        text = content.decode()
        if len(content) > MAX_NCCL_FILE_BYTES or "\0" in text or "<!" in text.replace("<!--", ""):
            raise Refused(
                f"{name}: over {MAX_NCCL_FILE_BYTES} bytes, not UTF-8, or with a document type declaration",
                nearest_fix=_NCCL_FIX,
            )
        root = ET.fromstring(text)  # noqa: S314 - declarations are refused above
    except (ET.ParseError, UnicodeDecodeError) as error:
        raise Refused(f"{name}: {error}", nearest_fix=_NCCL_FIX) from error
    switches: dict[str, str] = {}
    numa: dict[str, int] = {}
    for cpu in root.iter("cpu"):
        for found in cpu.iter("pci"):
            # The devices right below a switch; in these files a switch is a `pci` that holds others.
            for below in found.findall("pci"):
                address = normal_pci_address(below.attrib.get("busid", ""))
                if address is None or below.find("pci") is not None:
                    continue
                switches[address] = found.attrib.get("busid", "").lower()
                node = cpu.attrib.get("numaid", "")
                if node.isascii() and node.isdigit() and len(node) < 6:
                    numa[address] = int(node)
    return VendorTopology(switches, numa)


# Fusion of all sources into one profile.


NVIDIA, AMD = 0x10DE, 0x1002
_DISPLAY, _ACCELERATOR = 0x03, 0x12
_NO_DECLARATION = DeclaredDevice()


def build_machine(
    host: HostReading,
    *,
    nvml: Sequence[NvmlGpu] = (),
    vendor: VendorTopology | None = None,
    declared: Declaration = NOTHING_DECLARED,
    excluded: Mapping[str, Exclusion] | None = None,
) -> Machine:
    """The machine profile. GPUs and NICs are in the order of their PCI addresses, those without one last.

    `excluded` are interfaces that are not for tenants. Without it, they are derived from the host alone.
    """
    known = vendor or VendorTopology()
    left_out = excluded_interfaces(host.netdevs, host.routes) if excluded is None else excluded
    gpus = tuple(_build_gpus(host, {gpu.pci_address: gpu for gpu in nvml}, known, declared))
    without = {name for name, stated in declared.nics.items() if stated.excluded}
    candidates = nic_candidates(host, without)
    nics = tuple(_build_nics(host, candidates, known, declared, left_out))
    offered = [candidate for candidate, nic in zip(candidates, nics, strict=True) if nic.excluded is None]
    reasons = owned_interfaces(host.netdevs, candidates, offered)
    reasons |= {name: exclusion.reason for name, exclusion in left_out.items()}
    sources = {
        "sysfs": True,
        "nvml": bool(nvml),
        "vendor-file": vendor is not None,
        "declared": declared != NOTHING_DECLARED,
    }
    return Machine(
        name=host.name,
        note="Read from a running machine." if nvml else "Read from the kernel's own files.",
        origin=tuple(name for name, is_used in sources.items() if is_used),
        gpus=gpus,
        nics=nics,
        interfaces=tuple(_build_interfaces(host, nics, declared, reasons)),
        declared_classes=tuple(_class_rows(gpus, nics, declared)),
    )


def _build_gpus(
    host: HostReading, nvml: Mapping[str, NvmlGpu], vendor: VendorTopology, declared: Declaration
) -> Iterator[Gpu]:
    functions = {function.address: function for function in host.pci if _is_gpu(function)}
    listed = {gpu.pci_address: gpu for gpu in host.gpus}
    addresses = sorted(functions.keys() | listed.keys() | nvml.keys() | declared.gpus.keys())
    for index, address in enumerate(addresses):
        stated = declared.gpus.get(address, _NO_DECLARATION)
        function, driver, library = functions.get(address), listed.get(address), nvml.get(address)
        yield _build_gpu(index, address, _DeviceSources(function, vendor, stated), driver, library)


class _DeviceSources(msgspec.Struct, frozen=True):
    """The sources for the position of one device."""

    function: PciFunction | None
    vendor: VendorTopology
    stated: DeclaredDevice

    def numa_node(self, address: str | None) -> Fact[int] | None:
        if self.stated.numa_node is not None:
            return Fact(self.stated.numa_node, Source.DECLARED)
        read = None if self.function is None else self.function.numa_node
        if read is not None and read >= 0:
            return Fact(read, Source.SYSFS)
        written = self.vendor.numa_nodes.get(address or "")
        return None if written is None else Fact(written, Source.VENDOR_FILE)

    def pcie(self) -> PciePath | None:
        if self.stated.pcie is not None:
            return self.stated.pcie
        return None if self.function is None else self.function.path

    def switch(self, address: str | None) -> Fact[str] | None:
        written = self.vendor.switches.get(address or "")
        return None if written is None else Fact(written, Source.VENDOR_FILE)


def _build_gpu(
    index: int, address: str, sources: _DeviceSources, driver: DriverGpu | None, library: NvmlGpu | None
) -> Gpu:
    product = sources.stated.product or (library and library.product) or (driver and driver.product)
    uuid = (library and library.uuid) or (driver and driver.uuid)
    return Gpu(
        index=index,
        product=product or None,
        pci_address=address,
        pci_id=None if sources.function is None else sources.function.pci_id,
        uuid=uuid or None,
        memory_mib=None if library is None else library.memory_bytes >> 20,
        numa_node=sources.numa_node(address),
        pcie=sources.pcie(),
        vendor_switch=sources.switch(address),
        driver_version=None if library is None else library.driver_version,
    )


def _is_gpu(function: PciFunction) -> bool:
    """NVIDIA's are display or 3D controllers. AMD's accelerators have another class."""
    base = function.class_code >> 16
    return (
        function.vendor in (NVIDIA, AMD)
        and base in (_DISPLAY, _ACCELERATOR)
        and not function.is_passed_through
    )


def _build_nics(
    host: HostReading,
    candidates: Sequence[NicCandidate],
    vendor: VendorTopology,
    declared: Declaration,
    excluded: Mapping[str, Exclusion],
) -> Iterator[Nic]:
    reasons = NicExclusions(host, candidates, excluded)
    for index, candidate in enumerate(candidates):
        entries = [declared.nics[name] for name in candidate.names if name in declared.nics]
        stated = entries[0] if entries else _NO_DECLARATION
        # Its ports have one owner, so a port that must not carry tenant data excludes the NIC.
        kept = next((entry.excluded for entry in entries if entry.excluded), None)
        sources = _DeviceSources(candidate.function, vendor, stated)
        yield Nic(
            index=index,
            pci_address=candidate.address,
            subfunction=candidate.subfunction,
            pci_id=None if candidate.function is None else candidate.function.pci_id,
            if_name=None if candidate.netdev is None else candidate.netdev.name,
            rdma_device=None if candidate.rdma is None else candidate.rdma.name,
            rdma_ports=candidate.rdma_ports,
            model=stated.product,
            line_rate_gbps=stated.line_rate_gbps or candidate.line_rate_gbps,
            numa_node=sources.numa_node(candidate.address),
            pcie=sources.pcie(),
            vendor_switch=sources.switch(candidate.address),
            excluded=kept or reasons.against(candidate),
        )


def _build_interfaces(
    host: HostReading, nics: Sequence[Nic], declared: Declaration, reasons: Mapping[str, str]
) -> Iterator[Interface]:
    """Those that no NIC has."""
    taken = {nic.if_name for nic in nics}
    for netdev in host.netdevs:
        if netdev.name not in taken:
            stated = declared.nics.get(netdev.name, _NO_DECLARATION)
            reason = stated.excluded or reasons.get(netdev.name)
            yield Interface(name=netdev.name, kind=netdev.kind, excluded=reason)


def _class_rows(gpus: Sequence[Gpu], nics: Sequence[Nic], declared: Declaration) -> Iterator[ClassRow]:
    for gpu in gpus:
        if row := declared.classes.get(gpu.pci_address or ""):
            by_nic = (next((row[name] for name in _nic_names(nic) if name in row), None) for nic in nics)
            yield ClassRow(gpu.index, tuple(found or PathClass.UNKNOWN for found in by_nic))


def _nic_names(nic: Nic) -> tuple[str, ...]:
    return tuple(name for name in (nic.pci_address, nic.subfunction, nic.rdma_device, nic.if_name) if name)


def unmatched_declarations(
    declared: Declaration, machine: Machine, rdma: Sequence[RdmaDevice] = ()
) -> tuple[str, ...]:
    """Names in a declaration that no device of the machine has, and that therefore have no effect."""
    nics = {name for nic in machine.nics for name in _nic_names(nic)} | {device.name for device in rdma}
    nics |= {interface.name for interface in machine.interfaces}
    gpus = {gpu.pci_address for gpu in machine.gpus}
    columns = {name for row in declared.classes.values() for name in row}
    return tuple(sorted((declared.nics.keys() | columns) - nics | declared.classes.keys() - gpus))


def discover_machine(
    sysroot: Path = OWN_ROOT, *, nccl_topology: Path | None = None, declared: Path | None = None
) -> Machine:
    """The machine below `sysroot`. NVML is read only on this machine itself.

    Raises Refused for a root without /sys, and for files that cannot be read or that name missing devices.
    Raises Retry while the GPU driver does not answer.
    """
    root = Sysroot(sysroot)
    if not root.names("/sys/bus/pci/devices") and not root.names("/sys/class/net"):
        raise Refused(
            f"{sysroot} holds no sys directory of a machine", nearest_fix="copy /sys and /proc there"
        )
    stated = NOTHING_DECLARED
    if declared is not None:
        stated = read_declaration(read_named_file(declared), str(declared))
    vendor = None
    if nccl_topology is not None:
        vendor = read_nccl_topology(read_named_file(nccl_topology), str(nccl_topology))
    nvml = (read_nvml() or ()) if sysroot == OWN_ROOT else ()
    host = read_host(root)
    machine = build_machine(host, nvml=nvml, vendor=vendor, declared=stated)
    if unmatched := unmatched_declarations(stated, machine, host.rdma):
        raise Refused(
            f"{declared} speaks of {', '.join(unmatched)}, which this machine does not have",
            nearest_fix="name devices as `rackloom topology discover` prints them",
        )
    return machine
