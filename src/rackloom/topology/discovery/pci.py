"""PCI functions from sysfs: identity, NUMA node, ancestry, SR-IOV."""

import re
from pathlib import PurePosixPath

from rackloom.topology.discovery.host import PciFunction
from rackloom.topology.discovery.sysroot import Sysroot
from rackloom.topology.facts import Source
from rackloom.topology.machine import PciePath

DEVICES = "/sys/bus/pci/devices"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


def read_pci(sysroot: Sysroot) -> tuple[PciFunction, ...]:
    """All functions that can be read, by address."""
    found = (_function(sysroot, name) for name in sysroot.names(DEVICES) if _ADDRESS.fullmatch(name))
    return tuple(function for function in found if function is not None)


def pci_address(text: str) -> str | None:
    """An address in the kernel's form; nvidia-smi prints capitals and a domain of eight digits."""
    lower = text.strip().lower()
    if not _ADDRESS.fullmatch(lower):
        return None
    domain, rest = lower.split(":", 1)
    return f"{int(domain, 16):04x}:{rest}"


def owner_address(path: PurePosixPath) -> str | None:
    """The PCI function that a device's real path runs through; the last, as virtio devices hang below it."""
    return next((part for part in reversed(path.parts) if _ADDRESS.fullmatch(part)), None)


def _function(sysroot: Sysroot, address: str) -> PciFunction | None:
    at = f"{DEVICES}/{address}"
    code, vendor, device = (sysroot.number(f"{at}/{name}") for name in ("class", "vendor", "device"))
    if code is None or vendor is None or device is None:
        return None
    driver = sysroot.real(f"{at}/driver")
    return PciFunction(
        address=address,
        class_code=code,
        vendor=vendor,
        device=device,
        numa_node=sysroot.number(f"{at}/numa_node"),
        driver=None if driver is None else driver.name,
        path=_ancestry(sysroot.real(at)),
        virtual_function=sysroot.real(f"{at}/physfn") is not None,
        vfs=sysroot.number(f"{at}/sriov_numvfs") or 0,
        most_vfs=sysroot.number(f"{at}/sriov_totalvfs") or 0,
    )


def _ancestry(path: PurePosixPath | None) -> PciePath | None:
    """The way from the root down. Below VMBus each device has a root of its own, made up by the guest."""
    if path is None or path.parts[:3] != ("/", "sys", "devices") or len(path.parts) < 5:
        return None
    root, *bridges = path.parts[3:-1]
    if not _ROOT.fullmatch(root):
        return None
    between = tuple(part for part in bridges if _ADDRESS.fullmatch(part))
    return PciePath(root=root, bridges=between, source=Source.SYSFS)
