"""Names of PCI vendors and devices from the host's `pci.ids`, if it has that file."""

from rackloom.core.nics.devices import PciNames, parse_pci_ids
from rackloom.topology.discovery.sysfs import Sysroot

PCI_IDS_FILES = ("/usr/share/misc/pci.ids", "/usr/share/hwdata/pci.ids")
_LARGEST_PCI_IDS = 8 << 20


def read_pci_names(sysroot: Sysroot) -> PciNames:
    """The host's list of names. Empty if the host has no such file."""
    for file in PCI_IDS_FILES:
        found = sysroot.real(file)
        if found is not None:
            with sysroot.root.joinpath(*found.parts[1:]).open("rb") as opened:
                return parse_pci_ids(opened.read(_LARGEST_PCI_IDS).decode(errors="replace"))
    return PciNames()
