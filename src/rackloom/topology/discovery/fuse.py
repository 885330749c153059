"""From what was read to a machine profile: what is a GPU, and which source a fact is from.

Of two sources that know a fact, the kernel's own is kept; a file fills in what the kernel hides, and a
declaration overrides both, since somebody wrote it because the machine was wrong.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from rackloom.topology.discovery.host import DriverGpu, Host, PciFunction
from rackloom.topology.discovery.nics import Exclusion, Reasons, candidates_of, exclusions
from rackloom.topology.discovery.nvml import NvmlGpu
from rackloom.topology.discovery.statements import (
    NOTHING_DECLARED,
    Declared,
    DeclaredDevice,
    VendorTopology,
)
from rackloom.topology.facts import Fact, Source
from rackloom.topology.machine import ClassRow, Gpu, Interface, Machine, Nic, PathClass, PciePath

NVIDIA, AMD = 0x10DE, 0x1002
_DISPLAY, _ACCELERATOR = 0x03, 0x12
_NOTHING = DeclaredDevice()


def machine_of(
    host: Host,
    *,
    nvml: Sequence[NvmlGpu] = (),
    vendor: VendorTopology | None = None,
    declared: Declared = NOTHING_DECLARED,
    excluded: Mapping[str, Exclusion] | None = None,
) -> Machine:
    """The machine profile, GPUs and NICs in the order of their PCI addresses; those without one are last.

    `excluded` are interfaces that are not for tenants; without it, what the host alone tells decides.
    """
    known = vendor or VendorTopology()
    left_out = exclusions(host.netdevs, host.routes) if excluded is None else excluded
    gpus = tuple(_gpus(host, {gpu.pci_address: gpu for gpu in nvml}, known, declared))
    nics = tuple(_nics(host, known, declared, left_out))
    return Machine(
        name=host.name,
        note="Read from a running machine." if nvml else "Read from the kernel's own files.",
        origin=_origin(nvml, vendor, declared),
        gpus=gpus,
        nics=nics,
        interfaces=tuple(_interfaces(host, nics, declared, left_out)),
        declared_classes=tuple(_rows(gpus, nics, declared)),
    )


def _origin(nvml: Sequence[NvmlGpu], vendor: VendorTopology | None, declared: Declared) -> tuple[str, ...]:
    used = (
        ("sysfs", True),
        ("nvml", bool(nvml)),
        ("vendor-file", vendor is not None),
        ("declared", declared != NOTHING_DECLARED),
    )
    return tuple(name for name, present in used if present)


def _gpus(
    host: Host, nvml: Mapping[str, NvmlGpu], vendor: VendorTopology, declared: Declared
) -> Iterator[Gpu]:
    functions = {function.address: function for function in host.pci if _is_gpu(function)}
    listed = {gpu.pci_address: gpu for gpu in host.gpus}
    addresses = sorted(functions.keys() | listed.keys() | nvml.keys() | declared.gpus.keys())
    for index, address in enumerate(addresses):
        said = declared.gpus.get(address, _NOTHING)
        function, driver, library = functions.get(address), listed.get(address), nvml.get(address)
        yield _gpu(index, address, _Sources(function, vendor, said), driver, library)


class _Sources(msgspec.Struct, frozen=True):
    """All that is known of where one device sits."""

    function: PciFunction | None
    vendor: VendorTopology
    said: DeclaredDevice

    def numa_node(self, address: str | None) -> Fact[int] | None:
        if self.said.numa_node is not None:
            return Fact(self.said.numa_node, Source.DECLARED)
        read = None if self.function is None else self.function.numa_node
        if read is not None and read >= 0:
            return Fact(read, Source.SYSFS)
        written = self.vendor.numa_nodes.get(address or "")
        return None if written is None else Fact(written, Source.VENDOR_FILE)

    def pcie(self) -> PciePath | None:
        if self.said.pcie is not None:
            return self.said.pcie
        return None if self.function is None else self.function.path

    def switch(self, address: str | None) -> Fact[str] | None:
        written = self.vendor.switches.get(address or "")
        return None if written is None else Fact(written, Source.VENDOR_FILE)


def _gpu(
    index: int, address: str, sources: _Sources, driver: DriverGpu | None, library: NvmlGpu | None
) -> Gpu:
    product = sources.said.product or (library and library.product) or (driver and driver.product)
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
    """NVIDIA's are display or 3D controllers; AMD's accelerators have a class of their own."""
    base = function.class_code >> 16
    return function.vendor in (NVIDIA, AMD) and base in (_DISPLAY, _ACCELERATOR) and not function.is_lent


def _nics(
    host: Host, vendor: VendorTopology, declared: Declared, excluded: Mapping[str, Exclusion]
) -> Iterator[Nic]:
    candidates = candidates_of(host)
    reasons = Reasons(host, candidates, excluded)
    for index, candidate in enumerate(candidates):
        said = next((declared.nics[name] for name in candidate.names if name in declared.nics), _NOTHING)
        sources = _Sources(candidate.function, vendor, said)
        yield Nic(
            index=index,
            pci_address=candidate.address,
            pci_id=None if candidate.function is None else candidate.function.pci_id,
            if_name=None if candidate.netdev is None else candidate.netdev.name,
            rdma_device=None if candidate.rdma is None else candidate.rdma.name,
            model=said.product,
            line_rate_gbps=said.line_rate_gbps or candidate.line_rate_gbps,
            numa_node=sources.numa_node(candidate.address),
            pcie=sources.pcie(),
            vendor_switch=sources.switch(candidate.address),
            excluded=said.excluded or reasons.against(candidate),
        )


def _interfaces(
    host: Host, nics: Sequence[Nic], declared: Declared, excluded: Mapping[str, Exclusion]
) -> Iterator[Interface]:
    """Those that no NIC has."""
    taken = {nic.if_name for nic in nics}
    for netdev in host.netdevs:
        if netdev.name not in taken:
            said = declared.nics.get(netdev.name, _NOTHING)
            found = excluded.get(netdev.name)
            reason = said.excluded or (None if found is None else found.reason)
            yield Interface(name=netdev.name, kind=netdev.kind, excluded=reason)


def _rows(gpus: Sequence[Gpu], nics: Sequence[Nic], declared: Declared) -> Iterator[ClassRow]:
    for gpu in gpus:
        stated = declared.classes.get(gpu.pci_address or "")
        if stated:
            yield ClassRow(gpu.index, tuple(_stated(stated, nic) for nic in nics))


def _stated(row: Mapping[str, PathClass], nic: Nic) -> PathClass:
    return next((row[name] for name in _names(nic) if name in row), PathClass.UNKNOWN)


def _names(nic: Nic) -> tuple[str, ...]:
    return tuple(name for name in (nic.pci_address, nic.rdma_device, nic.if_name) if name)


def unmatched(declared: Declared, machine: Machine) -> tuple[str, ...]:
    """Names in a declaration that no device of the machine bears, and that therefore say nothing."""
    nics = {name for nic in machine.nics for name in _names(nic)} | {one.name for one in machine.interfaces}
    gpus = {gpu.pci_address for gpu in machine.gpus}
    columns = {name for row in declared.classes.values() for name in row}
    return tuple(sorted((declared.nics.keys() | columns) - nics | declared.classes.keys() - gpus))
