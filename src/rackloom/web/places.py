"""The places of findings and operations on the map, and the marks that findings leave there.

A finding or an operation names objects: GPU, device, pod, node, machine, partition, domain. It is shown at
the finest place that is known: its GPU, its tray, or its racks. Only GPUs whose chain the viewer may see
name anything, so a tenant is led to its own GPUs alone. Findings name few of all objects, so the names of a
rack are written out only if it may have one of them: `RackPlaces` knows its names down to trays.

A finding marks the parts at its place: GPUs, their tray, the switches of their domain, the devices that it
names. The worst finding decides how a part is marked, and a part that no finding names has no mark.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import msgspec

from rackloom.core.diagnosis.findings import LEVELS, Finding, Level
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
from rackloom.topology.part_names import PartName
from rackloom.web.model import MapGpu, MapRack, rack_id

# Places by name.


MAX_LOCATIONS = 3
"""Places of one finding that are named. The rest is counted."""
_FINEST_FIRST = (("gpu", "device", "pod"), ("node", "machine"), ("partition", "logical", "domain"))
_GPUS, _TRAYS, _RACKS = range(3)


class MapSpot(msgspec.Struct, frozen=True, gc=False):
    """One GPU on the map, as the page names it."""

    rack: str
    rack_id: str
    tray: int
    """From the top."""
    gpu: int
    """From the left."""
    name: PartName


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
"""The GPUs that a named object is, has or serves, by the names of `Finding.where`."""


class RackPlaces:
    """The locations of all names in one rack, computed on demand."""

    def __init__(self, rack: MapRack) -> None:
        self._rack = rack

    @cached_property
    def coarse(self) -> frozenset[str]:
        """Its names without those of single GPUs and devices. Their domain or node stands for them."""
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
                    spot = MapSpot(rack.name, id_, tray, number, gpu.place.name)
                    for name in _names_of_gpu(gpu, gpu.chain):
                        found.setdefault(name, []).append(spot)
        return found


def _coarse(name: str) -> str:
    """The name in `RackPlaces.coarse` that every rack with this name has."""
    kind, _, rest = name.partition(" ")
    if kind == "gpu":
        return at_domain(rest.rpartition("/")[0])
    return at_node(rest.partition("/")[0]) if kind == "device" else name


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
    # Each rack is searched for the few names that it may have: a large site has many of both.
    names = grouped((_coarse(name), name) for name in frozenset(wanted))
    coarse = frozenset(names)
    found: defaultdict[str, list[MapSpot]] = defaultdict(list)
    for rack in racks:
        for name in (name for near in rack.coarse & coarse for name in names[near]):
            if spots := rack.by_name.get(name):
                found[name] += spots
    return found


def finest_names(where: Sequence[str]) -> tuple[str, ...]:
    """The finest objects that a finding names, without the objects that surround them."""
    by_kind = (tuple(name for name in where if name.partition(" ")[0] in kinds) for kinds in _FINEST_FIRST)
    return next((names for names in by_kind if names), ())


def _spots_of(where: Sequence[str], places: PlacesByName) -> tuple[int, list[MapSpot]]:
    """The GPUs at the finest place that is known, and how fine it is."""
    for fineness, kinds in enumerate(_FINEST_FIRST):
        names = (name for name in where if name.partition(" ")[0] in kinds)
        if spots := list(dict.fromkeys(spot for name in names for spot in places.get(name, ()))):
            return fineness, spots
    return _RACKS, []


def locate(where: Sequence[str], places: PlacesByName) -> FoundLocations:
    """Links to the finest place that is known: the GPU, the tray, or the racks."""
    fineness, spots = _spots_of(where, places)
    found = _place_links(spots, fineness)
    return FoundLocations(tuple(found[:MAX_LOCATIONS]), max(0, len(found) - MAX_LOCATIONS))


def _place_links(spots: Sequence[MapSpot], fineness: int) -> list[PlaceLink]:
    """Links to racks, trays or GPUs. GPUs of one tray get one link, to the first of them."""
    if fineness == _RACKS:
        return [PlaceLink(id_, rack) for id_, rack in {spot.rack_id: spot.rack for spot in spots}.items()]
    trays = grouped(((spot.rack_id, spot.tray), spot) for spot in spots)
    return [_tray_link(some, one_gpu=fineness == _GPUS and len(some) == 1) for some in trays.values()]


def _tray_link(spots: Sequence[MapSpot], *, one_gpu: bool) -> PlaceLink:
    first = spots[0]
    name = first.name if one_gpu else first.name.tray
    return PlaceLink(f"{first.rack_id}-{first.tray}-{first.gpu}", str(name))


# Marks.


GpuSpot = tuple[int, int]
"""A GPU of a rack: its tray from the top, and its number from the left."""


class PartMark(msgspec.Struct, frozen=True):
    """The mark of a part, by the worst finding that names it."""

    level: Level
    title: str
    since: float | None


class RackMarks(msgspec.Struct, frozen=True, kw_only=True):
    """The marks of the parts of one rack. A part without one is named by no finding."""

    gpus: dict[GpuSpot, PartMark] = {}
    trays: dict[int, PartMark] = {}
    devices: dict[str, PartMark] = {}
    """Marks of devices, by their names in findings."""
    switches: list[PartMark] = []
    """Marks of its NVLink domains: one for each finding, the worst first."""


def marks_by_rack(findings: Iterable[Finding], places: PlacesByName) -> Mapping[str, RackMarks]:
    """The marks of each rack in which findings name a part. The worst finding comes first."""
    found: defaultdict[str, RackMarks] = defaultdict(RackMarks)
    for finding in findings:
        mark = PartMark(LEVELS[finding.severity], finding.title or finding.subject, finding.since)
        fineness, spots = _spots_of(finding.where, places)
        for spot in spots:
            marks = found[spot.rack]
            marks.gpus.setdefault((spot.tray, spot.gpu), mark)
            if fineness == _TRAYS:
                marks.trays.setdefault(spot.tray, mark)
        if fineness == _RACKS and any(name.startswith("domain ") for name in finding.where):
            for rack in {spot.rack for spot in spots}:
                found[rack].switches.append(mark)
        # A NIC is drawn beside the GPU that it serves, with a separate mark.
        for name in finding.where:
            for spot in places.get(name, ()) if name.startswith("device ") else ():
                found[spot.rack].devices.setdefault(name, mark)
    return found


def findings_at(
    findings: Iterable[Finding], places: PlacesByName, gpu: tuple[str, int, int]
) -> tuple[Finding, ...]:
    """The findings that mark a GPU, the worst first. `gpu`: the id of its rack, its tray and its number."""
    spots = ((finding, _spots_of(finding.where, places)[1]) for finding in findings)
    return tuple(
        finding
        for finding, found in spots
        if any((spot.rack_id, spot.tray, spot.gpu) == gpu for spot in found)
    )
