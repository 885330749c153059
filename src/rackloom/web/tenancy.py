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
from rackloom.core.diagnosis.snapshot import GpuChain, Layer, NvlinkDomainRecord
from rackloom.web.model import NO_RACK, MapGpu, MapRack, SiteMap, rack_of_trays


class _TenantRack(msgspec.Struct, frozen=True):
    """Everything on which a tenant's view of a rack depends."""

    rack: MapRack
    tenant: str | None
    nodes: Mapping[str, str]
    """Numbers that replace node names in positions without a rack."""


TenantRacks = Memo[str, _TenantRack, MapRack]
"""The racks of a map with the chains of one tenant only."""


def tenant_map(whole: SiteMap, org: str, before: TenantRacks) -> tuple[SiteMap, TenantRacks]:
    """The part of a map that the tenant of an organisation may see.

    Racks that equal those of `before` for the same organisation keep their values.
    """
    tenant = next((id_ for id_, name in whole.tenants.items() if name == org), None)
    nodes = _node_numbers(whole)
    inputs = {
        rack.name: _TenantRack(rack, tenant, nodes if rack.name == NO_RACK else {}) for rack in whole.racks
    }
    racks = recompute_changed(before, inputs, _own_rack)
    since = [
        _with_chains(rack, lambda chain: _since_held(whole, _without_controllers(whole, chain)))
        for _, rack in racks.values()
    ]
    own = _own_nodes(whole, since)
    shown = tuple(_with_chains(rack, lambda chain: _with_own_domain(whole, chain, own)) for rack in since)
    chains = _chains_of(shown)
    vpcs = {chain.machine.vpc for chain in chains if chain.machine is not None}
    # Only domains of its own pods: its nodes may still carry a domain of the previous tenant.
    domains = {chain.compute_domain.uid for chain in chains if chain.compute_domain is not None}
    own_map = SiteMap(
        at=whole.at,
        operator=False,
        layers=tuple(msgspec.structs.replace(layer, problem="") for layer in whole.layers),
        domains={uuid: _public_domain(domain) for uuid, domain in whole.domains.items()},
        racks=shown,
        compute_domains=tuple(domain for domain in whole.compute_domains if domain.uid in domains),
        tenants={} if tenant is None else {tenant: org},
        vpcs={uuid: name for uuid, name in whole.vpcs.items() if uuid in vpcs},
        happenings=tuple(happening for happening in whole.happenings if happening.tenant == org),
    )
    return own_map, racks


def _node_numbers(whole: SiteMap) -> Mapping[str, str]:
    """Numbers in place of the node names that distinguish trays, in the same order."""
    homeless = (rack for rack in whole.racks if rack.name == NO_RACK)
    gpus = [gpu for rack in homeless for tray in reversed(rack.trays) for gpu in tray]
    names = dict.fromkeys(gpu.place.node for gpu in gpus if gpu.place.node)
    return {name: f"{number:06}" for number, name in enumerate(names)}


def _own_rack(frame: _TenantRack) -> MapRack:
    return rack_of_trays(tuple(tuple(_own_gpu(gpu, frame) for gpu in tray) for tray in frame.rack.trays))


def _own_gpu(gpu: MapGpu, frame: _TenantRack) -> MapGpu:
    chain = gpu.chain
    holder = chain.machine.tenant if chain is not None and chain.machine is not None else None
    mine = holder is not None and holder == frame.tenant
    place = msgspec.structs.replace(gpu.place, node=frame.nodes.get(gpu.place.node, ""))
    own = _own_chain(chain, frame.tenant) if chain is not None and mine else None
    # Whether a tray is free depends on who asks; for whom it is reserved is for operators.
    held_back = gpu.held_back or gpu.reserved_for not in (None, frame.tenant)
    return msgspec.structs.replace(gpu, place=place, held_back=held_back, reserved_for=None, chain=own)


def _with_chains(rack: MapRack, change: Callable[[GpuChain], GpuChain]) -> MapRack:
    """The rack with every chain of the tenant changed; itself where the tenant has none."""
    if not rack.tenants:
        return rack
    trays = tuple(tuple(_with_chain(gpu, change) for gpu in tray) for tray in rack.trays)
    return msgspec.structs.replace(rack, trays=trays)


def _with_chain(gpu: MapGpu, change: Callable[[GpuChain], GpuChain]) -> MapGpu:
    if gpu.chain is None or (chain := change(gpu.chain)) is gpu.chain:
        return gpu
    return msgspec.structs.replace(gpu, chain=chain)


def _chains_of(racks: Iterable[MapRack]) -> list[GpuChain]:
    trays = (tray for rack in racks if rack.tenants for tray in rack.trays)
    return [gpu.chain for tray in trays for gpu in tray if gpu.chain is not None]


def _own_nodes(whole: SiteMap, racks: Iterable[MapRack]) -> frozenset[str]:
    held = (chain for chain in _chains_of(racks) if _cluster_read_since_held(whole, chain))
    return frozenset(chain.node.name for chain in held if chain.node is not None)


def _own_chain(chain: GpuChain, tenant: str | None) -> GpuChain:
    """A tenant's GPU. By a fault it may be in another tenant's partition, whose name stays hidden."""
    logical = chain.logical if chain.logical is not None and chain.logical.tenant == tenant else None
    partition = chain.partition if logical is not None else None
    machine = chain.machine
    if machine is not None and machine.reservation:
        machine = msgspec.structs.replace(machine, reserved_for=None, reservation="")
    return msgspec.structs.replace(chain, machine=machine, logical=logical, partition=partition, conflicts=())


def _without_controllers(whole: SiteMap, chain: GpuChain) -> GpuChain:
    """The chain without problems that name controllers or other domains."""
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
    """The chain without what may belong to the previous tenant of the machine."""
    if chain.transfer is not None and chain.transfer.at < _held_since(whole, chain):
        chain = msgspec.structs.replace(chain, transfer=None)
    if chain.use is None:
        return chain
    if not _cluster_read_since_held(whole, chain):
        return msgspec.structs.replace(chain, use=None, compute_domain=None, channel=None)
    # The label of a namespace is the only statement of whose its pods are. The controllers of the previous
    # tenant may start its pods again at any time after the machine was given to this one.
    if _is_own(whole, chain, chain.use.claim.partition("/")[0]) and _began_here(chain):
        return chain
    hidden = msgspec.structs.replace(chain.use, claim="", pods=(), since=None)
    return msgspec.structs.replace(chain, use=hidden, compute_domain=None, channel=None)


def _is_own(whole: SiteMap, chain: GpuChain, namespace: str) -> bool:
    """Whether a namespace is labelled as that of the tenant of a GPU."""
    org = whole.tenants.get(chain.machine.tenant or "") if chain.machine is not None else None
    return org is not None and whole.namespaces.get(namespace) == org


def _began_here(chain: GpuChain) -> bool:
    """Whether the pods on a GPU started after its instance got the machine.

    A cluster lists older pods until somebody deletes them.
    """
    held = chain.machine.held_since if chain.machine is not None else None
    since = chain.use.since if chain.use is not None else None
    return held is not None and since is not None and since >= held


def _cluster_read_since_held(whole: SiteMap, chain: GpuChain) -> bool:
    """Whether the cluster was read after the tenant got the GPU."""
    at = whole.layer(Layer.CLUSTER).at
    return at is not None and at >= _held_since(whole, chain)


def _held_since(whole: SiteMap, chain: GpuChain) -> float:
    """Since when a GPU certainly belongs to its tenant; if nothing records it, since this reading."""
    since = chain.wanted.since if chain.wanted is not None else None
    return whole.at if since is None else since


def _with_own_domain(whole: SiteMap, chain: GpuChain, nodes: frozenset[str]) -> GpuChain:
    """The chain without a ComputeDomain that has other tenants' nodes, or is in another's namespace.

    The owner of a claim writes the domain in it and may name any.
    """
    domain = chain.compute_domain
    members = {node.name for node in domain.status.nodes} if domain is not None else set()
    if domain is None or (members and members <= nodes and _is_own(whole, chain, domain.namespace)):
        return chain
    return msgspec.structs.replace(chain, compute_domain=None, channel=None)


def _public_domain(domain: NvlinkDomainRecord) -> NvlinkDomainRecord:
    return NvlinkDomainRecord(
        uuid=domain.uuid,
        observed_at=domain.observed_at,
        unknown_since=domain.unknown_since,
        disputed=domain.disputed,
    )
