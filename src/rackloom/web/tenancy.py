"""What a tenant may see of a scene: its own, and of the rest only that it is in use.

A field is shown because it is the tenant's, never because nobody thought of hiding it: seats of others lose
their whole chain, and of the tenant's own chain the parts that may name somebody else are dropped, as is what
was seen before the machine was the tenant's.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec

from rackloom.claim.domain.objects import ComputeDomain
from rackloom.prove.picture.kept import Kept, again
from rackloom.prove.picture.values import DeviceUse, DomainSeen, GpuChain, Layer, LayerSeen
from rackloom.web.scene import NO_RACK, RackSeats, Scene, Seat, rack_of


class _Rack(msgspec.Struct, frozen=True):
    """All that it depends on what a tenant has in a rack."""

    rack: RackSeats
    tenant: str | None
    nodes: Mapping[str, str]
    """Numbers for the names of nodes that tell its trays apart."""


Own = Kept[str, _Rack, RackSeats]
"""The racks of a scene with the chains of one tenant alone."""


def next_own(whole: Scene, org: str, before: Own) -> tuple[Scene, Own]:
    """The part of a scene that the tenant of an organisation may see.

    Made is only what is not as it was for the same organisation `before`; nothing was before `{}`.
    """
    tenant = next((id_ for id_, name in whole.tenants.items() if name == org), None)
    nodes = _numbered(whole)
    told = {one.name: _Rack(one, tenant, nodes if one.name == NO_RACK else {}) for one in whole.racks}
    racks = again(before, told, _only_own)
    since = [_each(rack, lambda one: _told_to_tenants(whole, one)) for _, rack in racks.values()]
    own = _nodes(whole, since)
    shown = tuple(_each(rack, lambda one: _in_own(whole, one, own)) for rack in since)
    chains = _chains(shown)
    vpcs = {one.machine.vpc for one in chains if one.machine is not None}
    # Of pods of its own: on its nodes there may still be the domain of the tenant before.
    domains = {one.compute_domain.uid for one in chains if one.compute_domain is not None}
    scene = Scene(
        at=whole.at,
        operator=False,
        layers=tuple(_layer(one) for one in whole.layers),
        domains={uuid: _domain(one) for uuid, one in whole.domains.items()},
        racks=shown,
        compute_domains=tuple(one for one in whole.compute_domains if one.uid in domains),
        tenants={} if tenant is None else {tenant: org},
        vpcs={uuid: name for uuid, name in whole.vpcs.items() if uuid in vpcs},
        happenings=tuple(one for one in whole.happenings if one.tenant == org),
    )
    return scene, racks


def _numbered(whole: Scene) -> Mapping[str, str]:
    """For the names of nodes that tell trays apart, numbers that do the same in the same order."""
    homeless = (rack for rack in whole.racks if rack.name == NO_RACK)
    seats = [seat for rack in homeless for tray in reversed(rack.trays) for seat in tray]
    names = dict.fromkeys(seat.place.node for seat in seats if seat.place.node)
    return {name: f"{number:06}" for number, name in enumerate(names)}


def _only_own(told: _Rack) -> RackSeats:
    return rack_of(tuple(tuple(_seat(seat, told) for seat in tray) for tray in told.rack.trays))


def _seat(seat: Seat, told: _Rack) -> Seat:
    chain = seat.chain
    holder = chain.machine.tenant if chain is not None and chain.machine is not None else None
    mine = holder is not None and holder == told.tenant
    place = msgspec.structs.replace(seat.place, node=told.nodes.get(seat.place.node, ""))
    own = _own(chain, told.tenant) if chain is not None and mine else None
    return msgspec.structs.replace(seat, place=place, chain=own)


def _each(rack: RackSeats, change: Callable[[GpuChain], GpuChain]) -> RackSeats:
    """The rack with every chain of the tenant changed; itself where the tenant has none."""
    if not rack.tenants:
        return rack
    trays = tuple(tuple(_changed(seat, change) for seat in tray) for tray in rack.trays)
    return msgspec.structs.replace(rack, trays=trays)


def _changed(seat: Seat, change: Callable[[GpuChain], GpuChain]) -> Seat:
    if seat.chain is None or (chain := change(seat.chain)) is seat.chain:
        return seat
    return msgspec.structs.replace(seat, chain=chain)


def _chains(racks: Iterable[RackSeats]) -> list[GpuChain]:
    trays = (tray for rack in racks if rack.tenants for tray in rack.trays)
    return [seat.chain for tray in trays for seat in tray if seat.chain is not None]


def _nodes(whole: Scene, racks: Iterable[RackSeats]) -> frozenset[str]:
    chains = _chains(racks)
    return frozenset(one.node.name for one in chains if one.node is not None and _cluster_told(whole, one))


def _own(chain: GpuChain, tenant: str | None) -> GpuChain:
    """A tenant's GPU. A fault may have put it into another's partition, whose name is not the tenant's."""
    logical = chain.logical if chain.logical is not None and chain.logical.tenant == tenant else None
    partition = chain.partition if logical is not None else None
    return msgspec.structs.replace(chain, logical=logical, partition=partition, conflicts=())


def _told_to_tenants(whole: Scene, chain: GpuChain) -> GpuChain:
    return _without_before(whole, _without_controllers(whole, chain))


def _without_controllers(whole: Scene, chain: GpuChain) -> GpuChain:
    """A chain that says that a domain is not known, and names neither controllers nor other domains."""
    wanted = chain.wanted
    domain = whole.domains.get(chain.machine.domain) if chain.machine is not None else None
    known = domain is not None and domain.answers
    if wanted is None or not wanted.problem or (known and _ADDRESS not in wanted.problem):
        return chain
    doubt = _DISPUTED if domain is not None and domain.disputed else _SILENT
    return msgspec.structs.replace(chain, wanted=msgspec.structs.replace(wanted, problem=doubt))


_ADDRESS = "://"
_DISPUTED = "the switch controllers of its domain contradict one another, or those of another"
_SILENT = "the switch controllers of its domain cannot be read"


def _without_before(whole: Scene, chain: GpuChain) -> GpuChain:
    """A chain without what may be of the tenant who had the machine before."""
    if chain.transfer is not None and chain.transfer.at < _held_since(whole, chain):
        chain = msgspec.structs.replace(chain, transfer=None)
    if chain.use is None:
        return chain
    if not _cluster_told(whole, chain):
        return msgspec.structs.replace(chain, use=None, compute_domain=None, channel=None)
    if _in_namespace(whole, chain, chain.use) and _began_here(chain):
        return chain
    kept_back = msgspec.structs.replace(chain.use, claim="", pods=(), since=None)
    return msgspec.structs.replace(chain, use=kept_back, compute_domain=None, channel=None)


def _in_namespace(whole: Scene, chain: GpuChain, use: DeviceUse) -> bool:
    """Whether the pods on a GPU are in a namespace that is labelled as its tenant's.

    Nothing else tells whose a pod is: the controllers of the tenant before may start its pods again at any
    time after the machine was given away.
    """
    return _is_own(whole, chain, use.claim.partition("/")[0])


def _is_own(whole: Scene, chain: GpuChain, namespace: str) -> bool:
    """Whether a namespace is labelled as that of the tenant of a GPU."""
    org = whole.tenants.get(chain.machine.tenant or "") if chain.machine is not None else None
    return org is not None and whole.namespaces.get(namespace) == org


def _began_here(chain: GpuChain) -> bool:
    """Whether the pods on a GPU began when its instance had the machine already.

    A cluster lists the pods that ran there before until somebody ends them.
    """
    held = chain.machine.held_since if chain.machine is not None else None
    since = chain.use.since if chain.use is not None else None
    return held is not None and since is not None and since >= held


def _cluster_told(whole: Scene, chain: GpuChain) -> bool:
    """Whether the cluster was read when the GPU was its tenant's already."""
    at = whole.layer(Layer.CLUSTER).at
    return at is not None and at >= _held_since(whole, chain)


def _held_since(whole: Scene, chain: GpuChain) -> float:
    """Since when a GPU is surely its tenant's; where nothing says so, since this reading."""
    since = chain.wanted.since if chain.wanted is not None else None
    return whole.at if since is None else since


def _in_own(whole: Scene, chain: GpuChain, nodes: frozenset[str]) -> GpuChain:
    """A chain without a ComputeDomain that reaches beyond the tenant's nodes, or is in another's namespace.

    Which domain a claim asks for its owner writes, who may name any.
    """
    domain = chain.compute_domain
    if domain is None or (_is_own(whole, chain, domain.namespace) and _within(domain, nodes)):
        return chain
    return msgspec.structs.replace(chain, compute_domain=None, channel=None)


def _within(domain: ComputeDomain, nodes: frozenset[str]) -> bool:
    members = {node.name for node in domain.status.nodes}
    return bool(members) and members <= nodes


def _layer(seen: LayerSeen) -> LayerSeen:
    return msgspec.structs.replace(seen, problem="")


def _domain(seen: DomainSeen) -> DomainSeen:
    return DomainSeen(
        uuid=seen.uuid,
        observed_at=seen.observed_at,
        unknown_since=seen.unknown_since,
        disputed=seen.disputed,
    )
