"""The plan of a Workload of Kueue: how its check records it, and the room that it holds.

Our check, if it is Ready, has the plan in its `podSetUpdates`, which Kueue writes into the pods: a node
selector with the clique if a pod set is in one, a label with the UID of the workload, and an annotation with
the trays. So the status of a workload alone shows the room that it holds, and the label identifies its pods.
Members that run (or have succeeded) hold their room themselves. `held_seats` is the room that the others
still need.

A pod set keeps a node selector that its template, or the flavor that it got, has already: Kueue refuses
two values of one key.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress

import msgspec

from rackloom.core.cluster.kueue_objects import READY, AdmissionCheckState, KueueWorkload, has_parameters
from rackloom.core.cluster.objects import (
    Condition,
    Object,
    condition_of,
    dated_condition,
    generation_of,
)
from rackloom.core.cluster.pods import KUEUE_WORKLOAD_LABEL, PodObject
from rackloom.core.cluster.state import TrayHold
from rackloom.core.place.site_planner import PlacedJob
from rackloom.errors import Undecodable
from rackloom.runtime.foreign_text import decode_json

CONTROLLER_NAME = "rackloom.dev/placement"
"""`spec.controllerName` of an AdmissionCheck that this controller decides."""
PLAN_ANNOTATION = "rackloom.dev/kueue-plan"
"""On the pods of an admitted workload: the plan of their pod set, a `PlannedPodSet`."""


# The plan of a workload, as its check records it.


class PlannedPodSet(msgspec.Struct, frozen=True, kw_only=True):
    """The annotation on the pods of a pod set."""

    gpus: int
    """Of each member."""
    whole: bool = False
    """Members have claims, or take trays whole: nothing else is planned there."""
    channel: bool = False
    """Members have the IMEX channel of their tray."""
    requests: Mapping[str, int] = {}
    """Requests of a member beside devices, in thousandths of each resource's unit."""
    trays: Mapping[str, int] = {}
    """Members by tray."""
    spares: tuple[str, ...] = ()
    """Trays that are kept free for members that lose their tray."""


def pod_set_updates(workload_uid: str, placed: PlacedJob, clique_label: str) -> list[Object]:
    """The fields that Kueue is to write into the pods of each pod set, which is a group of the job."""
    cliques = {tray.name: tray.clique for tray in placed.site.trays}
    groups = {group.name: group for group in placed.gang.groups}
    updates: list[Object] = []
    spares = placed.plan.spares
    for pod_set in placed.job.groups:
        group = groups[pod_set.name]
        update: Object = {"name": group.name, "labels": {KUEUE_WORKLOAD_LABEL: workload_uid}}
        if not group.is_helper:
            trays = Counter(seat.tray for seat in placed.plan.seats if seat.group == group.name)
            planned = PlannedPodSet(
                gpus=group.gpus,
                whole=placed.gang.exclusive or group.devices is not None,
                channel=group.has_channel,
                requests=pod_set.need.requests,
                trays=dict(trays),
                spares=spares,
            )
            spares = ()
            update["annotations"] = {PLAN_ANNOTATION: msgspec.json.encode(planned).decode()}
            used = {cliques.get(tray) for tray in trays}
            if len(used) == 1 and None not in used and clique_label not in pod_set.need.rule.labels:
                update["nodeSelector"] = {clique_label: used.pop()}
        updates.append(update)
    return updates


def held_seats(owner: str, updates: Iterable[Object], pods: Iterable[PodObject]) -> Iterator[TrayHold]:
    """The room that members of an admitted workload still need, by its plan.

    `pods` have the label of the workload. A member that is bound, or has succeeded, needs none: pods and
    claims of the cluster show its room.
    """
    bound: dict[str, Counter[str]] = defaultdict(Counter)
    for pod in pods:
        annotation = pod.annotations.get(PLAN_ANNOTATION)
        if annotation is not None and pod.is_bound and pod.status.phase != "Failed":
            bound[annotation][pod.node] += 1
    for annotation, planned in recorded_plans(updates):
        for tray, members in _remaining(planned.trays, bound[annotation]).items():
            yield TrayHold(
                owner=owner,
                tray=tray,
                gpus=members * planned.gpus,
                is_whole=planned.whole,
                channel=planned.channel,
                requests=tuple((name, members * amount) for name, amount in planned.requests.items()),
            )
        for tray in planned.spares:
            yield TrayHold(owner=owner, tray=tray, gpus=0, is_whole=True)


HeldPlans = Mapping[tuple[str, str], tuple[TrayHold, ...]]
"""The room that workloads hold, by their namespace and UID."""


def held_plans(
    workloads: Iterable[KueueWorkload], pods: Iterable[PodObject], checks: Container[str] | None = None
) -> HeldPlans:
    """The room that was planned for admitted workloads and is not in use yet.

    `checks` are the names of our checks. None takes all: a plan is known by its annotation, so no room is
    missed.
    """
    # Every tenant may write the label, so only pods in the namespace of the workload count.
    labelled: dict[tuple[str, str], list[PodObject]] = defaultdict(list)
    for pod in pods:
        uid = pod.labels.get(KUEUE_WORKLOAD_LABEL)
        if uid is not None:
            labelled[pod.metadata.namespace or "", uid].append(pod)
    held = {}
    for workload in workloads:
        key = (workload.namespace, workload.uid)
        held[key] = tuple(
            hold
            for check in ready_checks(workload, checks)
            for hold in held_seats(workload.full_name, check.pod_set_updates, labelled.get(key, ()))
        )
    return {key: holds for key, holds in held.items() if holds}


def ready_checks(
    workload: KueueWorkload, checks: Container[str] | None = None
) -> Iterator[AdmissionCheckState]:
    """The checks with plans that hold room. `checks` are the names of our checks, or None for all."""
    for name, check in workload.checks.items():
        if workload.has_quota and check.state == READY and (checks is None or name in checks):
            yield check


def planned_spares(updates: Iterable[Object]) -> int:
    """The spare trays of a plan."""
    return sum(len(planned.spares) for _, planned in recorded_plans(updates))


def recorded_plans(updates: Iterable[Object]) -> Iterator[tuple[str, PlannedPodSet]]:
    """The annotation and the plan of each pod set. An annotation that cannot be read is no plan."""
    for update in updates:
        annotation = (update.get("annotations") or {}).get(PLAN_ANNOTATION)
        if annotation is not None:
            with suppress(Undecodable):
                yield annotation, decode_json(annotation, PLAN_ANNOTATION, PlannedPodSet)


def _remaining(planned: Mapping[str, int], bound: Counter[str]) -> dict[str, int]:
    """Seats of members that are not bound: kube-scheduler may have taken another tray than was planned."""
    left = {tray: max(members - bound[tray], 0) for tray, members in planned.items()}
    elsewhere = bound.total() - sum(min(bound[tray], members) for tray, members in planned.items())
    for tray in reversed(left):
        freed = min(left[tray], elsewhere)
        left[tray] -= freed
        elsewhere -= freed
    return {tray: members for tray, members in left.items() if members}


# Writes.


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a check on a workload, as decided."""

    state: str
    message: str
    pod_set_updates: tuple[Object, ...] = ()
    requeue_after: int | None = None
    """Seconds, with Retry only."""


_LONGEST_MESSAGE = 1024
"""Characters. Kueue repeats the message in conditions and events, which have other limits."""


def check_state_json(check: str, verdict: Verdict, now: str) -> Object:
    """The entry of `status.admissionChecks`. `now` is RFC 3339."""
    entry: Object = {
        "name": check,
        "state": verdict.state,
        "message": verdict.message[:_LONGEST_MESSAGE],
        "lastTransitionTime": now,
    }
    if verdict.pod_set_updates:
        entry["podSetUpdates"] = list(verdict.pod_set_updates)
    if verdict.requeue_after is not None:
        entry["requeueAfterSeconds"] = verdict.requeue_after
    return entry


def active_condition(check: Object, now: str) -> Object | None:
    """The condition Active for an AdmissionCheck, or None if the check has it. `now` is RFC 3339."""
    status, reason = "True", "Active"
    message = "Rackloom plans the workloads that wait for this check"
    if has_parameters(check):
        status, reason = "False", "BadParameters"
        message = "this check takes no parameters: leave spec.parameters out"
    active = Condition(type="Active", status=status, reason=reason, message=message)
    old = condition_of(check, "Active")
    dated = dated_condition(active, old, now, generation_of(check))
    return None if dated == old else msgspec.to_builtins(dated)
