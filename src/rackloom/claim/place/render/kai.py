"""For KAI: which level of the topology a job has to share, and how many of its pods are a gang."""

from rackloom.claim.place.labels import Labels
from rackloom.claim.place.render.edit import Draft, Object, inside
from rackloom.claim.place.render.levels import topology
from rackloom.claim.place.render.names import as_object
from rackloom.claim.place.values import Gang, Plan
from rackloom.errors import Refused

_KAI = "kai.scheduler"
_COUNTED_BY_PODS = ("Job", "JobSet")
"""Kinds of which KAI's pod grouper asks for one pod only, unless an annotation says how many (KAI 0.14.1)."""
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
        members = sum(group.members for group in gang.groups if not group.is_helper)
        marks[f"{_KAI}/batch-min-member"] = str(members)
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
