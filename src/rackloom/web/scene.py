"""A reading as seats: every GPU once, where people would look for it in a rack.

The seat of a GPU comes from the site's machine records; where there is none, from the place that the switch
controller gives it; and what neither of them knows stands by its node, in a rack that does not exist.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import groupby

import msgspec

from rackloom.claim.domain.objects import ComputeDomain
from rackloom.prove.doctor.findings import Finding
from rackloom.prove.picture.join import JoinedShares, join
from rackloom.prove.picture.kept import Kept, again
from rackloom.prove.picture.shares import Name
from rackloom.prove.picture.values import DomainSeen, GpuChain, Layer, LayerSeen
from rackloom.topology.identity import SlotKey
from rackloom.web.reading import Happening, Reading

NO_RACK = "not in a known rack"
"""Where GPUs are drawn that only the cluster knows."""
_NUMBER = re.compile(r"(\d+)", re.ASCII)


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where a GPU is drawn."""

    rack: str
    chassis: str
    slot: int
    module: int
    """1-based; 0: not known."""
    node: str = ""
    """Tells trays apart that have no known slot; to a tenant it is a number."""

    @property
    def order(self) -> tuple[bool, list[tuple[int, str]], str, str, int, str, int]:
        """Racks by name, numbers in names as numbers, and last what is in no rack."""
        parts = [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(self.rack)]
        return self.rack == NO_RACK, parts, self.rack, self.chassis, self.slot, self.node, self.module


class Seat(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One GPU of the map."""

    place: Place
    domain: str
    """UUID of its NVLink domain; empty: not known."""
    taken: bool | None
    """Whether somebody has it; None: that could not be read."""
    held_back: bool = False
    """Whether its tray is kept from everybody, being cordoned, sick, not ready or in a closed domain."""
    chain: GpuChain | None
    """What all layers say of it; None: it is somebody else's, and not shown."""


Tray = tuple[Seat, ...]


class RackSeats(msgspec.Struct, frozen=True, kw_only=True):
    """One rack with somebody in it."""

    name: str
    trays: tuple[Tray, ...]
    """The highest slot first."""
    domains: frozenset[str]
    """All that its seats are in; empty text: one that is not known."""
    nodes: frozenset[str]
    tenants: frozenset[str]
    """Ids of those that hold a machine of it."""

    @property
    def order(self) -> tuple[object, ...]:
        """By which racks are sorted."""
        return self.trays[0][0].place.order[:3]


def rack_of(trays: tuple[Tray, ...]) -> RackSeats:
    """The rack of some trays, the highest first."""
    seats = [seat for tray in trays for seat in tray]
    chains = [seat.chain for seat in seats if seat.chain is not None]
    return RackSeats(
        name=seats[0].place.rack,
        trays=trays,
        domains=frozenset(seat.domain for seat in seats),
        nodes=frozenset(one.node.name for one in chains if one.node is not None),
        tenants=frozenset(one.machine.tenant for one in chains if one.machine and one.machine.tenant),
    )


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one viewer is shown."""

    at: float
    operator: bool = True
    """Whether it is shown whole; else it is one tenant's part."""
    layers: tuple[LayerSeen, ...] = ()
    domains: Mapping[str, DomainSeen] = msgspec.field(default_factory=dict)
    racks: tuple[RackSeats, ...] = ()
    """Sorted by name."""
    compute_domains: tuple[ComputeDomain, ...] = ()
    tenants: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Organisation of each tenant by its id."""
    vpcs: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Name of each VPC by its id."""
    namespaces: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Organisation of each namespace that is labelled with one; empty for a tenant."""
    findings: tuple[Finding, ...] | None = None
    examined_at: float | None = None
    """Since when the findings are, and the picture that they were found in."""
    happenings: tuple[Happening, ...] = ()

    @property
    def seats(self) -> tuple[Seat, ...]:
        """All seats, by place."""
        return tuple(seat for rack in self.racks for tray in reversed(rack.trays) for seat in tray)

    def layer(self, layer: Layer) -> LayerSeen:
        """Whether a layer was read; one that nobody asked was not."""
        found = next((one for one in self.layers if one.layer == layer), None)
        return found or LayerSeen(layer=layer, problem="it was not asked")

    def known(self, layer: Layer) -> bool:
        """Whether what a layer says is current."""
        seen = self.layer(layer)
        return seen.at is not None and seen.unknown_since is None


class _Told(msgspec.Struct, frozen=True):
    """All that the seats of a share depend on: the chains, and which layers were read."""

    chains: tuple[GpuChain, ...]
    chassis: Mapping[str, str]
    """The rack of each chassis that the site's records know."""
    asked: frozenset[Layer]
    known: frozenset[Layer]
    closed: frozenset[str]
    """Those of its domains in which nothing is given away."""
    silent: frozenset[str]
    """Those of its domains of which no controller says how they are now."""


_Seats = Mapping[str, tuple[Seat, ...]]
"""Those of each rack, by place."""


class Seated(msgspec.Struct, frozen=True, kw_only=True):
    """What was made of one reading, for the next to be compared with."""

    joined: JoinedShares = JoinedShares()
    shares: Kept[Name, _Told, _Seats] = msgspec.field(default_factory=dict)
    racks: Kept[str, tuple[tuple[Seat, ...], ...], RackSeats] = msgspec.field(default_factory=dict)


def scene(reading: Reading) -> Scene:
    """All of a reading, for somebody who may see everything."""
    return next_scene(reading, Seated())[0]


def next_scene(reading: Reading, before: Seated) -> tuple[Scene, Seated]:
    """As `scene`, making only what is not as it was `before`: of other racks there are the same values."""
    picture = reading.picture
    bare = Scene(
        at=picture.at,
        layers=picture.layers,
        domains={one.uuid: one for one in picture.domains},
        compute_domains=picture.compute_domains,
        tenants=picture.tenants,
        vpcs=picture.vpcs,
        namespaces=picture.namespaces,
        findings=reading.findings,
        examined_at=reading.examined_at,
        happenings=reading.happenings,
    )
    joined = reading.joined or join(picture, before.joined)
    shares = again(before.shares, dict(_told(bare, joined)), _seats)
    racks = again(before.racks, _by_rack(shares), _rack)
    found = sorted((rack for _, rack in racks.values()), key=lambda rack: rack.order)
    return msgspec.structs.replace(bare, racks=tuple(found)), Seated(
        joined=joined, shares=shares, racks=racks
    )


def _told(bare: Scene, joined: JoinedShares) -> Iterator[tuple[Name, _Told]]:
    asked = frozenset(one.layer for one in bare.layers)
    known = frozenset(layer for layer in asked if bare.known(layer))
    closed = frozenset(one.uuid for one in bare.domains.values() if one.paused or one.disputed)
    answering = frozenset(one.uuid for one in bare.domains.values() if one.answers)
    for name, (share, chains) in joined.joined.items():
        chassis = {one.chassis_serial: one.rack for one in share.machines}
        here = frozenset(map(_domain, chains))
        yield name, _Told(chains, chassis, asked, known, here & closed, here - answering)


def _seats(told: _Told) -> _Seats:
    found = [
        Seat(
            place=_place(chain, told.chassis),
            domain=_domain(chain),
            taken=_taken(told, chain),
            held_back=_held_back(told, chain),
            chain=chain,
        )
        for chain in told.chains
    ]
    ordered = sorted(found, key=lambda seat: seat.place.order)
    return {rack: tuple(seats) for rack, seats in groupby(ordered, key=lambda seat: seat.place.rack)}


def _by_rack(shares: Kept[Name, _Told, _Seats]) -> dict[str, tuple[tuple[Seat, ...], ...]]:
    """What the shares have in each rack: of most racks one share has all."""
    found: dict[str, tuple[tuple[Seat, ...], ...]] = {}
    for _, seats in shares.values():
        for rack, some in seats.items():
            found[rack] = (*found.get(rack, ()), some)
    return found


def _rack(parts: tuple[tuple[Seat, ...], ...]) -> RackSeats:
    seats = sorted((seat for part in parts for seat in part), key=lambda seat: seat.place.order)
    trays = [tuple(tray) for _, tray in groupby(seats, key=_tray)]
    return rack_of(tuple(reversed(trays)))


def _tray(seat: Seat) -> tuple[str, int, str]:
    return seat.place.chassis, seat.place.slot, seat.place.node


def _place(chain: GpuChain, racks: Mapping[str, str]) -> Place:
    known = slot_key(chain)
    if chain.machine is not None:
        module = known.module_id if known else 0
        return Place(chain.machine.rack, chain.machine.chassis_serial, chain.machine.slot, module)
    if known is not None:
        rack = racks.get(known.chassis_serial, f"chassis {known.chassis_serial}")
        return Place(rack, known.chassis_serial, known.slot, known.module_id)
    node = chain.node.name if chain.node else chain.device.node if chain.device else ""
    return Place(NO_RACK, "", 0, 0, node)


def slot_key(chain: GpuChain) -> SlotKey | None:
    """The slot of a GPU as any layer gives it."""
    if chain.fabric is not None:
        return chain.fabric.place
    return chain.key.place.value if chain.key.place else None


def _domain(chain: GpuChain) -> str:
    if chain.fabric is not None:
        return chain.fabric.domain
    return chain.machine.domain if chain.machine else ""


def _taken(told: _Told, chain: GpuChain) -> bool | None:
    """Whether an instance or a pod has a GPU. None where a layer that would say so was not read.

    A layer that was asked and not read knows GPUs that it could not tell of; of the fabric, the controllers
    of the GPU's own domain are asked.
    """
    if chain.use is not None or (chain.machine is not None and chain.machine.instance is not None):
        return True
    if Layer.FABRIC in told.asked and (Layer.FABRIC not in told.known or _domain(chain) in told.silent):
        return None
    tells = {Layer.SITE: chain.machine is not None, Layer.CLUSTER: chain.device is not None}
    known = all(layer in told.known for layer, does in tells.items() if does or layer in told.asked)
    return False if known and any(tells.values()) else None


def _held_back(told: _Told, chain: GpuChain) -> bool:
    """Whether the tray of a GPU is given to nobody now."""
    machine, node = chain.machine, chain.node
    if _domain(chain) in told.closed or (machine is not None and (machine.cordoned or bool(machine.health))):
        return True
    return node is not None and (node.unschedulable or node.ready is False)
