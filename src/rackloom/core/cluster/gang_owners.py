"""The workloads that own the pods of gangs, if the number of their pods that are still to come is known.

The owner decides whether more pods come. A Job replaces pods that failed or were deleted until
`completions` pods have succeeded. An Indexed Job does so for each index. Its status gives completed and
failed indexes as ranges, which stay ranges here: the status of a Job of two thousand million completions
has a few letters. JobSet may recreate a Job of its set as a whole, so such a failure is not final. An
MPIJob makes no pod once it has a terminal condition and a completion time. Status that cannot be read
proves nothing.

Sources: Kubernetes documentation, "Jobs"; kube-controller-manager, `MaxJobPodFailureBackOff`;
mpi-operator, `syncHandler` and `SetDefaults_MPIJob`.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from operator import attrgetter

import msgspec

from rackloom.core.cluster.gang_objects import GangMember, gang_group_of
from rackloom.core.cluster.objects import (
    Object,
    ResourceKind,
    conditions_of,
    controller_of,
    has_condition,
    is_being_deleted,
    uid_of,
)
from rackloom.core.cluster.pods import GANG_LABEL
from rackloom.core.cluster.workload_kinds import other_manager

MPI_JOB = ResourceKind("kubeflow.org", "v2beta1", "MPIJob", "mpijobs", namespaced=True)
LONGEST_JOB_BACKOFF = 600.0
"""The longest time, in seconds, before a Job replaces a pod that failed.

Source: kube-controller-manager, `MaxJobPodFailureBackOff`. It begins with 10 s and doubles, and is not
configurable.
"""


class OwnerJob(msgspec.Struct, frozen=True, kw_only=True):
    """A Job. It replaces pods that failed or were deleted, until `completions` pods have succeeded.

    Source: Kubernetes, "Jobs", sections "Parallel execution for Jobs" and "Completion mode".
    """

    completions: int
    parallelism: int
    """Pods that run at a time."""
    is_indexed: bool
    """Each index below `completions` succeeds once. A Job that was reduced may have pods above it."""
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
    """RFC 3339, in whole seconds of UTC, as is the next."""
    over_since: str | None = None
    """When it ended for good. None while it creates pods, or if it may be recreated."""

    @property
    def is_still(self) -> bool:
        """It makes no pods now."""
        return self.is_suspended or self.is_ending

    @property
    def at_once(self) -> int:
        """The number of pods that it starts with."""
        return min(self.completions, self.parallelism)

    def over(self, members: Iterable[GangMember]) -> int:
        """The number of its completions that need no pod any more. `members` are its pods.

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
"""Default replicas of an MPIJob's roles. Other roles have none (mpi-operator, `SetDefaults_MPIJob`)."""


def read_owner_job(job: Object) -> OwnerJob | None:
    """Read a Job. One without completions gives None: its pods decide when they are done."""
    spec, status = job.get("spec") or {}, job.get("status") or {}
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
        is_ending=is_being_deleted(job) or has_condition(job, *_ENDING_CONDITIONS),
        is_owned=controller_of(job) is not None,
        created=job["metadata"].get("creationTimestamp", ""),
        over_since=_over_since(job),
    )


def read_finished_mpi_job(mpi_job: Object) -> FinishedMPIJob | None:
    """Read an MPIJob that makes no more pods. None for others, and for jobs that another controller manages.

    The operator makes none once the job has a terminal condition and its completion time, which it sets when
    the launcher succeeded or is not tried again (mpi-operator, `syncHandler`). An evicted worker sets the
    condition alone, and pods may follow.
    """
    status = mpi_job.get("status") or {}
    is_over = has_condition(mpi_job, "Succeeded", "Failed") and bool(status.get("completionTime"))
    if not is_over or other_manager(mpi_job) is not None:
        return None
    return FinishedMPIJob(uid=uid_of(mpi_job), replicas=_replicas_by_group(mpi_job))


def _over_since(job: Object) -> str | None:
    """Its owner (JobSet) may recreate a Job that failed, and any user may recreate one that is deleted."""
    if is_being_deleted(job):
        return None
    final = ("Complete",) if controller_of(job) else ("Complete", "Failed")
    over = (condition for condition in conditions_of(job) if condition.type in final)
    return next((entry.last_transition_time or None for entry in over if entry.status == "True"), None)


def _replicas_by_group(mpi_job: Object) -> dict[tuple[str, str], int]:
    replicas: Counter[tuple[str, str]] = Counter()
    for name, role in ((mpi_job.get("spec") or {}).get("mpiReplicaSpecs") or {}).items():
        labels = ((role.get("template") or {}).get("metadata") or {}).get("labels") or {}
        if GANG_LABEL in labels:
            count = role.get("replicas") or _DEFAULT_REPLICAS.get(name, 0)
            replicas[labels[GANG_LABEL], gang_group_of(labels)] += count
    return dict(replicas)


def _closed_indexes(*texts: str | None) -> tuple[range, ...]:
    """Parse `1,3-5,7`, as a Job writes indexes. An unreadable text gives no index, which proves nothing."""
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
