"""Which GPU each NIC is nearest to, and on which rail it is. Pure."""

import msgspec

from rackloom.topology.affinity import partner
from rackloom.topology.machine import Machine, PathClass


class GpuPartner(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU that a NIC serves best."""

    uuid: str | None
    pci_address: str | None
    path_class: PathClass


def gpu_partners(machine: Machine) -> dict[int, GpuPartner]:
    """By NIC index. Where several GPUs share several NICs, the first of either go together, and so on."""
    rows = {gpu.index: partner(machine, gpu.index) for gpu in machine.gpus}
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, cells in rows.items():
        groups.setdefault(tuple(cell.nic for cell in cells), []).append(number)
    found: dict[int, GpuPartner] = {}
    for nics, gpus in sorted(groups.items(), key=lambda group: len(group[0]), reverse=True):
        for position, nic in enumerate(nics):
            gpu = machine.gpus[gpus[position % len(gpus)]]
            path_class = rows[gpu.index][position].path_class
            found[nic] = GpuPartner(uuid=gpu.uuid, pci_address=gpu.pci_address, path_class=path_class)
    return found


def rails(machine: Machine) -> dict[int, int]:
    """By NIC index: the NICs that carry data, counted in the order of their PCI addresses.

    On machines of one model the same position is cabled to the same leaf switch. A machine without RDMA has
    no rails; on one with, a NIC counts also while its RDMA device is away in a pod.
    """
    if all(nic.rdma_device is None for nic in machine.nics):
        return {}
    carrying = [nic.index for nic in machine.nics if nic.excluded is None and nic.pci_address is not None]
    return {index: rail for rail, index in enumerate(carrying)}
