"""Where each GPU sits in its machine, and which NIC is its own."""

from collections.abc import Mapping

from rackloom.claim.node.values import Value
from rackloom.topology.affinity import numa_of, own_nics
from rackloom.topology.evidence import Cell
from rackloom.topology.machine import Gpu, Machine


class NicPartner(Value, frozen=True, kw_only=True):
    """The NIC of a GPU. `path_class` is what lies between them, in nvidia-smi's letters."""

    rdma: str | None
    pci_address: str | None
    path_class: str


class Place(Value, frozen=True, kw_only=True):
    """Where a GPU sits; None is not known."""

    pcie_root: str | None = None
    numa_node: int | None = None
    nic: NicPartner | None = None


NOWHERE = Place()


def places(machine: Machine) -> Mapping[str, Place]:
    """The place of each GPU, by PCI address."""
    own = own_nics(machine)
    return {
        gpu.pci_address: _place(machine, gpu, own.get(gpu.index))
        for gpu in machine.gpus
        if gpu.pci_address is not None
    }


def _place(machine: Machine, gpu: Gpu, cell: Cell | None) -> Place:
    return Place(
        pcie_root=None if gpu.pcie is None else gpu.pcie.root,
        numa_node=numa_of(gpu),
        nic=None if cell is None else _partner(machine, cell),
    )


def _partner(machine: Machine, cell: Cell) -> NicPartner:
    nic = machine.nics[cell.nic]
    return NicPartner(
        rdma=nic.rdma_device or nic.if_name, pci_address=nic.pci_address, path_class=cell.path_class.value
    )
