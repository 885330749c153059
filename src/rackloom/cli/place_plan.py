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
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from rackloom.claim.manifests.documents import Document, read_documents
from rackloom.claim.manifests.read import manifests_of
from rackloom.cli.common import Format, emit
from rackloom.cli.place import PlacementParameters, SiteParameters, WhatIfParameters
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
    """The refusal of a job for which some cliques are free, but too few; else None."""
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
    """A note if the job takes more cliques than it would need otherwise."""
    if len(colocation_groups(gang)) > 1:
        yield f"{_share_words(gang)} have a clique each: exclusive topology starts no two of them in one"


def _share_words(gang: Gang) -> str:
    return "replicas" if gang.segment is None else f"segments of {gang.segment}"


def _exclusive_fixes(gang: Gang, site: PlacementSite, most: int) -> Iterator[str]:
    """Changes that help; each was planned."""
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


@dataclass(frozen=True)
class PlacementRequest:
    """What the command line asks for."""

    labels: SchedulerLabels
    how: PlacementParameters
    what_if: WhatIfParameters
    exclusive_topology: bool
    """Each share of a job has a clique that no other uses: LeaderWorkerSet's exclusive topology."""


DEFAULT_DOWN = 0.01
"""Share of trays that are down where --down is not given."""


def answer_placement(
    files: Sequence[Path],
    source: SiteParameters,
    request: PlacementRequest,
    target: str | None,
    output: Format,
) -> int:
    """Print the answer. 1 where a job does not fit."""
    what_if = request.what_if
    if what_if.down is not None and not 0 <= what_if.down < 1:
        raise Refused(f"--down {what_if.down} is no share of trays", nearest_fix="0.01 is 1 %")
    documents = [document for path in files for document in read_documents(path)]
    jobs = read_jobs([document.value for document in documents], request.labels)
    if not jobs and not (what_if.drain or what_if.defrag or what_if.down is not None):
        kinds = list_names(dict.fromkeys(str(document.value.get("kind")) for document in documents), most=8)
        raise Refused(
            f"there is no job in the files ({kinds or 'nothing'})",
            nearest_fix=f"name a manifest with {', '.join(JOB_KINDS)}",
        )
    cluster = read_cluster_objects(source, templates=_lacks_templates(jobs, documents))
    makers = [document for document in cluster.documents if document.value.get("kind") in TEMPLATE_KINDS]
    jobs = read_jobs([maker.value for maker in (*makers, *documents)], request.labels) if makers else jobs
    claimed = _claims_devices(jobs, channel_templates([maker.value for maker in (*makers, *documents)]))
    found = site_objects(source, [*documents, *cluster.documents], request.labels, with_devices=claimed)
    problem = PlacementProblem([*makers, *documents], cluster, found, request)
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
        request: PlacementRequest,
    ) -> None:
        """`documents`: the jobs, and the objects from which their claims are made."""
        self._request = request
        self._found = found
        self._channels = channel_templates([document.value for document in documents])
        claims = manifests_of(documents).claims
        self._claims = {
            (claim.metadata.namespace or "default", claim.metadata.name): claim for claim in claims
        }
        self._classes = PriorityClasses([*cluster.documents, *documents], from_cluster=cluster.has_classes)
        pods = read_site(found.nodes, found.pods, request.labels).holds
        held = (*pods, *found.devices.holds(request.labels))
        self._observed = restrict_moves(held, found.nodes, found.pods, request.labels)
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
                job, self._found.nodes, self._found.pods, self._request.labels
            )
        moves = self._rearrange(jobs)
        gangs = [self._gang(job) for job in jobs]
        ranked = sorted(zip(jobs, gangs, strict=True), key=lambda pair: -pair[1].priority)
        plans = self._plans(ranked)
        answers = tuple(self._answer(job, self._gang(job), plans) for job, _ in ranked)
        down = self._request.what_if.down
        priced = self._request.how.segment is None and down is not None
        sizes = segment_prices(self._site(None, ""), down or 0) if priced else ()
        return PlacementReport(moves=moves, jobs=answers, segments=sizes)

    def rendered(self, target: str) -> "list[RenderedJob]":
        """The jobs that were placed, for a scheduler."""
        from rackloom.core.place.rendering import render_job

        return [render_job(target, *planned, self._request.labels) for planned in self._planned]

    def _rearrange(self, jobs: Sequence[Job]) -> tuple[JobMove, ...]:
        what_if, labels = self._request.what_if, self._request.labels
        if not (what_if.without_tray or what_if.drain or what_if.defrag):
            return ()
        from rackloom.core.place.job_moves import check_tray_exists, plan_defragmentation, plan_drain

        wanted = [toleration for job in jobs for group in job.groups for toleration in group.need.tolerations]
        site = self._site(None, "", (*wanted, *tolerations_of_movable(self._found.pods, labels)))
        for tray in what_if.without_tray or ():
            check_tray_exists(site, tray)
        moves: list[JobMove] = []
        for tray in what_if.drain or ():
            step = plan_drain(site, tray)
            site, moves = step.site, [*moves, *step.moves]
        if what_if.defrag:
            step = plan_defragmentation(site)
            site, moves = step.site, [*moves, *step.moves]
        self._holds = site.holds
        return tuple(moves)

    def _plans(self, ranked: Sequence[tuple[Job, Gang]]) -> dict[str, GangPlan]:
        """Of the jobs that fit: together where all may use the same trays and share them, else one by one."""
        if self._request.exclusive_topology:
            return self._plans_one_by_one(ranked)
        trays = [self._site_of_job(job).trays for job, _ in ranked]
        if all(tray == trays[0] for tray in trays) and not are_anti_affine([job for job, _ in ranked]):
            kinds = {kind: claims for job, _ in ranked for kind, claims in self._claims_by_kind(job).items()}
            site = (
                self._with_claim_capacity(PlacementSite(trays[0], self._holds), kinds)
                if trays
                else PlacementSite(())
            )
            found = plan_batch(site, [gang for _, gang in ranked])
            for plan in found:
                self._reserve(plan, next(pair for pair in ranked if pair[1].name == plan.gang))
            return {plan.gang: plan for plan in found}
        return self._plans_one_by_one(ranked)

    def _plans_one_by_one(self, ranked: Sequence[tuple[Job, Gang]]) -> dict[str, GangPlan]:
        """Of the jobs that fit. Each plan takes trays from the jobs after it."""
        plans: dict[str, GangPlan] = {}
        for number, (job, _) in enumerate(ranked):
            gang = self._gang(job)
            fitting = self._plan(job, gang, plans)
            if fitting is not None:
                plans[gang.name] = fitting
                self._reserve(fitting, (job, gang))
                if not self._request.exclusive_topology:
                    self._keep_jobs_off([later for later, _ in ranked[number + 1 :]], job, fitting)
        return plans

    def _plan(self, job: Job, gang: Gang, plans: Mapping[str, GangPlan]) -> GangPlan | None:
        if self._request.exclusive_topology:
            return plan_exclusive_cliques(self._site_with_free_cliques(job, plans), gang, SearchBudget())
        return try_gang(self._capacity_for(job), gang, SearchBudget())

    def _keep_jobs_off(self, later: Sequence[Job], job: Job, plan: GangPlan) -> None:
        """Jobs that are never beside this job avoid the trays of its plan."""
        for other in later:
            before = self._avoided[other.name]
            self._avoided[other.name] = avoiding_job(other, job, plan, before)
            if self._avoided[other.name] != before:
                self._gangs.pop(other.name, None)

    def _site_with_free_cliques(self, job: Job, plans: Mapping[str, GangPlan]) -> PlacementSite:
        """Cliques that no other job of its kind has, planned or running."""
        site = self._capacity_for(job)
        taken = {clique for plan in plans.values() for clique in plan.cliques}
        return without_other_sets(with_cliques_closed(site, taken), self._found, job)

    def _reserve(self, plan: GangPlan, of: tuple[Job, Gang]) -> None:
        site = self._site_of_job(of[0])
        self._holds = with_plan_reserved(site, of[1], plan).holds
        self._planned.append((*of, plan, site))

    def _answer(self, job: Job, gang: Gang, plans: Mapping[str, GangPlan]) -> JobAnswer:
        request, plan = self._request, plans.get(gang.name)
        site = self._capacity_for(job)
        if plan is None and request.exclusive_topology:
            site = self._site_with_free_cliques(job, plans)
            if (refused := exclusive_refusal(job, gang, site)) is not None:
                return refused
        if plan is None:
            return _refused_answer(job, gang, site, plans, request.labels)
        down = DEFAULT_DOWN if request.what_if.down is None else request.what_if.down
        notes = (*plan_notes(job, gang, plan, site, request.labels, down), *self._helper_notes(job, plan))
        more = (*(exclusive_notes(gang) if request.exclusive_topology else ()), *self._classes.notes(job))
        return JobAnswer(job=job.name, plan=plan, notes=(*notes, *more))

    def _capacity_for(self, job: Job) -> PlacementSite:
        """The site as the members of a job may use it, with what its claims can get there."""
        return self._with_claim_capacity(self._site_of_job(job), self._claims_by_kind(job))

    def _with_claim_capacity(self, site: PlacementSite, kinds: ClaimsByKind) -> PlacementSite:
        if not kinds:
            return site
        # The CEL library takes longer to load than a plan without claims takes to make.
        from rackloom.core.place.claim_capacity import with_claim_capacity

        # The holds before the moves show whose devices the moves free.
        before = PlacementSite(site.trays, self._observed)
        found = with_claim_capacity(before, self._found.devices, kinds, self._request.labels)
        return PlacementSite(found.trays, site.holds)

    def _site_of_job(self, job: Job) -> PlacementSite:
        """The site as the members with devices may use it."""
        kinds = groups_by_trays(job, self._avoided[job.name])
        sites = {where: self._site(group, job.name) for where, group in kinds.items()}
        seen = sites[""] if "" in sites else combine_sites(sites) if sites else self._site(None, job.name)
        return with_trays_closed(seen, self._request.what_if.drain or (), "drained")

    def _helper_notes(self, job: Job, plan: GangPlan) -> Iterator[str]:
        """Notes on launchers: their pod template may lack the tolerations of the workers."""
        for group in (share for share in job.groups if not share.need.takes_devices):
            shut = {tray.name: tray.shut for tray in self._site(group, job.name).trays}
            tray = next(seat.tray for seat in plan.seats if seat.group == group.name)
            if shut[tray]:
                yield f"{group.name} may not run beside the first member on {tray} ({shut[tray]})"

    def _gang(self, job: Job) -> Gang:
        """The gang of a job, with the trays that the job avoids now."""
        if job.name not in self._gangs:
            self._gangs[job.name] = self._build_gang(job)
        return self._gangs[job.name]

    def _build_gang(self, job: Job) -> Gang:
        how = self._request.how
        gang = gang_of_job(
            job,
            self._gpus_by_kind(self._claims_by_kind(job)),
            priorities=self._classes.values,
            never=self._classes.never,
            segment=how.segment,
            spares=how.spares,
            exclusive=how.exclusive,
            apart=how.apart,
            avoided=self._avoided[job.name],
        )
        if how.segment is not None:
            check_segment(gang, self._site(None, ""))
        return gang

    def _claims_by_kind(self, job: Job) -> dict[str, tuple[ResourceClaim, ...]]:
        return claims_by_kind(job, self._claims, self._channels)

    def _gpus_by_kind(self, kinds: ClaimsByKind) -> dict[str, int]:
        """GPUs of a member by kind."""
        if not kinds:
            return {}
        from rackloom.core.place.claim_capacity import gpus_per_member

        devices, labels = self._found.devices, self._request.labels
        return {kind: gpus_per_member(devices, claims, labels) for kind, claims in kinds.items()}

    def _site(
        self, group: JobGroup | None, job: str, tolerations: tuple[Toleration, ...] = ()
    ) -> PlacementSite:
        """The site as pods of a group may use it, without the trays that are left out."""
        labels = self._request.labels
        site = read_site(
            self._found.nodes,
            (),
            labels,
            tolerations=group.need.tolerations if group else tolerations,
            rule=group.need.rule if group else NodeRule(),
            avoided=self._avoided.get(job, {}).get(group.name) if group else None,
            published=self._found.devices.gpus_of_nodes(labels),
        )
        return with_trays_closed(
            PlacementSite(site.trays, self._holds), self._request.what_if.without_tray or (), "left out"
        )


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
    """Jobs are distinguished by their names, here and on the trays that they hold."""
    for name, count in Counter(job.name for job in jobs).items():
        if count > 1:
            raise Refused(
                f"{count} jobs are called {name}", nearest_fix="rename them, or place them one by one"
            )


def _refused_answer(
    job: Job, gang: Gang, site: PlacementSite, plans: Mapping[str, GangPlan], labels: SchedulerLabels
) -> JobAnswer:
    """What blocks the job, `plans` of other jobs included, and what helps."""
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
    """The site without plans of lower priority, unless the gang would fit then."""
    holds = tuple(hold for hold in site.holds if hold.owner not in plans or hold.priority >= gang.priority)
    rest = PlacementSite(site.trays, holds)
    return site if try_gang(rest, gang, effort) is not None else rest
