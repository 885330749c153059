"""A pod's node requirements: amounts, devices, node selection, tolerations and anti-affinity (core/v1).

`read_pod_requirements` reads a pod or a pod template once.

- Node rules: nodeSelector and required node affinity, evaluated by the same code as the node selectors of
  devices in `core.allocate`.
- Taints: NoSchedule and NoExecute keep a pod off unless a toleration covers them. Numeric operators (Lt,
  Gt) cover nothing here.
- Anti-affinity: required terms by hostname, with label selectors and namespaces. `PodIdentity` is a pod as
  other pods see it. Anti-affinity is symmetric (`bars`), as in kube-scheduler. For pods that already run,
  every required term counts, also by zone or clique (`TopologyDomains` finds the nodes around), and a
  namespaceSelector is taken to select all namespaces.

Preferences are not read. Rules that cannot be honoured are reported in `plan_notes`. Raises Refused, or
msgspec.ValidationError for a field of the wrong type.

The effective request of a pod follows kube-scheduler's NodeResourcesFit, for every resource alike:

1. A limit without a request is a request.
2. Sidecars (init containers that restart always) run from their turn on. Any other init container runs beside
   the sidecars before it, and ends before the next one starts.
3. The request is the larger of all containers with all sidecars, and of each init container with the sidecars
   before it.
4. The requests of the pod as a whole replace that sum. Overhead and the pod itself are added.

Sources: Kubernetes documentation, "Init Containers" and "Sidecar Containers" (resource sharing within
containers), "Pod-level resources", "Pod Overhead".

An amount that is no quantity raises ValueError. Nothing is guessed for it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from math import ceil
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import Amount, Node, NodeSelector, ObjectMeta
from rackloom.core.allocate.pools import MalformedNodeSelector, node_selector_matches
from rackloom.core.allocate.quantity import Quantity
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.nodes import NodeObject, read_node
from rackloom.core.cluster.pods import (
    ContainerResources,
    LabelRequirement,
    LabelSelector,
    PodAffinityTerm,
    PodObject,
    PodSpec,
    Toleration,
)
from rackloom.errors import Refused

# Amounts of resources.


ResourceAmounts = Counter[str]
"""By resource: cores, bytes, or pieces. The values are fractions. A sum or a maximum drops zeros."""
Thousandths = Mapping[str, int]
"""By resource: thousandths of its unit. Whole numbers, since a site has many pods."""
PODS_RESOURCE = "pods"
CPU_RESOURCE, MEMORY_RESOURCE = "cpu", "memory"
NO_AMOUNTS = ResourceAmounts()
CLASS_RESOURCE = "deviceclass.resource.kubernetes.io/"
"""Prefix of the resource that counts devices of a class: a claim serves them (KEP-5004)."""
_MOST_REMEMBERED = 10_000
_encode = msgspec.json.Encoder().encode
_amounts: dict[bytes, Thousandths] = {}
"""By the JSON of the parts that decide them: most pods of a site are written alike, and most nodes."""


def _remembered(written: bytes, amounts: Callable[[], ResourceAmounts]) -> Thousandths:
    if written not in _amounts:
        if len(_amounts) >= _MOST_REMEMBERED:
            _amounts.clear()
        _amounts[written] = in_thousandths(amounts())
    return _amounts[written]


def effective_requests(spec: PodSpec) -> Thousandths:
    """The request of a pod, or of a template. Raises ValueError for an unreadable amount."""
    parts = (spec.init_containers, spec.containers, spec.resources, spec.overhead)
    return _remembered(_encode(parts), lambda: pod_requests(spec))


def pod_requests(spec: PodSpec) -> ResourceAmounts:
    """The same as exact amounts. Raises ValueError for an unreadable amount."""
    most, lasting = NO_AMOUNTS, NO_AMOUNTS
    for container in spec.init_containers or ():
        here = lasting + _requests(container.resources)
        most = most | here
        if container.restart_policy == "Always":
            lasting = here
    together = sum((_requests(container.resources) for container in spec.containers or ()), lasting)
    whole = ResourceAmounts({**(most | together), **_requests(spec.resources)})
    return whole + _parse_amounts(spec.overhead or {}) + ResourceAmounts({PODS_RESOURCE: 1})


def requested_devices(spec: PodSpec, resource: str) -> int:
    """How many devices of an extended resource a pod requests, such as GPUs by `nvidia.com/gpu`.

    Raises ValueError for an unreadable amount, and for a part of a device.
    """
    return effective_requests(spec).get(resource, 0) // 1000


def requests_beside_devices(spec: PodSpec, gpu_resource: str) -> Thousandths:
    """The amounts that a pod requests beside devices: CPU, memory, the pod itself. Raises ValueError."""
    return {
        name: amount
        for name, amount in effective_requests(spec).items()
        if amount and name != gpu_resource and not name.startswith(CLASS_RESOURCE)
    }


def allocatable_of_node(node: NodeObject) -> ResourceAmounts:
    """The amounts that pods may request of a node. It has nothing of a resource that it does not name.

    Raises ValueError for an unreadable amount.
    """
    return _parse_amounts(node.amounts)


def node_amounts(node: NodeObject) -> Thousandths:
    """The same in the units of requests. Raises ValueError."""
    return _remembered(_encode(node.amounts), lambda: allocatable_of_node(node))


def in_thousandths(amounts: Mapping[str, Fraction | int]) -> Thousandths:
    """Rounded up, as kube-scheduler rounds CPUs to thousandths and bytes to whole ones."""
    return {name: ceil(amount * 1000) for name, amount in amounts.items()}


def _requests(resources: ContainerResources | None) -> ResourceAmounts:
    if resources is None:
        return NO_AMOUNTS
    return _parse_amounts({**(resources.limits or {}), **(resources.requests or {})})


def _parse_amounts(written: Mapping[str, Amount]) -> ResourceAmounts:
    return ResourceAmounts({name: _parse_amount(name, value) for name, value in written.items()})


@lru_cache(maxsize=_MOST_REMEMBERED)
def _parse_amount(name: str, value: Amount) -> Fraction:
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
    """The required labels and name of a node."""

    labels: Mapping[str, str] = {}
    """Each exactly so: the nodeSelector."""
    affinity: NodeSelector | None = None
    """Terms of which one must hold, or None if no affinity is required."""


def read_node_rule(spec: PodSpec) -> NodeRule:
    """The rule of a pod spec. Raises msgspec.ValidationError for a field that core/v1 does not have."""
    nodes = spec.affinity and spec.affinity.node_affinity
    required = nodes and nodes.required
    return NodeRule(
        labels=spec.node_selector or {},
        affinity=None if required is None else msgspec.convert(required, NodeSelector),
    )


def check_node_rule(rule: NodeRule) -> None:
    """Raises Refused for terms that the API server would not take."""
    try:
        list(unmet_requirements(rule, read_node({"metadata": {"name": ""}})))
    except MalformedNodeSelector as error:
        raise Refused(
            f"its required node affinity cannot be read: {error}",
            nearest_fix="compare it with `kubectl explain pod.spec.affinity.nodeAffinity`",
        ) from error


def unmet_requirements(rule: NodeRule, node: NodeObject) -> Iterator[str]:
    """The parts of the rule that a node does not meet, in words. Raises MalformedNodeSelector."""
    labels = node.labels
    yield from (f"not {key}={value}" for key, value in rule.labels.items() if labels.get(key) != value)
    if rule.affinity is not None and not node_selector_matches(allocator_node(node), rule.affinity):
        text = _node_selector_text(rule.affinity)
        yield f"not {text}" if text else "its node affinity has no term"


def allocator_node(node: NodeObject) -> Node:
    """A node as the allocator takes it: its name and its labels."""
    return Node(metadata=ObjectMeta(name=node.name, labels=node.labels))


def is_node_selected(spec: PodSpec, node: NodeObject) -> bool:
    """Whether a node meets a pod spec's nodeSelector and required node affinity.

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


class AntiAffinityTerm(msgspec.Struct, frozen=True, kw_only=True):
    """A required anti-affinity term of a pod: no selected pod is on a node with it."""

    selector: LabelSelector | None
    """None selects no pod."""
    namespaces: tuple[str, ...]
    """Namespaces of the selected pods. Empty means that of the pod itself."""
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


def anti_affinity_terms(spec: PodSpec, host: str) -> tuple[AntiAffinityTerm, ...]:
    """The supported terms of a pod spec. `host`: the label key of the hostname."""
    return tuple(_read_term(term) for term in spec.apart if is_supported_term(term, host))


def _read_term(term: PodAffinityTerm) -> AntiAffinityTerm:
    return AntiAffinityTerm(
        selector=term.label_selector,
        namespaces=term.namespaces or (),
        everywhere=term.namespace_selector == LabelSelector(),
    )


def term_selects(term: PodAffinityTerm, pod: PodIdentity, other: PodIdentity) -> bool:
    """Whether a term of a pod, of affinity or anti-affinity, selects another pod."""
    return _read_term(term).selects(pod.namespace, other)


def is_supported_term(term: PodAffinityTerm, host: str) -> bool:
    """Whether a term is by hostname and selects pods by labels and named namespaces alone."""
    is_by_name = term.namespace_selector in (None, LabelSelector())
    return (
        term.topology_key == host and is_by_name and not (term.match_label_keys or term.mismatch_label_keys)
    )


def pod_identity(pod: PodObject, host: str) -> PodIdentity:
    """A pod, or a template in the namespace of its metadata."""
    apart = anti_affinity_terms(pod.spec, host)
    return PodIdentity(namespace=pod.namespace, labels=pod.labels, apart=apart)


def bound_pod_identity(pod: PodObject, host: str) -> PodIdentity:
    """A bound pod with all its required terms, which the scheduler also applies to new pods.

    The API server has added the labels that `matchLabelKeys` name to the selectors. A namespaceSelector is
    taken to select all namespaces.
    """
    apart = []
    for term in pod.spec.apart:
        key, everywhere = term.topology_key, term.namespace_selector is not None
        apart.append(replace(_read_term(term), everywhere=everywhere, by="" if key == host else key))
    return replace(pod_identity(pod, host), apart=tuple(apart))


class TopologyDomains:
    """The nodes that share the value of a topology key."""

    def __init__(self, nodes: Iterable[NodeObject]) -> None:
        self._labels = {node.name: node.labels for node in nodes}
        self._sharing: dict[tuple[str, str], tuple[str, ...]] = {}

    def around(self, node: str, by: Iterable[str]) -> Iterator[str]:
        """The nodes in each domain of a node, by `AntiAffinityTerm.by`. A missing label gives no nodes."""
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


def selector_matches(selector: LabelSelector | None, labels: Mapping[str, str]) -> bool:
    """Whether a LabelSelector selects such labels: an empty one selects all, None selects nothing."""
    if selector is None:
        return False
    equal = all(labels.get(key) == value for key, value in (selector.match_labels or {}).items())
    return equal and all(_requirement_holds(need, labels) for need in selector.match_expressions or ())


def selector_values(selector: LabelSelector) -> Iterator[tuple[str, str]]:
    """Labels and values that a LabelSelector requires."""
    yield from (selector.match_labels or {}).items()
    for need in selector.match_expressions or ():
        yield from ((need.key, value) for value in need.values or () if need.operator == "In")


def selector_keys(selector: LabelSelector | None) -> Iterator[str]:
    """The labels that a LabelSelector reads."""
    if selector is not None:
        yield from selector.match_labels or {}
        yield from (need.key for need in selector.match_expressions or ())


def label_selector_text(selector: LabelSelector | None) -> str:
    """A LabelSelector in words."""
    if selector is None:
        return "no pod"
    equal = [f"{key}={value}" for key, value in (selector.match_labels or {}).items()]
    others = (
        f"{need.key} {need.operator} {'/'.join(need.values or ())}".rstrip()
        for need in selector.match_expressions or ()
    )
    return " and ".join((*equal, *others)) or "every pod"


def _requirement_holds(need: LabelRequirement, labels: Mapping[str, str]) -> bool:
    present, values = need.key in labels, need.values or ()
    match need.operator:
        case "Exists":
            return present
        case "DoesNotExist":
            return not present
        case "In":
            return present and labels[need.key] in values
    return not present or labels[need.key] not in values


# Pods and their tolerations.


PREEMPT_NEVER = "Never"
"""The preemptionPolicy of pods that preempt nothing, regardless of their priority."""


class PodRequirements(msgspec.Struct, frozen=True, kw_only=True):
    """A member's request."""

    gpus: int
    """Counted GPUs: the effective request of its containers."""
    templates: tuple[str, ...]
    """ResourceClaimTemplates that each give it a claim."""
    claims: tuple[str, ...]
    """ResourceClaims that it names."""
    rule: NodeRule
    apart: tuple[AntiAffinityTerm, ...]
    tolerations: tuple[Toleration, ...]
    priority: int
    priority_class: str
    preempts: bool
    """Its preemptionPolicy is not Never. That of its class may be."""
    requests: Thousandths = MappingProxyType({})
    """The amounts that it requests of its node beside devices: CPU, memory, the pod itself."""

    @property
    def takes_devices(self) -> bool:
        """It has GPUs or a claim."""
        return bool(self.gpus or self.templates or self.claims)

    def may_use_same_nodes(self, other: "PodRequirements") -> bool:
        """Whether both may go to the same nodes."""
        return self.rule == other.rule and self.tolerations == other.tolerations


def read_pod_requirements(pod: PodObject, labels: SchedulerLabels) -> PodRequirements:
    """The requirements of a pod, or of a template. Raises Refused for an unreadable count or rule.

    Raises msgspec.ValidationError for a node affinity with a field that core/v1 does not have.
    """
    spec = pod.spec
    rule = read_node_rule(spec)
    check_node_rule(rule)
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
        tolerations=spec.tolerations or (),
        priority=spec.priority or 0,
        priority_class=spec.priority_class_name or "",
        preempts=spec.preemption_policy != PREEMPT_NEVER,
        requests=beside,
    )


def host_ports(spec: PodSpec) -> Iterator[int]:
    """The ports of its node that a pod takes, by its spec.

    In the host's network, the API server gives a pod the host port of each container port.
    """
    for container in spec.containers or ():
        for port in container.ports or ():
            if found := port.host_port or (spec.host_network and port.container_port):
                yield found
