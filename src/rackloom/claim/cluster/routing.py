"""Whom a change concerns: from an object to the keys to work on.

A handler sees an object as it is now; whom it concerned before (a node whose label was taken off) is
remembered here. Of a node only its labels, and since when it is not ready, concern anybody: no heartbeat.
"""

from collections.abc import Iterable

import msgspec

from rackloom.claim.cluster.observe import (
    BY_CLIQUE,
    BY_DOMAIN,
    BY_MARK,
    BY_OFFER,
    BY_POOL,
    BY_TEMPLATE,
    INDEXES,
    Cluster,
)
from rackloom.claim.cluster.things import not_ready_since
from rackloom.claim.domain import names
from rackloom.claim.kube.api import Kind, Object
from rackloom.claim.kube.kinds import (
    COMPUTE_DOMAIN,
    NODE,
    RESOURCE_CLAIM,
    RESOURCE_CLAIM_TEMPLATE,
)


class Domain(msgspec.Struct, frozen=True, order=True):
    """Key of the work for one ComputeDomain."""

    uid: str


class CliqueKey(msgspec.Struct, frozen=True, order=True):
    """Key of the work for one clique."""

    clique_id: str


class Sweep(msgspec.Struct, frozen=True, order=True):
    """Key of the search for things that outlived their ComputeDomain."""


Key = Domain | CliqueKey | Sweep
_NODE_LABELS = (
    names.COMPUTE_DOMAIN_LABEL,
    names.GPU_CLIQUE_LABEL,
    names.ISOLATION_LABEL,
    names.CHANNELS_READY_LABEL,
    names.WARM_CLIQUE_LABEL,
)


class Router:
    """Keys that a change concerns, now or before it."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._before: dict[tuple[Kind, str, str], frozenset[Key]] = {}
        self._nodes: dict[str, tuple[object, ...]] = {}

    def keys(self, kind: Kind, obj: Object) -> frozenset[Key]:
        """All keys to work on because of this change."""
        if kind == NODE and not self._is_news(obj):
            return frozenset()
        meta = obj["metadata"]
        place = (kind, meta.get("namespace", ""), meta["name"])
        now = frozenset(self._concerned(kind, obj))
        before = self._before.pop(place, frozenset())
        if self._cluster.at(kind, meta.get("namespace"), meta["name"]) is not None:
            self._before[place] = now
        return frozenset(self._with_warm(now | before))

    def _is_news(self, node: Object) -> bool:
        name = node["metadata"]["name"]
        labels = node["metadata"].get("labels") or {}
        said = (not_ready_since(node), *(labels.get(label) for label in _NODE_LABELS))
        before = self._nodes.pop(name, None)
        present = self._cluster.at(NODE, None, name) is not None
        if present:
            self._nodes[name] = said
        return before != said or not present

    def _concerned(self, kind: Kind, obj: Object) -> Iterable[Key]:
        yield from (Domain(uid) for uid in _filed(kind, BY_DOMAIN, obj))
        for index in (BY_CLIQUE, BY_MARK, BY_OFFER):
            yield from (CliqueKey(one) for one in _filed(kind, index, obj))
        if kind in (COMPUTE_DOMAIN, RESOURCE_CLAIM_TEMPLATE):
            yield from self._sharers_of_the_name(kind, obj)
        if kind == RESOURCE_CLAIM:
            pools = (names.clique_of_pool(pool) for pool in _filed(kind, BY_POOL, obj))
            yield from (CliqueKey(one) for one in pools if one is not None)

    def _sharers_of_the_name(self, kind: Kind, obj: Object) -> Iterable[Key]:
        """ComputeDomains that want the template of this name: one of them may have to wait for another."""
        meta = obj["metadata"]
        if kind == RESOURCE_CLAIM_TEMPLATE:
            places: Iterable[str] = (f"{meta['namespace']}/{meta['name']}",)
        else:
            places = _filed(COMPUTE_DOMAIN, BY_TEMPLATE, obj)
        for place in places:
            for domain in self._cluster.by(COMPUTE_DOMAIN, BY_TEMPLATE, place):
                yield Domain(domain["metadata"]["uid"])

    def _with_warm(self, keys: frozenset[Key]) -> Iterable[Key]:
        """What changes in a warm domain concerns its clique, and the jobs that have a channel of it."""
        yield from keys
        for key in keys:
            for clique_id in self._warm_cliques(key):
                yield CliqueKey(clique_id)
                yield from self._jobs_in(clique_id)

    def _warm_cliques(self, key: Key) -> Iterable[str]:
        if isinstance(key, Domain):
            for obj in self._cluster.by(COMPUTE_DOMAIN, BY_DOMAIN, key.uid):
                yield from _filed(COMPUTE_DOMAIN, BY_CLIQUE, obj)

    def _jobs_in(self, clique_id: str) -> Iterable[Key]:
        for claim in self._cluster.by(RESOURCE_CLAIM, BY_POOL, names.channel_pool_name(clique_id)):
            yield from (Domain(uid) for uid in _filed(RESOURCE_CLAIM, BY_DOMAIN, claim))


def _filed(kind: Kind, index: str, obj: Object) -> Iterable[str]:
    """The values under which an index has an object; none where a kind has no such index."""
    indexer = INDEXES[kind].get(index)
    return () if indexer is None else indexer(obj)
