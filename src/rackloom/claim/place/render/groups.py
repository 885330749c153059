"""For LeaderWorkerSet's exclusive topology, and for Kubernetes' own PodGroup."""

from rackloom.claim.place.labels import Labels
from rackloom.claim.place.many.alone import shares_a_clique
from rackloom.claim.place.render.affinity import pin_to_trays
from rackloom.claim.place.render.edit import Draft, Object, inside
from rackloom.claim.place.render.names import as_object, as_object_of
from rackloom.claim.place.values import Gang, Plan
from rackloom.errors import Refused

_LWS = "leaderworkerset.sigs.k8s.io"


def for_lws(draft: Draft, gang: Gang, plan: Plan, labels: Labels) -> list[Object]:
    """A clique to itself for each replica, or for each segment of one. Raises Refused for other kinds.

    The leader of a replica picks the clique (LWS adds pod affinity to it), whether or not the workers fit
    there, so the trays are named too.
    """
    if draft.job.kind != "LeaderWorkerSet":
        raise Refused(
            f"{gang.name} is a {draft.job.kind}: exclusive topology is a feature of LeaderWorkerSet",
            nearest_fix="use --render affinity",
        )
    _check_cliques(gang, plan)
    pin_to_trays(draft, plan, labels)
    if gang.segment is None:
        draft.mark(draft.main, "annotations", {f"{_LWS}/exclusive-topology": labels.clique})
        return []
    draft.mark(draft.main, "annotations", {f"{_LWS}/subgroup-exclusive-topology": labels.clique})
    inside(draft.main, "spec", "leaderWorkerTemplate", "subGroupPolicy")["subGroupSize"] = gang.segment
    return []


def _check_cliques(gang: Gang, plan: Plan) -> None:
    """By exclusive topology a replica never starts in a clique that another one has."""
    uneven = [one for one in gang.groups if gang.segment and not one.is_helper and one.members % gang.segment]
    if uneven:
        raise Refused(
            f"{gang.name}: subgroups of a LeaderWorkerSet are alike, and {uneven[0].members} {uneven[0].name}"
            f" are no whole segments of {gang.segment}",
            nearest_fix=f"use a --segment that divides {uneven[0].members}, or leave it out",
        )
    if shares_a_clique(gang, plan):
        what = "replicas" if gang.segment is None else f"segments of {gang.segment}"
        raise Refused(
            f"{gang.name}: the plan has two {what} in one clique, and exclusive topology keeps them apart",
            nearest_fix="plan them a clique each, as `rackloom place --render lws` does",
        )


def for_pod_groups(draft: Draft, gang: Gang, _plan: Plan, labels: Labels) -> list[Object]:
    """A PodGroup for the members that take devices. Raises Refused for what one topology key cannot tell.

    Only groups of pods that are alike are promised a placement, so launchers stay outside.
    """
    serious = [group for group in gang.groups if not group.is_helper]
    if gang.segment is not None or len({group.share for group in serious}) < len(serious):
        raise Refused(
            f"{gang.name}: a PodGroup has one kind of pods and one topology key, so it cannot tell segments"
            " or two groups in one clique",
            nearest_fix="use --render kueue" if gang.segment else "use --render affinity",
        )
    _check_templates(draft, gang)
    made = []
    for group in serious:
        name = as_object(gang.name) if len(serious) == 1 else as_object_of(gang.name, group.name)
        made.append(_pod_group(draft, name, group.members, labels))
        for team, _, template in draft.templates():
            if team.name == group.name:
                inside(template, "spec")["schedulingGroup"] = {"podGroupName": name}
    return made


def _check_templates(draft: Draft, gang: Gang) -> None:
    """Pods name their PodGroup in their template, so replicas of one template cannot have one each."""
    templates = [team.template for team in draft.job.teams if team.need.takes_devices]
    if draft.job.kind != "Pod" and len(set(templates)) < len(templates):
        raise Refused(
            f"{gang.name}: all replicas of a {draft.job.kind} have one template, which names one PodGroup",
            nearest_fix="use --render lws, or submit each replica by itself",
        )


def _pod_group(draft: Draft, name: str, members: int, labels: Labels) -> Object:
    namespace = (draft.main.get("metadata") or {}).get("namespace")
    return {
        "apiVersion": labels.pod_group_version,
        "kind": "PodGroup",
        "metadata": {"name": name} | ({"namespace": namespace} if namespace else {}),
        "spec": {
            "schedulingPolicy": {"gang": {"minCount": members}},
            "schedulingConstraints": {"topology": [{"key": labels.clique}]},
        },
    }
