"""Keeping the pods of a ComputeDomain in one clique, as changes to a pod (JSON patch operations).

GPUs reach each other's memory inside one clique only, and the ComputeDomain forms where its pods land: it
places none of them.
"""

from collections.abc import Iterator
from typing import Any

from rackloom.claim.cluster.admission.marks import CHANNEL_LABEL
from rackloom.claim.cluster.admission.reviews import PatchOp
from rackloom.claim.cluster.admission.shapes import NodeAffinity, PodAffinity, PodSpec
from rackloom.claim.domain.names import GPU_CLIQUE_LABEL

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def has_clique_rule(spec: PodSpec) -> bool:
    """Whether the pod says itself which clique it wants, or near whom; it is then left alone.

    That a node must be in some clique says neither, and is what the first of several gated pods is given.
    """
    if GPU_CLIQUE_LABEL in (spec.node_selector or {}):
        return True
    affinity = spec.affinity
    if affinity is None:
        return False
    return _pods_name_it(affinity.pod_affinity) or _nodes_name_it(affinity.node_affinity)


def near_its_domain(spec: PodSpec, label: str) -> tuple[PatchOp, ...]:
    """Have the pod scheduled into the clique of the pods whose CHANNEL_LABEL is `label`.

    The scheduler lets the first of them in anywhere, since the rule selects that pod too.
    """
    term = {
        "topologyKey": GPU_CLIQUE_LABEL,
        "labelSelector": {"matchLabels": {CHANNEL_LABEL: label}},
    }
    if spec.affinity is None:
        return (_add("/spec/affinity", {"podAffinity": {_REQUIRED: [term]}}),)
    near = spec.affinity.pod_affinity
    if near is None:
        return (_add("/spec/affinity/podAffinity", {_REQUIRED: [term]}),)
    if near.required is None:
        return (_add(f"/spec/affinity/podAffinity/{_REQUIRED}", [term]),)
    return (_add(f"/spec/affinity/podAffinity/{_REQUIRED}/-", term),)


def in_clique(spec: PodSpec, clique: str | None) -> tuple[PatchOp, ...]:
    """Have a gated pod scheduled into this clique, or into any one where it is None.

    Of a gated pod, only what it asks of nodes can be tightened: an expression more in each term.
    """
    if clique is None:
        rule: dict[str, Any] = {"key": GPU_CLIQUE_LABEL, "operator": "Exists"}
    else:
        rule = {"key": GPU_CLIQUE_LABEL, "operator": "In", "values": [clique]}
    terms = [{"matchExpressions": [rule]}]
    if spec.affinity is None:
        return (_add("/spec/affinity", {"nodeAffinity": {_REQUIRED: {"nodeSelectorTerms": terms}}}),)
    nodes = spec.affinity.node_affinity
    if nodes is None:
        return (_add("/spec/affinity/nodeAffinity", {_REQUIRED: {"nodeSelectorTerms": terms}}),)
    path = f"/spec/affinity/nodeAffinity/{_REQUIRED}"
    if nodes.required is None or not nodes.required.node_selector_terms:
        return (_add(path, {"nodeSelectorTerms": terms}),)
    return tuple(_tightened(nodes, f"{path}/nodeSelectorTerms", rule))


def _tightened(nodes: NodeAffinity, path: str, rule: dict[str, Any]) -> Iterator[PatchOp]:
    terms = (nodes.required.node_selector_terms if nodes.required else None) or ()
    for number, term in enumerate(terms):
        if term.match_expressions is not None:
            yield _add(f"{path}/{number}/matchExpressions/-", rule)
        elif not term.is_empty:
            yield _add(f"{path}/{number}/matchExpressions", [rule])


def _pods_name_it(near: PodAffinity | None) -> bool:
    if near is None:
        return False
    wished = (one.pod_affinity_term for one in near.preferred or ())
    return any(term.topology_key == GPU_CLIQUE_LABEL for term in (*(near.required or ()), *wished))


def _nodes_name_it(nodes: NodeAffinity | None) -> bool:
    if nodes is None:
        return False
    required = (nodes.required.node_selector_terms if nodes.required else None) or ()
    wished = (one.preference for one in nodes.preferred or ())
    rules = (rule for term in (*required, *wished) for rule in term.match_expressions or ())
    return any(rule.key == GPU_CLIQUE_LABEL and rule.operator == "In" for rule in rules)


def _add(path: str, value: Any) -> PatchOp:
    return {"op": "add", "path": path, "value": value}
