"""Render a placed job for a scheduler: Kueue, KAI, LeaderWorkerSet, PodGroup, Slurm or plain affinity.

`render_job` is the entry point. Each renderer states the plan in the terms of its scheduler, and raises
Refused if those terms cannot express it, with the renderer or option that can:

- Kueue: a Topology object and podset annotations. Segments become slices. At most two pod sets share a
  domain, one of them a single pod. The job's own settings of queue and topology stay as they are.
- KAI: a Topology object and annotations for the whole job, without segments. A JobSet must start in any
  order, because the pod grouper makes one group of it only then (KAI 0.14.1).
- LeaderWorkerSet: exclusive topology per replica or subgroup, and node affinity, because the leader alone
  would pick the clique.
- PodGroup (scheduling.k8s.io): one group per kind of pods, with the clique as topology key, in a version
  that is known to take these fields.
- Slurm: `#SBATCH` options, and topology.yaml with a block per clique (`slurm_topology`).
- Affinity: see `pod_templates`.

Trays are named by the host label that node affinity reads, which differs from the node name at some
clouds.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from rackloom.core.cluster.jobs import Job
from rackloom.core.cluster.names import POD_GROUP_VERSIONS, SchedulerLabels
from rackloom.core.cluster.objects import labels_of, namespace_of
from rackloom.core.cluster.trays import Gang, GangGroup, GangPlan, PlacementSite
from rackloom.core.cluster.workload_kinds import STARTUP_ORDER, starts_in_any_order
from rackloom.core.place.gang_planner import shares_clique
from rackloom.core.place.kueue_topology import job_topology
from rackloom.core.place.pod_templates import (
    JsonObject,
    ManifestDraft,
    gang_object_name,
    group_object_name,
    mapping_at,
    pin_to_trays,
    render_affinity,
)
from rackloom.core.place.search.gang_needs import colocation_groups, rank_sequences
from rackloom.core.place.slurm_topology import topology_document, topology_of
from rackloom.errors import Refused


class RenderedJob(msgspec.Struct, frozen=True, kw_only=True):
    """The input of the scheduler."""

    objects: tuple[Any, ...]
    """Kubernetes objects, or Slurm's topology.yaml."""
    script: str = ""
    """Lines for the head of a batch script."""


Renderer = Callable[[ManifestDraft, Gang, GangPlan, SchedulerLabels], list[JsonObject]]


# KAI scheduler.


def render_kai(
    draft: ManifestDraft, gang: Gang, _plan: GangPlan, labels: SchedulerLabels
) -> list[JsonObject]:
    """Annotations of the job, or a PodGroup of pods. Raises Refused for segments, which they cannot express.

    Returns the Topology that they refer to, and the PodGroup.
    """
    _check_kai(draft, gang)
    for _, _, template in draft.templates():
        mapping_at(template, "spec")["schedulerName"] = "kai-scheduler"
    levels = topology_object(f"{_KAI}/v1alpha1", labels)
    if draft.job.kind == "Pod":
        # One PodGroup of all the pods: KAI's pod grouper makes one for each pod that names none.
        name = gang_object_name(gang.name)
        for pod in draft.objects:
            draft.add(pod, "annotations", {"pod-group-name": name})
        constraint = {"topology": labels.topology, "requiredTopologyLevel": labels.clique}
        spec = {"minMember": len(draft.objects), "queue": labels.queue, "topologyConstraint": constraint}
        return [levels, _pod_group(draft, name, "scheduling.run.ai/v2alpha2", spec)]
    draft.add(draft.main, "labels", {f"{_KAI}/queue": labels.queue})
    annotations = {
        f"{_KAI}/topology": labels.topology,
        f"{_KAI}/topology-required-placement": labels.clique,
    }
    if draft.job.kind in _COUNTED_BY_PODS:
        annotations[f"{_KAI}/batch-min-member"] = str(sum(group.members for group in gang.groups))
    draft.add(draft.main, "annotations", annotations)
    return [levels]


# Kueue, topology-aware scheduling.


def render_kueue(
    draft: ManifestDraft, gang: Gang, _plan: GangPlan, labels: SchedulerLabels
) -> list[JsonObject]:
    """Annotations of pod sets. Segments are slices. Returns the Topology that they refer to.

    Raises Refused for groups that Kueue's webhooks do not let share a domain, and for slices
    that leave pods over.
    """
    for obj in draft.objects:
        if not labels_of(obj).get(f"{_KUEUE}/queue-name"):
            draft.add(obj, "labels", {f"{_KUEUE}/queue-name": labels.queue})
    # The label and the count make the pods one workload, and the index gives them the order of the ranks.
    name, count = gang_object_name(gang.name), len(draft.objects)
    for index, pod in enumerate(draft.objects if count > 1 else ()):
        draft.add(
            pod, "labels", {f"{_KUEUE}/pod-group-name": name, f"{_KUEUE}/pod-group-pod-index": str(index)}
        )
        draft.add(pod, "annotations", {f"{_KUEUE}/pod-group-total-count": str(count)})
    topology = job_topology(draft.job)
    if topology is not None:
        return [topology_object(f"{_KUEUE}/v1beta2", labels, topology.request.levels)]
    with_devices = {group.name for group in gang.device_groups}
    annotations = (
        _domain_annotations(draft, gang, labels)
        if gang.segment is None
        else _slice_annotations(gang, gang.segment, labels)
    )
    for group, _, template in draft.templates():
        if group.name in with_devices or gang.segment is None:
            draft.add(template, "annotations", annotations)
    return [topology_object(f"{_KUEUE}/v1beta2", labels)]


# LeaderWorkerSet and PodGroup.


def render_lws(draft: ManifestDraft, gang: Gang, plan: GangPlan, labels: SchedulerLabels) -> list[JsonObject]:
    """An exclusive clique for each replica, or for each segment of one. Raises Refused for other kinds.

    The leader of a replica picks the clique (LWS adds pod affinity to it), whether or not the workers fit
    there, so the trays are named too.
    """
    if draft.job.kind != "LeaderWorkerSet":
        raise Refused(
            f"{gang.name} is a {draft.job.kind}: exclusive topology is a feature of LeaderWorkerSet",
            nearest_fix="use --render affinity",
        )
    if (uneven := _uneven_group(gang)) is not None:
        raise Refused(
            f"{gang.name}: subgroups of a LeaderWorkerSet are alike, and {uneven.members} {uneven.name}"
            f" are no whole segments of {gang.segment}",
            nearest_fix=f"use a --segment that divides {uneven.members}, or leave it out",
        )
    # A replica never starts in a clique that another replica uses.
    if shares_clique(gang, plan):
        what = "replicas" if gang.segment is None else f"segments of {gang.segment}"
        raise Refused(
            f"{gang.name}: the plan has two {what} in one clique, and exclusive topology keeps them apart",
            nearest_fix="plan them a clique each, as `rackloom place --render lws` does",
        )
    pin_to_trays(draft, plan, labels)
    if gang.segment is None:
        draft.add(draft.main, "annotations", {f"{_LWS}/exclusive-topology": labels.clique})
        return []
    draft.add(draft.main, "annotations", {f"{_LWS}/subgroup-exclusive-topology": labels.clique})
    mapping_at(draft.main, "spec", "leaderWorkerTemplate", "subGroupPolicy")["subGroupSize"] = gang.segment
    return []


def render_pod_groups(
    draft: ManifestDraft, gang: Gang, _plan: GangPlan, labels: SchedulerLabels
) -> list[JsonObject]:
    """A PodGroup for the members that take devices. Raises Refused if one topology key is not enough.

    A PodGroup has pods of one kind only, so launchers stay outside.
    """
    version = labels.pod_group_version or POD_GROUP_VERSIONS[0]
    if version not in POD_GROUP_VERSIONS:
        raise Refused(
            f"no PodGroup of {version} can be rendered",
            nearest_fix=f"use --label pod_group_version={' or '.join(POD_GROUP_VERSIONS)}",
        )
    with_devices = gang.device_groups
    if gang.segment is not None or len({group.share for group in with_devices}) < len(with_devices):
        raise Refused(
            f"{gang.name}: a PodGroup has one kind of pods and one topology key, so it cannot tell segments"
            " or two groups in one clique",
            nearest_fix="use --render kueue" if gang.segment else "use --render affinity",
        )
    # Pods name their PodGroup in their template, so replicas of one template cannot have one each.
    templates = [group.template for group in draft.job.groups if group.need.takes_devices]
    if draft.job.kind != "Pod" and len(set(templates)) < len(templates):
        raise Refused(
            f"{gang.name}: all replicas of a {draft.job.kind} have one template, which names one PodGroup",
            nearest_fix="use --render lws, or submit each replica by itself",
        )
    rendered = []
    for group in with_devices:
        name = gang_object_name(gang.name)
        if len(with_devices) > 1:
            name = group_object_name(gang.name, group.name)
        spec = {
            "schedulingPolicy": {"gang": {"minCount": group.members}},
            "schedulingConstraints": {"topology": [{"key": labels.clique}]},
        }
        rendered.append(_pod_group(draft, name, version, spec))
        for owner, _, template in draft.templates():
            if owner.name == group.name:
                mapping_at(template, "spec")["schedulingGroup"] = {"podGroupName": name}
    return rendered


_RENDERERS: dict[str, Renderer] = {
    "kueue": render_kueue,
    "kai": render_kai,
    "lws": render_lws,
    "podgroup": render_pod_groups,
}


def render_job(
    target: str, job: Job, gang: Gang, plan: GangPlan, site: PlacementSite, labels: SchedulerLabels
) -> RenderedJob:
    """The job for `target`, a scheduler's name on the command line.

    Raises Refused if the terms of that scheduler cannot express the plan.
    """
    if target == "slurm":
        return RenderedJob(objects=(topology_document(topology_of(site)),), script=slurm_options(gang, plan))
    # From here on, trays have the names that node affinity reads.
    hosts = {tray.name: tray.host for tray in site.trays if tray.host}
    seats = tuple(replace(seat, tray=hosts.get(seat.tray, seat.tray)) for seat in plan.seats)
    draft, plan = ManifestDraft(job), replace(plan, seats=seats)
    more: list[JsonObject] = []
    if target == "affinity":
        render_affinity(draft, gang, plan, labels)
    else:
        more = _RENDERERS[target](draft, gang, plan, labels)
    return RenderedJob(objects=(*more, *draft.objects))


# The Topology object of Kueue and KAI.


def topology_object(version: str, labels: SchedulerLabels, wider: Sequence[str] = ()) -> JsonObject:
    """A Topology of cliques and the trays in them, of the API version of a scheduler.

    `wider`: levels that a job names, the widest first.
    """
    levels = [level for level in dict.fromkeys((*wider, labels.clique)) if level != labels.host]
    return {
        "apiVersion": version,
        "kind": "Topology",
        "metadata": {"name": labels.topology},
        "spec": {"levels": [{"nodeLabel": level} for level in (*levels, labels.host)]},
    }


_KUEUE = "kueue.x-k8s.io"


def _slice_annotations(gang: Gang, segment: int, labels: SchedulerLabels) -> dict[str, str]:
    mixed = next((block for block in colocation_groups(gang) if len(block) > 1), ())
    if mixed:
        raise Refused(
            f"{gang.name}: Kueue takes no slices of {segment} across"
            f" {' and '.join(part.group.name for part in mixed)}",
            nearest_fix="use --render slurm, or leave --segment out",
        )
    if (uneven := _uneven_group(gang)) is not None:
        raise Refused(
            f"{gang.name}: Kueue takes no slices of {segment} from {uneven.members} {uneven.name}",
            nearest_fix=f"use a --segment that divides {uneven.members}",
        )
    return {
        f"{_KUEUE}/podset-slice-required-topology": labels.clique,
        f"{_KUEUE}/podset-slice-size": str(segment),
    }


def _uneven_group(gang: Gang) -> GangGroup | None:
    """The first group that leaves members over after its last whole segment."""
    segment = gang.segment or 1
    return next((group for group in gang.device_groups if group.members % segment), None)


def _domain_annotations(draft: ManifestDraft, gang: Gang, labels: SchedulerLabels) -> dict[str, str]:
    annotations = {f"{_KUEUE}/podset-required-topology": labels.clique}
    if draft.job.kind == "Pod" and len(gang.groups) > 2:
        raise Refused(
            f"{gang.name}: to Kueue all pods that are alike are one set, and it keeps two together at most",
            nearest_fix="make the pods alike, or use --render affinity",
        )
    together: dict[str, list[int]] = {}
    for group in gang.groups:
        together.setdefault(group.share, []).append(group.members)
    if all(len(sizes) == 1 for sizes in together.values()):
        return annotations
    if any(len(sizes) > 2 or min(sizes) > 1 for sizes in together.values()):
        raise Refused(
            f"{gang.name}: Kueue keeps two pod sets in one domain, one of them a single pod, and no others",
            nearest_fix="use --apart, or --render affinity",
        )
    return {**annotations, f"{_KUEUE}/podset-group-name": "one-clique"}


_KAI = "kai.scheduler"
_COUNTED_BY_PODS = ("Job", "JobSet")
"""For these kinds, KAI's pod grouper requires only one pod, unless an annotation sets more (KAI 0.14.1)."""
_GROUPED_BY_REPLICA = "LeaderWorkerSet"
"""KAI's pod grouper makes a group of each replica, and the placement holds for each group."""


def _check_kai(draft: ManifestDraft, gang: Gang) -> None:
    if gang.segment is not None:
        raise Refused(
            f"{gang.name}: KAI's annotations keep a whole job together; they know no segments",
            nearest_fix="use --render kueue or slurm, or leave --segment out",
        )
    if len({group.share for group in gang.groups}) > 1 and draft.job.kind != _GROUPED_BY_REPLICA:
        raise Refused(
            f"{gang.name}: KAI's annotations keep a whole job together; they know no groups apart",
            nearest_fix="use --render kueue, or leave --apart out",
        )
    if draft.job.kind != "JobSet" or len(gang.groups) < 2:
        return
    # KAI's pod grouper makes one group of a JobSet only with startup order AnyOrder (KAI 0.14.1). Else each
    # replicated Job is a group, and each would wait for the number of pods in the annotation. Jobs that
    # depend on others come after them, and the one group would wait for all.
    if not starts_in_any_order(draft.main):
        raise Refused(
            f"{gang.name}: KAI starts replicated Jobs together only if they may start in any order",
            nearest_fix=f"set {'.'.join(STARTUP_ORDER)} to AnyOrder without dependsOn,"
            f" or use --render affinity",
        )


_LWS = "leaderworkerset.sigs.k8s.io"


def _pod_group(draft: ManifestDraft, name: str, version: str, spec: JsonObject) -> JsonObject:
    namespace = namespace_of(draft.main)
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": version, "kind": "PodGroup", "metadata": metadata, "spec": spec}


# Slurm.


def slurm_options(gang: Gang, plan: GangPlan) -> str:
    """`#SBATCH` lines. Raises Refused if members share trays, or groups or segments differ."""
    with_devices = gang.device_groups
    if len({group.gpus for group in with_devices}) != 1 or len(plan.trays) != sum(
        group.members for group in with_devices
    ):
        raise Refused(
            f"{gang.name}: a Slurm segment counts nodes, and here members share trays or differ in GPUs",
            nearest_fix="give every member a whole tray",
        )
    # Slurm knows one number of nodes that share a block, for the whole job.
    sizes = {sum(part.members for part in block) for block in colocation_groups(gang)}
    if len(sizes) > 1:
        counts = " and ".join(map(str, sorted(sizes)))
        members = (sum(group.members for group in groups) for groups in rank_sequences(gang))
        raise Refused(
            f"{gang.name}: the segments of a Slurm job are alike, and here {counts} members share a clique",
            nearest_fix=f"use a --segment that divides {' and '.join(map(str, members))}",
        )
    words = {
        "job-name": gang.name.rpartition("/")[2],
        "nodes": len(plan.trays),
        "ntasks-per-node": with_devices[0].gpus,
        "gpus-per-node": with_devices[0].gpus,
        "segment": sizes.pop(),
        "nodelist": ",".join(plan.trays),
    }
    return "".join(f"#SBATCH --{name}={value}\n" for name, value in words.items())
