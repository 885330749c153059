"""A gang with a recorded plan: its trays reserved and seen empty, then its pods let go. Pure."""

from collections.abc import Iterator

import msgspec

from rackloom.claim.cluster.actions import Action
from rackloom.claim.cluster.gang import conditions, record, trays
from rackloom.claim.cluster.gang.conditions import AWAITED, PLACED, RESERVED, said
from rackloom.claim.cluster.gang.decision import Decision, telling
from rackloom.claim.cluster.gang.ended import (
    awaited_until,
    awaits_last,
    is_rest,
    longest_wait,
    may_have_unused,
    proof_is_sought_at,
    without_unused,
)
from rackloom.claim.cluster.gang.pins import let_go, send_away
from rackloom.claim.cluster.gang.record import Record
from rackloom.claim.cluster.gang.remaining import wish_of
from rackloom.claim.cluster.gang.seating import Seating, seating, stuck
from rackloom.claim.cluster.gang.settings import GangSettings
from rackloom.claim.cluster.gang.view import Rival, View
from rackloom.claim.domain.objects import Condition
from rackloom.claim.kube.timestamps import seconds_of
from rackloom.claim.place.values import Plan
from rackloom.errors import Refused


class _Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a plan has come."""

    seats: Seating
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


def decide_planned(view: View, found: Record, plan: Plan, settings: GangSettings) -> Decision:
    """Carry a plan on, or give it up while that hurts nobody."""
    seats = seating(view, plan)
    awaits = awaits_last(view)
    progress = _Progress(
        seats=seats,
        missing=_missing(view, found, settings),
        begun=bool(view.let_go) or awaits or (is_rest(found) and bool(seats.openings)),
        whole=len(seats.openings) == len(plan.seats),
        checked=view.checked == plan,
        awaits=awaits,
    )
    if not progress.begun and _is_to_be_given_up(view, found, progress, settings):
        return Decision(actions=(record.withdrawn(found),), takes_back=True)
    rest = None if view.makers is None else without_unused(view, found)
    if rest is not None:
        return Decision(actions=(record.reduced(found, rest),), takes_back=True)
    settling = _to_settle(view, found, settings) if progress.is_to_be_checked else 0.0
    broken = bool(view.lost(settings.lost_after)) or bool(stuck(view, seats, settings))
    freed, sent = _dropped(view, found), _dismissed(view, seats, settings)
    return telling(
        view,
        _said(view, found, plan, progress, settings),
        (*_reserving(view, progress.missing), *freed, *sent, *_letting_go(view, progress, settings)),
        asks_planner=broken or (progress.is_to_be_checked and not settling),
        again=settling or _again(view, found, plan, progress, settings),
        takes_back=bool(freed or sent) or (may_have_unused(view, plan) and _seeks_proof(view, settings)),
    )


def _said(
    view: View, found: Record, plan: Plan, progress: _Progress, settings: GangSettings
) -> tuple[Condition, ...]:
    return (
        _placed(plan, progress, settings),
        _reserved(view, found, progress.missing),
        conditions.bound(view, progress.seats.seated, len(plan.seats), settings.lost_after),
    )


def _placed(plan: Plan, progress: _Progress, settings: GangSettings) -> Condition:
    if progress.awaits:
        until = f"if it makes none, their trays are given back after {longest_wait(settings):.0f} s"
        why = f"all pods have ended, and their Job owes {len(plan.seats)}: {until}"
        return said(PLACED, *AWAITED, why)
    if not progress.lacks_pods:
        return said(PLACED, "True", "Placed", plan.reason)
    there = f"pods that are there: {len(progress.seats.openings)} of {len(plan.seats)}"
    why = f"{there}; without the rest, its trays are given back after {settings.bind_after:.0f} s"
    return said(PLACED, "False", "WaitingForMembers", why)


def _letting_go(view: View, progress: _Progress, settings: GangSettings) -> Iterator[Action]:
    """Not to a tray that is lost: its members are about to have another."""
    for member, tray in progress.seats.openings if progress.is_open else ():
        if not view.is_lost(tray, settings.lost_after):
            yield let_go(member, tray, view.uid, view.now)


def _is_to_be_given_up(view: View, found: Record, progress: _Progress, settings: GangSettings) -> bool:
    return (
        is_rest(found)
        or _yields(view, found)
        or _is_spoilt(view, settings)
        or _is_of_others(view, found)
        or (progress.lacks_pods and view.now >= _kept_until(view, found, settings))
    )


def _kept_until(view: View, found: Record, settings: GangSettings) -> float:
    """When a plan is given up of which pods are gone: nobody else has its trays till then."""
    placed = found.condition(PLACED)
    if placed is None or placed.status != "False":
        return view.now + settings.bind_after
    return (seconds_of(placed.last_transition_time) or view.now) + settings.bind_after


def _is_spoilt(view: View, settings: GangSettings) -> bool:
    """Whether a tray was lost, and the planner found no other for its members."""
    return bool(view.lost(settings.lost_after)) and bool(view.refusal)


def _is_of_others(view: View, found: Record) -> bool:
    """Whether all pods of the plan are gone, and those that came under its name are so many others."""
    if found.gang is None or any(one.gate is None for one in view.living):
        return False
    try:
        return {one.name: one.members for one in found.gang.groups} != dict(wish_of(view).sizes)
    except Refused:
        # They are being made anew one by one: some are of the old job still.
        return False


def _yields(view: View, found: Record) -> bool:
    """Whether a rival has the better right: it is whole, or it is older. One of two always has."""
    return any(_is_before(one, found) for one in view.rivals)


def _is_before(rival: Rival, found: Record) -> bool:
    return rival.is_whole or (rival.created, rival.uid) < (found.created, found.uid)


def _missing(view: View, found: Record, settings: GangSettings) -> tuple[str, ...]:
    """Trays that are still to be reserved. A tray that is lost holds up nobody who was to go elsewhere."""
    wanted = (name for name in found.reserved if view.uid not in _holders(view, name))
    if not view.let_go:
        return tuple(wanted)
    return tuple(name for name in wanted if not view.is_lost(name, settings.lost_after))


def _to_settle(view: View, found: Record, settings: GangSettings) -> float:
    """Seconds until a look at the reserved trays tells whether they are empty."""
    reserved = found.condition(RESERVED)
    if reserved is None or reserved.status != "True":
        return settings.settle
    since = seconds_of(reserved.last_transition_time) or view.now
    return max(since + settings.settle - view.now, 0.0)


def _holders(view: View, name: str) -> tuple[str, ...]:
    return view.nodes[name].holders if name in view.nodes else ()


def _reserving(view: View, missing: tuple[str, ...]) -> tuple[Action, ...]:
    free = (name for name in missing if name in view.nodes and not view.nodes[name].holders)
    return tuple(trays.reserve(view.nodes[name], view.uid) for name in free)


def _dropped(view: View, found: Record) -> tuple[Action, ...]:
    """Trays that the plan has no more, once none of the gang's pods is on them."""
    used = {one.node for one in view.living}
    surplus = (name for name in view.held if name not in found.reserved and name not in used)
    return trays.freed(view.nodes, tuple(surplus), view.uid)


def _dismissed(view: View, seats: Seating, settings: GangSettings) -> tuple[Action, ...]:
    """Pods whose seat is elsewhere by now. Where the node is lost, nobody else will ever end them."""
    dead = {one.tray for one in view.let_go if one.tray and view.is_lost(one.tray, settings.lost_after)}
    kept = {one.uid for one in seats.seated}
    ending = (one for one in view.let_go if one.going and one.tray in dead and one.uid not in kept)
    return tuple(send_away(one, at_once=one.tray in dead) for one in (*seats.misfits, *ending))


def _reserved(view: View, found: Record, missing: tuple[str, ...]) -> Condition:
    contested = tuple(name for name in missing if _holders(view, name))
    if contested:
        taken = f"{conditions.listed(contested)} reserved for another gang"
        return said(RESERVED, "False", "TrayTaken", taken)
    if missing:
        return said(RESERVED, "False", "Reserving", f"{conditions.listed(missing)} still to be reserved")
    return said(RESERVED, "True", "Reserved", f"{len(found.reserved)} trays are reserved")


def _seeks_proof(view: View, settings: GangSettings) -> bool:
    return view.makers is None and view.now >= proof_is_sought_at(view, settings)


def _again(
    view: View, found: Record, plan: Plan, progress: _Progress, settings: GangSettings
) -> float | None:
    """The next moment at which a tray is lost, a pod late, or the plan of pods that are gone given up."""
    since = (one.not_ready_since for one in view.nodes.values())
    due = [moment + settings.lost_after for moment in since if moment is not None]
    due += [_kept_until(view, found, settings)] if progress.lacks_pods else []
    late = (one.released_at for one in progress.seats.seated if one.node is None)
    due += [moment + settings.bind_after for moment in late if moment is not None]
    # No event tells that a Job has given up.
    due += [view.now + settings.again, awaited_until(view, settings)] if progress.awaits else []
    due += [view.now + settings.again] if may_have_unused(view, plan) else []
    ahead = [moment - view.now for moment in due if moment > view.now]
    return min(ahead) + 0.1 if ahead else None
