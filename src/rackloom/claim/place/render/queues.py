"""For Kueue's topology-aware scheduling and for KAI: which level of the topology a job has to share."""

from rackloom.claim.place.labels import Labels
from rackloom.claim.place.render.edit import Draft, Object, inside
from rackloom.claim.place.values import Gang
from rackloom.errors import Refused

_KUEUE = "kueue.x-k8s.io"
_KAI = "kai.scheduler"


def for_kueue(draft: Draft, gang: Gang, labels: Labels) -> list[Object]:
    """Annotations of pod sets; segments are slices. Returns the Topology that they refer to."""
    draft.mark(draft.main, "labels", {f"{_KUEUE}/queue-name": labels.queue})
    several = len(gang.groups) > 1
    for _, _, template in draft.templates():
        if gang.segment is not None:
            marks = {
                f"{_KUEUE}/podset-slice-required-topology": labels.clique,
                f"{_KUEUE}/podset-slice-size": str(gang.segment),
            }
        else:
            marks = {f"{_KUEUE}/podset-required-topology": labels.clique}
            if several and len({group.share for group in gang.groups}) == 1:
                marks[f"{_KUEUE}/podset-group-name"] = "one-clique"
        draft.mark(template, "annotations", marks)
    return [_topology(f"{_KUEUE}/v1beta2", labels)]


def for_kai(draft: Draft, gang: Gang, labels: Labels) -> list[Object]:
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
