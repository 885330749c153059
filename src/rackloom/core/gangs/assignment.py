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
from typing import Any

import msgspec

from rackloom.core.gangs import spec
from rackloom.core.gangs.completion import slot_candidates
from rackloom.core.gangs.members import GangMember
from rackloom.core.gangs.snapshot import GangSnapshot
from rackloom.core.gangs.spec import GangSettings
from rackloom.core.kubernetes.objects import POD, DeleteObject, PatchObject, PatchOperation, metav1_time
from rackloom.core.kubernetes.pods import PodSpec
from rackloom.core.place.placement_values import GangPlan


class SlotAssignment(msgspec.Struct, frozen=True):
    """Living members; gated ones that are in none of the three are surplus, and stay gated."""

    openings: tuple[tuple[GangMember, str], ...]
    """Gated members with the trays that they may go to."""
    misfits: tuple[GangMember, ...]
    """Members that were let go to a tray where the plan has no seat for them."""
    seated: tuple[GangMember, ...]


def assign_slots(view: GangSnapshot, plan: GangPlan) -> SlotAssignment:
    """Seat the members of a gang."""
    free = Counter((seat.group, seat.tray) for seat in plan.seats)
    seated, misfits = [], []
    for member in sorted(view.let_go, key=lambda one: (one.going, one.node is None, one.rank)):
        place = (member.group, member.tray or "")
        if free[place] > 0:
            free[place] -= 1
            seated.append(member)
        elif not member.going:
            misfits.append(member)
    return SlotAssignment(_free_slots(view, plan, free), tuple(misfits), tuple(seated))


def unschedulable_members(
    view: GangSnapshot, seats: SlotAssignment, settings: GangSettings
) -> tuple[GangMember, ...]:
    """Members that were let go and that the scheduler cannot bind, for so long.

    Where it says nothing, the tray is not to blame: the scheduler is away, or somebody else's gate is there.
    """
    waiting = (one for one in seats.seated if one.node is None and not one.going and one.is_unschedulable)
    return tuple(one for one in waiting if view.now - (one.released_at or 0.0) >= settings.bind_after)


def _free_slots(
    view: GangSnapshot, plan: GangPlan, free: Counter[tuple[str, str]]
) -> tuple[tuple[GangMember, str], ...]:
    found: list[tuple[GangMember, str]] = []
    gated = slot_candidates(view)
    for group in dict.fromkeys(seat.group for seat in plan.seats):
        trays = []
        for seat in plan.seats:
            place = (group, seat.tray)
            if seat.group == group and free[place] > 0:
                free[place] -= 1
                trays.append(seat.tray)
        mine = (one for one in gated if one.group == group)
        found += zip(sorted(mine, key=lambda one: one.rank), trays, strict=False)
    return tuple(found)


# The writes that ungate a pod, or delete it.


_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def pin_and_ungate(member: GangMember, tray: str, uid: str, now: float) -> PatchObject:
    """Pin a pod to `tray`, let it tolerate the taint of the plan `uid`, and take our gate.

    It fails if the pod is another one by now, or its gates have changed.
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
    """Delete a pod, so that its owner makes another; `at_once` where no kubelet lives to end it."""
    grace = 0 if at_once else None
    return DeleteObject(
        kind=POD, namespace=member.namespace, name=member.name, uid=member.uid, grace_seconds=grace
    )


def _annotate(member: GangMember, notes: dict[str, str]) -> Iterator[PatchOperation]:
    if not member.annotations:
        yield _add_operation("/metadata/annotations", notes)
        return
    for key, value in notes.items():
        yield _add_operation(f"/metadata/annotations/{key.replace('~', '~0').replace('/', '~1')}", value)


def _add_toleration(member: GangMember, uid: str) -> PatchOperation:
    toleration = {"key": spec.GANG_TAINT, "operator": "Equal", "value": uid, "effect": "NoSchedule"}
    if member.tolerations is None:
        return _add_operation("/spec/tolerations", [toleration])
    return _add_operation("/spec/tolerations/-", toleration)


def _add_node_pin(spec: PodSpec, tray: str) -> Iterator[PatchOperation]:
    pin = {"key": "metadata.name", "operator": "In", "values": [tray]}
    rule = {"nodeSelectorTerms": [{"matchFields": [pin]}]}
    if spec.affinity is None:
        yield _add_operation("/spec/affinity", {"nodeAffinity": {_REQUIRED: rule}})
        return
    nodes = spec.affinity.node_affinity
    if nodes is None:
        yield _add_operation("/spec/affinity/nodeAffinity", {_REQUIRED: rule})
        return
    path = f"/spec/affinity/nodeAffinity/{_REQUIRED}"
    terms = (nodes.required.node_selector_terms if nodes.required else None) or ()
    if not terms:
        yield _add_operation(path, rule)
    for number, term in enumerate(terms):
        if term.match_fields is not None:
            yield _add_operation(f"{path}/nodeSelectorTerms/{number}/matchFields/-", pin)
        elif not term.is_empty:
            # An empty term selects no node, and must stay empty.
            yield _add_operation(f"{path}/nodeSelectorTerms/{number}/matchFields", [pin])


def _add_operation(path: str, value: Any) -> PatchOperation:
    return {"op": "add", "path": path, "value": value}
