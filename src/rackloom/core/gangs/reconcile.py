"""The phases of a gang, from its first pod to its last: one snapshot in, one decision out.

The order of the phases makes them safe:

1. Collect: create a GangPlan, and wait until all pods are there, gated, and agree with each other.
2. Plan: run the placement search, and record its plan before any node is touched.
3. Reserve: give all trays of the plan its taint.
4. Check: after the settling time, a fresh read finds the trays empty of other jobs' pods, which
   kube-scheduler may have bound before it saw the taint.
5. Ungate: pin and ungate every pod in one write, so that kube-scheduler binds it.
6. Maintain: replace a lost tray, or a pod that cannot be bound. Release trays that no pod will use again.
7. End: when no pod is left, remove the taints first, then the GangPlan that names them.

A recorded plan is continued, not made again. It is withdrawn only before the first pod was ungated: when
a competing plan has the better right (it holds all of its trays, or is older), when a tray is lost and
no other is found, or when its pods are gone or were replaced by another job's. A decision that releases
trays, deletes pods or withdraws a plan sets `needs_fresh_read`. The controller then decides again from
a read of the API server, not from its cache.

A decision carries the conditions of the gang (Placed, Reserved, Bound). Each is True, False or Unknown, with
a reason and a message that names the change that would help. Placed is Unknown while the placement search
has not answered, and while all pods have ended but their Job still owes some. Bound is Unknown while a tray
is not ready but not yet considered lost. A condition keeps its transition time while its status stays the
same. A time in the future, from a clock that was ahead, is replaced. Events are recorded for a new problem,
and for a condition that became True. The status is written only if it differs from the recorded one.
"""

from collections import Counter
from collections.abc import Collection

import msgspec

from rackloom.core.cluster.gang_objects import WARNING_REASONS, GangMember, GangSpec
from rackloom.core.cluster.objects import (
    Condition,
    EventNotice,
    ObjectWrite,
    dated_condition,
    list_names,
    metav1_time,
)
from rackloom.core.cluster.trays import GangPlan
from rackloom.core.gangs import slots
from rackloom.core.gangs.requests import check_terms
from rackloom.core.gangs.snapshot import (
    AWAITING_LAST_PODS,
    BOUND,
    PLACED,
    RESERVED,
    GangRecord,
    GangSettings,
    GangSnapshot,
    GangStatus,
    close_record,
    create_record,
    reduce_plan,
    release_trays,
    reserve_tray,
    withdraw_plan,
)
from rackloom.errors import Refused

# Conditions.


_MOST_NAMES = 4
API_REFUSED = "ApiRefused"
"""Reason of an event: the API server, or a policy, forbids a write."""


def _shorten(names: Collection[str]) -> str:
    """The first names, and how many more: a message about a large gang stays readable."""
    return list_names(names, _MOST_NAMES)


def gang_condition(type_: str, status: str, reason: str, message: str) -> Condition:
    """One condition. `with_status` adds its transition time."""
    return Condition(type=type_, status=status, reason=reason, message=message)


def waiting_for_members(snapshot: GangSnapshot, declared: GangSpec) -> Condition | None:
    """The condition that members are still to come, or None when all exist."""
    present = Counter(member.group for member in snapshot.gated)
    missing = [f"{name} {present[name]} of {size}" for name, size in declared.sizes if present[name] < size]
    if not missing:
        return None
    message = f"pods that are there: {', '.join(missing)}"
    if snapshot.is_answered:
        message += "; their owners do not say that fewer are to come"
        if ended := [member.name for member in snapshot.members if member.ended and not member.is_done]:
            message += f"; {_shorten(ended)} ended, and may be made anew"
    return gang_condition(PLACED, "False", "WaitingForMembers", message)


def waiting_for_others(snapshot: GangSnapshot) -> Condition | None:
    """The condition that claim templates are still to come, or that another controller (a queue) holds pods.

    A pod's demand is unknown without its templates, and no trays are reserved for pods that a queue holds.
    """
    waiting = (member.pod for member in snapshot.living if member.pod.gate_index is not None)
    templates = {name for pod in waiting for name in pod.templates}
    gates = {name for member in snapshot.living for name in member.foreign_gates}
    for names, reason, what in (
        (templates, "WaitingForClaimTemplates", "claim templates"),
        (gates, "WaitingForGates", "scheduling gates of others"),
    ):
        if names:
            return gang_condition(PLACED, "False", reason, f"{what}: {_shorten(sorted(names))}")
    return None


def bound_condition(
    snapshot: GangSnapshot, seated: tuple[GangMember, ...], size: int, lost_after: float
) -> Condition:
    """Whether every slot has a pod on its tray."""
    if lost := snapshot.lost(lost_after):
        why = snapshot.refusal or "its members are being replaced"
        since = f"gone or not ready for {lost_after:.0f} s"
        return gang_condition(BOUND, "False", "TrayLost", f"{_shorten(lost)} {since}: {why}")
    nodes = [member.node for member in seated if member.node is not None]
    if len(nodes) < size:
        progress = f"{len(nodes)} of {size} members are on their trays"
        if snapshot.refusal:
            return gang_condition(BOUND, "False", "CannotBind", f"{progress}; {snapshot.refusal}")
        for member in seated:
            if member.node is None and member.unbound_message:
                progress += f"; {member.name}: {member.unbound_message}"
                break
        return gang_condition(BOUND, "False", "Binding", progress)
    if silent := [node for node in nodes if snapshot.is_lost(node, 0.0)]:
        return gang_condition(BOUND, "Unknown", "TrayNotReady", f"{_shorten(silent)} not ready")
    message = f"{size} members are on their trays"
    # Pods without a slot: the job was enlarged or recreated after the gang was placed.
    if surplus := [member.name for member in snapshot.gated]:
        why = "for which the gang has no seat: it is placed anew when all of its other pods have ended"
        message += f"; beside them {_shorten(surplus)}, {why}"
    return gang_condition(BOUND, "True", "AllBound", message)


# The decision about one gang.


class GangDecision(msgspec.Struct, frozen=True, kw_only=True):
    """The actions for one gang, in order, and the status and events to report afterwards."""

    actions: tuple[ObjectWrite, ...] = ()
    status: GangStatus | None = None
    """None if the recorded one holds."""
    notices: tuple[EventNotice, ...] = ()
    needs_placement: bool = False
    recheck_after: float | None = None
    """Seconds after which the passage of time alone may change the decision."""
    needs_fresh_read: bool = False
    """It releases trays, deletes pods or withdraws the plan, or depends on the state of the owners.

    It is valid only if it is decided from fresh reads: a stale cache may miss pods that are ungated by now.
    """


def with_status(decision: GangDecision, snapshot: GangSnapshot, *conditions: Condition) -> GangDecision:
    """The decision with a status of these conditions, if it differs from the recorded one, and its events."""
    present = {condition.type for condition in conditions}
    # A gang without a plan has nothing reserved and no pod bound.
    rest = (gang_condition(t, "False", "NotPlaced", "") for t in (RESERVED, BOUND) if t not in present)
    now, dated, notices = metav1_time(snapshot.now), list[Condition](), list[EventNotice]()
    for condition in (*conditions, *rest):
        before = None if snapshot.record is None else snapshot.record.status.condition(condition.type)
        # A clock that was ahead wrote a time in the future. Waits start from these times, so it is replaced.
        is_past = before is not None and before.last_transition_time <= now
        dated.append(dated_condition(condition, before if is_past else None, now))
        # A pod that comes for a kept slot does not place the gang again, so it is no news.
        was_true = before is not None and (
            before.status == "True" or (before.status, before.reason) == AWAITING_LAST_PODS
        )
        is_new = before is None or (before.reason, before.message) != (condition.reason, condition.message)
        is_warning = is_new and condition.reason in WARNING_REASONS
        if is_warning or (condition.status == "True" and not was_true):
            notices.append(EventNotice(is_warning, condition.reason, condition.message))
    # A status that is recorded already is not written again, and its events were recorded with it.
    status = GangStatus(conditions=tuple(dated))
    if snapshot.record is not None and snapshot.record.status == status:
        return decision
    return msgspec.structs.replace(decision, status=status, notices=tuple(notices))


# A gang with a recorded plan: phases 3 to 6.


class PlannedGang:
    """The progress of a recorded plan, and the decision that follows from it."""

    def __init__(
        self, snapshot: GangSnapshot, record: GangRecord, plan: GangPlan, settings: GangSettings
    ) -> None:
        self.snapshot = snapshot
        self.record = record
        self.plan = plan
        self.settings = settings
        self.slots = slots.assign_slots(snapshot, plan)
        self.awaits_last = slots.awaits_last_pods(snapshot)
        self.unreserved = self._unreserved_trays()
        # Once a pod was ungated, others follow as they come, and so do the last pods of a reduced plan.
        is_resumed = slots.is_reduced(record) and bool(self.slots.openings)
        self.has_begun = bool(snapshot.ungated) or self.awaits_last or is_resumed
        self.is_complete = len(self.slots.openings) == len(plan.seats)
        """Every slot has a gated pod."""
        self.lacks_pods = not self.has_begun and not self.is_complete
        """Pods that existed when it was planned are gone, and none was ungated."""

    def decide(self) -> GangDecision:
        """Continue the plan, or withdraw it while no pod was ungated."""
        snapshot, settings, nodes = self.snapshot, self.settings, self.snapshot.nodes
        if not self.has_begun and self._is_obsolete():
            return GangDecision(actions=(withdraw_plan(self.record),), needs_fresh_read=True)
        # Only owners that were read in this pass prove that trays are no longer needed.
        reduced = None if snapshot.owners is None else slots.without_unused_trays(snapshot, self.record)
        if reduced is not None:
            return GangDecision(actions=(reduce_plan(self.record, reduced),), needs_fresh_read=True)
        # Reserve the free trays. A tray that another gang holds is left to it: one of the two plans yields.
        reserved = [
            reserve_tray(nodes[name], snapshot.uid)
            for name in self.unreserved
            if name in nodes and not nodes[name].holders
        ]
        # Check. kube-scheduler may still bind a pod that it decided on before it saw the taint. After the
        # settling time such a pod is visible, so an empty tray stays empty.
        is_checked = snapshot.checked == self.plan
        awaits_check = self.is_complete and not (self.unreserved or self.has_begun or is_checked)
        settling = 0.0
        if awaits_check:
            condition = self.record.status.condition(RESERVED)
            settling = settings.settle
            if condition is not None and condition.status == "True":
                since = condition.since or snapshot.now
                settling = max(since + settling - snapshot.now, 0.0)
        # Ungate the first pod only when all trays are reserved and checked, and all pods exist. The members
        # of a lost tray are about to get another one.
        may_start = not self.unreserved and (self.has_begun or (self.is_complete and is_checked))
        ungated = [
            slots.pin_and_ungate(member, tray, snapshot.uid, snapshot.now)
            for member, tray in (self.slots.openings if may_start else ())
            if not snapshot.is_lost(tray, settings.lost_after)
        ]
        # Maintain: the placement search repairs the plan of a lost tray, or of a pod that cannot be bound.
        late = slots.unschedulable_members(snapshot, self.slots, settings)
        is_broken = bool(snapshot.lost(settings.lost_after) or late)
        released, deleted = self._release_surplus_trays(), self._delete_misplaced_pods()
        # Trays may be unused. Only the owners can prove it, and they are read in a pass with fresh reads.
        asks_owners = (
            slots.may_have_unused_trays(snapshot, self.plan)
            and snapshot.owners is None
            and snapshot.now >= slots.owners_checked_at(snapshot, settings)
        )
        decision = GangDecision(
            actions=(*reserved, *released, *deleted, *ungated),
            needs_placement=is_broken or (awaits_check and not settling),
            recheck_after=settling or self._recheck_after(),
            needs_fresh_read=bool(released or deleted) or asks_owners,
        )
        bound = bound_condition(snapshot, self.slots.seated, len(self.plan.seats), settings.lost_after)
        return with_status(decision, snapshot, self._placed_condition(), self._reserved_condition(), bound)

    # Whether to keep the plan.

    def _is_obsolete(self) -> bool:
        """Whether to withdraw the plan. Called only while no pod was ungated, so it disturbs no pod."""
        snapshot, mine = self.snapshot, (self.record.created, self.record.uid)
        return (
            slots.is_reduced(self.record)
            # A competitor has the better right if it holds all of its trays, or is older. Creation time and
            # UID order any two plans, so exactly one of two incomplete ones yields.
            or any(other.is_whole or (other.created, other.uid) < mine for other in snapshot.competitors)
            # No tray was found for the members of a lost one.
            or bool(snapshot.lost(self.settings.lost_after) and snapshot.refusal)
            or self._belongs_to_other_pods()
            or (self.lacks_pods and snapshot.now >= self._kept_until())
        )

    def _belongs_to_other_pods(self) -> bool:
        """Whether the plan's pods are gone, and the pods now under its name need another number of slots."""
        if self.record.gang is None or any(member.gate is None for member in self.snapshot.living):
            return False
        sizes = {group.name: group.members for group in self.record.gang.groups}
        try:
            return sizes != dict(slots.remaining_spec(self.snapshot).sizes)
        except Refused:
            # The pods are being replaced one by one, and some still belong to the previous job.
            return False

    def _kept_until(self) -> float:
        """When to withdraw the plan because its pods are gone. Its trays stay reserved until then."""
        placed = self.record.status.condition(PLACED)
        now = self.snapshot.now
        since = placed.since if placed and placed.status == "False" else None
        return (since or now) + self.settings.bind_after

    # Trays.

    def _unreserved_trays(self) -> tuple[str, ...]:
        """Trays that are still to be reserved. A lost tray must not delay pods that go elsewhere."""
        snapshot = self.snapshot
        trays = (name for name in self.record.reserved if snapshot.uid not in self._holders(name))
        if not snapshot.ungated:
            return tuple(trays)
        return tuple(name for name in trays if not snapshot.is_lost(name, self.settings.lost_after))

    def _holders(self, tray: str) -> tuple[str, ...]:
        return self.snapshot.nodes[tray].holders if tray in self.snapshot.nodes else ()

    def _release_surplus_trays(self) -> tuple[ObjectWrite, ...]:
        """Release trays that the plan no longer has, once none of the gang's pods is on them."""
        # A pod keeps its node until it is gone, even if the plan has changed.
        used = {member.node for member in self.snapshot.living}
        kept = used | set(self.record.reserved)
        surplus = tuple(name for name in self.snapshot.held if name not in kept)
        return release_trays(self.snapshot.nodes, surplus, self.snapshot.uid)

    def _delete_misplaced_pods(self) -> tuple[ObjectWrite, ...]:
        """Delete pods if their slot has moved. On a lost node no kubelet ends them, so they go at once."""
        ungated, after = self.snapshot.ungated, self.settings.lost_after
        trays = {member.tray for member in ungated if member.tray}
        lost = {tray for tray in trays if self.snapshot.is_lost(tray, after)}
        seated = {member.uid for member in self.slots.seated}
        ending = (member for member in ungated if member.is_being_deleted and member.uid not in seated)
        misplaced = (*self.slots.misfits, *(member for member in ending if member.tray in lost))
        return tuple(slots.delete_member(member, at_once=member.tray in lost) for member in misplaced)

    # Conditions, and the next moments.

    def _placed_condition(self) -> Condition:
        size = len(self.plan.seats)
        if self.awaits_last:
            wait = slots.longest_wait(self.settings)
            until = f"if it makes none, their trays are given back after {wait:.0f} s"
            why = f"all pods have ended, and their Job owes {size}: {until}"
            return gang_condition(PLACED, *AWAITING_LAST_PODS, why)
        if not self.lacks_pods:
            return gang_condition(PLACED, "True", "Placed", self.plan.reason)
        there = f"pods that are there: {len(self.slots.openings)} of {size}"
        why = f"{there}; without the rest, its trays are given back after {self.settings.bind_after:.0f} s"
        return gang_condition(PLACED, "False", "WaitingForMembers", why)

    def _reserved_condition(self) -> Condition:
        if contested := [name for name in self.unreserved if self._holders(name)]:
            taken = f"{_shorten(contested)} reserved for another gang"
            return gang_condition(RESERVED, "False", "TrayTaken", taken)
        if self.unreserved:
            missing = f"{_shorten(self.unreserved)} still to be reserved"
            return gang_condition(RESERVED, "False", "Reserving", missing)
        return gang_condition(RESERVED, "True", "Reserved", f"{len(self.record.reserved)} trays are reserved")

    def _recheck_after(self) -> float | None:
        """Seconds until a tray is lost, a pod is late, the plan is withdrawn, or the owners are read."""
        snapshot, settings = self.snapshot, self.settings
        since = (node.not_ready_since for node in snapshot.nodes.values())
        due = [moment + settings.lost_after for moment in since if moment is not None]
        due += [self._kept_until()] if self.lacks_pods else []
        waiting = (member.released_at for member in self.slots.seated if member.node is None)
        due += [moment + settings.bind_after for moment in waiting if moment is not None]
        # No event reports that a Job has given up, or that an owner is done.
        due += [slots.last_pods_awaited_until(snapshot, settings)] if self.awaits_last else []
        if self.awaits_last or slots.may_have_unused_trays(snapshot, self.plan):
            due.append(snapshot.now + settings.again)
        ahead = [moment - snapshot.now for moment in due if moment > snapshot.now]
        return min(ahead) + 0.1 if ahead else None


# The entry point, and a gang without a plan: phases 1, 2 and 7.


def reconcile_gang(snapshot: GangSnapshot, settings: GangSettings) -> GangDecision:
    """Decide about one gang."""
    record = snapshot.record
    if record is None:
        return GangDecision(actions=(create_record(snapshot.key),) if snapshot.living else ())
    if not snapshot.living and not (
        slots.awaits_last_pods(snapshot) and snapshot.now < slots.last_pods_awaited_until(snapshot, settings)
    ):
        # No pod uses anything any more. The record goes last, because it names the trays.
        releases = release_trays(snapshot.nodes, snapshot.held, snapshot.uid)
        return GangDecision(actions=releases or close_record(record), needs_fresh_read=True)
    if record.plan is None:
        return _reconcile_unplanned(snapshot, settings)
    return PlannedGang(snapshot, record, record.plan, settings).decide()


def _reconcile_unplanned(snapshot: GangSnapshot, settings: GangSettings) -> GangDecision:
    releases = release_trays(snapshot.nodes, snapshot.held, snapshot.uid)
    placed = _why_not_planned(snapshot, settings)
    if placed is not None:
        recheck_after = None
        # No event reports that fewer pods are to come, so the owners are read after a time.
        if slots.lacks_members(snapshot):
            ahead = slots.owners_asked_at(snapshot, settings) - snapshot.now
            recheck_after = (ahead if ahead > 0 else settings.again) + 0.1
        asks_owners = slots.should_ask_owners(snapshot, settings)
        decision = GangDecision(
            actions=releases, recheck_after=recheck_after, needs_fresh_read=bool(releases) or asks_owners
        )
        return with_status(decision, snapshot, placed)
    # The search has refused the gang, or has not answered yet. Either way the gang waits for a pass.
    placed = gang_condition(PLACED, "Unknown", "Planning", "")
    if snapshot.refusal:
        placed = gang_condition(PLACED, "False", "DoesNotFit", snapshot.refusal)
    # A new plan must not rest on trays that still carry the taint of the previous one.
    decision = GangDecision(actions=releases, needs_placement=not releases, needs_fresh_read=bool(releases))
    return with_status(decision, snapshot, placed)


def _why_not_planned(snapshot: GangSnapshot, settings: GangSettings) -> Condition | None:
    """The condition that states why a gang cannot be planned, or None if it can."""
    try:
        declared = slots.remaining_spec(snapshot)
        # Pods that kube-scheduler places freely, or that an earlier plan pinned, cannot be planned again.
        if loose := [member.name for member in (*snapshot.unmanaged, *snapshot.ungated)]:
            fix = "delete all pods of the gang, and have them made anew"
            why = f"{_shorten(loose)} were not held until the gang was placed: {fix}"
            return gang_condition(PLACED, "False", "NotHeld", why)
        check_terms(snapshot.living, settings.clique_label, is_together=declared.segment is None)
    except Refused as refused:
        return gang_condition(PLACED, "False", "InvalidGang", str(refused))
    return waiting_for_members(snapshot, declared) or waiting_for_others(snapshot)
