"""Which members of a gang are still to come, and which reserved trays nobody of it will use again.

A pod that failed or was deleted may be made anew and then needs its tray. So a tray is given back, and
a gang is planned for fewer members, only on proof from the owners of the pods:

- One Job makes all pods: as many slots are released as completions are over. Which pods succeeded does
  not matter, because a replacement takes any free slot.
- All pods belong to one MPIJob that is over: no pod that ended comes back.
- No pod has an owner: what ended stays ended.

Jobs that were suspended after some pods had succeeded create only the others again; the gang then waits
for those and no more. A group is waited for as a whole unless its Jobs are known to make all of its
pods.

When all pods have ended and their Job still owes the last ones, their slots are kept for the Job's
longest back-off plus `bind_after`, then released. No event says when an owner has something new to say:
owners are asked again at growing intervals while the use of the trays is unchanged.
"""

import re
from collections import Counter
from typing import TypeGuard

import msgspec
from msgspec.structs import replace

from rackloom.core.gangs.conditions import AWAITING_LAST_PODS, PLACED
from rackloom.core.gangs.members import LONGEST_JOB_BACKOFF, MPI_JOB, FinishedMPIJob, GangMember, OwnerJob
from rackloom.core.gangs.record import GangRecord
from rackloom.core.gangs.snapshot import GangSnapshot
from rackloom.core.gangs.spec import GangSettings, GangSpec
from rackloom.core.kubernetes.objects import epoch_seconds
from rackloom.core.kubernetes.pods import OwnerReference
from rackloom.core.place.placement_values import Gang, GangPlan, MemberAssignment
from rackloom.errors import Refused

# Members that are still to come.


class _JobProgress(msgspec.Struct, frozen=True):
    """A Job, and the group of its pods: it has one template."""

    group: str
    job: OwnerJob
    over: int

    @property
    def left(self) -> int:
        """Pods that it has at a time from now on."""
        if self.job.over_since is not None:
            return 0
        return max(min(self.job.parallelism, self.job.completions - self.over), 0)


def remaining_spec(view: GangSnapshot) -> GangSpec:
    """What the pods ask for, but no more members than their Jobs still make. Raises Refused."""
    wish, works = view.wish(), _of_latest_run(_job_progress(view))
    left = (
        (name, _members_to_come(size, [work for work in works if work.group == name]))
        for name, size in wish.sizes
    )
    sizes = tuple((name, size) for name, size in left if size)
    return replace(wish, sizes=sizes) if sizes else wish


def has_fewer_to_come(view: GangSnapshot) -> bool:
    """Whether their Jobs make fewer pods than the gang had at first."""
    try:
        return remaining_spec(view) != view.wish()
    except Refused:
        return False


def lacks_members(view: GangSnapshot) -> bool:
    """Whether pods are missing of the whole gang."""
    try:
        sizes = view.wish().sizes
    except Refused:
        return False
    here = Counter(one.group for one in view.living if not one.going)
    return any(here[name] < size for name, size in sizes)


def do_owners_matter(view: GangSnapshot) -> bool:
    """Whether it matters how many pods are still to come."""
    return any(member.ended for member in view.members) or lacks_members(view)


def should_ask_owners(view: GangSnapshot, settings: GangSettings) -> bool:
    """Whether to ask the owners of the pods how many are still to come.

    Pods of a gang that has just begun come one by one: nobody is asked at each of them.
    """
    if view.makers is not None or not lacks_members(view):
        return False
    were_fewer = view.looked is not None and view.looked.are_fewer
    return were_fewer or view.now >= owners_asked_at(view, settings)


def owners_asked_at(view: GangSnapshot, settings: GangSettings) -> float:
    """When the owners are asked, in seconds since the epoch: ever less often while they say the same."""
    if view.looked is not None:
        return view.looked.again_at(settings.again)
    placed = None if view.record is None else view.record.condition(PLACED)
    since = None if placed is None else epoch_seconds(placed.last_transition_time)
    return (since or view.now) + settings.again


def _members_to_come(size: int, works: list[_JobProgress]) -> int:
    """Members that are still to come of a group."""
    if sum(work.job.at_once for work in works) < size:
        return size
    return min(size, sum(work.left for work in works))


def _job_progress(view: GangSnapshot) -> tuple[_JobProgress, ...]:
    """The Jobs that make the pods; none where one of them does not say, or others make pods too."""
    pods: dict[str, list[GangMember]] = {}
    for member in view.members:
        pods.setdefault("" if member.job is None else member.job.uid, []).append(member)
    makers = view.makers or {}
    found = ((makers.get(uid), mine) for uid, mine in pods.items())
    works = [_JobProgress(mine[0].group, job, job.over(mine)) for job, mine in found if _is_conclusive(job)]
    return tuple(works) if len(works) == len(pods) else ()


def _is_conclusive(job: object) -> TypeGuard[OwnerJob]:
    """Whether it is known what becomes of a Job: not of one that is on its way out."""
    return isinstance(job, OwnerJob) and not (job.is_ending and job.over_since is None)


def _of_latest_run(works: tuple[_JobProgress, ...]) -> tuple[_JobProgress, ...]:
    """Without Jobs that were over when another one was made: those are of an earlier run of the gang."""
    last = max((work.job.created for work in works), default="")
    return tuple(work for work in works if work.job.over_since is None or work.job.over_since > last)


# Members that ended for good, and trays that can be given back.


_GIVEN_BACK_PREFIX = re.compile(r"trays given back: (\d+); ")
"""Before the reason of a plan of which trays were given back already."""


def is_reduced(found: GangRecord) -> bool:
    """Whether seats of members that ended were taken out of a plan."""
    if found.gang is None or found.plan is None:
        return False
    return len(found.plan.seats) < _gang_size(found.gang)


def slot_candidates(view: GangSnapshot) -> tuple[GangMember, ...]:
    """Gated pods that may have a seat; of the rest of a plan, only those of the Job whose pods are there.

    A job that was made anew needs more than the rest, and gets a whole plan once the old one is gone.
    """
    gated = tuple(one for one in view.living if one.gate is not None and not one.going)
    if view.record is None or not is_reduced(view.record):
        return gated
    old = {
        member.job
        for member in view.members
        if not member.going and (member.is_done or member.tray is not None)
    }
    return tuple(one for one in gated if one.job is not None and one.job in old)


def awaits_last_pods(view: GangSnapshot) -> bool:
    """Whether all pods have ended, and their Job makes the last of them anew: never again the whole gang.

    A Job waits between two tries, 10 s and longer, and has no pod then. One that cannot make pods (its quota
    is spent, its account is gone, another controller manages it) never says so: see `awaited_until`.
    """
    gang = None if view.record is None or view.record.plan is None else view.record.gang
    job = _only_job(view, gang)
    maker = None if job is None else _owner_job(view, job)
    if view.living or gang is None or maker is None or maker.is_still:
        return False
    over = maker.over(view.members)
    return (
        0 < maker.completions - over <= _gang_size(gang) and over > 0 and maker.makes_all_of(_gang_size(gang))
    )


def last_pods_awaited_until(view: GangSnapshot, settings: GangSettings) -> float:
    """When the trays are given back to which no pod came, in seconds since the epoch.

    Placed is Unknown since nobody was left. That holds too where the last pod was deleted and left no trace.
    """
    placed = None if view.record is None else view.record.condition(PLACED)
    if placed is None or (placed.status, placed.reason) != AWAITING_LAST_PODS:
        return view.now + longest_wait(settings)
    return (epoch_seconds(placed.last_transition_time) or view.now) + longest_wait(settings)


def longest_wait(settings: GangSettings) -> float:
    """Seconds that a Job may take for its last pods."""
    return LONGEST_JOB_BACKOFF + settings.bind_after


def may_have_unused_trays(view: GangSnapshot, plan: GangPlan) -> bool:
    """Whether a tray is idle, and somebody may say that it is to stay so."""
    used = _used_trays(view)
    idle = {tray for tray in plan.trays if tray not in used}
    # While pods wait at their gate, trays are idle that they go to.
    if any(one.gate is not None for one in view.living):
        idle &= {member.tray for member in view.members if member.ended}
    return bool(idle) and view.record is not None and _may_be_proven(view, view.record.gang)


def owners_checked_at(view: GangSnapshot, settings: GangSettings) -> float:
    """When the owners of the pods are asked: at once for each use of the trays, then ever less often.

    What they say is behind the pods: an MPIJob is over some seconds after its launcher.
    """
    if view.looked is None or view.looked.use != view.use:
        return view.now
    return view.looked.again_at(settings.again)


def without_unused_trays(view: GangSnapshot, found: GangRecord) -> GangPlan | None:
    """The plan without trays that nobody will use again, and their cliques' spares; None: all are used.

    Of a gang that awaits its last pods, just their seats are left.
    """
    if found.gang is None or found.plan is None:
        return None
    over, seats = _members_over(view, found.gang), Counter(seat.group for seat in found.plan.seats)
    sizes = {group.name: group.members for group in found.gang.groups}
    left = Counter({group: seats[group] + over[group] - sizes[group] for group in seats})
    kept = _without_trays(view, found.plan, left)
    if awaits_last_pods(view):
        kept = _without_seats(kept, left)
    return _reduced_plan(found, found.plan, kept) if len(kept) < len(found.plan.seats) else None


def _without_trays(view: GangSnapshot, plan: GangPlan, left: Counter[str]) -> tuple[MemberAssignment, ...]:
    """Whole trays, those of members that ended first; what can be taken off further stays in `left`."""
    used, done = _used_trays(view), {member.tray for member in view.members if member.ended}
    gone = set()
    for tray in sorted(dict.fromkeys(plan.trays), key=lambda fromkey: fromkey not in done):
        here = Counter(seat.group for seat in plan.seats if seat.tray == tray)
        if tray not in used and all(left[group] >= count for group, count in here.items()):
            left.subtract(here)
            gone.add(tray)
    return tuple(seat for seat in plan.seats if seat.tray not in gone)


def _without_seats(seats: tuple[MemberAssignment, ...], left: Counter[str]) -> tuple[MemberAssignment, ...]:
    kept = []
    for seat in reversed(seats):
        if left[seat.group] > 0:
            left[seat.group] -= 1
        else:
            kept.append(seat)
    return tuple(reversed(kept))


def _members_over(view: GangSnapshot, gang: Gang) -> Counter[str]:
    """By group, how many members are proven to come never again."""
    job = _only_job(view, gang)
    maker = None if job is None else _owner_job(view, job)
    if maker is not None and (awaits_last_pods(view) or not maker.is_owned):
        more = max(maker.completions - _gang_size(gang), 0)
        return Counter({gang.groups[0].name: max(maker.over(view.members) - more, 0)})
    finished = _finished_mpi_job(view)
    sizes = {group.name: group.members for group in gang.groups}
    if finished is not None and finished.makes_all_of(view.key.name, sizes):
        return Counter(sizes) - Counter(one.group for one in view.living)
    if _are_bare(view) or finished is not None:
        return Counter(member.group for member in view.members if member.ended)
    return Counter()


def _may_be_proven(view: GangSnapshot, gang: Gang | None) -> bool:
    """Whether who makes the pods is such that it could tell."""
    kinds = {
        (member.owner.api_version, member.owner.kind) for member in view.members if member.owner is not None
    }
    is_mpi = (MPI_JOB.api_version, MPI_JOB.kind) in kinds
    return _only_job(view, gang) is not None or _are_bare(view) or is_mpi


def _are_bare(view: GangSnapshot) -> bool:
    return all(member.is_bare for member in view.members)


def _finished_mpi_job(view: GangSnapshot) -> FinishedMPIJob | None:
    """The MPIJob that is over, of which all pods are."""
    makers = view.makers or {}
    found = [None if member.owner is None else makers.get(member.owner.uid) for member in view.members]
    first = found[0] if found else None
    return first if isinstance(first, FinishedMPIJob) and all(one == first for one in found) else None


def _owner_job(view: GangSnapshot, job: OwnerReference) -> OwnerJob | None:
    found = (view.makers or {}).get(job.uid)
    return found if isinstance(found, OwnerJob) else None


def _only_job(view: GangSnapshot, gang: Gang | None) -> OwnerReference | None:
    """The Job of which all pods of the gang are: it has one template, so they are of one group."""
    if gang is None or len(gang.groups) != 1:
        return None
    jobs = {member.job for member in view.members}
    return jobs.pop() if len(jobs) == 1 else None


def _used_trays(view: GangSnapshot) -> set[str | None]:
    return {tray for one in view.living for tray in (one.tray, one.node)}


def _gang_size(gang: Gang) -> int:
    return sum(group.members for group in gang.groups)


def _reduced_plan(found: GangRecord, plan: GangPlan, seats: tuple[MemberAssignment, ...]) -> GangPlan:
    """The price was that of the whole: what the rest costs is not known."""
    trays = {seat.tray for seat in seats}
    cliques = {found.cliques.get(tray, tray) for tray in trays}
    return replace(
        plan,
        seats=seats,
        cliques=tuple(clique for clique in plan.cliques if clique in cliques),
        spares=tuple(spare for spare in plan.spares if found.cliques.get(spare, spare) in cliques),
        price=(),
        reason=_reduced_reason(plan, len(set(plan.trays)) - len(trays)),
    )


def _reduced_reason(plan: GangPlan, trays: int) -> str:
    before = _GIVEN_BACK_PREFIX.match(plan.reason)
    first = plan.reason[before.end() :] if before else plan.reason
    count = trays + (int(before[1]) if before else 0)
    return f"trays given back: {count}; {first}" if count else first
