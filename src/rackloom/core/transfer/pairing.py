"""The choice of a NIC for each GPU, and of the processors for its ends.

`pair_up` gives each GPU its own NIC: as few pairs as possible of the farthest PCIe path class, then
of the next nearer, and so on. It is a minimum-cost bipartite matching by successive shortest augmenting
paths. A pair of one class costs more than one pair for every GPU of all nearer classes, so the sum
compares the classes in that order. `every_pair` is the whole matrix instead. `are_disjoint` tests whether
pairs can be driven at once without sharing a GPU or a NIC.

Both ends of a transfer poll. `spread_cores` gives each end an equal part of the processors, and
`without_core` counts the ends of a host that must share one: a maximum bipartite matching
of ends and processors by augmenting paths (Kuhn's algorithm).

GPUs are named by PCI address, because CUDA orders them by speed and not by slot.
"""

from collections.abc import Sequence

import msgspec

from rackloom.core.transfer.values import EndConfig, Measurement, UcxPins
from rackloom.errors import Refused
from rackloom.topology.affinity import classes, partner
from rackloom.topology.machine import Machine, Nic, PathClass


class GpuNicPair(msgspec.Struct, frozen=True):
    """One GPU (or host memory) and the NIC that it is pinned to, by UCX's name."""

    device: str
    """As in `EndConfig.device`: `cpu`, `cuda:ADDRESS`, `fabric:ADDRESS`."""
    nic: str
    path_class: str | None = None
    """PIX, PXB, PHB, NODE or SYS of the two, or None if not known."""
    nearest_class: str | None = None
    """The class of the nearest NIC of this GPU on its machine, claimed or not."""


def pair_up(machine: Machine, gpus: Sequence[int], nics: Sequence[int]) -> tuple[GpuNicPair, ...]:
    """One NIC for each of `gpus`: as few pairs as possible of the farthest class, then of the next nearer.

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
            raise Refused(
                f"{machine.name} has no device {index} of {len(devices)}", nearest_fix="count from 0"
            )
    matrix = classes(machine)
    # A pair of one class costs more than one pair for every GPU of the class before it.
    steps = {path_class: (len(gpus) + 1) ** k for k, path_class in enumerate(PathClass)}
    chosen = _cheapest_matching(
        {gpu: {nic: steps[matrix[gpu][nic].path_class] for nic in nics} for gpu in gpus}
    )
    return tuple(_named_pair(machine, gpu, chosen[gpu]) for gpu in gpus)


def device_indices(
    machine: Machine, gpus: Sequence[str], nics: Sequence[str] | None
) -> tuple[list[int], list[int]]:
    """Indices of GPUs by PCI address and of NICs by any of their names. None selects every usable NIC.

    Raises:
        Refused: the machine does not have a device of that name.
    """
    by_address = {gpu.pci_address: gpu.index for gpu in machine.gpus}
    by_name = {name: nic.index for nic in machine.nics for name in _nic_names(nic)}
    lacking = [name for name in gpus if name not in by_address]
    lacking += [name for name in nics or () if name not in by_name]
    if lacking:
        raise Refused(
            f"{machine.name} has no {', '.join(lacking)}",
            nearest_fix="name devices as `rackloom topology discover` prints them",
        )
    usable = [nic.index for nic in machine.nics if nic.excluded is None and nic.rdma_device is not None]
    return [by_address[gpu] for gpu in gpus], usable if nics is None else [by_name[nic] for nic in nics]


def describe_pair(machine: Machine | None, device: str, address: str | None, nic: str) -> GpuNicPair:
    """A pair that the user chose, with its path classes if known. `address` is that of `device`."""
    gpus, nics = ((), ()) if machine is None else (machine.gpus, machine.nics)
    gpu = next((gpu for gpu in gpus if address and gpu.pci_address == address), None)
    found = next((known for known in nics if nic.split(":", 1)[0] in _nic_names(known)), None)
    if machine is None or gpu is None or found is None:
        return GpuNicPair(device, nic)
    return msgspec.structs.replace(_pair_classes(machine, gpu.index, found.index), device=device, nic=nic)


def pinned_config(config: EndConfig, pair: GpuNicPair) -> EndConfig:
    """The configuration of an end that drives a pair: its memory, and UCX pinned to its NIC."""
    pins = UcxPins(config.ucx.transports, (pair.nic,))
    return msgspec.structs.replace(config, device=pair.device, ucx=pins)


def every_pair(machine: Machine, gpus: Sequence[int], nics: Sequence[int]) -> tuple[GpuNicPair, ...]:
    """The whole matrix, row by row."""
    return tuple(_named_pair(machine, gpu, nic) for gpu in gpus for nic in nics)


def are_disjoint(pairs: Sequence[GpuNicPair]) -> bool:
    """Whether several pairs can be driven at once without meeting on a GPU or a NIC."""
    gpus = [pair.device for pair in pairs if pair.device != "cpu"]
    nics = [pair.nic for pair in pairs]
    return len(pairs) > 1 and len({*gpus}) == len(gpus) and len({*nics}) == len(nics)


def spread_cores(ends: int, usable: Sequence[int]) -> list[tuple[int, ...]]:
    """Equal parts of the processors, one for each polling end, or empty parts if the ends outnumber them.

    An empty part leaves the choice to the scheduler, as in `EndConfig.cores`.
    """
    each = len(usable) // ends
    return [tuple(usable[k * each : (k + 1) * each]) for k in range(ends)]


def lack_of_processors(measured: Sequence[Measurement]) -> str | None:
    """One sentence if the ends of one host have fewer processors than they need for polling, else None."""
    hosts: dict[str, list[Sequence[int]]] = {}
    for host in (end.host for measurement in measured for end in (measurement.initiator, measurement.target)):
        hosts.setdefault(host.hostname, []).append(host.cores or range(host.usable_processors))
    for name, cores in hosts.items():
        if lacking := without_core(cores):
            return f"{lacking} of {len(cores)} polling ends on {name} have no processor of their own"
    return None


def without_core(cores: Sequence[Sequence[int]]) -> int:
    """The number of ends of one host that must share a processor, given the processors that each may use."""
    owner: dict[int, int] = {}

    def assign(end: int, tried: set[int]) -> bool:
        # A core may be taken if it is free, or if its owner can move to another one (an augmenting path).
        for core in cores[end]:
            if core not in tried:
                tried.add(core)
                if core not in owner or assign(owner[core], tried):
                    owner[core] = end
                    return True
        return False

    return sum(not assign(end, set()) for end in range(len(cores)))


def _cheapest_matching(cost: dict[int, dict[int, int]]) -> dict[int, int]:
    """NIC of each GPU at the least total cost: shortest augmenting paths, one GPU after the other."""
    owner: dict[int, int] = {}
    for gpu, row in cost.items():
        reach, before = _shortest_paths(row, cost, owner)
        # Invariant: the GPUs so far have NICs of least total cost. The cheapest path to a free NIC keeps it:
        # each owner along the path moves to the next NIC, and the new GPU takes the first.
        nic = min((free for free in row if free not in owner), key=lambda free: reach[free])
        while (previous := before[nic]) is not None:
            owner[nic], nic = owner[previous], previous
        owner[nic] = gpu
    return {gpu: nic for nic, gpu in owner.items()}


def _shortest_paths(
    row: dict[int, int], cost: dict[int, dict[int, int]], owner: dict[int, int]
) -> tuple[dict[int, int], dict[int, int | None]]:
    """The cost of giving a GPU each NIC, and the NIC whose owner then moves there (None: no owner)."""
    # Bellman-Ford: moving an owner to a cheaper NIC is an edge of negative cost.
    reach, before = dict(row), dict.fromkeys(row)
    shorter = True
    while shorter:
        shorter = False
        for nic, gpu in owner.items():
            for target, price in cost[gpu].items():
                through = reach[nic] - cost[gpu][nic] + price
                if through < reach[target]:
                    reach[target], before[target], shorter = through, nic, True
    return reach, before


def _named_pair(machine: Machine, gpu: int, nic: int) -> GpuNicPair:
    device = machine.nics[nic]
    port = min(device.rdma_ports, default=1)
    name = f"{device.rdma_device}:{port}" if device.rdma_device else device.if_name
    if name is None:
        raise Refused(
            f"NIC {nic} of {machine.name} has no name that UCX could be pinned to",
            nearest_fix="leave it out, or bind its driver",
        )
    gpu_name = machine.gpus[gpu].pci_address or gpu  # CUDA's own order is by speed, not by slot
    return msgspec.structs.replace(_pair_classes(machine, gpu, nic), device=f"cuda:{gpu_name}", nic=name)


def _pair_classes(machine: Machine, gpu: int, nic: int) -> GpuNicPair:
    mine, best = classes(machine)[gpu][nic].path_class, partner(machine, gpu)
    known = None if mine is PathClass.UNKNOWN else mine.value
    return GpuNicPair("", "", known, best[0].path_class.value if best else None)


def _nic_names(nic: Nic) -> set[str]:
    return {name for name in (nic.if_name, nic.rdma_device, nic.pci_address) if name is not None}
