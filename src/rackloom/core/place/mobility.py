"""Where running jobs may be moved: node rules, taints and anti-affinity of their pods.

`restrict_moves` completes the holds of movable jobs. A job may not move to a node that any of its pods
may not use, and two pods that are never on one node are not moved to one. A job with a pod whose rules
cannot be read is not moved at all.

`anti_affinity_peers` compares the pods on nodes with each other, after grouping those that are equal in
the labels that some selector reads. A term by zone or clique between pods that may both move rules out
every node, because nothing is known about where the other will be. The trays of a job's own movable
members are not counted against it: they are free once it leaves.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations_with_replacement

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.pools import MalformedNodeSelector
from rackloom.core.place.jobs import owner_of_pod, value_at
from rackloom.core.place.observed_site import hold_of_pod, is_bound_pod
from rackloom.core.place.placement_values import SchedulerLabels, TrayHold
from rackloom.core.place.pod_constraints import (
    JsonMapping,
    PodIdentity,
    Toleration,
    TopologyDomains,
    blocking_taints,
    bound_pod_identity,
    read_node_rule,
    selector_keys,
    unmet_requirements,
)


def restrict_moves(
    holds: Sequence[TrayHold],
    nodes: Sequence[JsonMapping],
    pods: Sequence[JsonMapping],
    labels: SchedulerLabels,
) -> tuple[TrayHold, ...]:
    """The holds with the trays that their owners are kept off, and whom these are kept apart from.

    What one pod of a job may not use, none of them is moved to; where two are never on one node, no two are
    moved to one. A job with a pod that cannot be read stays.
    """
    movable = {hold.owner for hold in holds if hold.movable}
    kept: dict[bytes, frozenset[str] | None] = {}
    off: dict[str, frozenset[str] | None] = {}
    for pod in pods:
        owner = owner_of_pod(pod, labels)
        if owner in movable:
            spec = pod.get("spec") or {}
            ruling = (
                spec.get("nodeSelector"),
                value_at(spec, ("affinity", "nodeAffinity")),
                spec.get("tolerations"),
            )
            key = msgspec.json.encode(ruling)
            if key not in kept:
                kept[key] = _forbidden_nodes(spec, nodes)
            off[owner] = _union_if_known(off.get(owner, frozenset()), kept[key])
    foes = anti_affinity_peers(holds, nodes, pods, labels)
    off |= {owner: _union_if_known(off.get(owner, frozenset()), foe.nodes) for owner, foe in foes.items()}
    return tuple(
        _restricted(hold, off.get(hold.owner, frozenset()), foes.get(hold.owner, AntiAffinityPeers()))
        if hold.movable
        else hold
        for hold in holds
    )


# Anti-affinity with pods of other jobs, and of the same job.


class AntiAffinityPeers(msgspec.Struct, frozen=True, kw_only=True):
    """Of one job."""

    nodes: frozenset[str] = frozenset()
    """Where they keep it off; all nodes, if they may move and share no clique or zone with it."""
    owners: frozenset[str] = frozenset()
    """Whose they are, perhaps its own."""


def _restricted(hold: TrayHold, off: frozenset[str] | None, foes: AntiAffinityPeers) -> TrayHold:
    if off is None:
        return replace(hold, movable=False)
    return replace(hold, kept_off=off, apart=foes.owners)


def _union_if_known(one: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    return None if one is None or other is None else one | other


def _forbidden_nodes(spec: JsonMapping, nodes: Iterable[JsonMapping]) -> frozenset[str] | None:
    """None where the rules are none that Kubernetes knows."""
    try:
        rule = read_node_rule(spec)
        tolerations = msgspec.convert(spec.get("tolerations") or (), tuple[Toleration, ...])
        return frozenset(
            node["metadata"]["name"]
            for node in nodes
            if any(unmet_requirements(rule, node)) or any(blocking_taints(node, tolerations))
        )
    except (msgspec.ValidationError, MalformedNodeSelector):
        return None


def tolerations_of_movable(pods: Iterable[JsonMapping], labels: SchedulerLabels) -> tuple[Toleration, ...]:
    """All taints that some pod which may move tolerates: where nobody could go is no place to move to."""
    found: dict[Toleration, None] = {}
    for pod in pods:
        if hold_of_pod(pod, labels).movable:
            with suppress(msgspec.ValidationError):
                spec = pod.get("spec") or {}
                found |= dict.fromkeys(msgspec.convert(spec.get("tolerations") or (), tuple[Toleration, ...]))
    return tuple(found)


class _LikePods(msgspec.Struct, frozen=True):
    """Pods that are alike to others."""

    known: PodIdentity
    nodes: Mapping[str, list[str]]
    """By owner, the node of each pod."""


def anti_affinity_peers(
    holds: Iterable[TrayHold],
    nodes: Iterable[JsonMapping],
    pods: Iterable[JsonMapping],
    labels: SchedulerLabels,
) -> dict[str, AntiAffinityPeers]:
    """By owner of what may move; one that has no foes is missing."""
    holding: dict[str, set[str]] = defaultdict(set)
    for hold in holds:
        if hold.movable:
            holding[hold.owner].add(hold.tray)
    if not holding:
        return {}
    everywhere = list(nodes)
    likes = _like_pods([pod for pod in pods if is_bound_pod(pod)], labels)
    book = _PeerIndex(
        holding, TopologyDomains(everywhere), frozenset(one["metadata"]["name"] for one in everywhere)
    )
    for one, other in combinations_with_replacement(likes, 2):
        if (one.known.apart or other.known.apart) and (by := set(one.known.barred_by(other.known))):
            book.enter(one, other, by)
            book.enter(other, one, by)
    return book.found


class _PeerIndex:
    """What is found of each job."""

    def __init__(
        self, holding: Mapping[str, Collection[str]], reaches: TopologyDomains, everywhere: frozenset[str]
    ) -> None:
        self.found: dict[str, AntiAffinityPeers] = {}
        self._holding = holding
        self._reaches = reaches
        self._everywhere = everywhere

    def enter(self, mine: _LikePods, theirs: _LikePods, by: Collection[str]) -> None:
        there = {foe: self._around(nodes, by) for foe, nodes in theirs.nodes.items()}
        for owner in self._holding.keys() & mine.nodes.keys():
            is_alone = mine is theirs and len(mine.nodes[owner]) == 1
            foes = there.keys() - {owner} if is_alone else there.keys()
            if foes:
                self._add(owner, {foe: there[foe] for foe in foes}, is_wide=any(by))

    def _add(self, owner: str, there: Mapping[str, frozenset[str]], *, is_wide: bool) -> None:
        # The trays of its own members are free once they leave; those of its launchers are not.
        trays = {**there, owner: there.get(owner, frozenset()).difference(self._holding[owner])}
        before, is_lost = (
            self.found.get(owner, AntiAffinityPeers()),
            is_wide and not self._holding.keys().isdisjoint(there),
        )
        nodes = self._everywhere if is_lost else before.nodes.union(*trays.values())
        self.found[owner] = AntiAffinityPeers(nodes=before.nodes | nodes, owners=before.owners.union(there))

    def _around(self, nodes: Iterable[str], by: Collection[str]) -> frozenset[str]:
        return frozenset(one for node in set(nodes) for one in self._reaches.around(node, by))


def _like_pods(pods: Sequence[JsonMapping], labels: SchedulerLabels) -> Iterator[_LikePods]:
    """By labels that anybody reads."""
    everybody = [(bound_pod_identity(pod, labels.host), pod) for pod in pods]
    read = {key for one, _ in everybody for term in one.apart for key in selector_keys(term.selector)}
    found: dict[bytes, _LikePods] = {}
    for one, pod in everybody:
        bare = replace(one, labels={key: value for key, value in one.labels.items() if key in read})
        key = msgspec.json.encode(bare, order="deterministic")
        alike = found.setdefault(key, _LikePods(bare, defaultdict(list)))
        alike.nodes[owner_of_pod(pod, labels)].append(pod["spec"]["nodeName"])
    yield from found.values()
