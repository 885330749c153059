"""The pods of a gang as values, and the workloads that own them: Jobs and MPIJobs.

A `GangMember` is one pod: its gates, the tray for which it was ungated, whether it ended, and its rank
within its group (the completion or replica index that its controller wrote).

The owner decides whether more pods come. A Job replaces pods that failed or were deleted until
`completions` pods have succeeded; an Indexed Job does so for each index. Its status gives completed and
failed indexes as ranges, which stay ranges here: a Job of two thousand million completions says in a
few letters that they are over. A Job that JobSet controls may be made anew as a whole, so its failure
is not final. An MPIJob makes no pod once it has a terminal condition and a completion time. Status that
cannot be read proves nothing.

Sources: Kubernetes documentation, "Jobs"; kube-controller-manager, `MaxJobPodFailureBackOff`;
mpi-operator, `syncHandler` and `SetDefaults_MPIJob`.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

import msgspec

from rackloom.core.gangs import spec
from rackloom.core.gangs.spec import gang_group_of
from rackloom.core.kubernetes.objects import JOB, Object, ResourceKind, epoch_seconds
from rackloom.core.kubernetes.pods import GANG_LABEL, TEMPLATE_GATE, OwnerReference, PodObject, decode_object
from rackloom.core.place.pod_constraints import parse_count

GPU_RESOURCE = "nvidia.com/gpu"
_CLASS_RESOURCES = "deviceclass.resource.kubernetes.io/"
"""Before the name of a device class: kube-scheduler makes a claim for it, once it has chosen a node."""
_ENDED = ("Succeeded", "Failed")


class GangMember(msgspec.Struct, frozen=True, kw_only=True):
    """One pod of a gang."""

    pod: PodObject
    obj: Object
    """As it is stored: its rules about nodes and neighbours are read where it is placed."""
    namespace: str
    tolerations: int | None
    """How many it has; None where the field is missing."""
    ended: bool
    going: bool
    """Its deletion was asked for."""
    succeeded: bool = False
    waits_because: str = ""
    """What the scheduler says of a pod that it cannot bind."""
    is_unschedulable: bool = False
    """The scheduler found no node for it: said after its last gate went, since before it does not try."""
    priority: int = 0
    gpus: int = 0
    """Those that its containers count (`nvidia.com/gpu`); claimed ones are not among them."""
    uncounted: tuple[str, ...] = ()
    """Resources of its containers that stand for a device class (KEP-5004)."""

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
        """The place of our gate among its gates."""
        gates = [scheduling_gate.name for scheduling_gate in self.pod.spec.scheduling_gates or ()]
        return gates.index(spec.GANG_GATE) if spec.GANG_GATE in gates else None

    @property
    def foreign_gates(self) -> tuple[str, ...]:
        """Gates of others than Rackloom, such as queues."""
        gates = (gate.name for gate in self.pod.spec.scheduling_gates or ())
        return tuple(name for name in gates if name not in (spec.GANG_GATE, TEMPLATE_GATE))

    @property
    def tray(self) -> str | None:
        """The tray for which it was let go; None while it is gated, or if it was never held."""
        return None if self.gate is not None else self.annotations.get(spec.TRAY_ANNOTATION)

    @property
    def released_at(self) -> float | None:
        """When it was let go, in seconds since the epoch."""
        found = self.annotations.get(spec.RELEASED_ANNOTATION)
        return None if self.tray is None or found is None else epoch_seconds(found)

    @property
    def owner(self) -> OwnerReference | None:
        """The controller that makes it anew when it is deleted."""
        return self.pod.owner

    @property
    def is_bare(self) -> bool:
        """Nobody owns it."""
        return not self.pod.metadata.owner_references

    @property
    def is_done(self) -> bool:
        """It ended well, and by itself: what is deleted may end well too, and is made anew."""
        return self.succeeded and not self.going

    @property
    def job(self) -> OwnerReference | None:
        """Its owner where that is a Job."""
        owner = self.owner
        is_job = owner is not None and (owner.api_version, owner.kind) == (JOB.api_version, JOB.kind)
        return owner if is_job else None

    @property
    def rank(self) -> tuple[int, str]:
        """The order of members of a group."""
        found = (self.pod.labels.get(label, "") for label in spec.RANK_LABELS)
        return next((int(one) for one in found if one.isdecimal()), 0), self.name


def read_member(obj: Object) -> GangMember:
    """Read a pod."""
    meta, spec, status = obj["metadata"], obj["spec"], obj.get("status") or {}
    tolerations, waits = spec.get("tolerations"), _not_scheduled(status)
    return GangMember(
        pod=decode_object(obj, PodObject),
        obj=obj,
        namespace=meta["namespace"],
        tolerations=None if tolerations is None else len(tolerations),
        ended=status.get("phase") in _ENDED,
        going="deletionTimestamp" in meta,
        succeeded=status.get("phase") == "Succeeded",
        waits_because=waits.get("message") or waits.get("reason") or "",
        is_unschedulable=waits.get("reason") == "Unschedulable",
        priority=spec.get("priority") or 0,
        gpus=counted_gpus(spec),
        uncounted=tuple(sorted(_class_resources(spec))),
    )


def counted_gpus(spec: Object) -> int:
    """GPUs in the limits of a pod's containers; what init containers have is over by then.

    Raises ValueError where a limit is no count.
    """
    limits = (
        (container.get("resources") or {}).get("limits") or {} for container in spec.get("containers") or ()
    )
    return sum(parse_count(limit.get(GPU_RESOURCE, 0)) for limit in limits)


def _not_scheduled(status: Object) -> Object:
    """The condition in which the scheduler says that it did not bind a pod; empty without one."""
    found = (condition for condition in status.get("conditions") or () if condition["type"] == "PodScheduled")
    return next((one for one in found if one["status"] == "False"), {})


def _class_resources(spec: Object) -> set[str]:
    containers = (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))
    resources = (container.get("resources") or {} for container in containers)
    named = (
        name
        for resource in resources
        for name in (*(resource.get("limits") or ()), *(resource.get("requests") or ()))
    )
    return {name for name in named if name.startswith(_CLASS_RESOURCES)}


# Owner workloads, as far as it is known how many of their pods are still to come.


MPI_JOB = ResourceKind("kubeflow.org", "v2beta1", "MPIJob", "mpijobs", namespaced=True)
LONGEST_JOB_BACKOFF = 600.0
"""Seconds that a Job lets pass, at most, before it makes a pod anew that failed.

Source: kube-controller-manager, `MaxJobPodFailureBackOff`; it begins with 10 s and doubles, and is no option.
"""


class OwnerJob(msgspec.Struct, frozen=True, kw_only=True):
    """A Job. It replaces pods that failed or were deleted, until `completions` pods have succeeded.

    Source: Kubernetes, "Jobs", sections "Parallel execution for Jobs" and "Completion mode".
    """

    completions: int
    parallelism: int
    """So many pods at a time."""
    is_indexed: bool
    """Each index below `completions` succeeds once; a job that was cut down has pods above it."""
    succeeded: int = 0
    """Pods that the Job has counted, also where they are gone by now; it counts late, never too many."""
    closed: tuple[range, ...] = ()
    """Indexes that succeeded, or failed so often that the Job makes them not again; in order, each once.

    A Job of two thousand million completions says that they are over in a few letters.
    """
    is_suspended: bool = False
    """It makes no pods now, and makes them when it goes on."""
    is_ending: bool = False
    """It makes no pods any more: it is over, is about to be, or is being deleted."""
    is_owned: bool = False
    """Its controller (JobSet) may make it anew, with all of its pods, when another one of the set fails."""
    created: str = ""
    """RFC 3339, in whole seconds of UTC; so is the next."""
    over_since: str | None = None
    """When it ended, to stay so; None while it makes pods, and where it may be made anew."""

    @property
    def is_still(self) -> bool:
        """It makes no pods now."""
        return self.is_suspended or self.is_ending

    @property
    def at_once(self) -> int:
        """So many pods it has at first."""
        return min(self.completions, self.parallelism)

    def makes_all_of(self, size: int) -> bool:
        """Whether a gang of this size may be all its own: a smaller Job has others beside it."""
        return self.at_once >= size

    def over(self, members: Iterable[GangMember]) -> int:
        """How many of its completions ask for no pod any more; `members` are its pods."""
        done = [member for member in members if member.is_done]
        if not self.is_indexed:
            return max(self.succeeded, len(done))
        told = sum(len(range(one.start, min(one.stop, self.completions))) for one in self.closed)
        return told + sum(
            index < self.completions for index in {one.rank[0] for one in done} if not self._has(index)
        )

    def _has(self, index: int) -> bool:
        """Whether the Job has closed an index."""
        before = bisect_right(self.closed, index, key=attrgetter("start"))
        return before > 0 and index in self.closed[before - 1]


class FinishedMPIJob(msgspec.Struct, frozen=True, kw_only=True):
    """An MPIJob that makes no pod any more, nor does its launcher's Job."""

    uid: str
    seats: Mapping[tuple[str, str], int] = msgspec.field(default_factory=dict)
    """Its replicas, by gang and group of the gang."""

    def makes_all_of(self, gang: str, sizes: Mapping[str, int]) -> bool:
        """Whether nobody else makes pods of a gang with groups of these sizes."""
        return all(self.seats.get((gang, group), 0) >= size for group, size in sizes.items())


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
        is_ending="deletionTimestamp" in meta or _has_condition(status, *_ENDING_CONDITIONS),
        is_owned=any(controllers_of(job)),
        created=meta.get("creationTimestamp", ""),
        over_since=_over_since(job),
    )


def read_finished_mpi_job(mpi_job: Object) -> FinishedMPIJob | None:
    """Read an MPIJob; None for one that may still make pods.

    The operator makes none once the job has a terminal condition and its completion time, which it sets when
    the launcher succeeded or is not tried again (mpi-operator, `syncHandler`). An evicted worker sets the
    condition alone, and pods may follow.
    """
    status = mpi_job.get("status") or {}
    is_over = _has_condition(status, "Succeeded", "Failed") and bool(status.get("completionTime"))
    return (
        FinishedMPIJob(uid=mpi_job["metadata"]["uid"], seats=_replicas_by_group(mpi_job)) if is_over else None
    )


def is_owner_of_kind(owner: OwnerReference, kind: ResourceKind) -> bool:
    """Whether an owner reference names an object of this kind and API version."""
    return (owner.api_version, owner.kind) == (kind.api_version, kind.kind)


def controllers_of(obj: Object) -> Iterator[OwnerReference]:
    """The owner references that are marked as the controller; Kubernetes allows at most one."""
    found = obj["metadata"].get("ownerReferences") or ()
    return (msgspec.convert(one, OwnerReference) for one in found if one.get("controller"))


def _has_condition(status: Object, *types: str) -> bool:
    conditions = status.get("conditions") or ()
    return any(condition["type"] in types and condition["status"] == "True" for condition in conditions)


def _over_since(job: Object) -> str | None:
    """A Job that failed may be made anew by its owner (JobSet), and one that is deleted by anybody."""
    lasting = ("Complete",) if any(controllers_of(job)) else ("Complete", "Failed")
    conditions = (job.get("status") or {}).get("conditions") or ()
    if "deletionTimestamp" in job["metadata"]:
        return None
    found = (
        condition
        for condition in conditions
        if condition["type"] in lasting and condition["status"] == "True"
    )
    return next((one.get("lastTransitionTime") for one in found), None)


def _replicas_by_group(mpi_job: Object) -> dict[tuple[str, str], int]:
    found: Counter[tuple[str, str]] = Counter()
    for name, role in ((mpi_job.get("spec") or {}).get("mpiReplicaSpecs") or {}).items():
        labels = ((role.get("template") or {}).get("metadata") or {}).get("labels") or {}
        if GANG_LABEL in labels:
            found[labels[GANG_LABEL], gang_group_of(labels)] += role.get("replicas") or _DEFAULT_REPLICAS.get(
                name, 0
            )
    return dict(found)


def _closed_indexes(*texts: str | None) -> tuple[range, ...]:
    """Of `1,3-5,7`, as a Job writes them; none where they cannot be read, which proves nothing."""
    try:
        found = [_index_range(part) for text in texts if text for part in text.split(",")]
    except ValueError:
        return ()
    return tuple(_without_overlap(sorted(found, key=attrgetter("start"))))


def _index_range(part: str) -> range:
    """Raises ValueError for what is no `3-5`."""
    first, dash, last = part.partition("-")
    return range(int(first), int(last if dash else first) + 1)


def _without_overlap(found: Iterable[range]) -> Iterator[range]:
    """What two of them have is of the first."""
    reached = 0
    for one in found:
        if one.stop > max(one.start, reached):
            yield range(max(one.start, reached), one.stop)
            reached = one.stop
