"""The quota of a ComputeDomain: its Workload of Kueue, and whether the ComputeDomain waits for it.

Kueue counts what the pod sets of Workloads request, and a ComputeDomain is no pod. So a ComputeDomain with
the label of a queue gets a Workload of its own, whose one pod set requests the resources that an
administrator gives quota of: one of `rackloom.dev/compute-domains`, and as many of `rackloom.dev/spare-nodes`
as its annotation says. No pod is ever made of it. The ComputeDomain has no claim template and no daemons
until the Workload is admitted.

Who is counted stays counted: from the moment at which the Workload exists it decides, whatever becomes of the
label, and Kueue lets nobody change the pod sets or the queue of a Workload that has its quota. The Workload
belongs to the ComputeDomain, so the quota is free once the ComputeDomain is taken apart and gone.

A Workload that Kueue evicts keeps its quota until its owner gives that back. A ComputeDomain does so when no
pod holds a channel of it, and its objects are gone (`reconcile`). What is written then is what Kueue 0.19
writes for a Job that it has stopped.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from rackloom.core.cluster import names
from rackloom.core.cluster.domain_objects import ComputeDomain
from rackloom.core.cluster.objects import (
    COMPUTE_DOMAIN,
    WORKLOAD,
    CreateObject,
    Object,
    ObjectWrite,
    PatchObject,
    has_condition,
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
    """What it lacks is not made; what it has stays."""
    ADMITTED = "Admitted"
    """It may."""
    EVICTED = "Evicted"
    """It is taken apart, and gives its quota back, when no pod uses it."""


class DomainQuota(msgspec.Struct, frozen=True, kw_only=True):
    """The quota of one ComputeDomain."""

    state: QuotaState = QuotaState.UNCOUNTED
    queue: str = ""
    """The LocalQueue that counts it; empty where none is named."""
    why: str = ""
    """What it waits for, or why it is evicted, in words."""
    spares: int = 0
    """Spare trays for which it has quota."""
    write: ObjectWrite | None = None
    """What to write to its Workload now."""
    give_back: ObjectWrite | None = None
    """What gives the quota back, once nothing of it is left."""


def workload_name(uid: str) -> str:
    """The name of the Workload of a ComputeDomain."""
    return f"compute-domain-{uid}"


def domain_quota(domain: ComputeDomain, workload: Object | None, mode: QuotaMode, now: str) -> DomainQuota:
    """The quota of a ComputeDomain; `workload`: the object that has the name of its Workload.

    `now` is RFC 3339, for conditions.
    """
    queue = domain.labels.get(QUEUE_LABEL, "")
    if mode is QuotaMode.NONE or (workload is None and not queue and mode is QuotaMode.LABELLED):
        return DomainQuota()
    if workload is None and not queue:
        return DomainQuota(state=QuotaState.WAITING, why=f"label it {QUEUE_LABEL}: all need quota here")
    if workload is None or not has_condition(workload, "QuotaReserved"):
        return _without_reservation(domain, workload, queue)
    return _with_reservation(domain, workload, now)


def _without_reservation(domain: ComputeDomain, workload: Object | None, asked: str) -> DomainQuota:
    """It may still change its queue and its spares; without the label it stays in the queue that it has."""
    try:
        wanted = _requests(domain)
    except ValueError as error:
        return DomainQuota(state=QuotaState.WAITING, queue=asked, why=str(error))
    if workload is None:
        write: ObjectWrite = CreateObject(kind=WORKLOAD, obj=_workload(domain, asked, wanted))
        why = "Kueue does not know it yet"
        return DomainQuota(state=QuotaState.WAITING, queue=asked, why=why, write=write)
    if (unusable := _why_unusable(domain, workload)) is not None:
        return DomainQuota(state=QuotaState.WAITING, queue=asked, why=unusable)
    queue = _queue_of(workload)
    waiting = DomainQuota(state=QuotaState.WAITING, queue=asked or queue, why=_why_waiting(workload))
    if (queue, _requested(workload)) == (waiting.queue, wanted):
        return waiting
    spec = {"queueName": waiting.queue, "podSets": [_pod_set(wanted)]}
    return msgspec.structs.replace(waiting, write=_change(workload, {"spec": spec}))


def _with_reservation(domain: ComputeDomain, workload: Object, now: str) -> DomainQuota:
    queue, counted = _queue_of(workload), _requested(workload)
    waiting = DomainQuota(state=QuotaState.WAITING, queue=queue)
    if (unusable := _why_unusable(domain, workload)) is not None:
        return msgspec.structs.replace(waiting, why=unusable)
    if has_condition(workload, "Evicted"):
        why = _message(workload, "Evicted")
        return DomainQuota(
            state=QuotaState.EVICTED, queue=queue, why=why, give_back=_give_back(workload, now)
        )
    if counted.get(DOMAINS_RESOURCE) != 1:
        # Who may write Workloads could have made one that requests nothing.
        why = f"its Workload does not request 1 {DOMAINS_RESOURCE}: delete it"
        return msgspec.structs.replace(waiting, why=why)
    if not has_condition(workload, "Admitted"):
        return msgspec.structs.replace(waiting, why=_why_waiting(workload))
    ready = {"PodsReady": ("True", "Started", "The ComputeDomain has its objects")}
    write = None if has_condition(workload, "PodsReady") else _with_conditions(workload, now, ready)
    return DomainQuota(
        state=QuotaState.ADMITTED, queue=queue, spares=counted.get(SPARES_RESOURCE, 0), write=write
    )


def _why_unusable(domain: ComputeDomain, workload: Object) -> str | None:
    owners = workload["metadata"].get("ownerReferences") or ()
    if not any(owner.get("controller") and owner.get("uid") == domain.uid for owner in owners):
        return f"Workload {workload['metadata']['name']} belongs to somebody else: delete it"
    return "its Workload is marked finished: delete it" if has_condition(workload, "Finished") else None


def _queue_of(workload: Object) -> str:
    return str((workload.get("spec") or {}).get("queueName") or "")


# What it requests, and the Workload that does so.


def _requests(domain: ComputeDomain) -> dict[str, int]:
    """By resource. Raises ValueError, in words, for an annotation that is no number."""
    text = domain.annotations.get(SPARES_ANNOTATION, "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(_MOST_SPARES))):
        why = f"annotation {SPARES_ANNOTATION} is {text[:20]!r}: use a number from 0 to {_MOST_SPARES}"
        raise ValueError(why)
    return {DOMAINS_RESOURCE: 1} | ({SPARES_RESOURCE: int(text)} if int(text) else {})


def _workload(domain: ComputeDomain, queue: str, requests: Mapping[str, int]) -> Object:
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
        "spec": {"queueName": queue, "podSets": [_pod_set(requests)]},
    }


_NOTHING = {"cpu": "0", "memory": "0"}
"""Written out, or Kueue adds the defaults of a LimitRange of the namespace."""


def _pod_set(requests: Mapping[str, int]) -> Object:
    amounts = _NOTHING | {name: str(count) for name, count in requests.items()}
    container = {"name": "quota", "image": "none", "resources": {"requests": amounts}}
    return {
        "name": "main",
        "count": 1,
        "template": {"spec": {"restartPolicy": "Never", "containers": [container]}},
    }


def _requested(workload: Object) -> dict[str, int]:
    """What a Workload requests of our resources; nothing where it cannot be read."""
    found: dict[str, int] = {}
    for pod_set in (workload.get("spec") or {}).get("podSets") or ():
        for container in (pod_set.get("template", {}).get("spec") or {}).get("containers") or ():
            requests = (container.get("resources") or {}).get("requests") or {}
            for name in (DOMAINS_RESOURCE, SPARES_RESOURCE):
                amount = str(requests.get(name, ""))
                if amount.isascii() and amount.isdecimal():
                    found[name] = found.get(name, 0) + int(amount) * int(pod_set.get("count", 1))
    return found


# What its conditions say, and what is written into them.


def _conditions(workload: Object) -> list[Object]:
    return list((workload.get("status") or {}).get("conditions") or ())


def _condition(workload: Object, type_: str) -> Object:
    return next((found for found in _conditions(workload) if found.get("type") == type_), {})


def _message(workload: Object, type_: str) -> str:
    return str(_condition(workload, type_).get("message") or "")


def _why_waiting(workload: Object) -> str:
    if (workload.get("spec") or {}).get("active") is False:
        return f"spec.active of Workload {workload['metadata']['name']} is false"
    if not has_condition(workload, "QuotaReserved"):
        return _message(workload, "QuotaReserved") or "Kueue has not decided yet"
    states = (workload.get("status") or {}).get("admissionChecks") or ()
    open_checks = sorted(state["name"] for state in states if state.get("state") != "Ready")
    return f"admission checks {', '.join(open_checks)}" if open_checks else "Kueue has not admitted it yet"


def _change(workload: Object, patch: Object, subresource: str = "") -> PatchObject:
    """A patch of the Workload that was read: it fails where Kueue was faster."""
    meta = workload["metadata"]
    return PatchObject(
        kind=WORKLOAD,
        namespace=meta["namespace"],
        name=meta["name"],
        patch={"metadata": {"resourceVersion": meta["resourceVersion"]}, **patch},
        subresource=subresource,
    )


def _with_conditions(
    workload: Object, now: str, changed: Mapping[str, tuple[str, str, str]], **more: None
) -> PatchObject:
    """The write of conditions, each a status, a reason and a message by its type; the others stay."""
    kept = [found for found in _conditions(workload) if found.get("type") not in changed]
    fresh = []
    for type_, (status, reason, message) in changed.items():
        before = _condition(workload, type_)
        since = before.get("lastTransitionTime") if before.get("status") == status else None
        fresh.append(
            {
                "type": type_,
                "status": status,
                "reason": reason,
                "message": message,
                "lastTransitionTime": since or now,
                "observedGeneration": workload["metadata"].get("generation", 0),
            }
        )
    return _change(workload, {"status": {"conditions": [*kept, *fresh], **more}}, "status")


_REQUEUED_REASONS = ("Preempted", "NodeFailures")
"""Reasons of evictions after which a Workload is in its queue again at once; after others Kueue decides."""


def _give_back(workload: Object, now: str) -> PatchObject:
    evicted = _condition(workload, "Evicted")
    reason, message = str(evicted.get("reason") or "Evicted"), _message(workload, "Evicted")
    changed = {
        "QuotaReserved": ("False", "Pending", message),
        "Admitted": ("False", "NoReservation", "The workload has no reservation"),
        "Requeued": ("True" if reason in _REQUEUED_REASONS else "False", reason, message),
        "PodsReady": ("False", "WaitForStart", "The ComputeDomain has no objects"),
    }
    return _with_conditions(workload, now, changed, admission=None)


# What gangs may keep as spares.


class SpareQuotas(msgspec.Struct, frozen=True, kw_only=True):
    """The spare trays for which ComputeDomains have quota."""

    by_template: Mapping[tuple[str, str], int]
    """Of each ComputeDomain that is counted, by its namespace and the name of its claim template."""
    are_required: bool
    """Gangs that use no counted ComputeDomain keep no spares."""

    def room(self, namespace: str, templates: Iterable[str]) -> int | None:
        """Spares of the gangs that claim by these templates, all together; None: no quota limits them."""
        counted = [
            self.by_template[namespace, name]
            for name in set(templates)
            if (namespace, name) in self.by_template
        ]
        if counted:
            return sum(counted)
        return 0 if self.are_required else None


def spare_quotas(
    domains: Iterable[ComputeDomain], workloads: Iterable[Object], mode: QuotaMode
) -> SpareQuotas | None:
    """What the ComputeDomains of a cluster have quota for; None where quota is not counted."""
    if mode is QuotaMode.NONE:
        return None
    by_name = {(obj["metadata"]["namespace"], obj["metadata"]["name"]): obj for obj in workloads}
    found: dict[tuple[str, str], int] = {}
    for domain in domains:
        quota = domain_quota(domain, by_name.get((domain.namespace, workload_name(domain.uid))), mode, "")
        if quota.state is not QuotaState.UNCOUNTED:
            # Of two that name one template, only one has it.
            key = domain.namespace, domain.template
            found[key] = max(found.get(key, 0), quota.spares)
    return SpareQuotas(by_template=found, are_required=mode is QuotaMode.ALL)
