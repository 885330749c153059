"""Who makes the members of a gang, as far as it is known how many are still to come."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

import msgspec
import structlog

from rackloom.claim.cluster.admission.shapes import Owner
from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.kube.api import Kind, KubeApi, NotFound, Object, Rejected
from rackloom.claim.kube.kinds import JOB

log = structlog.get_logger(__name__)

MPI_JOB = Kind("kubeflow.org", "v2beta1", "MPIJob", "mpijobs", namespaced=True)
_ENDING = ("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget")
"""Conditions of a Job that makes no pod any more (Kubernetes, "Jobs", "Job termination and cleanup")."""
LONGEST_PAUSE = 600.0
"""Seconds that a Job lets pass, at most, before it makes a pod anew that failed.

Source: kube-controller-manager, `MaxJobPodFailureBackOff`; it begins with 10 s and doubles, and is no option.
"""
_OWNERS_AT_MOST = 2
"""Nothing is proven by more: it takes one Job, or an MPIJob and the Job of its launcher."""


class Maker(msgspec.Struct, frozen=True, kw_only=True):
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
    is_still: bool = False
    """It makes no pods now: it is suspended, ends, or is being deleted."""
    is_owned: bool = False
    """Its controller (JobSet) may make it anew, with all of its pods, when another one of the set fails."""

    def makes_all_of(self, size: int) -> bool:
        """Whether a gang of this size may be all its own: a smaller Job has others beside it."""
        return min(self.completions, self.parallelism) >= size

    def over(self, members: Iterable[Member]) -> int:
        """How many of its completions ask for no pod any more; `members` are its pods."""
        done = [one for one in members if one.is_done]
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


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """An MPIJob that makes no pod any more, nor does its launcher's Job."""

    uid: str


Makers = Mapping[str, Maker | Finished]
"""By UID of the pods' owner."""


def maker_of(job: Object) -> Maker | None:
    """Read a Job; None for one without completions, where it is the pods that know when they are done."""
    meta, spec, status = job["metadata"], job.get("spec") or {}, job.get("status") or {}
    completions = spec.get("completions")
    if completions is None:
        return None
    return Maker(
        completions=completions,
        parallelism=spec.get("parallelism", 1),
        is_indexed=spec.get("completionMode") == "Indexed",
        succeeded=status.get("succeeded") or 0,
        closed=_closed(status.get("completedIndexes"), status.get("failedIndexes")),
        is_still=bool(spec.get("suspend")) or "deletionTimestamp" in meta or _has(status, *_ENDING),
        is_owned=any(_controllers(job)),
    )


def finished(mpi_job: Object) -> Finished | None:
    """Read an MPIJob; None for one that may still make pods.

    The operator makes none once the job has a terminal condition and its completion time, which it sets when
    the launcher succeeded or is not tried again (mpi-operator, `syncHandler`). An evicted worker sets the
    condition alone, and pods may follow.
    """
    status = mpi_job.get("status") or {}
    is_over = _has(status, "Succeeded", "Failed") and bool(status.get("completionTime"))
    return Finished(uid=mpi_job["metadata"]["uid"]) if is_over else None


async def makers_of(api: KubeApi, namespace: str, members: Iterable[Member]) -> dict[str, Maker | Finished]:
    """Jobs and MPIJobs of the members, as the API server has them, once one has ended. Raises KubeError.

    Pods of many owners cost no requests: all gangs wait meanwhile, and nothing would be proven.
    """
    seen = tuple(members)
    if not any(one.ended for one in seen):
        return {}
    owners = {one.owner.uid: one.owner for one in seen if one.owner is not None}
    if len(owners) > _OWNERS_AT_MOST:
        return {}
    asked = {uid: await _maker(api, namespace, owner) for uid, owner in owners.items()}
    return {uid: maker for uid, maker in asked.items() if maker is not None}


async def _maker(api: KubeApi, namespace: str, owner: Owner) -> Maker | Finished | None:
    if _is(owner, MPI_JOB):
        mpi_job = await _read(api, namespace, MPI_JOB, owner)
        return None if mpi_job is None else finished(mpi_job)
    job = await _read(api, namespace, JOB, owner) if _is(owner, JOB) else None
    if job is None:
        return None
    above = next((one for one in _controllers(job) if _is(one, MPI_JOB)), None)
    return maker_of(job) if above is None else await _maker(api, namespace, above)


async def _read(api: KubeApi, namespace: str, kind: Kind, owner: Owner) -> Object | None:
    """None too for one that is another one by now, and where nobody may read it."""
    try:
        found = await api.get(kind, owner.name, namespace)
    except NotFound:
        return None
    except Rejected as refusal:
        log.warning(
            "gangs.owner_not_read", owner=f"{kind.kind} {namespace}/{owner.name}", why=refusal.message
        )
        return None
    return found if found["metadata"]["uid"] == owner.uid else None


def _is(owner: Owner, kind: Kind) -> bool:
    return (owner.api_version, owner.kind) == (kind.api_version, kind.kind)


def _controllers(obj: Object) -> Iterator[Owner]:
    found = obj["metadata"].get("ownerReferences") or ()
    return (msgspec.convert(one, Owner) for one in found if one.get("controller"))


def _has(status: Object, *types: str) -> bool:
    conditions = status.get("conditions") or ()
    return any(one["type"] in types and one["status"] == "True" for one in conditions)


def _closed(*texts: str | None) -> tuple[range, ...]:
    """Of `1,3-5,7`, as a Job writes them; none where they cannot be read, which proves nothing."""
    try:
        found = [_indexes(part) for text in texts if text for part in text.split(",")]
    except ValueError:
        return ()
    return tuple(_each_once(sorted(found, key=attrgetter("start"))))


def _indexes(part: str) -> range:
    """Raises ValueError for what is no `3-5`."""
    first, dash, last = part.partition("-")
    return range(int(first), int(last if dash else first) + 1)


def _each_once(found: Iterable[range]) -> Iterator[range]:
    """What two of them have is of the first."""
    reached = 0
    for one in found:
        if one.stop > max(one.start, reached):
            yield range(max(one.start, reached), one.stop)
            reached = one.stop
