"""What a tenant may see of a scene: its own, and of the rest only that it is in use.

A field is shown because it is the tenant's, never because nobody thought of hiding it: seats of others lose
their whole chain, and of the tenant's own chain the parts that may name somebody else are dropped.
"""

import msgspec

from rackloom.claim.domain.objects import ComputeDomain
from rackloom.prove.picture.values import DomainSeen, GpuChain, LayerSeen
from rackloom.web.scene import Scene, Seat


def seen_by(whole: Scene, org: str) -> Scene:
    """The part of a scene that the tenant of an organisation may see."""
    tenant = next((id_ for id_, name in whole.tenants.items() if name == org), None)
    seats = tuple(_seat(seat, tenant) for seat in whole.seats)
    own = frozenset(s.chain.node.name for s in seats if s.chain is not None and s.chain.node is not None)
    vpcs = {s.chain.machine.vpc for s in seats if s.chain is not None and s.chain.machine is not None}
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


def _seat(seat: Seat, tenant: str | None) -> Seat:
    chain = seat.chain
    holder = chain.machine.tenant if chain is not None and chain.machine is not None else None
    mine = holder is not None and holder == tenant
    place = msgspec.structs.replace(seat.place, node=seat.place.node if mine else "")
    return msgspec.structs.replace(seat, place=place, chain=_own(chain, tenant) if chain and mine else None)


def _own(chain: GpuChain, tenant: str | None) -> GpuChain:
    """A tenant's GPU. A fault may have put it into another's partition, whose name is not the tenant's."""
    logical = chain.logical if chain.logical is not None and chain.logical.tenant == tenant else None
    partition = chain.partition if logical is not None else None
    return msgspec.structs.replace(chain, logical=logical, partition=partition, conflicts=())


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
