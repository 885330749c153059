"""GPUs for virtual machines: those that are bound to vfio-pci, and those that a claim binds and gives back.

`read_vfio` finds them in sysfs: NVIDIA's driver does not know a GPU that is bound to vfio-pci. They are
numbered by PCI address among all NVIDIA GPUs, so that names stay when another GPU is bound.

With `--vfio-binding` each GPU of NVIDIA's driver that is in an IOMMU group is published twice, as itself and
as `gpu-vfio-<N>`. Both draw the only unit of one counter set (partitionable devices, KEP-4815), so the
scheduler gives one of them at a time. A GPU that an operator has bound to vfio-pci is published as such
alone, and one in MIG mode not for virtual machines.

`PciBinder.bind` gives a GPU from NVIDIA's driver to vfio-pci: it checks that no virtual function is active
and no process has the GPU's device file open, then writes driver_override, unbinds, and has the kernel probe.
`release` goes the other way. Both can be repeated after a crash at any step: the kernel shows which driver
has the GPU. NVIDIA's driver waits in the kernel, without end, while a file of a GPU that it is to give up is
open. So this process has no NVML session during that time, and the check comes last before the unbinding. A
process that opens the file in between has to end before the call returns.

Source: driver_override and drivers_probe in the kernel's Documentation/ABI/testing/sysfs-bus-pci.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from uuid import NAMESPACE_DNS, uuid5

import msgspec

from rackloom.claim.node.gpu.inventory import NodeGpu, pci_attributes, quantities
from rackloom.claim.node.plugin import NodeValue
from rackloom.core.allocate.attributes import device_attributes
from rackloom.core.allocate.objects import Counter, CounterConsumption, CounterSet, Device
from rackloom.core.nics.devices import PciNames
from rackloom.errors import Refused, Retry
from rackloom.topology.discovery.discover import NVIDIA
from rackloom.topology.discovery.sysfs import PCI_DEVICES, Sysroot, read_pci
from rackloom.topology.machine import PciFunction

# The values.


VFIO_DRIVER = "vfio-pci"


class VfioGpu(NodeValue, frozen=True, kw_only=True):
    """A GPU that is or may be bound to vfio-pci. NVIDIA's driver does not know a bound one."""

    index: int
    """Place among all GPUs of NVIDIA by PCI address, so that names stay when another GPU is bound."""
    pci_address: str
    vendor_id: str
    device_id: str
    """Both as `0x10de`."""
    product: str | None = None
    """As the host's list of PCI names has it. NVML's name differs."""
    group: int
    addressable_memory: int
    """Bytes of its largest memory window."""
    pcie_root: str | None = None
    numa_node: int | None = None
    iommufd: str | None = None
    """Name of its device below /dev/vfio/devices. None without IOMMUFD, and while it is not bound."""
    has_iommufd: bool = False
    """Whether it has that device, or will have it."""
    driver: str | None = VFIO_DRIVER
    """The driver that has the GPU. None if binding was cut off."""
    switchable: bool = False
    """Whether a claim binds it, and its end gives it back (`passthrough`)."""

    @property
    def bound(self) -> bool:
        """Whether it is ready for a virtual machine."""
        return self.driver == VFIO_DRIVER


# Reading them.


NO_NAMES = PciNames()


def read_vfio(
    sysroot: Sysroot, names: PciNames = NO_NAMES, *, binds_from: str | None = None
) -> tuple[VfioGpu, ...]:
    """NVIDIA GPUs that wait for a virtual machine, and those that may be taken from `binds_from` for one."""
    gpus = [
        function
        for function in read_pci(sysroot)
        if function.vendor == NVIDIA and function.class_code >> 16 == _DISPLAY
    ]
    drivers = {VFIO_DRIVER} if binds_from is None else {VFIO_DRIVER, binds_from, None}
    fit = [(index, gpu) for index, gpu in enumerate(gpus) if gpu.driver in drivers]
    found = (_vfio_gpu(sysroot, index, gpu, names) for index, gpu in fit)
    return tuple(vfio for vfio in found if vfio is not None)


_DISPLAY = 0x03
_MEMORY_WINDOW = 0x200
"""Flag of a resource that is memory (IORESOURCE_MEM). Ports have another."""


def _vfio_gpu(sysroot: Sysroot, index: int, function: PciFunction, names: PciNames) -> VfioGpu | None:
    at = f"{PCI_DEVICES}/{function.address}"
    group = sysroot.real(f"{at}/iommu_group")
    if group is None or not group.name.isdecimal():
        return None
    numa, bound = function.numa_node, function.driver == VFIO_DRIVER
    iommufd = next(iter(sysroot.names(f"{at}/vfio-dev")), None)
    return VfioGpu(
        index=index,
        pci_address=function.address,
        vendor_id=f"0x{function.vendor:04x}",
        device_id=f"0x{function.device:04x}",
        product=names.devices.get((function.vendor, function.device)),
        group=int(group.name),
        addressable_memory=max(_memory_windows(sysroot.text(f"{at}/resource") or ""), default=0),
        pcie_root=None if function.path is None else function.path.root,
        numa_node=numa if numa is not None and numa >= 0 else None,
        iommufd=iommufd,
        has_iommufd=iommufd is not None if bound else "iommu" in sysroot.names("/dev"),
        driver=function.driver,
        switchable=function.driver not in (VFIO_DRIVER, None),
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


# The published devices. Pure.


_UNIT = {"gpu": Counter(value="1")}


def vfio_name(vfio: VfioGpu) -> str:
    """Name of a GPU for a virtual machine."""
    return f"gpu-vfio-{vfio.index}"


def vfio_device(vfio: VfioGpu) -> Device:
    """A GPU for a virtual machine."""
    attributes = device_attributes(
        {
            "type": "vfio",
            # NVIDIA's driver also makes it from the address: under vfio-pci the GPU's own cannot be read.
            "uuid": str(uuid5(NAMESPACE_DNS, vfio.pci_address)),
            "iommuFDEnabled": vfio.has_iommufd,
            "deviceID": vfio.device_id,
            "vendorID": vfio.vendor_id,
            "productName": vfio.product,
            **pci_attributes(vfio.pci_address, vfio.pcie_root, vfio.numa_node),
        }
    )
    memory = quantities(addressableMemory=vfio.addressable_memory)
    return Device(name=vfio_name(vfio), attributes=attributes, capacity=memory)


def switchable(vfio: VfioGpu, claimed: Collection[str]) -> VfioGpu:
    """The same, but also switchable if a claim has bound it, since the end of that claim gives it back."""
    return msgspec.structs.replace(vfio, switchable=vfio.switchable or vfio.pci_address in claimed)


def switch_counters(vfio: VfioGpu) -> CounterSet:
    """The unit that the GPU and its device for a virtual machine share."""
    return CounterSet(name=_counter_set_name(vfio), counters=_UNIT)


def switchable_device(vfio: VfioGpu) -> Device:
    """The GPU for a virtual machine."""
    return drawing_unit(vfio_device(vfio), vfio)


def drawing_unit(device: Device, vfio: VfioGpu) -> Device:
    """The device, which the scheduler allocates only while the other one of the GPU is free."""
    draw = CounterConsumption(counter_set=_counter_set_name(vfio), counters=_UNIT)
    return msgspec.structs.replace(device, consumes_counters=(draw,))


def by_address(vfio: Collection[VfioGpu], gpus: Collection[NodeGpu]) -> Mapping[str, VfioGpu]:
    """The switchable GPUs, by PCI address, without those that are divided or in MIG mode."""
    shut = {gpu.pci_address for gpu in gpus if gpu.mig_mode or gpu.partitions}
    return {found.pci_address: found for found in vfio if found.switchable and found.pci_address not in shut}


def _counter_set_name(vfio: VfioGpu) -> str:
    return f"{vfio_name(vfio)}-counter-set"


# Binding.


BIND_RETRY_SECONDS = 1.0
NVIDIA_DRIVER = "nvidia"


class PciBinder:
    """Moves PCI functions between their driver and vfio-pci. Every method blocks, and belongs in a thread."""

    def __init__(
        self,
        bus: Path,
        processes: Path,
        quiet: Callable[[], AbstractContextManager[None]] = nullcontext,
        driver: str = NVIDIA_DRIVER,
    ) -> None:
        """`bus` is /sys/bus/pci, writable. `processes` is the host's /proc.

        While `quiet` is entered, this process has no GPU open.
        """
        self._bus = bus
        self._quiet = quiet
        self._processes = processes
        self._driver = driver

    def bind(self, address: str, device_file: str | None) -> None:
        """Give the GPU to vfio-pci. Raises `Retry` while `device_file` is open anywhere, and `Refused`.

        Without a driver the GPU has no such file.
        """
        driver = self._driver_of(address)
        if driver == VFIO_DRIVER:
            return
        if driver not in (self._driver, None):
            raise Refused(f"GPU {address} is not bound to {self._driver} but to {driver}")
        if not (self._bus / "drivers" / VFIO_DRIVER).is_dir():
            raise Refused(f"{VFIO_DRIVER} is not loaded", nearest_fix="modprobe vfio-pci on the node")
        functions = self._device(address) / "sriov_numvfs"
        if functions.exists() and functions.read_text().strip() != "0":
            raise Refused(f"GPU {address} has virtual functions", nearest_fix=f"write 0 to {functions}")
        with self._quiet():
            users = [] if device_file is None else sorted(self._users(device_file))
            if users:
                raise Retry(f"GPU {address} is used by {', '.join(users[:5])}", after=BIND_RETRY_SECONDS)
            self._write(self._device(address) / "driver_override", VFIO_DRIVER)
            if driver is not None:
                self._write(self._bus / "drivers" / self._driver / "unbind", address)
            self._probe(address, VFIO_DRIVER)

    def release(self, address: str) -> None:
        """Give the GPU back to its driver. Raises `Retry` until the driver has it."""
        if not self._device(address).exists():
            # Without the function nothing is bound: it was unplugged, or the machine is another one.
            return
        self._write(self._device(address) / "driver_override", "\n")
        if self._driver_of(address) == VFIO_DRIVER:
            self._write(self._bus / "drivers" / VFIO_DRIVER / "unbind", address)
        if self._driver_of(address) != self._driver:
            self._probe(address, self._driver)

    def _probe(self, address: str, driver: str) -> None:
        self._write(self._bus / "drivers_probe", address)
        found = self._driver_of(address)
        if found != driver:
            raise Retry(
                f"GPU {address} has {found or 'no driver'} and not {driver}: see the kernel's log",
                after=BIND_RETRY_SECONDS,
            )

    def _driver_of(self, address: str) -> str | None:
        try:
            return (self._device(address) / "driver").readlink().name
        except FileNotFoundError:
            return None

    def _device(self, address: str) -> Path:
        return self._bus / "devices" / address

    def _write(self, path: Path, text: str) -> None:
        try:
            path.write_text(text)
        except OSError as error:
            raise Retry(f"cannot write {path}: {error.strerror}", after=BIND_RETRY_SECONDS) from error

    def _users(self, device_file: str) -> Iterator[str]:
        """Processes of the host that have the device file open under any path, as `name (pid)`."""
        for process in self._processes.iterdir():
            if process.name.isdecimal() and self._has_open(process, device_file):
                yield f"{_name_of(process)} ({process.name})"

    def _has_open(self, process: Path, device_file: str) -> bool:
        try:
            files = [Path(handle.path).readlink() for handle in os.scandir(process / "fd")]
        except OSError:
            # It has ended, or a file of it was just closed: the next attempt sees what stays.
            return False
        return any(file.name == device_file and file.parent.name == "dev" for file in files)


def _name_of(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "a process"
