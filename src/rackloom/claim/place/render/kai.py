"""For KAI: which level of the topology a job has to share, and how many of its pods are a gang."""

from rackloom.claim.place.labels import Labels
from rackloom.claim.place.reading.jobs import part
from rackloom.claim.place.render.edit import Draft, Object, inside
from rackloom.claim.place.render.levels import topology
from rackloom.claim.place.render.names import as_object
from rackloom.claim.place.values import Gang, Plan
from rackloom.errors import Refused

_KAI = "kai.scheduler"
_COUNTED_BY_PODS = ("Job", "JobSet")
"""Kinds of which KAI's pod grouper asks for one pod only, unless an annotation says how many (KAI 0.14.1)."""
_ORDER = ("spec", "startupPolicy", "startupPolicyOrder")
_GROUPED_BY_SHARES = "LeaderWorkerSet"
"""KAI's pod grouper makes a group of each replica, and the placement holds for each group."""


def for_kai(draft: Draft, gang: Gang, _plan: Plan, labels: Labels) -> list[Object]:
    """Annotations of the job, or a PodGroup of pods. Raises Refused for segments, which they cannot tell.

    Returns the Topology that they refer to, and the PodGroup.
    """
    _check(draft, gang)
    for _, _, template in draft.templates():
        inside(template, "spec")["schedulerName"] = "kai-scheduler"
    levels = topology(f"{_KAI}/v1alpha1", labels)
    if draft.job.kind == "Pod":
        return [levels, _grouped(draft, as_object(gang.name), labels)]
    draft.mark(draft.main, "labels", {f"{_KAI}/queue": labels.queue})
    marks = {
        f"{_KAI}/topology": labels.topology,
        f"{_KAI}/topology-required-placement": labels.clique,
    }
    if draft.job.kind in _COUNTED_BY_PODS:
        marks[f"{_KAI}/batch-min-member"] = str(sum(group.members for group in gang.groups))
    draft.mark(draft.main, "annotations", marks)
    return [levels]


def _check(draft: Draft, gang: Gang) -> None:
    if gang.segment is not None:
        raise Refused(
            f"{gang.name}: KAI's annotations keep a whole job together; they know no segments",
            nearest_fix="use --render kueue or slurm, or leave --segment out",
        )
    if len({group.share for group in gang.groups}) > 1 and draft.job.kind != _GROUPED_BY_SHARES:
        raise Refused(
            f"{gang.name}: KAI's annotations keep a whole job together; they know no groups apart",
            nearest_fix="use --render kueue, or leave --apart out",
        )
    if draft.job.kind == "JobSet":
        _check_order(draft, gang)


def _check_order(draft: Draft, gang: Gang) -> None:
    """KAI's pod grouper makes one group of a JobSet only where it says AnyOrder (KAI 0.14.1).

    Else each replicated Job is a group, and each would wait for as many pods as the annotation says. Jobs
    that depend on others come after them, and the one group would wait for all.
    """
    jobs = part(draft.main, ("spec", "replicatedJobs"))
    together = part(draft.main, _ORDER) == "AnyOrder" and not any(one.get("dependsOn") for one in jobs)
    if len(gang.groups) > 1 and not together:
        raise Refused(
            f"{gang.name}: KAI starts replicated Jobs together only if they may start in any order",
            nearest_fix=f"set {'.'.join(_ORDER)} to AnyOrder without dependsOn, or use --render affinity",
        )


def _grouped(draft: Draft, name: str, labels: Labels) -> Object:
    """The PodGroup of all the pods: KAI's pod grouper makes one for each pod that names none."""
    for pod in draft.objects:
        draft.mark(pod, "annotations", {"pod-group-name": name})
    namespace = (draft.main.get("metadata") or {}).get("namespace")
    return {
        "apiVersion": "scheduling.run.ai/v2alpha2",
        "kind": "PodGroup",
        "metadata": {"name": name} | ({"namespace": namespace} if namespace else {}),
        "spec": {
            "minMember": len(draft.objects),
            "queue": labels.queue,
            "topologyConstraint": {"topology": labels.topology, "requiredTopologyLevel": labels.clique},
        },
    }
