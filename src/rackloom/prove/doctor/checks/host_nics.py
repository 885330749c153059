"""One host's GPUs and the NICs that are theirs, as its own files show them."""

from collections import defaultdict
from collections.abc import Iterator

from rackloom.prove.doctor.checks.here import Here
from rackloom.prove.doctor.checks.nics import FAR_APART, are_apart
from rackloom.prove.doctor.findings import Finding, Severity, fails
from rackloom.prove.doctor.names import NIC_ALIGNED
from rackloom.topology.affinity import Cell, numa_of, own_nics
from rackloom.topology.machine import Machine, Nic


def check_host_nics(machine: Machine, here: Here) -> Iterator[Finding]:
    """GPUs whose own NIC, the nearest that may carry data, is at another processor; those of one together.

    A host with fewer NICs than processors is made so, and nothing is wrong with it.
    """
    homes = {numa_of(gpu) for gpu in machine.gpus}
    if sum(nic.excluded is None for nic in machine.nics) < len(homes):
        return
    far: defaultdict[int | None, list[Cell]] = defaultdict(list)
    for index, cell in sorted(own_nics(machine).items()):
        home = numa_of(machine.gpus[index])
        if are_apart(home, numa_of(machine.nics[cell.nic]), (cell.path_class,)):
            far[home].append(cell)
    for cells in far.values():
        yield _far(machine, cells, here)


def _far(machine: Machine, cells: list[Cell], here: Here) -> Finding:
    gpus = ", ".join(str(cell.gpu) for cell in cells)
    return fails(
        NIC_ALIGNED,
        f"GPU {gpus} of {here.name}",
        FAR_APART,
        "rackloom topology discover  # on the host: is a nearer NIC missing or excluded?",
        severity=Severity.WARNING,
        evidence=(*(_path(machine, cell) for cell in cells), *_left_out(machine, cells)),
        where=here.places(*(machine.gpus[cell.gpu].pci_address for cell in cells)),
    )


def _path(machine: Machine, cell: Cell) -> str:
    gpu, nic = machine.gpus[cell.gpu], machine.nics[cell.nic]
    there = f"GPU {gpu.pci_address} is at {_numa(numa_of(gpu))}"
    return f"host: {there}, its nearest NIC {_name(nic)} at {_numa(numa_of(nic))} ({cell.path_class})"


def _left_out(machine: Machine, cells: list[Cell]) -> Iterator[str]:
    """NICs at the GPUs' own processor that may not carry data, and why."""
    homes = {numa_of(machine.gpus[cell.gpu]) for cell in cells} - {None}
    for nic in machine.nics:
        if nic.excluded is not None and numa_of(nic) in homes:
            yield f"host: NIC {_name(nic)} at {_numa(numa_of(nic))} is left out: {nic.excluded}"


def _name(nic: Nic) -> str:
    return nic.rdma_device or nic.if_name or nic.pci_address or str(nic.index)


def _numa(node: int | None) -> str:
    return "no NUMA node known" if node is None else f"NUMA node {node}"
