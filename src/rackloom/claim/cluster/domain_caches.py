"""The caches of the ComputeDomain controller: informers, routing to work keys, sweep for orphans.

One informer per kind, with the indexes of `core.domains.observe`. Only daemon pods, our own slices
and our own Workloads are watched, because a cluster's other pods, slices and Workloads are many.

A handler receives an object in its current state. The keys that it concerned before (a node whose label was
removed) are remembered, so both are woken. Of a node only certain labels and its readiness matter, so
heartbeats wake no key.

The sweep finds objects that outlived their ComputeDomain. That a UID is missing in the cache proves
nothing: it is gone for certain when the watch saw it go, or when a fresh list lacks it although
an object created for it is known. Secrets are in no cache. Those of a deleted ComputeDomain are
looked up by name for two more sweeps, because a paused controller may still send a create after another
one has taken it apart.
"""

import random
from collections.abc import Iterable

import msgspec

from rackloom.claim.kube.api import KubeApi
from rackloom.claim.kube.informer import CacheSet, Informer, is_not_served_to_us
from rackloom.core.cluster import names
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
    Object,
    ResourceKind,
    full_name,
    labels_of,
    name_of,
    namespace_of,
    not_ready_since,
    uid_of,
)
from rackloom.core.domains.observe import (
    BY_CLIQUE,
    BY_DOMAIN,
    BY_POOL,
    BY_READY_CHANNELS,
    BY_TEMPLATE,
    BY_WARM_MARK,
    INDEXES,
    ClusterIndex,
)
from rackloom.core.domains.settings import ControllerSettings, QuotaMode

# Informers and indexes.


_CLUSTER_WIDE = (COMPUTE_DOMAIN, RESOURCE_CLAIM_TEMPLATE, RESOURCE_CLAIM, NODE)
_WITH_DAEMONS = (DAEMON_SET, NETWORK_POLICY, COMPUTE_DOMAIN_CLIQUE)


class DomainCaches(CacheSet):
    """The informers of the ComputeDomain controller."""

    def __init__(self, api: KubeApi, settings: ControllerSettings, rng: random.Random) -> None:
        def informer(kind: ResourceKind, namespace: str | None = None, labels: str = "") -> Informer:
            return Informer(api, kind, namespace, labels=labels, indexers=INDEXES[kind], rng=rng)

        def per_namespace(kind: ResourceKind, labels: str = "") -> tuple[Informer, ...]:
            return tuple(informer(kind, namespace, labels) for namespace in settings.namespaces)

        workloads = Informer(
            api,
            WORKLOAD,
            labels=names.COMPUTE_DOMAIN_LABEL,
            indexers=INDEXES[WORKLOAD],
            # Without Kueue, or the rights of its overlay, only ComputeDomains with a quota wait.
            excuses=is_not_served_to_us,
            rng=rng,
        )
        super().__init__(
            ({WORKLOAD: (workloads,)} if settings.quota is not QuotaMode.NONE else {})
            | {kind: (informer(kind),) for kind in _CLUSTER_WIDE}
            | {kind: per_namespace(kind) for kind in _WITH_DAEMONS}
            # Only daemon pods and our own slices: a cluster has many other pods and slices.
            | {POD: per_namespace(POD, names.COMPUTE_DOMAIN_LABEL)}
            | {RESOURCE_SLICE: (informer(RESOURCE_SLICE, labels=names.WARM_CLIQUE_LABEL),)}
        )


# From a changed object to the keys to work on.


class DomainKey(msgspec.Struct, frozen=True, order=True):
    """Key of the work for one ComputeDomain."""

    uid: str


class CliqueKey(msgspec.Struct, frozen=True, order=True):
    """Key of the work for one clique."""

    clique_id: str


class SweepKey(msgspec.Struct, frozen=True, order=True):
    """Key of the search for objects that outlived their ComputeDomain."""


DomainWorkKey = DomainKey | CliqueKey | SweepKey
_NODE_LABELS = (
    names.COMPUTE_DOMAIN_LABEL,
    names.GPU_CLIQUE_LABEL,
    names.ISOLATION_LABEL,
    names.CHANNELS_READY_LABEL,
    names.WARM_CLIQUE_LABEL,
)


class ChangeRouter:
    """Keys that a change concerns, now or before it."""

    def __init__(self, cluster: ClusterIndex) -> None:
        self._cluster = cluster
        self._before: dict[tuple[ResourceKind, str | None, str], frozenset[DomainWorkKey]] = {}
        self._nodes: dict[str, tuple[object, ...]] = {}

    def keys(self, kind: ResourceKind, obj: Object) -> frozenset[DomainWorkKey]:
        """All keys to work on because of this change."""
        if kind == NODE and not self._is_news(obj):
            return frozenset()
        place = (kind, namespace_of(obj), name_of(obj))
        # A node that lost a label concerned another key before, and both keys must be reconciled.
        now = frozenset(self._concerned(kind, obj))
        before = self._before.pop(place, frozenset())
        if self._cluster.at(*place) is not None:
            self._before[place] = now
        keys = now | before
        for uid in {key.uid for key in keys if isinstance(key, DomainKey)}:
            # A change of a warm domain concerns its clique, and the jobs that have a channel of it.
            for domain in self._cluster.by(COMPUTE_DOMAIN, BY_DOMAIN, uid):
                for clique_id in _index_values(COMPUTE_DOMAIN, BY_CLIQUE, domain):
                    claims = self._cluster.by(RESOURCE_CLAIM, BY_POOL, names.channel_pool_name(clique_id))
                    jobs = (
                        job for claim in claims for job in _index_values(RESOURCE_CLAIM, BY_DOMAIN, claim)
                    )
                    keys |= {CliqueKey(clique_id), *map(DomainKey, jobs)}
        return keys

    def _is_news(self, node: Object) -> bool:
        name, labels = name_of(node), labels_of(node)
        state = (not_ready_since(node), *(labels.get(label) for label in _NODE_LABELS))
        before = self._nodes.pop(name, None)
        present = self._cluster.at(NODE, None, name) is not None
        if present:
            self._nodes[name] = state
        return before != state or not present

    def _concerned(self, kind: ResourceKind, obj: Object) -> Iterable[DomainWorkKey]:
        yield from (DomainKey(uid) for uid in _index_values(kind, BY_DOMAIN, obj))
        for index in (BY_CLIQUE, BY_WARM_MARK, BY_READY_CHANNELS):
            yield from (CliqueKey(index_value) for index_value in _index_values(kind, index, obj))
        # Of the ComputeDomains that name one template, only one has it, and the others may wait for it.
        templates = (
            (full_name(obj),) if kind == RESOURCE_CLAIM_TEMPLATE else _index_values(kind, BY_TEMPLATE, obj)
        )
        for template in templates:
            domains = self._cluster.by(COMPUTE_DOMAIN, BY_TEMPLATE, template)
            yield from (DomainKey(uid_of(domain)) for domain in domains)
        if kind == RESOURCE_CLAIM:
            pools = (names.clique_of_pool(pool) for pool in _index_values(kind, BY_POOL, obj))
            yield from (CliqueKey(pool) for pool in pools if pool is not None)


def _index_values(kind: ResourceKind, index: str, obj: Object) -> Iterable[str]:
    """The values under which an index has an object, none if a kind has no such index."""
    indexer = INDEXES[kind].get(index)
    return () if indexer is None else indexer(obj)


# Objects that outlived their ComputeDomain.


SWEEP_INTERVAL_SECONDS = 600.0
"""Seconds between sweeps."""
LATE_SWEEPS = 2
"""Sweeps for which the Secrets of a deleted ComputeDomain are looked up."""
_LEFT_BEHIND = (RESOURCE_CLAIM_TEMPLATE, DAEMON_SET, NETWORK_POLICY, NODE, COMPUTE_DOMAIN_CLIQUE)


class OrphanSweeper:
    """Finds out which UIDs of ComputeDomains are gone for certain."""

    def __init__(self, api: KubeApi, caches: DomainCaches) -> None:
        self._api = api
        self._caches = caches
        self._gone: set[str] = set()
        self._went: dict[str, int] = {}
        """UIDs of ComputeDomains whose deletion the watch showed -> sweeps that still include them."""

    def is_gone(self, uid: str) -> bool:
        """Whether no ComputeDomain has this UID any more. A UID is never used again."""
        return uid in self._gone or uid in self._went

    def may_have_secrets(self, uid: str) -> bool:
        """Whether a ComputeDomain of this UID was known, and was deleted a short time ago."""
        return uid in self._went

    def domain_changed(self, domain: Object) -> None:
        """Note that a ComputeDomain was created, changed or deleted."""
        uid = uid_of(domain)
        if not self._caches.by(COMPUTE_DOMAIN, BY_DOMAIN, uid):
            self._gone.add(uid)
            self._went[uid] = LATE_SWEEPS

    async def gone_uids(self) -> tuple[str, ...]:
        """The UIDs of ComputeDomains that are gone and may have left objects. Raises KubeError.

        A missing UID in the cache proves nothing. Where the watch did not show the deletion, one fresh list
        decides.
        """
        objects = ((kind, obj) for kind in _LEFT_BEHIND for obj in self._caches.all(kind))
        labelled = {uid for kind, obj in objects for uid in _index_values(kind, BY_DOMAIN, obj)}
        orphaned = {uid for uid in labelled if not self._caches.by(COMPUTE_DOMAIN, BY_DOMAIN, uid)}
        # UIDs never come back, so a UID that is proven to be gone needs no second list.
        unproven = orphaned - self._gone
        if unproven:
            listed = await self._api.list(COMPUTE_DOMAIN)
            self._gone |= unproven - set(map(uid_of, listed.items))
        self._gone &= orphaned
        self._went = {uid: left - 1 for uid, left in self._went.items() if left > 0}
        return tuple(sorted(self._gone | self._went.keys()))
