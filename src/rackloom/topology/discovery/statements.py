"""What files say of a machine beyond its own kernel: a vendor's topology, a person's corrections."""

from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree as ET

import msgspec

from rackloom.errors import Refused
from rackloom.topology.discovery.pci import pci_address
from rackloom.topology.facts import Source
from rackloom.topology.machine import PathClass, PciePath

LARGEST_FILE = 4 * 1024 * 1024
_AS_NCCL_HAS_IT = "give the file that NCCL_TOPO_FILE names"


class VendorTopology(msgspec.Struct, frozen=True):
    """Of a NCCL topology file: the PCIe switch above each device, and the NUMA node of its processor."""

    switches: Mapping[str, str] = {}
    numa_nodes: Mapping[str, int] = {}


class DeclaredDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is declared of one device; None says nothing."""

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


class Declared(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A declaration: devices by PCI address or name, and a matrix by the same names.

    A GPU that the kernel does not list (it has no driver yet) is added.
    """

    gpus: Mapping[str, DeclaredDevice] = {}
    nics: Mapping[str, DeclaredDevice] = {}
    classes: Mapping[str, Mapping[str, PathClass]] = {}


NOTHING_DECLARED = Declared()


def read_declared(content: bytes, name: str) -> Declared:
    """Read a declaration from JSON. Raises Refused, which names the field."""
    try:
        return msgspec.json.decode(content, type=Declared)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(
            f"{name}: {error}", nearest_fix="docs/discovery.md shows what a declaration may hold"
        ) from error


def read_nccl_topology(content: bytes, name: str) -> VendorTopology:
    """Read a NCCL topology file (XML of `cpu`, `pci`, `gpu` and `nic` elements). Raises Refused.

    Document type declarations are refused: they can make a small file expand without end.
    """
    try:
        # Only UTF-8 is searched for declarations, so only UTF-8 may reach the parser, which knows others by
        # their zero bytes.
        text = content.decode()
        if len(content) > LARGEST_FILE or "\0" in text or "<!" in text.replace("<!--", ""):
            raise Refused(
                f"{name}: over {LARGEST_FILE} bytes, not UTF-8, or with a document type declaration",
                nearest_fix=_AS_NCCL_HAS_IT,
            )
        root = ET.fromstring(text)  # noqa: S314 - declarations are refused above
    except (ET.ParseError, UnicodeDecodeError) as error:
        raise Refused(f"{name}: {error}", nearest_fix=_AS_NCCL_HAS_IT) from error
    switches: dict[str, str] = {}
    numa: dict[str, int] = {}
    for cpu in root.iter("cpu"):
        for found in cpu.iter("pci"):
            _note(found, cpu.attrib, switches, numa)
    return VendorTopology(switches, numa)


def _note(switch: ET.Element, cpu: Mapping[str, Any], switches: dict[str, str], numa: dict[str, int]) -> None:
    """The devices right below a switch; in these files a switch is a `pci` that holds others."""
    for below in switch.findall("pci"):
        address = pci_address(below.attrib.get("busid", ""))
        if address is None or below.find("pci") is not None:
            continue
        switches[address] = switch.attrib.get("busid", "").lower()
        node = cpu.get("numaid", "")
        if node.isascii() and node.isdigit() and len(node) < 6:
            numa[address] = int(node)
