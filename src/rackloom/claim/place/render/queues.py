"""For Kueue's topology-aware scheduling and for KAI: which level of the topology a job has to share."""

from rackloom.claim.place.labels import Labels
from rackloom.claim.place.render.edit import Draft, Object, inside
from rackloom.claim.place.values import Gang, Plan
from rackloom.errors import Refused

_KUEUE = "kueue.x-k8s.io"
_KAI = "kai.scheduler"
_COUNTED_BY_PODS = ("Job", "JobSet")
"""Kinds of which KAI's pod grouper asks for one pod only, unless an annotation says how many (KAI 0.14.1)."""


def for_kueue(draft: Draft, gang: Gang, _plan: Plan, labels: Labels) -> list[Object]:
    """Annotations of pod sets; segments are slices. Returns the Topology that they refer to.

    Raises Refused for groups that Kueue's webhooks do not let share a domain, and for slices
    that leave pods over.
    """
    serious = {group.name for group in gang.groups if not group.is_helper}
    marks = _slices(gang, labels) if gang.segment is not None else _one_domain(gang, labels)
    draft.mark(draft.main, "labels", {f"{_KUEUE}/queue-name": labels.queue})
    for team, _, template in draft.templates():
        if team.name in serious or gang.segment is None:
            draft.mark(template, "annotations", marks)
    return [_topology(f"{_KUEUE}/v1beta2", labels)]


def _slices(gang: Gang, labels: Labels) -> dict[str, str]:
    segment = gang.segment or 1
    uneven = [group for group in gang.groups if not group.is_helper and group.members % segment]
    if uneven:
        raise Refused(
            f"{gang.name}: Kueue takes no slices of {segment} from {uneven[0].members} {uneven[0].name}",
            nearest_fix=f"use a --segment that divides {uneven[0].members}, or --render affinity",
        )
    return {
        f"{_KUEUE}/podset-slice-required-topology": labels.clique,
        f"{_KUEUE}/podset-slice-size": str(gang.segment),
    }


def _one_domain(gang: Gang, labels: Labels) -> dict[str, str]:
    marks = {f"{_KUEUE}/podset-required-topology": labels.clique}
    if len(gang.groups) == 1 or len({group.share for group in gang.groups}) > 1:
        return marks
    if len(gang.groups) > 2 or min(group.members for group in gang.groups) > 1:
        raise Refused(
            f"{gang.name}: Kueue keeps two pod sets in one domain, one of them a single pod, and no others",
            nearest_fix="use --apart, or --render affinity",
        )
    return {**marks, f"{_KUEUE}/podset-group-name": "one-clique"}


def for_kai(draft: Draft, gang: Gang, _plan: Plan, labels: Labels) -> list[Object]:
    """Annotations of the job. Raises Refused for segments, which they cannot tell."""
    if gang.segment is not None or len({group.share for group in gang.groups}) > 1:
        raise Refused(
            f"{gang.name}: KAI's annotations keep a whole job together; they know no segments",
            nearest_fix="use --render kueue or slurm, or leave --segment and --apart out",
        )
    draft.mark(draft.main, "labels", {f"{_KAI}/queue": labels.queue})
    marks = {
        f"{_KAI}/topology": labels.topology,
        f"{_KAI}/topology-required-placement": labels.clique,
    }
    if draft.job.kind in _COUNTED_BY_PODS:
        members = sum(group.members for group in gang.groups if not group.is_helper)
        marks[f"{_KAI}/batch-min-member"] = str(members)
    draft.mark(draft.main, "annotations", marks)
    for _, _, template in draft.templates():
        inside(template, "spec")["schedulerName"] = "kai-scheduler"
    return [_topology(f"{_KAI}/v1alpha1", labels)]


def _topology(version: str, labels: Labels) -> Object:
    return {
        "apiVersion": version,
        "kind": "Topology",
        "metadata": {"name": labels.topology},
        "spec": {"levels": [{"nodeLabel": labels.clique}, {"nodeLabel": labels.host}]},
    }
