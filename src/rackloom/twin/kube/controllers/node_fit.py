"""Whether a pod may go to a node: what kube-scheduler asks of labels, taints and other pods; pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rackloom.claim.allocate.objects import Node, ObjectMeta
from rackloom.claim.kube.api import Object
from rackloom.claim.place.reading.neighbours import required_terms, selects


def node_value(node: Object) -> Node:
    """The part of a node that selectors read."""
    metadata = node["metadata"]
    return Node(metadata=ObjectMeta(name=metadata["name"], labels=metadata.get("labels") or {}))


def is_tolerated(spec: Mapping[str, Any], node: Object) -> bool:
    """Whether the pod tolerates every taint that keeps pods away."""
    tolerations = spec.get("tolerations") or ()
    taints = [
        taint for taint in node.get("spec", {}).get("taints") or () if taint["effect"] != "PreferNoSchedule"
    ]
    if node.get("spec", {}).get("unschedulable"):
        taints.append({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"})
    return all(any(_tolerates(one, taint) for one in tolerations) for taint in taints)


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect", taint["effect"]) != taint["effect"]:
        return False
    if toleration.get("operator") == "Exists":
        return bool(toleration.get("key", taint["key"]) == taint["key"])
    return (toleration.get("key"), toleration.get("value", "")) == (taint["key"], taint.get("value", ""))


def allowed_topologies(pod: Object, placed: Iterable[tuple[Object, Object]]) -> list[tuple[str, set[str]]]:
    """For each required pod affinity of `pod`: the label of nodes that it is about, and the values allowed.

    `placed` are pods with their nodes. A pod that matches its own term may be the first anywhere: such a term
    is left out.
    """
    terms = required_terms(pod["spec"], "podAffinity")
    others = list(placed) if terms else []
    allowed = []
    for term in terms:
        key = term["topologyKey"]
        values = {
            node["metadata"].get("labels", {}).get(key)
            for other, node in others
            if _is_meant(term, pod, other)
        } - {None}
        if values or not _is_meant(term, pod, pod):
            allowed.append((key, values))
    return allowed


def is_near(node: Object, allowed: Sequence[tuple[str, set[str]]]) -> bool:
    """Whether a node lies where pod affinity allows."""
    labels = node["metadata"].get("labels") or {}
    return all(labels.get(key) in values for key, values in allowed)


def _is_meant(term: Mapping[str, Any], pod: Object, other: Object) -> bool:
    namespaces = term.get("namespaces") or [pod["metadata"]["namespace"]]
    labels = other["metadata"].get("labels") or {}
    return other["metadata"]["namespace"] in namespaces and selects(term.get("labelSelector"), labels)
