"""The part of the map that a tenant may see: its own GPUs, and only whether others are in use.

The rule is an allow list. A GPU of another tenant loses its whole chain. The tenant's own chains lose all
facts that may name others: partitions that are not its own, addresses of controllers, problems of a layer.

Facts from before the machine belonged to the tenant are dropped too: older transfers, pods and claims.
A pod counts as the tenant's only if its namespace carries the tenant's organisation label and it started
after the instance got the machine, because the controllers of the previous tenant may start its pods
again at any time. A ComputeDomain is shown only if its namespace is the tenant's and all its nodes are
the tenant's, because the owner of a claim chooses the domain in it, and may name any.

Node names that distinguish trays are replaced with numbers in the same order.

A rack in which a tenant holds nothing looks the same to every such tenant. It is taken from the map of
`NOBODY`, which holds nothing anywhere, and only the other racks are computed for the tenant.

Three memos limit the cost of a reading to its changes. Each rack passes them in turn, and each memo sees
all of its input:

1. `_own_rack` drops the chains of other tenants. It depends on the rack alone.
2. `_held_rack` drops facts that may be the previous tenant's. It depends on times, but only on their order
   relative to those of the rack (`_RackMoment`).
3. `_shown_rack` drops other tenants' ComputeDomains. The owner of one is decided once for all racks.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping

import msgspec

from rackloom.core.cluster.domain_objects import ComputeDomain
from rackloom.core.diagnosis.incremental import Memo, recompute_changed
from rackloom.core.diagnosis.snapshot import GpuChain, Layer, NvlinkDomainRecord
from rackloom.web.model import NO_RACK, MapGpu, MapRack, SiteMap, rack_of_trays

NOBODY = ""
"""Stands for an organisation that holds nothing: no organisation has this name."""

# The input and output of each step.


class _TenantRack(msgspec.Struct, frozen=True):
    """Everything on which a tenant's view of a rack depends."""

    rack: MapRack
    tenant: str | None
    nodes: Mapping[str, str]
    """Numbers that replace node names in positions without a rack."""


class _OwnRack(msgspec.Struct, frozen=True, kw_only=True):
    """A rack with the chains of the tenant only, and the names and times that decide which are shown."""

    rack: MapRack
    domains: tuple[str, ...] = ()
    """NVLink domains of the machines, sorted."""
    namespaces: tuple[str, ...] = ()
    """Namespaces of claims and of ComputeDomains, sorted."""
    held_since: tuple[float, ...] = ()
    """The recorded times at which the tenant got GPUs, sorted."""
    undated: bool = False
    """Whether a GPU has no such record. It then counts as held since the reading."""
    undated_transfers: tuple[float, ...] = ()
    """Times of transfers from GPUs without a record, sorted."""


class _RackMoment(msgspec.Struct, frozen=True):
    """The order of the times of a reading relative to those of a rack."""

    recorded_before: int
    """The number of times in `_OwnRack.held_since` after which the cluster was read. 0 if it was not."""
    read_since_reading: bool
    """Whether the cluster counts as read after GPUs without a record were held."""
    transfers_before: int
    """The number of times in `_OwnRack.undated_transfers` before the reading."""


_DomainAnswer = tuple[bool, bool]
"""Whether the controllers of an NVLink domain answer, and whether they are in dispute."""


class _HeldInput(msgspec.Struct, frozen=True):
    """Everything on which the second step depends."""

    own: _OwnRack
    moment: _RackMoment
    answers: tuple[_DomainAnswer, ...]
    """The answers for each of `own.domains`."""
    namespaces: frozenset[str]
    """Namespaces of the rack that are the tenant's."""


class _HeldRack(msgspec.Struct, frozen=True):
    """A rack without facts that may be the previous tenant's."""

    rack: MapRack
    nodes: frozenset[str] = frozenset()
    """The tenant's nodes for which the cluster was read after the tenant got them."""
    compute_domains: tuple[ComputeDomain, ...] = ()
    """ComputeDomains that its claims name, each once."""


class _ShownInput(msgspec.Struct, frozen=True):
    """Everything on which the third step depends."""

    held: _HeldRack
    shown: frozenset[str]
    """UIDs of its ComputeDomains that are the tenant's."""


class _ShownRack(msgspec.Struct, frozen=True):
    """A rack as the tenant sees it, and the VPCs and ComputeDomains in it."""

    rack: MapRack
    vpcs: frozenset[str | None] = frozenset()
    compute_domains: frozenset[str] = frozenset()


class TenantRacks(msgspec.Struct, frozen=True, kw_only=True):
    """The intermediate values of one tenant's part of a reading, for comparison with the next."""

    own: Memo[str, _TenantRack, _OwnRack] = msgspec.field(default_factory=dict)
    held: Memo[str, _HeldInput, _HeldRack] = msgspec.field(default_factory=dict)
    shown: Memo[str, _ShownInput, _ShownRack] = msgspec.field(default_factory=dict)
    domains: Memo[str, NvlinkDomainRecord, NvlinkDomainRecord] = msgspec.field(default_factory=dict)


# The tenant's part.


def tenant_map(
    whole: SiteMap, org: str, before: TenantRacks, nobodys: SiteMap | None = None
) -> tuple[SiteMap, TenantRacks]:
    """The part of a map that the tenant of an organisation may see.

    Racks that equal those of `before` for the same organisation keep their values. `nobodys` is the same map
    for `NOBODY`. Without it, every rack is computed for this tenant.
    """
    tenant = next((id_ for id_, name in whole.tenants.items() if name == org), None)
    mine = whole.racks if nobodys is None else [rack for rack in whole.racks if tenant in rack.tenants]
    # Numbers in place of the node names that distinguish trays, in the same order.
    homeless = (rack for rack in mine if rack.name == NO_RACK)
    gpus = [gpu for rack in homeless for tray in reversed(rack.trays) for gpu in tray]
    names = dict.fromkeys(gpu.place.name.rack for gpu in gpus)
    nodes, none = {name: f"{number:06}" for number, name in enumerate(names)}, dict[str, str]()
    inputs = {rack.name: _TenantRack(rack, tenant, nodes if rack.name == NO_RACK else none) for rack in mine}
    own = recompute_changed(before.own, inputs, _own_rack)
    labelled = labelled_namespaces(whole, org)
    read_at = whole.layer(Layer.CLUSTER).at
    facts = {
        name: _held_input(whole.at, read_at, whole.domains, labelled, found)
        for name, (_, found) in own.items()
    }
    held = recompute_changed(before.held, facts, _held_rack)
    allowed = _own_compute_domains([found for _, found in held.values()], labelled)
    shown = recompute_changed(
        before.shown, {name: _shown_input(found, allowed) for name, (_, found) in held.items()}, _shown_rack
    )
    racks = {name: found for name, (_, found) in shown.items()}
    vpcs = frozenset[str | None]().union(*[rack.vpcs for rack in racks.values()])
    # Only the domains of the tenant's pods: its nodes may still carry a domain of the previous tenant.
    used = frozenset[str]().union(*[rack.compute_domains for rack in racks.values()])
    domains = {} if nobodys else recompute_changed(before.domains, whole.domains, _public_domain)
    others = nobodys.racks if nobodys else whole.racks
    own_map = SiteMap(
        at=whole.at,
        operator=False,
        layers=tuple(msgspec.structs.replace(layer, problem="") for layer in whole.layers),
        domains=nobodys.domains if nobodys else {uuid: public for uuid, (_, public) in domains.items()},
        racks=tuple([racks[rack.name].rack if rack.name in racks else rack for rack in others]),
        compute_domains=tuple(domain for domain in whole.compute_domains if domain.uid in used),
        tenants={} if tenant is None else {tenant: org},
        vpcs={uuid: whole.vpcs[uuid] for uuid in sorted(filter(None, vpcs)) if uuid in whole.vpcs},
        happenings=tuple(happening for happening in whole.happenings if happening.tenant == org),
    )
    return own_map, TenantRacks(own=own, held=held, shown=shown, domains=domains)


def labelled_namespaces(whole: SiteMap, org: str) -> frozenset[str]:
    """The namespaces with the label of an organisation. Only this label states who owns their pods."""
    return frozenset(name for name, owner in whole.namespaces.items() if owner == org)


# Step 1: its own chains.


def _own_rack(frame: _TenantRack) -> _OwnRack:
    rack = rack_of_trays(tuple(tuple(_own_gpu(gpu, frame) for gpu in tray) for tray in frame.rack.trays))
    chains = list(_chains_of(rack))
    if not chains:
        return _OwnRack(rack=rack)
    undated = [chain for chain in chains if _recorded_since(chain) is None]
    transfers = [chain.transfer.at for chain in undated if chain.transfer is not None]
    return _OwnRack(
        rack=rack,
        domains=tuple(sorted({chain.machine.domain for chain in chains if chain.machine is not None})),
        namespaces=tuple(sorted({name for chain in chains for name in _namespaces_of(chain)})),
        held_since=tuple(sorted(since for chain in chains if (since := _recorded_since(chain)) is not None)),
        undated=bool(undated),
        undated_transfers=tuple(sorted(transfers)),
    )


def _namespaces_of(chain: GpuChain) -> Iterator[str]:
    if chain.use is not None:
        yield _namespace_of(chain.use.claim)
    if chain.compute_domain is not None:
        yield chain.compute_domain.namespace


def _namespace_of(claim: str) -> str:
    return claim.partition("/")[0]


def _recorded_since(chain: GpuChain) -> float | None:
    """Since when a GPU is recorded to belong to its tenant."""
    return chain.wanted.since if chain.wanted is not None else None


def _own_gpu(gpu: MapGpu, frame: _TenantRack) -> MapGpu:
    chain = gpu.chain
    holder = chain.machine.tenant if chain is not None and chain.machine is not None else None
    mine = holder is not None and holder == frame.tenant
    name = gpu.place.name
    named = msgspec.structs.replace(name, rack=frame.nodes.get(name.rack, name.rack))
    place = msgspec.structs.replace(gpu.place, name=named)
    own = _own_chain(chain, frame.tenant) if chain is not None and mine else None
    # Whether a tray is free depends on the viewer. Only operators see for whom it is reserved.
    held_back = gpu.held_back or gpu.reserved_for not in (None, frame.tenant)
    return msgspec.structs.replace(gpu, place=place, held_back=held_back, reserved_for=None, chain=own)


def _with_chains(rack: MapRack, change: Callable[[GpuChain], GpuChain]) -> MapRack:
    """The rack with every chain of the tenant changed, or the same object if nothing changes."""
    trays = tuple(tuple([_with_chain(gpu, change) for gpu in tray]) for tray in rack.trays)
    return rack if trays == rack.trays else msgspec.structs.replace(rack, trays=trays)


def _with_chain(gpu: MapGpu, change: Callable[[GpuChain], GpuChain]) -> MapGpu:
    if gpu.chain is None or (chain := change(gpu.chain)) is gpu.chain:
        return gpu
    return msgspec.structs.replace(gpu, chain=chain)


def _chains_of(rack: MapRack) -> Iterator[GpuChain]:
    return (gpu.chain for tray in rack.trays for gpu in tray if gpu.chain is not None)


def _own_chain(chain: GpuChain, tenant: str | None) -> GpuChain:
    """A tenant's GPU. After a fault it may be in another tenant's partition, whose name stays hidden."""
    logical = chain.logical if chain.logical is not None and chain.logical.tenant == tenant else None
    partition = chain.partition if logical is not None else None
    machine = chain.machine
    if machine is not None and machine.reservation:
        machine = msgspec.structs.replace(machine, reserved_for=None, reservation="")
    return msgspec.structs.replace(chain, machine=machine, logical=logical, partition=partition, conflicts=())


# Step 2: facts that may be the previous tenant's, and names of controllers.


def _held_input(
    at: float,
    read_at: float | None,
    domains: Mapping[str, NvlinkDomainRecord],
    labelled: frozenset[str],
    own: _OwnRack,
) -> _HeldInput:
    """`at` is the time of the reading, and `read_at` the time at which the cluster was read.

    `labelled` are the namespaces that carry the tenant's organisation.
    """
    if not own.rack.tenants:
        return _HeldInput(own, _NO_MOMENT, (), frozenset())
    moment = _RackMoment(
        0 if read_at is None else bisect_right(own.held_since, read_at),
        own.undated and read_at is not None and read_at >= at,
        bisect_left(own.undated_transfers, at),
    )
    records = [domains.get(uuid) for uuid in own.domains]
    here = tuple([(seen.answers, seen.disputed) if seen is not None else _NO_ANSWER for seen in records])
    return _HeldInput(own, moment, here, labelled.intersection(own.namespaces))


_NO_MOMENT = _RackMoment(0, False, 0)
_NO_ANSWER = (False, False)


def _held_rack(facts: _HeldInput) -> _HeldRack:
    own = facts.own
    if not own.rack.tenants:
        return _HeldRack(own.rack)
    answers = dict(zip(own.domains, facts.answers, strict=True))
    rack = _with_chains(own.rack, lambda chain: _since_held(facts, _without_controllers(answers, chain)))
    chains = list(_chains_of(rack))
    domains = {chain.compute_domain.uid: chain.compute_domain for chain in chains if chain.compute_domain}
    read = (chain.node for chain in chains if _cluster_read_since_held(facts, chain))
    nodes = frozenset(node.name for node in read if node is not None)
    return _HeldRack(rack, nodes, tuple(domains.values()))


def _without_controllers(answers: Mapping[str, _DomainAnswer], chain: GpuChain) -> GpuChain:
    """The chain without problems that name controllers or other domains."""
    wanted = chain.wanted
    known, disputed = answers[chain.machine.domain] if chain.machine is not None else (False, False)
    if wanted is None or not wanted.problem or (known and _ADDRESS not in wanted.problem):
        return chain
    doubt = _DISPUTED if disputed else _SILENT
    return msgspec.structs.replace(chain, wanted=msgspec.structs.replace(wanted, problem=doubt))


_ADDRESS = "://"
_DISPUTED = "the switch controllers of its domain contradict one another, or those of another"
_SILENT = "the switch controllers of its domain cannot be read"


def _since_held(facts: _HeldInput, chain: GpuChain) -> GpuChain:
    """The chain without facts that may belong to the previous tenant of the machine."""
    if chain.transfer is not None and _is_transfer_older(facts, chain, chain.transfer.at):
        chain = msgspec.structs.replace(chain, transfer=None)
    if chain.use is None:
        return chain
    if not _cluster_read_since_held(facts, chain):
        return msgspec.structs.replace(chain, use=None, compute_domain=None, channel=None)
    # Only the label of a namespace states who owns its pods. The controllers of the previous tenant may
    # start its pods again at any time after the machine was given to this one.
    if _namespace_of(chain.use.claim) in facts.namespaces and _began_here(chain):
        return chain
    hidden = msgspec.structs.replace(chain.use, claim="", pods=(), since=None, jobs=())
    return msgspec.structs.replace(chain, use=hidden, compute_domain=None, channel=None)


def _began_here(chain: GpuChain) -> bool:
    """Whether the pods on a GPU started after its instance got the machine.

    A cluster lists older pods until they are deleted.
    """
    held = chain.machine.held_since if chain.machine is not None else None
    since = chain.use.since if chain.use is not None else None
    return held is not None and since is not None and since >= held


def _is_transfer_older(facts: _HeldInput, chain: GpuChain, at: float) -> bool:
    """Whether a transfer was before the GPU certainly belonged to its tenant."""
    since = _recorded_since(chain)
    if since is not None:
        return at < since
    return bisect_right(facts.own.undated_transfers, at) <= facts.moment.transfers_before


def _cluster_read_since_held(facts: _HeldInput, chain: GpuChain) -> bool:
    """Whether the cluster was read after the tenant got the GPU. Without a record, after this reading."""
    since = _recorded_since(chain)
    if since is None:
        return facts.moment.read_since_reading
    # The cluster was read after the first `count` of the recorded times.
    count = facts.moment.recorded_before
    return count > 0 and since <= facts.own.held_since[count - 1]


# Step 3: ComputeDomains of other tenants.


def _own_compute_domains(racks: Collection[_HeldRack], labelled: frozenset[str]) -> frozenset[str]:
    """The UIDs of the ComputeDomains for which the namespace and all nodes are the tenant's.

    The owner of a claim writes the domain in it and may name any.
    """
    domains = {domain.uid: domain for rack in racks for domain in rack.compute_domains}
    able = [domain for domain in domains.values() if domain.namespace in labelled]
    if not able:
        return frozenset()
    nodes = frozenset[str]().union(*[rack.nodes for rack in racks])
    return frozenset(
        domain.uid
        for domain in able
        if domain.status.nodes and nodes.issuperset([node.name for node in domain.status.nodes])
    )


def _shown_input(held: _HeldRack, mine: frozenset[str]) -> _ShownInput:
    return _ShownInput(held, mine.intersection([domain.uid for domain in held.compute_domains]))


def _shown_rack(facts: _ShownInput) -> _ShownRack:
    if not facts.held.rack.tenants:
        return _ShownRack(facts.held.rack)
    rack = _with_chains(facts.held.rack, lambda chain: _with_own_domain(facts.shown, chain))
    chains = list(_chains_of(rack))
    return _ShownRack(
        rack,
        frozenset(chain.machine.vpc for chain in chains if chain.machine is not None),
        frozenset(chain.compute_domain.uid for chain in chains if chain.compute_domain is not None),
    )


def _with_own_domain(shown: frozenset[str], chain: GpuChain) -> GpuChain:
    """The chain without a ComputeDomain that is not shown."""
    if chain.compute_domain is None or chain.compute_domain.uid in shown:
        return chain
    return msgspec.structs.replace(chain, compute_domain=None, channel=None)


def _public_domain(domain: NvlinkDomainRecord) -> NvlinkDomainRecord:
    return NvlinkDomainRecord(
        uuid=domain.uuid,
        observed_at=domain.observed_at,
        unknown_since=domain.unknown_since,
        disputed=domain.disputed,
    )
