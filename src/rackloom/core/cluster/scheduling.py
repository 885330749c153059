"""What a pod asks of its node: amounts, devices, node selection, tolerations and anti-affinity (core/v1).

`read_pod_requirements` reads a pod or a pod template once.

- Node rules: nodeSelector and required node affinity, evaluated by the same code as the node selectors of
  devices in `core.allocate`.
- Taints: NoSchedule and NoExecute keep a pod off unless a toleration covers them. Numeric operators (Lt,
  Gt) cover nothing here.
- Anti-affinity: required terms by hostname, with label selectors and namespaces. `PodIdentity` is a pod
  as other pods see it; anti-affinity is symmetric (`bars`), as in kube-scheduler. For pods that already
  run, every required term counts, also by zone or clique (`TopologyDomains` finds the nodes around), and
  a namespaceSelector is taken to select all namespaces.

Preferences are not read. What cannot be honoured is reported in `plan_notes`. Raises Refused, or
msgspec.ValidationError for a field of the wrong type.

The effective request of a pod follows kube-scheduler's NodeResourcesFit, for every resource alike:

1. A limit without a request is a request.
2. Sidecars (init containers that restart always) run from their turn on. Any other init container runs beside
   the sidecars before it, and ends before the next one starts.
3. The request is the larger of all containers with all sidecars, and of each init container with the sidecars
   before it.
4. What the pod requests as a whole replaces that sum. Overhead and the pod itself are added.

Sources: Kubernetes documentation, "Init Containers" and "Sidecar Containers" (resource sharing within
containers), "Pod-level resources", "Pod Overhead".

An amount that is no quantity raises ValueError. Nothing is guessed for it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from math import ceil
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import Node, NodeSelector, ObjectMeta, convert_object
from rackloom.core.allocate.pools import MalformedNodeSelector, node_selector_matches
from rackloom.core.allocate.quantity import Quantity
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.objects import JsonMapping, labels_of, name_of
from rackloom.core.cluster.pods import REQUIRED, PodObject, Toleration, object_namespace
from rackloom.errors import Refused

# Amounts of resources.


ResourceAmounts = Counter[str]
"""By resource: cores, bytes, or pieces. The values are fractions; a sum or a maximum drops zeros."""
Thousandths = Mapping[str, int]
"""By resource: thousandths of its unit. Whole numbers, since a site has many pods."""
PODS_RESOURCE = "pods"
CPU_RESOURCE, MEMORY_RESOURCE = "cpu", "memory"
NO_AMOUNTS = ResourceAmounts()
CLASS_RESOURCE = "deviceclass.resource.kubernetes.io/"
"""Prefix of the resource that counts devices of a class: a claim serves them (KEP-5004)."""
_MOST_REMEMBERED = 10_000
_amounts: dict[str, Thousandths] = {}
"""By the text of the parts that decide them: most pods of a site are written alike, and most nodes."""


def _remembered(written: str, amounts: Callable[[], ResourceAmounts]) -> Thousandths:
    if written not in _amounts:
        if len(_amounts) >= _MOST_REMEMBERED:
            _amounts.clear()
        _amounts[written] = in_thousandths(amounts())
    return _amounts[written]


def effective_requests(pod: JsonMapping) -> Thousandths:
    """The request of a pod, or of a template. Raises ValueError for an unreadable amount."""
    return _spec_requests(pod.get("spec") or {})


def _spec_requests(spec: JsonMapping) -> Thousandths:
    parts = [
        [(part.get("resources"), part.get("restartPolicy")) for part in spec.get(kind) or ()]
        for kind in ("initContainers", "containers")
    ]
    written = repr((parts, spec.get("resources"), spec.get("overhead")))
    return _remembered(written, lambda: pod_requests(spec))


def pod_requests(spec: JsonMapping) -> ResourceAmounts:
    """The same by a spec, as exact amounts. Raises ValueError for an unreadable amount."""
    most, lasting = NO_AMOUNTS, NO_AMOUNTS
    for container in spec.get("initContainers") or ():
        here = lasting + _container_requests(container)
        most = most | here
        if container.get("restartPolicy") == "Always":
            lasting = here
    together = sum(map(_container_requests, spec.get("containers") or ()), lasting)
    whole = ResourceAmounts({**(most | together), **_container_requests(spec)})
    return whole + _parse_amounts(spec.get("overhead") or {}) + ResourceAmounts({PODS_RESOURCE: 1})


def requested_devices(spec: JsonMapping, resource: str) -> int:
    """How many devices of an extended resource a pod requests, such as GPUs by `nvidia.com/gpu`.

    Raises ValueError for an unreadable amount, and for a part of a device.
    """
    return _spec_requests(spec).get(resource, 0) // 1000


def requests_beside_devices(spec: JsonMapping, gpu_resource: str) -> Thousandths:
    """What a pod requests of its node beside devices: CPU, memory, the pod itself. Raises ValueError."""
    return {
        name: amount
        for name, amount in _spec_requests(spec).items()
        if amount and name != gpu_resource and not name.startswith(CLASS_RESOURCE)
    }


def allocatable_of_node(node: JsonMapping) -> ResourceAmounts:
    """What pods may request of a node; capacity if it names nothing allocatable. Raises ValueError.

    It has nothing of a resource that it does not name.
    """
    return _parse_amounts(written_amounts(node))


def written_amounts(node: JsonMapping) -> Mapping[str, Any]:
    """The same as the node writes them."""
    status = node.get("status") or {}
    return status.get("allocatable") or status.get("capacity") or {}


def node_amounts(node: JsonMapping) -> Thousandths:
    """The same in the units of requests. Raises ValueError."""
    return _remembered(repr(written_amounts(node)), lambda: allocatable_of_node(node))


def in_thousandths(amounts: Mapping[str, Fraction | int]) -> Thousandths:
    """Rounded up, as kube-scheduler rounds CPUs to thousandths and bytes to whole ones."""
    return {name: ceil(amount * 1000) for name, amount in amounts.items()}


def _container_requests(container: JsonMapping) -> ResourceAmounts:
    resources = container.get("resources") or {}
    return _parse_amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _parse_amounts(written: Mapping[str, Any]) -> ResourceAmounts:
    return ResourceAmounts({name: _parse_amount(name, value) for name, value in written.items()})


@lru_cache(maxsize=_MOST_REMEMBERED)
def _parse_amount(name: str, value: str | int | float) -> Fraction:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{name} is {value!r}, and not a quantity")
    try:
        found = Quantity.parse(value)
    except ValueError as error:
        raise ValueError(f"{name} is {value!r}, and not a quantity") from error
    amount = found.unscaled * Fraction(10) ** found.scale
    if amount < 0:
        raise ValueError(f"{name} is {value!r}, and less than 0")
    # Extended resources come in whole numbers. Names of kubernetes.io are none (`IsExtendedResourceName`).
    if "/" in name and "kubernetes.io/" not in name and amount.denominator != 1:
        raise ValueError(f"{name} is {value!r}, and not a whole number")
    return amount


# Node selection.


class NodeRule(msgspec.Struct, frozen=True):
    """What the labels and the name of a node have to be."""

    labels: Mapping[str, str] = {}
    """Each exactly so: the nodeSelector."""
    affinity: NodeSelector | None = None
    """Terms of which one must hold; None: no affinity is required."""


def read_node_rule(spec: JsonMapping) -> NodeRule:
    """The rule of a pod spec. Raises msgspec.ValidationError for what is not shaped like core/v1."""
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(REQUIRED)
    return NodeRule(
        labels=msgspec.convert(spec.get("nodeSelector") or {}, dict[str, str]),
        affinity=None if required is None else msgspec.convert(required, NodeSelector),
    )


def check_node_rule(rule: NodeRule) -> None:
    """Raises Refused for terms that the API server would not take."""
    try:
        list(unmet_requirements(rule, {"metadata": {}}))
    except MalformedNodeSelector as error:
        raise Refused(
            f"its required node affinity cannot be read: {error}",
            nearest_fix="compare it with `kubectl explain pod.spec.affinity.nodeAffinity`",
        ) from error


def unmet_requirements(rule: NodeRule, node: JsonMapping) -> Iterator[str]:
    """The parts of the rule that a node (an object) does not meet, in words. Raises MalformedNodeSelector."""
    labels = labels_of(node)
    yield from (f"not {key}={value}" for key, value in rule.labels.items() if labels.get(key) != value)
    if rule.affinity is not None and not node_selector_matches(allocator_node(node), rule.affinity):
        text = _node_selector_text(rule.affinity)
        yield f"not {text}" if text else "its node affinity has no term"


def allocator_node(node: JsonMapping) -> Node:
    """A node as the allocator takes it: its name and its labels."""
    return Node(metadata=ObjectMeta(name=name_of(node), labels=labels_of(node)))


def is_node_selected(spec: JsonMapping, node: JsonMapping) -> bool:
    """Whether a node is what a pod spec's nodeSelector and required node affinity ask for.

    Raises MalformedNodeSelector for terms that cannot be read.
    """
    return not any(unmet_requirements(read_node_rule(spec), node))


def _node_selector_text(selector: NodeSelector) -> str:
    """`zone In b, or zone In c and name NotIn n1`."""
    terms = (
        " and ".join(
            f"{expression.key} {expression.operator} {'/'.join(expression.values)}".rstrip()
            for expression in (*term.match_expressions, *term.match_fields)
        )
        for term in selector.node_selector_terms
    )
    return ", or ".join(term for term in terms if term)


# Anti-affinity between pods.


_LABEL_KEY_FIELDS = ("matchLabelKeys", "mismatchLabelKeys")


class AntiAffinityTerm(msgspec.Struct, frozen=True, kw_only=True):
    """A required anti-affinity term of a pod: no selected pod is on a node with it."""

    selector: JsonMapping | None
    """A LabelSelector; None selects no pod."""
    namespaces: tuple[str, ...]
    """Of the selected pods; empty: that of the pod itself."""
    everywhere: bool
    """The selected pods may be in any namespace."""
    by: str = ""
    """The topology key: nodes with the same value of it count as one. Empty: the hostname."""

    def selects(self, namespace: str, other: "PodIdentity") -> bool:
        """Whether another pod is selected, if the term is of a pod of this namespace."""
        named = self.everywhere or other.namespace in (self.namespaces or (namespace,))
        return named and selector_matches(self.selector, other.labels)


class PodIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A pod as the terms of other pods see it, and its own anti-affinity terms."""

    namespace: str
    labels: Mapping[str, str]
    apart: tuple[AntiAffinityTerm, ...]

    def bars(self, other: "PodIdentity") -> bool:
        """Whether the two are never on one node: anti-affinity is symmetric, a term of either is enough."""
        return any(True for _ in self.barred_by(other))

    def barred_by(self, other: "PodIdentity") -> Iterator[str]:
        """`AntiAffinityTerm.by` of each term of either that keeps the two apart."""
        yield from (term.by for term in self.apart if term.selects(self.namespace, other))
        yield from (term.by for term in other.apart if term.selects(other.namespace, self))


def anti_affinity_terms(spec: JsonMapping, host: str) -> tuple[AntiAffinityTerm, ...]:
    """The supported terms of a pod spec; `host`: the label key of the hostname."""
    return tuple(
        _read_term(term) for term in required_terms(spec, "podAntiAffinity") if is_supported_term(term, host)
    )


def _read_term(term: JsonMapping) -> AntiAffinityTerm:
    return AntiAffinityTerm(
        selector=term.get("labelSelector"),
        namespaces=tuple(term.get("namespaces") or ()),
        everywhere=term.get("namespaceSelector") == {},
    )


def term_selects(term: JsonMapping, pod: PodIdentity, other: PodIdentity) -> bool:
    """Whether a term of a pod, of affinity or anti-affinity, selects another pod."""
    return _read_term(term).selects(pod.namespace, other)


def is_supported_term(term: JsonMapping, host: str) -> bool:
    """Whether a term is by hostname and selects pods by labels and named namespaces alone."""
    return (
        term.get("topologyKey") == host
        and not term.get("namespaceSelector")
        and not any(term.get(key) for key in _LABEL_KEY_FIELDS)
    )


def required_terms(spec: JsonMapping, kind: str) -> Sequence[JsonMapping]:
    """Those of `podAffinity` or `podAntiAffinity`."""
    return ((spec.get("affinity") or {}).get(kind) or {}).get(REQUIRED) or ()


def pod_identity(pod: JsonMapping, host: str) -> PodIdentity:
    """A pod object, or a template in a namespace of its own metadata."""
    apart = anti_affinity_terms(pod.get("spec") or {}, host)
    return PodIdentity(namespace=object_namespace(pod), labels=labels_of(pod), apart=apart)


def bound_pod_identity(pod: JsonMapping, host: str) -> PodIdentity:
    """A bound pod with all its required terms, which the scheduler also applies to new pods.

    The API server has added what `matchLabelKeys` name to the selectors. A namespaceSelector is taken to
    select all namespaces.
    """
    apart = []
    for term in required_terms(pod.get("spec") or {}, "podAntiAffinity"):
        key, everywhere = term.get("topologyKey", host), term.get("namespaceSelector") is not None
        apart.append(replace(_read_term(term), everywhere=everywhere, by="" if key == host else key))
    return replace(pod_identity(pod, host), apart=tuple(apart))


class TopologyDomains:
    """The nodes that share the value of a topology key."""

    def __init__(self, nodes: Iterable[JsonMapping]) -> None:
        """`nodes`: node objects."""
        self._labels = {name_of(node): labels_of(node) for node in nodes}
        self._sharing: dict[tuple[str, str], tuple[str, ...]] = {}

    def around(self, node: str, by: Iterable[str]) -> Iterator[str]:
        """The nodes in each domain of a node, by `AntiAffinityTerm.by`; none where it lacks the label."""
        for key in by:
            value = self._labels.get(node, {}).get(key)
            if not key:
                yield node
            elif value is not None:
                yield from self._with(key, value)

    def _with(self, key: str, value: str) -> tuple[str, ...]:
        if (key, value) not in self._sharing:
            names = (name for name, labels in self._labels.items() if labels.get(key) == value)
            self._sharing[key, value] = tuple(names)
        return self._sharing[key, value]


def selector_matches(selector: JsonMapping | None, labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector selects such labels: an empty one selects all, None selects nothing."""
    if selector is None:
        return False
    equal = all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())
    return equal and all(
        _requirement_holds(expression, labels) for expression in selector.get("matchExpressions") or ()
    )


def selector_values(selector: JsonMapping | None) -> Iterator[tuple[str, str]]:
    """Labels and values that a LabelSelector asks for."""
    yield from ((selector or {}).get("matchLabels") or {}).items()
    for expression in (selector or {}).get("matchExpressions") or ():
        yield from (
            (expression["key"], value)
            for value in expression.get("values") or ()
            if expression["operator"] == "In"
        )


def selector_keys(selector: JsonMapping | None) -> Iterator[str]:
    """The labels that a LabelSelector asks about."""
    yield from (selector or {}).get("matchLabels") or {}
    yield from (expression["key"] for expression in (selector or {}).get("matchExpressions") or ())


def label_selector_text(selector: JsonMapping | None) -> str:
    """A LabelSelector in words."""
    equal = [f"{key}={value}" for key, value in ((selector or {}).get("matchLabels") or {}).items()]
    others = (
        f"{expression['key']} {expression['operator']} {'/'.join(expression.get('values') or ())}".rstrip()
        for expression in (selector or {}).get("matchExpressions") or ()
    )
    return " and ".join((*equal, *others)) or ("no pod" if selector is None else "every pod")


def _requirement_holds(need: JsonMapping, labels: Mapping[str, str]) -> bool:
    present, values = need["key"] in labels, need.get("values") or ()
    match need["operator"]:
        case "Exists":
            return present
        case "DoesNotExist":
            return not present
        case "In":
            return present and labels[need["key"]] in values
    return not present or labels[need["key"]] not in values


# Pods and their tolerations.


PREEMPT_NEVER = "Never"
"""The preemptionPolicy of pods that preempt nothing, whatever their priority."""


class PodRequirements(msgspec.Struct, frozen=True, kw_only=True):
    """A member's request."""

    gpus: int
    """Counted GPUs: the effective request of its containers."""
    templates: tuple[str, ...]
    """ResourceClaimTemplates of which it gets a claim each."""
    claims: tuple[str, ...]
    """ResourceClaims that it names."""
    rule: NodeRule
    apart: tuple[AntiAffinityTerm, ...]
    tolerations: tuple[Toleration, ...]
    priority: int
    priority_class: str
    preempts: bool
    """Its preemptionPolicy is not Never; that of its class may be."""
    requests: Thousandths = MappingProxyType({})
    """What it requests of its node beside devices: CPU, memory, the pod itself."""

    @property
    def takes_devices(self) -> bool:
        """It has GPUs or a claim."""
        return bool(self.gpus or self.templates or self.claims)

    def may_use_same_nodes(self, other: "PodRequirements") -> bool:
        """Whether both may go to the same nodes."""
        return self.rule == other.rule and self.tolerations == other.tolerations


def read_pod_requirements(template: JsonMapping, labels: SchedulerLabels) -> PodRequirements:
    """What the pods of a template (or a pod) ask for. Raises Refused for a count or a rule that is none.

    Raises msgspec.ValidationError for a field of another type than core/v1 has it.
    """
    spec = template.get("spec") or {}
    rule = read_node_rule(spec)
    check_node_rule(rule)
    pod = convert_object(template, PodObject)
    try:
        gpus, beside = requested_devices(spec, labels.gpu), requests_beside_devices(spec, labels.gpu)
    except ValueError as error:
        raise Refused(f"its containers: {error}", nearest_fix="correct it") from error
    return PodRequirements(
        gpus=gpus,
        templates=tuple(filter(None, (claim.resource_claim_template_name for claim in pod.claims))),
        claims=tuple(filter(None, (claim.resource_claim_name for claim in pod.claims))),
        rule=rule,
        apart=anti_affinity_terms(spec, labels.host),
        tolerations=pod.spec.tolerations or (),
        priority=pod.spec.priority or 0,
        priority_class=pod.spec.priority_class_name or "",
        preempts=pod.spec.preemption_policy != PREEMPT_NEVER,
        requests=beside,
    )


def node_terms_of(pod: JsonMapping) -> tuple[NodeRule, tuple[Toleration, ...]]:
    """The rule of a pod for its node, and its tolerations. Raises msgspec.ValidationError."""
    spec = pod.get("spec") or {}
    tolerations = msgspec.convert(spec.get("tolerations") or (), tuple[Toleration, ...])
    return read_node_rule(spec), tolerations


def host_ports(spec: JsonMapping) -> Iterator[int]:
    """The ports of its node that a pod takes, by its spec.

    In the host's network, the API server gives a pod the host port of each container port.
    """
    for container in spec.get("containers") or ():
        for port in container.get("ports") or ():
            if found := port.get("hostPort") or (spec.get("hostNetwork") and port.get("containerPort")):
                yield found


def blocking_taints(node: JsonMapping, tolerations: tuple[Toleration, ...]) -> Iterator[str]:
    """Taints of a node that keep a pod off, as `key=value`."""
    for taint in (node.get("spec") or {}).get("taints") or ():
        if taint.get("effect") in ("NoSchedule", "NoExecute") and not any(
            toleration.covers(taint) for toleration in tolerations
        ):
            value = taint.get("value")
            yield f"{taint.get('key')}={value}" if value else str(taint.get("key"))
