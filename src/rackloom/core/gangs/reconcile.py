"""The phases of a gang, from its first pod to its last: one snapshot in, one decision out.

The order of the phases is what makes them safe:

1. collect: a GangPlan is created; then all pods are there, gated, and agree with each other;
2. plan: the placement search is asked, and its plan is recorded before any node is touched;
3. reserve: all trays of the plan get its taint;
4. check: after the settling time a fresh read finds the trays empty of other jobs' pods, which
   kube-scheduler may have bound before it saw the taint;
5. ungate: every pod is pinned and ungated in one write, and kube-scheduler binds it;
6. maintain: a lost tray, or a pod that cannot be bound, is replaced; trays that nobody will use are
   released;
7. end: when no pod is left, the taints are removed first, then the GangPlan that names them.

A recorded plan is carried on, not made anew. It is given up only before the first pod was ungated: when
a competing plan has the better right (it holds all of its trays, or is older), when a tray is lost and
no other is found, or when its pods are gone or were replaced by another job's. A decision that releases
trays, deletes pods or gives a plan up says so in `takes_back`; the controller then decides again from
what the API server has, not from its cache.
"""

from collections.abc import Iterator

import msgspec

from rackloom.core.domains.compute_domain import Condition
from rackloom.core.gangs import conditions, record, terms
from rackloom.core.gangs.assignment import (
    SlotAssignment,
    assign_slots,
    delete_member,
    pin_and_ungate,
    unschedulable_members,
)
from rackloom.core.gangs.completion import (
    awaits_last_pods,
    is_reduced,
    lacks_members,
    last_pods_awaited_until,
    longest_wait,
    may_have_unused_trays,
    owners_asked_at,
    owners_checked_at,
    remaining_spec,
    should_ask_owners,
    without_unused_trays,
)
from rackloom.core.gangs.conditions import (
    AWAITING_LAST_PODS,
    PLACED,
    RESERVED,
    GangDecision,
    decide_with_conditions,
    gang_condition,
)
from rackloom.core.gangs.record import GangRecord
from rackloom.core.gangs.snapshot import CompetingPlan, GangSnapshot
from rackloom.core.gangs.spec import GangSettings
from rackloom.core.kubernetes.objects import ObjectWrite, epoch_seconds
from rackloom.core.place.placement_values import GangPlan
from rackloom.errors import Refused

# A gang with a recorded plan: phases 3 to 6.


class _PlanProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a plan has come."""

    seats: SlotAssignment
    missing: tuple[str, ...]
    """Trays that are still to be reserved."""
    begun: bool
    """A pod was let go: from then on pods follow as they come, also the last ones of a rest."""
    whole: bool
    """Every seat has a pod that waits for it."""
    checked: bool
    awaits: bool
    """All have ended, and their Job makes the last of them anew."""

    @property
    def is_open(self) -> bool:
        """Whether pods may be let go."""
        return not self.missing and (self.begun or (self.whole and self.checked))

    @property
    def lacks_pods(self) -> bool:
        """Whether pods that were there when it was planned are gone, and none was let go."""
        return not self.begun and not self.whole

    @property
    def is_to_be_checked(self) -> bool:
        """Whether nothing lacks but a look at the reserved trays."""
        return not self.missing and not self.begun and self.whole and not self.checked


def decide_planned(
    view: GangSnapshot, found: GangRecord, plan: GangPlan, settings: GangSettings
) -> GangDecision:
    """Carry a plan on, or give it up while that hurts nobody."""
    seats = assign_slots(view, plan)
    awaits = awaits_last_pods(view)
    progress = _PlanProgress(
        seats=seats,
        missing=_unreserved_trays(view, found, settings),
        begun=bool(view.let_go) or awaits or (is_reduced(found) and bool(seats.openings)),
        whole=len(seats.openings) == len(plan.seats),
        checked=view.checked == plan,
        awaits=awaits,
    )
    if not progress.begun and _is_to_be_given_up(view, found, progress, settings):
        return GangDecision(actions=(record.withdraw_plan(found),), takes_back=True)
    rest = None if view.makers is None else without_unused_trays(view, found)
    if rest is not None:
        return GangDecision(actions=(record.reduce_plan(found, rest),), takes_back=True)
    settling = _seconds_to_settle(view, found, settings) if progress.is_to_be_checked else 0.0
    broken = bool(view.lost(settings.lost_after)) or bool(unschedulable_members(view, seats, settings))
    freed, sent = _release_surplus_trays(view, found), _delete_misplaced_pods(view, seats, settings)
    return decide_with_conditions(
        view,
        _plan_conditions(view, found, plan, progress, settings),
        (*_reserve_trays(view, progress.missing), *freed, *sent, *_ungate_pods(view, progress, settings)),
        asks_planner=broken or (progress.is_to_be_checked and not settling),
        again=settling or _recheck_planned_after(view, found, plan, progress, settings),
        takes_back=bool(freed or sent)
        or (may_have_unused_trays(view, plan) and _should_ask_owners_now(view, settings)),
    )


def _plan_conditions(
    view: GangSnapshot, found: GangRecord, plan: GangPlan, progress: _PlanProgress, settings: GangSettings
) -> tuple[Condition, ...]:
    return (
        _placed_condition(plan, progress, settings),
        _reserved_condition(view, found, progress.missing),
        conditions.bound_condition(view, progress.seats.seated, len(plan.seats), settings.lost_after),
    )


def _placed_condition(plan: GangPlan, progress: _PlanProgress, settings: GangSettings) -> Condition:
    if progress.awaits:
        until = f"if it makes none, their trays are given back after {longest_wait(settings):.0f} s"
        why = f"all pods have ended, and their Job owes {len(plan.seats)}: {until}"
        return gang_condition(PLACED, *AWAITING_LAST_PODS, why)
    if not progress.lacks_pods:
        return gang_condition(PLACED, "True", "Placed", plan.reason)
    there = f"pods that are there: {len(progress.seats.openings)} of {len(plan.seats)}"
    why = f"{there}; without the rest, its trays are given back after {settings.bind_after:.0f} s"
    return gang_condition(PLACED, "False", "WaitingForMembers", why)


def _ungate_pods(
    view: GangSnapshot, progress: _PlanProgress, settings: GangSettings
) -> Iterator[ObjectWrite]:
    """Not to a tray that is lost: its members are about to have another."""
    for member, tray in progress.seats.openings if progress.is_open else ():
        if not view.is_lost(tray, settings.lost_after):
            yield pin_and_ungate(member, tray, view.uid, view.now)


def _is_to_be_given_up(
    view: GangSnapshot, found: GangRecord, progress: _PlanProgress, settings: GangSettings
) -> bool:
    return (
        is_reduced(found)
        or _yields_to_competitor(view, found)
        or _is_lost_for_good(view, settings)
        or _belongs_to_other_pods(view, found)
        or (progress.lacks_pods and view.now >= _kept_until(view, found, settings))
    )


def _kept_until(view: GangSnapshot, found: GangRecord, settings: GangSettings) -> float:
    """When a plan is given up of which pods are gone: nobody else has its trays till then."""
    placed = found.condition(PLACED)
    if placed is None or placed.status != "False":
        return view.now + settings.bind_after
    return (epoch_seconds(placed.last_transition_time) or view.now) + settings.bind_after


def _is_lost_for_good(view: GangSnapshot, settings: GangSettings) -> bool:
    """Whether a tray was lost, and the planner found no other for its members."""
    return bool(view.lost(settings.lost_after)) and bool(view.refusal)


def _belongs_to_other_pods(view: GangSnapshot, found: GangRecord) -> bool:
    """Whether all pods of the plan are gone, and those that came under its name are so many others."""
    if found.gang is None or any(one.gate is None for one in view.living):
        return False
    try:
        return {group.name: group.members for group in found.gang.groups} != dict(remaining_spec(view).sizes)
    except Refused:
        # They are being made anew one by one: some are of the old job still.
        return False


def _yields_to_competitor(view: GangSnapshot, found: GangRecord) -> bool:
    """Whether a rival has the better right: it is whole, or it is older. One of two always has."""
    return any(_has_better_right(rival, found) for rival in view.rivals)


def _has_better_right(rival: CompetingPlan, found: GangRecord) -> bool:
    return rival.is_whole or (rival.created, rival.uid) < (found.created, found.uid)


def _unreserved_trays(view: GangSnapshot, found: GangRecord, settings: GangSettings) -> tuple[str, ...]:
    """Trays that are still to be reserved. A tray that is lost holds up nobody who was to go elsewhere."""
    wanted = (name for name in found.reserved if view.uid not in _reserving_uids(view, name))
    if not view.let_go:
        return tuple(wanted)
    return tuple(name for name in wanted if not view.is_lost(name, settings.lost_after))


def _seconds_to_settle(view: GangSnapshot, found: GangRecord, settings: GangSettings) -> float:
    """Seconds until a look at the reserved trays tells whether they are empty."""
    reserved = found.condition(RESERVED)
    if reserved is None or reserved.status != "True":
        return settings.settle
    since = epoch_seconds(reserved.last_transition_time) or view.now
    return max(since + settings.settle - view.now, 0.0)


def _reserving_uids(view: GangSnapshot, name: str) -> tuple[str, ...]:
    return view.nodes[name].holders if name in view.nodes else ()


def _reserve_trays(view: GangSnapshot, missing: tuple[str, ...]) -> tuple[ObjectWrite, ...]:
    free = (name for name in missing if name in view.nodes and not view.nodes[name].holders)
    return tuple(record.reserve_tray(view.nodes[name], view.uid) for name in free)


def _release_surplus_trays(view: GangSnapshot, found: GangRecord) -> tuple[ObjectWrite, ...]:
    """Trays that the plan has no more, once none of the gang's pods is on them."""
    used = {one.node for one in view.living}
    surplus = (name for name in view.held if name not in found.reserved and name not in used)
    return record.release_trays(view.nodes, tuple(surplus), view.uid)


def _delete_misplaced_pods(
    view: GangSnapshot, seats: SlotAssignment, settings: GangSettings
) -> tuple[ObjectWrite, ...]:
    """Pods whose seat is elsewhere by now. Where the node is lost, nobody else will ever end them."""
    dead = {one.tray for one in view.let_go if one.tray and view.is_lost(one.tray, settings.lost_after)}
    kept = {one.uid for one in seats.seated}
    ending = (one for one in view.let_go if one.going and one.tray in dead and one.uid not in kept)
    return tuple(delete_member(misfit, at_once=misfit.tray in dead) for misfit in (*seats.misfits, *ending))


def _reserved_condition(view: GangSnapshot, found: GangRecord, missing: tuple[str, ...]) -> Condition:
    contested = tuple(name for name in missing if _reserving_uids(view, name))
    if contested:
        taken = f"{conditions.shortened(contested)} reserved for another gang"
        return gang_condition(RESERVED, "False", "TrayTaken", taken)
    if missing:
        return gang_condition(
            RESERVED, "False", "Reserving", f"{conditions.shortened(missing)} still to be reserved"
        )
    return gang_condition(RESERVED, "True", "Reserved", f"{len(found.reserved)} trays are reserved")


def _should_ask_owners_now(view: GangSnapshot, settings: GangSettings) -> bool:
    return view.makers is None and view.now >= owners_checked_at(view, settings)


def _recheck_planned_after(
    view: GangSnapshot, found: GangRecord, plan: GangPlan, progress: _PlanProgress, settings: GangSettings
) -> float | None:
    """The next moment at which a tray is lost, a pod late, or the plan of pods that are gone given up."""
    since = (node.not_ready_since for node in view.nodes.values())
    due = [moment + settings.lost_after for moment in since if moment is not None]
    due += [_kept_until(view, found, settings)] if progress.lacks_pods else []
    late = (one.released_at for one in progress.seats.seated if one.node is None)
    due += [moment + settings.bind_after for moment in late if moment is not None]
    # No event tells that a Job has given up.
    due += [view.now + settings.again, last_pods_awaited_until(view, settings)] if progress.awaits else []
    due += [view.now + settings.again] if may_have_unused_trays(view, plan) else []
    ahead = [moment - view.now for moment in due if moment > view.now]
    return min(ahead) + 0.1 if ahead else None


# The entry point, and a gang without a plan: phases 1, 2 and 7.


def reconcile_gang(view: GangSnapshot, settings: GangSettings) -> GangDecision:
    """Decide about one gang."""
    if view.record is None:
        return GangDecision(actions=(record.create_record(view.key),)) if view.living else GangDecision()
    if not view.living and not (
        awaits_last_pods(view) and view.now < last_pods_awaited_until(view, settings)
    ):
        return GangDecision(actions=_end_gang(view, view.record), takes_back=True)
    if view.record.plan is None:
        return _reconcile_unplanned(view, settings)
    return decide_planned(view, view.record, view.record.plan, settings)


def _end_gang(view: GangSnapshot, found: GangRecord) -> tuple[ObjectWrite, ...]:
    """Nobody of the gang holds anything any more: its trays first, then the record that names them."""
    return record.release_trays(view.nodes, view.held, view.uid) or record.close_record(found)


def _reconcile_unplanned(view: GangSnapshot, settings: GangSettings) -> GangDecision:
    freed = record.release_trays(view.nodes, view.held, view.uid)
    found = _why_not_planned(view, settings)
    if found is not None:
        takes_back = bool(freed) or should_ask_owners(view, settings)
        return decide_with_conditions(
            view, (found,), freed, again=_recheck_unplanned_after(view, settings), takes_back=takes_back
        )
    why = view.refusal
    placed = (
        gang_condition(PLACED, "False", "DoesNotFit", why)
        if why
        else gang_condition(PLACED, "Unknown", "Planning", "")
    )
    return decide_with_conditions(view, (placed,), freed, asks_planner=not freed, takes_back=bool(freed))


def _recheck_unplanned_after(view: GangSnapshot, settings: GangSettings) -> float | None:
    """No event tells that fewer pods are to come."""
    if not lacks_members(view):
        return None
    ahead = owners_asked_at(view, settings) - view.now
    return (ahead if ahead > 0 else settings.again) + 0.1


def _why_not_planned(view: GangSnapshot, settings: GangSettings) -> Condition | None:
    try:
        wish = remaining_spec(view)
    except Refused as refused:
        return gang_condition(PLACED, "False", "InvalidGang", str(refused))
    loose = (*view.strays, *view.let_go)
    if loose:
        named = conditions.shortened([one.name for one in loose])
        why = "were not held until the gang was placed: delete all pods of the gang, and have them made anew"
        return gang_condition(PLACED, "False", "NotHeld", f"{named} {why}")
    try:
        terms.check_terms(view.living, settings.clique_label, is_together=wish.segment is None)
    except Refused as refused:
        return gang_condition(PLACED, "False", "InvalidGang", str(refused))
    missing = conditions.waiting_for_members(view, wish) or conditions.waiting_for_claims(view)
    return missing or conditions.waiting_for_gates(view)
