"""Who makes the members of a gang, as far as it is known how many they will be in all."""

from collections.abc import Iterable

import msgspec
import structlog

from rackloom.claim.cluster.gang.members import Member
from rackloom.claim.kube.api import KubeApi, NotFound, Object, Rejected
from rackloom.claim.kube.kinds import JOB

log = structlog.get_logger(__name__)


class Maker(msgspec.Struct, frozen=True, kw_only=True):
    """A Job. It replaces pods that failed or were deleted, until `completions` pods have succeeded.

    Source: Kubernetes, "Jobs", sections "Parallel execution for Jobs" and "Completion mode".
    """

    completions: int
    is_indexed: bool
    """Each index below `completions` succeeds once; a job that was cut down has pods above it."""


def maker_of(job: Object) -> Maker | None:
    """Read a Job; None for one whose pods may be more than it says.

    Without completions, it is the pods that know when they are done. One that has a controller of its own
    (JobSet) is made anew, with all of its pods, when another one of the set fails.
    """
    meta, spec = job["metadata"], job.get("spec") or {}
    completions = spec.get("completions")
    if completions is None or any(one.get("controller") for one in meta.get("ownerReferences") or ()):
        return None
    return Maker(completions=completions, is_indexed=spec.get("completionMode") == "Indexed")


async def makers_of(api: KubeApi, namespace: str, members: Iterable[Member]) -> dict[str, Maker]:
    """By UID: the Jobs of members that have succeeded, as the API server has them. Raises KubeError."""
    jobs = {one.job.uid: one.job.name for one in members if one.is_done and one.job is not None}
    asked = {uid: await _maker(api, namespace, name, uid) for uid, name in jobs.items()}
    return {uid: maker for uid, maker in asked.items() if maker is not None}


async def _maker(api: KubeApi, namespace: str, name: str, uid: str) -> Maker | None:
    """None too for a Job that is another one by now, and where nobody may read it."""
    try:
        job = await api.get(JOB, name, namespace)
    except NotFound:
        return None
    except Rejected as refusal:
        log.warning("gangs.job_not_read", job=f"{namespace}/{name}", why=refusal.message)
        return None
    return maker_of(job) if job["metadata"]["uid"] == uid else None
