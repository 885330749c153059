"""What Jobs and MPIJobs say of the pods that are still to come, as the API server has them."""

from collections import Counter
from collections.abc import Iterable, Iterator
from operator import attrgetter

import msgspec
import structlog
from msgspec.structs import replace

from rackloom.claim.cluster.admission.marks import GANG_LABEL
from rackloom.claim.cluster.admission.shapes import Owner
from rackloom.claim.cluster.gang.makers import MPI_JOB, Finished, Maker
from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.cluster.gang.remaining import owners_may_tell
from rackloom.claim.cluster.gang.view import View
from rackloom.claim.cluster.gang.wishes import group_of
from rackloom.claim.kube.api import Kind, KubeApi, NotFound, Object, Rejected
from rackloom.claim.kube.kinds import JOB

log = structlog.get_logger(__name__)

_ENDING = ("Complete", "Failed", "SuccessCriteriaMet", "FailureTarget")
"""Conditions of a Job that makes no pod any more (Kubernetes, "Jobs", "Job termination and cleanup")."""
_OWNERS_AT_MOST = 8
"""Of one gang that are asked: each is a request, for which other gangs wait."""
_UNSAID = {"Launcher": 1}
"""Replicas of an MPIJob's roles where it names none; of others, none (mpi-operator, `SetDefaults_MPIJob`)."""


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
        is_suspended=bool(spec.get("suspend")),
        is_ending="deletionTimestamp" in meta or _has(status, *_ENDING),
        is_owned=any(_controllers(job)),
        created=meta.get("creationTimestamp", ""),
        over_since=_over_since(job),
    )


def finished(mpi_job: Object) -> Finished | None:
    """Read an MPIJob; None for one that may still make pods.

    The operator makes none once the job has a terminal condition and its completion time, which it sets when
    the launcher succeeded or is not tried again (mpi-operator, `syncHandler`). An evicted worker sets the
    condition alone, and pods may follow.
    """
    status = mpi_job.get("status") or {}
    is_over = _has(status, "Succeeded", "Failed") and bool(status.get("completionTime"))
    return Finished(uid=mpi_job["metadata"]["uid"], seats=_seats(mpi_job)) if is_over else None


async def with_makers(api: KubeApi, view: View) -> View:
    """The view with what the owners of its pods say, where that matters. Raises KubeError."""
    asks = owners_may_tell(view)
    return replace(view, makers=await makers_of(api, view.key.namespace, view.members) if asks else {})


async def makers_of(api: KubeApi, namespace: str, members: Iterable[Member]) -> dict[str, Maker | Finished]:
    """Jobs and MPIJobs of the members, as the API server has them. Raises KubeError.

    Pods of many owners cost no requests: all gangs wait meanwhile.
    """
    owners = {one.owner.uid: one.owner for one in members if one.owner is not None}
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


def _over_since(job: Object) -> str | None:
    """A Job that failed may be made anew by its owner (JobSet), and one that is deleted by anybody."""
    lasting = ("Complete",) if any(_controllers(job)) else ("Complete", "Failed")
    conditions = (job.get("status") or {}).get("conditions") or ()
    if "deletionTimestamp" in job["metadata"]:
        return None
    found = (one for one in conditions if one["type"] in lasting and one["status"] == "True")
    return next((one.get("lastTransitionTime") for one in found), None)


def _seats(mpi_job: Object) -> dict[tuple[str, str], int]:
    found: Counter[tuple[str, str]] = Counter()
    for name, role in ((mpi_job.get("spec") or {}).get("mpiReplicaSpecs") or {}).items():
        labels = ((role.get("template") or {}).get("metadata") or {}).get("labels") or {}
        if GANG_LABEL in labels:
            found[labels[GANG_LABEL], group_of(labels)] += role.get("replicas") or _UNSAID.get(name, 0)
    return dict(found)


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
