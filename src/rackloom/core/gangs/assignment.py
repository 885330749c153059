"""Which pod takes which slot of a recorded plan, and the single write that pins and ungates it.

A pod that was ungated keeps its slot. Gated pods take the free slots of their group in order of rank,
so that neighbours in rank become neighbours in the plan. Two pods may have been ungated for one slot,
by a controller that was paused while another took over: then a pod that stays has it before one that is
being deleted, or the job would lose both.

One JSON patch pins the pod to its node, adds the toleration of the plan's taint and removes the gate,
so that no crash can come between pin and gate. Of a gated pod the API server lets node affinity be
narrowed only, and tolerations be added (Kubernetes, "Pod Scheduling Readiness"). The patch tests the
pod's UID and the gate first.
"""

from collections import Counter
from collections.abc import Iterator

import msgspec

from rackloom.core.gangs import spec
from rackloom.core.gangs.completion import slot_candidates
from rackloom.core.gangs.members import GangMember
from rackloom.core.gangs.snapshot import GangSnapshot
from rackloom.core.gangs.spec import GangSettings
from rackloom.core.kubernetes.objects import (
    POD,
    DeleteObject,
    PatchObject,
    PatchOperation,
    add_operation,
    metav1_time,
)
from rackloom.core.kubernetes.pods import REQUIRED, PodSpec
from rackloom.core.place.placement_values import GangPlan


class SlotAssignment(msgspec.Struct, frozen=True):
    """Living members by slot. Gated members in none of the three are surplus and stay gated."""

    openings: tuple[tuple[GangMember, str], ...]
    """Gated members, each with the tray of the slot that it takes."""
    misfits: tuple[GangMember, ...]
    """Members that were ungated for a tray where the plan has no slot for them."""
    seated: tuple[GangMember, ...]


def assign_slots(snapshot: GangSnapshot, plan: GangPlan) -> SlotAssignment:
    """Assign the slots of a plan to the members of a gang.

    Each slot is counted once, so no two members of the result share one.
    """
    free = Counter((slot.group, slot.tray) for slot in plan.seats)
    seated, misfits = [], []
    # Members that stay come first, then those already bound, so that they keep a contested slot.
    order = sorted(snapshot.ungated, key=lambda one: (one.is_being_deleted, one.node is None, one.rank))
    for member in order:
        slot_key = (member.group, member.tray or "")
        if free[slot_key] > 0:
            free[slot_key] -= 1
            seated.append(member)
        elif not member.is_being_deleted:
            misfits.append(member)
    openings: list[tuple[GangMember, str]] = []
    gated = slot_candidates(snapshot)
    for group in dict.fromkeys(slot.group for slot in plan.seats):
        trays = []
        for slot in plan.seats:
            if slot.group == group and free[group, slot.tray] > 0:
                free[group, slot.tray] -= 1
                trays.append(slot.tray)
        members = sorted((one for one in gated if one.group == group), key=lambda one: one.rank)
        openings += zip(members, trays, strict=False)
    return SlotAssignment(tuple(openings), tuple(misfits), tuple(seated))


def unschedulable_members(
    snapshot: GangSnapshot, slots: SlotAssignment, settings: GangSettings
) -> tuple[GangMember, ...]:
    """Members that were ungated `bind_after` ago and that kube-scheduler reports as unschedulable.

    Where it reports nothing, the tray is not the cause: the scheduler is down, or a foreign gate is left.
    """
    return tuple(
        member
        for member in slots.seated
        if member.node is None
        and not member.is_being_deleted
        and member.is_unschedulable
        and snapshot.now - (member.released_at or 0.0) >= settings.bind_after
    )


# The writes that ungate a pod, or delete it.


def pin_and_ungate(member: GangMember, tray: str, uid: str, now: float) -> PatchObject:
    """Pin a pod to `tray`, add the toleration of the plan `uid`, and remove the gang's gate.

    The write fails if the pod was replaced or its gates have changed.
    """
    gate = f"/spec/schedulingGates/{member.gate}"
    operations: tuple[PatchOperation, ...] = (
        {"op": "test", "path": "/metadata/uid", "value": member.uid},
        {"op": "test", "path": gate, "value": {"name": spec.GANG_GATE}},
        *_annotate(member, {spec.TRAY_ANNOTATION: tray, spec.RELEASED_ANNOTATION: metav1_time(now)}),
        _add_toleration(member, uid),
        *_add_node_pin(member.pod.spec, tray),
        {"op": "remove", "path": gate},
    )
    return PatchObject(kind=POD, namespace=member.namespace, name=member.name, patch=operations)


def delete_member(member: GangMember, *, at_once: bool = False) -> DeleteObject:
    """Delete a pod, so that its owner creates another; `at_once` where no kubelet is left to end it."""
    grace = 0 if at_once else None
    return DeleteObject(
        kind=POD, namespace=member.namespace, name=member.name, uid=member.uid, grace_seconds=grace
    )


def _annotate(member: GangMember, annotations: dict[str, str]) -> Iterator[PatchOperation]:
    if not member.annotations:
        yield add_operation("/metadata/annotations", annotations)
        return
    for key, value in annotations.items():
        yield add_operation(f"/metadata/annotations/{key.replace('~', '~0').replace('/', '~1')}", value)


def _add_toleration(member: GangMember, uid: str) -> PatchOperation:
    toleration = {"key": spec.GANG_TAINT, "operator": "Equal", "value": uid, "effect": "NoSchedule"}
    if member.tolerations is None:
        return add_operation("/spec/tolerations", [toleration])
    return add_operation("/spec/tolerations/-", toleration)


def _add_node_pin(spec: PodSpec, tray: str) -> Iterator[PatchOperation]:
    pin = {"key": "metadata.name", "operator": "In", "values": [tray]}
    rule = {"nodeSelectorTerms": [{"matchFields": [pin]}]}
    if spec.affinity is None:
        yield add_operation("/spec/affinity", {"nodeAffinity": {REQUIRED: rule}})
        return
    nodes = spec.affinity.node_affinity
    if nodes is None:
        yield add_operation("/spec/affinity/nodeAffinity", {REQUIRED: rule})
        return
    path = f"/spec/affinity/nodeAffinity/{REQUIRED}"
    terms = (nodes.required.node_selector_terms if nodes.required else None) or ()
    if not terms:
        yield add_operation(path, rule)
    for number, term in enumerate(terms):
        if term.match_fields is not None:
            yield add_operation(f"{path}/nodeSelectorTerms/{number}/matchFields/-", pin)
        elif not term.is_empty:
            # An empty term selects no node, and must stay empty.
            yield add_operation(f"{path}/nodeSelectorTerms/{number}/matchFields", [pin])
