"""From the objects of the cluster to the snapshot of one ComputeDomain or one clique.

`INDEXES` defines, for each kind, under which values objects are filed. Everything is found through an
index, so the work for one ComputeDomain does not grow with the number of others. The caches of the
controller, the inventory of the uninstaller and the tests all provide the same lookup (`ClusterIndex`).

A label alone does not make an object ours, since any user may write one: it must also be in a namespace
in which we create such objects. `ConfirmedCluster` overlays fresh reads of pods, claims and nodes, before
anything is removed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import (
    ChannelClaim,
    ComputeDomain,
    claimed_domain_uid,
    read_any_compute_domain,
    read_channel_claim,
    read_clique,
    read_compute_domain,
    read_daemon_pod,
)
from rackloom.core.cluster.kueue_objects import read_workload
from rackloom.core.cluster.names import ImexIsolation, isolation_of
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    DAEMON_SET,
    NETWORK_POLICY,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    WORKLOAD,
    Indexer,
    Object,
    ResourceKind,
    index_by_label,
    index_by_uid,
    labels_of,
    name_of,
    namespace_of,
    not_ready_since,
)
from rackloom.core.domains.channel_mode import CliqueSnapshot
from rackloom.core.domains.manifests import warm_clique
from rackloom.core.domains.membership import node_entries
from rackloom.core.domains.owned import uses_warm_clique
from rackloom.core.domains.quota import DomainQuota, domain_quota, workload_name
from rackloom.core.domains.settings import ControllerSettings, QuotaMode
from rackloom.core.domains.snapshot import CliqueRecord, DomainSnapshot, OwnedObject, WarmDomain, owned_object

BY_DOMAIN, BY_CLIQUE, BY_TEMPLATE, BY_POOL = "domain", "clique", "template", "pool"
BY_WARM_MARK, BY_READY_CHANNELS = "mark", "offer"


class ClusterIndex(Protocol):
    """Lookup of objects by name and by index."""

    def at(self, kind: ResourceKind, namespace: str | None, name: str) -> Object | None:
        """The object of this name."""
        ...

    def by(self, kind: ResourceKind, index: str, value: str) -> Sequence[Object]:
        """The objects that an indexer of `INDEXES` files under a value."""
        ...


@dataclass(eq=False)
class ConfirmedCluster:
    """A `ClusterIndex` with fresh reads of some objects laid over cached ones.

    `lists` holds all objects of its kinds that concern the ComputeDomain. `nodes` is by name, with None for a
    node that is gone.
    """

    cached: ClusterIndex
    lists: Mapping[ResourceKind, Sequence[Object]]
    nodes: Mapping[str, Object | None]

    def at(self, kind: ResourceKind, namespace: str | None, name: str) -> Object | None:
        """The object of this name."""
        if kind == NODE and name in self.nodes:
            return self.nodes[name]
        return self.cached.at(kind, namespace, name)

    def by(self, kind: ResourceKind, index: str, value: str) -> Sequence[Object]:
        """The objects that an index has under a value."""
        indexer = INDEXES[kind][index]
        if kind in self.lists:
            return [obj for obj in self.lists[kind] if value in indexer(obj)]
        cached = self.cached.by(kind, index, value)
        if kind != NODE:
            return cached
        # A fresh read replaces the cached node, also where the node no longer has the value.
        fresh = (obj for obj in self.nodes.values() if obj is not None and value in indexer(obj))
        return [*(obj for obj in cached if name_of(obj) not in self.nodes), *fresh]


def _index_clique(obj: Object) -> tuple[str, ...]:
    # While a node lacks the clique label for a moment, the controller's own label names its clique.
    labels = labels_of(obj)
    clique_id = labels.get(names.GPU_CLIQUE_LABEL) or labels.get(names.WARM_CLIQUE_LABEL)
    return () if clique_id is None else (clique_id,)


def _index_template(obj: Object) -> tuple[str, ...]:
    domain, _ = read_any_compute_domain(obj)
    return (f"{domain.namespace}/{domain.template}",)


def _index_claimed_domain(obj: Object) -> tuple[str, ...]:
    labelled = labels_of(obj).get(names.COMPUTE_DOMAIN_LABEL)
    return tuple({uid for uid in (claimed_domain_uid(obj), labelled) if uid})


def _index_pool(obj: Object) -> tuple[str, ...]:
    claim = read_channel_claim(obj)
    return () if claim is None or claim.device is None else (claim.device[0],)


_OWNED: Mapping[str, Indexer] = {BY_DOMAIN: index_by_label(names.COMPUTE_DOMAIN_LABEL)}
INDEXES: Mapping[ResourceKind, Mapping[str, Indexer]] = {
    COMPUTE_DOMAIN: {
        BY_DOMAIN: index_by_uid,
        BY_TEMPLATE: _index_template,
        BY_CLIQUE: index_by_label(names.WARM_CLIQUE_LABEL),
    },
    RESOURCE_CLAIM_TEMPLATE: _OWNED,
    DAEMON_SET: _OWNED,
    NETWORK_POLICY: _OWNED,
    POD: _OWNED,
    COMPUTE_DOMAIN_CLIQUE: _OWNED,
    WORKLOAD: _OWNED,
    NODE: {
        **_OWNED,
        BY_CLIQUE: _index_clique,
        BY_WARM_MARK: index_by_label(names.WARM_CLIQUE_LABEL),
        BY_READY_CHANNELS: index_by_label(names.CHANNELS_READY_LABEL),
    },
    RESOURCE_SLICE: {BY_CLIQUE: index_by_label(names.WARM_CLIQUE_LABEL)},
    RESOURCE_CLAIM: {BY_DOMAIN: _index_claimed_domain, BY_POOL: _index_pool},
}
"""By kind, the indexes that a `ClusterIndex` provides, and the values under which each files an object."""


def take_domain_snapshot(
    cluster: ClusterIndex, uid: str, settings: ControllerSettings, now: str, failures: tuple[str, ...] = ()
) -> DomainSnapshot:
    """Everything about the ComputeDomain of a UID, or about its remains. `now` is RFC 3339."""
    obj = next(iter(cluster.by(COMPUTE_DOMAIN, BY_DOMAIN, uid)), None)
    domain, invalid = (None, "") if obj is None else read_any_compute_domain(obj)
    kept_warm = None if domain is None else warm_clique(domain, settings)
    claims = _claims(cluster, uid, kept_warm)
    nodes = _nodes_by(cluster, BY_DOMAIN, uid)
    # A label alone makes no daemon pod: it must be in a namespace of daemons.
    labelled_pods = cluster.by(POD, BY_DOMAIN, uid)
    ours = (pod for pod in labelled_pods if namespace_of(pod) in settings.namespaces)
    pods = tuple(filter(None, map(read_daemon_pod, ours)))
    cliques = _cliques(cluster, uid, settings)
    home = daemon_namespace_of(cluster, uid, settings)
    quota = DomainQuota()
    # The controller's own ComputeDomains need none: each serves the jobs of a clique.
    if domain is not None and kept_warm is None and settings.quota is not QuotaMode.NONE:
        found = cluster.at(WORKLOAD, domain.namespace, workload_name(domain.uid))
        quota = domain_quota(domain, None if found is None else read_workload(found), settings.quota, now)
    labelled = {node.name for node in nodes}
    entered = {daemon.node_name for record in cliques for daemon in record.clique.daemons}
    pools = {claim.device[0] for claim in claims if claim.device is not None}
    return DomainSnapshot(
        uid=uid,
        now=now,
        settings=settings,
        domain=domain,
        domain_object=None if obj is None else owned_object(COMPUTE_DOMAIN, obj),
        invalid=invalid,
        held=_held_objects(cluster, uid, domain, settings),
        home=home,
        named=() if domain is None else _objects_by_name(cluster, domain, home),
        nodes=nodes,
        unready=_unready(cluster, labelled | entered | {pod.node for pod in pods}),
        clique_labels=_clique_labels(cluster, labelled | pools),
        pods=pods,
        cliques=cliques,
        claims=claims,
        warm=None if domain is None else _warm_state(cluster, domain, claims, settings, now),
        mixed_nodes=_mixed_cliques(cluster, nodes, kept_warm, settings),
        quota=quota,
        failures=failures,
    )


def daemon_namespace_of(cluster: ClusterIndex, uid: str, settings: ControllerSettings) -> str:
    """The namespace of a ComputeDomain's daemons: that of its DaemonSet, or else the one for new daemons.

    Claim template, DaemonSet and certificates must be in one namespace. The objects of an earlier
    installation therefore stay in theirs until the ComputeDomain is deleted.
    """
    used = {namespace_of(daemon_set) for daemon_set in cluster.by(DAEMON_SET, BY_DOMAIN, uid)}
    return next((name for name in settings.namespaces if name in used), settings.daemon_namespace)


def take_clique_snapshot(
    cluster: ClusterIndex, clique_id: str, settings: ControllerSettings, now: str
) -> CliqueSnapshot:
    """One clique and the objects of channel mode in it."""
    warm = _warm_domain(cluster, clique_id, settings)
    snapshot = None if warm is None else take_domain_snapshot(cluster, warm.uid, settings, now)
    nodes = _nodes_by(cluster, BY_CLIQUE, clique_id)
    slices = cluster.by(RESOURCE_SLICE, BY_CLIQUE, clique_id)
    return CliqueSnapshot(
        clique_id=clique_id,
        isolations=_isolations(nodes, settings),
        nodes=nodes,
        warm=warm,
        warm_object=None if snapshot is None else snapshot.domain_object,
        members=() if snapshot is None else node_entries(snapshot),
        marked=_nodes_by(cluster, BY_WARM_MARK, clique_id),
        labelled=_nodes_by(cluster, BY_READY_CHANNELS, clique_id),
        pool=next((owned_object(RESOURCE_SLICE, slice_) for slice_ in slices), None),
        in_use=bool(cluster.by(RESOURCE_CLAIM, BY_POOL, names.channel_pool_name(clique_id))),
    )


def _warm_domain(cluster: ClusterIndex, clique_id: str, settings: ControllerSettings) -> ComputeDomain | None:
    """The controller's own ComputeDomain that keeps a clique warm. Anybody may write its label."""
    found = cluster.by(COMPUTE_DOMAIN, BY_CLIQUE, clique_id)
    return next((read_compute_domain(obj) for obj in found if namespace_of(obj) in settings.namespaces), None)


def _isolations(nodes: Iterable[OwnedObject], settings: ControllerSettings) -> frozenset[ImexIsolation]:
    """The isolation modes of the nodes of a clique: one if all is well."""
    return frozenset(isolation_of(node.labels, settings.isolation) for node in nodes)


def _nodes_by(cluster: ClusterIndex, index: str, value: str) -> tuple[OwnedObject, ...]:
    return tuple(owned_object(NODE, node) for node in cluster.by(NODE, index, value))


def _held_objects(
    cluster: ClusterIndex, uid: str, domain: ComputeDomain | None, settings: ControllerSettings
) -> tuple[OwnedObject, ...]:
    """Objects that carry the UID. Anybody may write a label, so their name and namespace must fit too."""
    objects = (
        owned_object(kind, obj)
        for kind in (RESOURCE_CLAIM_TEMPLATE, NETWORK_POLICY, DAEMON_SET, RESOURCE_CLAIM)
        for obj in cluster.by(kind, BY_DOMAIN, uid)
    )
    held = (owned for owned in objects if owned.domain == uid and _is_expected_at(owned, domain, settings))
    return tuple(sorted(held, key=lambda owned: owned.title))


def _is_expected_at(owned: OwnedObject, domain: ComputeDomain | None, settings: ControllerSettings) -> bool:
    """Whether it is where we create such objects: with the daemons, or with its ComputeDomain if known."""
    if owned.kind == RESOURCE_CLAIM and owned.name != names.shared_claim_name(owned.domain):
        return False
    if owned.namespace in settings.namespaces:
        return True
    is_for_daemons = owned.labels.get(names.TARGET_LABEL) == names.TARGET_DAEMON
    return not is_for_daemons and (domain is None or owned.namespace == domain.namespace)


def _objects_by_name(cluster: ClusterIndex, domain: ComputeDomain, home: str) -> tuple[OwnedObject, ...]:
    places = (
        (RESOURCE_CLAIM_TEMPLATE, home, names.daemon_name(domain.uid)),
        (NETWORK_POLICY, home, names.daemon_name(domain.uid)),
        (DAEMON_SET, home, names.daemon_name(domain.uid)),
        (RESOURCE_CLAIM_TEMPLATE, domain.namespace, domain.template),
        (RESOURCE_CLAIM, domain.namespace, names.shared_claim_name(domain.uid)),
    )
    objects = ((kind, cluster.at(kind, namespace, name)) for kind, namespace, name in places)
    return tuple(owned_object(kind, obj) for kind, obj in objects if obj is not None)


def _unready(cluster: ClusterIndex, nodes: Iterable[str]) -> dict[str, float]:
    objects = {name: cluster.at(NODE, None, name) for name in nodes}
    since = {name: 0.0 if obj is None else not_ready_since(obj) for name, obj in objects.items()}
    return {name: moment for name, moment in since.items() if moment is not None}


def _clique_labels(cluster: ClusterIndex, nodes: Iterable[str]) -> dict[str, str]:
    found = filter(None, (cluster.at(NODE, None, name) for name in nodes))
    labels = {name_of(node): labels_of(node).get(names.GPU_CLIQUE_LABEL) for node in found}
    return {name: clique_id for name, clique_id in labels.items() if clique_id is not None}


def _cliques(cluster: ClusterIndex, uid: str, settings: ControllerSettings) -> tuple[CliqueRecord, ...]:
    return tuple(
        CliqueRecord(owned=owned_object(COMPUTE_DOMAIN_CLIQUE, obj), clique=read_clique(obj))
        for obj in cluster.by(COMPUTE_DOMAIN_CLIQUE, BY_DOMAIN, uid)
        if namespace_of(obj) in settings.namespaces
    )


def _claims(cluster: ClusterIndex, uid: str, warm: str | None) -> tuple[ChannelClaim, ...]:
    """Claims that use the ComputeDomain: by UID, or through a channel of the clique that it keeps warm."""
    if warm is not None:
        in_pool = cluster.by(RESOURCE_CLAIM, BY_POOL, names.channel_pool_name(warm))
        return tuple(claim for claim in map(read_channel_claim, in_pool) if claim is not None)
    claims = map(read_channel_claim, cluster.by(RESOURCE_CLAIM, BY_DOMAIN, uid))
    return tuple(claim for claim in claims if claim is not None and claim.domain == uid)


def _warm_state(
    cluster: ClusterIndex,
    domain: ComputeDomain,
    claims: Iterable[ChannelClaim],
    settings: ControllerSettings,
    now: str,
) -> WarmDomain | None:
    """The warm domain of the clique in which the shared claim was allocated."""
    if not uses_warm_clique(domain, settings):
        return None
    shared = names.shared_claim_name(domain.uid)
    device = next((claim.device for claim in claims if claim.name == shared and claim.device), None)
    clique_id = None if device is None else names.clique_of_pool(device[0])
    if clique_id is None:
        return None
    warm = _warm_domain(cluster, clique_id, settings)
    if warm is None:
        return WarmDomain(clique_id=clique_id, nodes=())
    snapshot = take_domain_snapshot(cluster, warm.uid, settings, now)
    return WarmDomain(clique_id=clique_id, nodes=node_entries(snapshot), pods=snapshot.pods)


def _mixed_cliques(
    cluster: ClusterIndex, nodes: Iterable[OwnedObject], kept_warm: str | None, settings: ControllerSettings
) -> dict[str, tuple[str, ...]]:
    cliques = {kept_warm, *(node.labels.get(names.GPU_CLIQUE_LABEL) for node in nodes)}
    isolations = {
        clique: _isolations(_nodes_by(cluster, BY_CLIQUE, clique), settings)
        for clique in cliques
        if clique is not None
    }
    return {clique: tuple(sorted(values)) for clique, values in isolations.items() if len(values) > 1}


def with_secrets(snapshot: DomainSnapshot, secrets: tuple[OwnedObject, ...]) -> DomainSnapshot:
    """The snapshot with the certificates of its daemons, which are in no cache."""
    return msgspec.structs.replace(snapshot, held=(*snapshot.held, *secrets))
