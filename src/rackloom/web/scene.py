"""A reading as seats: every GPU once, where people would look for it in a rack.

The seat of a GPU comes from the site's machine records; where there is none, from the place that the switch
controller gives it; and what neither of them knows stands by its node, in a rack that does not exist.
"""

import re
from collections.abc import Iterable, Mapping

import msgspec

from rackloom.claim.domain.objects import ComputeDomain
from rackloom.prove.doctor.findings import Finding
from rackloom.prove.picture.join import chains
from rackloom.prove.picture.values import DomainSeen, GpuChain, Layer, LayerSeen
from rackloom.topology.identity import SlotKey
from rackloom.web.reading import Happening, Reading

NO_RACK = "not in a known rack"
"""Where GPUs are drawn that only the cluster knows."""
_NUMBER = re.compile(r"(\d+)", re.ASCII)


class Place(msgspec.Struct, frozen=True):
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


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of the map."""

    place: Place
    domain: str
    """UUID of its NVLink domain; empty: not known."""
    taken: bool | None
    """Whether somebody has it; None: that could not be read."""
    held_back: bool = False
    """Whether its tray is kept from everybody, being cordoned, sick or not ready."""
    chain: GpuChain | None
    """What all layers say of it; None: it is somebody else's, and not shown."""


class Scene(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one viewer is shown."""

    at: float
    operator: bool = True
    """Whether it is shown whole; else it is one tenant's part."""
    layers: tuple[LayerSeen, ...] = ()
    domains: Mapping[str, DomainSeen] = msgspec.field(default_factory=dict)
    seats: tuple[Seat, ...] = ()
    """Sorted by place."""
    compute_domains: tuple[ComputeDomain, ...] = ()
    tenants: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Organisation of each tenant by its id."""
    vpcs: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Name of each VPC by its id."""
    findings: tuple[Finding, ...] | None = None
    happenings: tuple[Happening, ...] = ()

    def layer(self, layer: Layer) -> LayerSeen:
        """Whether a layer was read; one that nobody asked was not."""
        found = next((one for one in self.layers if one.layer == layer), None)
        return found or LayerSeen(layer=layer, problem="it was not asked")

    def known(self, layer: Layer) -> bool:
        """Whether what a layer says is current."""
        seen = self.layer(layer)
        return seen.at is not None and seen.unknown_since is None


def scene(reading: Reading) -> Scene:
    """All of a reading, for somebody who may see everything."""
    picture = reading.picture
    gpus = chains(picture)
    racks = {one.chassis_serial: one.rack for one in picture.machines}
    bare = Scene(
        at=picture.at,
        layers=picture.layers,
        domains={one.uuid: one for one in picture.domains},
        compute_domains=picture.compute_domains,
        tenants=picture.tenants,
        vpcs=picture.vpcs,
        findings=reading.findings,
        happenings=reading.happenings,
    )
    seats = sorted(_seats(bare, gpus, racks), key=lambda seat: seat.place.order)
    return msgspec.structs.replace(bare, seats=tuple(seats))


def _seats(bare: Scene, gpus: Iterable[GpuChain], racks: Mapping[str, str]) -> Iterable[Seat]:
    for chain in gpus:
        yield Seat(
            place=_place(chain, racks),
            domain=_domain(chain),
            taken=taken(bare, chain),
            held_back=held_back(chain),
            chain=chain,
        )


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


def taken(whole: Scene, chain: GpuChain) -> bool | None:
    """Whether an instance or a pod has a GPU. None where a layer that would say so was not read.

    A layer that was asked and not read knows GPUs that it could not tell of.
    """
    if chain.use is not None or (chain.machine is not None and chain.machine.instance is not None):
        return True
    told = {Layer.SITE: chain.machine is not None, Layer.CLUSTER: chain.device is not None}
    asked = {one.layer for one in whole.layers}
    known = all(whole.known(layer) for layer, tells in told.items() if tells or layer in asked)
    return False if known and any(told.values()) else None


def held_back(chain: GpuChain) -> bool:
    """Whether the tray of a GPU is given to nobody now."""
    machine, node = chain.machine, chain.node
    held = machine is not None and (machine.cordoned or bool(machine.health))
    return held or (node is not None and (node.unschedulable or node.ready is False))
