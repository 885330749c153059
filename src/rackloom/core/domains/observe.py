"""From the objects of the cluster to the snapshot of one ComputeDomain or one clique.

`INDEXES` defines, for each kind, under which values objects are filed. Everything is found through an
index, so the work for one ComputeDomain does not grow with the number of others. The caches of the
controller, the inventory of the uninstaller and the tests all provide the same lookup (`ClusterIndex`).

A label alone does not make an object ours, since anybody may write one: it must also be in a namespace
where we put such objects. `ConfirmedCluster` overlays fresh reads of pods, claims and nodes, before
anything is removed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from rackloom.core.domains import channel_mode, names
from rackloom.core.domains.clique import read_clique
from rackloom.core.domains.compute_domain import ComputeDomain, read_compute_domain
from rackloom.core.domains.manifests import warm_clique
from rackloom.core.domains.membership import node_entries
from rackloom.core.domains.owned import uses_warm_clique
from rackloom.core.domains.settings import ControllerSettings
from rackloom.core.domains.snapshot import (
    ChannelClaim,
    CliqueRecord,
    DaemonPod,
    DomainSnapshot,
    OwnedObject,
    WarmDomain,
    claimed_domain_uid,
    owned_object,
    read_channel_claim,
    read_daemon_pod,
)
from rackloom.core.kubernetes.objects import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    DAEMON_SET,
    NETWORK_POLICY,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
    Indexer,
    Object,
    ResourceKind,
    index_by_label,
    index_by_uid,
    not_ready_since,
)
from rackloom.errors import Refused

BY_DOMAIN, BY_CLIQUE, BY_TEMPLATE, BY_POOL = "domain", "clique", "template", "pool"
BY_WARM_MARK, BY_READY_CHANNELS = "mark", "offer"


class ClusterIndex(Protocol):
    """Objects as last seen, found by name and by index."""

    def at(self, kind: ResourceKind, namespace: str | None, name: str) -> Object | None:
        """The object of this name."""
        ...

    def by(self, kind: ResourceKind, index: str, value: str) -> Sequence[Object]:
        """The objects that an indexer of `INDEXES` files under a value."""
        ...


class ConfirmedCluster:
    """A `Cluster` in which some objects are as the API server has them now; the rest is as last seen.

    `lists` are all objects of their kinds that concern the ComputeDomain; `nodes` by name, None for one that
    is gone.
    """

    def __init__(
        self,
        seen: ClusterIndex,
        lists: Mapping[ResourceKind, Sequence[Object]],
        nodes: Mapping[str, Object | None],
    ) -> None:
        self._seen = seen
        self._lists = lists
        self._nodes = nodes

    def at(self, kind: ResourceKind, namespace: str | None, name: str) -> Object | None:
        """The object of this name."""
        if kind == NODE and name in self._nodes:
            return self._nodes[name]
        return self._seen.at(kind, namespace, name)

    def by(self, kind: ResourceKind, index: str, value: str) -> Sequence[Object]:
        """The objects that an index has under a value."""
        indexer = INDEXES[kind][index]
        if kind in self._lists:
            return [obj for obj in self._lists[kind] if value in indexer(obj)]
        found = self._seen.by(kind, index, value)
        if kind != NODE:
            return found
        read = (obj for obj in self._nodes.values() if obj is not None and value in indexer(obj))
        return [*(obj for obj in found if obj["metadata"]["name"] not in self._nodes), *read]


def _index_clique(obj: Object) -> tuple[str, ...]:
    # A node that lost the label for a moment stays where our own mark says that it is.
    labels = obj["metadata"].get("labels") or {}
    found = labels.get(names.GPU_CLIQUE_LABEL) or labels.get(names.WARM_CLIQUE_LABEL)
    return () if found is None else (found,)


def _index_template(obj: Object) -> tuple[str, ...]:
    spec = obj.get("spec") or {}
    name = ((spec.get("channel") or {}).get("resourceClaimTemplate") or {}).get("name", "")
    return (f"{obj['metadata']['namespace']}/{name}",)


def _index_claimed_domain(obj: Object) -> tuple[str, ...]:
    domain = claimed_domain_uid(obj)
    labelled = (obj["metadata"].get("labels") or {}).get(names.COMPUTE_DOMAIN_LABEL)
    return tuple({one for one in (domain, labelled) if one})


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
    NODE: {
        **_OWNED,
        BY_CLIQUE: _index_clique,
        BY_WARM_MARK: index_by_label(names.WARM_CLIQUE_LABEL),
        BY_READY_CHANNELS: index_by_label(names.CHANNELS_READY_LABEL),
    },
    RESOURCE_SLICE: {BY_CLIQUE: index_by_label(names.WARM_CLIQUE_LABEL)},
    RESOURCE_CLAIM: {BY_DOMAIN: _index_claimed_domain, BY_POOL: _index_pool},
}
"""What a `Cluster` must be able to find: by kind, each index and what it files an object under."""


def take_domain_snapshot(
    cluster: ClusterIndex, uid: str, settings: ControllerSettings, now: str, failures: tuple[str, ...] = ()
) -> DomainSnapshot:
    """Everything about the ComputeDomain of a UID, or about what is left of it. `now` is RFC 3339."""
    found = next(iter(cluster.by(COMPUTE_DOMAIN, BY_DOMAIN, uid)), None)
    domain, invalid = (None, "") if found is None else _read_domain(found)
    claims = _claims(cluster, uid, None if domain is None else warm_clique(domain, settings))
    nodes = tuple(owned_object(NODE, one) for one in cluster.by(NODE, BY_DOMAIN, uid))
    pods = daemon_pods(cluster.by(POD, BY_DOMAIN, uid), settings)
    cliques = _cliques(cluster, uid, settings)
    labelled = {node.name for node in nodes}
    entered = {daemon.node_name for found in cliques for daemon in found.clique.daemons}
    pools = {claim.device[0] for claim in claims if claim.device is not None}
    return DomainSnapshot(
        uid=uid,
        now=now,
        domain=domain,
        domain_thing=None if found is None else owned_object(COMPUTE_DOMAIN, found),
        invalid=invalid,
        held=_held_objects(cluster, uid, domain, settings),
        home=daemon_namespace_of(cluster, uid, settings),
        named=() if domain is None else _objects_by_name(cluster, domain, settings),
        nodes=nodes,
        unready=_unready(cluster, labelled | entered | {pod.node for pod in pods}),
        clique_labels=_clique_labels(cluster, labelled | pools),
        pods=pods,
        cliques=cliques,
        claims=claims,
        warm=None if domain is None else _warm_state(cluster, domain, claims, settings, now),
        mixed_nodes=_mixed_cliques(cluster, uid, domain, settings),
        failures=failures,
    )


def daemon_namespace_of(cluster: ClusterIndex, uid: str, settings: ControllerSettings) -> str:
    """The namespace of a ComputeDomain's daemons: where its DaemonSet is, or else where new ones are made.

    Claim template, DaemonSet and certificates must be together. So what an earlier installation made in
    another namespace stays there, complete, until its ComputeDomain is deleted.
    """
    held = {one["metadata"]["namespace"] for one in cluster.by(DAEMON_SET, BY_DOMAIN, uid)}
    return next(
        (namespace for namespace in settings.namespaces if namespace in held), settings.daemon_namespace
    )


def daemon_pods(objects: Iterable[Object], settings: ControllerSettings) -> tuple[DaemonPod, ...]:
    """The daemon pods among pods: a label alone makes none, they are in the daemons' namespaces."""
    pods = (
        read_daemon_pod(obj) for obj in objects if obj["metadata"].get("namespace") in settings.namespaces
    )
    return tuple(pod for pod in pods if pod is not None)


def take_clique_snapshot(
    cluster: ClusterIndex, clique_id: str, settings: ControllerSettings, now: str
) -> channel_mode.CliqueSnapshot:
    """One clique and what is there of channel mode in it."""
    warm = channel_mode.warm_domain(cluster.by(COMPUTE_DOMAIN, BY_CLIQUE, clique_id), settings)
    seen = None if warm is None else take_domain_snapshot(cluster, warm.uid, settings, now)
    nodes = clique_nodes(cluster, clique_id)
    slices = cluster.by(RESOURCE_SLICE, BY_CLIQUE, clique_id)
    return channel_mode.CliqueSnapshot(
        clique_id=clique_id,
        said=channel_mode.isolation_of_nodes(nodes, settings),
        nodes=nodes,
        warm=warm,
        warm_thing=None if seen is None else seen.domain_thing,
        members=() if seen is None else node_entries(seen, settings),
        marked=tuple(owned_object(NODE, one) for one in cluster.by(NODE, BY_WARM_MARK, clique_id)),
        labelled=tuple(owned_object(NODE, one) for one in cluster.by(NODE, BY_READY_CHANNELS, clique_id)),
        pool=next((owned_object(RESOURCE_SLICE, slice_) for slice_ in slices), None),
        in_use=bool(cluster.by(RESOURCE_CLAIM, BY_POOL, names.channel_pool_name(clique_id))),
    )


def clique_nodes(cluster: ClusterIndex, clique_id: str) -> tuple[OwnedObject, ...]:
    """The nodes of a clique."""
    return tuple(owned_object(NODE, one) for one in cluster.by(NODE, BY_CLIQUE, clique_id))


def _read_domain(obj: Object) -> tuple[ComputeDomain, str]:
    try:
        return read_compute_domain(obj), ""
    except Refused as refused:
        placeholder = {"channel": {"resourceClaimTemplate": {"name": ""}}}
        return read_compute_domain({**obj, "spec": placeholder}), str(refused)


def _held_objects(
    cluster: ClusterIndex, uid: str, domain: ComputeDomain | None, settings: ControllerSettings
) -> tuple[OwnedObject, ...]:
    """What carries the UID. Anybody may write a label, so it must be where we put such things, too."""
    found: list[OwnedObject] = []
    for kind in (RESOURCE_CLAIM_TEMPLATE, NETWORK_POLICY, DAEMON_SET, RESOURCE_CLAIM):
        seen = (owned_object(kind, one) for one in cluster.by(kind, BY_DOMAIN, uid))
        found += [one for one in seen if one.domain == uid and _is_in_our_place(one, domain, settings)]
    return tuple(sorted(found, key=lambda one: one.called))


def _is_in_our_place(one: OwnedObject, domain: ComputeDomain | None, settings: ControllerSettings) -> bool:
    """Whether it is in a place that is ours, or in that of the ComputeDomain as far as it is known."""
    if one.kind == RESOURCE_CLAIM and one.name != names.shared_claim_name(one.domain):
        return False
    if one.namespace in settings.namespaces:
        return True
    is_for_daemons = one.labels.get(names.TARGET_LABEL) == names.TARGET_DAEMON
    return not is_for_daemons and (domain is None or one.namespace == domain.namespace)


def _objects_by_name(
    cluster: ClusterIndex, domain: ComputeDomain, settings: ControllerSettings
) -> tuple[OwnedObject, ...]:
    home = daemon_namespace_of(cluster, domain.uid, settings)
    places = (
        (RESOURCE_CLAIM_TEMPLATE, home, names.daemon_name(domain.uid)),
        (NETWORK_POLICY, home, names.daemon_name(domain.uid)),
        (DAEMON_SET, home, names.daemon_name(domain.uid)),
        (RESOURCE_CLAIM_TEMPLATE, domain.namespace, domain.template),
        (RESOURCE_CLAIM, domain.namespace, names.shared_claim_name(domain.uid)),
    )
    found = ((kind, cluster.at(kind, namespace, name)) for kind, namespace, name in places)
    return tuple(owned_object(kind, obj) for kind, obj in found if obj is not None)


def _unready(cluster: ClusterIndex, nodes: Iterable[str]) -> dict[str, float]:
    found = {name: cluster.at(NODE, None, name) for name in nodes}
    since = {name: 0.0 if obj is None else not_ready_since(obj) for name, obj in found.items()}
    return {name: moment for name, moment in since.items() if moment is not None}


def _clique_labels(cluster: ClusterIndex, nodes: Iterable[str]) -> dict[str, str]:
    found = ((name, cluster.at(NODE, None, name)) for name in nodes)
    labels = ((name, obj["metadata"].get("labels") or {}) for name, obj in found if obj is not None)
    label = names.GPU_CLIQUE_LABEL
    return {name: have[label] for name, have in labels if label in have}


def _cliques(cluster: ClusterIndex, uid: str, settings: ControllerSettings) -> tuple[CliqueRecord, ...]:
    return tuple(
        CliqueRecord(thing=owned_object(COMPUTE_DOMAIN_CLIQUE, one), clique=read_clique(one))
        for one in cluster.by(COMPUTE_DOMAIN_CLIQUE, BY_DOMAIN, uid)
        if one["metadata"].get("namespace") in settings.namespaces
    )


def _claims(cluster: ClusterIndex, uid: str, warm: str | None) -> tuple[ChannelClaim, ...]:
    """Those that use the ComputeDomain: by name, or through a channel of the clique that it keeps warm."""
    if warm is not None:
        found = cluster.by(RESOURCE_CLAIM, BY_POOL, names.channel_pool_name(warm))
        return tuple(claim for claim in map(read_channel_claim, found) if claim is not None)
    read = (read_channel_claim(one) for one in cluster.by(RESOURCE_CLAIM, BY_DOMAIN, uid))
    return tuple(claim for claim in read if claim is not None and claim.domain == uid)


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
    device = next((claim.device for claim in claims if claim.thing.name == shared and claim.device), None)
    clique_id = None if device is None else names.clique_of_pool(device[0])
    if clique_id is None:
        return None
    warm = channel_mode.warm_domain(cluster.by(COMPUTE_DOMAIN, BY_CLIQUE, clique_id), settings)
    seen = None if warm is None else take_domain_snapshot(cluster, warm.uid, settings, now)
    if seen is None:
        return WarmDomain(clique_id=clique_id, nodes=())
    return WarmDomain(clique_id=clique_id, nodes=node_entries(seen, settings), pods=seen.pods)


def _mixed_cliques(
    cluster: ClusterIndex, uid: str, domain: ComputeDomain | None, settings: ControllerSettings
) -> dict[str, tuple[str, ...]]:
    labels = ((one["metadata"].get("labels") or {}) for one in cluster.by(NODE, BY_DOMAIN, uid))
    cliques = {found[names.GPU_CLIQUE_LABEL] for found in labels if names.GPU_CLIQUE_LABEL in found}
    warm = None if domain is None else warm_clique(domain, settings)
    cliques |= {warm} if warm is not None else set()
    said = {
        clique: channel_mode.isolation_of_nodes(clique_nodes(cluster, clique), settings) for clique in cliques
    }
    return {one: tuple(sorted(what)) for one, what in said.items() if len(what) > 1}


def with_secrets(seen: DomainSnapshot, secrets: tuple[OwnedObject, ...]) -> DomainSnapshot:
    """The same with the certificates of its daemons, which no cache has."""
    return msgspec.structs.replace(seen, held=(*seen.held, *secrets))
