"""The conditions of a gang (Placed, Reserved, Bound), and the decision that they are part of.

Each condition is True, False or Unknown, with a reason and a message that says what would change it.
Placed is Unknown while the placement search has not answered, and while all pods have ended but their
Job still owes some. Bound is Unknown while a tray is not ready but not yet considered lost.

A condition keeps its transition time while its status stays the same; a time in the future, from a
clock that was ahead, is replaced. Events are recorded for a problem that is new, and for a condition
that became True. The status is written only if it differs from the recorded one.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from rackloom.core.domains.compute_domain import Condition
from rackloom.core.gangs.members import GangMember
from rackloom.core.gangs.snapshot import GangSnapshot
from rackloom.core.gangs.spec import GangSpec
from rackloom.core.kubernetes.objects import EventNotice, ObjectWrite, metav1_time

PLACED, RESERVED, BOUND = "Placed", "Reserved", "Bound"
_MOST_NAMES = 4
WARNING_REASONS = ("DoesNotFit", "InvalidGang", "NotHeld", "TrayLost", "CannotBind", "TrayTaken")
"""Reasons that are reported as warnings."""
AWAITING_LAST_PODS = ("Unknown", "WaitingForMembers")
"""Status and reason of Placed while all pods have ended and slots are kept for those that the Job owes."""
API_REFUSED = "ApiRefused"
"""Reason of an event: the API server, or a policy, forbids a write."""


def gang_condition(type_: str, status: str, reason: str, message: str) -> Condition:
    """One condition; `decide_with_conditions` adds its transition time."""
    return Condition(type=type_, status=status, reason=reason, message=message)


def waiting_for_members(snapshot: GangSnapshot, declared: GangSpec) -> Condition | None:
    """That members are still to come; None when all exist."""
    present = Counter(member.group for member in snapshot.gated)
    missing = [f"{name} {present[name]} of {size}" for name, size in declared.sizes if present[name] < size]
    if not missing:
        return None
    message = f"pods that are there: {', '.join(missing)}"
    if snapshot.is_answered:
        message += "; their owners do not say that fewer are to come"
        if ended := [member.name for member in snapshot.members if member.ended and not member.is_done]:
            message += f"; {shortened(ended)} ended, and may be made anew"
    return gang_condition(PLACED, "False", "WaitingForMembers", message)


def waiting_for_claims(snapshot: GangSnapshot) -> Condition | None:
    """That claim templates are still to come: a pod's demand is unknown without them."""
    pods = (member.pod for member in snapshot.living if member.pod.gate_index is not None)
    missing = sorted({name for pod in pods for name in pod.templates})
    if not missing:
        return None
    message = f"claim templates: {shortened(missing)}"
    return gang_condition(PLACED, "False", "WaitingForClaimTemplates", message)


def waiting_for_gates(snapshot: GangSnapshot) -> Condition | None:
    """That another controller (a queue) still holds pods: no trays are reserved meanwhile."""
    gates = sorted({name for member in snapshot.living for name in member.foreign_gates})
    if not gates:
        return None
    message = f"scheduling gates of others: {shortened(gates)}"
    return gang_condition(PLACED, "False", "WaitingForGates", message)


def bound_condition(
    snapshot: GangSnapshot, seated: tuple[GangMember, ...], slots: int, lost_after: float
) -> Condition:
    """Whether every slot has a pod on its tray."""
    if lost := snapshot.lost(lost_after):
        why = snapshot.refusal or "its members are being replaced"
        since = f"gone or not ready for {lost_after:.0f} s"
        return gang_condition(BOUND, "False", "TrayLost", f"{shortened(lost)} {since}: {why}")
    nodes = [member.node for member in seated if member.node is not None]
    if len(nodes) < slots:
        progress = f"{len(nodes)} of {slots} members are on their trays"
        if snapshot.refusal:
            return gang_condition(BOUND, "False", "CannotBind", f"{progress}; {snapshot.refusal}")
        for member in seated:
            if member.node is None and member.unbound_message:
                progress += f"; {member.name}: {member.unbound_message}"
                break
        return gang_condition(BOUND, "False", "Binding", progress)
    if silent := [node for node in nodes if snapshot.is_lost(node, 0.0)]:
        return gang_condition(BOUND, "Unknown", "TrayNotReady", f"{shortened(silent)} not ready")
    message = f"{slots} members are on their trays"
    # Pods without a slot: the job was enlarged or recreated after the gang was placed.
    if surplus := [member.name for member in snapshot.gated]:
        why = "for which the gang has no seat: it is placed anew when all of its other pods have ended"
        message += f"; beside them {shortened(surplus)}, {why}"
    return gang_condition(BOUND, "True", "AllBound", message)


def _with_transition_time(snapshot: GangSnapshot, condition: Condition) -> Condition:
    before = None if snapshot.record is None else snapshot.record.condition(condition.type)
    now, since = metav1_time(snapshot.now), "" if before is None else before.last_transition_time
    # A clock that was ahead wrote a time in the future. Waits start from these times, so it is replaced.
    is_same = before is not None and before.status == condition.status and since <= now
    return msgspec.structs.replace(condition, last_transition_time=since if is_same else now)


def _condition_events(snapshot: GangSnapshot, conditions: tuple[Condition, ...]) -> Iterator[EventNotice]:
    """Events for a problem that is new, and for a condition that became True."""
    for condition in conditions:
        before = None if snapshot.record is None else snapshot.record.condition(condition.type)
        # A pod that comes for a kept slot does not place the gang again.
        was_true = before is not None and (
            before.status == "True" or (before.status, before.reason) == AWAITING_LAST_PODS
        )
        is_new = before is None or (before.reason, before.message) != (condition.reason, condition.message)
        is_warning = is_new and condition.reason in WARNING_REASONS
        if is_warning or (condition.status == "True" and not was_true):
            yield EventNotice(is_warning, condition.reason, condition.message)


def shortened(names: Sequence[str], most: int = _MOST_NAMES) -> str:
    """The first names for a message, and the number of the others."""
    more = len(names) - most
    shown = ", ".join(names[:most])
    return f"{shown} and {more} more" if more > 0 else shown


# What to do about one gang, in order, and what to report afterwards.


class GangDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do about one gang, in order, and what to report afterwards."""

    actions: tuple[ObjectWrite, ...] = ()
    conditions: tuple[Condition, ...] | None = None
    """None where the recorded ones hold."""
    notices: tuple[EventNotice, ...] = ()
    needs_placement: bool = False
    recheck_after: float | None = None
    """Seconds after which the passage of time alone may change the decision."""
    needs_fresh_read: bool = False
    """It releases trays, deletes pods or withdraws the plan, or depends on what the owners say.

    It is valid only if it is decided from fresh reads: a stale cache may miss pods that are ungated by now.
    """


def decide_with_conditions(
    snapshot: GangSnapshot,
    conditions: tuple[Condition, ...],
    actions: tuple[ObjectWrite, ...],
    *,
    needs_placement: bool = False,
    recheck_after: float | None = None,
    needs_fresh_read: bool = False,
) -> GangDecision:
    """A decision that reports these conditions if they differ from the recorded ones."""
    present = {condition.type for condition in conditions}
    # A gang without a plan has nothing reserved and no pod bound.
    rest = (gang_condition(t, "False", "NotPlaced", "") for t in (RESERVED, BOUND) if t not in present)
    dated = tuple(_with_transition_time(snapshot, condition) for condition in (*conditions, *rest))
    is_recorded = snapshot.record is not None and snapshot.record.conditions == dated
    return GangDecision(
        actions=actions,
        conditions=None if is_recorded else dated,
        notices=() if is_recorded else tuple(_condition_events(snapshot, dated)),
        needs_placement=needs_placement,
        recheck_after=recheck_after,
        needs_fresh_read=needs_fresh_read,
    )
