"""The one written name of a part of a site, and the one reading of the names that vendors' tools print.

A part is named by its place: `rack-04/slot-2/gpu-2`, `rack-04/slot-2/nic-1`, `rack-04/switch-3/port-17`.
Numbers count from 0, as drivers and Kubernetes count. The rack has the name in the site's records, or the
serial of its chassis if there is no record. The slot is the one that the switch controller reports. A module
id counts from 1, so module 3 is `gpu-2`. A GPU whose slot no layer reports has the name that kubectl shows:
`node-7/gpu-2`.

`canonical_name` gives each name that a person may type one spelling, so that names can be compared as text.
nvidia-smi prints a PCI domain of eight digits, the kernel one of four, and lspci often none. A fabric GUID is
a decimal number in NMX, and hexadecimal elsewhere.
"""

import re

import msgspec

from rackloom.topology.join_key import GpuKey, SlotKey


class PartName(msgspec.Struct, frozen=True, gc=False):
    """A rack, or a part of one. `str` writes the name."""

    rack: str
    slot: int | None = None
    """A compute tray."""
    gpu: int | None = None
    nic: int | None = None
    switch: int | None = None
    port: int | None = None

    def __str__(self) -> str:
        steps = (f"{kind}-{number}" for kind in _KINDS if (number := getattr(self, kind)) is not None)
        return "/".join((self.rack, *steps))

    @property
    def tray(self) -> "PartName":
        """The tray that holds it."""
        return PartName(self.rack, self.slot)


_KINDS = PartName.__struct_fields__[1:]
_FORMS = tuple(
    re.compile(form, re.IGNORECASE | re.ASCII)
    for form in (
        # As older maps and findings name a part, and as vendors name a place: modules count from 1.
        r"(?:GPU (?P<module>[1-9]\d*) in )?slot (?P<slot>\d+) of (?P<rack>.+?)",
        r"GPU (?P<module>[1-9]\d*) of (?P<rack>.+?) slot (?P<slot>\d+)",
        r"(?:chassis )?(?P<rack>.+?) slot (?P<slot>\d+)(?: module (?P<module>[1-9]\d*))?",
        r"(?P<rack>.+?)/switch-(?P<switch>\d+)(?:/port-(?P<port>\d+))?",
        r"(?P<rack>.+?)(?:/slot-(?P<slot>\d+))?(?:/gpu-(?P<gpu>\d+)|/nic-(?P<nic>\d+))?",
    )
)
_PCI = re.compile(
    r"(?:pci-)?(?:(?P<domain>[0-9a-f]{1,8})[:-])?(?P<bus>[0-9a-f]{2})[:-](?P<device>[0-9a-f]{2})[.-](?P<function>[0-7])",
    re.IGNORECASE,
)
_GUID = re.compile(r"0x[0-9a-f]{1,16}|[0-9a-f]{16}|\d{17,20}", re.IGNORECASE | re.ASCII)


def read_part_name(text: str) -> PartName:
    """The part that a written name means. A text of no other form names a rack."""
    for form in _FORMS:
        if found := form.fullmatch(text):
            numbers = {
                kind: int(digits) for kind, digits in found.groupdict().items() if digits and kind != "rack"
            }
            if module := numbers.pop("module", 0):
                numbers["gpu"] = module - 1
            return PartName(found["rack"], **numbers)
    return PartName(text)


def canonical_name(text: str) -> str:
    """The one spelling of a place, PCI address (perhaps `of` a node), fabric GUID or any other name."""
    text = " ".join(text.split())
    address, of, node = text.partition(" of ")
    if found := _PCI.fullmatch(address):
        domain, *rest = found.group("domain", "bus", "device", "function")
        return "{:04x}:{}:{}.{}".format(int(domain or "0", 16), *rest).lower() + of + node
    if _GUID.fullmatch(text):
        is_decimal = len(text) > 16 and text.isdecimal()
        return f"0x{int(text, 10 if is_decimal else 16):016x}"
    return str(read_part_name(text))


# The vendor's numbers of a part, beside its name, for a person who must find it in the rack.


def place_numbers(place: SlotKey) -> str:
    """The numbers that the switch controller and nvidia-smi print for the place of a GPU."""
    return f"chassis {place.chassis_serial} slot {place.slot} module {place.module_id}"


def gpu_numbers(key: GpuKey) -> str:
    """All numbers of a GPU that any layer knows."""
    numbers = (
        key.place and place_numbers(key.place.value),
        key.fabric_guid and f"fabric GUID 0x{key.fabric_guid.value:016x}",
        key.gpu_uuid and key.gpu_uuid.value,
        key.pci_address and f"PCI {key.pci_address.value}",
    )
    return ", ".join(text for text in numbers if text)
