"""A machine profile as the files that its kernel, its vendor and a person would show of it.

Discovery of such a tree goes through the same code as of a host. What the profile knows from elsewhere is not
put where the kernel would say it: it goes into a vendor's topology file or a declaration. Addresses that the
profile does not know are made up.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from xml.sax.saxutils import quoteattr

import msgspec

from rackloom.topology.discovery.statements import Declared, DeclaredDevice
from rackloom.topology.facts import Source
from rackloom.topology.machine import Gpu, Machine, Nic, PciePath

_VMBUS = PurePosixPath("/sys/devices/LNXSYSTM:00/LNXSYBUS:00/VMBUS:01")
_PCI = PurePosixPath("/sys/bus/pci/devices")
_DERIVED = frozenset({"carries NVLink management", "Ethernet without RDMA", "carries the default route"})
"""Exclusions that discovery concludes itself."""


class HostFiles(msgspec.Struct, frozen=True):
    """Files by path in the root (a `Link` where it is a symbolic link), and what lies beside the root."""

    tree: Mapping[str, "str | Link"]
    nccl_topology: str | None
    declared: Declared


class Link(msgspec.Struct, frozen=True):
    """A symbolic link; `target` is absolute within the root."""

    target: str


def host_files(machine: Machine) -> HostFiles:
    """Everything that the machine would show."""
    gpus = [(gpu, gpu.pci_address or f"0fff:{gpu.index + 1:02x}:00.0") for gpu in machine.gpus]
    nics = [(nic, nic.pci_address or f"0ffe:{nic.index + 1:02x}:00.0") for nic in machine.nics]
    tree: dict[str, str | Link] = {"/proc/sys/kernel/hostname": machine.name + "\n"}
    for gpu, address in gpus:
        tree.update(_function(gpu, address, _gpu_id(gpu), "nvidia"))
        tree.update(_driver_entry(gpu, address))
    for nic, address in nics:
        tree.update(_function(nic, address, _nic_id(nic), "mlx5_core"))
        tree.update(_nic_classes(nic, address))
    tree["/proc/net/route"] = _routes(machine)
    return HostFiles(tree, _nccl([*gpus, *nics]), _declared(machine, gpus, nics))


def write_sysroot(files: HostFiles, root: Path) -> None:
    """Lay the tree out below `root`, links relative, as sysfs has them."""
    for path, content in files.tree.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Link):
            up = "../" * (len(PurePosixPath(path).parts) - 2)
            target.symlink_to(up + content.target.lstrip("/"))
        else:
            target.write_text(content)


def _function(device: Gpu | Nic, address: str, ids: tuple[int, str], driver: str) -> dict[str, str | Link]:
    at = _place(device.pcie, address)
    code, pci_id = ids
    vendor, _, number = pci_id.partition(":")
    numa = device.numa_node
    seen = numa.value if numa is not None and numa.source is Source.SYSFS else -1
    found: dict[str, str | Link] = {
        f"{at}/class": f"0x{code:06x}\n",
        f"{at}/vendor": f"0x{vendor}\n",
        f"{at}/device": f"0x{number}\n",
        f"{at}/numa_node": f"{seen}\n",
        f"/sys/bus/pci/drivers/{driver}/module": "",
        f"{at}/driver": Link(f"/sys/bus/pci/drivers/{driver}"),
        f"{_PCI}/{address}": Link(str(at)),
    }
    return found | dict(_bridges(device.pcie))


def _place(pcie: PciePath | None, address: str) -> PurePosixPath:
    """The real path of a function; one whose root is hidden hangs below VMBus, under a root of its own."""
    if pcie is None or pcie.source is not Source.SYSFS:
        return _VMBUS / address.replace(":", "") / f"pci{address[:4]}:00" / address
    return PurePosixPath("/sys/devices", pcie.root, *(pcie.bridges or ()), address)


def _bridges(pcie: PciePath | None) -> Iterator[tuple[str, str | Link]]:
    if pcie is None or pcie.source is not Source.SYSFS:
        return
    at = PurePosixPath("/sys/devices", pcie.root)
    for bridge in pcie.bridges or ():
        at = at / bridge
        yield f"{at}/class", "0x060400\n"
        yield f"{at}/vendor", "0x1000\n"
        yield f"{at}/device", "0xc030\n"
        yield f"{_PCI}/{bridge}", Link(str(at))


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


def _nic_classes(nic: Nic, address: str) -> dict[str, str | Link]:
    at = _place(nic.pcie, address)
    found: dict[str, str | Link] = {}
    if nic.rdma_device is not None:
        below = f"{at}/infiniband/{nic.rdma_device}"
        found[f"{below}/device"] = Link(str(at))
        found[f"{below}/ports/1/state"] = "4: ACTIVE\n"
        found[f"{below}/ports/1/link_layer"] = "Ethernet\n"
        found[f"{below}/ports/1/rate"] = f"{nic.line_rate_gbps or 100} Gb/sec (4X)\n"
        found[f"/sys/class/infiniband/{nic.rdma_device}"] = Link(below)
    if nic.if_name is not None:
        below = f"{at}/net/{nic.if_name}"
        found[f"{below}/device"] = Link(str(at))
        found[f"{below}/address"] = f"02:00:00:00:00:{nic.index:02x}\n"
        found[f"{below}/mtu"] = "9000\n"
        found[f"{below}/operstate"] = "up\n"
        found[f"{below}/speed"] = f"{(nic.line_rate_gbps or 100) * 1000}\n"
        found[f"/sys/class/net/{nic.if_name}"] = Link(below)
    return found


def _routes(machine: Machine) -> str:
    head = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
    up = [nic.if_name for nic in machine.nics if nic.excluded == "carries the default route"]
    return head + "".join(f"{name} 00000000 0100000A 0003 0 0 0 00000000 0 0 0\n" for name in up)


def _nccl(devices: Sequence[tuple[Gpu | Nic, str]]) -> str | None:
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


def _declared(machine: Machine, gpus: list[tuple[Gpu, str]], nics: list[tuple[Nic, str]]) -> Declared:
    rows = {
        gpus[row.gpu][1]: {nics[column][1]: path for column, path in enumerate(row.classes)}
        for row in machine.declared_classes
    }
    return Declared(
        gpus=_declared_devices(gpus),
        nics=_declared_devices(nics),
        classes=rows,
    )


def _declared_devices(devices: Sequence[tuple[Gpu | Nic, str]]) -> dict[str, DeclaredDevice]:
    said = {address: _declared_device(device) for device, address in devices}
    return {address: device for address, device in said.items() if device != DeclaredDevice()}


def _declared_device(device: Gpu | Nic) -> DeclaredDevice:
    numa, pcie = device.numa_node, device.pcie
    excluded = device.excluded if isinstance(device, Nic) else None
    return DeclaredDevice(
        numa_node=numa.value if numa is not None and numa.source is Source.DECLARED else None,
        pcie_root=pcie.root if pcie is not None and pcie.source is Source.DECLARED else None,
        bridges=pcie.bridges if pcie is not None and pcie.source is Source.DECLARED else None,
        excluded=None if excluded in _DERIVED else excluded,
    )
