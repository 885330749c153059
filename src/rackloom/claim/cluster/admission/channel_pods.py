"""The changes of a new pod that claims an IMEX channel, and its warnings. They are idempotent.

- In channel mode all pods of a ComputeDomain share one claim: the template reference becomes that
  claim's name.
- A pod is gated while its claim template does not exist, or while the clique of its ComputeDomain is
  being found.
- Pods with channels are labelled, so that controllers follow these pods only.
- A pod is kept in the clique of its ComputeDomain's other pods by required podAffinity on the clique
  label: GPUs reach each other's memory inside one clique only. A pod that already names a clique, or
  pods to be near, is left alone, and so are gangs.
- A second workload in one ComputeDomain is warned about: all pods of it can reach each other's GPU
  memory.
"""

from collections.abc import Iterator, Mapping

import msgspec

from rackloom.claim.cluster.admission.reviews import AdmissionMode, AdmissionVerdict, RuleOutcome, verdict_on
from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import ComputeDomain
from rackloom.core.cluster.names import (
    GPU_CLIQUE_LABEL,
    AllocationMode,
    ImexIsolation,
    isolation_of,
    shared_claim_name,
)
from rackloom.core.cluster.objects import (
    Object,
    OwnerReference,
    PatchOperation,
    add_entries,
    add_operation,
    labels_of,
)
from rackloom.core.cluster.pods import (
    CHANNEL_LABEL,
    REQUIRED,
    TEMPLATE_GATE,
    WATCHED_LABEL,
    WATCHED_VALUE,
    ClaimTemplateObject,
    NodeAffinity,
    PodAffinity,
    PodAffinityRules,
    PodObject,
    PodSpec,
    add_gate,
    channel_label,
    decode_object,
    narrow_nodes,
)

# Rules that keep pods in one clique, as JSON patch operations.


def has_clique_rule(spec: PodSpec) -> bool:
    """Whether the pod itself names a clique, or pods to be near. It is then left alone.

    A rule that a node must be in some clique names neither. The first of several gated pods gets that rule.
    """
    if GPU_CLIQUE_LABEL in (spec.node_selector or {}):
        return True
    affinity = spec.affinity or PodAffinityRules()
    near, nodes = affinity.pod_affinity or PodAffinity(), affinity.node_affinity or NodeAffinity()
    around = (*(near.required or ()), *(rule.pod_affinity_term for rule in near.preferred or ()))
    terms = (*nodes.terms, *(rule.preference for rule in nodes.preferred or ()))
    return any(term.topology_key == GPU_CLIQUE_LABEL for term in around) or any(
        rule.key == GPU_CLIQUE_LABEL and rule.operator == "In"
        for term in terms
        for rule in term.match_expressions or ()
    )


def require_domain_affinity(spec: PodSpec, label: str) -> tuple[PatchOperation, ...]:
    """Have the pod scheduled into the clique of the pods with this CHANNEL_LABEL.

    The scheduler places the first of them in any clique, since the rule selects that pod too.
    """
    term = {
        "topologyKey": GPU_CLIQUE_LABEL,
        "labelSelector": {"matchLabels": {CHANNEL_LABEL: label}},
    }
    if spec.affinity is None:
        return (add_operation("/spec/affinity", {"podAffinity": {REQUIRED: [term]}}),)
    near = spec.affinity.pod_affinity
    if near is None:
        return (add_operation("/spec/affinity/podAffinity", {REQUIRED: [term]}),)
    if near.required is None:
        return (add_operation(f"/spec/affinity/podAffinity/{REQUIRED}", [term]),)
    return (add_operation(f"/spec/affinity/podAffinity/{REQUIRED}/-", term),)


def require_clique(spec: PodSpec, clique: str | None) -> tuple[PatchOperation, ...]:
    """Have a gated pod scheduled into this clique, or into any one where it is None."""
    rule = {"operator": "Exists"} if clique is None else {"operator": "In", "values": [clique]}
    return tuple(narrow_nodes(spec, "matchExpressions", {"key": GPU_CLIQUE_LABEL} | rule))


# The pods of one ComputeDomain.


class DomainPods(msgspec.Struct, frozen=True):
    """Live pods with a channel of one ComputeDomain."""

    pods: tuple[PodObject, ...] = ()
    clique: str | None = None
    """The clique of a node to which one of them is bound. None if none is in a clique yet."""

    @property
    def owners(self) -> tuple[OwnerReference | None, ...]:
        """The controllers that created them, each once. None stands for all pods without one."""
        return tuple({pod.owner.uid if pod.owner else "": pod.owner for pod in self.pods}.values())

    @property
    def waiting(self) -> tuple[PodObject, ...]:
        """Pods without a node, except those of gangs, whose clique the gang controller chooses."""
        return tuple(pod for pod in self.pods if not pod.is_bound and not pod.is_of_a_gang)

    @property
    def is_settling(self) -> bool:
        """Whether their clique is unknown, and not all have a rule that leads them to it."""
        if any(pod.is_bound for pod in self.pods):
            return False
        return any(not has_clique_rule(pod.spec) for pod in self.waiting)


# Claim templates, by their meaning for the pods that refer to them.


class ChannelTemplate(msgspec.Struct, frozen=True):
    """A template for IMEX channels of one ComputeDomain."""

    domain_uid: str
    is_shared: bool = False
    """Whether all pods of the ComputeDomain use one claim (channel mode)."""


class ClaimTemplateState(msgspec.Struct, frozen=True):
    """A template by its name in a pod's namespace."""

    exists: bool = False
    channel: ChannelTemplate | None = None
    """Known before the template exists if its ComputeDomain does. None for templates without channels."""


def template_state(obj: Object) -> ClaimTemplateState:
    """The state of a ResourceClaimTemplate, from the labels and the class that the controller gave it."""
    labels = labels_of(obj)
    uid = labels.get(names.COMPUTE_DOMAIN_LABEL)
    if uid is None or labels.get(names.TARGET_LABEL) != names.TARGET_WORKLOAD:
        return ClaimTemplateState(exists=True)
    spec = decode_object(obj, ClaimTemplateObject).spec.spec
    parameters = (config.opaque.parameters or {} for config in spec.configs if config.opaque)
    takes_all = any(found.get("allocationMode") == AllocationMode.ALL for found in parameters)
    is_shared = names.ISOLATED_CHANNEL_CLASS in spec.classes and not takes_all
    return ClaimTemplateState(True, ChannelTemplate(uid, is_shared))


def promised_template(domain: ComputeDomain, default: ImexIsolation) -> ClaimTemplateState:
    """The template that the controller will create for a ComputeDomain."""
    is_isolated = isolation_of(domain.labels, default) is ImexIsolation.CHANNEL
    is_shared = is_isolated and domain.allocation_mode is AllocationMode.SINGLE
    return ClaimTemplateState(False, ChannelTemplate(domain.uid, is_shared))


# The rules for a new pod.


class PodContext(msgspec.Struct, frozen=True):
    """The templates and other pods that concern a new pod."""

    templates: Mapping[str, ClaimTemplateState]
    """Templates that the pod refers to, by name."""
    groups: Mapping[str, DomainPods]
    """Existing pods with channels, by template."""

    def group(self, template: str) -> DomainPods:
        """The pods with channels of a template."""
        return self.groups.get(template, DomainPods())


def review_claim_uses(pod: PodObject, mode: AdmissionMode) -> AdmissionVerdict:
    """Report claims that no container uses: their devices are allocated, and no process sees them."""
    containers = (*(pod.spec.containers or ()), *(pod.spec.init_containers or ()))
    used = frozenset().union(*(container.claims for container in containers))
    idle = [(number, claim.name) for number, claim in enumerate(pod.claims) if claim.name not in used]
    problems = tuple(
        f"spec.resourceClaims[{number}] {name!r} is used by no container: list it under "
        "spec.containers[*].resources.claims, or remove it"
        for number, name in idle
    )
    return verdict_on(problems, mode, "the pod's claims do not reach its containers", "idle-claim")


def mutate_pod(pod: PodObject, context: PodContext) -> AdmissionVerdict:
    """How a new pod is changed so that its claims and those of its ComputeDomain fit together."""
    channels = {
        name: template.channel for name, template in context.templates.items() if template.channel is not None
    }
    shared = {name: channel for name, channel in channels.items() if channel.is_shared}
    labels, waits = {}, must_wait(pod, context)
    if channels or waits:
        labels[WATCHED_LABEL] = WATCHED_VALUE
    if channels:
        # The first template that the pod still names afterwards, so that a second review finds the same.
        labels[CHANNEL_LABEL] = channel_label(min(channels, key=lambda name: name in shared))
    needs_clique = channels and not (pod.is_of_a_gang or pod.is_bound or has_clique_rule(pod.spec))
    by_rule: dict[str, tuple[PatchOperation, ...]] = {
        "shared-claim": tuple(
            {
                "op": "replace",
                "path": f"/spec/resourceClaims/{number}",
                "value": {"name": claim.name, "resourceClaimName": shared_claim_name(channel.domain_uid)},
            }
            for number, claim in enumerate(pod.claims)
            if (channel := shared.get(claim.resource_claim_template_name or "")) is not None
        ),
        "gate": (add_gate(pod, TEMPLATE_GATE),) if waits and pod.gate_index is None else (),
        "label": add_labels(pod, labels),
        "clique": require_domain_affinity(pod.spec, labels[CHANNEL_LABEL]) if needs_clique else (),
    }
    warnings = tuple(_warnings(pod, channels, context))
    rules: list[RuleOutcome] = [(rule, "changed") for rule, patch in by_rule.items() if patch]
    if warnings:
        rules.append(("second-workload", "warned"))
    return AdmissionVerdict(
        patch=tuple(operation for patch in by_rule.values() for operation in patch),
        warnings=warnings,
        rules=tuple(rules),
    )


def must_wait(pod: PodObject, context: PodContext) -> bool:
    """Whether a template is missing, or the clique of the pod's ComputeDomain is being found."""
    if pod.is_bound:
        # The API server refuses gates on a pod that has its node.
        return False
    # A pod in channel mode names the shared claim instead, and kube-scheduler waits for a claim.
    named = {
        name: template
        for name, template in context.templates.items()
        if template.channel is None or not template.channel.is_shared
    }
    if not all(template.exists for template in named.values()):
        return True
    return not pod.is_of_a_gang and any(context.group(name).is_settling for name in named)


def add_labels(pod: PodObject, wanted: Mapping[str, str]) -> tuple[PatchOperation, ...]:
    """Give a pod labels."""
    missing = {name: value for name, value in wanted.items() if pod.labels.get(name) != value}
    return add_entries("/metadata/labels", pod.metadata.labels, missing)


def _warnings(pod: PodObject, channels: Mapping[str, ChannelTemplate], context: PodContext) -> Iterator[str]:
    mine = pod.owner.uid if pod.owner else ""
    for name in channels:
        for other in context.group(name).owners:
            if (other.uid if other else "") != mine:
                whose = f"{other.kind} {other.name}" if other else "no controller"
                yield (
                    f"pods of {whose} have channels of template {name!r} too: all pods of one ComputeDomain "
                    "can reach each other's GPU memory; give each workload a ComputeDomain of its own"
                )
