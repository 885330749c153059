"""Where nothing can be moved: what a machine's wiring lets expect of each GPU and NIC. Pure, no measurement.

A NIC's line rate bounds a pair, and how near it is to the GPU decides which share of it arrives. Two shares
are published: the nixl-kv-transfer example reached 78% of a 400 Gb/s NIC from its own NUMA node and 55% from
the other. What lies between those two classes is only known to lie between those two rates.
"""

from collections import Counter

import msgspec

from rackloom.errors import Refused
from rackloom.topology.affinity import classes, own_nics
from rackloom.topology.machine import Machine, Nic, PathClass

LABEL = "modelled from the wiring and two published shares of line rate; nothing was moved"
_NEAR, _FAR = 39.07 / 50, 27.54 / 50
_SHARES = {
    PathClass.PIX: (_NEAR, _NEAR),
    PathClass.PXB: (_NEAR, _NEAR),
    PathClass.PHB: (_FAR, _NEAR),
    PathClass.NODE: (_FAR, _NEAR),
    PathClass.SYS: (_FAR, _FAR),
    PathClass.UNKNOWN: (_FAR, _NEAR),
}
"""Lowest and highest share of line rate of each class."""


class Between(msgspec.Struct, frozen=True):
    """A range of rates in decimal GB/s, and the milliseconds of one transfer at its ends."""

    low_GBps: float  # noqa: N815 (as in every other report)
    high_GBps: float  # noqa: N815
    best_ms: float
    worst_ms: float


class ModelledPair(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU and one NIC."""

    gpu: int
    nic: str
    path_class: PathClass
    line_rate_gigabits: int | None
    own: bool
    """Whether it is the NIC that is this GPU's by its wiring."""
    alone: Between | None
    """None: the NIC's line rate is not known."""
    together: Between | None
    """When every GPU drives its own NIC; None for the other pairs."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """All pairs of a machine, GPU by GPU."""

    machine: str
    label: str = LABEL
    total_bytes: int
    pairs: tuple[ModelledPair, ...]


def model(machine: Machine, total_bytes: int) -> Model:
    """What a transfer of `total_bytes` can take over each pair of `machine`, excluded NICs left out.

    Raises:
        Refused: the machine has no GPU, or no NIC that may carry data.
    """
    nics = [nic for nic in machine.nics if nic.excluded is None]
    if not machine.gpus or not nics:
        raise Refused(
            f"{machine.name} has {len(machine.gpus)} GPUs and {len(nics)} NICs for data: there is no pair",
            nearest_fix="name a machine with both, as `rackloom topology list` prints them",
        )
    matrix, own = classes(machine), {gpu: cell.nic for gpu, cell in own_nics(machine).items()}
    sharing = Counter(own.values())
    return Model(
        machine=machine.name,
        total_bytes=total_bytes,
        pairs=tuple(
            _pair(gpu.index, nic, matrix[gpu.index][nic.index].path_class, own, sharing, total_bytes)
            for gpu in machine.gpus
            for nic in nics
        ),
    )


def _pair(
    gpu: int, nic: Nic, path_class: PathClass, own: dict[int, int], sharing: Counter[int], total: int
) -> ModelledPair:
    is_own = own.get(gpu) == nic.index
    return ModelledPair(
        gpu=gpu,
        nic=nic.rdma_device or nic.if_name or nic.pci_address or f"nic-{nic.index}",
        path_class=path_class,
        line_rate_gigabits=nic.line_rate_gbps,
        own=is_own,
        alone=_between(nic.line_rate_gbps, path_class, 1, total),
        together=_between(nic.line_rate_gbps, path_class, sharing[nic.index], total) if is_own else None,
    )


def _between(gigabits: int | None, path_class: PathClass, drivers: int, total: int) -> Between | None:
    """`drivers` GPUs divide the NIC's line, and no share of the path takes more than its part of it."""
    if not gigabits:
        return None
    low, high = (min(share, 1 / drivers) * gigabits / 8 for share in _SHARES[path_class])
    return Between(low, high, total / high / 1e6, total / low / 1e6)
