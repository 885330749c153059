"""Which GPU each NIC is nearest to, and on which rail it is. Pure."""

import msgspec

from rackloom.topology.affinity import own_gpus
from rackloom.topology.evidence import Cell
from rackloom.topology.machine import Gpu, Machine, PathClass


class GpuPartner(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU that a NIC serves best."""

    uuid: str | None
    pci_address: str | None
    path_class: PathClass


def gpu_partners(machine: Machine) -> dict[int, GpuPartner]:
    """By NIC index; NICs that are near to no GPU have none."""
    return {nic: _partner(machine.gpus[cell.gpu], cell) for nic, cell in own_gpus(machine).items()}


def _partner(gpu: Gpu, cell: Cell) -> GpuPartner:
    return GpuPartner(uuid=gpu.uuid, pci_address=gpu.pci_address, path_class=cell.path_class)


def rails(machine: Machine) -> dict[int, int]:
    """By NIC index: the NICs that carry data, counted in the order of their PCI addresses.

    On machines of one model the same position is cabled to the same leaf switch. A machine without RDMA has
    no rails; on one with, a NIC counts also while its RDMA device is away in a pod.
    """
    if all(nic.rdma_device is None for nic in machine.nics):
        return {}
    carrying = [nic.index for nic in machine.nics if nic.excluded is None and nic.pci_address is not None]
    return {index: rail for rail, index in enumerate(carrying)}
