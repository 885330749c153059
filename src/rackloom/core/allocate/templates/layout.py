"""The GPUs and NICs that a template brings together, from the topology and the requested alignment.

A `TemplateRequest` gives counts and an alignment: one NUMA node, one PCIe switch or root, or fixed
rails. `affinity_groups` divides a machine into groups of GPUs and NICs that are near each other. No
device is in two groups, and NICs that must not carry data are left out. For NUMA alignment a device
without a known node takes that of the other devices below its PCIe root. For PCIe alignment GPUs with
the same nearest NICs form a group.

`request_pairs` fills the groups in order with the units of the request (the smallest ratio of GPUs to
NICs), or refuses and reports the machine's own counts. With `pairs`, each unit gets a pair of requests.
Rails pin devices one by one: the same NIC positions on every node, first functions of a card before second
ones, because the ports of a card share its bandwidth. `unaligned` picks NICs that are not near the GPUs,
across NUMA nodes if possible: the other arm of a comparison.

Whether a selector can name a group is decided in `generate`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from math import gcd
from re import findall

import msgspec

from rackloom.core.allocate.templates.inventory import NodeType
from rackloom.errors import Refused
from rackloom.topology.affinity import Cell, classes, partner
from rackloom.topology.machine import Gpu, Machine, Nic, PathClass, numa_of

# The request.


MAX_DEVICES = 32
"""Devices that one claim can be given (resource.k8s.io/v1)."""

_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class Align(StrEnum):
    """The part of a machine that a GPU and a NIC must share."""

    NUMA = "numa"
    """A NUMA node."""
    PCIE = "pcie"
    """A PCIe switch or root, as near as the machine has it."""
    RAIL = "rail"
    """The NICs are the same ones on every node, each near a GPU of the claim."""


class TemplateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The counts and the alignment of a claim's devices."""

    gpus: int
    nics: int
    align: Align
    pairs: bool = False
    """One pair of requests for each unit of the ratio of GPUs to NICs, each aligned separately."""
    unaligned: bool = False
    """NICs that are not near the GPUs: the other arm of a comparison."""
    rails: tuple[int, ...] = ()
    """Positions of the NICs on each node. If empty, any that fit."""
    name: str | None = None

    @property
    def units(self) -> int:
        """The number of times that the request holds the smallest ratio of GPUs to NICs."""
        return gcd(self.gpus, self.nics)

    @property
    def title(self) -> str:
        """The name of the template."""
        parts = [f"{self.gpus}gpu-{self.nics}nic-{self.align}", "pairs" if self.pairs else ""]
        parts.append("unaligned" if self.unaligned else "aligned")
        return self.name or "-".join(part for part in parts if part)

    @property
    def flags(self) -> str:
        """The request as options of the command."""
        words = [f"--gpus {self.gpus} --nics {self.nics} --align {self.align}"]
        words += ["--pairs"] if self.pairs else []
        words += ["--unaligned"] if self.unaligned else []
        words += [f"--rail {' '.join(map(str, self.rails))}"] if self.rails else []
        return " ".join(words)


def require_servable(asked: TemplateRequest) -> None:
    """Raises Refused if no machine could serve the request."""
    if asked.gpus < 1 or asked.nics < 1:
        raise Refused("a claim with alignment has GPUs and NICs", nearest_fix="ask for at least one of each")
    if asked.gpus + asked.nics > MAX_DEVICES:
        raise Refused(f"{asked.gpus + asked.nics} devices are more than a claim can hold ({MAX_DEVICES})")
    if asked.rails and asked.align is not Align.RAIL:
        raise Refused("rails are pinned under --align rail only", nearest_fix="use --align rail")
    if asked.rails and len(set(asked.rails)) != asked.nics:
        fix = f"use --nics {len(set(asked.rails))}"
        raise Refused(f"{len(set(asked.rails))} rails for {asked.nics} NICs", nearest_fix=fix)
    if not _DNS_LABEL.fullmatch(asked.title):
        fix = "use up to 63 of a-z, 0-9 and - with a letter or digit at both ends"
        raise Refused(f"{asked.title!r} cannot be the name of a template", nearest_fix=fix)


# Affinity groups, from the topology alone.


_BELOW_ONE_ROOT = frozenset({PathClass.PIX, PathClass.PXB, PathClass.PHB})


class AffinityGroup(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs and NICs that are all near each other."""

    title: str
    gpus: tuple[int, ...]
    nics: tuple[int, ...]
    source: str
    """The source of the fact that they belong together."""


def affinity_groups(hardware: NodeType, align: Align) -> tuple[AffinityGroup, ...]:
    """The groups of a machine under one alignment, in the order of their GPUs, with NICs that may carry data.

    No GPU and no NIC is in two groups.
    """
    if align is Align.NUMA:
        return tuple(_groups_by_numa(hardware))
    return tuple(_groups_by_nearest_nics(hardware.machine, align))


def nics_by_rail(hardware: NodeType) -> tuple[int, ...]:
    """NICs by rail: data NICs in the order of their PCI addresses, or else of their RDMA or interface names.

    Machines of one kind are wired alike, so the same position is the same rail on each of them.
    """
    nics = [hardware.machine.nics[index] for index in hardware.usable]
    for name in ("pci_address", "rdma_device", "if_name"):
        names = {nic.index: getattr(nic, name) for nic in nics}
        # Names of different kinds cannot be compared, so one kind has to name all NICs.
        if all(names.values()):
            return tuple(sorted(names, key=lambda index: _natural_order(names[index])))
    return ()


def inferred_numa_node(machine: Machine, device: Gpu | Nic) -> int | None:
    """The NUMA node of a device. If it is unknown, that of all devices below the same PCI root."""
    own = numa_of(device)
    if own is not None or device.pcie is None:
        return own
    root = device.pcie.root
    peers: chain[Gpu | Nic] = chain(machine.gpus, machine.nics)
    nodes = {numa_of(peer) for peer in peers if peer.pcie is not None and peer.pcie.root == root} - {None}
    return nodes.pop() if len(nodes) == 1 else None


def is_near(machine: Machine, align: Align, gpu: int, nic: int) -> bool:
    """Whether a pair is aligned, by the topology."""
    if align is Align.NUMA:
        node = inferred_numa_node(machine, machine.gpus[gpu])
        return node is not None and node == inferred_numa_node(machine, machine.nics[nic])
    return any(cell.nic == nic for cell in _nearest_nics(machine, align, gpu))


def _groups_by_numa(hardware: NodeType) -> Iterator[AffinityGroup]:
    machine = hardware.machine
    nodes = dict.fromkeys(inferred_numa_node(machine, gpu) for gpu in machine.gpus)
    for node in sorted(node for node in nodes if node is not None):
        gpus = [gpu for gpu in machine.gpus if inferred_numa_node(machine, gpu) == node]
        usable = [machine.nics[index] for index in hardware.usable]
        nics = [nic for nic in usable if inferred_numa_node(machine, nic) == node]
        facts = [*(gpu.numa_node for gpu in gpus), *(nic.numa_node for nic in nics)]
        known = sorted({str(fact.source) for fact in facts if fact is not None})
        yield AffinityGroup(
            title=f"NUMA node {node}",
            gpus=tuple(gpu.index for gpu in gpus),
            nics=tuple(nic.index for nic in nics),
            source=", ".join([*known, *(["common PCI roots"] if None in facts else [])]),
        )


def _groups_by_nearest_nics(machine: Machine, align: Align) -> Iterator[AffinityGroup]:
    """GPUs that have the same nearest NICs form a group. A NIC of an earlier group is not given again."""
    found: dict[tuple[int, ...], list[int]] = {}
    cells: dict[tuple[int, ...], Cell] = {}
    for gpu in machine.gpus:
        row = _nearest_nics(machine, align, gpu.index)
        nics = tuple(cell.nic for cell in row)
        if row:
            found.setdefault(nics, []).append(gpu.index)
            cells.setdefault(nics, row[0])
    taken: set[int] = set()
    for nics, gpus in found.items():
        cell = cells[nics]
        free = tuple(nic for nic in nics if nic not in taken)
        taken.update(free)
        title = f"{cell.path_class}, {cell.reason}"
        yield AffinityGroup(title=title, gpus=tuple(gpus), nics=free, source=str(cell.source))


def _nearest_nics(machine: Machine, align: Align, gpu: int) -> tuple[Cell, ...]:
    """The nearest NICs of a GPU, if near enough: one root, or for rails also one NUMA node."""
    row = partner(machine, gpu)
    return tuple(
        cell
        for cell in row
        if cell.path_class in _BELOW_ONE_ROOT
        or (align is Align.RAIL and is_near(machine, Align.NUMA, gpu, cell.nic))
    )


def _natural_order(text: str) -> tuple[tuple[bool, int, str], ...]:
    """mlx5_2 before mlx5_10. PCI addresses stay as they are, because their hex digits have one width."""
    if ":" in text:
        return ((False, 0, text),)
    parts = findall(r"\d+|\D+", text)
    return tuple((part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts)


# Pairs of requests, spread over the affinity groups.


_GROUP_KINDS = {Align.NUMA: "NUMA node", Align.PCIE: "PCIe switch or root", Align.RAIL: "group of neighbours"}


@dataclass(frozen=True, slots=True)
class RequestPair:
    """A request for GPUs and one for NICs: how many, out of which."""

    gpu_count: int
    nic_count: int
    gpus: tuple[int, ...]
    nics: tuple[int, ...]
    affinity: AffinityGroup


def request_pairs(hardware: NodeType, asked: TemplateRequest) -> tuple[RequestPair, ...]:
    """One group, or one per pair. Raises Refused if the machine has no room for them."""
    found = affinity_groups(hardware, asked.align)
    if not found:
        raise Refused(_nothing_near(hardware, asked.align))
    if asked.align is Align.RAIL:
        return tuple(_pairs_on_rails(hardware, asked, found))
    units = asked.units if asked.pairs else 1
    groups = [
        RequestPair(asked.gpus // units, asked.nics // units, group.gpus, group.nics, group)
        for group in _groups_with_room(hardware, asked, units, found)
    ]
    return tuple(_with_far_nics(hardware, asked, groups, found)) if asked.unaligned else tuple(groups)


def _groups_with_room(
    hardware: NodeType, asked: TemplateRequest, units: int, found: Sequence[AffinityGroup]
) -> list[AffinityGroup]:
    """A group for each unit, filled in order."""
    gpus, nics = asked.gpus // units, asked.nics // units
    room = [
        affinity
        for affinity in found
        for _ in range(min(len(affinity.gpus) // gpus, len(affinity.nics) // nics))
    ]
    if len(room) < units:
        needed = f"{_counted(gpus, 'GPU')} and {_counted(nics, 'NIC')}"
        # The counts of the groups, each once and the largest first.
        most = sorted({(len(affinity.gpus), len(affinity.nics)) for affinity in found}, reverse=True)
        has = " or ".join(f"{_counted(gpus, 'GPU')} and {_counted(nics, 'NIC')}" for gpus, nics in most)
        kind, name = _GROUP_KINDS[asked.align], hardware.machine.name
        if units == 1:
            raise Refused(f"no {kind} of {name} has {needed} (each has {has})")
        raise Refused(f"{name} has room for {len(room)} times {needed}, not {units} (a {kind} has {has})")
    return room[:units]


def _with_far_nics(
    hardware: NodeType, asked: TemplateRequest, groups: Sequence[RequestPair], found: Sequence[AffinityGroup]
) -> Iterator[RequestPair]:
    """The same GPUs, with NICs of a group that is far from them: across NUMA nodes if there is one."""
    left = {affinity: len(affinity.nics) for affinity in found}
    matrix = classes(hardware.machine)
    for group in groups:
        free = [affinity for affinity in found if affinity.nics and left[affinity] >= group.nic_count]
        far = [affinity for affinity in free if _are_far(hardware, asked.align, group.gpus, affinity.nics)]
        far.sort(key=lambda affinity: matrix[group.gpus[0]][affinity.nics[0]].path_class is not PathClass.SYS)
        if not far:
            raise Refused(f"{hardware.machine.name} has no NICs that are far from {group.affinity.title}")
        left[far[0]] -= group.nic_count
        yield RequestPair(group.gpu_count, group.nic_count, group.gpus, far[0].nics, group.affinity)


def _pairs_on_rails(
    hardware: NodeType, asked: TemplateRequest, found: Sequence[AffinityGroup]
) -> Iterator[RequestPair]:
    """Devices pinned one by one: the same rails on every node, each near a GPU of its unit."""
    order = nics_by_rail(hardware)
    if not order:
        raise Refused(f"nothing that is published of {hardware.machine.name} tells the rail of a NIC")
    if asked.rails and max(asked.rails) >= len(order):
        fix = f"use --rail 0 to {len(order) - 1}"
        raise Refused(f"{hardware.machine.name} has {len(order)} rails", nearest_fix=fix)
    wanted = [order[rail] for rail in asked.rails]
    if not wanted:
        # First functions before second ones: the two ports of a card share its bandwidth.
        addresses = {nic.index: nic.pci_address or ".0" for nic in hardware.machine.nics}
        wanted = sorted(order, key=lambda nic: addresses[nic].rpartition(".")[2])
    # Of each group only the wanted NICs count, in their order.
    kept = [
        msgspec.structs.replace(group, nics=tuple(nic for nic in wanted if nic in group.nics))
        for group in found
    ]
    gpus, nics = asked.gpus // asked.units, asked.nics // asked.units
    units: list[RequestPair] = []
    used: dict[AffinityGroup, int] = {}
    # Each unit takes the next devices of its group, so that no device is pinned twice.
    for group in _groups_with_room(hardware, asked, asked.units, kept):
        turn = used[group] = used.get(group, -1) + 1
        own_gpus = group.gpus[turn * gpus : (turn + 1) * gpus]
        own_nics = group.nics[turn * nics : (turn + 1) * nics]
        units.append(RequestPair(gpus, nics, own_gpus, own_nics, group))
    if asked.unaligned:
        units = list(_with_far_rails(hardware, units, wanted))
    if asked.pairs:
        yield from units
        return
    all_gpus = tuple(chain.from_iterable(unit.gpus for unit in units))
    all_nics = tuple(chain.from_iterable(unit.nics for unit in units))
    yield RequestPair(len(all_gpus), len(all_nics), all_gpus, all_nics, units[0].affinity)


def _with_far_rails(
    hardware: NodeType, units: Sequence[RequestPair], wanted: Sequence[int]
) -> Iterator[RequestPair]:
    """The same GPUs on rails that are not theirs."""
    free = list(wanted)
    for unit in units:
        matrix = classes(hardware.machine)[unit.gpus[0]]
        far = [nic for nic in free if _are_far(hardware, Align.RAIL, unit.gpus, [nic])]
        far.sort(key=lambda nic: matrix[nic].path_class is not PathClass.SYS)
        if len(far) < unit.nic_count:
            raise Refused(f"{hardware.machine.name} has no rails that are far from {unit.affinity.title}")
        chosen = tuple(far[: unit.nic_count])
        free = [nic for nic in free if nic not in chosen]
        yield RequestPair(unit.gpu_count, unit.nic_count, unit.gpus, chosen, unit.affinity)


def _are_far(hardware: NodeType, align: Align, gpus: Sequence[int], nics: Sequence[int]) -> bool:
    return not any(is_near(hardware.machine, align, gpu, nic) for gpu in gpus for nic in nics)


def _nothing_near(hardware: NodeType, align: Align) -> str:
    name = hardware.machine.name
    for devices, kind in ((hardware.gpus, "GPUs"), (hardware.nics, "NICs")):
        if not devices:
            return f"no {kind} are published for {name}"
    if not hardware.usable:
        return f"{name} has no NIC that may carry data"
    if align is Align.NUMA:
        return f"the NUMA nodes of the GPUs of {name} are not known"
    if align is Align.PCIE:
        return f"no NIC of {name} is known to be below one PCIe root with a GPU"
    return f"it is not known which NIC of {name} is near which GPU"


def _counted(count: int, kind: str) -> str:
    return f"{count} {kind}{'' if count == 1 else 's'}"
