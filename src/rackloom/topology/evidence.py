"""What each source proves about one GPU x NIC pair, apart from what the others say.

The classes are nvidia-smi's. Every answer is the nearest class that its facts prove, so more knowledge of the
PCIe tree can only move a pair nearer.
"""

from collections.abc import Iterator
from itertools import takewhile

import msgspec

from rackloom.topology.facts import Source, least_direct
from rackloom.topology.machine import ClassRow, Gpu, Nic, PathClass, PciePath, numa_of


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """The class of one GPU x NIC pair."""

    gpu: int
    nic: int
    path_class: PathClass = msgspec.field(name="class")
    source: Source | None
    """The least direct source that the class rests on; None when the class is unknown."""
    reason: str
    """The facts that matched, or what is missing."""


def by_tree(gpu: Gpu, nic: Nic) -> Cell:
    """From PCIe ancestry and NUMA nodes; UNKNOWN where they decide nothing.

    A common bridge is asked for before the NUMA nodes: bytes that turn round in a switch reach no socket. A
    common root is asked for after them: virtual machines hang devices of both sockets below one root.
    """
    return _by_bridge(gpu, nic) or _by_numa_apart(gpu, nic) or _by_root(gpu, nic) or _by_numa_shared(gpu, nic)


def by_vendor_switch(gpu: Gpu, nic: Nic) -> Iterator[Cell]:
    """PIX where a vendor file puts both below one switch, else nothing: a file may leave devices out.

    In a NCCL topology file the address of the switch may be fictitious, so only equality counts.
    """
    here, there = gpu.vendor_switch, nic.vendor_switch
    if here is not None and there is not None and here.value == there.value:
        yield _proven(gpu, nic, PathClass.PIX, f"common switch {here.value}", here.source, there.source)


def by_declaration(rows: tuple[ClassRow, ...], gpu: Gpu, nic: Nic) -> Iterator[Cell]:
    """The class that a stated matrix gives the pair, if it covers it; a stated UNKNOWN says nothing."""
    for row in rows:
        covered = row.gpu == gpu.index and nic.index < len(row.classes)
        if covered and row.classes[nic.index] is not PathClass.UNKNOWN:
            yield _proven(gpu, nic, row.classes[nic.index], "matrix stated by the origin", Source.DECLARED)


def _by_bridge(gpu: Gpu, nic: Nic) -> Cell | None:
    if gpu.pcie is None or nic.pcie is None or gpu.pcie.root != nic.pcie.root:
        return None
    common = _common_bridges(gpu.pcie, nic.pcie)
    if not common:
        return None
    below = max(len(path.bridges or ()) - len(common) for path in (gpu.pcie, nic.pcie))
    found = PathClass.PIX if below <= 1 else PathClass.PXB
    return _proven(gpu, nic, found, f"common bridge {common[-1]}", gpu.pcie.source, nic.pcie.source)


def _common_bridges(one: PciePath, other: PciePath) -> list[str]:
    pairs = zip(one.bridges or (), other.bridges or (), strict=False)
    return [bridge for bridge, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _by_numa_apart(gpu: Gpu, nic: Nic) -> Cell | None:
    here, there = numa_of(gpu), numa_of(nic)
    if here is None or there is None or here == there:
        return None
    return _proven(gpu, nic, PathClass.SYS, f"NUMA nodes {here} and {there}", *_numa_sources(gpu, nic))


def _by_root(gpu: Gpu, nic: Nic) -> Cell | None:
    if gpu.pcie is None or nic.pcie is None or gpu.pcie.root != nic.pcie.root:
        return None
    whole = gpu.pcie.bridges is not None and nic.pcie.bridges is not None
    reason = f"common root {gpu.pcie.root}, {'no common bridge' if whole else 'bridges not known'}"
    return _proven(gpu, nic, PathClass.PHB, reason, gpu.pcie.source, nic.pcie.source)


def _by_numa_shared(gpu: Gpu, nic: Nic) -> Cell:
    nodes = {"GPU": numa_of(gpu), "NIC": numa_of(nic)}
    missing = " and ".join(device for device, node in nodes.items() if node is None)
    if missing:
        reason = f"no common root known, nor the NUMA node of {missing}"
        return Cell(gpu=gpu.index, nic=nic.index, path_class=PathClass.UNKNOWN, source=None, reason=reason)
    return _proven(gpu, nic, PathClass.NODE, f"common NUMA node {nodes['GPU']}", *_numa_sources(gpu, nic))


def _numa_sources(gpu: Gpu, nic: Nic) -> list[Source]:
    return [fact.source for fact in (gpu.numa_node, nic.numa_node) if fact is not None]


def _proven(gpu: Gpu, nic: Nic, found: PathClass, reason: str, *sources: Source) -> Cell:
    return Cell(gpu=gpu.index, nic=nic.index, path_class=found, source=least_direct(*sources), reason=reason)
