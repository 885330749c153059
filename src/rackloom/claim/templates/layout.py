"""Which devices each request may take: groups of GPUs and NICs, spread over the places of a machine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from rackloom.claim.templates.hardware import Hardware
from rackloom.claim.templates.places import Place, near, places, rails
from rackloom.claim.templates.wish import Align, Wish
from rackloom.errors import Refused
from rackloom.topology.affinity import PathClass, classes

_UNITS = {Align.NUMA: "NUMA node", Align.PCIE: "PCIe switch or root", Align.RAIL: "group of neighbours"}


@dataclass(frozen=True, slots=True)
class Group:
    """A request for GPUs and one for NICs: how many, out of which."""

    gpu_count: int
    nic_count: int
    gpus: tuple[int, ...]
    nics: tuple[int, ...]
    place: Place


def groups_of(hardware: Hardware, wish: Wish) -> tuple[Group, ...]:
    """One group, or one per pair. Refused where the machine has no room for them."""
    found = places(hardware, wish.align)
    if not found:
        raise Refused(_nothing_near(hardware, wish.align))
    if wish.align is Align.RAIL:
        return tuple(_on_rails(hardware, wish, found))
    units = wish.units if wish.pairs else 1
    groups = [_of_place(wish, units, place) for place in _spread(hardware, wish, units, found)]
    return tuple(_moved_away(hardware, wish, groups, found)) if wish.unaligned else tuple(groups)


def _of_place(wish: Wish, units: int, place: Place) -> Group:
    return Group(wish.gpus // units, wish.nics // units, place.gpus, place.nics, place)


def _spread(hardware: Hardware, wish: Wish, units: int, found: Sequence[Place]) -> list[Place]:
    """A place for each unit, filled in order."""
    gpus, nics = wish.gpus // units, wish.nics // units
    room = [place for place in found for _ in range(min(len(place.gpus) // gpus, len(place.nics) // nics))]
    if len(room) < units:
        raise Refused(_too_few(hardware, wish, units, len(room), found))
    return room[:units]


def _moved_away(
    hardware: Hardware, wish: Wish, groups: Sequence[Group], found: Sequence[Place]
) -> Iterator[Group]:
    """The same GPUs, with NICs of a place that is far from them: across NUMA nodes if there is one."""
    left = {place: len(place.nics) for place in found}
    matrix = classes(hardware.machine)
    for group in groups:
        free = [place for place in found if place.nics and left[place] >= group.nic_count]
        far = [place for place in free if _far(hardware, wish.align, group.gpus, place.nics)]
        far.sort(key=lambda place: matrix[group.gpus[0]][place.nics[0]].path_class is not PathClass.SYS)
        if not far:
            raise Refused(f"{hardware.machine.name} has no NICs that are far from {group.place.title}")
        left[far[0]] -= group.nic_count
        yield Group(group.gpu_count, group.nic_count, group.gpus, far[0].nics, group.place)


def _on_rails(hardware: Hardware, wish: Wish, found: Sequence[Place]) -> Iterator[Group]:
    """Devices pinned one by one: the same rails on every node, each near a GPU of its unit."""
    order = rails(hardware)
    if not order:
        raise Refused(f"nothing that is published of {hardware.machine.name} tells the rail of a NIC")
    if wish.rails and max(wish.rails) >= len(order):
        fix = f"use --rail 0 to {len(order) - 1}"
        raise Refused(f"{hardware.machine.name} has {len(order)} rails", nearest_fix=fix)
    wanted = [order[rail] for rail in wish.rails] if wish.rails else _cards_apart(hardware, order)
    kept = [_only(place, wanted) for place in found]
    units = list(_pinned(wish, _spread(hardware, wish, wish.units, kept)))
    units = list(_moved_rails(hardware, units, wanted)) if wish.unaligned else units
    yield from units if wish.pairs else [_joined(units)]


def _only(place: Place, nics: Sequence[int]) -> Place:
    """The place with those of `nics` that it has, in their order."""
    return Place(
        title=place.title,
        gpus=place.gpus,
        nics=tuple(nic for nic in nics if nic in place.nics),
        source=place.source,
    )


def _cards_apart(hardware: Hardware, order: Sequence[int]) -> list[int]:
    """First functions before second ones: the two ports of a card share its bandwidth."""
    return sorted(order, key=lambda nic: (hardware.machine.nics[nic].pci_address or ".0").rpartition(".")[2])


def _pinned(wish: Wish, room: Sequence[Place]) -> Iterator[Group]:
    gpus, nics = wish.gpus // wish.units, wish.nics // wish.units
    used: dict[Place, int] = {}
    for place in room:
        turn = used[place] = used.get(place, -1) + 1
        yield Group(
            gpus,
            nics,
            place.gpus[turn * gpus : (turn + 1) * gpus],
            place.nics[turn * nics : (turn + 1) * nics],
            place,
        )


def _moved_rails(hardware: Hardware, units: Sequence[Group], wanted: Sequence[int]) -> Iterator[Group]:
    """The same GPUs on rails that are not theirs."""
    free = list(wanted)
    for unit in units:
        matrix = classes(hardware.machine)[unit.gpus[0]]
        far = [nic for nic in free if _far(hardware, Align.RAIL, unit.gpus, [nic])]
        far.sort(key=lambda nic: matrix[nic].path_class is not PathClass.SYS)
        if len(far) < unit.nic_count:
            raise Refused(f"{hardware.machine.name} has no rails that are far from {unit.place.title}")
        chosen = tuple(far[: unit.nic_count])
        free = [nic for nic in free if nic not in chosen]
        yield Group(unit.gpu_count, unit.nic_count, unit.gpus, chosen, unit.place)


def _far(hardware: Hardware, align: Align, gpus: Sequence[int], nics: Sequence[int]) -> bool:
    return not any(near(hardware.machine, align, gpu, nic) for gpu in gpus for nic in nics)


def _joined(units: Sequence[Group]) -> Group:
    gpus = tuple(chain.from_iterable(unit.gpus for unit in units))
    nics = tuple(chain.from_iterable(unit.nics for unit in units))
    return Group(len(gpus), len(nics), gpus, nics, units[0].place)


def _nothing_near(hardware: Hardware, align: Align) -> str:
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


def _too_few(hardware: Hardware, wish: Wish, units: int, room: int, found: Sequence[Place]) -> str:
    asked = f"{_counted(wish.gpus // units, 'GPU')} and {_counted(wish.nics // units, 'NIC')}"
    most = sorted({(len(place.gpus), len(place.nics)) for place in found}, reverse=True)
    has = " or ".join(f"{_counted(gpus, 'GPU')} and {_counted(nics, 'NIC')}" for gpus, nics in most)
    kind, name = _UNITS[wish.align], hardware.machine.name
    if units == 1:
        return f"no {kind} of {name} has {asked} (each has {has})"
    return f"{name} has room for {room} times {asked}, not {units} (a {kind} has {has})"


def _counted(count: int, kind: str) -> str:
    return f"{count} {kind}{'' if count == 1 else 's'}"
