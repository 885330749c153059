"""GPUs that are bound to vfio-pci, and the device files by which a virtual machine gets one.

Source: the kernel's VFIO documentation. A group is /dev/vfio/<group>, opened through /dev/vfio/vfio; with
IOMMUFD a device also has a file of its own below /dev/vfio/devices.
"""

from collections.abc import Iterator

from rackloom.claim.node.gpu.inventory import Vfio
from rackloom.claim.opaque.gpu import BackendPolicy, Iommu
from rackloom.topology.discovery.fuse import NVIDIA
from rackloom.topology.discovery.host import PciFunction
from rackloom.topology.discovery.pci import DEVICES, read_pci
from rackloom.topology.discovery.sysroot import Sysroot

DRIVER = "vfio-pci"
_DISPLAY = 0x03
_MEMORY_WINDOW = 0x200
"""Flag of a resource that is memory (IORESOURCE_MEM); ports have another."""


def read_vfio(sysroot: Sysroot) -> tuple[Vfio, ...]:
    """NVIDIA GPUs that wait for a virtual machine, by PCI address."""
    gpus = [one for one in read_pci(sysroot) if _is_gpu(one)]
    found = (_vfio(sysroot, index, one) for index, one in enumerate(gpus) if one.driver == DRIVER)
    return tuple(one for one in found if one is not None)


def device_files(vfio: Vfio, iommu: Iommu) -> tuple[str, ...]:
    """What a container needs to pass the GPU on."""
    if iommu.backend_policy is BackendPolicy.PREFER_IOMMUFD and vfio.iommufd is not None:
        own, api = f"/dev/vfio/devices/{vfio.iommufd}", "/dev/iommu"
    else:
        own, api = f"/dev/vfio/{vfio.group}", "/dev/vfio/vfio"
    return (own, api) if iommu.enable_api_device else (own,)


def _is_gpu(function: PciFunction) -> bool:
    return function.vendor == NVIDIA and function.class_code >> 16 == _DISPLAY


def _vfio(sysroot: Sysroot, index: int, function: PciFunction) -> Vfio | None:
    at = f"{DEVICES}/{function.address}"
    group = sysroot.real(f"{at}/iommu_group")
    if group is None or not group.name.isdecimal():
        return None
    numa = function.numa_node
    return Vfio(
        index=index,
        pci_address=function.address,
        vendor_id=f"0x{function.vendor:04x}",
        device_id=f"0x{function.device:04x}",
        group=int(group.name),
        addressable_memory=max(_windows(sysroot.text(f"{at}/resource") or ""), default=0),
        pcie_root=None if function.path is None else function.path.root,
        numa_node=numa if numa is not None and numa >= 0 else None,
        iommufd=next(iter(sysroot.names(f"{at}/vfio-dev")), None),
    )


def _windows(resource: str) -> Iterator[int]:
    """Sizes of the memory windows of a `resource` file: first, last and flags of each, in hex."""
    for line in resource.splitlines():
        try:
            first, last, flags = (int(word, 16) for word in line.split())
        except ValueError:
            continue
        if flags & _MEMORY_WINDOW and last > first:
            yield last - first + 1
