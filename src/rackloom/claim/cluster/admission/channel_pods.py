"""How a new pod that claims an IMEX channel is changed, and what it is warned about; idempotent.

- In channel mode all pods of a ComputeDomain share one claim: the template reference becomes that
  claim's name.
- A pod is gated while its claim template does not exist, or while the clique of its ComputeDomain is
  being found.
- Pods with channels are labelled, so that controllers follow these pods only.
- A pod is kept in the clique of its ComputeDomain's other pods by required podAffinity on the clique
  label: GPUs reach each other's memory inside one clique only. A pod that already names a clique, or
  pods to be near, is left alone; so are gangs.
- A second workload in one ComputeDomain is warned about: all pods of it can reach each other's GPU
  memory.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from rackloom.claim.cluster.admission.reviews import AdmissionMode, AdmissionVerdict, RuleOutcome, verdict_on
from rackloom.core.domains import names
from rackloom.core.domains.compute_domain import AllocationMode, ComputeDomain
from rackloom.core.domains.names import GPU_CLIQUE_LABEL, ImexIsolation, isolation_of, shared_claim_name
from rackloom.core.kubernetes.objects import Object, PatchOperation
from rackloom.core.kubernetes.pods import (
    CHANNEL_LABEL,
    TEMPLATE_GATE,
    WATCHED_LABEL,
    WATCHED_VALUE,
    NodeAffinity,
    OwnerReference,
    PodAffinity,
    PodObject,
    PodSpec,
    channel_label,
)

# Rules that keep pods in one clique, as JSON patch operations.


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
    return _pod_rules_name_clique(affinity.pod_affinity) or _node_rules_name_clique(affinity.node_affinity)


def require_domain_affinity(spec: PodSpec, label: str) -> tuple[PatchOperation, ...]:
    """Have the pod scheduled into the clique of the pods whose CHANNEL_LABEL is `label`.

    The scheduler lets the first of them in anywhere, since the rule selects that pod too.
    """
    term = {
        "topologyKey": GPU_CLIQUE_LABEL,
        "labelSelector": {"matchLabels": {CHANNEL_LABEL: label}},
    }
    if spec.affinity is None:
        return (_add_operation("/spec/affinity", {"podAffinity": {_REQUIRED: [term]}}),)
    near = spec.affinity.pod_affinity
    if near is None:
        return (_add_operation("/spec/affinity/podAffinity", {_REQUIRED: [term]}),)
    if near.required is None:
        return (_add_operation(f"/spec/affinity/podAffinity/{_REQUIRED}", [term]),)
    return (_add_operation(f"/spec/affinity/podAffinity/{_REQUIRED}/-", term),)


def require_clique(spec: PodSpec, clique: str | None) -> tuple[PatchOperation, ...]:
    """Have a gated pod scheduled into this clique, or into any one where it is None.

    Of a gated pod, only what it asks of nodes can be tightened: an expression more in each term.
    """
    if clique is None:
        rule: dict[str, Any] = {"key": GPU_CLIQUE_LABEL, "operator": "Exists"}
    else:
        rule = {"key": GPU_CLIQUE_LABEL, "operator": "In", "values": [clique]}
    terms = [{"matchExpressions": [rule]}]
    if spec.affinity is None:
        return (
            _add_operation("/spec/affinity", {"nodeAffinity": {_REQUIRED: {"nodeSelectorTerms": terms}}}),
        )
    nodes = spec.affinity.node_affinity
    if nodes is None:
        return (_add_operation("/spec/affinity/nodeAffinity", {_REQUIRED: {"nodeSelectorTerms": terms}}),)
    path = f"/spec/affinity/nodeAffinity/{_REQUIRED}"
    if nodes.required is None or not nodes.required.node_selector_terms:
        return (_add_operation(path, {"nodeSelectorTerms": terms}),)
    return tuple(_narrowed_terms(nodes, f"{path}/nodeSelectorTerms", rule))


def _narrowed_terms(nodes: NodeAffinity, path: str, rule: dict[str, Any]) -> Iterator[PatchOperation]:
    terms = (nodes.required.node_selector_terms if nodes.required else None) or ()
    for number, term in enumerate(terms):
        if term.match_expressions is not None:
            yield _add_operation(f"{path}/{number}/matchExpressions/-", rule)
        elif not term.is_empty:
            yield _add_operation(f"{path}/{number}/matchExpressions", [rule])


def _pod_rules_name_clique(near: PodAffinity | None) -> bool:
    if near is None:
        return False
    wished = (one.pod_affinity_term for one in near.preferred or ())
    return any(term.topology_key == GPU_CLIQUE_LABEL for term in (*(near.required or ()), *wished))


def _node_rules_name_clique(nodes: NodeAffinity | None) -> bool:
    if nodes is None:
        return False
    required = (nodes.required.node_selector_terms if nodes.required else None) or ()
    wished = (one.preference for one in nodes.preferred or ())
    rules = (rule for term in (*required, *wished) for rule in term.match_expressions or ())
    return any(rule.key == GPU_CLIQUE_LABEL and rule.operator == "In" for rule in rules)


def _add_operation(path: str, value: Any) -> PatchOperation:
    return {"op": "add", "path": path, "value": value}


# The pods of one ComputeDomain.


class DomainPods(msgspec.Struct, frozen=True):
    """Live pods with a channel of one ComputeDomain."""

    pods: tuple[PodObject, ...] = ()
    clique: str | None = None
    """Where they are: that of a node to which one of them is bound. None: none is in a clique yet."""

    @property
    def owners(self) -> tuple[OwnerReference | None, ...]:
        """The controllers that made them, each once; None stands for all that people made."""
        return tuple({pod.owner.uid if pod.owner else "": pod.owner for pod in self.pods}.values())

    @property
    def waiting(self) -> tuple[PodObject, ...]:
        """Those without a node, less those of gangs, to which somebody else sees."""
        return tuple(pod for pod in self.pods if not pod.is_bound and not pod.is_of_a_gang)

    @property
    def is_settling(self) -> bool:
        """Whether their clique is not known yet, and not all have a rule that would lead them to it."""
        if any(pod.is_bound for pod in self.pods):
            return False
        return any(not has_clique_rule(one.spec) for one in self.waiting)


# Claim templates, by what they mean for the pods that refer to them.


class ChannelTemplate(msgspec.Struct, frozen=True):
    """A template for IMEX channels of one ComputeDomain."""

    domain_uid: str
    is_shared: bool = False
    """Whether all pods of the ComputeDomain use one claim (channel mode)."""


class ClaimTemplateState(msgspec.Struct, frozen=True):
    """A template by its name in a pod's namespace."""

    exists: bool = False
    channel: ChannelTemplate | None = None
    """Known before the template is, where its ComputeDomain exists; None also for a template of others."""


def template_state(obj: Object) -> ClaimTemplateState:
    """What a ResourceClaimTemplate is; labels and class are those that the controller gave it."""
    labels = obj["metadata"].get("labels") or {}
    uid = labels.get(names.COMPUTE_DOMAIN_LABEL)
    if uid is None or labels.get(names.TARGET_LABEL) != names.TARGET_WORKLOAD:
        return ClaimTemplateState(exists=True)
    devices = obj["spec"]["spec"].get("devices", {})
    return ClaimTemplateState(True, ChannelTemplate(uid, _is_isolated(devices) and not _wants_all(devices)))


def _is_isolated(devices: Object) -> bool:
    asked = (request.get("exactly") or {} for request in devices.get("requests") or ())
    return any(one.get("deviceClassName") == names.ISOLATED_CHANNEL_CLASS for one in asked)


def _wants_all(devices: Object) -> bool:
    opaque = (one.get("opaque") or {} for one in devices.get("config") or ())
    return any((one.get("parameters") or {}).get("allocationMode") == AllocationMode.ALL for one in opaque)


def promised_template(domain: ComputeDomain, default: ImexIsolation) -> ClaimTemplateState:
    """What the controller will make for a ComputeDomain."""
    isolated = isolation_of(domain.labels, default) is ImexIsolation.CHANNEL
    return ClaimTemplateState(
        False, ChannelTemplate(domain.uid, isolated and domain.allocation_mode is AllocationMode.SINGLE)
    )


# The rules for a new pod.


class PodContext(msgspec.Struct, frozen=True):
    """What is known around a new pod."""

    templates: Mapping[str, ClaimTemplateState]
    """Those that the pod refers to, by name."""
    groups: Mapping[str, DomainPods]
    """The pods with channels that are there already, by template."""

    def group(self, template: str) -> DomainPods:
        """The pods with channels of a template."""
        return self.groups.get(template, DomainPods())


def review_claim_uses(pod: PodObject, mode: AdmissionMode) -> AdmissionVerdict:
    """Name claims that no container uses: their devices are taken, and no process sees them."""
    containers = (*(pod.spec.containers or ()), *(pod.spec.init_containers or ()))
    used = frozenset().union(*(container.claims for container in containers))
    idle = [(number, claim.name) for number, claim in enumerate(pod.claims) if claim.name not in used]
    problems = tuple(
        f"spec.resourceClaims[{number}] {name!r} is used by no container: list it under "
        "spec.containers[*].resources.claims, or remove it"
        for number, name in idle
    )
    return verdict_on(problems, mode, "the pod's claims do not reach its containers", "idle-claim")


def mutate_pod(pod: PodObject, around: PodContext) -> AdmissionVerdict:
    """How a new pod is changed so that its claims come together as they should."""
    channels = {
        name: template.channel for name, template in around.templates.items() if template.channel is not None
    }
    by_rule = {
        "shared-claim": tuple(_use_shared_claims(pod, channels)),
        "gate": _add_gate(pod, around),
        "label": _add_pod_labels(pod, channels, around),
        "clique": _add_clique_rule(pod, channels),
    }
    warnings = tuple(_warnings(pod, channels, around))
    rules: list[RuleOutcome] = [(rule, "changed") for rule, patch in by_rule.items() if patch]
    if warnings:
        rules.append(("second-workload", "warned"))
    return AdmissionVerdict(
        patch=tuple(operation for patch in by_rule.values() for operation in patch),
        warnings=warnings,
        rules=tuple(rules),
    )


def _use_shared_claims(pod: PodObject, channels: Mapping[str, ChannelTemplate]) -> Iterator[PatchOperation]:
    for number, claim in enumerate(pod.claims):
        channel = channels.get(claim.resource_claim_template_name or "")
        if channel is not None and channel.is_shared:
            value = {"name": claim.name, "resourceClaimName": shared_claim_name(channel.domain_uid)}
            yield {"op": "replace", "path": f"/spec/resourceClaims/{number}", "value": value}


def must_wait(pod: PodObject, around: PodContext) -> bool:
    """Whether a template is missing, or the clique of the pod's ComputeDomain is being found."""
    if pod.is_bound:
        # The API server refuses gates on a pod that has its node.
        return False
    named = {
        name: template for name, template in around.templates.items() if not _is_shared_template(template)
    }
    if not all(one.exists for one in named.values()):
        return True
    return not pod.is_of_a_gang and any(around.group(name).is_settling for name in named)


def _is_shared_template(template: ClaimTemplateState) -> bool:
    """Then the pod names the claim instead, and the scheduler waits for that by itself."""
    return template.channel is not None and template.channel.is_shared


def _add_gate(pod: PodObject, around: PodContext) -> tuple[PatchOperation, ...]:
    if pod.gate_index is not None or not must_wait(pod, around):
        return ()
    gate = {"name": TEMPLATE_GATE}
    if pod.spec.scheduling_gates is None:
        return ({"op": "add", "path": "/spec/schedulingGates", "value": [gate]},)
    return ({"op": "add", "path": "/spec/schedulingGates/-", "value": gate},)


def _add_pod_labels(
    pod: PodObject, channels: Mapping[str, ChannelTemplate], around: PodContext
) -> tuple[PatchOperation, ...]:
    if not channels:
        return add_labels(pod, {WATCHED_LABEL: WATCHED_VALUE}) if must_wait(pod, around) else ()
    return add_labels(pod, {WATCHED_LABEL: WATCHED_VALUE, CHANNEL_LABEL: _channel_label_of(channels)})


def add_labels(pod: PodObject, wanted: Mapping[str, str]) -> tuple[PatchOperation, ...]:
    """Give a pod labels."""
    missing = {name: value for name, value in wanted.items() if pod.labels.get(name) != value}
    if not missing:
        return ()
    if pod.metadata.labels is None:
        return ({"op": "add", "path": "/metadata/labels", "value": missing},)
    return tuple(
        {"op": "add", "path": f"/metadata/labels/{name.replace('/', '~1')}", "value": value}
        for name, value in missing.items()
    )


def _add_clique_rule(pod: PodObject, channels: Mapping[str, ChannelTemplate]) -> tuple[PatchOperation, ...]:
    if not channels or pod.is_of_a_gang or pod.is_bound or has_clique_rule(pod.spec):
        return ()
    return require_domain_affinity(pod.spec, _channel_label_of(channels))


def _channel_label_of(channels: Mapping[str, ChannelTemplate]) -> str:
    """Of the first template that the pod goes on naming, so that a second look finds the same."""
    return channel_label(min(channels, key=lambda name: channels[name].is_shared))


def _warnings(pod: PodObject, channels: Mapping[str, ChannelTemplate], around: PodContext) -> Iterator[str]:
    mine = pod.owner.uid if pod.owner else ""
    for name in channels:
        for other in around.group(name).owners:
            if (other.uid if other else "") != mine:
                whose = f"{other.kind} {other.name}" if other else "no controller"
                yield (
                    f"pods of {whose} have channels of template {name!r} too: all pods of one ComputeDomain "
                    "can reach each other's GPU memory; give each workload a ComputeDomain of its own"
                )
