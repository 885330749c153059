"""How near each NIC is to each GPU, and who says so.

No single source is right on every machine: hypervisors hide bridges, drivers leave out NUMA nodes, and a
GPU on NVLink-C2C is SYS to every NIC. Each source is asked for what it proves; `_fused` alone decides between
the answers. docs/topology.md names the machines behind the rule.
"""

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from rackloom.errors import Refused
from rackloom.topology.evidence import Cell, by_declaration, by_tree, by_vendor_switch
from rackloom.topology.facts import Fact, Source, directness
from rackloom.topology.machine import Gpu, Machine, Nic, PathClass, PciePath, numa_of

__all__ = [
    "Cell",
    "PathClass",
    "classes",
    "classify",
    "guest_view",
    "nearest",
    "numa_of",
    "own_gpus",
    "own_nics",
    "partner",
]

Device = TypeVar("Device", Gpu, Nic)
Known = TypeVar("Known", Fact[int], Fact[str], PciePath)

_NEARNESS = tuple(PathClass)
_SWITCHED = frozenset({PathClass.PIX, PathClass.PXB})
_SEEN_BY_THE_GUEST = frozenset({Source.SYSFS, Source.NVML})


def classes(machine: Machine) -> tuple[tuple[Cell, ...], ...]:
    """The GPU x NIC matrix, a row per GPU, from all that is known; excluded NICs have their column too."""
    return tuple(tuple(_cell(machine, gpu, nic) for nic in machine.nics) for gpu in machine.gpus)


def partner(machine: Machine, gpu_index: int) -> tuple[Cell, ...]:
    """The nearest NICs of a GPU: those of its nearest known class, excluded ones left out.

    Where that class spans NUMA nodes (a Grace GPU is SYS to every NIC), those of the GPU's own node.
    Empty when no class is known. Refused when the machine has no such GPU.
    """
    if gpu_index not in range(len(machine.gpus)):
        fix = f"use an index below {len(machine.gpus)}" if machine.gpus else None
        raise Refused(f"{machine.name} has no GPU {gpu_index}", nearest_fix=fix)
    row = [_cell(machine, machine.gpus[gpu_index], nic) for nic in machine.nics if nic.excluded is None]
    known = [cell for cell in row if cell.path_class is not PathClass.UNKNOWN]
    best = tuple(cell for cell in known if cell.path_class is nearest(known).path_class)
    home = numa_of(machine.gpus[gpu_index])
    local = tuple(cell for cell in best if home is not None and numa_of(machine.nics[cell.nic]) == home)
    return local or best


def own_nics(machine: Machine) -> dict[int, Cell]:
    """The one NIC of each GPU that has a nearest one, by GPU index.

    Where several GPUs are equally near to several NICs, the first go together, and so on: as many GPUs as
    NICs then use as many NICs.
    """
    rows = _nearest_rows(machine)
    return {
        gpu: rows[gpu][position % len(nics)]
        for nics, gpus in _alike(rows)
        for position, gpu in enumerate(gpus)
    }


def own_gpus(machine: Machine) -> dict[int, Cell]:
    """The one GPU of each NIC that is nearest to any, by NIC index, paired as `own_nics` pairs them.

    A NIC that several groups of GPUs are nearest to belongs to the group with the fewest NICs.
    """
    rows = _nearest_rows(machine)
    return {
        nic: rows[gpus[position % len(gpus)]][position]
        for nics, gpus in sorted(_alike(rows), key=lambda group: len(group[0]), reverse=True)
        for position, nic in enumerate(nics)
    }


def _nearest_rows(machine: Machine) -> dict[int, tuple[Cell, ...]]:
    return {gpu.index: partner(machine, gpu.index) for gpu in machine.gpus}


def _alike(rows: dict[int, tuple[Cell, ...]]) -> list[tuple[tuple[int, ...], list[int]]]:
    """GPUs with the same nearest NICs together: the NICs, and the GPUs in order."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for gpu, cells in rows.items():
        if cells:
            groups.setdefault(tuple(cell.nic for cell in cells), []).append(gpu)
    return list(groups.items())


def classify(gpu: Gpu, nic: Nic) -> Cell:
    """The class that the facts of the two devices prove; UNKNOWN where they prove none."""
    return nearest([by_tree(gpu, nic), *by_vendor_switch(gpu, nic)])


def nearest(answers: Iterable[Cell]) -> Cell:
    """The nearest class, and of equals the one with the most direct source."""
    return min(answers, key=_preference)


def guest_view(machine: Machine) -> Machine:
    """The machine as its own kernel and driver show it: what files and people say is taken out."""
    return msgspec.structs.replace(
        machine,
        gpus=tuple(_as_guest(gpu) for gpu in machine.gpus),
        nics=tuple(_as_guest(nic) for nic in machine.nics),
        declared_classes=(),
    )


def _cell(machine: Machine, gpu: Gpu, nic: Nic) -> Cell:
    return _fused(classify(gpu, nic), tuple(by_declaration(machine.declared_classes, gpu, nic)))


def _fused(proven: Cell, stated: tuple[Cell, ...]) -> Cell:
    """A switch in common wins, then what was printed on this very machine, then what can be inferred.

    Hiding topology makes a pair look farther than it is, never nearer, so a switch that was found is there. A
    printed matrix is nvidia-smi's own answer, where roots and NUMA nodes only tell what it should be.
    """
    return nearest(stated) if stated and proven.path_class not in _SWITCHED else proven


def _preference(cell: Cell) -> tuple[int, int]:
    return _NEARNESS.index(cell.path_class), -1 if cell.source is None else directness(cell.source)


def _as_guest(device: Device) -> Device:
    return msgspec.structs.replace(
        device,
        numa_node=_if_seen(device.numa_node),
        pcie=_if_seen(device.pcie),
        vendor_switch=_if_seen(device.vendor_switch),
    )


def _if_seen(known: Known | None) -> Known | None:
    return known if known is not None and known.source in _SEEN_BY_THE_GUEST else None
