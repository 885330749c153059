"""The quota of a ComputeDomain: its Workload of Kueue, and whether the ComputeDomain waits for it.

Kueue counts the requests of pod sets in Workloads, and a ComputeDomain is no pod. So a ComputeDomain with the
label of a queue gets a Workload. Its one pod set requests resources for which an administrator sets quota:
one of `rackloom.dev/compute-domains`, and the number in its annotation of `rackloom.dev/spare-nodes`. No pod
is ever made of it. The ComputeDomain has no claim template and no daemons until the Workload is admitted.

A ComputeDomain that is counted stays counted: once the Workload exists, it decides, even if the label is
gone. Kueue refuses a change of the pod sets or the queue of a Workload that has its quota. The Workload
belongs to the ComputeDomain, so the quota is free once the ComputeDomain is taken apart and gone.

A Workload that Kueue evicts keeps its quota until its owner gives that back. A ComputeDomain does so when no
pod holds a channel of it, and its objects are gone (`reconcile`). It then writes the conditions that Kueue
0.19 writes for a Job that it has stopped.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec
from msgspec.structs import replace

from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import ComputeDomain, readable_compute_domains
from rackloom.core.cluster.kueue_objects import READY, KueueWorkload
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    WORKLOAD,
    Condition,
    CreateObject,
    Object,
    ObjectWrite,
    PatchObject,
    changed_conditions,
    condition_of,
    controller_of,
    has_condition,
    identity_of,
)
from rackloom.core.domains.settings import QuotaMode

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""On a ComputeDomain: the LocalQueue of its namespace that counts it."""
SPARES_ANNOTATION = "rackloom.dev/spare-nodes"
"""On a ComputeDomain: how many spare trays the gangs that use it may keep, all together."""
DOMAINS_RESOURCE = "rackloom.dev/compute-domains"
SPARES_RESOURCE = "rackloom.dev/spare-nodes"
_MOST_SPARES = 999
"""A larger count has another spelling once it is written: `1k`."""


class QuotaState(StrEnum):
    """Whether a ComputeDomain may have its objects."""

    UNCOUNTED = "Uncounted"
    """It may: it needs no quota."""
    WAITING = "Waiting"
    """It keeps the objects that it has, and gets no more."""
    ADMITTED = "Admitted"
    """It may."""
    EVICTED = "Evicted"
    """It is taken apart, and gives its quota back, when no pod uses it."""


class DomainQuota(msgspec.Struct, frozen=True, kw_only=True):
    """The quota of one ComputeDomain."""

    state: QuotaState = QuotaState.UNCOUNTED
    queue: str = ""
    """The LocalQueue that counts it, or empty if none is named."""
    why: str = ""
    """The reason why it waits or is evicted, in words."""
    spares: int = 0
    """Spare trays for which it has quota."""
    write: ObjectWrite | None = None
    """The write to its Workload that is due now."""
    give_back: ObjectWrite | None = None
    """The write that gives the quota back, once its objects are gone."""


def workload_name(uid: str) -> str:
    """The name of the Workload of a ComputeDomain."""
    return f"compute-domain-{uid}"


def domain_quota(
    domain: ComputeDomain, workload: KueueWorkload | None, mode: QuotaMode, now: str
) -> DomainQuota:
    """The quota of a ComputeDomain.

    `workload` has the name of its Workload, and may belong to another owner. `now` is RFC 3339.
    """
    queue = domain.labels.get(QUEUE_LABEL, "")
    if mode is QuotaMode.NONE or (workload is None and not queue and mode is QuotaMode.LABELLED):
        return DomainQuota()
    if workload is None and not queue:
        return DomainQuota(state=QuotaState.WAITING, why=f"label it {QUEUE_LABEL}: all need quota here")
    if workload is None or not has_condition(workload.obj, "QuotaReserved"):
        return _without_reservation(domain, workload, queue)
    return _with_reservation(domain, workload, now)


def _without_reservation(domain: ComputeDomain, workload: KueueWorkload | None, asked: str) -> DomainQuota:
    """It may still change its queue and its spares. Without the label it stays in the queue that it has."""
    text = domain.annotations.get(SPARES_ANNOTATION, "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(_MOST_SPARES))):
        why = f"annotation {SPARES_ANNOTATION} is {text[:20]!r}: use a number from 0 to {_MOST_SPARES}"
        return DomainQuota(state=QuotaState.WAITING, queue=asked, why=why)
    spares = int(text)
    if workload is None:
        write: ObjectWrite = CreateObject(kind=WORKLOAD, obj=_new_workload(domain, asked, spares))
        why = "Kueue does not know it yet"
        return DomainQuota(state=QuotaState.WAITING, queue=asked, why=why, write=write)
    if (unusable := _why_unusable(domain, workload)) is not None:
        return DomainQuota(state=QuotaState.WAITING, queue=asked, why=unusable)
    queue, counted = asked or workload.queue, map(workload.requested, (DOMAINS_RESOURCE, SPARES_RESOURCE))
    is_as_wanted = (workload.queue, *counted) == (queue, 1, spares)
    return DomainQuota(
        state=QuotaState.WAITING,
        queue=queue,
        why=_why_waiting(workload),
        write=None if is_as_wanted else _change(workload, {"spec": _workload_spec(queue, spares)}),
    )


def _with_reservation(domain: ComputeDomain, workload: KueueWorkload, now: str) -> DomainQuota:
    waiting = DomainQuota(state=QuotaState.WAITING, queue=workload.queue)
    if (unusable := _why_unusable(domain, workload)) is not None:
        return replace(waiting, why=unusable)
    evicted = condition_of(workload.obj, "Evicted")
    if evicted is not None and evicted.status == "True":
        write = _give_back(workload, evicted, now)
        return replace(waiting, state=QuotaState.EVICTED, why=evicted.message, give_back=write)
    if workload.requested(DOMAINS_RESOURCE) != 1:
        # A tenant who may write Workloads could have made one that requests nothing.
        return replace(waiting, why=f"its Workload does not request 1 {DOMAINS_RESOURCE}: delete it")
    if not has_condition(workload.obj, "Admitted"):
        return replace(waiting, why=_why_waiting(workload))
    ready = {"PodsReady": ("True", "Started", "The ComputeDomain has its objects")}
    is_ready = has_condition(workload.obj, "PodsReady")
    return replace(
        waiting,
        state=QuotaState.ADMITTED,
        spares=workload.requested(SPARES_RESOURCE),
        write=None if is_ready else _with_conditions(workload, now, ready),
    )


def _why_unusable(domain: ComputeDomain, workload: KueueWorkload) -> str | None:
    owner = controller_of(workload.obj)
    if owner is None or owner.uid != domain.uid:
        return f"Workload {workload.name} belongs to somebody else: delete it"
    is_finished = has_condition(workload.obj, "Finished")
    return "its Workload is marked finished: delete it" if is_finished else None


def _why_waiting(workload: KueueWorkload) -> str:
    if not workload.is_active:
        return f"spec.active of Workload {workload.name} is false"
    reserved = condition_of(workload.obj, "QuotaReserved")
    if reserved is None or reserved.status != "True":
        return reserved.message if reserved and reserved.message else "Kueue has not decided yet"
    open_checks = sorted(name for name, check in workload.checks.items() if check.state != READY)
    return f"admission checks {', '.join(open_checks)}" if open_checks else "Kueue has not admitted it yet"


# Writes: the Workload that requests its quota, and changes of it.


def _new_workload(domain: ComputeDomain, queue: str, spares: int) -> Object:
    owner = {
        "apiVersion": COMPUTE_DOMAIN.api_version,
        "kind": COMPUTE_DOMAIN.kind,
        "name": domain.name,
        "uid": domain.uid,
        "controller": True,
    }
    return {
        "apiVersion": WORKLOAD.api_version,
        "kind": WORKLOAD.kind,
        "metadata": {
            "name": workload_name(domain.uid),
            "namespace": domain.namespace,
            "labels": {names.COMPUTE_DOMAIN_LABEL: domain.uid},
            "ownerReferences": [owner],
        },
        "spec": _workload_spec(queue, spares),
    }


def _workload_spec(queue: str, spares: int) -> Object:
    # Kueue would add the defaults of a LimitRange of the namespace for CPU and memory that are not written.
    requests = {"cpu": "0", "memory": "0", DOMAINS_RESOURCE: "1"}
    if spares:
        requests[SPARES_RESOURCE] = str(spares)
    container = {"name": "quota", "image": "none", "resources": {"requests": requests}}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    return {"queueName": queue, "podSets": [{"name": "main", "count": 1, "template": template}]}


def _change(workload: KueueWorkload, patch: Object, subresource: str = "") -> PatchObject:
    """A patch of the Workload that was read. It fails if Kueue was faster."""
    return PatchObject(
        kind=WORKLOAD,
        namespace=workload.namespace,
        name=workload.name,
        patch={"metadata": identity_of(workload.obj, "resourceVersion"), **patch},
        subresource=subresource,
    )


def _with_conditions(
    workload: KueueWorkload, now: str, changed: Mapping[str, tuple[str, str, str]], **more: None
) -> PatchObject:
    """The write of some conditions: by type, their status, reason and message. The others stay."""
    fresh = [
        Condition(type=type_, status=status, reason=reason, message=message)
        for type_, (status, reason, message) in changed.items()
    ]
    conditions = changed_conditions(workload.obj, fresh, now)
    return _change(workload, {"status": {"conditions": conditions, **more}}, "status")


_REQUEUED_REASONS = ("Preempted", "NodeFailures")
"""After an eviction for these reasons, a Workload is in its queue again at once. Otherwise Kueue decides."""


def _give_back(workload: KueueWorkload, evicted: Condition, now: str) -> PatchObject:
    reason, message = evicted.reason or "Evicted", evicted.message
    changed = {
        "QuotaReserved": ("False", "Pending", message),
        "Admitted": ("False", "NoReservation", "The workload has no reservation"),
        "Requeued": ("True" if reason in _REQUEUED_REASONS else "False", reason, message),
        "PodsReady": ("False", "WaitForStart", "The ComputeDomain has no objects"),
    }
    return _with_conditions(workload, now, changed, admission=None)


# Spares that gangs may keep.


class SpareQuotas(msgspec.Struct, frozen=True, kw_only=True):
    """The spare trays for which ComputeDomains have quota."""

    by_template: Mapping[tuple[str, str], int]
    """Of each ComputeDomain that is counted, by its namespace and the name of its claim template."""
    are_required: bool
    """Gangs that use no counted ComputeDomain keep no spares."""

    def room(self, namespace: str, templates: Iterable[str]) -> int | None:
        """Spares of the gangs that claim by these templates, all together. None if no quota limits them."""
        counted = [
            self.by_template[namespace, name]
            for name in set(templates)
            if (namespace, name) in self.by_template
        ]
        if counted:
            return sum(counted)
        return 0 if self.are_required else None


def spare_quotas(
    domains: Iterable[Object], workloads: Iterable[KueueWorkload], mode: QuotaMode
) -> SpareQuotas | None:
    """The spares for which the ComputeDomains of a cluster have quota. None if quota is not counted.

    A ComputeDomain that cannot be read is left out, because no gang can use it.
    """
    if mode is QuotaMode.NONE:
        return None
    by_name = {(workload.namespace, workload.name): workload for workload in workloads}
    found: dict[tuple[str, str], int] = {}
    for domain in readable_compute_domains(domains):
        workload = by_name.get((domain.namespace, workload_name(domain.uid)))
        quota = domain_quota(domain, workload, mode, "")
        if quota.state is not QuotaState.UNCOUNTED:
            # Of two that name one template, only one has it.
            key = domain.namespace, domain.template
            found[key] = max(found.get(key, 0), quota.spares)
    return SpareQuotas(by_template=found, are_required=mode is QuotaMode.ALL)
