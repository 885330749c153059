"""A Workload of Kueue (kueue.x-k8s.io/v1beta2) as a value, and the plan that is recorded in its status.

A check of ours that is Ready has the plan in its `podSetUpdates`, which Kueue writes into the pods: a node
selector with the clique where a pod set is in one, a label with the UID of the workload, and an annotation
with the trays. So the room that a workload holds is read from its status alone, and its pods are told by
the label. Members that run (or have succeeded) hold their room by themselves: `held_seats` is what the
others still need.

A pod set keeps a node selector that its template, or the flavor that it got, has already: Kueue refuses
two values of one key.
"""

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.objects import Object, pod_phase
from rackloom.core.cluster.pods import KUEUE_WORKLOAD_LABEL
from rackloom.core.cluster.scheduling import requests_beside_devices
from rackloom.core.cluster.state import TrayHold
from rackloom.core.cluster.trays import PlacementSite
from rackloom.core.place.placement_values import Gang, GangPlan
from rackloom.errors import Undecodable
from rackloom.runtime.foreign_text import decode_json

CONTROLLER_NAME = "rackloom.dev/placement"
"""`spec.controllerName` of an AdmissionCheck that this controller decides."""
PLAN_ANNOTATION = "rackloom.dev/kueue-plan"
"""On the pods of an admitted workload: what was planned for their pod set."""
PENDING, READY, RETRY, REJECTED = "Pending", "Ready", "Retry", "Rejected"
"""States of a check."""


class AdmissionCheckState(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `status.admissionChecks`."""

    name: str
    state: str
    message: str = ""
    retry_count: int = 0
    pod_set_updates: tuple[Object, ...] = ()


class KueueWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """A Workload."""

    obj: Object
    checks: Mapping[str, AdmissionCheckState]

    @property
    def uid(self) -> str:
        """Its UID."""
        return str(self.obj["metadata"]["uid"])

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return str(self.obj["metadata"]["namespace"])

    @property
    def full_name(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.obj['metadata']['name']}"

    @property
    def has_quota(self) -> bool:
        """Quota is reserved for it, and it neither ended nor is it being evicted."""
        is_active = (self.obj.get("spec") or {}).get("active", True)
        is_over = self.obj["metadata"].get("deletionTimestamp") or self._holds("Finished", "Evicted")
        return bool(is_active and self._holds("QuotaReserved") and not is_over)

    @property
    def order(self) -> tuple[int, str, str]:
        """The most urgent first, then the one whose quota was reserved first."""
        since = next(
            (
                str(condition.get("lastTransitionTime", ""))
                for condition in self._conditions()
                if condition.get("type") == "QuotaReserved"
            ),
            "",
        )
        return -int((self.obj.get("spec") or {}).get("priority") or 0), since, self.full_name

    @property
    def assignments(self) -> Mapping[str, Object]:
        """What the reservation gives each pod set, by its name."""
        admission = (self.obj.get("status") or {}).get("admission") or {}
        return {assignment["name"]: assignment for assignment in admission.get("podSetAssignments") or ()}

    @property
    def pod_sets(self) -> Sequence[Object]:
        """Its pod sets."""
        found: Sequence[Object] = (self.obj.get("spec") or {}).get("podSets") or ()
        return found

    def _conditions(self) -> Iterable[Object]:
        found: Iterable[Object] = (self.obj.get("status") or {}).get("conditions") or ()
        return found

    def _holds(self, *types: str) -> bool:
        return any(
            condition.get("type") in types and condition.get("status") == "True"
            for condition in self._conditions()
        )


def read_workload(obj: Object) -> KueueWorkload:
    """Read a Workload, which the API server has checked against its schema."""
    states = (obj.get("status") or {}).get("admissionChecks") or ()
    checks = {
        entry["name"]: AdmissionCheckState(
            name=entry["name"],
            state=entry["state"],
            message=entry.get("message") or "",
            retry_count=entry.get("retryCount") or 0,
            pod_set_updates=tuple(entry.get("podSetUpdates") or ()),
        )
        for entry in states
    }
    return KueueWorkload(obj=obj, checks=checks)


# The workload as it would start: counts and nodes of its reservation.


def as_admitted(workload: KueueWorkload, flavors: Mapping[str, Object]) -> Object:
    """The Workload with the counts of its reservation, and with the labels and tolerations of its flavors.

    `flavors`: the specs of ResourceFlavors by name.
    """
    pod_sets = []
    for pod_set in workload.pod_sets:
        assignment = workload.assignments.get(pod_set["name"], {})
        names = dict.fromkeys((assignment.get("flavors") or {}).values())
        template = dict(pod_set.get("template") or {})
        spec = dict(template.get("spec") or {})
        selector, tolerations = dict(spec.get("nodeSelector") or {}), list(spec.get("tolerations") or ())
        for name in names:
            selector |= (flavors.get(name) or {}).get("nodeLabels") or {}
            tolerations += (flavors.get(name) or {}).get("tolerations") or ()
        template["spec"] = spec | {"nodeSelector": selector, "tolerations": tolerations}
        count = assignment.get("count")
        pod_sets.append(
            {**pod_set, "count": pod_set.get("count", 1) if count is None else count, "template": template}
        )
    return {**workload.obj, "kind": "Workload", "spec": {**workload.obj["spec"], "podSets": pod_sets}}


def domains_of_assignment(assignment: Object) -> list[dict[str, str]] | None:
    """The topology domains that Kueue has chosen for a pod set, each as labels of nodes; None for none."""
    topology = assignment.get("topologyAssignment")
    if not topology:
        return None
    levels, found = topology["levels"], []
    for part in topology["slices"]:
        columns = [_level_values(values, part["domainCount"]) for values in part["valuesPerLevel"]]
        found += [dict(zip(levels, values, strict=True)) for values in zip(*columns, strict=True)]
    return found


def _level_values(values: Object, count: int) -> list[str]:
    if values.get("universal") is not None:
        return [values["universal"]] * count
    individual = values["individual"]
    prefix, suffix = individual.get("prefix") or "", individual.get("suffix") or ""
    return [f"{prefix}{root}{suffix}" for root in individual["roots"]]


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
    """What a member requests of its node beside devices, in thousandths of each resource's unit."""
    trays: Mapping[str, int] = {}
    """Members by tray."""
    spares: tuple[str, ...] = ()
    """Trays that are kept free for members whose tray is lost."""


def pod_set_updates(
    workload: KueueWorkload,
    admitted: Object,
    gang: Gang,
    plan: GangPlan,
    site: PlacementSite,
    labels: SchedulerLabels,
) -> list[Object]:
    """What Kueue is to write into the pods of each pod set; `admitted` comes from `as_admitted`."""
    clique_label, gpu_resource = labels.clique, labels.gpu
    cliques = {tray.name: tray.clique for tray in site.trays}
    groups, updates, spares = {group.name: group for group in gang.groups}, [], plan.spares
    for pod_set in admitted["spec"]["podSets"]:
        group = groups.get(pod_set["name"])
        if group is None:
            continue
        trays = Counter(seat.tray for seat in plan.seats if seat.group == group.name)
        update: Object = {"name": group.name, "labels": {KUEUE_WORKLOAD_LABEL: workload.uid}}
        if not group.is_helper:
            whole = gang.exclusive or group.devices is not None
            planned = PlannedPodSet(
                gpus=group.gpus,
                whole=whole,
                channel=group.has_channel,
                requests=requests_beside_devices(pod_set["template"]["spec"], gpu_resource),
                trays=dict(trays),
                spares=spares,
            )
            spares = ()
            update["annotations"] = {PLAN_ANNOTATION: msgspec.json.encode(planned).decode()}
            used = {cliques.get(tray) for tray in trays}
            has_selector = clique_label in (pod_set["template"]["spec"].get("nodeSelector") or {})
            if len(used) == 1 and None not in used and not has_selector:
                update["nodeSelector"] = {clique_label: used.pop()}
        updates.append(update)
    return updates


def held_seats(
    workload: KueueWorkload, check: AdmissionCheckState, pods: Iterable[Object]
) -> Iterator[TrayHold]:
    """The room that members of an admitted workload still need; `pods`: those with the workload's label.

    A member that is bound, or has succeeded, needs none: pods and claims of the cluster show what it has.
    """
    bound: dict[str, Counter[str]] = {}
    for pod in pods:
        annotation = (pod["metadata"].get("annotations") or {}).get(PLAN_ANNOTATION)
        node = pod["spec"].get("nodeName")
        if annotation is not None and node and pod_phase(pod) != "Failed":
            bound.setdefault(annotation, Counter())[node] += 1
    for update in check.pod_set_updates:
        annotation = (update.get("annotations") or {}).get(PLAN_ANNOTATION)
        planned = read_planned(annotation)
        if planned is None:
            continue
        for tray, members in _remaining(planned.trays, bound.get(str(annotation), Counter())).items():
            yield TrayHold(
                owner=workload.full_name,
                tray=tray,
                gpus=members * planned.gpus,
                is_whole=planned.whole,
                channel=planned.channel,
                requests=tuple((name, members * amount) for name, amount in planned.requests.items()),
            )
        for tray in planned.spares:
            yield TrayHold(owner=workload.full_name, tray=tray, gpus=0, is_whole=True)


HeldPlans = Mapping[tuple[str, str], tuple[TrayHold, ...]]
"""What workloads hold, by their namespace and UID."""


def held_plans(
    workloads: Iterable[KueueWorkload], pods: Iterable[Object], checks: Container[str] | None = None
) -> HeldPlans:
    """What was planned for admitted workloads and is not in use yet; `checks`: names of ours, None for all.

    A plan is known by its annotation, so without the names no room is missed.
    """
    # Anybody may write the label: only pods of the workload's own namespace count.
    labelled: dict[tuple[str, str], list[Object]] = {}
    for pod in pods:
        uid = (pod["metadata"].get("labels") or {}).get(KUEUE_WORKLOAD_LABEL)
        if uid is not None:
            labelled.setdefault((pod["metadata"]["namespace"], uid), []).append(pod)
    held = {}
    for workload in workloads:
        key = (workload.namespace, workload.uid)
        ready = ready_checks(workload, checks)
        held[key] = tuple(
            hold for check in ready for hold in held_seats(workload, check, labelled.get(key, ()))
        )
    return {key: holds for key, holds in held.items() if holds}


def ready_checks(
    workload: KueueWorkload, checks: Container[str] | None = None
) -> Iterator[AdmissionCheckState]:
    """The checks whose plans hold room; `checks`: names of ours, None for all."""
    for name, check in workload.checks.items():
        if workload.has_quota and check.state == READY and (checks is None or name in checks):
            yield check


def planned_spares(updates: Iterable[Object]) -> int:
    """The spare trays of a plan."""
    annotations = ((update.get("annotations") or {}).get(PLAN_ANNOTATION) for update in updates)
    return sum(len(planned.spares) for planned in map(read_planned, annotations) if planned is not None)


def read_planned(annotation: str | None) -> PlannedPodSet | None:
    """The plan of a pod set; None where there is none that can be read."""
    if annotation is None:
        return None
    try:
        return decode_json(annotation, PLAN_ANNOTATION, PlannedPodSet)
    except Undecodable:
        return None


def _remaining(planned: Mapping[str, int], bound: Counter[str]) -> dict[str, int]:
    """Seats of members that are not bound: kube-scheduler may have taken another tray than was planned."""
    left = {tray: max(members - bound[tray], 0) for tray, members in planned.items()}
    elsewhere = bound.total() - sum(min(bound[tray], members) for tray, members in planned.items())
    for tray in reversed(left):
        freed = min(left[tray], elsewhere)
        left[tray] -= freed
        elsewhere -= freed
    return {tray: members for tray, members in left.items() if members}


# What is written.


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a check on a workload, as decided."""

    state: str
    message: str
    pod_set_updates: tuple[Any, ...] = ()
    requeue_after: int | None = None
    """Seconds; only with Retry."""


_LONGEST_MESSAGE = 1024
"""Characters: Kueue repeats the message in conditions and events, which have a limit of their own."""


def check_state_json(check: str, verdict: Verdict, now: str) -> Object:
    """The entry of `status.admissionChecks`; `now` is RFC 3339."""
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
    """The condition Active of an AdmissionCheck of ours, or None where it is there already."""
    generation = check["metadata"].get("generation", 0)
    conditions = (check.get("status") or {}).get("conditions") or ()
    message = "Rackloom plans the workloads that wait for this check"
    status, reason = "True", "Active"
    if (check.get("spec") or {}).get("parameters"):
        message, status, reason = (
            "this check takes no parameters: leave spec.parameters out",
            "False",
            "BadParameters",
        )
    wanted = {
        "type": "Active",
        "status": status,
        "reason": reason,
        "message": message,
        "observedGeneration": generation,
    }
    present: Object = next((condition for condition in conditions if condition.get("type") == "Active"), {})
    if all(present.get(key) == value for key, value in wanted.items()):
        return None
    since = present.get("lastTransitionTime") if present.get("status") == status else None
    return wanted | {"lastTransitionTime": since or now}
