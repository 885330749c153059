"""A gang as its pods declare it: what they ask for, the pods as values, and the workloads that own them.

A pod belongs to a gang by the label `rackloom.dev/gang`; the annotation `rackloom.dev/gang-size` says
for how many pods to wait: `18`, or `launcher=1,worker=18` for several groups (`GangSpec`). All pods of a
gang must declare the same. A segment is a number of members that share one NVLink clique; without it the
whole gang shares one. Reserved spare trays count towards no ResourceQuota, because no pod runs on them. A
small gang may therefore keep only a few, and a larger one at most as many as it has members. What cannot be
read is refused with an example of what to write. `GangSettings` is what the operator sets.

A `GangMember` is one pod: its gates, the tray for which it was ungated, whether it ended, and its rank
within its group (the completion or replica index that its controller wrote).

The owner decides whether more pods come. A Job replaces pods that failed or were deleted until
`completions` pods have succeeded; an Indexed Job does so for each index. Its status gives completed and
failed indexes as ranges, which stay ranges here: a Job of two thousand million completions says in a
few letters that they are over. JobSet may recreate a Job of its set as a whole, so such a failure
is not final. An MPIJob makes no pod once it has a terminal condition and a completion time. Status that
cannot be read proves nothing.

Sources: Kubernetes documentation, "Jobs"; kube-controller-manager, `MaxJobPodFailureBackOff`;
mpi-operator, `syncHandler` and `SetDefaults_MPIJob`.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

import msgspec

from rackloom.core.cluster import names
from rackloom.core.cluster.metadata import OwnerReference
from rackloom.core.cluster.objects import (
    JOB,
    Object,
    ResourceKind,
    epoch_seconds,
    has_condition,
    has_pod_ended,
)
from rackloom.core.cluster.pods import GANG_LABEL, TEMPLATE_GATE, PodObject, decode_object
from rackloom.core.cluster.pods import SIZE_ANNOTATION as SIZE_ANNOTATION
from rackloom.core.cluster.scheduling import requested_devices
from rackloom.core.cluster.workload_kinds import other_manager
from rackloom.core.domains.settings import QuotaMode
from rackloom.errors import Refused

# Names on pods, nodes and GangPlans. They are part of the public interface.


GANG_GATE = GANG_LABEL
"""The scheduling gate of a pod whose gang is not placed yet."""
GANG_TAINT = GANG_LABEL
"""On reserved trays, effect NoSchedule; its value is the UID of the GangPlan."""
GANG_FINALIZER = GANG_LABEL
"""On a GangPlan while trays may be reserved for it."""
GROUP_LABEL = "rackloom.dev/gang-group"
"""On pods of gangs with several groups: the group of the pod."""
SEGMENT_ANNOTATION = "rackloom.dev/gang-segment"
"""The number of members of a group that share a clique; without it the whole gang shares one."""
SPARES_ANNOTATION = "rackloom.dev/gang-spares"
"""The number of trays to reserve in each clique for members whose tray is lost."""
TRAY_ANNOTATION = "rackloom.dev/gang-tray"
"""On a pod that was ungated: the node that it is pinned to."""
RELEASED_ANNOTATION = "rackloom.dev/gang-released"
"""On a pod that was ungated: the time (RFC 3339)."""
RANK_LABELS = (
    "batch.kubernetes.io/job-completion-index",
    "training.kubeflow.org/replica-index",
    "leaderworkerset.sigs.k8s.io/worker-index",
    "apps.kubernetes.io/pod-index",
)
"""Where controllers write the rank of a pod. Neighbours in rank become neighbours in the plan."""
DEFAULT_GROUP = "member"
"""The group of a gang that names none."""


# What one pod declares about its gang.


_GANG_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_MOST_MEMBERS = 4096
"""Members of a group: far above any rack, and small enough for one plan object."""
SPARES_OF_ANY_GANG = 4
"""Spare trays per clique that any gang may keep; a larger gang may keep as many as it has members."""
SIZE_EXAMPLE = f"write annotation {SIZE_ANNOTATION} as 18, or as launcher=1,worker=18"


class GangSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a pod declares about its gang; all pods of a gang declare the same."""

    sizes: tuple[tuple[str, int], ...]
    """Groups in the order in which they were written, with the number of members."""
    segment: int | None = None
    spares: int = 0

    def has(self, group: str) -> bool:
        """Whether there is such a group."""
        return any(name == group for name, _ in self.sizes)


def read_gang_spec(annotations: Mapping[str, str]) -> GangSpec:
    """Read the annotations of a pod. Raises Refused, with what to write instead."""
    segment, spares = annotations.get(SEGMENT_ANNOTATION), annotations.get(SPARES_ANNOTATION, "0")
    sizes = _read_sizes(annotations.get(SIZE_ANNOTATION, ""))
    # Reserved trays count towards no ResourceQuota, so a small gang may keep only a few.
    most = min(max(SPARES_OF_ANY_GANG, sum(size for _, size in sizes)), _MOST_MEMBERS)
    return GangSpec(
        sizes=sizes,
        segment=None if segment is None else _read_number(SEGMENT_ANNOTATION, segment, least=1),
        spares=_read_number(SPARES_ANNOTATION, spares, least=0, most=most),
    )


def gang_group_of(labels: Mapping[str, str]) -> str:
    """The group of a pod."""
    return labels.get(GROUP_LABEL, DEFAULT_GROUP)


def check_gang_name(gang: str) -> None:
    """Raise Refused for a gang that cannot be the name of an object."""
    if not _GANG_NAME.fullmatch(gang):
        fix = f"use lower-case letters, digits and '-' in label {GANG_LABEL}"
        raise Refused(f"gang {gang!r} is no object name", nearest_fix=fix)


def _read_sizes(text: str) -> tuple[tuple[str, int], ...]:
    if "=" not in text:
        return ((DEFAULT_GROUP, _read_number(SIZE_ANNOTATION, text, least=1)),)
    pairs = [part.strip().partition("=") for part in text.split(",")]
    sizes = {name.strip(): _read_number(SIZE_ANNOTATION, size, least=1) for name, _, size in pairs}
    if len(sizes) < len(pairs) or not all(map(_GANG_NAME.fullmatch, sizes)):
        raise Refused(f"annotation {SIZE_ANNOTATION} is {text!r}", nearest_fix=SIZE_EXAMPLE)
    return tuple(sizes.items())


def _read_number(annotation: str, text: str, *, least: int, most: int = _MOST_MEMBERS) -> int:
    text = text.strip()
    # More than nine digits are beyond any limit, and Python refuses to convert thousands of them.
    is_number = text.isascii() and text.isdecimal() and len(text) <= 9
    if not (is_number and least <= int(text) <= most):
        fix = SIZE_EXAMPLE if annotation == SIZE_ANNOTATION else f"use a number from {least} to {most}"
        raise Refused(f"annotation {annotation} is {text!r}", nearest_fix=fix)
    return int(text)


# What an operator sets for the gang controller.


class GangSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds."""

    settle: float = 2.0
    """Between the reservation of the last tray and the check of all trays: kube-scheduler may still bind a
    pod that it decided on before it saw the taint."""
    lost_after: float = 300.0
    """A tray that is not ready for so long is lost: its members are deleted and move to another tray. The
    node controller evicts pods after the same time."""
    bind_after: float = 120.0
    """A pod that was ungated and is unschedulable for so long is moved or recreated. A plan of which no pod
    was ungated is withdrawn when pods are missing for so long. For the last pods of a Job, its longest
    back-off is added."""
    again: float = 15.0
    """Between two attempts to place a gang that does not fit, since pods of others end without an event here.
    Also the shortest time between two reads of the owners of its pods."""
    max_spares: int = 8
    """Spare trays that all gangs of a namespace may keep together. No ResourceQuota counts them, since no pod
    runs on them."""
    clique_label: str = names.GPU_CLIQUE_LABEL
    """The node label whose value names the NVLink clique."""


class BesideKueue(msgspec.Struct, frozen=True, kw_only=True):
    """What of Kueue's objects bears on gangs."""

    has_plans: bool = False
    """Workloads have plans, whose trays no gang takes."""
    quota: QuotaMode = QuotaMode.NONE
    """Which ComputeDomains need quota: a gang keeps no more spare trays than those that it uses have."""


WITHOUT_KUEUE = BesideKueue()


def checked_gang_settings(settings: GangSettings) -> GangSettings:
    """The settings, unchanged. Raises Refused for values without a sense."""
    for name in ("settle", "lost_after", "bind_after", "again"):
        if not 0 < getattr(settings, name) < float("inf"):
            raise Refused(f"{name} is {getattr(settings, name)}", nearest_fix="use seconds above 0")
    if settings.max_spares < 0:
        raise Refused(f"max_spares is {settings.max_spares}", nearest_fix="use 0 for none")
    if not settings.clique_label:
        raise Refused("clique_label is empty", nearest_fix=f"use {names.GPU_CLIQUE_LABEL}")
    return settings


# The pods.


GPU_RESOURCE = "nvidia.com/gpu"
_CLASS_RESOURCES = "deviceclass.resource.kubernetes.io/"
"""Before the name of a device class: kube-scheduler makes a claim for it, once it has chosen a node."""


class GangMember(msgspec.Struct, frozen=True, kw_only=True):
    """One pod of a gang."""

    pod: PodObject
    obj: Object
    """The stored pod: scheduling rules are read from it where it is placed."""
    namespace: str
    tolerations: int | None
    """How many it has; None where the field is missing."""
    ended: bool
    is_being_deleted: bool
    succeeded: bool = False
    unbound_message: str = ""
    """What kube-scheduler reports about a pod that it did not bind."""
    is_unschedulable: bool = False
    """kube-scheduler found no node for it. It does not try, and reports nothing, while a gate is left."""
    priority: int = 0
    gpus: int = 0
    """GPUs that its containers request in effect (`nvidia.com/gpu`), without claimed ones."""
    class_resources: tuple[str, ...] = ()
    """Extended resources of its containers that are backed by a device class (KEP-5004)."""

    @property
    def name(self) -> str:
        """Of the pod."""
        return self.pod.metadata.name

    @property
    def uid(self) -> str:
        """Of the pod."""
        return self.pod.metadata.uid

    @property
    def annotations(self) -> Mapping[str, str]:
        """Of the pod."""
        return self.pod.annotations

    @property
    def group(self) -> str:
        """Its group in the gang."""
        return gang_group_of(self.pod.labels)

    @property
    def node(self) -> str | None:
        """Where it is bound."""
        return self.pod.spec.node_name or None

    @property
    def gate(self) -> int | None:
        """The index of the gang's gate among its gates."""
        gates = [gate.name for gate in self.pod.spec.scheduling_gates or ()]
        return gates.index(GANG_GATE) if GANG_GATE in gates else None

    @property
    def foreign_gates(self) -> tuple[str, ...]:
        """Gates of others than Rackloom, such as queues."""
        gates = (gate.name for gate in self.pod.spec.scheduling_gates or ())
        return tuple(name for name in gates if name not in (GANG_GATE, TEMPLATE_GATE))

    @property
    def tray(self) -> str | None:
        """The tray for which it was ungated; None while it is gated, or if it never was."""
        return None if self.gate is not None else self.annotations.get(TRAY_ANNOTATION)

    @property
    def released_at(self) -> float | None:
        """When it was ungated, in seconds since the epoch."""
        time = self.annotations.get(RELEASED_ANNOTATION)
        return None if self.tray is None or time is None else epoch_seconds(time)

    @property
    def owner(self) -> OwnerReference | None:
        """The controller that replaces it when it is deleted."""
        return self.pod.owner

    @property
    def is_bare(self) -> bool:
        """Nobody owns it."""
        return not self.pod.metadata.owner_references

    @property
    def is_done(self) -> bool:
        """It succeeded by itself. A pod that is being deleted may succeed too, and is still replaced."""
        return self.succeeded and not self.is_being_deleted

    @property
    def job(self) -> OwnerReference | None:
        """Its owner where that is a Job."""
        return self.owner if self.owner is not None and is_owner_of_kind(self.owner, JOB) else None

    @property
    def rank(self) -> tuple[int, str]:
        """The order of members of a group."""
        ranks = (self.pod.labels.get(label, "") for label in RANK_LABELS)
        return next((int(rank) for rank in ranks if rank.isdecimal()), 0), self.name


def read_member(obj: Object) -> GangMember:
    """Read a pod."""
    meta, spec, status = obj["metadata"], obj["spec"], obj.get("status") or {}
    tolerations = spec.get("tolerations")
    conditions = (entry for entry in status.get("conditions") or () if entry["type"] == "PodScheduled")
    unbound: Object = next((condition for condition in conditions if condition["status"] == "False"), {})
    return GangMember(
        pod=decode_object(obj, PodObject),
        obj=obj,
        namespace=meta["namespace"],
        tolerations=None if tolerations is None else len(tolerations),
        ended=has_pod_ended(obj),
        is_being_deleted="deletionTimestamp" in meta,
        succeeded=status.get("phase") == "Succeeded",
        unbound_message=unbound.get("message") or unbound.get("reason") or "",
        is_unschedulable=unbound.get("reason") == "Unschedulable",
        priority=spec.get("priority") or 0,
        gpus=_counted_gpus(obj),
        class_resources=tuple(sorted(_class_resources(spec))),
    )


def _counted_gpus(obj: Object) -> int:
    try:
        return requested_devices(obj["spec"], GPU_RESOURCE)
    except ValueError as error:
        raise Refused(f"pod {obj['metadata']['name']}: {error}", nearest_fix="correct it") from error


def _class_resources(spec: Object) -> set[str]:
    containers = (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))
    resources = (container.get("resources") or {} for container in containers)
    names = (
        name
        for resource in resources
        for name in (*(resource.get("limits") or ()), *(resource.get("requests") or ()))
    )
    return {name for name in names if name.startswith(_CLASS_RESOURCES)}


# Owner workloads, as far as it is known how many of their pods are still to come.


MPI_JOB = ResourceKind("kubeflow.org", "v2beta1", "MPIJob", "mpijobs", namespaced=True)
LONGEST_JOB_BACKOFF = 600.0
"""The longest time, in seconds, before a Job replaces a pod that failed.

Source: kube-controller-manager, `MaxJobPodFailureBackOff`; it begins with 10 s and doubles, and is no option.
"""


class OwnerJob(msgspec.Struct, frozen=True, kw_only=True):
    """A Job. It replaces pods that failed or were deleted, until `completions` pods have succeeded.

    Source: Kubernetes, "Jobs", sections "Parallel execution for Jobs" and "Completion mode".
    """

    completions: int
    parallelism: int
    """Pods that run at a time."""
    is_indexed: bool
    """Each index below `completions` succeeds once; a Job that was reduced may have pods above it."""
    succeeded: int = 0
    """Pods that the Job has counted, including deleted ones. The count lags but is never too high."""
    closed: tuple[range, ...] = ()
    """Indexes that succeeded, or failed for good, as sorted ranges without overlap.

    They stay ranges because a status of a few characters may cover two thousand million indexes.
    """
    is_suspended: bool = False
    """It creates no pods until it is resumed."""
    is_ending: bool = False
    """It creates no more pods: it is over, is about to be, or is being deleted."""
    is_owned: bool = False
    """Its controller (JobSet) may recreate it with all of its pods when another Job of the set fails."""
    created: str = ""
    """RFC 3339, in whole seconds of UTC; so is the next."""
    over_since: str | None = None
    """When it ended for good; None while it creates pods, and where it may be recreated."""

    @property
    def is_still(self) -> bool:
        """It makes no pods now."""
        return self.is_suspended or self.is_ending

    @property
    def at_once(self) -> int:
        """The number of pods that it starts with."""
        return min(self.completions, self.parallelism)

    def makes_all_of(self, size: int) -> bool:
        """Whether it may own all pods of a gang of this size."""
        return self.at_once >= size

    def over(self, members: Iterable[GangMember]) -> int:
        """How many of its completions need no pod any more; `members` are its pods.

        A pod that succeeded counts even before the Job's status counts it, but no index counts twice.
        """
        done = [member for member in members if member.is_done]
        if not self.is_indexed:
            return max(self.succeeded, len(done))
        over = sum(len(range(part.start, min(part.stop, self.completions))) for part in self.closed)
        for index in {member.rank[0] for member in done}:
            # The status lags: only indexes that it does not have yet are added.
            at = bisect_right(self.closed, index, key=attrgetter("start"))
            is_closed = at > 0 and index in self.closed[at - 1]
            over += index < self.completions and not is_closed
        return over


class FinishedMPIJob(msgspec.Struct, frozen=True, kw_only=True):
    """An MPIJob that creates no more pods, and neither does its launcher's Job."""

    uid: str
    replicas: Mapping[tuple[str, str], int] = msgspec.field(default_factory=dict)
    """Their number, by gang and group of the gang."""

    def makes_all_of(self, gang: str, sizes: Mapping[str, int]) -> bool:
        """Whether it owns all pods of a gang with groups of these sizes."""
        return all(self.replicas.get((gang, group), 0) >= size for group, size in sizes.items())


OwnerWorkloads = Mapping[str, OwnerJob | FinishedMPIJob]
"""By UID of the pods' owner."""


# Reading a Job or an MPIJob.


_ENDING_CONDITIONS = ("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget")
"""Conditions of a Job that makes no pod any more (Kubernetes, "Jobs", "Job termination and cleanup")."""


_DEFAULT_REPLICAS = {"Launcher": 1}
"""Replicas of an MPIJob's roles where it names none; of others, none (mpi-operator, `SetDefaults_MPIJob`)."""


def read_owner_job(job: Object) -> OwnerJob | None:
    """Read a Job; None for one without completions, where it is the pods that know when they are done."""
    meta, spec, status = job["metadata"], job.get("spec") or {}, job.get("status") or {}
    completions = spec.get("completions")
    if completions is None:
        return None
    return OwnerJob(
        completions=completions,
        parallelism=spec.get("parallelism", 1),
        is_indexed=spec.get("completionMode") == "Indexed",
        succeeded=status.get("succeeded") or 0,
        closed=_closed_indexes(status.get("completedIndexes"), status.get("failedIndexes")),
        is_suspended=bool(spec.get("suspend")),
        is_ending="deletionTimestamp" in meta or has_condition(job, *_ENDING_CONDITIONS),
        is_owned=any(controllers_of(job)),
        created=meta.get("creationTimestamp", ""),
        over_since=_over_since(job),
    )


def read_finished_mpi_job(mpi_job: Object) -> FinishedMPIJob | None:
    """Read an MPIJob; None for one that may still make pods, or that another than the operator manages.

    The operator makes none once the job has a terminal condition and its completion time, which it sets when
    the launcher succeeded or is not tried again (mpi-operator, `syncHandler`). An evicted worker sets the
    condition alone, and pods may follow.
    """
    status = mpi_job.get("status") or {}
    is_over = has_condition(mpi_job, "Succeeded", "Failed") and bool(status.get("completionTime"))
    if not is_over or other_manager(mpi_job) is not None:
        return None
    return FinishedMPIJob(uid=mpi_job["metadata"]["uid"], replicas=_replicas_by_group(mpi_job))


def is_owner_of_kind(owner: OwnerReference, kind: ResourceKind) -> bool:
    """Whether an owner reference names an object of this kind and API version."""
    return (owner.api_version, owner.kind) == (kind.api_version, kind.kind)


def controllers_of(obj: Object) -> Iterator[OwnerReference]:
    """The owner references that are marked as the controller; Kubernetes allows at most one."""
    references = obj["metadata"].get("ownerReferences") or ()
    return (msgspec.convert(entry, OwnerReference) for entry in references if entry.get("controller"))


def _over_since(job: Object) -> str | None:
    """Its owner (JobSet) may recreate a Job that failed, and anybody may recreate one that is deleted."""
    if "deletionTimestamp" in job["metadata"]:
        return None
    final = ("Complete",) if any(controllers_of(job)) else ("Complete", "Failed")
    for condition in (job.get("status") or {}).get("conditions") or ():
        if condition["type"] in final and condition["status"] == "True":
            return condition.get("lastTransitionTime")  # type: ignore[no-any-return]
    return None


def _replicas_by_group(mpi_job: Object) -> dict[tuple[str, str], int]:
    replicas: Counter[tuple[str, str]] = Counter()
    for name, role in ((mpi_job.get("spec") or {}).get("mpiReplicaSpecs") or {}).items():
        labels = ((role.get("template") or {}).get("metadata") or {}).get("labels") or {}
        if GANG_LABEL in labels:
            count = role.get("replicas") or _DEFAULT_REPLICAS.get(name, 0)
            replicas[labels[GANG_LABEL], gang_group_of(labels)] += count
    return dict(replicas)


def _closed_indexes(*texts: str | None) -> tuple[range, ...]:
    """Parse `1,3-5,7`, as a Job writes indexes; empty where it cannot be read, which proves nothing."""
    parts = []
    for part in (part for text in texts if text for part in text.split(",")):
        first, dash, last = part.partition("-")
        try:
            parts.append(range(int(first), int(last if dash else first) + 1))
        except ValueError:
            return ()
    # Completed and failed indexes may overlap while the status changes. Each counts once.
    found, end = [], 0
    for indexes in sorted(parts, key=attrgetter("start")):
        if indexes.stop > max(indexes.start, end):
            found.append(range(max(indexes.start, end), indexes.stop))
            end = indexes.stop
    return tuple(found)
