"""Members that ended for good, and the trays that nobody of the gang will use again. Pure.

A pod that failed or was deleted may be made anew, and then it needs its tray. Only one that succeeded is not:
where its Job says how many are to succeed, so many seats less are needed. Which of them does not matter, as a
pod that is made anew takes any that is free. All pods of the gang must be of that one Job: whoever else is
among them may make another Job for the seats of the first. A gang of several groups has several owners, also
while a pod of one of them is between two lives and cannot be seen.
"""

import re
from collections import Counter
from collections.abc import Mapping

from msgspec.structs import replace

from rackloom.claim.cluster.admission.shapes import Owner
from rackloom.claim.cluster.gang.makers import Maker
from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.cluster.gang.record import Record
from rackloom.claim.cluster.gang.view import View
from rackloom.claim.place.values import Gang, Plan

_GIVEN_BACK = re.compile(r"trays given back: (\d+); ")
"""Before the reason of a plan of which trays were given back already."""


def is_rest(found: Record) -> bool:
    """Whether seats of members that ended were taken out of a plan."""
    if found.gang is None or found.plan is None:
        return False
    return len(found.plan.seats) < _size(found.gang)


def seekers(view: View) -> tuple[Member, ...]:
    """Gated pods that may have a seat; of the rest of a plan, only those of the Job whose pods are there.

    A job that was made anew needs more than the rest, and gets a whole plan once the old one is gone.
    """
    gated = tuple(one for one in view.living if one.gate is not None and not one.going)
    if view.record is None or not is_rest(view.record):
        return gated
    old = {one.job for one in view.members if not one.going and (one.is_done or one.tray is not None)}
    return tuple(one for one in gated if one.job is not None and one.job in old)


def may_have_unused(view: View, plan: Plan) -> bool:
    """Whether it is worth asking the Job how many pods it makes: once for each use of the trays."""
    used = _used(view)
    idle = any(one.is_done and one.tray in plan.trays and one.tray not in used for one in view.members)
    if not idle or view.record is None or _only_job(view, view.record.gang) is None:
        return False
    return view.all_used is None or view.all_used != view.use


def without_unused(view: View, found: Record, makers: Mapping[str, Maker]) -> Plan | None:
    """The plan without trays that nobody will use again, and their cliques' spares; None: all are used."""
    job = _only_job(view, found.gang)
    if found.gang is None or found.plan is None or job is None or job.uid not in makers:
        return None
    left = len(found.plan.seats) - _needed(view, found.gang, makers[job.uid])
    kept = dict.fromkeys(found.plan.trays)
    used, done = _used(view), {one.tray for one in view.members if one.is_done}
    seats = Counter(seat.tray for seat in found.plan.seats)
    for tray in sorted((one for one in kept if one not in used), key=lambda one: one not in done):
        if seats[tray] <= left:
            left -= seats[tray]
            del kept[tray]
    return _on(found, found.plan, tuple(kept)) if len(kept) < len(found.plan.trays) else None


def _only_job(view: View, gang: Gang | None) -> Owner | None:
    """The Job of which all pods of the gang are: it has one template, so they are of one group."""
    if gang is None or len(gang.groups) != 1:
        return None
    jobs = {one.job for one in view.members}
    return jobs.pop() if len(jobs) == 1 else None


def _used(view: View) -> set[str | None]:
    return {tray for one in view.living for tray in (one.tray, one.node)}


def _needed(view: View, gang: Gang, maker: Maker) -> int:
    """Seats for all that are still to succeed; of an index that succeeds twice, one is taken off."""
    done = (one for one in view.members if one.is_done)
    if maker.is_indexed:
        successes = len({index for one in done if (index := one.rank[0]) < maker.completions})
    else:
        successes = sum(1 for _ in done)
    return max(_size(gang), maker.completions) - successes


def _size(gang: Gang) -> int:
    return sum(group.members for group in gang.groups)


def _on(found: Record, plan: Plan, trays: tuple[str, ...]) -> Plan:
    """The price was that of the whole: what the rest costs is not known."""
    cliques = {found.cliques.get(one, one) for one in trays}
    return replace(
        plan,
        seats=tuple(seat for seat in plan.seats if seat.tray in trays),
        cliques=tuple(one for one in plan.cliques if one in cliques),
        spares=tuple(one for one in plan.spares if found.cliques.get(one, one) in cliques),
        price=(),
        reason=_given_back(plan, len(plan.trays) - len(trays)),
    )


def _given_back(plan: Plan, trays: int) -> str:
    before = _GIVEN_BACK.match(plan.reason)
    first = plan.reason[before.end() :] if before else plan.reason
    return f"trays given back: {trays + (int(before[1]) if before else 0)}; {first}"
