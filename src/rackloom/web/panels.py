"""What the panels derive from the map: free capacity, and where on the map findings are.

Free capacity is counted in whole free trays; a tray whose state is unknown counts as not free, and so
does an empty tray with GPUs in a partition that the site did not make, which is counted apart. The
largest gang that fits is the most free trays of one NVLink domain, because GPUs of two domains share no
memory. Free GPUs in partly used trays are stranded.

A finding or an operation names things: GPU, device, pod, node, machine, partition, domain. It is shown at
the finest place that is known: its GPU, its tray, or its racks. Only GPUs whose chain the viewer may see
name anything, so a tenant is led to its own GPUs alone. Findings name few of all things, so the names of a
rack are written out only where a rack may have one of them: `RackPlaces` knows its names down to trays.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import msgspec

from rackloom.core.diagnosis.index import (
    at_device,
    at_domain,
    at_logical,
    at_machine,
    at_node,
    at_partition,
    at_pod,
    places_around,
)
from rackloom.core.diagnosis.snapshot import GpuChain, grouped
from rackloom.web.model import MapGpu, MapRack, tray_free, tray_partly_taken
from rackloom.web.racks import rack_id

# Free capacity.


class FreeCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """Free trays, over the site and in its roomiest domain."""

    free_trays: int
    unknown_trays: int
    """Trays for which it is not known whether they are free."""
    foreign_trays: int
    """Empty trays that get no instance, because a partition that the site did not make holds GPUs of them."""
    gang_trays: int
    """Trays of the largest gang that fits: GPUs of two domains share no memory."""
    gang_gpus: int
    stranded_gpus: int
    """Free GPUs in trays that are partly taken: no whole tray can be had of them."""


class RackCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """What is free in one rack."""

    free_trays: int
    unknown_trays: int
    foreign_trays: int
    stranded_gpus: int
    gangs: Mapping[str, tuple[int, int]]
    """Free trays, and the GPUs in them, of each domain."""


def rack_capacity(rack: MapRack) -> RackCapacity:
    """Count what is free in one rack. A tray with an unknown state counts as not free."""
    frees = [tray_free(tray) for tray in rack.trays]
    free = [tray for tray, is_free in zip(rack.trays, frees, strict=True) if is_free]
    partly = [tray for tray in rack.trays if tray_partly_taken(tray)]
    gangs: dict[str, tuple[int, int]] = {}
    for tray in free:
        if domain := tray[0].domain:
            trays, gpus = gangs.get(domain, (0, 0))
            gangs[domain] = trays + 1, gpus + len(tray)
    return RackCapacity(
        free_trays=len(free),
        unknown_trays=frees.count(None),
        foreign_trays=sum(
            any(gpu.foreign for gpu in tray) and not tray_partly_taken(tray) for tray in rack.trays
        ),
        stranded_gpus=sum(gpu.taken is False for tray in partly for gpu in tray),
        gangs=gangs,
    )


def site_capacity(rooms: Collection[RackCapacity]) -> FreeCapacity:
    """What is free in all racks; a domain may lie in several."""
    gangs = grouped(pair for room in rooms for pair in room.gangs.items())
    sums = (tuple(map(sum, zip(*gangs[domain], strict=True))) for domain in sorted(gangs))
    trays, gpus = max(sums, key=lambda gang: gang[1], default=(0, 0))
    return FreeCapacity(
        free_trays=sum(room.free_trays for room in rooms),
        unknown_trays=sum(room.unknown_trays for room in rooms),
        foreign_trays=sum(room.foreign_trays for room in rooms),
        gang_trays=trays,
        gang_gpus=gpus,
        stranded_gpus=sum(room.stranded_gpus for room in rooms),
    )


# Locations of findings and operations.


MAX_LOCATIONS = 3
"""Places of one finding that are named; the rest is counted."""
_FINEST_FIRST = (("gpu", "device", "pod"), ("node", "machine"), ("partition", "logical", "domain"))
_GPUS, _RACKS = 0, 2


class MapSpot(msgspec.Struct, frozen=True, gc=False):
    """One GPU on the map, as the page names it."""

    rack: str
    rack_id: str
    tray: int
    """From the top."""
    gpu: int
    """From the left."""
    slot: str


class PlaceLink(msgspec.Struct, frozen=True):
    """A link to an element of the page: a GPU or a rack."""

    id: str
    words: str


class FoundLocations(msgspec.Struct, frozen=True):
    """Links to the locations of a finding or an operation."""

    named: tuple[PlaceLink, ...] = ()
    more: int = 0
    """Number of further locations."""


PlacesByName = Mapping[str, Sequence[MapSpot]]
"""By the names of `Finding.where`: the GPUs that the named object is, has or serves."""


class RackPlaces:
    """The locations of all names in one rack, worked out when they are asked for."""

    def __init__(self, rack: MapRack) -> None:
        self._rack = rack

    @cached_property
    def coarse(self) -> frozenset[str]:
        """Its names without those of single GPUs and devices, whose domain or node stands for them."""
        gpus = [gpu for tray in self._rack.trays for gpu in tray if gpu.chain is not None]
        chains = [gpu.chain for gpu in gpus if gpu.chain is not None]
        devices = {device.node for chain in chains for device in (chain.device, *chain.nics) if device}
        partitions = {(seen.domain, seen.name) for chain in chains if (seen := chain.partition) is not None}
        logicals = {chain.wanted.logical for chain in chains if chain.wanted is not None}
        domains = {gpu.domain for gpu in gpus} | {chain.fabric.domain for chain in chains if chain.fabric}
        return frozenset(
            [
                *map(at_node, devices),
                *map(at_machine, {chain.machine.id for chain in chains if chain.machine is not None}),
                *(at_partition(*partition) for partition in partitions),
                *map(at_domain, domains),
                *(at_logical(logical) for logical in logicals if logical is not None),
                *map(at_pod, {pod for chain in chains if chain.use is not None for pod in chain.use.pods}),
            ]
        )

    @cached_property
    def by_name(self) -> PlacesByName:
        """The locations of every name."""
        rack, id_ = self._rack, rack_id(self._rack.name)
        found: dict[str, list[MapSpot]] = {}
        for tray, gpus in enumerate(rack.trays):
            for number, gpu in enumerate(gpus):
                if gpu.chain is not None:
                    spot = MapSpot(rack.name, id_, tray, number, _slot_name(gpu))
                    for name in _names_of_gpu(gpu, gpu.chain):
                        found.setdefault(name, []).append(spot)
        return found


def _coarse(name: str) -> str:
    """The name in `RackPlaces.coarse` without which a rack does not have this name."""
    kind, _, rest = name.partition(" ")
    if kind == "gpu":
        return at_domain(rest.rpartition("/")[0])
    return at_node(rest.partition("/")[0]) if kind == "device" else name


def _slot_name(gpu: MapGpu) -> str:
    return f"slot {gpu.place.slot}" if gpu.place.chassis else f"node {gpu.place.node}"


def _names_of_gpu(gpu: MapGpu, chain: GpuChain) -> Iterator[str]:
    yield from places_around((chain,))
    yield from map(at_device, chain.nics)
    if gpu.domain:
        yield at_domain(gpu.domain)
    if chain.wanted is not None and chain.wanted.logical is not None:
        yield at_logical(chain.wanted.logical)
    if chain.use is not None:
        yield from map(at_pod, chain.use.pods)


def places_named(racks: Iterable[RackPlaces], wanted: Collection[str]) -> PlacesByName:
    """The locations of some names, in the order of the racks."""
    names, coarse = frozenset(wanted), frozenset(map(_coarse, wanted))
    some = [rack.by_name for rack in racks if not coarse.isdisjoint(rack.coarse)] if names else []
    return grouped((name, spot) for rack in some for name in rack.keys() & names for spot in rack[name])


def finest_names(where: Sequence[str]) -> tuple[str, ...]:
    """Of what a finding names, the finest objects: what it is about, without what surrounds them."""
    by_kind = (tuple(name for name in where if name.partition(" ")[0] in kinds) for kinds in _FINEST_FIRST)
    return next((names for names in by_kind if names), ())


def locate(where: Sequence[str], places: PlacesByName) -> FoundLocations:
    """The finest known location: the GPU, the tray, or the racks."""
    for fineness, kinds in enumerate(_FINEST_FIRST):
        names = (name for name in where if name.partition(" ")[0] in kinds)
        if spots := list(dict.fromkeys(spot for name in names for spot in places.get(name, ()))):
            found = _place_links(spots, fineness)
            return FoundLocations(tuple(found[:MAX_LOCATIONS]), max(0, len(found) - MAX_LOCATIONS))
    return FoundLocations()


def _place_links(spots: Sequence[MapSpot], fineness: int) -> list[PlaceLink]:
    """Links to racks, trays or GPUs; GPUs of one tray get one link, to the first of them."""
    if fineness == _RACKS:
        return [PlaceLink(id_, rack) for id_, rack in {spot.rack_id: spot.rack for spot in spots}.items()]
    trays = grouped(((spot.rack_id, spot.tray), spot) for spot in spots)
    return [_tray_link(some, one_gpu=fineness == _GPUS and len(some) == 1) for some in trays.values()]


def _tray_link(spots: Sequence[MapSpot], *, one_gpu: bool) -> PlaceLink:
    first = spots[0]
    tray = f"{first.rack} {first.slot}"
    words = f"GPU {first.gpu + 1} of {tray}" if one_gpu else tray
    return PlaceLink(f"{first.rack_id}-{first.tray}-{first.gpu}", words)
