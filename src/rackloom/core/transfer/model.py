"""The rate to expect of each pair of GPU and NIC from the machine's wiring, without any measurement.

The line rate of a NIC bounds a pair, and the path class decides which share of it arrives. Two shares are
published: the nixl-kv-transfer example reached 78% of a 400 Gb/s NIC from its own NUMA node and 55% from
the other. Classes between these two are given as the range between them. GPUs that share a NIC divide its
line rate.

Every result carries the label that it was modelled and that nothing was moved.
"""

from collections import Counter

import msgspec

from rackloom.errors import Refused
from rackloom.topology.affinity import classes, own_nics
from rackloom.topology.machine import Machine, Nic, PathClass

MODEL_LABEL = "modelled from the wiring and two published shares of line rate; nothing was moved"
_NEAR_SHARE, _FAR_SHARE = 39.07 / 50, 27.54 / 50
_SHARE_RANGES = {
    PathClass.PIX: (_NEAR_SHARE, _NEAR_SHARE),
    PathClass.PXB: (_NEAR_SHARE, _NEAR_SHARE),
    PathClass.PHB: (_FAR_SHARE, _NEAR_SHARE),
    PathClass.NODE: (_FAR_SHARE, _NEAR_SHARE),
    PathClass.SYS: (_FAR_SHARE, _FAR_SHARE),
    PathClass.UNKNOWN: (_FAR_SHARE, _NEAR_SHARE),
}
"""Lowest and highest share of line rate of each class."""


class RateRange(msgspec.Struct, frozen=True):
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
    """Whether the wiring makes it this GPU's own NIC."""
    alone: RateRange | None
    """None: the NIC's line rate is not known."""
    together: RateRange | None
    """The rate when every GPU drives its own NIC, or None for the other pairs."""


class TransferModel(msgspec.Struct, frozen=True, kw_only=True):
    """All pairs of a machine, GPU by GPU."""

    machine: str
    label: str = MODEL_LABEL
    total_bytes: int
    pairs: tuple[ModelledPair, ...]


def model_transfers(machine: Machine, total_bytes: int) -> TransferModel:
    """The time of a transfer of `total_bytes` over each pair of `machine`. Excluded NICs are left out.

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
    return TransferModel(
        machine=machine.name,
        total_bytes=total_bytes,
        pairs=tuple(
            _modelled_pair(gpu.index, nic, matrix[gpu.index][nic.index].path_class, own, sharing, total_bytes)
            for gpu in machine.gpus
            for nic in nics
        ),
    )


def _modelled_pair(
    gpu: int, nic: Nic, path_class: PathClass, own: dict[int, int], sharing: Counter[int], total: int
) -> ModelledPair:
    is_own = own.get(gpu) == nic.index
    return ModelledPair(
        gpu=gpu,
        nic=nic.rdma_device or nic.if_name or nic.pci_address or f"nic-{nic.index}",
        path_class=path_class,
        line_rate_gigabits=nic.line_rate_gbps,
        own=is_own,
        alone=_rate_range(nic.line_rate_gbps, path_class, 1, total),
        together=_rate_range(nic.line_rate_gbps, path_class, sharing[nic.index], total) if is_own else None,
    )


def _rate_range(gigabits: int | None, path_class: PathClass, drivers: int, total: int) -> RateRange | None:
    """`drivers` GPUs divide the NIC's line, and no share of the path takes more than its part of it."""
    if not gigabits:
        return None
    low, high = (min(share, 1 / drivers) * gigabits / 8 for share in _SHARE_RANGES[path_class])
    return RateRange(low, high, total / high / 1e6, total / low / 1e6)
