"""The pods and nodes of gangs as values, and the names that mark them.

A pod belongs to a gang by the label `rackloom.dev/gang`. The annotation `rackloom.dev/gang-size` is the
number of pods to wait for: `18`, or `launcher=1,worker=18` for several groups (`GangSpec`). All pods of a
gang must declare the same. A segment is a number of members that share one NVLink clique. Without it the
whole gang shares one. Reserved spare trays count towards no ResourceQuota, because no pod runs on them. A
small gang may therefore keep only a few, and a larger one at most as many as it has members. An unreadable
declaration is refused with an example.

A `GangMember` is one pod: its gates, the tray for which it was ungated, whether it ended, and its rank
within its group (the completion or replica index that its controller wrote). Its rules for nodes and for
other pods are decoded once, when a decision first needs them.

A node is reserved for a gang by a NoSchedule taint with the UID of the GangPlan as value (`TrayNode`).
Jobs and MPIJobs, which own the pods, are in `core.cluster.gang_owners`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import msgspec
from msgspec.structs import replace

from rackloom.core.allocate.objects import NodeSelector, NodeSelectorRequirement, NodeSelectorTerm
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.nodes import Taint, taints_of
from rackloom.core.cluster.objects import (
    JOB,
    Condition,
    JsonMapping,
    Object,
    OwnerReference,
    annotations_of,
    condition_of,
    epoch_seconds,
    has_pod_ended,
    is_being_deleted,
    labels_of,
    name_of,
    namespace_of,
    not_ready_since,
    version_of,
)
from rackloom.core.cluster.pods import (
    GANG_LABEL,
    SIZE_ANNOTATION,
    TEMPLATE_GATE,
    PodObject,
    PodSpec,
    Toleration,
    is_bound_pod,
    read_pod,
)
from rackloom.core.cluster.scheduling import (
    CLASS_RESOURCE,
    NodeRule,
    PodIdentity,
    Thousandths,
    bound_pod_identity,
    pod_identity,
    read_node_rule,
    requested_devices,
    requests_beside_devices,
)
from rackloom.errors import Refused

# Names on pods, nodes and GangPlans. They are part of the public interface.


GANG_GATE = GANG_LABEL
"""The scheduling gate of a pod in a gang that is not placed yet."""
GANG_TAINT = GANG_LABEL
"""On reserved trays, with effect NoSchedule. Its value is the UID of the GangPlan."""
GANG_FINALIZER = GANG_LABEL
"""On a GangPlan while trays may be reserved for it."""
GROUP_LABEL = "rackloom.dev/gang-group"
"""On pods of gangs with several groups: the group of the pod."""
SEGMENT_ANNOTATION = "rackloom.dev/gang-segment"
"""The number of members of a group that share a clique. Without it the whole gang shares one."""
SPARES_ANNOTATION = "rackloom.dev/gang-spares"
"""The number of trays to reserve in each clique for members that lose their tray."""
TRAY_ANNOTATION = "rackloom.dev/gang-tray"
"""On a pod that was ungated: the node that it is pinned to."""
RELEASED_ANNOTATION = "rackloom.dev/gang-released"
"""On a pod that was ungated: the time (RFC 3339)."""
RANK_LABELS = (
    "batch.kubernetes.io/job-completion-index",
    "training.kubeflow.org/replica-index",
    "leaderworkerset.sigs.k8s.io/worker-index",
    "apps.kubernetes.io/pod-index",
)
"""Labels with the rank of a pod, by controller. Neighbours in rank become neighbours in the plan."""
WARNING_REASONS = ("DoesNotFit", "InvalidGang", "NotHeld", "TrayLost", "CannotBind", "TrayTaken")
"""Reasons of conditions of a GangPlan that need attention. The others report progress."""
DEFAULT_GROUP = "member"
"""The group of a gang that names none."""


class GangKey(msgspec.Struct, frozen=True, order=True):
    """A gang. Its pods are in one namespace and carry its name."""

    namespace: str
    name: str

    @property
    def full_name(self) -> str:
        """`namespace/name`: for messages, and the name of the gang in placement requests."""
        return f"{self.namespace}/{self.name}"


def gang_key_of(pod: JsonMapping) -> GangKey | None:
    """The gang of a pod as it was sent."""
    return _gang_key(namespace_of(pod), labels_of(pod), annotations_of(pod))


def gang_of(pod: PodObject) -> GangKey | None:
    """The gang of a pod."""
    return _gang_key(pod.metadata.namespace, pod.labels, pod.annotations)


def _gang_key(namespace: str | None, labels: Mapping[str, str], marks: Mapping[str, str]) -> GangKey | None:
    name = labels.get(GANG_LABEL)
    return GangKey(namespace or "", name) if name and SIZE_ANNOTATION in marks else None


# The declaration of a pod about its gang.


_GANG_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_MOST_MEMBERS = 4096
"""Members of a group: far above any rack, and small enough for one plan object."""
SPARES_OF_ANY_GANG = 4
"""Spare trays per clique that any gang may keep. A larger gang may keep as many as it has members."""
SIZE_EXAMPLE = f"write annotation {SIZE_ANNOTATION} as 18, or as launcher=1,worker=18"


class GangSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The declaration of a pod about its gang. All pods of a gang declare the same."""

    sizes: tuple[tuple[str, int], ...]
    """Groups in the order in which they were written, with the number of members."""
    segment: int | None = None
    spares: int = 0


def read_gang_spec(annotations: Mapping[str, str]) -> GangSpec:
    """Read the annotations of a pod. Raises Refused, with the right form."""
    segment, spares = annotations.get(SEGMENT_ANNOTATION), annotations.get(SPARES_ANNOTATION, "0")
    sizes = _read_sizes(annotations.get(SIZE_ANNOTATION, ""))
    # Reserved trays count towards no ResourceQuota, so a small gang may keep only a few.
    most = min(max(SPARES_OF_ANY_GANG, sum(size for _, size in sizes)), _MOST_MEMBERS)
    return GangSpec(
        sizes=sizes,
        segment=None if segment is None else _read_number(SEGMENT_ANNOTATION, segment, least=1),
        spares=_read_number(SPARES_ANNOTATION, spares, least=0, most=most),
    )


def gang_group_of(labels: Mapping[str, str]) -> str:
    """The group of a pod."""
    return labels.get(GROUP_LABEL, DEFAULT_GROUP)


def check_gang_name(gang: str) -> None:
    """Raise Refused for a gang that cannot be the name of an object."""
    if not _GANG_NAME.fullmatch(gang):
        fix = f"use lower-case letters, digits and '-' in label {GANG_LABEL}"
        raise Refused(f"gang {gang!r} is no object name", nearest_fix=fix)


def _read_sizes(text: str) -> tuple[tuple[str, int], ...]:
    if "=" not in text:
        return ((DEFAULT_GROUP, _read_number(SIZE_ANNOTATION, text, least=1)),)
    pairs = [part.strip().partition("=") for part in text.split(",")]
    sizes = {name.strip(): _read_number(SIZE_ANNOTATION, size, least=1) for name, _, size in pairs}
    if len(sizes) < len(pairs) or not all(map(_GANG_NAME.fullmatch, sizes)):
        raise Refused(f"annotation {SIZE_ANNOTATION} is {text!r}", nearest_fix=SIZE_EXAMPLE)
    return tuple(sizes.items())


def _read_number(annotation: str, text: str, *, least: int, most: int = _MOST_MEMBERS) -> int:
    text = text.strip()
    # More than nine digits are beyond any limit, and Python refuses to convert thousands of them.
    is_number = text.isascii() and text.isdecimal() and len(text) <= 9
    if not (is_number and least <= int(text) <= most):
        fix = SIZE_EXAMPLE if annotation == SIZE_ANNOTATION else f"use a number from {least} to {most}"
        raise Refused(f"annotation {annotation} is {text!r}", nearest_fix=fix)
    return int(text)


# The scheduling rules of a pod.


HOST_KEY = SchedulerLabels().host
"""The topology key of the host, by which a pod requests a node without certain others."""
_CONDITION_TAINT_PREFIX = "node.kubernetes.io/"
"""Taints that repeat node conditions. The API server adds tolerations for some of them to each pod."""


class NodeRequirements(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rules of members for their node."""

    rule: NodeRule = NodeRule()
    tolerations: tuple[Toleration, ...] = ()

    @property
    def text(self) -> str:
        """Canonical JSON, equal for equal rules, or "" without any rule."""
        return "" if self == NodeRequirements() else msgspec.json.encode(self, order="deterministic").decode()


class PodConstraints(msgspec.Struct, frozen=True):
    """All that decides whether a pod may share a tray with another."""

    identity: PodIdentity
    ports: frozenset[tuple[str, int]]
    """Host ports by protocol. A node has each once."""

    def barred_by(self, other: "PodConstraints") -> Iterator[str]:
        """The topology key of each reason why they may not share a tray, with "" for the node itself."""
        if not self.ports.isdisjoint(other.ports):
            yield ""
        yield from self.identity.barred_by(other.identity)


def node_requirements(spec: PodSpec) -> NodeRequirements:
    """The rules of a pod for its node. Raises msgspec.ValidationError as `read_node_rule` does."""
    # A toleration of a reservation, or of a node condition, does not show which nodes the pod is for.
    kept = (
        toleration
        for toleration in spec.tolerations or ()
        if not toleration.key.startswith(_CONDITION_TAINT_PREFIX) and toleration.key != GANG_TAINT
    )
    near = {term.topology_key for term in spec.near}
    return NodeRequirements(_require_labels(read_node_rule(spec), sorted(near)), tuple(dict.fromkeys(kept)))


def constraints_of_bound(pods: Iterable[PodObject], *, all_pods: bool) -> list[tuple[str, PodConstraints]]:
    """The nodes and constraints of bound pods that have not ended.

    Without `all_pods`, only pods with required anti-affinity: each of them may keep any pod off.
    """
    return [
        (pod.node, _constraints(pod, bound_pod_identity(pod, HOST_KEY)))
        for pod in pods
        if is_bound_pod(pod) and (all_pods or pod.spec.apart)
    ]


def _constraints(pod: PodObject, identity: PodIdentity) -> PodConstraints:
    ports = (port for container in pod.spec.containers or () for port in container.ports or ())
    return PodConstraints(
        identity, frozenset((port.protocol, port.host_port) for port in ports if port.host_port)
    )


def _require_labels(rule: NodeRule, keys: Sequence[str]) -> NodeRule:
    """The rule, for nodes that also have these labels: affinity holds on no node without the label."""
    if not keys:
        return rule
    has = tuple(NodeSelectorRequirement(key=key, operator="Exists") for key in keys)
    if rule.affinity is None:
        only = NodeSelectorTerm(match_expressions=has)
        return replace(rule, affinity=NodeSelector(node_selector_terms=(only,)))
    terms = tuple(
        # An empty term selects no node, and must stay empty.
        replace(term, match_expressions=(*term.match_expressions, *has))
        if term != NodeSelectorTerm()
        else term
        for term in rule.affinity.node_selector_terms
    )
    return replace(rule, affinity=NodeSelector(node_selector_terms=terms))


# The pods.


GPU_RESOURCE = "nvidia.com/gpu"


class GangMember(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One pod of a gang."""

    pod: PodObject
    namespace: str
    ended: bool
    is_being_deleted: bool
    unbound_message: str = ""
    """The report of kube-scheduler about a pod that it did not bind."""
    is_unschedulable: bool = False
    """kube-scheduler found no node for it. It does not try, and reports nothing, while a gate is left."""
    gpus: int = 0
    """GPUs that its containers request in effect (`nvidia.com/gpu`), without claimed ones."""
    class_resources: tuple[str, ...] = ()
    """Extended resources of its containers that are backed by a device class (KEP-5004)."""

    @property
    def name(self) -> str:
        """Of the pod."""
        return self.pod.metadata.name

    @property
    def uid(self) -> str:
        """Of the pod."""
        return self.pod.metadata.uid

    @property
    def annotations(self) -> Mapping[str, str]:
        """Of the pod."""
        return self.pod.annotations

    @cached_property
    def node_rules(self) -> NodeRequirements:
        """Its rules for its node, and its pin once it was ungated."""
        return node_requirements(self.pod.spec)

    @cached_property
    def constraints(self) -> PodConstraints:
        """Its rules for the pods on its tray, without its spread."""
        return _constraints(self.pod, pod_identity(self.pod, HOST_KEY))

    @property
    def requests(self) -> Thousandths:
        """The amounts that it requests of its node beside devices."""
        return requests_beside_devices(self.pod.spec, GPU_RESOURCE)

    @property
    def group(self) -> str:
        """Its group in the gang."""
        return gang_group_of(self.pod.labels)

    @property
    def node(self) -> str | None:
        """The node that it is bound to."""
        return self.pod.spec.node_name or None

    @property
    def gate(self) -> int | None:
        """The index of the gang's gate among its gates."""
        return self.pod.gates.index(GANG_GATE) if GANG_GATE in self.pod.gates else None

    @property
    def foreign_gates(self) -> tuple[str, ...]:
        """Gates of other programs, such as queues."""
        return tuple(name for name in self.pod.gates if name not in (GANG_GATE, TEMPLATE_GATE))

    @property
    def tray(self) -> str | None:
        """The tray for which it was ungated, or None while it is gated, or if it never was."""
        return None if self.gate is not None else self.annotations.get(TRAY_ANNOTATION)

    @property
    def released_at(self) -> float | None:
        """When it was ungated, in seconds since the epoch."""
        time = self.annotations.get(RELEASED_ANNOTATION)
        return None if self.tray is None or time is None else epoch_seconds(time)

    @property
    def owner(self) -> OwnerReference | None:
        """The controller that replaces it when it is deleted."""
        return self.pod.owner

    @property
    def is_bare(self) -> bool:
        """It has no owner."""
        return not self.pod.metadata.owner_references

    @property
    def is_done(self) -> bool:
        """It succeeded on its own. A pod that is being deleted may succeed too, and is still replaced."""
        return self.pod.status.phase == "Succeeded" and not self.is_being_deleted

    @property
    def job(self) -> OwnerReference | None:
        """Its owner if that is a Job."""
        return self.owner if self.owner is not None and self.owner.is_of(JOB) else None

    @property
    def rank(self) -> tuple[int, str]:
        """The order of members of a group."""
        ranks = (self.pod.labels.get(label, "") for label in RANK_LABELS)
        return next((int(rank) for rank in ranks if rank.isdecimal()), 0), self.name


def read_member(obj: Object) -> GangMember:
    """Read a pod. Raises Refused for an amount of GPUs that is no number."""
    pod, scheduled = read_pod(obj), condition_of(obj, "PodScheduled")
    unbound = scheduled if scheduled is not None and scheduled.status == "False" else Condition(type="")
    try:
        gpus = requested_devices(pod.spec, GPU_RESOURCE)
    except ValueError as error:
        raise Refused(f"pod {name_of(obj)}: {error}", nearest_fix="correct it") from error
    containers = (*(pod.spec.containers or ()), *(pod.spec.init_containers or ()))
    resources = (container.resources for container in containers if container.resources is not None)
    names = {
        name for resource in resources for name in (*(resource.limits or ()), *(resource.requests or ()))
    }
    return GangMember(
        pod=pod,
        namespace=obj["metadata"]["namespace"],
        ended=has_pod_ended(obj),
        is_being_deleted=is_being_deleted(obj),
        unbound_message=unbound.message or unbound.reason,
        is_unschedulable=unbound.reason == "Unschedulable",
        gpus=gpus,
        class_resources=tuple(sorted(name for name in names if name.startswith(CLASS_RESOURCE))),
    )


# Nodes as a gang sees them: whether they are ready, and for which plans they are reserved.


class TrayNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that is a gang's tray, or was."""

    name: str
    resource_version: str
    taints: tuple[Taint, ...] = ()
    not_ready_since: float | None = None
    """Seconds since the epoch, or None while it is ready."""

    @property
    def holders(self) -> tuple[str, ...]:
        """UIDs of the GangPlans for which it is reserved: at most one, unless a person added one."""
        return tuple(taint.value for taint in self.taints if taint.key == GANG_TAINT)

    def is_lost(self, now: float, after: float) -> bool:
        """Whether it has not been ready for `after` seconds."""
        return self.not_ready_since is not None and now - self.not_ready_since >= after


def read_tray_node(obj: JsonMapping) -> TrayNode:
    """Read a node."""
    return TrayNode(
        name=name_of(obj),
        resource_version=version_of(obj),
        taints=taints_of(obj),
        not_ready_since=not_ready_since(obj),
    )


def reserving_plans(node: JsonMapping) -> tuple[str, ...]:
    """UIDs of the plans that have a taint on a node."""
    return read_tray_node(node).holders
