"""How near each NIC is to each GPU, and who says so.

No single source is right on every machine: hypervisors hide bridges, drivers leave out NUMA nodes, and
nvidia-smi calls every pair of a Grace machine SYS. Each source is asked for what it proves; `nearest` alone
decides between the answers. docs/topology.md names the machines behind the rule.
"""

from collections.abc import Iterable
from typing import TypeVar

import msgspec

from rackloom.errors import Refused
from rackloom.topology.evidence import Cell, by_declaration, by_tree, by_vendor_switch
from rackloom.topology.facts import Fact, Source, directness
from rackloom.topology.machine import Gpu, Machine, Nic, PathClass, PciePath, numa_of

__all__ = ["Cell", "PathClass", "classes", "classify", "guest_view", "nearest", "numa_of", "partner"]

Device = TypeVar("Device", Gpu, Nic)
Known = TypeVar("Known", Fact[int], Fact[str], PciePath)

_NEARNESS = tuple(PathClass)
_SEEN_BY_THE_GUEST = frozenset({Source.SYSFS, Source.NVML})


def classes(machine: Machine) -> tuple[tuple[Cell, ...], ...]:
    """The GPU x NIC matrix, a row per GPU, from all that is known; excluded NICs have their column too."""
    return tuple(tuple(_cell(machine, gpu, nic) for nic in machine.nics) for gpu in machine.gpus)


def partner(machine: Machine, gpu_index: int) -> tuple[Cell, ...]:
    """The nearest NICs of a GPU: those of its nearest known class, excluded ones left out.

    Empty when no class is known. Refused when the machine has no such GPU.
    """
    if gpu_index not in range(len(machine.gpus)):
        fix = f"use an index below {len(machine.gpus)}" if machine.gpus else None
        raise Refused(f"{machine.name} has no GPU {gpu_index}", nearest_fix=fix)
    row = [_cell(machine, machine.gpus[gpu_index], nic) for nic in machine.nics if nic.excluded is None]
    known = [cell for cell in row if cell.path_class is not PathClass.UNKNOWN]
    return tuple(cell for cell in known if cell.path_class is nearest(known).path_class)


def classify(gpu: Gpu, nic: Nic) -> Cell:
    """The class that the facts of the two devices prove; UNKNOWN where they prove none."""
    return nearest([by_tree(gpu, nic), *by_vendor_switch(gpu, nic)])


def nearest(answers: Iterable[Cell]) -> Cell:
    """The fusion rule: the nearest class wins, and of equals the one with the most direct source.

    What hides topology (a hypervisor, a flat virtual root, a GPU on C2C) makes a pair look farther than it
    is, never nearer, so an answer that found something in common beats one that did not.
    """
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
    return nearest([classify(gpu, nic), *by_declaration(machine.declared_classes, gpu, nic)])


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
