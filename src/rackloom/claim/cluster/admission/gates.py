"""When a pod that came before its claim template may be scheduled, and where.

Affinity to other pods cannot be added to a gated pod, only what it asks of nodes can be tightened
(Kubernetes, Pod scheduling readiness). So where its template turns out to be one for channels, the rule that
affinity would follow is carried out here: one pod goes first, into any clique, and the others into that one.
"""

from collections.abc import Iterator, Mapping

import msgspec

from rackloom.claim.cluster.actions import Patch
from rackloom.claim.cluster.admission.affinity import has_clique_rule, in_clique
from rackloom.claim.cluster.admission.groups import Group
from rackloom.claim.cluster.admission.marks import CHANNEL_CONDITION, CHANNEL_LABEL, GATE, channel_label
from rackloom.claim.cluster.admission.pods import labelled
from rackloom.claim.cluster.admission.reviews import PatchOp
from rackloom.claim.cluster.admission.shapes import Pod
from rackloom.claim.cluster.admission.templates import Template
from rackloom.claim.kube.kinds import POD


class Opening(msgspec.Struct, frozen=True):
    """Take the gate from a pod, with these changes beside."""

    pod: Pod
    changes: tuple[PatchOp, ...] = ()

    def patch(self, namespace: str) -> Patch:
        """As one write, which fails if the pod is another one by now or its gates have changed."""
        index = self.pod.gate_index
        gate = f"/spec/schedulingGates/{index}"
        meta = self.pod.metadata
        operations: tuple[PatchOp, ...] = (
            {"op": "test", "path": "/metadata/uid", "value": meta.uid},
            {"op": "test", "path": gate, "value": {"name": GATE}},
            {"op": "remove", "path": gate},
            *self.changes,
        )
        return Patch(kind=POD, namespace=namespace, name=meta.name, patch=operations)


class TooEarly(msgspec.Struct, frozen=True):
    """A pod that waits in vain: it names a template, and its ComputeDomain shares one claim."""

    pod: Pod
    template: str

    @property
    def message(self) -> str:
        """What its owner is told."""
        return (
            f"the pod was created before the ComputeDomain of template {self.template!r}, whose pods share "
            "one claim (channel mode), and a pod's claims are fixed: delete the pod and create it again"
        )

    def condition(self, reason: str) -> PatchOp:
        """The same in the pod's status, where it stays longer than an event."""
        return {"type": CHANNEL_CONDITION, "status": "False", "reason": reason, "message": self.message}


Step = Opening | TooEarly


def channel_template(pod: Pod, templates: Mapping[str, Template]) -> str | None:
    """The template by which a pod claims a channel."""
    found = (name for name in pod.templates if name in templates and templates[name].channel is not None)
    return next(found, None)


def steps(
    gated: tuple[Pod, ...], templates: Mapping[str, Template], groups: Mapping[str, Group]
) -> tuple[Step, ...]:
    """What to do about the gated pods of one namespace; `groups` are its pods with channels, by template."""
    ready = [pod for pod in gated if all(templates[name].exists for name in pod.templates)]
    found: list[Step] = []
    for pod in ready:
        name = channel_template(pod, templates)
        channel = templates[name].channel if name is not None else None
        if name is None or channel is None or pod.is_of_a_gang:
            found.append(Opening(pod, _marked(pod, name)))
        elif channel.is_shared:
            found.append(TooEarly(pod, name))
    for name, group in groups.items():
        members = tuple(pod for pod in ready if _follows(pod, name, templates))
        found += (Opening(pod, changes) for pod, changes in _let_in(members, name, group))
    return tuple(found)


def _follows(pod: Pod, template: str, templates: Mapping[str, Template]) -> bool:
    channel = templates[template].channel if template in templates else None
    is_of_it = channel_template(pod, templates) == template and not pod.is_of_a_gang
    return is_of_it and channel is not None and not channel.is_shared


def _let_in(gated: tuple[Pod, ...], template: str, group: Group) -> Iterator[tuple[Pod, tuple[PatchOp, ...]]]:
    led = [pod for pod in gated if has_clique_rule(pod.spec)]
    strays = [pod for pod in gated if not has_clique_rule(pod.spec)]
    if group.clique is not None:
        yield from ((pod, _marked(pod, template)) for pod in led)
        for pod in strays:
            yield pod, (*_marked(pod, template), *in_clique(pod.spec, group.clique))
        return
    under_way = [pod for pod in group.waiting if pod.gate_index is None]
    if any(not has_clique_rule(pod.spec) for pod in under_way):
        # Somebody's first pod is being scheduled: where it goes, the others will.
        return
    if led or under_way:
        yield from ((pod, _marked(pod, template)) for pod in led)
    elif strays:
        first = min(strays, key=lambda pod: (pod.metadata.creation_timestamp or "", pod.metadata.name))
        yield first, (*_marked(first, template), *in_clique(first.spec, None))


def _marked(pod: Pod, template: str | None) -> tuple[PatchOp, ...]:
    return () if template is None else labelled(pod, {CHANNEL_LABEL: channel_label(template)})
