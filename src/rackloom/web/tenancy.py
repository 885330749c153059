"""What a tenant may see of the map: its own GPUs, and of all others only whether they are in use.

The rule is an allow list. A GPU of another tenant loses its whole chain. Of the tenant's own chain,
everything that may name somebody else is dropped: partitions that are not its own, addresses of
controllers, problems of a layer.

What was seen before the machine belonged to the tenant is dropped too: older transfers, pods and claims.
A pod counts as the tenant's only if its namespace carries the tenant's organisation label and it started
after the instance got the machine, because the controllers of the previous tenant may start its pods
again at any time. A ComputeDomain is shown only if its namespace is the tenant's and all its nodes are
the tenant's: the owner of a claim writes which domain it asks for, and may name any.

Node names that tell trays apart are replaced with numbers in the same order.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec

from rackloom.core.diagnosis.incremental import Memo, recompute_changed
from rackloom.core.diagnosis.snapshot import AllocatedDevice, GpuChain, Layer, LayerStatus, NvlinkDomainRecord
from rackloom.core.domains.compute_domain import ComputeDomain
from rackloom.web.model import NO_RACK, MapGpu, MapRack, SiteMap, rack_of_trays


class _TenantRack(msgspec.Struct, frozen=True):
    """All that it depends on what a tenant has in a rack."""

    rack: MapRack
    tenant: str | None
    nodes: Mapping[str, str]
    """Numbers for the names of nodes that tell its trays apart."""


TenantRacks = Memo[str, _TenantRack, MapRack]
"""The racks of a scene with the chains of one tenant alone."""


def tenant_map(whole: SiteMap, org: str, before: TenantRacks) -> tuple[SiteMap, TenantRacks]:
    """The part of a scene that the tenant of an organisation may see.

    Made is only what is not as it was for the same organisation `before`; nothing was before `{}`.
    """
    tenant = next((id_ for id_, name in whole.tenants.items() if name == org), None)
    nodes = _node_numbers(whole)
    told = {
        rack.name: _TenantRack(rack, tenant, nodes if rack.name == NO_RACK else {}) for rack in whole.racks
    }
    racks = recompute_changed(before, told, _own_rack)
    since = [_with_chains(rack, lambda one: _redacted(whole, one)) for _, rack in racks.values()]
    own = _own_nodes(whole, since)
    shown = tuple(_with_chains(rack, lambda one: _with_own_domain(whole, one, own)) for rack in since)
    chains = _chains_of(shown)
    vpcs = {chain.machine.vpc for chain in chains if chain.machine is not None}
    # Of pods of its own: on its nodes there may still be the domain of the tenant before.
    domains = {chain.compute_domain.uid for chain in chains if chain.compute_domain is not None}
    scene = SiteMap(
        at=whole.at,
        operator=False,
        layers=tuple(_public_layer(layer) for layer in whole.layers),
        domains={uuid: _public_domain(domain) for uuid, domain in whole.domains.items()},
        racks=shown,
        compute_domains=tuple(domain for domain in whole.compute_domains if domain.uid in domains),
        tenants={} if tenant is None else {tenant: org},
        vpcs={uuid: name for uuid, name in whole.vpcs.items() if uuid in vpcs},
        happenings=tuple(happening for happening in whole.happenings if happening.tenant == org),
    )
    return scene, racks


def _node_numbers(whole: SiteMap) -> Mapping[str, str]:
    """For the names of nodes that tell trays apart, numbers that do the same in the same order."""
    homeless = (rack for rack in whole.racks if rack.name == NO_RACK)
    seats = [seat for rack in homeless for tray in reversed(rack.trays) for seat in tray]
    names = dict.fromkeys(seat.place.node for seat in seats if seat.place.node)
    return {name: f"{number:06}" for number, name in enumerate(names)}


def _own_rack(told: _TenantRack) -> MapRack:
    return rack_of_trays(tuple(tuple(_own_gpu(seat, told) for seat in tray) for tray in told.rack.trays))


def _own_gpu(seat: MapGpu, told: _TenantRack) -> MapGpu:
    chain = seat.chain
    holder = chain.machine.tenant if chain is not None and chain.machine is not None else None
    mine = holder is not None and holder == told.tenant
    place = msgspec.structs.replace(seat.place, node=told.nodes.get(seat.place.node, ""))
    own = _own_chain(chain, told.tenant) if chain is not None and mine else None
    return msgspec.structs.replace(seat, place=place, chain=own)


def _with_chains(rack: MapRack, change: Callable[[GpuChain], GpuChain]) -> MapRack:
    """The rack with every chain of the tenant changed; itself where the tenant has none."""
    if not rack.tenants:
        return rack
    trays = tuple(tuple(_with_chain(seat, change) for seat in tray) for tray in rack.trays)
    return msgspec.structs.replace(rack, trays=trays)


def _with_chain(seat: MapGpu, change: Callable[[GpuChain], GpuChain]) -> MapGpu:
    if seat.chain is None or (chain := change(seat.chain)) is seat.chain:
        return seat
    return msgspec.structs.replace(seat, chain=chain)


def _chains_of(racks: Iterable[MapRack]) -> list[GpuChain]:
    trays = (tray for rack in racks if rack.tenants for tray in rack.trays)
    return [seat.chain for tray in trays for seat in tray if seat.chain is not None]


def _own_nodes(whole: SiteMap, racks: Iterable[MapRack]) -> frozenset[str]:
    chains = _chains_of(racks)
    return frozenset(
        chain.node.name
        for chain in chains
        if chain.node is not None and _cluster_read_since_held(whole, chain)
    )


def _own_chain(chain: GpuChain, tenant: str | None) -> GpuChain:
    """A tenant's GPU. A fault may have put it into another's partition, whose name is not the tenant's."""
    logical = chain.logical if chain.logical is not None and chain.logical.tenant == tenant else None
    partition = chain.partition if logical is not None else None
    return msgspec.structs.replace(chain, logical=logical, partition=partition, conflicts=())


def _redacted(whole: SiteMap, chain: GpuChain) -> GpuChain:
    return _since_held(whole, _without_controllers(whole, chain))


def _without_controllers(whole: SiteMap, chain: GpuChain) -> GpuChain:
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


def _since_held(whole: SiteMap, chain: GpuChain) -> GpuChain:
    """A chain without what may be of the tenant who had the machine before."""
    if chain.transfer is not None and chain.transfer.at < _held_since(whole, chain):
        chain = msgspec.structs.replace(chain, transfer=None)
    if chain.use is None:
        return chain
    if not _cluster_read_since_held(whole, chain):
        return msgspec.structs.replace(chain, use=None, compute_domain=None, channel=None)
    if _in_namespace(whole, chain, chain.use) and _began_here(chain):
        return chain
    kept_back = msgspec.structs.replace(chain.use, claim="", pods=(), since=None)
    return msgspec.structs.replace(chain, use=kept_back, compute_domain=None, channel=None)


def _in_namespace(whole: SiteMap, chain: GpuChain, use: AllocatedDevice) -> bool:
    """Whether the pods on a GPU are in a namespace that is labelled as its tenant's.

    Nothing else tells whose a pod is: the controllers of the tenant before may start its pods again at any
    time after the machine was given away.
    """
    return _is_own(whole, chain, use.claim.partition("/")[0])


def _is_own(whole: SiteMap, chain: GpuChain, namespace: str) -> bool:
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


def _cluster_read_since_held(whole: SiteMap, chain: GpuChain) -> bool:
    """Whether the cluster was read when the GPU was its tenant's already."""
    at = whole.layer(Layer.CLUSTER).at
    return at is not None and at >= _held_since(whole, chain)


def _held_since(whole: SiteMap, chain: GpuChain) -> float:
    """Since when a GPU is surely its tenant's; where nothing says so, since this reading."""
    since = chain.wanted.since if chain.wanted is not None else None
    return whole.at if since is None else since


def _with_own_domain(whole: SiteMap, chain: GpuChain, nodes: frozenset[str]) -> GpuChain:
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


def _public_layer(seen: LayerStatus) -> LayerStatus:
    return msgspec.structs.replace(seen, problem="")


def _public_domain(seen: NvlinkDomainRecord) -> NvlinkDomainRecord:
    return NvlinkDomainRecord(
        uuid=seen.uuid,
        observed_at=seen.observed_at,
        unknown_since=seen.unknown_since,
        disputed=seen.disputed,
    )
