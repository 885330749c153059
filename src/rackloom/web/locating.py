"""Where on the map the things are that findings and operations name: GPUs, trays, racks.

Only seats whose chain the viewer is shown name anything, so a tenant is led to its own GPUs alone.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from rackloom.prove.doctor.checks.view import around, at_device, at_domain, at_logical, at_pod
from rackloom.prove.picture.values import GpuChain
from rackloom.web.racks import rack_id
from rackloom.web.scene import RackSeats, Seat

SHOWN = 3
"""Places of one finding that are named; the rest is counted."""
_FINEST_FIRST = (("gpu", "device", "pod"), ("node", "machine"), ("partition", "logical", "domain"))
_GPUS, _RACKS = 0, 2


class Spot(msgspec.Struct, frozen=True, gc=False):
    """One GPU on the map, as the page names it."""

    rack: str
    rack_id: str
    tray: int
    """From the top."""
    gpu: int
    """From the left."""
    slot: str


class Located(msgspec.Struct, frozen=True):
    """An element of the page that something is about: a GPU, or a rack."""

    id: str
    words: str


class Locations(msgspec.Struct, frozen=True):
    """Where something is."""

    named: tuple[Located, ...] = ()
    more: int = 0
    """How many places are not named."""


Places = Mapping[str, tuple[Spot, ...]]
"""By what `Finding.where` calls a thing: the GPUs that it is, has or serves."""


def rack_places(rack: RackSeats) -> Places:
    """What there is in one rack."""
    found: defaultdict[str, list[Spot]] = defaultdict(list)
    id_ = rack_id(rack.name)
    for tray, seats in enumerate(rack.trays):
        for gpu, seat in enumerate(seats):
            if seat.chain is not None:
                spot = Spot(rack.name, id_, tray, gpu, _slot(seat))
                for name in _names(seat, seat.chain):
                    found[name].append(spot)
    return {name: tuple(spots) for name, spots in found.items()}


def _slot(seat: Seat) -> str:
    return f"slot {seat.place.slot}" if seat.place.chassis else f"node {seat.place.node}"


def _names(seat: Seat, chain: GpuChain) -> Iterator[str]:
    yield from around((chain,))
    yield from map(at_device, chain.nics)
    if seat.domain:
        yield at_domain(seat.domain)
    if chain.wanted is not None and chain.wanted.logical is not None:
        yield at_logical(chain.wanted.logical)
    if chain.use is not None:
        yield from map(at_pod, chain.use.pods)


def among(racks: Iterable[Places], wanted: Collection[str]) -> Places:
    """Those of some names that are found in any rack, in the order of the racks."""
    found: defaultdict[str, tuple[Spot, ...]] = defaultdict(tuple)
    names = frozenset(wanted)
    for rack in racks:
        for name in rack.keys() & names:
            found[name] += rack[name]
    return found


def locations(where: Sequence[str], places: Places) -> Locations:
    """The nearest that is known of a thing: its GPU, or its tray, or its racks."""
    for fineness, kinds in enumerate(_FINEST_FIRST):
        names = (name for name in where if name.partition(" ")[0] in kinds)
        if spots := list(dict.fromkeys(spot for name in names for spot in places.get(name, ()))):
            found = _located(spots, fineness)
            return Locations(tuple(found[:SHOWN]), max(0, len(found) - SHOWN))
    return Locations()


def _located(spots: Sequence[Spot], fineness: int) -> list[Located]:
    """GPUs of one tray are one place, which its first GPU stands for."""
    if fineness == _RACKS:
        return [Located(id_, rack) for id_, rack in {one.rack_id: one.rack for one in spots}.items()]
    trays: dict[tuple[str, int], list[Spot]] = {}
    for one in spots:
        trays.setdefault((one.rack_id, one.tray), []).append(one)
    return [_in_tray(some, one_gpu=fineness == _GPUS and len(some) == 1) for some in trays.values()]


def _in_tray(spots: Sequence[Spot], *, one_gpu: bool) -> Located:
    first = spots[0]
    words = f"{first.rack}, {first.slot}"
    return Located(
        f"{first.rack_id}-{first.tray}-{first.gpu}", f"{words}, GPU {first.gpu + 1}" if one_gpu else words
    )
