"""Where on a machine GPUs and NICs are near each other: NUMA nodes, or the NICs of a switch or root.

A place is told from the topology alone; whether a selector can name it is another matter.
"""

from collections.abc import Iterator
from itertools import chain
from re import findall

import msgspec

from rackloom.claim.templates.hardware import Hardware
from rackloom.claim.templates.wish import Align
from rackloom.topology.affinity import Cell, PathClass, numa_of, partner
from rackloom.topology.machine import Gpu, Machine, Nic

_BELOW_ONE_ROOT = frozenset({PathClass.PIX, PathClass.PXB, PathClass.PHB})


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs and NICs that are all near each other."""

    title: str
    gpus: tuple[int, ...]
    nics: tuple[int, ...]
    source: str
    """Who says that they belong together."""


def places(hardware: Hardware, align: Align) -> tuple[Place, ...]:
    """The places of a machine for one notion of near, in the order of their GPUs; NICs without data left out.

    No GPU and no NIC is in two places.
    """
    if align is Align.NUMA:
        return tuple(_by_numa(hardware))
    return tuple(_by_partners(hardware.machine, align))


def rails(hardware: Hardware) -> tuple[int, ...]:
    """NICs by rail: data NICs in the order of their PCI addresses, else of their RDMA or interface names.

    Machines of one kind are wired alike, so the same position is the same rail on each of them.
    """
    nics = [hardware.machine.nics[index] for index in hardware.usable]
    for name in ("pci_address", "rdma_device", "if_name"):
        told = {nic.index: getattr(nic, name) for nic in nics}
        if all(told.values()):
            return tuple(sorted(told, key=lambda index: _natural(told[index])))
    return ()


def home(machine: Machine, device: Gpu | Nic) -> int | None:
    """The NUMA node of a device; where it is not known, that of all devices below the same PCI root."""
    own = numa_of(device)
    if own is not None or device.pcie is None:
        return own
    root = device.pcie.root
    peers: chain[Gpu | Nic] = chain(machine.gpus, machine.nics)
    nodes = {numa_of(one) for one in peers if one.pcie is not None and one.pcie.root == root} - {None}
    return nodes.pop() if len(nodes) == 1 else None


def near(machine: Machine, align: Align, gpu: int, nic: int) -> bool:
    """Whether a pair is aligned, by the topology."""
    if align is Align.NUMA:
        here, there = home(machine, machine.gpus[gpu]), home(machine, machine.nics[nic])
        return here is not None and here == there
    return any(cell.nic == nic for cell in _partners(machine, align, gpu))


def _by_numa(hardware: Hardware) -> Iterator[Place]:
    machine = hardware.machine
    nodes = dict.fromkeys(home(machine, gpu) for gpu in machine.gpus)
    for node in sorted(node for node in nodes if node is not None):
        gpus = [gpu for gpu in machine.gpus if home(machine, gpu) == node]
        usable = [machine.nics[index] for index in hardware.usable]
        nics = [nic for nic in usable if home(machine, nic) == node]
        facts = [*(gpu.numa_node for gpu in gpus), *(nic.numa_node for nic in nics)]
        known = sorted({str(fact.source) for fact in facts if fact is not None})
        yield Place(
            title=f"NUMA node {node}",
            gpus=tuple(gpu.index for gpu in gpus),
            nics=tuple(nic.index for nic in nics),
            source=", ".join([*known, *(["common PCI roots"] if None in facts else [])]),
        )


def _by_partners(machine: Machine, align: Align) -> Iterator[Place]:
    """GPUs that have the same nearest NICs share a place; NICs of an earlier place are not given again."""
    found: dict[tuple[int, ...], list[int]] = {}
    cells: dict[tuple[int, ...], Cell] = {}
    for gpu in machine.gpus:
        row = _partners(machine, align, gpu.index)
        nics = tuple(cell.nic for cell in row)
        if row:
            found.setdefault(nics, []).append(gpu.index)
            cells.setdefault(nics, row[0])
    taken: set[int] = set()
    for nics, gpus in found.items():
        cell = cells[nics]
        free = tuple(nic for nic in nics if nic not in taken)
        taken.update(free)
        title = f"{cell.path_class}, {cell.reason}"
        yield Place(title=title, gpus=tuple(gpus), nics=free, source=str(cell.source))


def _partners(machine: Machine, align: Align, gpu: int) -> tuple[Cell, ...]:
    """The nearest NICs of a GPU, if near is near enough: one root; for rails, one NUMA node will do."""
    row = partner(machine, gpu)
    return tuple(
        cell
        for cell in row
        if cell.path_class in _BELOW_ONE_ROOT
        or (align is Align.RAIL and near(machine, Align.NUMA, gpu, cell.nic))
    )


def _natural(text: str) -> tuple[tuple[bool, int, str], ...]:
    """mlx5_2 before mlx5_10; PCI addresses, whose digits are hexadecimal and of one width, as they are."""
    if ":" in text:
        return ((False, 0, text),)
    parts = findall(r"\d+|\D+", text)
    return tuple((part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts)
