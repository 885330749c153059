"""For Kueue's topology-aware scheduling: which level of the topology each pod set has to share."""

from rackloom.claim.place.labels import Labels
from rackloom.claim.place.render.edit import Draft, Object
from rackloom.claim.place.render.levels import topology
from rackloom.claim.place.render.names import as_object
from rackloom.claim.place.values import Gang, Plan
from rackloom.errors import Refused

_KUEUE = "kueue.x-k8s.io"


def for_kueue(draft: Draft, gang: Gang, _plan: Plan, labels: Labels) -> list[Object]:
    """Annotations of pod sets; segments are slices. Returns the Topology that they refer to.

    Raises Refused for groups that Kueue's webhooks do not let share a domain, and for slices
    that leave pods over.
    """
    serious = {group.name for group in gang.groups if not group.is_helper}
    marks = _slices(gang, labels) if gang.segment is not None else _one_domain(draft, gang, labels)
    for one in draft.objects:
        draft.mark(one, "labels", {f"{_KUEUE}/queue-name": labels.queue})
    if len(draft.objects) > 1:
        _group_pods(draft, as_object(gang.name))
    for team, _, template in draft.templates():
        if team.name in serious or gang.segment is None:
            draft.mark(template, "annotations", marks)
    return [topology(f"{_KUEUE}/v1beta2", labels)]


def _group_pods(draft: Draft, name: str) -> None:
    """Pods are one workload by the label and the count; by the index, their order is that of the ranks."""
    for index, pod in enumerate(draft.objects):
        draft.mark(
            pod, "labels", {f"{_KUEUE}/pod-group-name": name, f"{_KUEUE}/pod-group-pod-index": str(index)}
        )
        draft.mark(pod, "annotations", {f"{_KUEUE}/pod-group-total-count": str(len(draft.objects))})


def _slices(gang: Gang, labels: Labels) -> dict[str, str]:
    segment = gang.segment or 1
    uneven = [group for group in gang.groups if not group.is_helper and group.members % segment]
    if uneven:
        raise Refused(
            f"{gang.name}: Kueue takes no slices of {segment} from {uneven[0].members} {uneven[0].name}",
            nearest_fix=f"use a --segment that divides {uneven[0].members}",
        )
    return {
        f"{_KUEUE}/podset-slice-required-topology": labels.clique,
        f"{_KUEUE}/podset-slice-size": str(gang.segment),
    }


def _one_domain(draft: Draft, gang: Gang, labels: Labels) -> dict[str, str]:
    marks = {f"{_KUEUE}/podset-required-topology": labels.clique}
    if draft.job.kind == "Pod" and len(gang.groups) > 2:
        raise Refused(
            f"{gang.name}: to Kueue all pods that are alike are one set, and it keeps two together at most",
            nearest_fix="make the pods alike, or use --render affinity",
        )
    together: dict[str, list[int]] = {}
    for group in gang.groups:
        together.setdefault(group.share, []).append(group.members)
    if all(len(sizes) == 1 for sizes in together.values()):
        return marks
    if any(len(sizes) > 2 or min(sizes) > 1 for sizes in together.values()):
        raise Refused(
            f"{gang.name}: Kueue keeps two pod sets in one domain, one of them a single pod, and no others",
            nearest_fix="use --apart, or --render affinity",
        )
    return {**marks, f"{_KUEUE}/podset-group-name": "one-clique"}
