"""Warnings about a plan, or about the job as it is written, before it is applied.

`plan_notes` reports: a gang without spares that fills its clique, the cost of the chosen segment size,
pod affinity by clique, with which the first pod picks the clique whether or not the others fit, and an MPIJob
whose launcher has devices without a rank, or a rank without devices, or that another manager runs.

`unsupported_constraints` names each constraint of the pods that the plan does not keep: pod affinity by
other keys or towards other jobs, anti-affinity by other keys, topology spread, host ports, node names,
and exclusive topology. Constraints are never dropped silently.

`usable_share` is the expected share of a clique's trays that whole segments can use when each tray is
down with a given probability, independently of the others (binomial distribution).
"""

from collections import Counter
from collections.abc import Iterator
from math import comb

from rackloom.core.cluster.jobs import Job, JobGroup, pod_specs_of
from rackloom.core.cluster.names import SchedulerLabels
from rackloom.core.cluster.objects import annotations_of, object_name
from rackloom.core.cluster.pods import LabelSelector, PodSpec
from rackloom.core.cluster.scheduling import (
    host_ports,
    is_supported_term,
    label_selector_text,
    selector_values,
    term_selects,
)
from rackloom.core.cluster.trays import Gang, GangPlan, PlacementSite
from rackloom.core.cluster.workload_kinds import (
    is_launcher_a_worker,
    other_manager,
    value_at,
    waits_for_workers,
)


def plan_notes(
    job: Job, gang: Gang, plan: GangPlan, site: PlacementSite, labels: SchedulerLabels, down: float
) -> Iterator[str]:
    """One sentence each. `down` is the share of trays that are down at any time."""
    taken = set(plan.trays)
    trays = Counter(tray.sharing for tray in site.trays)
    used = Counter(tray.sharing for tray in site.trays if tray.name in taken)
    for clique in plan.cliques:
        if not plan.spares and trays[clique] == used[clique]:
            yield (
                f"it takes all {trays[clique]} trays of clique {clique}: when one is lost,"
                " no other can stand in for it"
            )
    if gang.segment is not None:
        yield segment_note(max(trays[clique] for clique in plan.cliques), gang.segment, down)
    specs = (spec for group in job.groups for spec in pod_specs_of(job, group))
    near = (term.topology_key for spec in specs for term in spec.near)
    if labels.clique in near:
        yield (
            f"it requires pod affinity on {labels.clique}: as written, its first pod picks the clique,"
            " whether or not the others fit; apply it with --render"
        )
    if job.is_guess:
        groups = ", ".join(f"{group.members} of {group.name}" for group in job.groups)
        yield (
            f"a {job.kind} is not known: its pod templates and the replicas around them were read as"
            f" {groups}, which is a guess"
        )
    if job.kind == "MPIJob":
        yield from _mpi_job_notes(job)
    yield from unsupported_constraints(job, plan, labels)


def _mpi_job_notes(job: Job) -> Iterator[str]:
    obj, takes = job.objects[0], {group.name: group.need.takes_devices for group in job.groups}
    launcher, workers = takes.get("launcher", False), takes.get("worker", False)
    if waits_for_workers(obj):
        alone = ", and another job may take its tray meanwhile" if launcher else ""
        yield f"its launcher waits for the workers: a gang scheduler must count the workers only{alone}"
    if is_launcher_a_worker(obj) and workers and not launcher:
        yield "its launcher is rank 0 (runLauncherAsWorker) and takes no device, as its workers do"
    if workers and launcher and not is_launcher_a_worker(obj):
        yield (
            "its launcher takes devices, and no rank runs there: set runLauncherAsWorker, or take them away"
            " from it"
        )
    if (manager := other_manager(obj)) is not None:
        yield f"{manager} manages it (managedBy): the MPI operator of this cluster makes no pods of it"


# The cost of a segment size.


def usable_share(trays: int, segment: int, down: float) -> float:
    """Expected share (0 to 1) of a clique's trays that whole segments use.

    Each tray is down with probability `down`, independently of the others.
    """
    return (
        sum(
            comb(trays, up) * (1 - down) ** up * down ** (trays - up) * (up // segment * segment)
            for up in range(trays + 1)
        )
        / trays
    )


def segment_note(trays: int, segment: int, down: float) -> str:
    """`segments of 16 in cliques of 18: 2 trays stay outside; 88.8 % usable with 1 % of trays down`."""
    outside = trays % segment
    return (
        f"segments of {segment} in cliques of {trays}: {outside} trays stay outside;"
        f" {usable_share(trays, segment, down):.1%} usable with {down:.1%} of trays down"
        f" (segments of {trays}: {usable_share(trays, trays, down):.1%})"
    )


# Constraints that the plan does not keep.


_EXCLUSIVE_TOPOLOGY = (
    "alpha.jobset.sigs.k8s.io/exclusive-topology",
    "leaderworkerset.sigs.k8s.io/exclusive-topology",
)


def unsupported_constraints(job: Job, plan: GangPlan, labels: SchedulerLabels) -> Iterator[str]:
    """One sentence each."""
    found: dict[str, None] = {}
    for group in job.groups:
        found |= dict.fromkeys(_template_notes(job, group, labels))
    yield from found
    yield from _helper_notes(job, plan)


def _template_notes(job: Job, group: JobGroup, labels: SchedulerLabels) -> Iterator[str]:
    for spec in pod_specs_of(job, group):
        yield from _affinity_notes(job, group, spec, labels)
        for term in spec.apart:
            if not is_supported_term(term, labels.host):
                yield (
                    f"required pod anti-affinity of {group.name} by {term.topology_key} is not honoured:"
                    f" only {labels.host} is, with the labels and namespaces of pods"
                )
        yield from _other_notes(group, spec)
    for owner in (job.objects[0], value_at(job.objects[0], group.template)):
        for key in _EXCLUSIVE_TOPOLOGY:
            if annotations_of(owner).get(key):
                yield f"{key} is not honoured: other jobs may be where it goes"


def _affinity_notes(job: Job, group: JobGroup, spec: PodSpec, labels: SchedulerLabels) -> Iterator[str]:
    for term in spec.near:
        key, selector = term.topology_key, term.label_selector or LabelSelector()
        what = f"required pod affinity of {group.name} by {key} is not honoured"
        if key != labels.clique:
            yield f"{what}: members share a clique ({labels.clique}), and nothing narrower or wider"
        elif not term_selects(term, group.identity, group.identity):
            yield f"{what}: it asks for pods of others ({label_selector_text(term.label_selector)})"
        elif not term.match_label_keys and not _selects_only_job(job, group, selector, labels):
            yield (
                f"{what} towards other jobs: two jobs with {label_selector_text(selector)}"
                " would have to share a clique"
            )


def _selects_only_job(job: Job, group: JobGroup, selector: LabelSelector, labels: SchedulerLabels) -> bool:
    """Whether a selector is of this job alone: by a label that its controller makes, or by its name.

    `rack-worker` belongs to the job `rack`, and `rack` to the pods `rack-0` and `rack-1`.
    """
    own = {*group.controller_labels, labels.gang, labels.job}
    names = [job.name.rpartition("/")[2], *map(object_name, job.objects)]
    return any(
        key in own or value.startswith(name) or (job.kind == "Pod" and name.startswith(value))
        for key, value in selector_values(selector)
        for name in names
    )


def _other_notes(group: JobGroup, spec: PodSpec) -> Iterator[str]:
    for spread in spec.topology_spread_constraints or ():
        if spread.when_unsatisfiable != "ScheduleAnyway":
            yield (
                f"topologySpreadConstraints of {group.name} by {spread.topology_key}"
                f" (maxSkew {spread.max_skew}) are not honoured: members are not spread"
            )
    for port in sorted(set(host_ports(spec))):
        yield f"hostPort {port} of {group.name} is not honoured: two members may be on one tray"
    if group.template and spec.node_name:
        yield f"nodeName {spec.node_name} of {group.name} is not honoured: a tray is chosen for it"


def _helper_notes(job: Job, plan: GangPlan) -> Iterator[str]:
    """A helper is beside the first member with devices, even if anti-affinity keeps it off."""
    trays = {
        group.name: [member.tray for member in plan.seats if member.group == group.name]
        for group in job.groups
    }
    for helper in (group for group in job.groups if not group.need.takes_devices):
        beside = [group.name for group in job.groups if group.identity.bars(helper.identity)]
        here = [name for name in beside if name != helper.name and trays[helper.name][0] in trays[name]]
        if here or (helper.name in beside and helper.members > 1):
            yield (
                f"required pod anti-affinity of {helper.name} is not honoured:"
                f" it is beside {' and '.join(here) or 'its like'} on {trays[helper.name][0]}"
            )
