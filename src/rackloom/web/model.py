"""The map as a value: every GPU once, at the position where people would look for it in a rack.

A `SiteReading` is all that is drawn, read at about one moment. `update_site_map` turns it into a
`SiteMap`. The position of a GPU comes from the site's machine records; without a record, from the slot
that the switch controller reports; a GPU that neither of them knows is listed by its node, in a rack that
does not exist. A rack holds its trays with the highest slot first.

Each GPU is taken, free or unknown. It is unknown where a layer that would say so was not read, or where
the controllers of its domain do not answer. A tray that is cordoned, unhealthy, not ready or in a paused
or disputed domain is held back.

Updates are incremental: only shares and racks whose input changed are made again, and unchanged racks are
the same objects as before.
"""

import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Protocol

import msgspec

from rackloom.core.diagnosis.findings import Finding
from rackloom.core.diagnosis.incremental import GroupName, JoinedShares, Memo, join_shares, recompute_changed
from rackloom.core.diagnosis.snapshot import GpuChain, Layer, LayerStatus, NvlinkDomainRecord, SiteSnapshot
from rackloom.core.domains.compute_domain import ComputeDomain
from rackloom.topology.join_key import SlotKey

# What the map is drawn from, and what it asks of its source.


class TimelineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One operation on a fabric, as a line of the timeline."""

    at: float
    """When it ended, or began where it has not; seconds since the epoch."""
    seconds: float | None = None
    """How long it took; None: it has not ended."""
    tenant: str | None
    """The organisation that asked for it; None: the site itself."""
    what: str
    where: str
    places: tuple[str, ...] = ()
    """What it was asked of, as `Finding.where` names things."""
    outcome: str
    """As the audit says it: done, refused, pending, unknown."""


class SiteReading(msgspec.Struct, frozen=True, kw_only=True):
    """All that is drawn, read at about one moment."""

    snapshot: SiteSnapshot
    joined: JoinedShares | None = None
    """The GPUs of the snapshot, where somebody has joined them already."""
    findings: tuple[Finding, ...] | None = None
    """What the doctor objects to, the worst first; None: it has not examined this site."""
    examined_at: float | None = None
    """The moment of the snapshot that it examined, which may be an earlier one."""
    happenings: tuple[TimelineEntry, ...] = ()
    """Newest first."""


class ReadingSource(Protocol):
    """Who knows the site."""

    async def read(self) -> SiteReading:
        """The whole site now. Raises Retry or Unknown when it cannot be read."""
        ...

    async def changed(self) -> None:
        """Return when something may have changed since the last reading."""
        ...


# Positions, racks and the map.


NO_RACK = "not in a known rack"
"""Where GPUs are drawn that only the cluster knows."""
_DIGITS = re.compile(r"(\d+)", re.ASCII)


class GpuPosition(msgspec.Struct, frozen=True, gc=False):
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
        parts = [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(self.rack)]
        return self.rack == NO_RACK, parts, self.rack, self.chassis, self.slot, self.node, self.module


class MapGpu(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One GPU of the map."""

    place: GpuPosition
    domain: str
    """UUID of its NVLink domain; empty: not known."""
    taken: bool | None
    """Whether somebody has it; None: that could not be read."""
    held_back: bool = False
    """Whether its tray is kept from everybody, being cordoned, sick, not ready or in a closed domain."""
    chain: GpuChain | None
    """What all layers say of it; None: it is somebody else's, and not shown."""


MapTray = tuple[MapGpu, ...]


class MapRack(msgspec.Struct, frozen=True, kw_only=True):
    """One rack with somebody in it."""

    name: str
    trays: tuple[MapTray, ...]
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


def rack_of_trays(trays: tuple[MapTray, ...]) -> MapRack:
    """The rack of some trays, the highest first."""
    seats = [seat for tray in trays for seat in tray]
    chains = [seat.chain for seat in seats if seat.chain is not None]
    return MapRack(
        name=seats[0].place.rack,
        trays=trays,
        domains=frozenset(seat.domain for seat in seats),
        nodes=frozenset(chain.node.name for chain in chains if chain.node is not None),
        tenants=frozenset(chain.machine.tenant for chain in chains if chain.machine and chain.machine.tenant),
    )


class SiteMap(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one viewer is shown."""

    at: float
    operator: bool = True
    """Whether it is shown whole; else it is one tenant's part."""
    layers: tuple[LayerStatus, ...] = ()
    domains: Mapping[str, NvlinkDomainRecord] = msgspec.field(default_factory=dict)
    racks: tuple[MapRack, ...] = ()
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
    """Since when the findings are, and the snapshot that they were found in."""
    happenings: tuple[TimelineEntry, ...] = ()

    @property
    def seats(self) -> tuple[MapGpu, ...]:
        """All seats, by place."""
        return tuple(seat for rack in self.racks for tray in reversed(rack.trays) for seat in tray)

    def layer(self, layer: Layer) -> LayerStatus:
        """Whether a layer was read; one that nobody asked was not."""
        found = next((one for one in self.layers if one.layer == layer), None)
        return found or LayerStatus(layer=layer, problem="it was not asked")

    def known(self, layer: Layer) -> bool:
        """Whether what a layer says is current."""
        seen = self.layer(layer)
        return seen.at is not None and seen.unknown_since is None


class _ShareFacts(msgspec.Struct, frozen=True):
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


_GpusByRack = Mapping[str, tuple[MapGpu, ...]]
"""Those of each rack, by place."""


class SiteMapCache(msgspec.Struct, frozen=True, kw_only=True):
    """What was made of one reading, for the next to be compared with."""

    joined: JoinedShares = JoinedShares()
    shares: Memo[GroupName, _ShareFacts, _GpusByRack] = msgspec.field(default_factory=dict)
    racks: Memo[str, tuple[tuple[MapGpu, ...], ...], MapRack] = msgspec.field(default_factory=dict)


def site_map(reading: SiteReading) -> SiteMap:
    """All of a reading, for somebody who may see everything."""
    return update_site_map(reading, SiteMapCache())[0]


def update_site_map(reading: SiteReading, before: SiteMapCache) -> tuple[SiteMap, SiteMapCache]:
    """As `scene`, making only what is not as it was `before`: of other racks there are the same values."""
    snapshot = reading.snapshot
    bare = SiteMap(
        at=snapshot.at,
        layers=snapshot.layers,
        domains={domain.uuid: domain for domain in snapshot.domains},
        compute_domains=snapshot.compute_domains,
        tenants=snapshot.tenants,
        vpcs=snapshot.vpcs,
        namespaces=snapshot.namespaces,
        findings=reading.findings,
        examined_at=reading.examined_at,
        happenings=reading.happenings,
    )
    joined = reading.joined or join_shares(snapshot, before.joined)
    shares = recompute_changed(before.shares, dict(_share_facts(bare, joined)), _gpus_by_rack)
    racks = recompute_changed(before.racks, _by_rack(shares), _make_rack)
    found = sorted((rack for _, rack in racks.values()), key=lambda rack: rack.order)
    return msgspec.structs.replace(bare, racks=tuple(found)), SiteMapCache(
        joined=joined, shares=shares, racks=racks
    )


def _share_facts(bare: SiteMap, joined: JoinedShares) -> Iterator[tuple[GroupName, _ShareFacts]]:
    asked = frozenset(layer.layer for layer in bare.layers)
    known = frozenset(layer for layer in asked if bare.known(layer))
    closed = frozenset(domain.uuid for domain in bare.domains.values() if domain.paused or domain.disputed)
    answering = frozenset(domain.uuid for domain in bare.domains.values() if domain.answers)
    for name, (share, chains) in joined.joined.items():
        chassis = {machine.chassis_serial: machine.rack for machine in share.machines}
        here = frozenset(map(_domain_of, chains))
        yield name, _ShareFacts(chains, chassis, asked, known, here & closed, here - answering)


def _gpus_by_rack(told: _ShareFacts) -> _GpusByRack:
    found = [
        MapGpu(
            place=_position_of(chain, told.chassis),
            domain=_domain_of(chain),
            taken=_is_taken(told, chain),
            held_back=_is_held_back(told, chain),
            chain=chain,
        )
        for chain in told.chains
    ]
    ordered = sorted(found, key=lambda seat: seat.place.order)
    return {rack: tuple(seats) for rack, seats in groupby(ordered, key=lambda seat: seat.place.rack)}


def _by_rack(shares: Memo[GroupName, _ShareFacts, _GpusByRack]) -> dict[str, tuple[tuple[MapGpu, ...], ...]]:
    """What the shares have in each rack: of most racks one share has all."""
    found: dict[str, tuple[tuple[MapGpu, ...], ...]] = {}
    for _, seats in shares.values():
        for rack, some in seats.items():
            found[rack] = (*found.get(rack, ()), some)
    return found


def _make_rack(parts: tuple[tuple[MapGpu, ...], ...]) -> MapRack:
    seats = sorted((seat for part in parts for seat in part), key=lambda seat: seat.place.order)
    trays = [tuple(tray) for _, tray in groupby(seats, key=_tray_key)]
    return rack_of_trays(tuple(reversed(trays)))


def _tray_key(seat: MapGpu) -> tuple[str, int, str]:
    return seat.place.chassis, seat.place.slot, seat.place.node


def _position_of(chain: GpuChain, racks: Mapping[str, str]) -> GpuPosition:
    known = slot_key(chain)
    if chain.machine is not None:
        module = known.module_id if known else 0
        return GpuPosition(chain.machine.rack, chain.machine.chassis_serial, chain.machine.slot, module)
    if known is not None:
        rack = racks.get(known.chassis_serial, f"chassis {known.chassis_serial}")
        return GpuPosition(rack, known.chassis_serial, known.slot, known.module_id)
    node = chain.node.name if chain.node else chain.device.node if chain.device else ""
    return GpuPosition(NO_RACK, "", 0, 0, node)


def slot_key(chain: GpuChain) -> SlotKey | None:
    """The slot of a GPU as any layer gives it."""
    if chain.fabric is not None:
        return chain.fabric.place
    return chain.key.place.value if chain.key.place else None


def _domain_of(chain: GpuChain) -> str:
    if chain.fabric is not None:
        return chain.fabric.domain
    return chain.machine.domain if chain.machine else ""


def _is_taken(told: _ShareFacts, chain: GpuChain) -> bool | None:
    """Whether an instance or a pod has a GPU. None where a layer that would say so was not read.

    A layer that was asked and not read knows GPUs that it could not tell of; of the fabric, the controllers
    of the GPU's own domain are asked.
    """
    if chain.use is not None or (chain.machine is not None and chain.machine.instance is not None):
        return True
    if Layer.FABRIC in told.asked and (Layer.FABRIC not in told.known or _domain_of(chain) in told.silent):
        return None
    tells = {Layer.SITE: chain.machine is not None, Layer.CLUSTER: chain.device is not None}
    known = all(layer in told.known for layer, does in tells.items() if does or layer in told.asked)
    return False if known and any(tells.values()) else None


def _is_held_back(told: _ShareFacts, chain: GpuChain) -> bool:
    """Whether the tray of a GPU is given to nobody now."""
    machine, node = chain.machine, chain.node
    if _domain_of(chain) in told.closed or (
        machine is not None and (machine.cordoned or bool(machine.health))
    ):
        return True
    return node is not None and (node.unschedulable or node.ready is False)
