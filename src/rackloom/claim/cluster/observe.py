"""From the objects of the cluster to the snapshot that a decision rests on.

Everything is found through an index: the work for one ComputeDomain does not grow with the others.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from rackloom.claim.cluster import isolation
from rackloom.claim.cluster.manifests import warm_clique
from rackloom.claim.cluster.membership import node_entries
from rackloom.claim.cluster.settings import Settings
from rackloom.claim.cluster.slots import uses_warm_clique
from rackloom.claim.cluster.snapshot import CliqueObject, Snapshot, WarmState
from rackloom.claim.cluster.things import (
    ChannelClaim,
    DaemonPod,
    Thing,
    channel_claim,
    claimed_domain,
    daemon_pod,
    not_ready_since,
    thing,
)
from rackloom.claim.domain import names
from rackloom.claim.domain.objects import ComputeDomain, clique, compute_domain
from rackloom.claim.kube.api import Kind, Object
from rackloom.claim.kube.cache import Indexer, by_label, by_uid
from rackloom.claim.kube.kinds import (
    COMPUTE_DOMAIN,
    COMPUTE_DOMAIN_CLIQUE,
    DAEMON_SET,
    NETWORK_POLICY,
    NODE,
    POD,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
    RESOURCE_SLICE,
)
from rackloom.errors import Refused

BY_DOMAIN, BY_CLIQUE, BY_TEMPLATE, BY_POOL = "domain", "clique", "template", "pool"
BY_MARK, BY_OFFER = "mark", "offer"


class Cluster(Protocol):
    """Objects as last seen, found by name and by index."""

    def at(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """The object of this name."""
        ...

    def by(self, kind: Kind, index: str, value: str) -> Sequence[Object]:
        """The objects that an indexer of `INDEXES` files under a value."""
        ...


class Confirmed:
    """A `Cluster` in which some objects are as the API server has them now; the rest is as last seen.

    `lists` are all objects of their kinds that concern the ComputeDomain; `nodes` by name, None for one that
    is gone.
    """

    def __init__(
        self, seen: Cluster, lists: Mapping[Kind, Sequence[Object]], nodes: Mapping[str, Object | None]
    ) -> None:
        self._seen = seen
        self._lists = lists
        self._nodes = nodes

    def at(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """The object of this name."""
        if kind == NODE and name in self._nodes:
            return self._nodes[name]
        return self._seen.at(kind, namespace, name)

    def by(self, kind: Kind, index: str, value: str) -> Sequence[Object]:
        """The objects that an index has under a value."""
        indexer = INDEXES[kind][index]
        if kind in self._lists:
            return [obj for obj in self._lists[kind] if value in indexer(obj)]
        found = self._seen.by(kind, index, value)
        if kind != NODE:
            return found
        read = (obj for obj in self._nodes.values() if obj is not None and value in indexer(obj))
        return [*(obj for obj in found if obj["metadata"]["name"] not in self._nodes), *read]


def _clique_of_node(obj: Object) -> tuple[str, ...]:
    # A node that lost the label for a moment stays where our own mark says that it is.
    labels = obj["metadata"].get("labels") or {}
    found = labels.get(names.GPU_CLIQUE_LABEL) or labels.get(names.WARM_CLIQUE_LABEL)
    return () if found is None else (found,)


def _template(obj: Object) -> tuple[str, ...]:
    spec = obj.get("spec") or {}
    name = ((spec.get("channel") or {}).get("resourceClaimTemplate") or {}).get("name", "")
    return (f"{obj['metadata']['namespace']}/{name}",)


def _claimed(obj: Object) -> tuple[str, ...]:
    domain = claimed_domain(obj)
    labelled = (obj["metadata"].get("labels") or {}).get(names.COMPUTE_DOMAIN_LABEL)
    return tuple({one for one in (domain, labelled) if one})


def _pools(obj: Object) -> tuple[str, ...]:
    claim = channel_claim(obj)
    return () if claim is None or claim.device is None else (claim.device[0],)


_OWNED: Mapping[str, Indexer] = {BY_DOMAIN: by_label(names.COMPUTE_DOMAIN_LABEL)}
INDEXES: Mapping[Kind, Mapping[str, Indexer]] = {
    COMPUTE_DOMAIN: {
        BY_DOMAIN: by_uid,
        BY_TEMPLATE: _template,
        BY_CLIQUE: by_label(names.WARM_CLIQUE_LABEL),
    },
    RESOURCE_CLAIM_TEMPLATE: _OWNED,
    DAEMON_SET: _OWNED,
    NETWORK_POLICY: _OWNED,
    POD: _OWNED,
    COMPUTE_DOMAIN_CLIQUE: _OWNED,
    NODE: {
        **_OWNED,
        BY_CLIQUE: _clique_of_node,
        BY_MARK: by_label(names.WARM_CLIQUE_LABEL),
        BY_OFFER: by_label(names.CHANNELS_READY_LABEL),
    },
    RESOURCE_SLICE: {BY_CLIQUE: by_label(names.WARM_CLIQUE_LABEL)},
    RESOURCE_CLAIM: {BY_DOMAIN: _claimed, BY_POOL: _pools},
}
"""What a `Cluster` must be able to find: by kind, each index and what it files an object under."""


def snapshot(
    cluster: Cluster, uid: str, settings: Settings, now: str, failures: tuple[str, ...] = ()
) -> Snapshot:
    """Everything about the ComputeDomain of a UID, or about what is left of it. `now` is RFC 3339."""
    found = next(iter(cluster.by(COMPUTE_DOMAIN, BY_DOMAIN, uid)), None)
    domain, invalid = (None, "") if found is None else _read(found)
    claims = _claims(cluster, uid, None if domain is None else warm_clique(domain, settings))
    nodes = tuple(thing(NODE, one) for one in cluster.by(NODE, BY_DOMAIN, uid))
    pods = daemon_pods(cluster.by(POD, BY_DOMAIN, uid), settings)
    cliques = _cliques(cluster, uid, settings)
    labelled = {one.name for one in nodes}
    entered = {one.node_name for found in cliques for one in found.clique.daemons}
    pools = {claim.device[0] for claim in claims if claim.device is not None}
    return Snapshot(
        uid=uid,
        now=now,
        domain=domain,
        domain_thing=None if found is None else thing(COMPUTE_DOMAIN, found),
        invalid=invalid,
        held=_held(cluster, uid, domain, settings),
        home=home_of(cluster, uid, settings),
        named=() if domain is None else _named(cluster, domain, settings),
        nodes=nodes,
        unready=_unready(cluster, labelled | entered | {pod.node for pod in pods}),
        clique_labels=_clique_labels(cluster, labelled | pools),
        pods=pods,
        cliques=cliques,
        claims=claims,
        warm=None if domain is None else _warm(cluster, domain, claims, settings, now),
        mixed_nodes=_mixed(cluster, uid, domain, settings),
        failures=failures,
    )


def home_of(cluster: Cluster, uid: str, settings: Settings) -> str:
    """The namespace of a ComputeDomain's daemons: where its DaemonSet is, or else where new ones are made.

    Claim template, DaemonSet and certificates must be together. So what an earlier installation made in
    another namespace stays there, complete, until its ComputeDomain is deleted.
    """
    held = {one["metadata"]["namespace"] for one in cluster.by(DAEMON_SET, BY_DOMAIN, uid)}
    return next(
        (namespace for namespace in settings.namespaces if namespace in held), settings.daemon_namespace
    )


def daemon_pods(objects: Iterable[Object], settings: Settings) -> tuple[DaemonPod, ...]:
    """The daemon pods among pods: a label alone makes none, they are in the daemons' namespaces."""
    pods = (daemon_pod(one) for one in objects if one["metadata"].get("namespace") in settings.namespaces)
    return tuple(pod for pod in pods if pod is not None)


def clique_view(cluster: Cluster, clique_id: str, settings: Settings, now: str) -> isolation.CliqueView:
    """One clique and what is there of channel mode in it."""
    warm = isolation.warm_domain(cluster.by(COMPUTE_DOMAIN, BY_CLIQUE, clique_id), settings)
    seen = None if warm is None else snapshot(cluster, warm.uid, settings, now)
    nodes = clique_nodes(cluster, clique_id)
    slices = cluster.by(RESOURCE_SLICE, BY_CLIQUE, clique_id)
    return isolation.CliqueView(
        clique_id=clique_id,
        said=isolation.said_of(nodes, settings),
        nodes=nodes,
        warm=warm,
        warm_thing=None if seen is None else seen.domain_thing,
        members=() if seen is None else node_entries(seen, settings),
        marked=tuple(thing(NODE, one) for one in cluster.by(NODE, BY_MARK, clique_id)),
        labelled=tuple(thing(NODE, one) for one in cluster.by(NODE, BY_OFFER, clique_id)),
        pool=next((thing(RESOURCE_SLICE, one) for one in slices), None),
        in_use=bool(cluster.by(RESOURCE_CLAIM, BY_POOL, names.channel_pool_name(clique_id))),
    )


def clique_nodes(cluster: Cluster, clique_id: str) -> tuple[Thing, ...]:
    """The nodes of a clique."""
    return tuple(thing(NODE, one) for one in cluster.by(NODE, BY_CLIQUE, clique_id))


def _read(obj: Object) -> tuple[ComputeDomain, str]:
    try:
        return compute_domain(obj), ""
    except Refused as refused:
        placeholder = {"channel": {"resourceClaimTemplate": {"name": ""}}}
        return compute_domain({**obj, "spec": placeholder}), str(refused)


def _held(cluster: Cluster, uid: str, domain: ComputeDomain | None, settings: Settings) -> tuple[Thing, ...]:
    """What carries the UID. Anybody may write a label, so it must be where we put such things, too."""
    found: list[Thing] = []
    for kind in (RESOURCE_CLAIM_TEMPLATE, NETWORK_POLICY, DAEMON_SET, RESOURCE_CLAIM):
        seen = (thing(kind, one) for one in cluster.by(kind, BY_DOMAIN, uid))
        found += [one for one in seen if one.domain == uid and _is_ours(one, domain, settings)]
    return tuple(sorted(found, key=lambda one: one.called))


def _is_ours(one: Thing, domain: ComputeDomain | None, settings: Settings) -> bool:
    """Whether it is in a place that is ours, or in that of the ComputeDomain as far as it is known."""
    if one.kind == RESOURCE_CLAIM and one.name != names.shared_claim_name(one.domain):
        return False
    if one.namespace in settings.namespaces:
        return True
    is_for_daemons = one.labels.get(names.TARGET_LABEL) == names.TARGET_DAEMON
    return not is_for_daemons and (domain is None or one.namespace == domain.namespace)


def _named(cluster: Cluster, domain: ComputeDomain, settings: Settings) -> tuple[Thing, ...]:
    home = home_of(cluster, domain.uid, settings)
    places = (
        (RESOURCE_CLAIM_TEMPLATE, home, names.daemon_name(domain.uid)),
        (NETWORK_POLICY, home, names.daemon_name(domain.uid)),
        (DAEMON_SET, home, names.daemon_name(domain.uid)),
        (RESOURCE_CLAIM_TEMPLATE, domain.namespace, domain.template),
        (RESOURCE_CLAIM, domain.namespace, names.shared_claim_name(domain.uid)),
    )
    found = ((kind, cluster.at(kind, namespace, name)) for kind, namespace, name in places)
    return tuple(thing(kind, obj) for kind, obj in found if obj is not None)


def _unready(cluster: Cluster, nodes: Iterable[str]) -> dict[str, float]:
    found = {name: cluster.at(NODE, None, name) for name in nodes}
    since = {name: 0.0 if obj is None else not_ready_since(obj) for name, obj in found.items()}
    return {name: moment for name, moment in since.items() if moment is not None}


def _clique_labels(cluster: Cluster, nodes: Iterable[str]) -> dict[str, str]:
    found = ((name, cluster.at(NODE, None, name)) for name in nodes)
    labels = ((name, obj["metadata"].get("labels") or {}) for name, obj in found if obj is not None)
    label = names.GPU_CLIQUE_LABEL
    return {name: have[label] for name, have in labels if label in have}


def _cliques(cluster: Cluster, uid: str, settings: Settings) -> tuple[CliqueObject, ...]:
    return tuple(
        CliqueObject(thing=thing(COMPUTE_DOMAIN_CLIQUE, one), clique=clique(one))
        for one in cluster.by(COMPUTE_DOMAIN_CLIQUE, BY_DOMAIN, uid)
        if one["metadata"].get("namespace") in settings.namespaces
    )


def _claims(cluster: Cluster, uid: str, warm: str | None) -> tuple[ChannelClaim, ...]:
    """Those that use the ComputeDomain: by name, or through a channel of the clique that it keeps warm."""
    if warm is not None:
        found = cluster.by(RESOURCE_CLAIM, BY_POOL, names.channel_pool_name(warm))
        return tuple(claim for claim in map(channel_claim, found) if claim is not None)
    read = (channel_claim(one) for one in cluster.by(RESOURCE_CLAIM, BY_DOMAIN, uid))
    return tuple(claim for claim in read if claim is not None and claim.domain == uid)


def _warm(
    cluster: Cluster, domain: ComputeDomain, claims: Iterable[ChannelClaim], settings: Settings, now: str
) -> WarmState | None:
    """The warm domain of the clique in which the shared claim was allocated."""
    if not uses_warm_clique(domain, settings):
        return None
    shared = names.shared_claim_name(domain.uid)
    device = next((one.device for one in claims if one.thing.name == shared and one.device), None)
    clique_id = None if device is None else names.clique_of_pool(device[0])
    if clique_id is None:
        return None
    warm = isolation.warm_domain(cluster.by(COMPUTE_DOMAIN, BY_CLIQUE, clique_id), settings)
    seen = None if warm is None else snapshot(cluster, warm.uid, settings, now)
    if seen is None:
        return WarmState(clique_id=clique_id, nodes=())
    return WarmState(clique_id=clique_id, nodes=node_entries(seen, settings), pods=seen.pods)


def _mixed(
    cluster: Cluster, uid: str, domain: ComputeDomain | None, settings: Settings
) -> dict[str, tuple[str, ...]]:
    labels = ((one["metadata"].get("labels") or {}) for one in cluster.by(NODE, BY_DOMAIN, uid))
    cliques = {found[names.GPU_CLIQUE_LABEL] for found in labels if names.GPU_CLIQUE_LABEL in found}
    warm = None if domain is None else warm_clique(domain, settings)
    cliques |= {warm} if warm is not None else set()
    said = {one: isolation.said_of(clique_nodes(cluster, one), settings) for one in cliques}
    return {one: tuple(sorted(what)) for one, what in said.items() if len(what) > 1}


def with_secrets(seen: Snapshot, secrets: tuple[Thing, ...]) -> Snapshot:
    """The same with the certificates of its daemons, which no cache has."""
    return msgspec.structs.replace(seen, held=(*seen.held, *secrets))
