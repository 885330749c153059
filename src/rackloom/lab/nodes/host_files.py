"""A machine profile as the files and the driver inventory that such a host would show.

`host_files` lays out sysfs and procfs: PCI functions with their bridges and NUMA nodes, drivers, RDMA
and network devices, routes, and the NVIDIA driver's information files. Facts that a profile has from
another source are not put into the kernel's files. They go into an NCCL topology file or a declaration.
Discovery reads such a tree with the same code as a real host. Addresses that the profile does not know are
made up.

`declared_inventory` lists NVIDIA's GPUs as NVML would.

`TrayHostFiles` writes the files of one tray model and reads them back once for all trays. Trays differ
only in GPU UUIDs and in ports that are down (`TrayNics`). Where no machine of the rack's model is
published, a tray has GPUs and no NICs.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from uuid import NAMESPACE_DNS, uuid5
from xml.sax.saxutils import quoteattr

import msgspec

from rackloom.claim.node.gpu.inventory import DeclaredGpu, DeclaredInventory
from rackloom.claim.node.nic.inventory import HostScanner
from rackloom.core.nics.devices import NicSnapshot
from rackloom.topology.affinity import own_gpus
from rackloom.topology.discovery.discover import (
    NOTHING_DECLARED,
    Declaration,
    DeclaredDevice,
    build_machine,
    read_nccl_topology,
)
from rackloom.topology.discovery.sysfs import Sysroot, read_host
from rackloom.topology.join_key import Source
from rackloom.topology.machine import Gpu, HostReading, Machine, Nic, PciePath
from rackloom.topology.profiles import load_machine
from rackloom.topology.rack import RackProfile

_VMBUS = PurePosixPath("/sys/devices/LNXSYSTM:00/LNXSYBUS:00/VMBUS:01")
_PCI_DEVICES = PurePosixPath("/sys/bus/pci/devices")
_DERIVED = frozenset({"carries NVLink management", "Ethernet without RDMA", "carries the default route"})
"""Exclusions that discovery concludes itself."""


class HostFiles(msgspec.Struct, frozen=True):
    """Files by path in the root (a `Symlink` for a symbolic link), and the files beside the root."""

    tree: Mapping[str, "str | Symlink"]
    nccl_topology: str | None
    declared: Declaration


class Symlink(msgspec.Struct, frozen=True):
    """A symbolic link. `target` is absolute within the root."""

    target: str


def host_files(machine: Machine) -> HostFiles:
    """Everything that the machine would show."""
    gpus = [(gpu, gpu.pci_address or f"0fff:{gpu.index + 1:02x}:00.0") for gpu in machine.gpus]
    nics = [(nic, nic.pci_address or f"0ffe:{nic.index + 1:02x}:00.0") for nic in machine.nics]
    tree: dict[str, str | Symlink] = {"/proc/sys/kernel/hostname": machine.name + "\n"}
    for gpu, address in gpus:
        tree.update(_pci_function(gpu, address, _gpu_id(gpu), "nvidia"))
        tree.update(_driver_entry(gpu, address))
    for nic, address in nics:
        tree.update(_pci_function(nic, address, _nic_id(nic), "mlx5_core"))
        tree.update(_nic_classes(nic, address))
    for number, name in enumerate(nic.rdma_device for nic in machine.nics if nic.rdma_device):
        tree[f"/sys/class/infiniband_verbs/uverbs{number}/ibdev"] = f"{name}\n"
        tree[f"/sys/class/infiniband_verbs/uverbs{number}/dev"] = f"231:{192 + number}\n"
    tree["/proc/net/route"] = _route_table(machine)
    return HostFiles(tree, _nccl_topology([*gpus, *nics]), _declarations(machine, gpus, nics))


def write_sysroot(files: HostFiles, root: Path) -> None:
    """Lay the tree out below `root`, links relative, as sysfs has them."""
    for path, content in files.tree.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Symlink):
            up = "../" * (len(PurePosixPath(path).parts) - 2)
            target.symlink_to(up + content.target.lstrip("/"))
        else:
            target.write_text(content)


def _pci_function(
    device: Gpu | Nic, address: str, ids: tuple[int, str], driver: str
) -> dict[str, str | Symlink]:
    at = _sysfs_path(device.pcie, address)
    code, pci_id = ids
    vendor, _, number = pci_id.partition(":")
    numa = device.numa_node
    numa_node = numa.value if numa is not None and numa.source is Source.SYSFS else -1
    found: dict[str, str | Symlink] = {
        f"{at}/class": f"0x{code:06x}\n",
        f"{at}/vendor": f"0x{vendor}\n",
        f"{at}/device": f"0x{number}\n",
        f"{at}/numa_node": f"{numa_node}\n",
        f"/sys/bus/pci/drivers/{driver}/module": "",
        f"{at}/driver": Symlink(f"/sys/bus/pci/drivers/{driver}"),
        f"{_PCI_DEVICES}/{address}": Symlink(str(at)),
    }
    return found | dict(_bridges(device.pcie))


def _sysfs_path(pcie: PciePath | None, address: str) -> PurePosixPath:
    """The real path of a function. If its root is hidden, it is below VMBus, under a root made for it."""
    if pcie is None or pcie.source is not Source.SYSFS:
        return _VMBUS / address.replace(":", "") / f"pci{address[:4]}:00" / address
    return PurePosixPath("/sys/devices", pcie.root, *(pcie.bridges or ()), address)


def _bridges(pcie: PciePath | None) -> Iterator[tuple[str, str | Symlink]]:
    if pcie is None or pcie.source is not Source.SYSFS:
        return
    at = PurePosixPath("/sys/devices", pcie.root)
    for bridge in pcie.bridges or ():
        at = at / bridge
        yield f"{at}/class", "0x060400\n"
        yield f"{at}/vendor", "0x1000\n"
        yield f"{at}/device", "0xc030\n"
        yield f"{_PCI_DEVICES}/{bridge}", Symlink(str(at))


def _gpu_id(gpu: Gpu) -> tuple[int, str]:
    if "AMD" in (gpu.product or ""):
        return 0x120000, gpu.pci_id or "1002:74a1"
    return 0x030200, gpu.pci_id or "10de:2330"


def _nic_id(nic: Nic) -> tuple[int, str]:
    if nic.excluded == "carries NVLink management":
        return 0x020700, nic.pci_id or "15b3:1021"
    if "Elastic Fabric" in (nic.model or ""):
        return 0x020000, nic.pci_id or "1d0f:efa1"
    return 0x020000, nic.pci_id or "15b3:1021"


def _driver_entry(gpu: Gpu, address: str) -> dict[str, str]:
    if "AMD" in (gpu.product or ""):
        return {}
    uuid = gpu.uuid or "GPU-????????-????-????-????-????????????"
    text = f"Model: \t\t {gpu.product or 'Unknown'}\nGPU UUID: \t {uuid}\nDevice Minor: \t {gpu.index}\n"
    return {f"/proc/driver/nvidia/gpus/{address}/information": text}


def _nic_classes(nic: Nic, address: str) -> dict[str, str | Symlink]:
    at = _sysfs_path(nic.pcie, address)
    found: dict[str, str | Symlink] = {}
    if nic.rdma_device is not None:
        below = f"{at}/infiniband/{nic.rdma_device}"
        found[f"{below}/device"] = Symlink(str(at))
        found[f"{below}/ports/1/state"] = "4: ACTIVE\n"
        found[f"{below}/ports/1/link_layer"] = "Ethernet\n"
        found[f"{below}/ports/1/rate"] = f"{nic.line_rate_gbps or 100} Gb/sec (4X)\n"
        found[f"/sys/class/infiniband/{nic.rdma_device}"] = Symlink(below)
    if nic.if_name is not None:
        below = f"{at}/net/{nic.if_name}"
        found[f"{below}/device"] = Symlink(str(at))
        found[f"{below}/address"] = f"02:00:00:00:00:{nic.index:02x}\n"
        found[f"{below}/mtu"] = "9000\n"
        found[f"{below}/operstate"] = "up\n"
        found[f"{below}/speed"] = f"{(nic.line_rate_gbps or 100) * 1000}\n"
        found[f"/sys/class/net/{nic.if_name}"] = Symlink(below)
    return found


def _route_table(machine: Machine) -> str:
    head = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
    up = [nic.if_name for nic in machine.nics if nic.excluded == "carries the default route"]
    return head + "".join(f"{name} 00000000 0100000A 0003 0 0 0 00000000 0 0 0\n" for name in up)


def _nccl_topology(devices: Sequence[tuple[Gpu | Nic, str]]) -> str | None:
    """One `pci` element per switch, below the processor of its devices' NUMA node."""
    groups: dict[tuple[int, str], list[str]] = {}
    for device, address in devices:
        if device.vendor_switch is not None:
            node = -1 if device.numa_node is None else device.numa_node.value
            groups.setdefault((node, device.vendor_switch.value), []).append(address)
    if not groups:
        return None
    lines = ['<system version="1">']
    for (node, switch), below in groups.items():
        lines.append(f"<cpu numaid={quoteattr(str(node))}><pci busid={quoteattr(switch)}>")
        lines += [f"<pci busid={quoteattr(address)}/>" for address in below]
        lines.append("</pci></cpu>")
    return "\n".join([*lines, "</system>"])


def _declarations(machine: Machine, gpus: list[tuple[Gpu, str]], nics: list[tuple[Nic, str]]) -> Declaration:
    rows = {
        gpus[row.gpu][1]: {nics[column][1]: path for column, path in enumerate(row.classes)}
        for row in machine.declared_classes
    }
    return Declaration(
        gpus=_declared_devices(gpus),
        nics=_declared_devices(nics),
        classes=rows,
    )


def _declared_devices(devices: Sequence[tuple[Gpu | Nic, str]]) -> dict[str, DeclaredDevice]:
    declared = {address: _declared_device(device) for device, address in devices}
    return {address: device for address, device in declared.items() if device != DeclaredDevice()}


def _declared_device(device: Gpu | Nic) -> DeclaredDevice:
    numa, pcie = device.numa_node, device.pcie
    excluded = device.excluded if isinstance(device, Nic) else None
    return DeclaredDevice(
        numa_node=numa.value if numa is not None and numa.source is Source.DECLARED else None,
        pcie_root=pcie.root if pcie is not None and pcie.source is Source.DECLARED else None,
        bridges=pcie.bridges if pcie is not None and pcie.source is Source.DECLARED else None,
        excluded=None if excluded in _DERIVED else excluded,
    )


# The GPUs as NVML lists them.


_GPU_PRODUCTS = (
    ("GB300", "Blackwell", "10.3", 284208),
    ("GB200", "Blackwell", "10.0", 189471),
    ("B200", "Blackwell", "10.0", 183359),
    ("H200", "Hopper", "9.0", 143771),
    ("H100", "Hopper", "9.0", 81559),
    ("A100", "Ampere", "8.0", 40960),
    ("A10G", "Ampere", "8.6", 23028),
    ("V100", "Volta", "7.0", 32768),
    ("L20", "Ada Lovelace", "8.9", 46068),
    ("L4", "Ada Lovelace", "8.9", 23034),
)
"""Part of the product's name, architecture, compute capability, memory in MiB. The longer name is first."""
_MADE_UP_DRIVER, _MADE_UP_CUDA = "580.95.05", "13.0"


def declared_inventory(machine: Machine) -> DeclaredInventory:
    """NVIDIA's GPUs of the machine. Other vendors' are unknown to NVIDIA's driver."""
    gpus = [gpu for gpu in machine.gpus if _is_nvidia(gpu)]
    versions = [gpu.driver_version for gpu in gpus if gpu.driver_version is not None]
    return DeclaredInventory(
        gpus=tuple(_declared_gpu(machine, gpu) for gpu in gpus),
        driver_version=versions[0] if versions else _MADE_UP_DRIVER,
        cuda_version=_MADE_UP_CUDA,
    )


def _is_nvidia(gpu: Gpu) -> bool:
    return not (gpu.pci_id or "10de:").startswith("1002:") and "MI300" not in (gpu.product or "")


def _declared_gpu(machine: Machine, gpu: Gpu) -> DeclaredGpu:
    product = gpu.product or "NVIDIA H100 80GB HBM3"
    name, architecture, capability, mebibytes = next(
        (row for row in _GPU_PRODUCTS if row[0] in product), (product, None, None, 0)
    )
    return DeclaredGpu(
        minor=gpu.index,
        uuid=gpu.uuid or f"GPU-{uuid5(NAMESPACE_DNS, f'{machine.name}/{gpu.index}')}",
        # As lab/nodes/host_files.py makes one up.
        pci_address=gpu.pci_address or f"0fff:{gpu.index + 1:02x}:00.0",
        product=product if product.startswith("NVIDIA") else f"NVIDIA {name}",
        memory_bytes=(gpu.memory_mib or mebibytes) << 20,
        brand="Nvidia",
        architecture=architecture,
        compute_capability=capability,
        addressing_mode="None",
    )


# The files of one tray model, shared by all trays.


_PROC_DEVICES = (
    "Character devices:\n195 nvidia\n234 nvidia-uvm\n235 nvidia-caps-imex-channels\n236 nvidia-caps\n"
    "\nBlock devices:\n"
)
_IMEX_CAPABILITY = "DeviceFileMinor: 512\nDeviceFileMode: 438\nDeviceFileModify: 1\n"


def tray_machine(profile: RackProfile) -> Machine:
    """The machine that one tray of `profile` is."""
    if profile.tray_machine is not None:
        known = load_machine(profile.tray_machine)
        return msgspec.structs.replace(known, gpus=known.gpus[: profile.gpus_per_tray])
    gpus = tuple(
        Gpu(index=index, product=profile.product, pci_address=f"00{index + 8:02x}:01:00.0")
        for index in range(profile.gpus_per_tray)
    )
    return Machine(name=f"{profile.name}-tray", note="made up", origin=(), gpus=gpus, nics=())


class TrayHostFiles:
    """The files of a tray below `root`, and the host and machine that were read from them."""

    def __init__(self, root: Path, machine: Machine) -> None:
        files = host_files(machine)
        write_sysroot(files, root)
        (root / "proc/devices").write_text(_PROC_DEVICES)
        self.root = root
        self.imex_capability = root / "proc/driver/nvidia/capabilities/fabric-imex-mgmt"
        self.imex_capability.parent.mkdir(parents=True)
        self.imex_capability.write_text(_IMEX_CAPABILITY)
        self._host = read_host(Sysroot(root))
        topology = files.nccl_topology
        vendor = None if topology is None else read_nccl_topology(topology.encode(), machine.name)
        declared = files.declared or NOTHING_DECLARED
        self.machine = build_machine(self._host, vendor=vendor, declared=declared)

    @property
    def proc_devices(self) -> Path:
        """Major numbers of the drivers."""
        return self.root / "proc/devices"

    def machine_with(self, uuids: Mapping[str, str]) -> Machine:
        """The machine of a tray with these UUIDs of GPUs, by PCI address."""
        gpus = tuple(
            msgspec.structs.replace(gpu, uuid=uuids.get(gpu.pci_address or "")) for gpu in self.machine.gpus
        )
        return msgspec.structs.replace(self.machine, gpus=gpus)

    def host_with(self, down: frozenset[str]) -> HostReading:
        """The host while the ports of these RDMA devices are down."""
        rdma = tuple(
            dataclasses.replace(
                device, ports=tuple(dataclasses.replace(port, state="down") for port in device.ports)
            )
            if device.name in down
            else device
            for device in self._host.rdma
        )
        return dataclasses.replace(self._host, rdma=rdma)


class TrayNics(HostScanner):
    """The NICs of one tray. Its interfaces are in no network namespace of this machine: none is listed."""

    def __init__(self, host: TrayHostFiles, uuids: Mapping[str, str]) -> None:
        super().__init__(host.root)
        self._host = host
        self._uuids = uuids
        self.down: frozenset[str] = frozenset()
        """RDMA devices with ports that are down."""

    def rails(self) -> list[str]:
        """RDMA devices of the NICs that serve GPUs: the first is that of `nic-0`."""
        machine = self().machine
        nics = sorted((machine.nics[nic] for nic in own_gpus(machine)), key=lambda nic: nic.pci_address or "")
        return [nic.rdma_device for nic in nics if nic.rdma_device is not None]

    def __call__(self) -> NicSnapshot:
        """The current NICs of the tray."""
        return NicSnapshot(
            host=self._host.host_with(self.down), machine=self._host.machine_with(self._uuids), links=()
        )
