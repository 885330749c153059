"""The map as a value: every GPU once, at its position in a rack.

A `SiteReading` is everything that is drawn, read at about one moment. `update_site_map` turns it into a
`SiteMap`. The position of a GPU comes from the site's machine records. Without a record, it comes from the
slot that the switch controller reports. A GPU that neither of them knows is listed by its node, in a rack
that does not exist. A rack holds its trays with the highest slot first.

Each GPU is taken, free or unknown. It is unknown if a layer that would report its use was not read, or if
the controllers of its domain do not answer. A tray is held back if it is cordoned, unhealthy, not ready,
in a paused or disputed domain, or in a partition that the site did not make.

Updates are incremental: only shares and racks with changed input are computed again, and unchanged racks are
the same objects as before.
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Protocol

import msgspec

from rackloom.core.cluster.domain_objects import ComputeDomain
from rackloom.core.diagnosis.findings import Finding
from rackloom.core.diagnosis.incremental import GroupName, JoinedShares, Memo, join_shares, recompute_changed
from rackloom.core.diagnosis.index import gpu_part, slot_key
from rackloom.core.diagnosis.snapshot import (
    GpuChain,
    Layer,
    LayerStatus,
    NvlinkDomainRecord,
    SiteSnapshot,
    grouped,
)
from rackloom.topology.part_names import PartName

# The input of the map, and the interface of its source.


class TimelineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One operation on a fabric, as a line of the timeline."""

    at: float
    """When it ended, or when it began if it has not ended, in seconds since the epoch."""
    seconds: float | None = None
    """How long it took, or None if it has not ended."""
    tenant: str | None
    """The organisation that requested it, or None if the site itself did."""
    what: str
    where: str
    places: tuple[str, ...] = ()
    """The objects of the operation, as `Finding.where` names them."""
    outcome: str
    """As in the audit: done, refused, pending, unknown."""


class SiteReading(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is drawn, read at about one moment."""

    snapshot: SiteSnapshot
    joined: JoinedShares | None = None
    """The joined GPUs of the snapshot, if the source has them."""
    findings: tuple[Finding, ...] | None = None
    """The doctor's findings, the worst first, or None if it has not examined this site."""
    examined_at: float | None = None
    """The time of the snapshot that it examined, which may be an earlier one."""
    happenings: tuple[TimelineEntry, ...] = ()
    """Newest first."""


class ReadingSource(Protocol):
    """Reads a site."""

    async def read(self) -> SiteReading:
        """The whole site now. Raises Retry or Unknown when it cannot be read."""
        ...

    async def changed(self) -> None:
        """Return when something may have changed since the last reading."""
        ...


# Positions, racks and the map.


NO_RACK = "not in a known rack"
"""The rack of GPUs that only the cluster knows."""


@lru_cache(maxsize=1 << 16)
def rack_id(name: str) -> str:
    """A name for a rack that any page element may have."""
    return "r" + sha256(name.encode()).hexdigest()[:12]


_DIGITS = re.compile(r"(\d+)", re.ASCII)


class GpuPosition(msgspec.Struct, frozen=True, gc=False):
    """The position at which a GPU is drawn."""

    rack: str
    chassis: str
    name: PartName
    """Its name. Without a known slot, the node stands for the rack. A tenant sees a number instead."""

    @property
    def tray(self) -> tuple[str, int, str]:
        """The identity of its tray in the rack, and the sort key of trays, from the lowest slot."""
        return self.chassis, self.name.slot or 0, self.name.rack


class MapGpu(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One GPU of the map."""

    place: GpuPosition
    domain: str
    """UUID of its NVLink domain. Empty if it is unknown."""
    taken: bool | None
    """Whether it is in use, or None if that is unknown."""
    held_back: bool = False
    """Whether its tray is not available: cordoned, unhealthy, not ready, in a closed domain, or foreign."""
    reserved_for: str | None = None
    """The only tenant that may have its tray now, for operators. None if any tenant may."""
    chain: GpuChain | None
    """The GPU through all layers, or None if it is hidden because it is another tenant's."""


MapTray = tuple[MapGpu, ...]


def tray_free(gpus: MapTray) -> bool | None:
    """Whether all GPUs of a tray are free to assign now: it is not cordoned, sick or reserved."""
    free: bool | None = True
    for gpu in gpus:
        if gpu.taken or gpu.held_back or gpu.reserved_for:
            return False
        if gpu.taken is None:
            free = None
    return free


def tray_partly_taken(gpus: MapTray) -> bool:
    """Whether GPUs of a tray are taken: its free GPUs, if any, are stranded."""
    return any(gpu.taken for gpu in gpus)


class MapRack(msgspec.Struct, frozen=True, kw_only=True):
    """One rack with at least one GPU."""

    name: str
    trays: tuple[MapTray, ...]
    """The highest slot first."""
    domains: frozenset[str]
    """The domains of its GPUs. An empty name stands for an unknown domain."""
    nodes: frozenset[str]
    tenants: frozenset[str]
    """Ids of the tenants that have a machine in it, or for which a tray of it is reserved."""

    @property
    def spots(self) -> list[tuple[int, int]]:
        """All its GPUs: the tray from the top, and the number from the left."""
        return [(tray, gpu) for tray, gpus in enumerate(self.trays) for gpu in range(len(gpus))]

    @property
    def order(self) -> tuple[bool, list[tuple[int, str]], str]:
        """Sort key of racks: by name with numbers as numbers. GPUs in no known rack come last."""
        parts = [(int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(self.name)]
        return self.name == NO_RACK, parts, self.name


def rack_of_trays(trays: tuple[MapTray, ...]) -> MapRack:
    """The rack of some trays, the highest first."""
    gpus = [gpu for tray in trays for gpu in tray]
    chains = [gpu.chain for gpu in gpus if gpu.chain is not None]
    machines = [chain.machine for chain in chains if chain.machine is not None]
    holders = (*(gpu.reserved_for for gpu in gpus), *(machine.tenant for machine in machines))
    return MapRack(
        name=gpus[0].place.rack,
        trays=trays,
        domains=frozenset(gpu.domain for gpu in gpus),
        nodes=frozenset(chain.node.name for chain in chains if chain.node is not None),
        tenants=frozenset(filter(None, holders)),
    )


class SiteMap(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one viewer is shown."""

    at: float
    operator: bool = True
    """Whether the viewer sees everything, not only one tenant's part."""
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
    """Organisation of each namespace that has the label of one. Empty for a tenant."""
    findings: tuple[Finding, ...] | None = None
    examined_at: float | None = None
    """The time of the snapshot in which the findings were found."""
    happenings: tuple[TimelineEntry, ...] = ()

    @property
    def gpus(self) -> tuple[MapGpu, ...]:
        """All GPUs, by position."""
        return tuple(gpu for rack in self.racks for tray in reversed(rack.trays) for gpu in tray)

    def layer(self, layer: Layer) -> LayerStatus:
        """The status of a layer. A layer without a status was not read."""
        found = next((status for status in self.layers if status.layer == layer), None)
        return found or LayerStatus(layer=layer, problem="it was not asked")

    def known(self, layer: Layer) -> bool:
        """Whether the last reading of a layer is current."""
        status = self.layer(layer)
        return status.at is not None and status.unknown_since is None


class _ShareFacts(msgspec.Struct, frozen=True):
    """Everything on which the GPUs of a share on the map depend."""

    chains: tuple[GpuChain, ...]
    chassis: Mapping[str, str]
    """The rack of each chassis in the site's records."""
    asked: frozenset[Layer]
    known: frozenset[Layer]
    closed: frozenset[str]
    """Its domains that are paused or in dispute: nothing is allocated there."""
    silent: frozenset[str]
    """Its domains without a current reading."""


_GpusByRack = Mapping[str, tuple[MapGpu, ...]]
"""The GPUs of each rack, in the order of the chains."""


class SiteMapCache(msgspec.Struct, frozen=True, kw_only=True):
    """The intermediate values of one reading, for comparison with the next."""

    joined: JoinedShares = JoinedShares()
    shares: Memo[GroupName, _ShareFacts, _GpusByRack] = msgspec.field(default_factory=dict)
    racks: Memo[str, tuple[tuple[MapGpu, ...], ...], MapRack] = msgspec.field(default_factory=dict)


def site_map(reading: SiteReading) -> SiteMap:
    """The map of a reading for an operator, who sees everything."""
    return update_site_map(reading, SiteMapCache())[0]


def update_site_map(reading: SiteReading, before: SiteMapCache) -> tuple[SiteMap, SiteMapCache]:
    """Same as `site_map`, except that racks whose input equals that of `before` keep their values."""
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
    # Each step recomputes only entries with changed input, and passes on the same objects for the others.
    joined = reading.joined or join_shares(snapshot, before.joined)
    shares = recompute_changed(before.shares, dict(_share_facts(bare, joined)), _gpus_by_rack)
    # The GPUs of each rack, by share. Usually one share has all of them.
    parts = grouped((rack, gpus) for _, racks in shares.values() for rack, gpus in racks.items())
    racks = recompute_changed(before.racks, {rack: tuple(found) for rack, found in parts.items()}, _make_rack)
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


def _gpus_by_rack(facts: _ShareFacts) -> _GpusByRack:
    found = [
        MapGpu(
            place=_position_of(chain, facts.chassis),
            domain=_domain_of(chain),
            taken=_is_taken(facts, chain),
            held_back=_is_held_back(facts, chain),
            reserved_for=None if chain.machine is None else chain.machine.reserved_for,
            chain=chain,
        )
        for chain in facts.chains
    ]
    return {rack: tuple(gpus) for rack, gpus in grouped((gpu.place.rack, gpu) for gpu in found).items()}


def _make_rack(parts: tuple[tuple[MapGpu, ...], ...]) -> MapRack:
    trays = grouped((gpu.place.tray, gpu) for part in parts for gpu in part)
    modules = [
        sorted(trays[tray], key=lambda gpu: gpu.place.name.gpu or 0) for tray in sorted(trays, reverse=True)
    ]
    return rack_of_trays(tuple(map(tuple, modules)))


def _position_of(chain: GpuChain, racks: Mapping[str, str]) -> GpuPosition:
    name, known = gpu_part(chain, racks), slot_key(chain)
    chassis = (
        chain.machine.chassis_serial if chain.machine is not None else known.chassis_serial if known else ""
    )
    return GpuPosition(name.rack if chassis else NO_RACK, chassis, name)


def _domain_of(chain: GpuChain) -> str:
    if chain.fabric is not None:
        return chain.fabric.domain
    return chain.machine.domain if chain.machine else ""


def _is_taken(facts: _ShareFacts, chain: GpuChain) -> bool | None:
    """Whether an instance or a pod has a GPU, or None if a layer that would report it was not read.

    A layer that should have been read and was not may know users of GPUs. In the fabric, only the
    controllers of the GPU's own domain matter, and a fact on which they contradict themselves is unknown.
    """
    if chain.use is not None or (chain.machine is not None and chain.machine.instance is not None):
        return True
    if Layer.FABRIC in facts.asked and (Layer.FABRIC not in facts.known or _domain_of(chain) in facts.silent):
        return None
    if chain.fabric is not None and chain.fabric.uncertain:
        return None
    reports = {Layer.SITE: chain.machine is not None, Layer.CLUSTER: chain.device is not None}
    known = all(layer in facts.known for layer, does in reports.items() if does or layer in facts.asked)
    return False if known and any(reports.values()) else None


def _is_held_back(facts: _ShareFacts, chain: GpuChain) -> bool:
    """Whether the tray of a GPU is unavailable to every tenant now."""
    machine, node = chain.machine, chain.node
    if _domain_of(chain) in facts.closed or (machine and (machine.cordoned or machine.health)):
        return True
    foreign = chain.partition is not None and chain.partition.owner == "foreign"
    return foreign or (node is not None and (node.unschedulable or node.ready is False))
