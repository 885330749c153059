"""Members that ended for good, and the trays that nobody of the gang will use again. Pure.

A pod that failed or was deleted may be made anew, and then it needs its tray. What is given back is proven:

- One Job makes all pods of the gang, and says how many are to succeed: so many seats less are needed as have.
  Which of them does not matter, as a pod that is made anew takes any that is free. A gang of several groups
  has several owners, also while a pod of one of them is between two lives and cannot be seen; and whoever is
  among them beside the Job may make another one for the same seats.
- All pods are of one MPIJob that is over: no pod of it that ended comes back; nor one that was deleted, where
  the MPIJob has as many replicas as the gang has members.
- Nobody owns any of the pods: one that ended stays ended, and there is nobody to make another.
"""

import re
from collections import Counter

from msgspec.structs import replace

from rackloom.claim.cluster.admission.shapes import Owner
from rackloom.claim.cluster.gang.conditions import AWAITED, PLACED
from rackloom.claim.cluster.gang.makers import LONGEST_PAUSE, MPI_JOB, Finished, Maker
from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.cluster.gang.record import Record
from rackloom.claim.cluster.gang.settings import GangSettings
from rackloom.claim.cluster.gang.view import View
from rackloom.claim.kube.timestamps import seconds_of
from rackloom.claim.place.values import Gang, Plan, Seat

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


def awaits_last(view: View) -> bool:
    """Whether all pods have ended, and their Job makes the last of them anew: never again the whole gang.

    A Job waits between two tries, 10 s and longer, and has no pod then. One that cannot make pods (its quota
    is spent, its account is gone, another controller manages it) never says so: see `awaited_until`.
    """
    gang = None if view.record is None or view.record.plan is None else view.record.gang
    job = _only_job(view, gang)
    maker = None if job is None else _maker(view, job)
    if view.living or gang is None or maker is None or maker.is_still:
        return False
    over = maker.over(view.members)
    return 0 < maker.completions - over <= _size(gang) and over > 0 and maker.makes_all_of(_size(gang))


def awaited_until(view: View, settings: GangSettings) -> float:
    """When the trays are given back to which no pod came, in seconds since the epoch.

    Placed is Unknown since nobody was left. That holds too where the last pod was deleted and left no trace.
    """
    placed = None if view.record is None else view.record.condition(PLACED)
    if placed is None or (placed.status, placed.reason) != AWAITED:
        return view.now + longest_wait(settings)
    return (seconds_of(placed.last_transition_time) or view.now) + longest_wait(settings)


def longest_wait(settings: GangSettings) -> float:
    """Seconds that a Job may take for its last pods."""
    return LONGEST_PAUSE + settings.bind_after


def may_have_unused(view: View, plan: Plan) -> bool:
    """Whether a tray is idle, and somebody may say that it is to stay so."""
    used = _used(view)
    idle = {tray for tray in plan.trays if tray not in used}
    # While pods wait at their gate, trays are idle that they go to.
    if any(one.gate is not None for one in view.living):
        idle &= {one.tray for one in view.members if one.ended}
    return bool(idle) and view.record is not None and _may_be_proven(view, view.record.gang)


def proof_is_sought_at(view: View, settings: GangSettings) -> float:
    """When the owners of the pods are asked: at once for each use of the trays, then ever less often.

    What they say is behind the pods: an MPIJob is over some seconds after its launcher.
    """
    if view.looked is None or view.looked.use != view.use:
        return view.now
    return view.looked.again_at(settings.again)


def without_unused(view: View, found: Record) -> Plan | None:
    """The plan without trays that nobody will use again, and their cliques' spares; None: all are used.

    Of a gang that awaits its last pods, just their seats are left.
    """
    if found.gang is None or found.plan is None:
        return None
    over, seats = _over(view, found.gang), Counter(seat.group for seat in found.plan.seats)
    sizes = {group.name: group.members for group in found.gang.groups}
    left = Counter({group: seats[group] + over[group] - sizes[group] for group in seats})
    kept = _without_trays(view, found.plan, left)
    if awaits_last(view):
        kept = _without_seats(kept, left)
    return _on(found, found.plan, kept) if len(kept) < len(found.plan.seats) else None


def _without_trays(view: View, plan: Plan, left: Counter[str]) -> tuple[Seat, ...]:
    """Whole trays, those of members that ended first; what can be taken off further stays in `left`."""
    used, done = _used(view), {one.tray for one in view.members if one.ended}
    gone = set()
    for tray in sorted(dict.fromkeys(plan.trays), key=lambda one: one not in done):
        here = Counter(seat.group for seat in plan.seats if seat.tray == tray)
        if tray not in used and all(left[group] >= count for group, count in here.items()):
            left.subtract(here)
            gone.add(tray)
    return tuple(seat for seat in plan.seats if seat.tray not in gone)


def _without_seats(seats: tuple[Seat, ...], left: Counter[str]) -> tuple[Seat, ...]:
    kept = []
    for seat in reversed(seats):
        if left[seat.group] > 0:
            left[seat.group] -= 1
        else:
            kept.append(seat)
    return tuple(reversed(kept))


def _over(view: View, gang: Gang) -> Counter[str]:
    """By group, how many members are proven to come never again."""
    job = _only_job(view, gang)
    maker = None if job is None else _maker(view, job)
    if maker is not None and (awaits_last(view) or not maker.is_owned):
        more = max(maker.completions - _size(gang), 0)
        return Counter({gang.groups[0].name: max(maker.over(view.members) - more, 0)})
    finished = _finished(view)
    sizes = {one.name: one.members for one in gang.groups}
    if finished is not None and finished.makes_all_of(view.key.name, sizes):
        return Counter(sizes) - Counter(one.group for one in view.living)
    if _are_bare(view) or finished is not None:
        return Counter(one.group for one in view.members if one.ended)
    return Counter()


def _may_be_proven(view: View, gang: Gang | None) -> bool:
    """Whether who makes the pods is such that it could tell."""
    kinds = {(one.owner.api_version, one.owner.kind) for one in view.members if one.owner is not None}
    is_mpi = (MPI_JOB.api_version, MPI_JOB.kind) in kinds
    return _only_job(view, gang) is not None or _are_bare(view) or is_mpi


def _are_bare(view: View) -> bool:
    return all(one.is_bare for one in view.members)


def _finished(view: View) -> Finished | None:
    """The MPIJob that is over, of which all pods are."""
    makers = view.makers or {}
    found = [None if one.owner is None else makers.get(one.owner.uid) for one in view.members]
    first = found[0] if found else None
    return first if isinstance(first, Finished) and all(one == first for one in found) else None


def _maker(view: View, job: Owner) -> Maker | None:
    found = (view.makers or {}).get(job.uid)
    return found if isinstance(found, Maker) else None


def _only_job(view: View, gang: Gang | None) -> Owner | None:
    """The Job of which all pods of the gang are: it has one template, so they are of one group."""
    if gang is None or len(gang.groups) != 1:
        return None
    jobs = {one.job for one in view.members}
    return jobs.pop() if len(jobs) == 1 else None


def _used(view: View) -> set[str | None]:
    return {tray for one in view.living for tray in (one.tray, one.node)}


def _size(gang: Gang) -> int:
    return sum(group.members for group in gang.groups)


def _on(found: Record, plan: Plan, seats: tuple[Seat, ...]) -> Plan:
    """The price was that of the whole: what the rest costs is not known."""
    trays = {seat.tray for seat in seats}
    cliques = {found.cliques.get(one, one) for one in trays}
    return replace(
        plan,
        seats=seats,
        cliques=tuple(one for one in plan.cliques if one in cliques),
        spares=tuple(one for one in plan.spares if found.cliques.get(one, one) in cliques),
        price=(),
        reason=_given_back(plan, len(set(plan.trays)) - len(trays)),
    )


def _given_back(plan: Plan, trays: int) -> str:
    before = _GIVEN_BACK.match(plan.reason)
    first = plan.reason[before.end() :] if before else plan.reason
    count = trays + (int(before[1]) if before else 0)
    return f"trays given back: {count}; {first}" if count else first
