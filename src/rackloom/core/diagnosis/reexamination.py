"""The examination of a site that was examined before: only parts that differ are checked again.

`examine_again` returns the findings of `examination.examine` for the same snapshot, regardless of the
previous examination. A part is a share of the joined site (mostly a rack, `incremental`): no part of the join
key crosses shares. It takes these steps, each of which `recompute_changed` repeats only if its input differs:

1. `_place` gives every record to the part of its GPUs: partitions by domain, nodes and pools by node,
   allocations by pool, requested GPUs by machine. A record without a GPU is in a separate part.
2. Each part becomes a `SnapshotIndex` of its records, with the domains and tenants that it names. A domain
   has only the fields that the checks of a part read: whether its reading is fresh, and its policy.
3. `check_part` checks each part, with the facts about the whole site that concern the part (`SiteFacts`): a
   fact about another rack makes nothing differ here.
4. ComputeDomains are checked, if anything that concerns them differs.
5. `check_across` runs the checks that concern several parts or depend on the time, on a `SiteIndex` that
   looks things up in the parts. This, and folding, is done each time.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from rackloom.core.diagnosis.checks.cliques import ClusterVotes, cluster_of, cluster_votes, domain_of_clusters
from rackloom.core.diagnosis.checks.devices import expected_drivers
from rackloom.core.diagnosis.checks.domains import check_domains
from rackloom.core.diagnosis.checks.identity import check_moved_trays
from rackloom.core.diagnosis.checks.nics import check_pods
from rackloom.core.diagnosis.evidence import ClusterEvidence
from rackloom.core.diagnosis.examination import (
    PartFindings,
    SiteFacts,
    check_across,
    check_part,
    cluster_evidence,
    fold_consequences,
    not_holding,
)
from rackloom.core.diagnosis.findings import Finding
from rackloom.core.diagnosis.incremental import GroupName, JoinedShares, Memo, recompute_changed
from rackloom.core.diagnosis.index import DeviceKind, SnapshotIndex
from rackloom.core.diagnosis.join import chain_order
from rackloom.core.diagnosis.snapshot import (
    DeviceId,
    DeviceRecord,
    GpuChain,
    Layer,
    NvlinkDomainRecord,
    SiteSnapshot,
    grouped,
)
from rackloom.core.diagnosis.titles import explained

# Parts, and the records that belong to each.


NOWHERE: GroupName = ("", "")
"""The part of the records that belong to no GPU."""
Homes = Mapping[GroupName, GroupName]
"""The part of each domain, chassis and node."""
PoolHomes = Mapping[tuple[str, str], tuple[GroupName, ...]]
"""The parts that publish devices of each pool, by driver and name. Mostly one."""


class _Field(NamedTuple):
    """The records of a field, and all that decides to which part each of them belongs."""

    name: str
    records: tuple[Any, ...]
    homes: Mapping[Any, Any]


class _NodePools(NamedTuple):
    """The pools of the devices of each node, and all parts."""

    pools: tuple[tuple[GroupName, frozenset[tuple[str, str]]], ...]
    homes: Homes


class _PartRecords(NamedTuple):
    """The records of a part."""

    joined: tuple[SiteSnapshot, tuple[GpuChain, ...]]
    """The share of the join, and its GPUs."""
    placed: tuple[tuple[Any, ...], ...]
    """The records of each of `_PLACED`."""


class _PartNames(NamedTuple):
    """The names of objects elsewhere that the records of a part mention."""

    domains: frozenset[str]
    tenants: frozenset[str]
    clusters: frozenset[str]
    pods: frozenset[str]


class _PartInputs(NamedTuple):
    """All that the index of a part is made of."""

    records: _PartRecords
    domains: tuple[NvlinkDomainRecord, ...]
    tenants: tuple[tuple[str, str], ...]


class _CheckInputs(NamedTuple):
    """All that the findings of a part depend on. An index is equal to itself only."""

    part: SnapshotIndex
    facts: SiteFacts


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of a snapshot, and the values that the next snapshot is compared with."""

    findings: tuple[Finding, ...] = ()
    machine_homes: Memo[str, _Field, Mapping[str, GroupName]] = msgspec.field(default_factory=dict)
    pool_homes: Memo[str, _NodePools, PoolHomes] = msgspec.field(default_factory=dict)
    placed: Memo[str, _Field, Mapping[GroupName, tuple[Any, ...]]] = msgspec.field(default_factory=dict)
    names: Memo[GroupName, _PartRecords, _PartNames] = msgspec.field(default_factory=dict)
    indexes: Memo[GroupName, _PartInputs, SnapshotIndex] = msgspec.field(default_factory=dict)
    votes: Memo[GroupName, tuple[SnapshotIndex], ClusterVotes] = msgspec.field(default_factory=dict)
    drivers: Memo[str, tuple[Any, ...], tuple[str, ...]] = msgspec.field(default_factory=dict)
    checked: Memo[GroupName, _CheckInputs, PartFindings] = msgspec.field(default_factory=dict)
    domains: Memo[str, ClusterEvidence, tuple[Finding, ...]] = msgspec.field(default_factory=dict)
    """The findings about ComputeDomains."""


def examine_again(
    snapshot: SiteSnapshot, joined: JoinedShares, before: Examined, between: Callable[[], object]
) -> Examined:
    """The findings of `snapshot`, as `examine` returns them. Checks only parts that differ from `before`.

    `joined` are the GPUs of `snapshot`. `before` are the findings of any snapshot, or `Examined()`.
    `between` is called before each part and may block, to yield the processor.
    """
    homes = joined.shares.homes
    machine_homes = recompute_changed(
        before.machine_homes,
        {"": _Field("", snapshot.machines, homes)},
        lambda found: {tray.id: found.homes["chassis", tray.chassis_serial] for tray in found.records},
    )
    pools = _NodePools(
        tuple([(name, ties.pools) for name, (_, ties) in joined.shares.kinds["node"][1].groups.items()]),
        homes,
    )
    pool_homes = recompute_changed(before.pool_homes, {"": pools}, _homes_of_pools)
    of_pool = pool_homes[""][1]
    decide: Mapping[str, Mapping[Any, Any]] = {
        "homes": homes,
        "machines": machine_homes[""][1],
        "pools": of_pool,
    }
    fields = {
        field: _Field(field, getattr(snapshot, field), decide[by]) for field, (by, _) in _PLACED.items()
    }
    placed = recompute_changed(before.placed, fields, _place)
    records = {
        name: _PartRecords(share, tuple([found.get(name, ()) for _, found in placed.values()]))
        for name, share in (*joined.joined.items(), (NOWHERE, _NO_SHARE))
    }
    names = recompute_changed(before.names, records, _names_of)
    indexes = recompute_changed(before.indexes, dict(_part_inputs(snapshot, records, names)), _make_index)
    parts = {name: index for name, (_, index) in indexes.items()}
    site = SiteIndex(snapshot, parts, homes, of_pool)

    sees_cluster = site.can_see(Layer.CLUSTER)
    votes = recompute_changed(
        before.votes,
        {name: (part,) for name, part in parts.items()} if sees_cluster else {},
        lambda found: cluster_votes(_unread(found[0])),
    )
    counted = {"": (snapshot.nodes, snapshot.pools)} if sees_cluster else {}
    drivers = recompute_changed(before.drivers, counted, lambda found: expected_drivers(*found))
    homes_of_pods = Counter(chain.from_iterable(found.pods for _, found in names.values()))
    shared = frozenset(pod for pod, count in homes_of_pods.items() if count > 1)
    facts = SiteFacts(
        sees_cluster=sees_cluster,
        clusters=domain_of_clusters(found for _, found in votes.values()),
        drivers=drivers[""][1] if sees_cluster else (),
        is_settled=not snapshot.moved_gpus,
        shared_pods=shared,
    )
    inputs = dict(_check_inputs(parts, names, facts))
    checked = recompute_changed(before.checked, inputs, lambda found: _check(found, between))

    found = [part for _, part in checked.values()]
    findings = [finding for part in found for finding in part.findings]
    findings += not_holding(check_across(site, found, between))
    evidence = {"": cluster_evidence(snapshot)} if sees_cluster else {}
    domains = recompute_changed(
        before.domains, evidence, lambda found: tuple(not_holding(check_domains(found)))
    )
    findings += (finding for _, found in domains.values() for finding in found)
    if not facts.is_settled:
        findings += not_holding(check_moved_trays(site))
    if sees_cluster and shared:
        findings += not_holding(_check_shared_pods(shared, parts, names))
    return Examined(
        findings=explained(fold_consequences(findings), site),
        machine_homes=machine_homes,
        pool_homes=pool_homes,
        placed=placed,
        names=names,
        indexes=indexes,
        votes=votes,
        drivers=drivers,
        checked=checked,
        domains=domains,
    )


def _homes_of_pools(found: _NodePools) -> PoolHomes:
    homes = grouped((pool, found.homes[node]) for node, pools in found.pools for pool in pools)
    return {pool: tuple(dict.fromkeys(parts)) for pool, parts in homes.items()}


def _place(found: _Field) -> Mapping[GroupName, tuple[Any, ...]]:
    _, homes_of = _PLACED[found.name]
    placed = grouped((home, record) for record in found.records for home in homes_of(record, found.homes))
    return {home: tuple(records) for home, records in placed.items()}


_PLACED: Mapping[str, tuple[str, Callable[[Any, Mapping[Any, Any]], tuple[GroupName, ...]]]] = {
    "partitions": ("homes", lambda partition, homes: (homes.get(("domain", partition.domain), NOWHERE),)),
    "nodes": ("homes", lambda node, homes: (homes.get(("node", node.name), NOWHERE),)),
    "pools": ("homes", lambda pool, homes: (homes.get(("node", pool.node), NOWHERE),)),
    "instance_gpus": ("machines", lambda gpu, homes: (homes.get(gpu.machine, NOWHERE),)),
    "uses": ("pools", lambda use, homes: homes.get((use.driver, use.pool), (NOWHERE,))),
}
"""How the records of a field are placed: by which homes, and the parts of a record."""


_NO_SHARE = (SiteSnapshot(at=0.0, layers=()), ())


def _records_as_snapshot(records: _PartRecords) -> SiteSnapshot:
    own: dict[str, Any] = dict(zip(_PLACED, records.placed, strict=True))
    return msgspec.structs.replace(records.joined[0], at=0.0, layers=(), **own)


def _names_of(records: _PartRecords) -> _PartNames:
    part = _records_as_snapshot(records)
    tenants = (*(machine.tenant for machine in part.machines), *(logical.tenant for logical in part.logicals))
    records_of_domains = (*part.fabric_gpus, *part.machines, *part.partitions)
    return _PartNames(
        domains=frozenset(map(attrgetter("domain"), records_of_domains)),
        tenants=frozenset(tenant for tenant in tenants if tenant is not None),
        clusters=frozenset(cluster_of(node.clique) for node in part.nodes if node.clique is not None),
        pods=frozenset(pod for use in part.uses for pod in use.pods),
    )


def _part_inputs(
    snapshot: SiteSnapshot,
    records: Mapping[GroupName, _PartRecords],
    names: Memo[GroupName, _PartRecords, _PartNames],
) -> Iterator[tuple[GroupName, _PartInputs]]:
    domains = {}
    # Checks of a part read only a domain's policy and whether its reading is fresh. Times would make every
    # part differ with every reading.
    for domain in snapshot.domains:
        silent = None if domain.unknown_since is None else 0.0
        domains[domain.uuid] = NvlinkDomainRecord(
            uuid=domain.uuid, unknown_since=silent, default_policy=domain.default_policy
        )
    tenants = snapshot.tenants
    for name, found in records.items():
        named = names[name][1]
        own_domains = tuple([domains[uuid] for uuid in sorted(named.domains) if uuid in domains])
        own_tenants = tuple([(id_, tenants[id_]) for id_ in sorted(named.tenants) if id_ in tenants])
        yield name, _PartInputs(found, own_domains, own_tenants)


def _make_index(found: _PartInputs) -> SnapshotIndex:
    part = msgspec.structs.replace(
        _records_as_snapshot(found.records), domains=found.domains, tenants=dict(found.tenants)
    )
    return SnapshotIndex(part, found.records.joined[1])


# The checks of each part.


def _unread(part: SnapshotIndex) -> SnapshotIndex:
    """The part without the lookups that were built: those of the checks would take much memory."""
    return SnapshotIndex(part.snapshot, part.chains)


def _check_inputs(
    parts: Mapping[GroupName, SnapshotIndex],
    names: Memo[GroupName, _PartRecords, _PartNames],
    facts: SiteFacts,
) -> Iterator[tuple[GroupName, _CheckInputs]]:
    of_domain = grouped((domain, cluster) for cluster, domain in facts.clusters.items())
    for name, part in parts.items():
        named = names[name][1]
        concerned = {cluster for domain in named.domains for cluster in of_domain.get(domain, ())}
        concerned |= named.clusters & facts.clusters.keys()
        clusters = {cluster: facts.clusters[cluster] for cluster in concerned}
        shared = named.pods & facts.shared_pods if facts.shared_pods else facts.shared_pods
        yield name, _CheckInputs(part, facts._replace(clusters=clusters, shared_pods=shared))


def _check(found: _CheckInputs, between: Callable[[], object]) -> PartFindings:
    between()
    return check_part(_unread(found.part), found.facts)


def _check_shared_pods(
    shared: frozenset[str],
    parts: Mapping[GroupName, SnapshotIndex],
    names: Memo[GroupName, _PartRecords, _PartNames],
) -> Iterator[Finding]:
    """The findings about the NICs of pods with devices in several parts."""
    concerned = [part for name, part in parts.items() if not names[name][1].pods.isdisjoint(shared)]
    chains = sorted((found for part in concerned for found in part.chains), key=chain_order)
    # A use stands in every part that publishes devices of its pool. It is the same object in all of them.
    uses = {id(use): use for part in concerned for use in part.snapshot.uses}
    union = SiteSnapshot(
        at=0.0,
        layers=(),
        devices=tuple(device for part in concerned for device in part.snapshot.devices),
        uses=tuple(uses.values()),
    )
    return check_pods(SnapshotIndex(union, tuple(chains)), shared.__contains__)


# Lookups over all parts.


class SiteIndex(SnapshotIndex):
    """The index of a whole site that looks things up in its parts."""

    def __init__(
        self,
        snapshot: SiteSnapshot,
        parts: Mapping[GroupName, SnapshotIndex],
        homes: Homes,
        pool_homes: PoolHomes,
    ) -> None:
        super().__init__(snapshot)
        self._parts = parts
        self._homes = homes
        self._pool_homes = pool_homes

    @cached_property
    def chains(self) -> tuple[GpuChain, ...]:
        """Every GPU through all layers."""
        return tuple(sorted((gpu for part in self._parts.values() for gpu in part.chains), key=chain_order))

    @cached_property
    def node_of_machine(self) -> Mapping[str, str]:
        """The node that runs on each machine, as far as their GPUs identify it."""
        return {id_: node for part in self._parts.values() for id_, node in part.node_of_machine.items()}

    @cached_property
    def free_devices(self) -> Mapping[str, Counter[DeviceKind]]:
        """Free devices without blocking taints, for every node."""
        return {node: free for part in self._parts.values() for node, free in part.free_devices.items()}

    def device(self, device_id: DeviceId) -> DeviceRecord | None:
        """The published device of an allocation."""
        driver, pool, _ = device_id
        homes = self._pool_homes.get((driver, pool), ())
        found = (self._parts[home].devices.get(device_id) for home in homes)
        return next((device for device in found if device is not None), None)

    def chains_near(self, nodes: Collection[str], domains: Collection[str]) -> tuple[GpuChain, ...]:
        """At least the GPUs of these nodes and NVLink domains."""
        names = (*(("node", node) for node in nodes), *(("domain", domain) for domain in domains))
        homes = dict.fromkeys(self._homes[name] for name in names if name in self._homes)
        return tuple(gpu for home in homes for gpu in self._parts[home].chains)
