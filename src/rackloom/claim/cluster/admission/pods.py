"""What a new pod with claims is told, and what is added to it. Doing it twice changes nothing more."""

from collections.abc import Iterator, Mapping

import msgspec

from rackloom.claim.cluster.admission.affinity import has_clique_rule, near_its_domain
from rackloom.claim.cluster.admission.groups import Group
from rackloom.claim.cluster.admission.marks import CHANNEL_LABEL, GATE, WATCHED, WATCHED_LABEL, channel_label
from rackloom.claim.cluster.admission.modes import Mode, judged
from rackloom.claim.cluster.admission.reviews import Acted, PatchOp, Verdict
from rackloom.claim.cluster.admission.shapes import Pod
from rackloom.claim.cluster.admission.templates import Channel, Template
from rackloom.claim.domain.names import shared_claim_name


class Surroundings(msgspec.Struct, frozen=True):
    """What is known around a new pod."""

    templates: Mapping[str, Template]
    """Those that the pod refers to, by name."""
    groups: Mapping[str, Group]
    """The pods with channels that are there already, by template."""

    def group(self, template: str) -> Group:
        """The pods with channels of a template."""
        return self.groups.get(template, Group())


def review_uses(pod: Pod, mode: Mode) -> Verdict:
    """Name claims that no container uses: their devices are taken, and no process sees them."""
    containers = (*(pod.spec.containers or ()), *(pod.spec.init_containers or ()))
    used = frozenset().union(*(one.claims for one in containers))
    idle = [(number, claim.name) for number, claim in enumerate(pod.claims) if claim.name not in used]
    problems = tuple(
        f"spec.resourceClaims[{number}] {name!r} is used by no container: list it under "
        "spec.containers[*].resources.claims, or remove it"
        for number, name in idle
    )
    return judged(problems, mode, "the pod's claims do not reach its containers", "idle-claim")


def admit(pod: Pod, around: Surroundings) -> Verdict:
    """How a new pod is changed so that its claims come together as they should."""
    channels = {name: one.channel for name, one in around.templates.items() if one.channel is not None}
    by_rule = {
        "shared-claim": tuple(_shared_claims(pod, channels)),
        "gate": _gate(pod, around),
        "label": _labels(pod, channels, around),
        "clique": _clique(pod, channels),
    }
    warnings = tuple(_warnings(pod, channels, around))
    rules: list[Acted] = [(rule, "changed") for rule, patch in by_rule.items() if patch]
    if warnings:
        rules.append(("second-workload", "warned"))
    return Verdict(
        patch=tuple(operation for patch in by_rule.values() for operation in patch),
        warnings=warnings,
        rules=tuple(rules),
    )


def _shared_claims(pod: Pod, channels: Mapping[str, Channel]) -> Iterator[PatchOp]:
    for number, claim in enumerate(pod.claims):
        channel = channels.get(claim.resource_claim_template_name or "")
        if channel is not None and channel.is_shared:
            value = {"name": claim.name, "resourceClaimName": shared_claim_name(channel.domain_uid)}
            yield {"op": "replace", "path": f"/spec/resourceClaims/{number}", "value": value}


def must_wait(pod: Pod, around: Surroundings) -> bool:
    """Whether a template is missing, or the clique of the pod's ComputeDomain is being found."""
    if pod.is_bound:
        # The API server refuses gates on a pod that has its node.
        return False
    named = {name: one for name, one in around.templates.items() if not _is_shared(one)}
    if not all(one.exists for one in named.values()):
        return True
    return not pod.is_of_a_gang and any(around.group(name).is_settling for name in named)


def _is_shared(template: Template) -> bool:
    """Then the pod names the claim instead, and the scheduler waits for that by itself."""
    return template.channel is not None and template.channel.is_shared


def _gate(pod: Pod, around: Surroundings) -> tuple[PatchOp, ...]:
    if pod.gate_index is not None or not must_wait(pod, around):
        return ()
    gate = {"name": GATE}
    if pod.spec.scheduling_gates is None:
        return ({"op": "add", "path": "/spec/schedulingGates", "value": [gate]},)
    return ({"op": "add", "path": "/spec/schedulingGates/-", "value": gate},)


def _labels(pod: Pod, channels: Mapping[str, Channel], around: Surroundings) -> tuple[PatchOp, ...]:
    if not channels:
        return labelled(pod, {WATCHED_LABEL: WATCHED}) if must_wait(pod, around) else ()
    return labelled(pod, {WATCHED_LABEL: WATCHED, CHANNEL_LABEL: _label(channels)})


def labelled(pod: Pod, wanted: Mapping[str, str]) -> tuple[PatchOp, ...]:
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


def _clique(pod: Pod, channels: Mapping[str, Channel]) -> tuple[PatchOp, ...]:
    if not channels or pod.is_of_a_gang or pod.is_bound or has_clique_rule(pod.spec):
        return ()
    return near_its_domain(pod.spec, _label(channels))


def _label(channels: Mapping[str, Channel]) -> str:
    """Of the first template that the pod goes on naming, so that a second look finds the same."""
    return channel_label(min(channels, key=lambda name: channels[name].is_shared))


def _warnings(pod: Pod, channels: Mapping[str, Channel], around: Surroundings) -> Iterator[str]:
    mine = pod.owner.uid if pod.owner else ""
    for name in channels:
        for other in around.group(name).owners:
            if (other.uid if other else "") != mine:
                whose = f"{other.kind} {other.name}" if other else "no controller"
                yield (
                    f"pods of {whose} have channels of template {name!r} too: all pods of one ComputeDomain "
                    "can reach each other's GPU memory; give each workload a ComputeDomain of its own"
                )
