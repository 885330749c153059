"""Pods, claims and claim templates as typed values, and the labels that admission puts on pods.

Only the fields that decisions read are declared. All others are ignored. The API server writes an empty
list as a missing field or as null, so lists default to None. The three served versions of
resource.k8s.io differ in a claim's requests only. Classes are read from those of v1.

The scheduling gate in this module holds a pod with a claim template that does not exist yet. The gate of
gangs is in `core.cluster.gang_objects`.
"""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from rackloom.core.allocate.objects import Amount, convert_object
from rackloom.core.cluster.names import DAEMON_CONTAINER
from rackloom.core.cluster.objects import (
    ENDED_PHASES,
    JsonMapping,
    OwnerReference,
    PatchOperation,
    add_operation,
    epoch_seconds,
    namespace_of,
)
from rackloom.errors import Refused

# Labels, a condition and a scheduling gate that admission writes on pods.


WATCHED_LABEL = "rackloom.dev/claim-admission"
"""On pods that claim a channel, or were gated: the pods that the gate controller follows."""
WATCHED_VALUE = "true"
CHANNEL_LABEL = "rackloom.dev/channel-template"
"""On pods that claim a channel. Its value identifies the template, and so the ComputeDomain."""
GANG_LABEL = "rackloom.dev/gang"
"""On pods that are placed together. The gang controller chooses their clique."""
SIZE_ANNOTATION = "rackloom.dev/gang-size"
"""On every pod of a gang: `18`, or `launcher=1,worker=18`."""
KUEUE_WORKLOAD_LABEL = "rackloom.dev/kueue-workload"
"""On the pods of a workload of Kueue that was admitted with a plan: its UID."""
CHANNEL_CONDITION = "rackloom.dev/ChannelClaim"
"""A pod condition: False if the pod can never get the channel that it claims."""
TEMPLATE_GATE = "rackloom.dev/claim-template"
"""The scheduling gate of a pod with a claim template that does not exist yet."""
_LONGEST_LABEL_VALUE = 63
"""Characters of a label's value. A template's name may have 253."""
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
"""The hard rules of node and pod affinity."""
NodeTermField = Literal["matchExpressions", "matchFields"]
"""Lists of requirements in a term of a node selector: on labels, or on the name."""


def channel_label(template: str) -> str:
    """The value of CHANNEL_LABEL for a channel of this template: its name, or a hash of a long one."""
    if len(template) <= _LONGEST_LABEL_VALUE:
        return template
    return f"sha256-{hashlib.sha256(template.encode()).hexdigest()[:48]}"


class ApiStruct(msgspec.Struct, frozen=True, kw_only=True, rename="camel", gc=False):
    """The base of all shapes. The API server writes an empty list as a missing field, or as null.

    JSON has no cycles, so the garbage collector does not visit them: a site has many.
    """


class OpaqueParameters(ApiStruct, frozen=True, kw_only=True):
    """A driver's own settings. `parameters` is any JSON."""

    driver: str
    parameters: Any = None


class ClaimDeviceConfig(ApiStruct, frozen=True, kw_only=True):
    """One entry of `devices.config`."""

    opaque: OpaqueParameters | None = None


class ExactRequest(ApiStruct, frozen=True, kw_only=True):
    """A request for devices of one class."""

    device_class_name: str = ""


class ClaimRequestEntry(ApiStruct, frozen=True, kw_only=True):
    """One entry of `devices.requests` in resource.k8s.io/v1. Older versions have no `exactly`."""

    exactly: ExactRequest | None = None


class ClaimDevices(ApiStruct, frozen=True, kw_only=True):
    """The devices that a claim requests."""

    requests: tuple[ClaimRequestEntry, ...] | None = None
    config: tuple[ClaimDeviceConfig, ...] | None = None


class ClaimSpec(ApiStruct, frozen=True, kw_only=True):
    """The spec of a claim, and `spec.spec` of a template."""

    devices: ClaimDevices | None = None

    @property
    def configs(self) -> tuple[ClaimDeviceConfig, ...]:
        """Its configs in order."""
        return (self.devices.config if self.devices else None) or ()

    @property
    def classes(self) -> frozenset[str]:
        """The device classes that it requests, without alternatives (`firstAvailable`)."""
        requests = (self.devices.requests if self.devices else None) or ()
        return frozenset(request.exactly.device_class_name for request in requests if request.exactly)


class ClaimObject(ApiStruct, frozen=True, kw_only=True):
    """A ResourceClaim."""

    spec: ClaimSpec


class ClaimTemplateSpec(ApiStruct, frozen=True, kw_only=True):
    """Of a ResourceClaimTemplate."""

    spec: ClaimSpec


class ClaimTemplateObject(ApiStruct, frozen=True, kw_only=True):
    """A ResourceClaimTemplate."""

    spec: ClaimTemplateSpec


class NameReference(ApiStruct, frozen=True, kw_only=True):
    """A reference by name: a scheduling gate, or a claim in a container's resources."""

    name: str


class PodClaimReference(ApiStruct, frozen=True, kw_only=True):
    """One entry of a pod's `resourceClaims`."""

    name: str = ""
    resource_claim_template_name: str | None = None
    resource_claim_name: str | None = None


class ContainerResources(ApiStruct, frozen=True, kw_only=True):
    """Of a container, or of a pod as a whole."""

    claims: tuple[NameReference, ...] | None = None
    limits: Mapping[str, Amount] | None = None
    requests: Mapping[str, Amount] | None = None


class ContainerPort(ApiStruct, frozen=True, kw_only=True):
    """A port. A node has each host port once."""

    host_port: int | None = None
    container_port: Any = None
    protocol: Any = "TCP"


class PodContainer(ApiStruct, frozen=True, kw_only=True):
    """One container."""

    name: str = ""
    resources: ContainerResources | None = None
    ports: tuple[ContainerPort, ...] | None = None
    restart_policy: str | None = None

    @property
    def claims(self) -> frozenset[str]:
        """Names of the pod's claims that it uses."""
        return frozenset(claim.name for claim in (self.resources.claims if self.resources else None) or ())


class SelectorRequirement(ApiStruct, frozen=True, kw_only=True):
    """One expression of a node selector."""

    key: str
    operator: str = ""
    values: tuple[str, ...] | None = None


class LabelRequirement(ApiStruct, frozen=True, kw_only=True):
    """One expression of a label selector."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] | None = None


class LabelSelector(ApiStruct, frozen=True, kw_only=True):
    """All of its requirements hold for the objects that it selects."""

    match_labels: Mapping[str, str] | None = None
    match_expressions: tuple[LabelRequirement, ...] | None = None


class NodeAffinityTerm(ApiStruct, frozen=True, kw_only=True):
    """A term of a node selector: all its expressions together."""

    match_expressions: tuple[SelectorRequirement, ...] | None = None
    match_fields: tuple[SelectorRequirement, ...] | None = None

    @property
    def is_empty(self) -> bool:
        """An empty term selects no node."""
        return not self.match_expressions and not self.match_fields


class RequiredNodes(ApiStruct, frozen=True, kw_only=True):
    """Terms of which one must hold."""

    node_selector_terms: tuple[NodeAffinityTerm, ...] | None = None


class PreferredNodes(ApiStruct, frozen=True, kw_only=True):
    """A preference for nodes."""

    preference: NodeAffinityTerm


class NodeAffinity(ApiStruct, frozen=True, kw_only=True):
    """The nodes that a pod must or should go to."""

    required: Mapping[str, Any] | None = msgspec.field(default=None, name=REQUIRED)
    """`RequiredNodes` as written: a rule with a field that is not known here is no weaker rule."""
    preferred: tuple[PreferredNodes, ...] | None = msgspec.field(
        default=None, name="preferredDuringSchedulingIgnoredDuringExecution"
    )

    def __post_init__(self) -> None:
        """Raise ValueError for a rule of another shape. msgspec adds the path to here."""
        try:
            _ = self.terms
        except msgspec.ValidationError as error:
            raise ValueError(str(error).replace("`$", f"`$.{REQUIRED}")) from error

    @property
    def terms(self) -> tuple[NodeAffinityTerm, ...]:
        """The terms of which one must hold."""
        return convert_object(self.required or {}, RequiredNodes).node_selector_terms or ()


class PodAffinityTerm(ApiStruct, frozen=True, kw_only=True):
    """The pods to be near to, and the meaning of "near"."""

    topology_key: str
    label_selector: LabelSelector | None = None
    namespaces: tuple[str, ...] | None = None
    namespace_selector: LabelSelector | None = None
    match_label_keys: tuple[str, ...] | None = None
    mismatch_label_keys: tuple[str, ...] | None = None


class PreferredPods(ApiStruct, frozen=True, kw_only=True):
    """A preference for nearness."""

    pod_affinity_term: PodAffinityTerm


class PodAffinity(ApiStruct, frozen=True, kw_only=True):
    """The pods that a pod must or should be near to."""

    required: tuple[PodAffinityTerm, ...] | None = msgspec.field(default=None, name=REQUIRED)
    preferred: tuple[PreferredPods, ...] | None = msgspec.field(
        default=None, name="preferredDuringSchedulingIgnoredDuringExecution"
    )


class PodAffinityRules(ApiStruct, frozen=True, kw_only=True):
    """The rules for the nodes that a pod may go to."""

    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


class TopologySpread(ApiStruct, frozen=True, kw_only=True):
    """How far a pod's kind may be uneven over the domains of a key."""

    topology_key: str
    max_skew: int | None = None
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] | None = None
    label_selector: LabelSelector | None = None


Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
"""The range of a priority."""
TaintEffect = Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"]


class Toleration(msgspec.Struct, frozen=True, rename="camel", gc=False):
    """As in core/v1. One that compares numbers (`Lt` and `Gt`, alpha there) covers nothing here."""

    key: str = ""
    operator: Literal["", "Equal", "Exists", "Lt", "Gt"] = "Equal"
    value: str = ""
    effect: TaintEffect = ""


class PodSpec(ApiStruct, frozen=True, kw_only=True):
    """The fields of a pod's spec that concern its node and its claims."""

    containers: tuple[PodContainer, ...] | None = None
    init_containers: tuple[PodContainer, ...] | None = None
    resource_claims: tuple[PodClaimReference, ...] | None = None
    scheduling_gates: tuple[NameReference, ...] | None = None
    affinity: PodAffinityRules | None = None
    node_selector: Mapping[str, str] | None = None
    node_name: str | None = None
    host_network: Any = None
    tolerations: tuple[Toleration, ...] | None = None
    topology_spread_constraints: tuple[TopologySpread, ...] | None = None
    resources: ContainerResources | None = None
    overhead: Mapping[str, Amount] | None = None
    priority: Int32 | None = None
    priority_class_name: str | None = None
    preemption_policy: Literal["Never", "PreemptLowerPriority"] | None = None

    @property
    def near(self) -> tuple[PodAffinityTerm, ...]:
        """The required terms of its affinity to pods."""
        return ((self.affinity and self.affinity.pod_affinity) or PodAffinity()).required or ()

    @property
    def apart(self) -> tuple[PodAffinityTerm, ...]:
        """The required terms of its anti-affinity."""
        return ((self.affinity and self.affinity.pod_anti_affinity) or PodAffinity()).required or ()

    @property
    def hard_spread(self) -> tuple[TopologySpread, ...]:
        """The spread constraints that keep it unscheduled while they do not hold."""
        spread = self.topology_spread_constraints or ()
        return tuple(entry for entry in spread if entry.when_unsatisfiable != "ScheduleAnyway")


class PodMetadata(ApiStruct, frozen=True, kw_only=True):
    """Of a pod, or of any object."""

    name: str = ""
    generate_name: str | None = None
    namespace: str | None = None
    uid: str = ""
    resource_version: str | None = None
    creation_timestamp: str | None = None
    labels: Mapping[str, str] | None = None
    annotations: Mapping[str, str] | None = None
    owner_references: tuple[OwnerReference, ...] | None = None


class ResourceMapping(ApiStruct, frozen=True):
    """The extended resource that a request of the scheduler's own claim serves."""

    resource_name: str = ""


class ExtendedResourceClaim(ApiStruct, frozen=True):
    """The claim that the scheduler made for extended resources of a pod (KEP-5004)."""

    request_mappings: tuple[ResourceMapping, ...] = ()


class PodStatus(ApiStruct, frozen=True, kw_only=True):
    """Of a pod."""

    phase: str | None = None
    extended_resource_claim_status: ExtendedResourceClaim = ExtendedResourceClaim()


class PodObject(ApiStruct, frozen=True, kw_only=True):
    """A pod as it was sent or as it is stored, or a template of pods."""

    metadata: PodMetadata = PodMetadata()
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    @property
    def claims(self) -> tuple[PodClaimReference, ...]:
        """Its claims in order."""
        return self.spec.resource_claims or ()

    @property
    def templates(self) -> tuple[str, ...]:
        """Names of the claim templates that it refers to, each once."""
        named = (claim.resource_claim_template_name for claim in self.claims)
        return tuple(dict.fromkeys(name for name in named if name))

    @property
    def named_claims(self) -> tuple[str, ...]:
        """Names of the claims that it refers to instead of a template, each once."""
        named = (claim.resource_claim_name for claim in self.claims)
        return tuple(dict.fromkeys(name for name in named if name))

    @property
    def labels(self) -> Mapping[str, str]:
        """Its labels."""
        return self.metadata.labels or {}

    @property
    def annotations(self) -> Mapping[str, str]:
        """Its annotations."""
        return self.metadata.annotations or {}

    @property
    def is_of_a_gang(self) -> bool:
        """Whether the gang controller chooses its clique."""
        return GANG_LABEL in self.labels

    @property
    def owner(self) -> OwnerReference | None:
        """The controller that made it, or None for a pod that a person made."""
        return next(
            (reference for reference in self.metadata.owner_references or () if reference.controller), None
        )

    @property
    def gates(self) -> tuple[str, ...]:
        """Its scheduling gates. The scheduler does not consider it before they are removed."""
        return tuple(gate.name for gate in self.spec.scheduling_gates or ())

    @property
    def gate_index(self) -> int | None:
        """The index of the template gate among its gates, or None without that gate."""
        return self.gates.index(TEMPLATE_GATE) if TEMPLATE_GATE in self.gates else None

    @property
    def namespace(self) -> str:
        """Its namespace. kubectl takes the default namespace if none is written."""
        return self.metadata.namespace or "default"

    @property
    def node(self) -> str:
        """Its node, or an empty text until it is bound."""
        return self.spec.node_name or ""

    @property
    def is_bound(self) -> bool:
        """Whether it has a node."""
        return bool(self.spec.node_name)


class AnyObject(ApiStruct, frozen=True):
    """Any object: only its metadata are read."""

    metadata: PodMetadata | None = None


S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T", ClaimObject, ClaimTemplateObject, PodObject)


def read_pod(obj: JsonMapping) -> PodObject:
    """A pod. Raises Refused for one that no API server would send."""
    return decode_object(obj, PodObject)


def decode_object(obj: JsonMapping, shape: type[T]) -> T:
    """Read an object. Raises Refused for one that no API server would send."""
    try:
        return convert_object(obj, shape)
    except msgspec.ValidationError as error:
        kind = shape.__name__.removesuffix("Object")
        raise Refused(f"the object is no {kind}: {error}") from error


_TYPE_WORDS = {
    "array": "a list",
    "object": "a map",
    "str": "text",
    "int": "a whole number",
    "bool": "true or false",
}


def check_shape(value: JsonMapping, shape: type[S], title: str, at: str = "") -> S:
    """The fields that are read. Raises Refused, with `title` and the path from `at`, for another shape."""
    try:
        return convert_object(value, shape)
    except msgspec.ValidationError as error:
        # A part that is checked alone has a path before that of the part.
        what, *inside = str(error).split(" - at `$")
        path = ".".join(filter(None, (at, *(part.rstrip("`").lstrip(".") for part in reversed(inside)))))
        raise Refused(
            f"{title}: {path or 'it'}: {_type_error_text(what)}",
            nearest_fix="change it there; `kubectl explain` tells what its kind takes",
        ) from error


def _type_error_text(what: str) -> str:
    """Expected `array`, got `object`: expected a list, got a map."""
    for kind, words in _TYPE_WORDS.items():
        what = what.replace(f"`{kind}", f"`{words}")
    return what[:1].lower() + what[1:].replace(" | null`", "`").replace("`", "")


def add_gate(pod: PodObject, name: str) -> PatchOperation:
    """Add a scheduling gate."""
    if pod.spec.scheduling_gates is None:
        return add_operation("/spec/schedulingGates", [{"name": name}])
    return add_operation("/spec/schedulingGates/-", {"name": name})


def narrow_nodes(
    spec: PodSpec, field: NodeTermField, requirement: Mapping[str, Any]
) -> Iterator[PatchOperation]:
    """Have a pod bound only to nodes that meet one more requirement, beside all that it has already.

    Of a gated pod, the API server lets node affinity be narrowed but not widened (Kubernetes, "Pod Scheduling
    Readiness").
    """
    rule = {"nodeSelectorTerms": [{field: [requirement]}]}
    if spec.affinity is None:
        yield add_operation("/spec/affinity", {"nodeAffinity": {REQUIRED: rule}})
        return
    nodes = spec.affinity.node_affinity
    if nodes is None:
        yield add_operation("/spec/affinity/nodeAffinity", {REQUIRED: rule})
        return
    path = f"/spec/affinity/nodeAffinity/{REQUIRED}"
    if not nodes.terms:
        yield add_operation(path, rule)
    # Terms are alternatives, so the requirement must be in each of them, or the pod could go elsewhere.
    for number, term in enumerate(nodes.terms):
        present = term.match_fields if field == "matchFields" else term.match_expressions
        if present is not None:
            yield add_operation(f"{path}/nodeSelectorTerms/{number}/{field}/-", requirement)
        elif not term.is_empty:
            # An empty term selects no node, and must stay empty.
            yield add_operation(f"{path}/nodeSelectorTerms/{number}/{field}", [requirement])


def node_of(pod: JsonMapping) -> str:
    """The node of a pod, or an empty text until it is bound."""
    return (pod.get("spec") or {}).get("nodeName") or ""


def pod_address(pod: JsonMapping) -> str:
    """The IP address of a pod, or an empty text until it has one."""
    return (pod.get("status") or {}).get("podIP") or ""


def command_words(workload: JsonMapping) -> Iterator[str]:
    """Commands and arguments of the containers of a Deployment or a DaemonSet, word by word."""
    template = (workload.get("spec") or {}).get("template") or {}
    for container in (template.get("spec") or {}).get("containers") or ():
        yield from (*(container.get("command") or ()), *(container.get("args") or ()))


def is_bound_pod(pod: PodObject) -> bool:
    """Whether it is on a node and has not ended."""
    return pod.is_bound and pod.status.phase not in ENDED_PHASES


def is_resource_claimed(pod: PodObject, resource: str) -> bool:
    """Whether the scheduler's own claim serves an extended resource of a pod (KEP-5004).

    The devices of that claim are then the pod's: the counts of its containers are no further demand.
    """
    served = pod.status.extended_resource_claim_status.request_mappings
    return any(mapping.resource_name == resource for mapping in served)


def gates_of(pod: JsonMapping) -> tuple[str, ...]:
    """The scheduling gates of a pod. The scheduler does not consider it before they are removed."""
    return tuple(gate["name"] for gate in (pod.get("spec") or {}).get("schedulingGates") or ())


def refers_to_claims(pod: JsonMapping) -> bool:
    """Whether the spec of a pod refers to claims or templates of claims."""
    return bool((pod.get("spec") or {}).get("resourceClaims"))


def claim_templates(pod: JsonMapping) -> dict[str, str]:
    """The claim templates of a pod, by the names of the claims in its spec."""
    written = (pod.get("spec") or {}).get("resourceClaims") or ()
    return {entry["name"]: name for entry in written if (name := entry.get("resourceClaimTemplateName"))}


def accepted_at(pod: JsonMapping) -> float | None:
    """When the kubelet accepted a pod, in seconds since 1970, or None before that."""
    return epoch_seconds((pod.get("status") or {}).get("startTime") or "")


def runs_imex_daemon(pod: JsonMapping) -> bool:
    """Whether a pod has the container of an IMEX daemon. Any pod may have a container of this name."""
    containers = (pod.get("spec") or {}).get("containers") or ()
    return any(container.get("name") == DAEMON_CONTAINER for container in containers)


# Owners.


_JOB_LABELS = {
    "nvidia.com/dynamo-graph-deployment-name": "DynamoGraphDeployment",
    "disaggregatedset.x-k8s.io/name": "DisaggregatedSet",
    "grove.io/podgang": "PodGang",
    "ray.io/cluster": "RayCluster",
    "volcano.sh/job-name": "VolcanoJob",
    "training.kubeflow.org/job-name": "training job",
    "batch.kubernetes.io/job-name": "Job",
    "job-name": "Job",
}
"""The kind that writes each label, the widest first.

Pods of an outer object have the labels of the objects that it makes, too. The pods of several owners (a
launcher's Job, an MPIJob with its workers) are one job."""


class Owner(msgspec.Struct, frozen=True):
    """The job of a pod. Pods of one owner start, move and end together."""

    namespace: str
    kind: str
    """Empty: a gang."""
    name: str

    @property
    def text(self) -> str:
        """The name of the owner on holds and in messages: a Job and a StatefulSet of one name differ.

        A gang name has no space, so no other owner is mistaken for a gang.
        """
        if not self.kind:
            return f"{self.namespace}/{self.name}"
        return qualified_name(self.namespace, f"{self.kind} {self.name}")


def pod_owner(pod: PodObject, gang_label: str) -> Owner:
    """The job that a pod belongs to: the gang, else the job of its labels, its controller, or itself."""
    namespace, labels = pod.namespace, pod.labels
    # The order of these sources matters: a pod of a gang also has a controller, which may make other pods.
    if labels.get(gang_label):
        # Without its size, a pod is no member of a gang, and only named like one.
        is_member = SIZE_ANNOTATION in pod.annotations
        return Owner(namespace, "" if is_member else "gang", labels[gang_label])
    for key, kind in _JOB_LABELS.items():
        if labels.get(key):
            return Owner(namespace, kind, labels[key])
    if pod.owner is not None:
        return Owner(namespace, pod.owner.kind or "controller", pod.owner.name)
    return Owner(namespace, "pod", pod.metadata.name or pod.metadata.generate_name or "")


def object_namespace(obj: JsonMapping) -> str:
    """The namespace of an object. kubectl takes the default namespace if none is written."""
    return namespace_of(obj) or "default"


def qualified_name(namespace: str, name: str) -> str:
    """The name by which the planner knows a job. The default namespace is left out."""
    return name if namespace == "default" else f"{namespace}/{name}"
