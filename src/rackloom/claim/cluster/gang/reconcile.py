"""One gang: from what is there to what to do next. Pure.

The order is the safety: all pods are there before a plan is recorded, it is recorded before a tray is
reserved, all trays are reserved and seen empty before a pod is let go, and a pod is pinned by the write that
lets it go. What was recorded is carried on, not made anew. A plan is given up only before any pod was let go:
where another gang, or a pod that was scheduled in the meantime, has one of its trays, or a tray is lost.
What takes anything back says so: it is decided once more from what the API server has then.
"""

from rackloom.claim.cluster.actions import Action
from rackloom.claim.cluster.gang import conditions, record, terms, trays
from rackloom.claim.cluster.gang.conditions import PLACED, said
from rackloom.claim.cluster.gang.decision import Decision, telling
from rackloom.claim.cluster.gang.ended import awaited_until, awaits_last
from rackloom.claim.cluster.gang.planned import decide_planned
from rackloom.claim.cluster.gang.record import Record
from rackloom.claim.cluster.gang.remaining import asked_for_fewer_at, asks_for_fewer, lacks_members, wish_of
from rackloom.claim.cluster.gang.settings import GangSettings
from rackloom.claim.cluster.gang.view import View
from rackloom.claim.domain.objects import Condition
from rackloom.errors import Refused


def reconcile(view: View, settings: GangSettings) -> Decision:
    """Decide about one gang."""
    if view.record is None:
        return Decision(actions=(record.opened(view.key),)) if view.living else Decision()
    if not view.living and not (awaits_last(view) and view.now < awaited_until(view, settings)):
        return Decision(actions=_ended(view, view.record), takes_back=True)
    if view.record.plan is None:
        return _unplanned(view, settings)
    return decide_planned(view, view.record, view.record.plan, settings)


def _ended(view: View, found: Record) -> tuple[Action, ...]:
    """Nobody of the gang holds anything any more: its trays first, then the record that names them."""
    return trays.freed(view.nodes, view.held, view.uid) or record.closed(found)


def _unplanned(view: View, settings: GangSettings) -> Decision:
    freed = trays.freed(view.nodes, view.held, view.uid)
    found = _why_not_planned(view, settings)
    if found is not None:
        takes_back = bool(freed) or asks_for_fewer(view, settings)
        return telling(view, (found,), freed, again=_again(view, settings), takes_back=takes_back)
    why = view.refusal
    placed = said(PLACED, "False", "DoesNotFit", why) if why else said(PLACED, "Unknown", "Planning", "")
    return telling(view, (placed,), freed, asks_planner=not freed, takes_back=bool(freed))


def _again(view: View, settings: GangSettings) -> float | None:
    """No event tells that fewer pods are to come."""
    if not lacks_members(view):
        return None
    ahead = asked_for_fewer_at(view, settings) - view.now
    return (ahead if ahead > 0 else settings.again) + 0.1


def _why_not_planned(view: View, settings: GangSettings) -> Condition | None:
    try:
        wish = wish_of(view)
    except Refused as refused:
        return said(PLACED, "False", "InvalidGang", str(refused))
    loose = (*view.strays, *view.let_go)
    if loose:
        named = conditions.listed([one.name for one in loose])
        why = "were not held until the gang was placed: delete all pods of the gang, and have them made anew"
        return said(PLACED, "False", "NotHeld", f"{named} {why}")
    try:
        terms.check(view.living, settings.clique_label, is_together=wish.segment is None)
    except Refused as refused:
        return said(PLACED, "False", "InvalidGang", str(refused))
    missing = conditions.waiting(view, wish) or conditions.waiting_for_claims(view)
    return missing or conditions.waiting_for_gates(view)
