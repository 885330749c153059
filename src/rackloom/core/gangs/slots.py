"""The slots of a plan: members that are still to come, pods that take slots, and slots that are released.

Assignment. A pod that was ungated keeps its slot. Gated pods take the free slots of their group in order
of rank, so that neighbours in rank become neighbours in the plan. Two pods may have been ungated for one
slot, by a controller that was paused while another took over. Then a pod that stays has priority over one
that is being deleted, or the job would lose both.

One JSON patch pins the pod to its node, adds the toleration of the plan's taint and removes the gate, so
that no crash can come between pin and gate. For a gated pod, the API server only allows to narrow node
affinity and to add tolerations (Kubernetes, "Pod Scheduling Readiness"). The patch tests the pod's UID and
the gate first.

Release. A pod that failed or was deleted may be replaced and then needs its tray. So a tray is released,
and a gang is planned for fewer members, only on proof from the owners of the pods:

- One Job owns all pods: as many slots are released as completions are over. Which pods succeeded does not
  matter, because a replacement takes any free slot.
- All pods belong to one MPIJob that is over: no pod that ended comes back.
- No pod has an owner: a pod that ended stays ended.

If a Job was suspended after some pods had succeeded, it creates only the others again, and the gang waits
for those alone. The gang waits for a group as a whole unless its Jobs are known to create all of its pods.

When all pods have ended and their Job still owes the last ones, their slots are kept for the Job's
longest back-off plus `bind_after`, then released. No event reports that an owner has changed its state, so
owners are read again at growing intervals while the use of the trays is unchanged.
"""

import re
from collections import Counter

import msgspec
from msgspec.structs import replace

from rackloom.core.cluster.gang_objects import (
    GANG_GATE,
    GANG_TAINT,
    RELEASED_ANNOTATION,
    TRAY_ANNOTATION,
    GangMember,
    GangSpec,
)
from rackloom.core.cluster.gang_owners import LONGEST_JOB_BACKOFF, MPI_JOB, FinishedMPIJob, OwnerJob
from rackloom.core.cluster.objects import (
    POD,
    DeleteObject,
    OwnerReference,
    PatchObject,
    PatchOperation,
    add_entries,
    add_operation,
    metav1_time,
)
from rackloom.core.cluster.pods import narrow_nodes
from rackloom.core.cluster.trays import Gang, GangPlan, MemberAssignment
from rackloom.core.gangs.snapshot import AWAITING_LAST_PODS, PLACED, GangRecord, GangSettings, GangSnapshot
from rackloom.errors import Refused

# Members that are still to come.


class _JobProgress(msgspec.Struct, frozen=True):
    """A Job, and the group of its pods. They are in one group, because a Job has one pod template."""

    group: str
    job: OwnerJob
    over: int
    """Completions that need no pod any more."""

    @property
    def remaining(self) -> int:
        """Pods that run at a time from now on."""
        if self.job.over_since is not None:
            return 0
        return max(min(self.job.parallelism, self.job.completions - self.over), 0)


def remaining_spec(snapshot: GangSnapshot) -> GangSpec:
    """The declaration of the pods, with no more members than their Jobs still create. Raises Refused."""
    declared, jobs = snapshot.declared_spec(), _job_progress(snapshot)
    # Jobs that were over when another was created belong to an earlier run of the gang.
    latest = max((progress.job.created for progress in jobs), default="")
    jobs = [
        progress for progress in jobs if progress.job.over_since is None or progress.job.over_since > latest
    ]
    sizes = []
    for name, size in declared.sizes:
        own = [progress for progress in jobs if progress.group == name]
        # The gang waits for a group as a whole unless its Jobs are known to create all of its pods.
        if sum(progress.job.at_once for progress in own) >= size:
            size = min(size, sum(progress.remaining for progress in own))
        if size:
            sizes.append((name, size))
    return replace(declared, sizes=tuple(sizes)) if sizes else declared


def has_fewer_to_come(snapshot: GangSnapshot) -> bool:
    """Whether their Jobs create fewer pods than the gang had at first."""
    declared = _usable_spec(snapshot)
    return declared is not None and remaining_spec(snapshot) != declared


def lacks_members(snapshot: GangSnapshot) -> bool:
    """Whether pods are missing of the whole gang."""
    declared = _usable_spec(snapshot)
    present = Counter(member.group for member in snapshot.living if not member.is_being_deleted)
    return declared is not None and any(present[name] < size for name, size in declared.sizes)


def _usable_spec(snapshot: GangSnapshot) -> GangSpec | None:
    """The declaration of the living pods. None if no pod lives, or if it is not usable."""
    try:
        return snapshot.declared_spec() if snapshot.living else None
    except Refused:
        return None


def do_owners_matter(snapshot: GangSnapshot) -> bool:
    """Whether it matters how many pods are still to come."""
    return any(member.ended for member in snapshot.members) or lacks_members(snapshot)


def should_ask_owners(snapshot: GangSnapshot, settings: GangSettings) -> bool:
    """Whether to read the owners of the pods, to know how many pods are still to come.

    The pods of a new gang come one by one. Their owners are not read for each of them.
    """
    if snapshot.owners is not None or not lacks_members(snapshot):
        return False
    were_fewer = snapshot.owner_check is not None and snapshot.owner_check.are_fewer
    return were_fewer or snapshot.now >= owners_asked_at(snapshot, settings)


def owners_asked_at(snapshot: GangSnapshot, settings: GangSettings) -> float:
    """When to read the owners of a gang that lacks members, in seconds since the epoch."""
    if snapshot.owner_check is not None:
        return snapshot.owner_check.next_at(settings.again)
    placed = None if snapshot.record is None else snapshot.record.status.condition(PLACED)
    since = None if placed is None else placed.since
    return (since or snapshot.now) + settings.again


def _job_progress(snapshot: GangSnapshot) -> list[_JobProgress]:
    """The Jobs that own the pods. Empty if one Job proves nothing, or if a pod has another owner."""
    pods: dict[str, list[GangMember]] = {}
    for member in snapshot.members:
        pods.setdefault("" if member.job is None else member.job.uid, []).append(member)
    owners = snapshot.owners or {}
    jobs = []
    for uid, members in pods.items():
        job = owners.get(uid)
        # The outcome of a Job that is ending but not over is unknown.
        if not isinstance(job, OwnerJob) or (job.is_ending and job.over_since is None):
            return []
        jobs.append(_JobProgress(members[0].group, job, job.over(members)))
    return jobs


# Members that ended for good, and trays that can be released.


_RELEASED_PREFIX = re.compile(r"trays given back: (\d+); ")
"""In front of the reason of a plan of which trays were released already."""


def is_reduced(record: GangRecord) -> bool:
    """Whether slots of members that ended were taken out of the plan."""
    if record.gang is None or record.plan is None:
        return False
    return len(record.plan.seats) < _gang_size(record.gang)


def slot_candidates(snapshot: GangSnapshot) -> tuple[GangMember, ...]:
    """Gated pods that may take a slot. In a reduced plan, only those of the Job that owns the placed pods.

    A job that was recreated needs more slots than are left. It gets a new plan once the old one is gone.
    """
    if snapshot.record is None or not is_reduced(snapshot.record):
        return snapshot.gated
    placed_jobs = {
        member.job
        for member in snapshot.members
        if not member.is_being_deleted and (member.is_done or member.tray is not None)
    }
    return tuple(member for member in snapshot.gated if member.job is not None and member.job in placed_jobs)


def awaits_last_pods(snapshot: GangSnapshot) -> bool:
    """Whether all pods have ended and their Job replaces the last of them, but never again the whole gang.

    A Job pauses for 10 s or longer between two attempts and has no pod then. A Job that cannot create
    pods (its quota is spent, its account is gone, another controller manages it) never reports so, which is
    why the wait has a limit: `last_pods_awaited_until`.
    """
    gang = None if snapshot.record is None or snapshot.plan is None else snapshot.record.gang
    job = _only_job(snapshot, gang)
    if snapshot.living or gang is None or job is None or job.is_still:
        return False
    size, over = _gang_size(gang), job.over(snapshot.members)
    return 0 < job.completions - over <= size and over > 0 and job.at_once >= size


def last_pods_awaited_until(snapshot: GangSnapshot, settings: GangSettings) -> float:
    """When to release the trays to which no pod came, in seconds since the epoch.

    Placed has been Unknown since no pod was left. Its transition time is recorded, so it survives a change
    of leader, and a last pod that was deleted without a trace.
    """
    placed = None if snapshot.record is None else snapshot.record.status.condition(PLACED)
    since = None
    if placed is not None and (placed.status, placed.reason) == AWAITING_LAST_PODS:
        since = placed.since
    return (since or snapshot.now) + longest_wait(settings)


def longest_wait(settings: GangSettings) -> float:
    """Seconds that a Job may take for its last pods."""
    return LONGEST_JOB_BACKOFF + settings.bind_after


def may_have_unused_trays(snapshot: GangSnapshot, plan: GangPlan) -> bool:
    """Whether a tray is idle, and the owners of the pods could prove that it stays idle."""
    idle = set(plan.trays) - _used_trays(snapshot)
    # Pods that wait at their gate are about to use idle trays, unless a pod has ended there.
    if any(member.gate is not None for member in snapshot.living):
        idle &= {member.tray for member in snapshot.members if member.ended}
    if not idle or snapshot.record is None:
        return False
    gang = snapshot.record.gang
    is_one_job = gang is not None and len(gang.groups) == 1 and _common_job(snapshot) is not None
    owners = (member.owner for member in snapshot.members)
    is_mpi = any(owner is not None and owner.is_of(MPI_JOB) for owner in owners)
    return is_one_job or _are_bare(snapshot) or is_mpi


def owners_checked_at(snapshot: GangSnapshot, settings: GangSettings) -> float:
    """When to read the owners of the pods because of unused trays: at once for each use, then less often.

    Their status lags behind the pods: an MPIJob is over some seconds after its launcher.
    """
    if snapshot.owner_check is None or snapshot.owner_check.use != snapshot.tray_use:
        return snapshot.now
    return snapshot.owner_check.next_at(settings.again)


def without_unused_trays(snapshot: GangSnapshot, record: GangRecord) -> GangPlan | None:
    """The plan without trays that no pod will use again and without their cliques' spares.

    None if all trays are used. For a gang that awaits its last pods, only their slots are left.
    """
    if record.gang is None or record.plan is None:
        return None
    plan = record.plan
    over, slots = _members_over(snapshot, record.gang), Counter(slot.group for slot in plan.seats)
    sizes = {group.name: group.members for group in record.gang.groups}
    # Slots that were taken out before count as released already.
    releasable = Counter({group: slots[group] + over[group] - sizes[group] for group in slots})
    # Release whole unused trays, first those on which a member ended: no pod waits for them.
    used, ended = _used_trays(snapshot), {member.tray for member in snapshot.members if member.ended}
    released = set()
    for tray in sorted(plan.trays, key=lambda name: name not in ended):
        here = Counter(slot.group for slot in plan.seats if slot.tray == tray)
        if tray not in used and all(releasable[group] >= count for group, count in here.items()):
            releasable.subtract(here)
            released.add(tray)
    kept = [slot for slot in plan.seats if slot.tray not in released]
    # Without any pod, no slot belongs to a certain pod, so the surplus slots of shared trays go as well. The
    # last slots go, because the Job fills the first ones first.
    if awaits_last_pods(snapshot):
        last_first, kept = reversed(kept), []
        for slot in last_first:
            if releasable[slot.group] > 0:
                releasable[slot.group] -= 1
            else:
                kept.insert(0, slot)
    return _reduced_plan(record, plan, tuple(kept)) if len(kept) < len(plan.seats) else None


def _members_over(snapshot: GangSnapshot, gang: Gang) -> Counter[str]:
    """By group, the number of members that are proven never to come again."""
    job = _only_job(snapshot, gang)
    # A Job of a JobSet may be recreated as a whole, so it proves nothing while a pod lives.
    if job is not None and (awaits_last_pods(snapshot) or not job.is_owned):
        # A Job larger than the gang uses a slot again for a later completion.
        more = max(job.completions - _gang_size(gang), 0)
        return Counter({gang.groups[0].name: max(job.over(snapshot.members) - more, 0)})
    # An MPIJob that is over counts if it owns all pods.
    workloads = [
        member.owner and (snapshot.owners or {}).get(member.owner.uid) for member in snapshot.members
    ]
    first = workloads[0] if workloads else None
    is_common = isinstance(first, FinishedMPIJob) and all(workload == first for workload in workloads)
    finished = first if isinstance(first, FinishedMPIJob) and is_common else None
    sizes = {group.name: group.members for group in gang.groups}
    # No other owner creates pods of this gang, so all that do not live are over, even deleted ones.
    if finished is not None and finished.makes_all_of(snapshot.key.name, sizes):
        return Counter(sizes) - Counter(member.group for member in snapshot.living)
    if _are_bare(snapshot) or finished is not None:
        return Counter(member.group for member in snapshot.members if member.ended)
    return Counter()


def _are_bare(snapshot: GangSnapshot) -> bool:
    return all(member.is_bare for member in snapshot.members)


def _common_job(snapshot: GangSnapshot) -> OwnerReference | None:
    """The Job that owns all pods of the gang."""
    jobs = {member.job for member in snapshot.members}
    return jobs.pop() if len(jobs) == 1 else None


def _only_job(snapshot: GangSnapshot, gang: Gang | None) -> OwnerJob | None:
    """The state of the Job that owns all pods of a gang. A Job has one template, so one group."""
    job = _common_job(snapshot) if gang is not None and len(gang.groups) == 1 else None
    state = None if job is None else (snapshot.owners or {}).get(job.uid)
    return state if isinstance(state, OwnerJob) else None


def _used_trays(snapshot: GangSnapshot) -> set[str | None]:
    return {tray for member in snapshot.living for tray in (member.tray, member.node)}


def _gang_size(gang: Gang) -> int:
    return sum(group.members for group in gang.groups)


def _reduced_plan(record: GangRecord, plan: GangPlan, slots: tuple[MemberAssignment, ...]) -> GangPlan:
    """The plan with these slots only. Its price is dropped, since it was that of the whole plan."""
    trays = {slot.tray for slot in slots}
    cliques = {record.cliques.get(tray, tray) for tray in trays}
    match = _RELEASED_PREFIX.match(plan.reason)
    reason = plan.reason[match.end() :] if match else plan.reason
    released = len(set(plan.trays)) - len(trays) + (int(match[1]) if match else 0)
    return replace(
        plan,
        seats=slots,
        cliques=tuple(clique for clique in plan.cliques if clique in cliques),
        spares=tuple(spare for spare in plan.spares if record.cliques.get(spare, spare) in cliques),
        price=(),
        reason=f"trays given back: {released}; {reason}" if released else reason,
    )


# Which pod takes which slot.


class SlotAssignment(msgspec.Struct, frozen=True):
    """Living members by slot. Gated members in none of the three are surplus and stay gated."""

    openings: tuple[tuple[GangMember, str], ...]
    """Gated members, each with the tray of the slot that it takes."""
    misfits: tuple[GangMember, ...]
    """Members that were ungated for a tray where the plan has no slot for them."""
    seated: tuple[GangMember, ...]


def assign_slots(snapshot: GangSnapshot, plan: GangPlan) -> SlotAssignment:
    """Assign the slots of a plan to the members of a gang.

    Each slot is counted once, so no two members of the result share one.
    """
    free = Counter((slot.group, slot.tray) for slot in plan.seats)
    seated, misfits = [], []
    for member in sorted(snapshot.ungated, key=_slot_priority):
        slot_key = (member.group, member.tray or "")
        if free[slot_key] > 0:
            free[slot_key] -= 1
            seated.append(member)
        elif not member.is_being_deleted:
            misfits.append(member)
    # Gated pods take the remaining slots in the order of their ranks, so that neighbours stay neighbours.
    openings: list[tuple[GangMember, str]] = []
    gated = slot_candidates(snapshot)
    for group in dict.fromkeys(slot.group for slot in plan.seats):
        trays = []
        for slot in plan.seats:
            if slot.group == group and free[group, slot.tray] > 0:
                free[group, slot.tray] -= 1
                trays.append(slot.tray)
        members = sorted(
            (waiting for waiting in gated if waiting.group == group), key=lambda waiting: waiting.rank
        )
        openings += zip(members, trays, strict=False)
    return SlotAssignment(tuple(openings), tuple(misfits), tuple(seated))


def _slot_priority(member: GangMember) -> tuple[object, ...]:
    """Of two members in one slot, prefer one that stays, then one that is bound, then the lower rank."""
    return member.is_being_deleted, member.node is None, member.rank


def unschedulable_members(
    snapshot: GangSnapshot, slots: SlotAssignment, settings: GangSettings
) -> tuple[GangMember, ...]:
    """Members that were ungated `bind_after` ago and that kube-scheduler reports as unschedulable.

    If it reports nothing, the tray is not the cause: the scheduler is down, or a foreign gate is left.
    """
    return tuple(
        member
        for member in slots.seated
        if member.node is None
        and not member.is_being_deleted
        and member.is_unschedulable
        and snapshot.now - (member.released_at or 0.0) >= settings.bind_after
    )


# The writes that ungate a pod, or delete it.


def pin_and_ungate(member: GangMember, tray: str, uid: str, now: float) -> PatchObject:
    """Pin a pod to `tray`, add the toleration of the plan `uid`, and remove the gang's gate.

    The write fails if the pod was replaced or its gates have changed.
    """
    gate = f"/spec/schedulingGates/{member.gate}"
    toleration = {"key": GANG_TAINT, "operator": "Equal", "value": uid, "effect": "NoSchedule"}
    # The tests come first: the API server applies all operations, or none.
    operations: tuple[PatchOperation, ...] = (
        {"op": "test", "path": "/metadata/uid", "value": member.uid},
        {"op": "test", "path": gate, "value": {"name": GANG_GATE}},
        *add_entries(
            "/metadata/annotations",
            member.annotations,
            {TRAY_ANNOTATION: tray, RELEASED_ANNOTATION: metav1_time(now)},
        ),
        add_operation("/spec/tolerations", [toleration])
        if member.pod.spec.tolerations is None
        else add_operation("/spec/tolerations/-", toleration),
        *narrow_nodes(
            member.pod.spec, "matchFields", {"key": "metadata.name", "operator": "In", "values": [tray]}
        ),
        {"op": "remove", "path": gate},
    )
    return PatchObject(kind=POD, namespace=member.namespace, name=member.name, patch=operations)


def delete_member(member: GangMember, *, at_once: bool = False) -> DeleteObject:
    """Delete a pod, so that its owner creates another. `at_once`: no kubelet is left to end it."""
    grace = 0 if at_once else None
    return DeleteObject(
        kind=POD, namespace=member.namespace, name=member.name, uid=member.uid, grace_seconds=grace
    )
