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
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations_with_replacement

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.pools import MalformedNodeSelector
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.nodes import NodeObject, blocking_taints
from rackloom.core.cluster.pods import PodObject, Toleration, is_bound_pod, pod_owner
from rackloom.core.cluster.reader import pod_hold
from rackloom.core.cluster.scheduling import (
    PodIdentity,
    TopologyDomains,
    bound_pod_identity,
    read_node_rule,
    selector_keys,
    unmet_requirements,
)
from rackloom.core.cluster.state import ClusterState, TrayHold


def restrict_moves(state: ClusterState) -> tuple[TrayHold, ...]:
    """The holds of a state, each with the trays and the owners that it may not move to or beside.

    A job is not moved to a node that any of its pods may not use. A job with a pod that cannot be read stays.
    """
    movable = {hold.owner for hold in state.holds if hold.movable}
    if not movable:
        return state.holds
    by_rules: dict[bytes, frozenset[str]] = {}
    forbidden: dict[str, frozenset[str] | None] = {}
    for pod in state.pods:
        owner = pod_owner(pod, state.labels.gang).text
        if owner in movable:
            more = _forbidden_nodes(pod, state.nodes, by_rules)
            forbidden[owner] = _union_if_known(forbidden.get(owner, frozenset()), more)
    peers = anti_affinity_peers(state)

    def restricted(hold: TrayHold) -> TrayHold:
        found = peers.get(hold.owner, AntiAffinityPeers())
        kept_off = _union_if_known(forbidden.get(hold.owner, frozenset()), found.nodes)
        if kept_off is None:
            return replace(hold, movable=False)
        return replace(hold, kept_off=kept_off, apart=found.owners)

    return tuple(restricted(hold) if hold.movable else hold for hold in state.holds)


def _union_if_known(nodes: frozenset[str] | None, more: frozenset[str] | None) -> frozenset[str] | None:
    return None if nodes is None or more is None else nodes | more


def _forbidden_nodes(
    pod: PodObject, nodes: Iterable[NodeObject], by_rules: dict[bytes, frozenset[str]]
) -> frozenset[str] | None:
    """The nodes that a pod may not use, or None if its rules are malformed."""
    tolerations = pod.spec.tolerations or ()
    try:
        rule = read_node_rule(pod.spec)
        # Pods of a job are mostly equal, so each set of rules is compared with the nodes once.
        key = msgspec.json.encode((rule, tolerations))
        if key not in by_rules:
            by_rules[key] = frozenset(
                node.name
                for node in nodes
                if any(unmet_requirements(rule, node)) or any(blocking_taints(node, tolerations))
            )
    except (msgspec.ValidationError, MalformedNodeSelector):
        return None
    return by_rules[key]


def tolerations_of_movable(state: ClusterState) -> tuple[Toleration, ...]:
    """What any movable pod tolerates: a node that none of them tolerates takes no moved job."""
    found: dict[Toleration, None] = {}
    for pod in state.pods:
        if pod_hold(pod, state.labels, 0).movable:
            found |= dict.fromkeys(pod.spec.tolerations or ())
    return tuple(found)


class AntiAffinityPeers(msgspec.Struct, frozen=True, kw_only=True):
    """The pods that a job is never beside."""

    nodes: frozenset[str] = frozenset()
    """Where they keep it off; all nodes, if they may move and share no clique or zone with it."""
    owners: frozenset[str] = frozenset()
    """Their jobs, perhaps its own."""


class _EqualPods(msgspec.Struct, frozen=True):
    """Pods that all selectors treat alike."""

    identity: PodIdentity
    nodes: Mapping[str, list[str]]
    """By owner, the node of each pod."""


def anti_affinity_peers(state: ClusterState) -> dict[str, AntiAffinityPeers]:
    """By owner of movable holds; an owner without such peers is missing."""
    holding: dict[str, set[str]] = defaultdict(set)
    for hold in state.holds:
        if hold.movable:
            holding[hold.owner].add(hold.tray)
    if not holding:
        return {}
    kinds = _equal_pods(list(filter(is_bound_pod, state.pods)), state.labels)
    names, domains = frozenset(node.name for node in state.nodes), TopologyDomains(state.nodes)
    found: dict[str, AntiAffinityPeers] = {}
    for first, other in combinations_with_replacement(kinds, 2):
        if not (first.identity.apart or other.identity.apart):
            continue
        # The topology keys of the terms that keep the two kinds of pods apart.
        by = set(first.identity.barred_by(other.identity))
        # Anti-affinity is symmetric: it binds both, whichever pod has the term.
        for mine, theirs in ((first, other), (other, first)) if by else ():
            around = {
                owner: frozenset(near for node in set(nodes) for near in domains.around(node, by))
                for owner, nodes in theirs.nodes.items()
            }
            for owner in holding.keys() & mine.nodes.keys():
                # A job with a single pod of this kind is no peer of itself.
                is_alone = mine is theirs and len(mine.nodes[owner]) == 1
                there = {peer: near for peer, near in around.items() if not (is_alone and peer == owner)}
                if not there:
                    continue
                # The trays of its own members are free once they leave; those of its launchers are not.
                trays = {**there, owner: there.get(owner, frozenset()).difference(holding[owner])}
                before = found.get(owner, AntiAffinityPeers())
                # A peer that may move too could be in any zone by then, so no node is safe.
                may_be_anywhere = any(by) and not holding.keys().isdisjoint(there)
                near = names if may_be_anywhere else before.nodes.union(*trays.values())
                owners = before.owners.union(there)
                found[owner] = AntiAffinityPeers(nodes=before.nodes | near, owners=owners)
    return found


def _equal_pods(pods: Sequence[PodObject], labels: SchedulerLabels) -> Iterable[_EqualPods]:
    """Pods grouped by identity, with only the labels that some selector reads."""
    identities = [bound_pod_identity(pod, labels.host) for pod in pods]
    read = {key for identity in identities for term in identity.apart for key in selector_keys(term.selector)}
    found: dict[bytes, _EqualPods] = {}
    for identity, pod in zip(identities, pods, strict=True):
        bare = replace(identity, labels={key: value for key, value in identity.labels.items() if key in read})
        key = msgspec.json.encode(bare, order="deterministic")
        equal = found.setdefault(key, _EqualPods(bare, defaultdict(list)))
        equal.nodes[pod_owner(pod, labels.gang).text].append(pod.node)
    return found.values()
