"""Which NIC each GPU is driven through, and on which processors. Pure."""

from collections.abc import Sequence

import msgspec

from rackloom.errors import Refused
from rackloom.topology.affinity import classes, partner
from rackloom.topology.machine import Machine, PathClass

_NEAREST_FIRST = tuple(PathClass)


class Pair(msgspec.Struct, frozen=True):
    """One GPU (or host memory) and the NIC that it is pinned to, by UCX's name."""

    device: str
    """As in `Seat.device`: `cpu`, `cuda:ADDRESS`, `fabric:ADDRESS`."""
    nic: str
    path_class: str | None = None
    """PIX, PXB, PHB, NODE or SYS of the two; None where nothing tells."""
    nearest_class: str | None = None
    """The class of the nearest NIC that this GPU has on its machine, claimed or not."""


def pair_up(machine: Machine, gpus: Sequence[int], nics: Sequence[int]) -> tuple[Pair, ...]:
    """One NIC for each of `gpus`: as many pairs as possible of the nearest class, then of the next.

    Raises:
        Refused: fewer NICs than GPUs, an index that the machine does not have, or a NIC without a name.
    """
    if len(nics) < len(gpus):
        raise Refused(
            f"{len(gpus)} GPUs and {len(nics)} NICs cannot be driven in pairs of their own",
            nearest_fix="claim one NIC for each GPU",
        )
    for index, devices in ((max(gpus, default=0), machine.gpus), (max(nics, default=0), machine.nics)):
        if index >= len(devices):
            raise Refused(f"{machine.name} has no device {index} of {len(devices)}")
    matrix = classes(machine)
    near = {gpu: {nic: _NEAREST_FIRST.index(matrix[gpu][nic].path_class) for nic in nics} for gpu in gpus}
    chosen = _match(near)
    return tuple(_pair(machine, gpu, chosen[gpu], matrix[gpu][chosen[gpu]].path_class) for gpu in gpus)


def spread_cores(ends: int, usable: Sequence[int]) -> list[tuple[int, ...]]:
    """A processor of its own for each polling end, as long as there are enough; else all for all.

    Ends that must share are left unpinned, so that the scheduler at least moves them; the report says so.
    """
    if len(usable) < ends:
        return [tuple(usable)] * ends
    each = len(usable) // ends
    return [tuple(usable[k * each : (k + 1) * each]) for k in range(ends)]


def shared_cores(cores: Sequence[Sequence[int]]) -> str | None:
    """One sentence if the ends of one host have fewer processors than they are, else None.

    Counting them together finds every overlap that forces two ends onto one processor.
    """
    together = {core for one in cores for core in one}
    if not together or len(together) >= len(cores):
        return None
    return f"{len(cores)} polling ends share {len(together)} processors"


def _match(near: dict[int, dict[int, int]]) -> dict[int, int]:
    """Maximum matching, grown class by class along augmenting paths; a GPU once matched stays matched."""
    taken: dict[int, int] = {}

    def place(gpu: int, limit: int, tried: set[int]) -> bool:
        for nic in sorted(near[gpu], key=lambda one: (near[gpu][one], one)):
            if near[gpu][nic] > limit or nic in tried:
                continue
            tried.add(nic)
            if nic not in taken or place(taken[nic], limit, tried):
                taken[nic] = gpu
                return True
        return False

    for limit in range(len(_NEAREST_FIRST)):
        for gpu in near:
            if gpu not in taken.values():
                place(gpu, limit, set())
    return {gpu: nic for nic, gpu in taken.items()}


def _pair(machine: Machine, gpu: int, nic: int, path_class: PathClass) -> Pair:
    device = machine.nics[nic]
    name = f"{device.rdma_device}:1" if device.rdma_device else device.if_name
    if name is None:
        raise Refused(f"NIC {nic} of {machine.name} has no name that UCX could be pinned to")
    best = partner(machine, gpu)
    known = path_class is not PathClass.UNKNOWN
    return Pair(
        f"cuda:{gpu}", name, path_class.value if known else None, best[0].path_class if best else None
    )
