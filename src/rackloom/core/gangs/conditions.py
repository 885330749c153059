"""The conditions of a gang (Placed, Reserved, Bound), and the decision that they are part of.

Each condition is True, False or Unknown, with a reason and a message that says what would change it.
Placed is Unknown while the placement search has not answered, and while all pods have ended but their
Job still owes some. Bound is Unknown while a tray is not ready but not yet considered lost.

A condition keeps its transition time while its status stays the same; a time in the future, from a
clock that was ahead, is replaced. Events are recorded for a problem that is new, and for a condition
that became True. The status is written only if it differs from the recorded one.
"""

from collections import Counter

import msgspec

from rackloom.core.domains.compute_domain import Condition
from rackloom.core.gangs.members import GangMember
from rackloom.core.gangs.snapshot import GangSnapshot
from rackloom.core.gangs.spec import GangSpec
from rackloom.core.kubernetes.objects import EventNotice, ObjectWrite, metav1_time

PLACED, RESERVED, BOUND = "Placed", "Reserved", "Bound"
_MOST_NAMES = 4
WARNING_REASONS = ("DoesNotFit", "InvalidGang", "NotHeld", "TrayLost", "CannotBind", "TrayTaken")
"""Reasons that are told as warnings."""
AWAITING_LAST_PODS = ("Unknown", "WaitingForMembers")
"""Placed, of a gang whose pods have all ended while its Job owes some: seats are kept for those."""
API_REFUSED = "ApiRefused"
"""Of an event: the API server, or a policy, forbids what was to be done."""


def gang_condition(type_: str, status: str, reason: str, message: str) -> Condition:
    """One condition; when it changed is filled in by `dated`."""
    return Condition(type=type_, status=status, reason=reason, message=message)


def waiting_for_members(view: GangSnapshot, wish: GangSpec) -> Condition | None:
    """That members are still to come; None when all are there."""
    here = Counter(one.group for one in view.living if one.gate is not None and not one.going)
    missing = [f"{name} {here[name]} of {size}" for name, size in wish.sizes if here[name] < size]
    if not missing:
        return None
    there = f"pods that are there: {', '.join(missing)}"
    return gang_condition(
        PLACED, "False", "WaitingForMembers", there + (_why_still_waiting(view) if view.is_answered else "")
    )


def _why_still_waiting(view: GangSnapshot) -> str:
    """Why a gang waits on, though its owners were asked."""
    ended = [member.name for member in view.members if member.ended and not member.is_done]
    failed = f"; {shortened(ended)} ended, and may be made anew" if ended else ""
    return f"; their owners do not say that fewer are to come{failed}"


def waiting_for_claims(view: GangSnapshot) -> Condition | None:
    """That claim templates are still to come: what a pod needs is not known before."""
    pods = (one.pod for one in view.living if one.pod.gate_index is not None)
    missing = tuple(sorted({name for pod in pods for name in pod.templates}))
    if not missing:
        return None
    return gang_condition(
        PLACED, "False", "WaitingForClaimTemplates", f"claim templates: {shortened(missing)}"
    )


def waiting_for_gates(view: GangSnapshot) -> Condition | None:
    """That somebody else still holds pods (a queue): no trays are kept from others meanwhile."""
    gates = tuple(sorted({name for one in view.living for name in one.foreign_gates}))
    if not gates:
        return None
    return gang_condition(
        PLACED, "False", "WaitingForGates", f"scheduling gates of others: {shortened(gates)}"
    )


def bound_condition(
    view: GangSnapshot, seated: tuple[GangMember, ...], seats: int, lost_after: float
) -> Condition:
    """Whether every seat has a pod on its tray."""
    lost = view.lost(lost_after)
    if lost:
        why = view.refusal or "its members are being replaced"
        since = f"gone or not ready for {lost_after:.0f} s"
        return gang_condition(BOUND, "False", "TrayLost", f"{shortened(lost)} {since}: {why}")
    there = [one for one in seated if one.node is not None]
    if len(there) < seats:
        return _not_bound_condition(view, seated, len(there), seats)
    silent = [one.node or "" for one in there if view.is_lost(one.node or "", 0.0)]
    if silent:
        return gang_condition(BOUND, "Unknown", "TrayNotReady", f"{shortened(silent)} not ready")
    return gang_condition(
        BOUND, "True", "AllBound", f"{seats} members are on their trays{_surplus_pods(view)}"
    )


def _surplus_pods(view: GangSnapshot) -> str:
    """Pods for which there is no seat: the job was made larger, or anew, after the gang was placed."""
    gated = [one.name for one in view.living if one.gate is not None and not one.going]
    if not gated:
        return ""
    why = "for which the gang has no seat: it is placed anew when all of its other pods have ended"
    return f"; beside them {shortened(gated)}, {why}"


def _not_bound_condition(
    view: GangSnapshot, seated: tuple[GangMember, ...], there: int, seats: int
) -> Condition:
    progress = f"{there} of {seats} members are on their trays"
    if view.refusal:
        return gang_condition(BOUND, "False", "CannotBind", f"{progress}; {view.refusal}")
    waits = next((one for one in seated if one.node is None and one.waits_because), None)
    if waits is None:
        return gang_condition(BOUND, "False", "Binding", progress)
    return gang_condition(BOUND, "False", "Binding", f"{progress}; {waits.name}: {waits.waits_because}")


def with_transition_times(view: GangSnapshot, found: tuple[Condition, ...]) -> tuple[Condition, ...]:
    """With the times at which the status of each changed."""
    return tuple(_with_transition_time(view, one) for one in found)


def _with_transition_time(view: GangSnapshot, condition: Condition) -> Condition:
    before = None if view.record is None else view.record.condition(condition.type)
    now, since = metav1_time(view.now), "" if before is None else before.last_transition_time
    # A time that is still to come was written by a clock that was ahead: nobody waits for it.
    same = before is not None and before.status == condition.status and since <= now
    return msgspec.structs.replace(condition, last_transition_time=since if same else now)


def condition_events(view: GangSnapshot, found: tuple[Condition, ...]) -> tuple[EventNotice, ...]:
    """Events about what turned true, or went wrong."""
    told = []
    for one in found:
        before = None if view.record is None else view.record.condition(one.type)
        is_news = before is None or (before.reason, before.message) != (one.reason, one.message)
        if is_news and one.reason in WARNING_REASONS:
            told.append(EventNotice(True, one.reason, one.message))
        elif one.status == "True" and not _was_true(before):
            told.append(EventNotice(False, one.reason, one.message))
    return tuple(told)


def _was_true(before: Condition | None) -> bool:
    """Who comes to a seat that was kept is not placed anew."""
    return before is not None and (
        before.status == "True" or (before.status, before.reason) == AWAITING_LAST_PODS
    )


def shortened(names: tuple[str, ...] | list[str]) -> str:
    """Names for a message."""
    more = len(names) - _MOST_NAMES
    shown = ", ".join(names[:_MOST_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown


# What to do about one gang, in order, and what to report afterwards.


class GangDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do about one gang, in order, and what to say of it then."""

    actions: tuple[ObjectWrite, ...] = ()
    conditions: tuple[Condition, ...] | None = None
    """None: what is said already is true."""
    notices: tuple[EventNotice, ...] = ()
    asks_planner: bool = False
    again: float | None = None
    """Seconds after which time alone may change something."""
    takes_back: bool = False
    """Trays are freed, pods deleted or the plan is given up: for nothing that a cache may not know yet.

    So it is where a gang waits for pods that its Job may not make any more.
    """


def decide_with_conditions(
    view: GangSnapshot,
    told: tuple[Condition, ...],
    actions: tuple[ObjectWrite, ...],
    *,
    asks_planner: bool = False,
    again: float | None = None,
    takes_back: bool = False,
) -> GangDecision:
    """A decision that says this of the gang, if it is news."""
    whole = with_transition_times(view, _with_missing_conditions(told))
    same = view.record is not None and view.record.conditions == whole
    return GangDecision(
        actions=actions,
        conditions=None if same else whole,
        notices=() if same else condition_events(view, whole),
        asks_planner=asks_planner,
        again=again,
        takes_back=takes_back,
    )


def _with_missing_conditions(told: tuple[Condition, ...]) -> tuple[Condition, ...]:
    """A gang without a plan has nothing reserved and nobody bound."""
    given = {one.type for one in told}
    rest = (
        gang_condition(type_, "False", "NotPlaced", "") for type_ in (RESERVED, BOUND) if type_ not in given
    )
    return (*told, *rest)
