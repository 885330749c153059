"""The work of `rackloom place`: files and a site in, plans or refusals out.

Order: rearrange (trays left out, drained, or defragmented), then place. Jobs that may use the same trays
and share them are planned together, by priority; otherwise one after another, the most urgent first, and
each plan reserves its trays and keeps jobs with anti-affinity off them. With exclusive topology
(LeaderWorkerSet) each share of a job takes a clique that no other job of its kind uses, planned or
running.

A job that does not fit is explained on the site without what was planned at a lower priority. Its nearest
fixes were each planned before they are named.

Jobs without device claims never load the CEL library.
"""

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from rackloom.claim.manifests.documents import Document, read_documents
from rackloom.claim.manifests.read import manifests_of
from rackloom.cli.common import Format, emit
from rackloom.cli.place_page import (
    JobAnswer,
    PlacementReport,
    check_segment,
    objects_beside,
    rendered_manifests,
    report_page,
    segment_prices,
)
from rackloom.cli.place_site import (
    TEMPLATE_KINDS,
    ClusterObjects,
    PriorityClasses,
    SiteObjects,
    SiteOptions,
    read_cluster_objects,
    site_objects,
)
from rackloom.core.allocate.objects import ResourceClaim
from rackloom.core.place.batch import plan_batch
from rackloom.core.place.gang_planner import (
    exclusive_cliques,
    plan_exclusive_cliques,
    try_gang,
    with_cliques_closed,
    with_plan_reserved,
)
from rackloom.core.place.gang_requests import (
    are_anti_affine,
    avoiding_job,
    claims_by_kind,
    gang_of_job,
    groups_by_trays,
)
from rackloom.core.place.job_moves import JobMove, with_trays_closed
from rackloom.core.place.jobs import JOB_KINDS, Job, JobGroup, TemplateName, channel_templates, read_jobs
from rackloom.core.place.mobility import restrict_moves, tolerations_of_movable
from rackloom.core.place.observed_site import AvoidedTrays, ClaimsByKind, read_site, trays_avoided_by
from rackloom.core.place.placement_values import (
    Gang,
    GangPlan,
    PlacementSite,
    SchedulerLabels,
    combine_sites,
    list_names,
)
from rackloom.core.place.plan_notes import plan_notes
from rackloom.core.place.pod_constraints import JsonMapping, NodeRule, Toleration
from rackloom.core.place.search.site_capacity import colocation_groups
from rackloom.core.place.search.tray_assignment import SearchBudget
from rackloom.errors import Refused

if TYPE_CHECKING:
    from rackloom.core.place.rendering import RenderedJob


# Jobs whose shares each need a clique to themselves.


_LWS_GROUP_KEY = "leaderworkerset.sigs.k8s.io/group-key"
"""On all pods of a LeaderWorkerSet; exclusive topology keeps others that have it, of one namespace, out."""


def without_other_sets(site: PlacementSite, found: SiteObjects, job: Job) -> PlacementSite:
    """The site without cliques where another LeaderWorkerSet of the job's namespace runs."""
    namespace = _namespace(job.objects[0])
    trays = {
        (pod.get("spec") or {}).get("nodeName")
        for pod in found.pods
        if _LWS_GROUP_KEY in ((pod.get("metadata") or {}).get("labels") or {})
        and _namespace(pod) == namespace
    }
    return with_cliques_closed(site, {tray.sharing for tray in site.trays if tray.name in trays})


def exclusive_refusal(job: Job, gang: Gang, site: PlacementSite) -> JobAnswer | None:
    """Why too few cliques are left, where one at least is; None where the first share finds none."""
    blocks, cliques = len(colocation_groups(gang)), exclusive_cliques(site, gang, SearchBudget())
    if not cliques or len(cliques) == blocks:
        return None
    return JobAnswer(
        job=job.name,
        plan=None,
        blocked=(
            f"{gang.name}: by exclusive topology each of its {blocks}"
            f" {_share_words(gang)} has a clique to itself,"
            f" and only {', '.join(cliques)} can be had"
        ),
        fixes=tuple(_exclusive_fixes(gang, site, len(cliques))),
    )


def exclusive_notes(gang: Gang) -> Iterator[str]:
    """That it takes more cliques than it might."""
    if len(colocation_groups(gang)) > 1:
        yield f"{_share_words(gang)} have a clique each: exclusive topology starts no two of them in one"


def _share_words(gang: Gang) -> str:
    return "replicas" if gang.segment is None else f"segments of {gang.segment}"


def _exclusive_fixes(gang: Gang, site: PlacementSite, most: int) -> Iterator[str]:
    """Each was planned."""
    together = try_gang(site, gang, SearchBudget())
    if together is not None and len(together.cliques) == 1:
        yield f"use --render affinity: they share clique {together.cliques[0]} then"
    if gang.segment is not None:
        whole = replace(gang, segment=None)
        if plan_exclusive_cliques(site, whole, SearchBudget()) is not None:
            yield "leave --segment out"
        return
    yield f"ask for {most} replicas instead of {len(colocation_groups(gang))}"


def _namespace(value: JsonMapping) -> str:
    return (value.get("metadata") or {}).get("namespace") or "default"


# The plan.


MAX_FIXES = 4
"""Fixes that an answer names, nearest first."""


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line wishes."""

    labels: SchedulerLabels
    segment: int | None
    spares: int
    apart: bool
    exclusive: bool
    without: tuple[str, ...]
    drain: tuple[str, ...]
    defrag: bool
    down: float | None
    alone: bool
    """Each share of a job has a clique that no other uses: LeaderWorkerSet's exclusive topology."""


DEFAULT_DOWN = 0.01
"""Share of trays that are down where nobody says another."""


def answer_placement(
    files: Sequence[Path], source: SiteOptions, asked: PlacementRequest, target: str | None, output: Format
) -> int:
    """Print the answer. 1 where a job does not fit."""
    if asked.down is not None and not 0 <= asked.down < 1:
        raise Refused(f"--down {asked.down} is no share of trays", nearest_fix="0.01 is 1 %")
    documents = [document for path in files for document in read_documents(path)]
    jobs = read_jobs([document.value for document in documents], asked.labels)
    if not jobs and not (asked.drain or asked.defrag or asked.down is not None):
        kinds = list_names(dict.fromkeys(str(document.value.get("kind")) for document in documents), most=8)
        raise Refused(
            f"there is no job in the files ({kinds or 'nothing'})",
            nearest_fix=f"name a manifest with {', '.join(JOB_KINDS)}",
        )
    cluster = read_cluster_objects(source, templates=_lacks_templates(jobs, documents))
    makers = [document for document in cluster.documents if document.value.get("kind") in TEMPLATE_KINDS]
    jobs = read_jobs([maker.value for maker in (*makers, *documents)], asked.labels) if makers else jobs
    claimed = _claims_devices(jobs, channel_templates([maker.value for maker in (*makers, *documents)]))
    found = site_objects(source, [*documents, *cluster.documents], asked.labels, with_devices=claimed)
    problem = PlacementProblem([*makers, *documents], cluster, found, asked)
    report = problem.report(jobs)
    refused = [job for job in report.jobs if job.plan is None]
    if target is not None and report.jobs and not refused:
        others = [] if target == "slurm" else objects_beside(documents, jobs)
        print(rendered_manifests(problem.rendered(target), others), end="")
        print(report_page(report, seats=False), file=sys.stderr)
    else:
        emit(report, output, lambda: report_page(report))
    return int(bool(refused))


class PlacementProblem:
    """A site on which jobs are placed beside each other."""

    def __init__(
        self,
        documents: Sequence[Document],
        cluster: ClusterObjects,
        found: SiteObjects,
        asked: PlacementRequest,
    ) -> None:
        """`documents`: the jobs, and what makes claims for them."""
        self._asked = asked
        self._found = found
        self._channels = channel_templates([document.value for document in documents])
        claims = manifests_of(documents).claims
        self._claims = {
            (claim.metadata.namespace or "default", claim.metadata.name): claim for claim in claims
        }
        self._classes = PriorityClasses([*cluster.documents, *documents], asked=cluster.has_classes)
        pods = read_site(found.nodes, found.pods, asked.labels).holds
        held = (*pods, *found.devices.holds(asked.labels))
        self._observed = restrict_moves(held, found.nodes, found.pods, asked.labels)
        self._holds = self._observed
        self._avoided: dict[str, AvoidedTrays] = {}
        self._gangs: dict[str, Gang] = {}
        self._planned: list[tuple[Job, Gang, GangPlan, PlacementSite]] = []

    def report(self, jobs: Sequence[Job]) -> PlacementReport:
        """The moves that come first, then each job, the most urgent first."""
        _check_names(jobs)
        for job in jobs:
            self._classes.check(job)
            self._avoided[job.name] = trays_avoided_by(
                job, self._found.nodes, self._found.pods, self._asked.labels
            )
        moves = self._rearranged(jobs)
        gangs = [self._gang(job) for job in jobs]
        asked = sorted(zip(jobs, gangs, strict=True), key=lambda pair: -pair[1].priority)
        plans = self._plans(asked)
        answers = tuple(self._answer(job, self._gang(job), plans) for job, _ in asked)
        priced = self._asked.segment is None and self._asked.down is not None
        sizes = segment_prices(self._site(None, ""), self._asked.down or 0) if priced else ()
        return PlacementReport(moves=moves, jobs=answers, segments=sizes)

    def rendered(self, target: str) -> "list[RenderedJob]":
        """The jobs that were placed, for a scheduler."""
        from rackloom.core.place.rendering import render_job

        return [render_job(target, *planned, self._asked.labels) for planned in self._planned]

    def _rearranged(self, jobs: Sequence[Job]) -> tuple[JobMove, ...]:
        asked = self._asked
        if not (asked.without or asked.drain or asked.defrag):
            return ()
        from rackloom.core.place.job_moves import check_tray_exists, plan_defragmentation, plan_drain

        wanted = [toleration for job in jobs for group in job.groups for toleration in group.need.tolerations]
        site = self._site(None, "", (*wanted, *tolerations_of_movable(self._found.pods, asked.labels)))
        for tray in asked.without:
            check_tray_exists(site, tray)
        moves: list[JobMove] = []
        for tray in asked.drain:
            step = plan_drain(site, tray)
            site, moves = step.site, [*moves, *step.moves]
        if asked.defrag:
            step = plan_defragmentation(site)
            site, moves = step.site, [*moves, *step.moves]
        self._holds = site.holds
        return tuple(moves)

    def _plans(self, asked: Sequence[tuple[Job, Gang]]) -> dict[str, GangPlan]:
        """Of the jobs that fit: together where all may use the same trays and share them, else one by one."""
        if self._asked.alone:
            return self._plans_alone(asked)
        trays = [self._seen_by(job).trays for job, _ in asked]
        if all(tray == trays[0] for tray in trays) and not are_anti_affine([job for job, _ in asked]):
            kinds = {kind: claims for job, _ in asked for kind, claims in self._kinds(job).items()}
            site = (
                self._with_rooms(PlacementSite(trays[0], self._holds), kinds) if trays else PlacementSite(())
            )
            found = plan_batch(site, [gang for _, gang in asked])
            for plan in found:
                self._reserve(plan, next(pair for pair in asked if pair[1].name == plan.gang))
            return {plan.gang: plan for plan in found}
        plans: dict[str, GangPlan] = {}
        for number, (job, _) in enumerate(asked):
            gang = self._gang(job)
            site = self._with_rooms(self._seen_by(job), self._kinds(job))
            fitting = try_gang(site, gang, SearchBudget())
            if fitting is not None:
                plans[gang.name] = fitting
                self._reserve(fitting, (job, gang))
                self._keep_off([later for later, _ in asked[number + 1 :]], job, fitting)
        return plans

    def _keep_off(self, later: Sequence[Job], job: Job, plan: GangPlan) -> None:
        """No tray of a plan is for those that are never beside its job."""
        for other in later:
            before = self._avoided[other.name]
            self._avoided[other.name] = avoiding_job(other, job, plan, before)
            if self._avoided[other.name] != before:
                self._gangs.pop(other.name, None)

    def _plans_alone(self, asked: Sequence[tuple[Job, Gang]]) -> dict[str, GangPlan]:
        """Of the jobs that fit, one by one."""
        plans: dict[str, GangPlan] = {}
        for job, gang in asked:
            fitting = plan_exclusive_cliques(self._alone(job, plans), gang, SearchBudget())
            if fitting is not None:
                plans[gang.name] = fitting
                self._reserve(fitting, (job, gang))
        return plans

    def _alone(self, job: Job, plans: Mapping[str, GangPlan]) -> PlacementSite:
        """Cliques that no other job of its kind has, planned or running."""
        site = self._with_rooms(self._seen_by(job), self._kinds(job))
        taken = {clique for plan in plans.values() for clique in plan.cliques}
        return without_other_sets(with_cliques_closed(site, taken), self._found, job)

    def _reserve(self, plan: GangPlan, of: tuple[Job, Gang]) -> None:
        site = self._seen_by(of[0])
        self._holds = with_plan_reserved(site, of[1], plan).holds
        self._planned.append((*of, plan, site))

    def _answer(self, job: Job, gang: Gang, plans: Mapping[str, GangPlan]) -> JobAnswer:
        asked, plan = self._asked, plans.get(gang.name)
        site = self._with_rooms(self._seen_by(job), self._kinds(job))
        if plan is None and asked.alone:
            site = self._alone(job, plans)
            if (refused := exclusive_refusal(job, gang, site)) is not None:
                return refused
        if plan is None:
            return _refused_answer(job, gang, site, plans, asked.labels)
        down = DEFAULT_DOWN if asked.down is None else asked.down
        notes = (*plan_notes(job, gang, plan, site, asked.labels, down), *self._kept_off(job, plan))
        more = (*(exclusive_notes(gang) if asked.alone else ()), *self._classes.notes(job))
        return JobAnswer(job=job.name, plan=plan, notes=(*notes, *more))

    def _with_rooms(self, site: PlacementSite, kinds: ClaimsByKind) -> PlacementSite:
        if not kinds:
            return site
        # The CEL library takes longer to load than a plan without claims takes to make.
        from rackloom.core.place.claim_capacity import with_claim_capacity

        # What was in use before the moves says whose devices they free.
        before = PlacementSite(site.trays, self._observed)
        found = with_claim_capacity(before, self._found.devices, kinds, self._asked.labels)
        return PlacementSite(found.trays, site.holds)

    def _seen_by(self, job: Job) -> PlacementSite:
        """As the members with devices may use it."""
        kinds = groups_by_trays(job, self._avoided[job.name])
        sites = {where: self._site(group, job.name) for where, group in kinds.items()}
        seen = sites[""] if "" in sites else combine_sites(sites) if sites else self._site(None, job.name)
        return with_trays_closed(seen, self._asked.drain, "drained")

    def _kept_off(self, job: Job, plan: GangPlan) -> Iterator[str]:
        """Launchers have a template of their own, which may lack what lets the workers in."""
        for group in (share for share in job.groups if not share.need.takes_devices):
            shut = {tray.name: tray.shut for tray in self._site(group, job.name).trays}
            tray = next(seat.tray for seat in plan.seats if seat.group == group.name)
            if shut[tray]:
                yield f"{group.name} may not run beside the first member on {tray} ({shut[tray]})"

    def _gang(self, job: Job) -> Gang:
        """As it is by what it avoids now."""
        if job.name not in self._gangs:
            self._gangs[job.name] = self._made_gang(job)
        return self._gangs[job.name]

    def _made_gang(self, job: Job) -> Gang:
        asked = self._asked
        gang = gang_of_job(
            job,
            self._claimed(self._kinds(job)),
            priorities=self._classes.values,
            never=self._classes.never,
            segment=asked.segment,
            spares=asked.spares,
            exclusive=asked.exclusive,
            apart=asked.apart,
            avoided=self._avoided[job.name],
        )
        if asked.segment is not None:
            check_segment(gang, self._site(None, ""))
        return gang

    def _kinds(self, job: Job) -> dict[str, tuple[ResourceClaim, ...]]:
        return claims_by_kind(job, self._claims, self._channels)

    def _claimed(self, kinds: ClaimsByKind) -> dict[str, int]:
        """GPUs of a member by kind."""
        if not kinds:
            return {}
        from rackloom.core.place.claim_capacity import gpus_per_member

        devices, labels = self._found.devices, self._asked.labels
        return {kind: gpus_per_member(devices, claims, labels) for kind, claims in kinds.items()}

    def _site(
        self, group: JobGroup | None, job: str, tolerations: tuple[Toleration, ...] = ()
    ) -> PlacementSite:
        """As pods of a group may use it, without the trays that are left out."""
        labels = self._asked.labels
        site = read_site(
            self._found.nodes,
            (),
            labels,
            tolerations=group.need.tolerations if group else tolerations,
            rule=group.need.rule if group else NodeRule(),
            avoided=self._avoided.get(job, {}).get(group.name) if group else None,
            published=self._found.devices.gpus_of_nodes(labels),
        )
        return with_trays_closed(PlacementSite(site.trays, self._holds), self._asked.without, "left out")


def _lacks_templates(jobs: Sequence[Job], documents: Sequence[Document]) -> bool:
    """Whether a job claims by a template that none of its files has."""
    known = channel_templates([document.value for document in documents])
    known |= {
        (claim.metadata.namespace or "default", claim.metadata.name)
        for claim in manifests_of(documents).claims
    }
    return _claims_devices(jobs, known)


def _claims_devices(jobs: Sequence[Job], channels: Collection[TemplateName]) -> bool:
    """Whether a member claims a device: of channels each tray is known to have one."""
    return any(
        (group.identity.namespace, name) not in channels
        for job in jobs
        for group in job.groups
        for name in (*group.need.templates, *group.need.claims)
    )


def _check_names(jobs: Sequence[Job]) -> None:
    """Jobs are told apart by their names, here and on the trays that they hold."""
    for name, count in Counter(job.name for job in jobs).items():
        if count > 1:
            raise Refused(
                f"{count} jobs are called {name}", nearest_fix="rename them, or place them one by one"
            )


def _refused_answer(
    job: Job, gang: Gang, site: PlacementSite, plans: Mapping[str, GangPlan], labels: SchedulerLabels
) -> JobAnswer:
    """What blocks it where `plans` are in the way, too, and what helps."""
    # What explains takes as long to load as what plans.
    from rackloom.core.place.gang_fixes import describe_shortage, find_fixes, has_cliques
    from rackloom.core.place.search.site_capacity import capacity_for

    effort = SearchBudget()
    ground = capacity_for(_without_lower_priority(site, gang, plans, effort), gang)
    label = f"let the nodes carry {labels.clique}, or name what they carry with --label clique=KEY"
    ask = "change its nodeSelector or affinity: no node is what it asks for"
    first = [ask] * all(tray.is_unfit for tray in site.trays) + [label] * (not has_cliques(site))
    found = (*first, *(fix.text for fix in islice(find_fixes(ground, gang, effort), MAX_FIXES)))
    return JobAnswer(
        job=job.name, plan=None, blocked=describe_shortage(ground, gang, labels.clique), fixes=found
    )


def _without_lower_priority(
    site: PlacementSite, gang: Gang, plans: Mapping[str, GangPlan], effort: SearchBudget
) -> PlacementSite:
    """What stood in the way of a gang was not what was planned at a lower priority."""
    holds = tuple(hold for hold in site.holds if hold.owner not in plans or hold.priority >= gang.priority)
    rest = PlacementSite(site.trays, holds)
    return site if try_gang(rest, gang, effort) is not None else rest
