"""What is said of a gang: Placed, Reserved, Bound; each True, False or Unknown, with what would change it."""

from collections import Counter

import msgspec

from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.cluster.gang.view import View
from rackloom.claim.cluster.gang.wishes import Wish
from rackloom.claim.cluster.notices import Notice
from rackloom.claim.domain.objects import Condition
from rackloom.claim.kube.timestamps import whole_time

PLACED, RESERVED, BOUND = "Placed", "Reserved", "Bound"
_NAMED_AT_MOST = 4
BAD = ("DoesNotFit", "InvalidGang", "NotHeld", "TrayLost", "CannotBind", "TrayTaken")
"""Reasons that are told as warnings."""
AWAITED = ("Unknown", "WaitingForMembers")
"""Placed, of a gang whose pods have all ended while its Job owes some: seats are kept for those."""
API_REFUSED = "ApiRefused"
"""Of an event: the API server, or a policy, forbids what was to be done."""


def said(type_: str, status: str, reason: str, message: str) -> Condition:
    """One condition; when it changed is filled in by `dated`."""
    return Condition(type=type_, status=status, reason=reason, message=message)


def waiting(view: View, wish: Wish) -> Condition | None:
    """That members are still to come; None when all are there."""
    here = Counter(one.group for one in view.living if one.gate is not None and not one.going)
    missing = [f"{name} {here[name]} of {size}" for name, size in wish.sizes if here[name] < size]
    if not missing:
        return None
    there = f"pods that are there: {', '.join(missing)}"
    return said(PLACED, "False", "WaitingForMembers", there + (_unproven(view) if view.is_answered else ""))


def _unproven(view: View) -> str:
    """Why a gang waits on, though its owners were asked."""
    ended = [one.name for one in view.members if one.ended and not one.is_done]
    failed = f"; {listed(ended)} ended, and may be made anew" if ended else ""
    return f"; their owners do not say that fewer are to come{failed}"


def waiting_for_claims(view: View) -> Condition | None:
    """That claim templates are still to come: what a pod needs is not known before."""
    pods = (one.pod for one in view.living if one.pod.gate_index is not None)
    missing = tuple(sorted({name for pod in pods for name in pod.templates}))
    if not missing:
        return None
    return said(PLACED, "False", "WaitingForClaimTemplates", f"claim templates: {listed(missing)}")


def waiting_for_gates(view: View) -> Condition | None:
    """That somebody else still holds pods (a queue): no trays are kept from others meanwhile."""
    gates = tuple(sorted({name for one in view.living for name in one.foreign_gates}))
    if not gates:
        return None
    return said(PLACED, "False", "WaitingForGates", f"scheduling gates of others: {listed(gates)}")


def bound(view: View, seated: tuple[Member, ...], seats: int, lost_after: float) -> Condition:
    """Whether every seat has a pod on its tray."""
    lost = view.lost(lost_after)
    if lost:
        why = view.refusal or "its members are being replaced"
        since = f"gone or not ready for {lost_after:.0f} s"
        return said(BOUND, "False", "TrayLost", f"{listed(lost)} {since}: {why}")
    there = [one for one in seated if one.node is not None]
    if len(there) < seats:
        return _not_bound(view, seated, len(there), seats)
    silent = [one.node or "" for one in there if view.is_lost(one.node or "", 0.0)]
    if silent:
        return said(BOUND, "Unknown", "TrayNotReady", f"{listed(silent)} not ready")
    return said(BOUND, "True", "AllBound", f"{seats} members are on their trays{_beside(view)}")


def _beside(view: View) -> str:
    """Pods for which there is no seat: the job was made larger, or anew, after the gang was placed."""
    gated = [one.name for one in view.living if one.gate is not None and not one.going]
    if not gated:
        return ""
    why = "for which the gang has no seat: it is placed anew when all of its other pods have ended"
    return f"; beside them {listed(gated)}, {why}"


def _not_bound(view: View, seated: tuple[Member, ...], there: int, seats: int) -> Condition:
    progress = f"{there} of {seats} members are on their trays"
    if view.refusal:
        return said(BOUND, "False", "CannotBind", f"{progress}; {view.refusal}")
    waits = next((one for one in seated if one.node is None and one.waits_because), None)
    if waits is None:
        return said(BOUND, "False", "Binding", progress)
    return said(BOUND, "False", "Binding", f"{progress}; {waits.name}: {waits.waits_because}")


def dated(view: View, found: tuple[Condition, ...]) -> tuple[Condition, ...]:
    """With the times at which the status of each changed."""
    return tuple(_dated(view, one) for one in found)


def _dated(view: View, one: Condition) -> Condition:
    before = None if view.record is None else view.record.condition(one.type)
    now, since = whole_time(view.now), "" if before is None else before.last_transition_time
    # A time that is still to come was written by a clock that was ahead: nobody waits for it.
    same = before is not None and before.status == one.status and since <= now
    return msgspec.structs.replace(one, last_transition_time=since if same else now)


def notices(view: View, found: tuple[Condition, ...]) -> tuple[Notice, ...]:
    """Events about what turned true, or went wrong."""
    told = []
    for one in found:
        before = None if view.record is None else view.record.condition(one.type)
        is_news = before is None or (before.reason, before.message) != (one.reason, one.message)
        if is_news and one.reason in BAD:
            told.append(Notice(True, one.reason, one.message))
        elif one.status == "True" and not _was_so(before):
            told.append(Notice(False, one.reason, one.message))
    return tuple(told)


def _was_so(before: Condition | None) -> bool:
    """Who comes to a seat that was kept is not placed anew."""
    return before is not None and (before.status == "True" or (before.status, before.reason) == AWAITED)


def listed(names: tuple[str, ...] | list[str]) -> str:
    """Names for a message."""
    more = len(names) - _NAMED_AT_MOST
    shown = ", ".join(names[:_NAMED_AT_MOST])
    return f"{shown} and {more} more" if more > 0 else shown
