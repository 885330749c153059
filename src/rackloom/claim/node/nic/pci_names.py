"""What people call a PCI vendor and device: from the host's pci.ids, else the few vendors that make NICs."""

import re
from collections.abc import Mapping

import msgspec

from rackloom.topology.discovery.sysroot import Sysroot

FILES = ("/usr/share/misc/pci.ids", "/usr/share/hwdata/pci.ids")
_LARGEST = 8 << 20
_KNOWN: Mapping[int, str] = {
    0x14E4: "Broadcom Inc. and subsidiaries",
    0x15B3: "Mellanox Technologies",
    0x1AF4: "Red Hat, Inc.",
    0x1AE0: "Google, Inc.",
    0x1D0F: "Amazon.com, Inc.",
    0x1DED: "Alibaba (China) Co., Ltd.",
    0x8086: "Intel Corporation",
}
_LINE = re.compile(r"(\t?)([0-9a-f]{4})  (.+)")


class PciNames(msgspec.Struct, frozen=True):
    """Names by vendor, and by vendor and device."""

    vendors: Mapping[int, str] = msgspec.field(default_factory=lambda: _KNOWN)
    devices: Mapping[tuple[int, int], str] = {}


def read_pci_names(sysroot: Sysroot) -> PciNames:
    """The host's list; without one, no device has a name."""
    for file in FILES:
        found = sysroot.real(file)
        if found is not None:
            with sysroot.root.joinpath(*found.parts[1:]).open("rb") as opened:
                return parse(opened.read(_LARGEST).decode(errors="replace"))
    return PciNames()


def parse(text: str) -> PciNames:
    """Lines `vvvv  name` for vendors, and below each, after a tab, `dddd  name` for its devices."""
    vendors: dict[int, str] = {}
    devices: dict[tuple[int, int], str] = {}
    vendor = None
    for line in text.splitlines():
        if line.startswith("C "):
            # Classes of devices follow the vendors.
            break
        if (match := _LINE.fullmatch(line)) is None:
            continue
        tab, number, name = match[1], int(match[2], 16), match[3]
        if tab and vendor is not None:
            devices[vendor, number] = name
        elif not tab:
            vendor = number
            vendors[number] = name
    return PciNames({**_KNOWN, **vendors}, devices)
