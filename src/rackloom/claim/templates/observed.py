"""A machine as its own ResourceSlices show it.

That is less than a profile knows: drivers publish no bridges, older GPU drivers no NUMA node, and no driver
says which NIC must not carry data.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from rackloom.claim.allocate.candidates import Candidate
from rackloom.claim.templates.published import (
    GPU_IDS,
    GPU_MODEL,
    NIC_MODEL,
    NUMA_NODE,
    PCI_BUS_ID,
    PCIE_ROOT,
    RDMA,
    first_text,
    value_of,
)
from rackloom.topology.facts import Fact, Source
from rackloom.topology.machine import ClassRow, Gpu, Machine, Nic, PathClass, PciePath

_ADDRESSES = ("dra.net/pciAddress", PCI_BUS_ID)


def observed(node: str, gpus: Sequence[Candidate], nics: Sequence[Candidate]) -> Machine:
    """The machine of a node from what is published of its devices, in their order."""
    return Machine(
        name=node,
        note="From ResourceSlices.",
        origin=(),
        gpus=tuple(_gpu(index, one) for index, one in enumerate(gpus)),
        nics=tuple(_nic(index, one, why) for index, (one, why) in enumerate(_judged(nics))),
    )


def overlaid(seen: Machine, known: Machine) -> Machine:
    """`seen`, with the topology of `known` for devices at the same PCI address (or RDMA device)."""
    gpu_at: dict[str | None, Gpu] = {gpu.pci_address: gpu for gpu in known.gpus if gpu.pci_address}
    nic_at = {nic.pci_address or nic.rdma_device: nic for nic in known.nics}
    gpus = [(gpu, gpu_at.get(gpu.pci_address)) for gpu in seen.gpus]
    nics = [(nic, nic_at.get(nic.pci_address) or nic_at.get(nic.rdma_device)) for nic in seen.nics]
    return msgspec.structs.replace(
        seen,
        name=f"{seen.name} ({known.name})",
        gpus=tuple(msgspec.structs.replace(more, index=gpu.index) if more else gpu for gpu, more in gpus),
        nics=tuple(msgspec.structs.replace(more, index=nic.index) if more else nic for nic, more in nics),
        declared_classes=tuple(
            ClassRow(gpu=gpu.index, classes=tuple(_stated(known, of.index, nic) for _, nic in nics))
            for gpu, of in gpus
            if of is not None and known.declared_classes
        ),
    )


def _stated(known: Machine, gpu: int, nic: Nic | None) -> PathClass:
    """The declared class of a pair."""
    rows = [row.classes for row in known.declared_classes if row.gpu == gpu]
    covered = nic is not None and rows and nic.index < len(rows[0])
    return rows[0][nic.index] if nic is not None and covered else PathClass.UNKNOWN


def _gpu(index: int, one: Candidate) -> Gpu:
    return Gpu(
        index=index,
        product=first_text(one, (GPU_MODEL,)),
        pci_address=first_text(one, GPU_IDS),
        numa_node=_numa(one, (NUMA_NODE,)),
        pcie=_path(one),
    )


def _nic(index: int, one: Candidate, excluded: str | None) -> Nic:
    return Nic(
        index=index,
        pci_address=first_text(one, _ADDRESSES),
        if_name=first_text(one, ("dra.net/ifName",)),
        rdma_device=first_text(one, ("dra.net/rdmaDevice",)),
        model=first_text(one, ("dra.net/pciDevice",)),
        numa_node=_numa(one, ("dra.net/numaNode", NUMA_NODE)),
        pcie=_path(one),
        excluded=excluded,
    )


def _judged(nics: Sequence[Candidate]) -> list[tuple[Candidate, str | None]]:
    """Each NIC with the reason why it must not carry data, as far as that can be seen.

    A machine's data NICs are of one kind: next to eight EFA, two ConnectX-7 manage the NVLink switches (HGX
    B200); next to eight ConnectX-8, a BlueField is the management network (GB200).
    """
    able = [one for one in nics if value_of(one, RDMA)]
    kinds = Counter(_model(one) for one in able)
    most = max(kinds.values(), default=0)
    return [(one, _unfit(one, kinds[_model(one)] if value_of(one, RDMA) else None, most)) for one in nics]


def _unfit(one: Candidate, alike: int | None, most: int) -> str | None:
    if alike is None:
        return "not an RDMA device"
    if alike < most:
        return f"another kind of RDMA device than {most} others of the node"
    return None


def _model(one: Candidate) -> tuple[object, ...]:
    return tuple(value_of(one, name) for name in NIC_MODEL)


def _numa(one: Candidate, names: Sequence[str]) -> Fact[int] | None:
    for name in names:
        found = one.attribute(name)
        listed = () if found is None else found.ints or ()
        value = listed[0] if listed else value_of(one, name)
        if isinstance(value, int):
            return Fact(value, Source.SYSFS)
    return None


def _path(one: Candidate) -> PciePath | None:
    root = value_of(one, PCIE_ROOT)
    return PciePath(root=root, bridges=None, source=Source.SYSFS) if isinstance(root, str) else None
