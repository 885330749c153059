"""What a tenant may see of a scene: its own, and of the rest only that it is in use.

A field is shown because it is the tenant's, never because nobody thought of hiding it: seats of others lose
their whole chain, and of the tenant's own chain the parts that may name somebody else are dropped, as is what
was seen before the machine was the tenant's.
"""

from collections.abc import Mapping

import msgspec

from rackloom.claim.domain.objects import ComputeDomain
from rackloom.prove.picture.values import DomainSeen, GpuChain, Layer, LayerSeen
from rackloom.web.scene import Scene, Seat


def seen_by(whole: Scene, org: str) -> Scene:
    """The part of a scene that the tenant of an organisation may see."""
    tenant = next((id_ for id_, name in whole.tenants.items() if name == org), None)
    nodes = _numbered(whole)
    seats = tuple(_seat(whole, seat, tenant, nodes[seat.place.node]) for seat in whole.seats)
    chains = [seat.chain for seat in seats if seat.chain is not None]
    own = frozenset(one.node.name for one in chains if one.node is not None and _cluster_told(whole, one))
    vpcs = {one.machine.vpc for one in chains if one.machine is not None}
    return Scene(
        at=whole.at,
        operator=False,
        layers=tuple(_layer(one) for one in whole.layers),
        domains={uuid: _domain(one) for uuid, one in whole.domains.items()},
        seats=tuple(msgspec.structs.replace(s, chain=_in_own(s.chain, own)) for s in seats),
        compute_domains=tuple(one for one in whole.compute_domains if _within(one, own)),
        tenants={} if tenant is None else {tenant: org},
        vpcs={uuid: name for uuid, name in whole.vpcs.items() if uuid in vpcs},
        happenings=tuple(one for one in whole.happenings if one.tenant == org),
    )


def _numbered(whole: Scene) -> Mapping[str, str]:
    """For the names of nodes that tell trays apart, numbers that do the same in the same order."""
    names = dict.fromkeys(seat.place.node for seat in whole.seats if seat.place.node)
    return {"": "", **{name: f"{number:06}" for number, name in enumerate(names)}}


def _seat(whole: Scene, seat: Seat, tenant: str | None, node: str) -> Seat:
    chain = seat.chain
    holder = chain.machine.tenant if chain is not None and chain.machine is not None else None
    mine = holder is not None and holder == tenant
    place = msgspec.structs.replace(seat.place, node=node)
    own = _own(whole, chain, tenant) if chain is not None and mine else None
    return msgspec.structs.replace(seat, place=place, chain=own)


def _own(whole: Scene, chain: GpuChain, tenant: str | None) -> GpuChain:
    """A tenant's GPU. A fault may have put it into another's partition, whose name is not the tenant's."""
    logical = chain.logical if chain.logical is not None and chain.logical.tenant == tenant else None
    partition = chain.partition if logical is not None else None
    own = msgspec.structs.replace(chain, logical=logical, partition=partition, conflicts=())
    return _without_before(whole, own)


def _without_before(whole: Scene, chain: GpuChain) -> GpuChain:
    """A chain without what may be of the tenant who had the machine before."""
    if chain.transfer is not None and chain.transfer.at < _held_since(whole, chain):
        chain = msgspec.structs.replace(chain, transfer=None)
    if _cluster_told(whole, chain):
        return chain
    return msgspec.structs.replace(chain, use=None, compute_domain=None, channel=None)


def _cluster_told(whole: Scene, chain: GpuChain) -> bool:
    """Whether the cluster was read when the GPU was its tenant's already."""
    at = whole.layer(Layer.CLUSTER).at
    return at is not None and at >= _held_since(whole, chain)


def _held_since(whole: Scene, chain: GpuChain) -> float:
    """Since when a GPU is surely its tenant's; where nothing says so, since this reading."""
    since = chain.wanted.since if chain.wanted is not None else None
    return whole.at if since is None else since


def _in_own(chain: GpuChain | None, nodes: frozenset[str]) -> GpuChain | None:
    """A ComputeDomain that reaches beyond the tenant's nodes is not shown on them either."""
    if chain is None or chain.compute_domain is None or _within(chain.compute_domain, nodes):
        return chain
    return msgspec.structs.replace(chain, compute_domain=None, channel=None)


def _within(domain: ComputeDomain, nodes: frozenset[str]) -> bool:
    members = {node.name for node in domain.status.nodes}
    return bool(members) and members <= nodes


def _layer(seen: LayerSeen) -> LayerSeen:
    return msgspec.structs.replace(seen, problem="")


def _domain(seen: DomainSeen) -> DomainSeen:
    return DomainSeen(uuid=seen.uuid, observed_at=seen.observed_at, unknown_since=seen.unknown_since)
