"""Kueue's objects: Workloads as values, and the facts of AdmissionChecks (kueue.x-k8s.io/v1beta2).

A Workload has pod sets, each with a pod template. Kueue reserves quota for it: the reservation gives each pod
set a count, the names of ResourceFlavors, and perhaps domains of a topology. Then admission checks decide
whether it may start.

The API server has checked the objects against Kueue's schema. Kueue does not check pod templates any further,
so a template may hold values that Kubernetes would refuse.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from rackloom.core.cluster.objects import (
    WORKLOAD,
    JsonMapping,
    Object,
    condition_of,
    has_condition,
    is_being_deleted,
    name_of,
    namespace_of,
    uid_of,
)

PENDING, READY, RETRY, REJECTED = "Pending", "Ready", "Retry", "Rejected"
"""States of a check on a Workload."""


class AdmissionCheckState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an admission check on a Workload."""

    state: str
    retry_count: int = 0
    pod_set_updates: tuple[Object, ...] = ()
    """The fields that Kueue is to write into the pods of each pod set."""


class PodSet(msgspec.Struct, frozen=True, kw_only=True):
    """Pods of a Workload that have one template."""

    name: str
    count: int
    """Pods of the reservation. While there is none, those that the Workload requests."""
    template: Object
    flavors: tuple[str, ...] = ()
    """The ResourceFlavors of the reservation, each once."""
    topology: JsonMapping = {}
    """The part of the reservation that names domains."""

    @property
    def domains(self) -> list[dict[str, str]]:
        """The topology domains that Kueue has chosen, each as labels of nodes. Empty if it chose none."""
        found: list[dict[str, str]] = []
        for part in self.topology.get("slices") or ():
            columns = [_level_values(values, part["domainCount"]) for values in part["valuesPerLevel"]]
            rows = zip(*columns, strict=True)
            found += [dict(zip(self.topology["levels"], row, strict=True)) for row in rows]
        return found


class KueueWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """A Workload: pods that start together, once they have quota and all checks are Ready."""

    obj: Object
    namespace: str
    name: str
    uid: str
    queue: str
    """Its LocalQueue, or empty."""
    priority: int
    is_active: bool
    pod_sets: tuple[PodSet, ...]
    checks: Mapping[str, AdmissionCheckState]
    """By the name of the check."""

    @property
    def full_name(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"

    @property
    def has_quota(self) -> bool:
        """Quota is reserved for it, and it is neither finished nor being evicted."""
        is_over = is_being_deleted(self.obj) or has_condition(self.obj, "Finished", "Evicted")
        return self.is_active and has_condition(self.obj, "QuotaReserved") and not is_over

    @property
    def order(self) -> tuple[int, str, str]:
        """The most urgent first. Among equals, the one with the oldest reservation."""
        reserved = condition_of(self.obj, "QuotaReserved")
        return -self.priority, reserved.last_transition_time if reserved else "", self.full_name

    def requested(self, resource: str) -> int:
        """The amount of a resource that its containers request. An amount that is no plain number is 0."""
        found = 0
        # These are the counts that the Workload requests. A reservation may have fewer.
        for pod_set in (self.obj.get("spec") or {}).get("podSets") or ():
            for container in ((pod_set.get("template") or {}).get("spec") or {}).get("containers") or ():
                amount = str(((container.get("resources") or {}).get("requests") or {}).get(resource, ""))
                if amount.isascii() and amount.isdecimal():
                    found += int(amount) * int(pod_set.get("count", 1))
        return found


def read_workload(obj: Object) -> KueueWorkload:
    """Read a Workload."""
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    assigned = (status.get("admission") or {}).get("podSetAssignments") or ()
    assignments: dict[str, JsonMapping] = {_name_of_set(found): found for found in assigned}
    pod_sets = []
    for pod_set in spec.get("podSets") or ():
        assignment = assignments.get(_name_of_set(pod_set), {})
        count = assignment.get("count")
        pod_sets.append(
            PodSet(
                name=_name_of_set(pod_set),
                count=pod_set.get("count", 1) if count is None else count,
                template=pod_set.get("template") or {},
                flavors=tuple(dict.fromkeys((assignment.get("flavors") or {}).values())),
                topology=assignment.get("topologyAssignment") or {},
            )
        )
    checks = {
        entry["name"]: AdmissionCheckState(
            state=entry.get("state") or PENDING,
            retry_count=entry.get("retryCount") or 0,
            pod_set_updates=tuple(entry.get("podSetUpdates") or ()),
        )
        for entry in status.get("admissionChecks") or ()
    }
    return KueueWorkload(
        obj=obj,
        namespace=namespace_of(obj) or "",
        name=name_of(obj),
        uid=uid_of(obj),
        queue=spec.get("queueName") or "",
        priority=spec.get("priority") or 0,
        is_active=spec.get("active") is not False,
        pod_sets=tuple(pod_sets),
        checks=checks,
    )


def _name_of_set(written: JsonMapping) -> str:
    """The name of a pod set, or of its assignment. Kueue's default is `main`."""
    return str(written.get("name") or "main")


def as_admitted(workload: KueueWorkload, flavors: Mapping[str, Object]) -> Object:
    """The Workload as it would start: with the counts of its reservation, and the rules of its flavors.

    A flavor adds labels to the node selector of each template, and tolerations. `flavors`: ResourceFlavors by
    name.
    """
    spec, pod_sets = workload.obj.get("spec") or {}, []
    for written, pod_set in zip(spec.get("podSets") or (), workload.pod_sets, strict=True):
        pod_spec = pod_set.template.get("spec") or {}
        selector, tolerations = (
            dict(pod_spec.get("nodeSelector") or {}),
            [*(pod_spec.get("tolerations") or ())],
        )
        for name in pod_set.flavors:
            flavor = flavors.get(name, {}).get("spec") or {}
            selector |= flavor.get("nodeLabels") or {}
            tolerations += flavor.get("tolerations") or ()
        pod_spec = {**pod_spec, "nodeSelector": selector, "tolerations": tolerations}
        template = {**pod_set.template, "spec": pod_spec}
        pod_sets.append({**written, "count": pod_set.count, "template": template})
    # The API server leaves the kind out of the objects of a list.
    return {**workload.obj, "kind": WORKLOAD.kind, "spec": {**spec, "podSets": pod_sets}}


def controller_of_check(check: JsonMapping) -> str:
    """The name of the controller that decides an AdmissionCheck."""
    return str((check.get("spec") or {}).get("controllerName") or "")


def has_parameters(check: JsonMapping) -> bool:
    """Whether an AdmissionCheck names parameters for its controller."""
    return bool((check.get("spec") or {}).get("parameters"))


def _level_values(values: Mapping[str, Any], count: int) -> list[str]:
    """The values of one level, by domain."""
    if values.get("universal") is not None:
        return [values["universal"]] * count
    individual = values["individual"]
    prefix, suffix = individual.get("prefix") or "", individual.get("suffix") or ""
    return [f"{prefix}{root}{suffix}" for root in individual["roots"]]
