"""Which nodes a pod may go to by its nodeSelector and its required node affinity (core/v1).

The terms of an affinity are read as `claim/allocate` reads those of a device: there is one rule for both.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rackloom.claim.allocate.nodes import MalformedSelector, reaches
from rackloom.claim.allocate.objects import Node, NodeSelector, NodeSelectorRequirement, ObjectMeta
from rackloom.errors import Refused

Json = Mapping[str, Any]
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


class NodeRule(msgspec.Struct, frozen=True):
    """What the labels and the name of a node have to be."""

    labels: Mapping[str, str] = {}
    """Each exactly so: the nodeSelector."""
    affinity: NodeSelector | None = None
    """Terms of which one must hold; None: no affinity is required."""


def node_rule(spec: Json) -> NodeRule:
    """The rule of a pod spec. Raises msgspec.ValidationError for what is not shaped like core/v1."""
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(REQUIRED)
    return NodeRule(
        labels=msgspec.convert(spec.get("nodeSelector") or {}, dict[str, str]),
        affinity=None if required is None else msgspec.convert(required, NodeSelector),
    )


def check_rule(rule: NodeRule) -> None:
    """Raises Refused for terms that the API server would not take."""
    try:
        list(unmet(rule, {"metadata": {}}))
    except MalformedSelector as error:
        raise Refused(
            f"its required node affinity cannot be read: {error}",
            nearest_fix="compare it with `kubectl explain pod.spec.affinity.nodeAffinity`",
        ) from error


def unmet(rule: NodeRule, node: Json) -> Iterator[str]:
    """What of the rule does not hold on a node (an object), in words. Raises MalformedSelector."""
    labels = node["metadata"].get("labels") or {}
    yield from (f"not {key}={value}" for key, value in rule.labels.items() if labels.get(key) != value)
    if rule.affinity is not None:
        meta = ObjectMeta(name=node["metadata"].get("name", ""), labels=labels)
        if not reaches(Node(metadata=meta), node_name=None, all_nodes=None, selector=rule.affinity):
            told = _told(rule.affinity)
            yield f"not {told}" if told else "its node affinity has no term"


def is_selected(spec: Json, node: Json) -> bool:
    """Whether a node is what a pod spec's nodeSelector and required node affinity ask for.

    Raises MalformedSelector for terms that cannot be read.
    """
    return not any(unmet(node_rule(spec), node))


def _told(selector: NodeSelector) -> str:
    """`zone In b, or zone In c and name NotIn n1`."""
    terms = (
        " and ".join(_requirement(one) for one in (*term.match_expressions, *term.match_fields))
        for term in selector.node_selector_terms
    )
    return ", or ".join(one for one in terms if one)


def _requirement(one: NodeSelectorRequirement) -> str:
    return " ".join((one.key, one.operator, "/".join(one.values))).rstrip()
