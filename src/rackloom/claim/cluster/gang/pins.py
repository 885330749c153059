"""Letting a gated pod go to its tray: one write, so that no crash comes between pin and gate.

Of a gated pod the API server lets node affinity be narrowed only (Kubernetes, Pod scheduling readiness), and
tolerations be added.
"""

from collections.abc import Iterator
from typing import Any

from rackloom.claim.cluster.actions import Delete, Patch
from rackloom.claim.cluster.admission.reviews import PatchOp
from rackloom.claim.cluster.admission.shapes import PodSpec
from rackloom.claim.cluster.gang import marks
from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.kube.kinds import POD
from rackloom.claim.kube.timestamps import whole_time

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def let_go(member: Member, tray: str, uid: str, now: float) -> Patch:
    """Pin a pod to `tray`, let it tolerate the taint of the plan `uid`, and take our gate.

    It fails if the pod is another one by now, or its gates have changed.
    """
    gate = f"/spec/schedulingGates/{member.gate}"
    operations: tuple[PatchOp, ...] = (
        {"op": "test", "path": "/metadata/uid", "value": member.uid},
        {"op": "test", "path": gate, "value": {"name": marks.GATE}},
        *_noted(member, {marks.TRAY_ANNOTATION: tray, marks.RELEASED_ANNOTATION: whole_time(now)}),
        _tolerating(member, uid),
        *_pinned(member.pod.spec, tray),
        {"op": "remove", "path": gate},
    )
    return Patch(kind=POD, namespace=member.namespace, name=member.name, patch=operations)


def send_away(member: Member, *, at_once: bool = False) -> Delete:
    """Delete a pod, so that its owner makes another; `at_once` where no kubelet lives to end it."""
    grace = 0 if at_once else None
    return Delete(kind=POD, namespace=member.namespace, name=member.name, uid=member.uid, grace_seconds=grace)


def _noted(member: Member, notes: dict[str, str]) -> Iterator[PatchOp]:
    if not member.annotations:
        yield _add("/metadata/annotations", notes)
        return
    for key, value in notes.items():
        yield _add(f"/metadata/annotations/{key.replace('~', '~0').replace('/', '~1')}", value)


def _tolerating(member: Member, uid: str) -> PatchOp:
    toleration = {"key": marks.TAINT, "operator": "Equal", "value": uid, "effect": "NoSchedule"}
    if member.tolerations is None:
        return _add("/spec/tolerations", [toleration])
    return _add("/spec/tolerations/-", toleration)


def _pinned(spec: PodSpec, tray: str) -> Iterator[PatchOp]:
    pin = {"key": "metadata.name", "operator": "In", "values": [tray]}
    rule = {"nodeSelectorTerms": [{"matchFields": [pin]}]}
    if spec.affinity is None:
        yield _add("/spec/affinity", {"nodeAffinity": {_REQUIRED: rule}})
        return
    nodes = spec.affinity.node_affinity
    if nodes is None:
        yield _add("/spec/affinity/nodeAffinity", {_REQUIRED: rule})
        return
    path = f"/spec/affinity/nodeAffinity/{_REQUIRED}"
    terms = (nodes.required.node_selector_terms if nodes.required else None) or ()
    if not terms:
        yield _add(path, rule)
    for number, term in enumerate(terms):
        if term.match_fields is not None:
            yield _add(f"{path}/nodeSelectorTerms/{number}/matchFields/-", pin)
        elif not term.is_empty:
            # An empty term selects no node, and must stay empty.
            yield _add(f"{path}/nodeSelectorTerms/{number}/matchFields", [pin])


def _add(path: str, value: Any) -> PatchOp:
    return {"op": "add", "path": path, "value": value}
