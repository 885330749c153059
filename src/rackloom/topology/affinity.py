"""The path class of each GPU and NIC pair, the source that proves it, and which belong together.

The classes are those of `nvidia-smi topo`. Each source is first evaluated alone, and answers with the
nearest class that its facts prove:

1. The PCIe tree and NUMA nodes (`by_tree`): a common bridge (PIX, PXB), different NUMA nodes (SYS), a
   common root (PHB), a common NUMA node (NODE). The bridge comes before the NUMA nodes, because traffic
   that turns around in a switch reaches no socket. The root comes after them, because virtual machines
   attach devices of both sockets to one root.
2. A vendor topology file (`by_vendor_switch`) that puts both devices below one switch.
3. A matrix that the origin of the machine states (`by_declaration`).

A common switch wins over a stated matrix: hiding topology makes a pair look farther, never nearer.
Otherwise the stated matrix wins over a class that is inferred from roots and NUMA nodes.

`partner` lists the nearest NICs of a GPU. If their class spans NUMA nodes (a Grace GPU on NVLink-C2C is SYS
to every NIC), the NICs of the GPU's own node are meant. `own_nics` and `own_gpus` assign one to each
device: GPUs with the same nearest NICs are paired with them in order, so that as many GPUs as NICs use
different NICs.

Three machines are behind these rules. The guest of Azure ND H100 v5 shows NUMA nodes only, and the
vendor's file gives PIX. The documentation of GKE A4 has no NIC addresses, and its printed matrix gives PIX.
On OCI GB200 nvidia-smi prints SYS for all pairs, though NUMA nodes would suggest NODE for half of them.
"""

from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import TypeVar

import msgspec

from rackloom.errors import Refused
from rackloom.topology.join_key import Fact, Source, directness, least_direct
from rackloom.topology.machine import ClassRow, Gpu, Machine, Nic, PathClass, PciePath, numa_of

# The class that each source alone proves for one pair.


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """The class of one GPU x NIC pair."""

    gpu: int
    nic: int
    path_class: PathClass = msgspec.field(name="class")
    source: Source | None
    """The least direct source that the class rests on. None if the class is unknown."""
    reason: str
    """The facts that matched, or the missing ones."""


def by_tree(gpu: Gpu, nic: Nic) -> Cell:
    """The class by PCIe ancestry and NUMA nodes, or UNKNOWN if they decide nothing.

    A common bridge is tried before the NUMA nodes, because traffic that turns around in a switch reaches no
    socket. A common root is tried after them: virtual machines put devices of both sockets below one root.
    """
    return _by_bridge(gpu, nic) or _by_numa_apart(gpu, nic) or _by_root(gpu, nic) or _by_numa_shared(gpu, nic)


def by_vendor_switch(gpu: Gpu, nic: Nic) -> Iterator[Cell]:
    """PIX if a vendor file puts both below one switch, else nothing: a file may leave devices out.

    In a NCCL topology file the address of the switch may be fictitious, so only equality counts.
    """
    here, there = gpu.vendor_switch, nic.vendor_switch
    if here is not None and there is not None and here.value == there.value:
        yield _cell_for(gpu, nic, PathClass.PIX, f"common switch {here.value}", here.source, there.source)


def by_declaration(rows: tuple[ClassRow, ...], gpu: Gpu, nic: Nic) -> Iterator[Cell]:
    """The class of the pair in a stated matrix, if the matrix has one that is not UNKNOWN."""
    for row in rows:
        covered = row.gpu == gpu.index and nic.index < len(row.classes)
        if covered and row.classes[nic.index] is not PathClass.UNKNOWN:
            yield _cell_for(gpu, nic, row.classes[nic.index], "matrix stated by the origin", Source.DECLARED)


def _by_bridge(gpu: Gpu, nic: Nic) -> Cell | None:
    if gpu.pcie is None or nic.pcie is None or gpu.pcie.root != nic.pcie.root:
        return None
    pairs = zip(gpu.pcie.bridges or (), nic.pcie.bridges or (), strict=False)
    common = [bridge for bridge, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    if not common:
        return None
    below = max(len(path.bridges or ()) - len(common) for path in (gpu.pcie, nic.pcie))
    found = PathClass.PIX if below <= 1 else PathClass.PXB
    return _cell_for(gpu, nic, found, f"common bridge {common[-1]}", gpu.pcie.source, nic.pcie.source)


def _by_numa_apart(gpu: Gpu, nic: Nic) -> Cell | None:
    here, there = numa_of(gpu), numa_of(nic)
    if here is None or there is None or here == there:
        return None
    return _cell_for(gpu, nic, PathClass.SYS, f"NUMA nodes {here} and {there}", *_numa_sources(gpu, nic))


def _by_root(gpu: Gpu, nic: Nic) -> Cell | None:
    if gpu.pcie is None or nic.pcie is None or gpu.pcie.root != nic.pcie.root:
        return None
    whole = gpu.pcie.bridges is not None and nic.pcie.bridges is not None
    reason = f"common root {gpu.pcie.root}, {'no common bridge' if whole else 'bridges not known'}"
    return _cell_for(gpu, nic, PathClass.PHB, reason, gpu.pcie.source, nic.pcie.source)


def _by_numa_shared(gpu: Gpu, nic: Nic) -> Cell:
    nodes = {"GPU": numa_of(gpu), "NIC": numa_of(nic)}
    missing = " and ".join(device for device, node in nodes.items() if node is None)
    if missing:
        reason = f"no common root known, nor the NUMA node of {missing}"
        return Cell(gpu=gpu.index, nic=nic.index, path_class=PathClass.UNKNOWN, source=None, reason=reason)
    return _cell_for(gpu, nic, PathClass.NODE, f"common NUMA node {nodes['GPU']}", *_numa_sources(gpu, nic))


def _numa_sources(gpu: Gpu, nic: Nic) -> list[Source]:
    return [fact.source for fact in (gpu.numa_node, nic.numa_node) if fact is not None]


def _cell_for(gpu: Gpu, nic: Nic, found: PathClass, reason: str, *sources: Source) -> Cell:
    return Cell(gpu=gpu.index, nic=nic.index, path_class=found, source=least_direct(*sources), reason=reason)


# The fused matrix, and the pairing that follows from it.


Device = TypeVar("Device", Gpu, Nic)
Known = TypeVar("Known", Fact[int], Fact[str], PciePath)

_NEARNESS = tuple(PathClass)
_SWITCHED = frozenset({PathClass.PIX, PathClass.PXB})
_GUEST_SOURCES = frozenset({Source.SYSFS, Source.NVML})


def classes(machine: Machine) -> tuple[tuple[Cell, ...], ...]:
    """The GPU x NIC matrix from all sources, one row per GPU. Excluded NICs have a column, too."""
    return tuple(tuple(_matrix_cell(machine, gpu, nic) for nic in machine.nics) for gpu in machine.gpus)


def partner(machine: Machine, gpu_index: int) -> tuple[Cell, ...]:
    """The nearest NICs of a GPU: those of its nearest known class, excluded ones left out.

    If that class spans NUMA nodes (a Grace GPU is SYS to every NIC), those of the GPU's own node. Empty if no
    class is known. Raises Refused if the machine has no such GPU.
    """
    if gpu_index not in range(len(machine.gpus)):
        fix = f"use an index below {len(machine.gpus)}" if machine.gpus else None
        raise Refused(f"{machine.name} has no GPU {gpu_index}", nearest_fix=fix)
    row = [
        _matrix_cell(machine, machine.gpus[gpu_index], nic) for nic in machine.nics if nic.excluded is None
    ]
    known = [cell for cell in row if cell.path_class is not PathClass.UNKNOWN]
    best = tuple(cell for cell in known if cell.path_class is nearest(known).path_class)
    home = numa_of(machine.gpus[gpu_index])
    local = tuple(cell for cell in best if home is not None and numa_of(machine.nics[cell.nic]) == home)
    return local or best


def own_nics(machine: Machine) -> dict[int, Cell]:
    """The one NIC of each GPU that has a nearest one, by GPU index.

    If several GPUs are equally near to several NICs, they are paired in order, so that as many GPUs as NICs
    use different NICs.
    """
    rows = _nearest_rows(machine)
    return {
        gpu: rows[gpu][position % len(nics)]
        for nics, gpus in _gpus_by_nearest_nics(rows)
        for position, gpu in enumerate(gpus)
    }


def own_gpus(machine: Machine) -> dict[int, Cell]:
    """The one GPU of each NIC that is nearest to any, by NIC index, paired as `own_nics` pairs them.

    A NIC that several groups of GPUs are nearest to belongs to the group with the fewest NICs.
    """
    rows = _nearest_rows(machine)
    return {
        nic: rows[gpus[position % len(gpus)]][position]
        for nics, gpus in sorted(_gpus_by_nearest_nics(rows), key=lambda group: len(group[0]), reverse=True)
        for position, nic in enumerate(nics)
    }


def _nearest_rows(machine: Machine) -> dict[int, tuple[Cell, ...]]:
    return {gpu.index: partner(machine, gpu.index) for gpu in machine.gpus}


def _gpus_by_nearest_nics(rows: dict[int, tuple[Cell, ...]]) -> list[tuple[tuple[int, ...], list[int]]]:
    """GPUs with the same nearest NICs together: the NICs, and the GPUs in order."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for gpu, cells in rows.items():
        if cells:
            groups.setdefault(tuple(cell.nic for cell in cells), []).append(gpu)
    return list(groups.items())


def classify(gpu: Gpu, nic: Nic) -> Cell:
    """The class that the facts of the two devices prove, or UNKNOWN."""
    return nearest([by_tree(gpu, nic), *by_vendor_switch(gpu, nic)])


def nearest(answers: Iterable[Cell]) -> Cell:
    """The nearest class, and of equals the one with the most direct source."""
    return min(answers, key=_preference)


def guest_view(machine: Machine) -> Machine:
    """The machine as its own kernel and driver report it, without facts from files and declarations."""
    return msgspec.structs.replace(
        machine,
        gpus=tuple(_as_guest(gpu) for gpu in machine.gpus),
        nics=tuple(_as_guest(nic) for nic in machine.nics),
        declared_classes=(),
    )


def _matrix_cell(machine: Machine, gpu: Gpu, nic: Nic) -> Cell:
    return _fuse_classes(classify(gpu, nic), tuple(by_declaration(machine.declared_classes, gpu, nic)))


def _fuse_classes(proven: Cell, stated: tuple[Cell, ...]) -> Cell:
    """A common switch wins, then a matrix that the origin states, then the inferred class.

    Hiding topology makes a pair look farther than it is, never nearer, so a switch that was found exists. A
    stated matrix was printed by nvidia-smi. Roots and NUMA nodes only predict its output.
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


def _if_seen(fact: Known | None) -> Known | None:
    return fact if fact is not None and fact.source in _GUEST_SOURCES else None
