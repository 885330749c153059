"""The work of `rackloom place`: files and a site in, plans or refusals out."""

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rackloom.claim.allocate.objects import ResourceClaim
from rackloom.claim.manifests.documents import Document, read_documents
from rackloom.claim.manifests.read import gathered
from rackloom.claim.place.labels import Labels
from rackloom.claim.place.many.alone import plan_alone, without_cliques
from rackloom.claim.place.many.batch import plan_batch
from rackloom.claim.place.many.strangers import are_strangers, avoided_beside
from rackloom.claim.place.notes import notes_on
from rackloom.claim.place.reading.asks import claims_by_kind, gang_of
from rackloom.claim.place.reading.bound import bound, tolerated
from rackloom.claim.place.reading.devices import Kinds
from rackloom.claim.place.reading.jobs import KINDS, Job, Team, Template, channel_templates, jobs_of
from rackloom.claim.place.reading.node_rules import NodeRule
from rackloom.claim.place.reading.observed import avoided_by, seen_together, site_of
from rackloom.claim.place.reading.pods import Toleration
from rackloom.claim.place.reading.terms import Avoided, kinds_of_where
from rackloom.claim.place.refusal.moves import Move, closed_to, listed
from rackloom.claim.place.reserve import reserved
from rackloom.claim.place.search.effort import Effort
from rackloom.claim.place.search.fit import try_gang
from rackloom.claim.place.values import Gang, Plan, Site
from rackloom.cli.output import Format, emit
from rackloom.cli.place_alone import free_of_others, notes_alone, refused_alone
from rackloom.cli.place_classes import PriorityClasses
from rackloom.cli.place_page import Answer, Report, page
from rackloom.cli.place_rendered import beside, manifests
from rackloom.cli.place_segments import check_segment, segments_of
from rackloom.cli.place_site import TEMPLATES, Found, Source, Told, found_in, told_by
from rackloom.errors import Refused

if TYPE_CHECKING:
    from rackloom.claim.place.render.targets import Rendered

FIXES = 4
"""Fixes that an answer names, nearest first."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line wishes."""

    labels: Labels
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


DOWN = 0.01
"""Share of trays that are down where nobody says another."""


def answer(files: Sequence[Path], source: Source, asked: Asked, target: str | None, output: Format) -> int:
    """Print the answer. 1 where a job does not fit."""
    if asked.down is not None and not 0 <= asked.down < 1:
        raise Refused(f"--down {asked.down} is no share of trays", nearest_fix="0.01 is 1 %")
    documents = [one for path in files for one in read_documents(path)]
    jobs = jobs_of([one.value for one in documents], asked.labels)
    if not jobs and not (asked.drain or asked.defrag or asked.down is not None):
        kinds = listed(dict.fromkeys(str(one.value.get("kind")) for one in documents), most=8)
        raise Refused(
            f"there is no job in the files ({kinds or 'nothing'})",
            nearest_fix=f"name a manifest with {', '.join(KINDS)}",
        )
    told = told_by(source, templates=_lacks_templates(jobs, documents))
    makers = [one for one in told.documents if one.value.get("kind") in TEMPLATES]
    jobs = jobs_of([one.value for one in (*makers, *documents)], asked.labels) if makers else jobs
    claimed = _claimed(jobs, channel_templates([one.value for one in (*makers, *documents)]))
    found = found_in(source, [*documents, *told.documents], asked.labels, with_devices=claimed)
    desk = Desk([*makers, *documents], told, found, asked)
    report = desk.report(jobs)
    refused = [one for one in report.jobs if one.plan is None]
    if target is not None and report.jobs and not refused:
        others = [] if target == "slurm" else beside(documents, jobs)
        print(manifests(desk.rendered(target), others), end="")
        print(page(report, seats=False), file=sys.stderr)
    else:
        emit(report, output, lambda: page(report))
    return int(bool(refused))


class Desk:
    """A site on which jobs are placed beside each other."""

    def __init__(self, documents: Sequence[Document], told: Told, found: Found, asked: Asked) -> None:
        """`documents`: the jobs, and what makes claims for them."""
        self._asked = asked
        self._found = found
        self._channels = channel_templates([one.value for one in documents])
        claims = gathered(documents).claims
        self._claims = {(one.metadata.namespace or "default", one.metadata.name): one for one in claims}
        self._classes = PriorityClasses([*told.documents, *documents], asked=told.has_classes)
        pods = site_of(found.nodes, found.pods, asked.labels).holds
        held = (*pods, *found.devices.holds(asked.labels))
        self._observed = bound(held, found.nodes, found.pods, asked.labels)
        self._holds = self._observed
        self._avoided: dict[str, Avoided] = {}
        self._gangs: dict[str, Gang] = {}
        self._planned: list[tuple[Job, Gang, Plan, Site]] = []

    def report(self, jobs: Sequence[Job]) -> Report:
        """The moves that come first, then each job, the most urgent first."""
        _check_names(jobs)
        for job in jobs:
            self._classes.check(job)
            self._avoided[job.name] = avoided_by(job, self._found.nodes, self._found.pods, self._asked.labels)
        moves = self._rearranged(jobs)
        gangs = [self._gang(job) for job in jobs]
        asked = sorted(zip(jobs, gangs, strict=True), key=lambda one: -one[1].priority)
        plans = self._plans(asked)
        answers = tuple(self._answer(job, self._gang(job), plans) for job, _ in asked)
        priced = self._asked.segment is None and self._asked.down is not None
        sizes = segments_of(self._site(None, ""), self._asked.down or 0) if priced else ()
        return Report(moves=moves, jobs=answers, segments=sizes)

    def rendered(self, target: str) -> "list[Rendered]":
        """The jobs that were placed, for a scheduler."""
        from rackloom.claim.place.render.targets import rendered

        return [rendered(target, *one, self._asked.labels) for one in self._planned]

    def _rearranged(self, jobs: Sequence[Job]) -> tuple[Move, ...]:
        asked = self._asked
        if not (asked.without or asked.drain or asked.defrag):
            return ()
        from rackloom.claim.place.defrag import check_tray, defragmented, drained

        wanted = [one for job in jobs for team in job.teams for one in team.need.tolerations]
        site = self._site(None, "", (*wanted, *tolerated(self._found.pods, asked.labels)))
        for tray in asked.without:
            check_tray(site, tray)
        moves: list[Move] = []
        for tray in asked.drain:
            step = drained(site, tray)
            site, moves = step.site, [*moves, *step.moves]
        if asked.defrag:
            step = defragmented(site)
            site, moves = step.site, [*moves, *step.moves]
        self._holds = site.holds
        return tuple(moves)

    def _plans(self, asked: Sequence[tuple[Job, Gang]]) -> dict[str, Plan]:
        """Of the jobs that fit: together where all may use the same trays and share them, else one by one."""
        if self._asked.alone:
            return self._plans_alone(asked)
        trays = [self._seen_by(job).trays for job, _ in asked]
        if all(one == trays[0] for one in trays) and not are_strangers([job for job, _ in asked]):
            kinds = {kind: claims for job, _ in asked for kind, claims in self._kinds(job).items()}
            site = self._with_rooms(Site(trays[0], self._holds), kinds) if trays else Site(())
            found = plan_batch(site, [gang for _, gang in asked]).plans
            for plan in found:
                self._reserve(plan, next(one for one in asked if one[1].name == plan.gang))
            return {plan.gang: plan for plan in found}
        plans: dict[str, Plan] = {}
        for number, (job, _) in enumerate(asked):
            gang = self._gang(job)
            site = self._with_rooms(self._seen_by(job), self._kinds(job))
            fitting = try_gang(site, gang, Effort())
            if fitting is not None:
                plans[gang.name] = fitting
                self._reserve(fitting, (job, gang))
                self._keep_off([later for later, _ in asked[number + 1 :]], job, fitting)
        return plans

    def _keep_off(self, later: Sequence[Job], job: Job, plan: Plan) -> None:
        """No tray of a plan is for those that are never beside its job."""
        for other in later:
            before = self._avoided[other.name]
            self._avoided[other.name] = avoided_beside(other, job, plan, before)
            if self._avoided[other.name] != before:
                self._gangs.pop(other.name, None)

    def _plans_alone(self, asked: Sequence[tuple[Job, Gang]]) -> dict[str, Plan]:
        """Of the jobs that fit, one by one."""
        plans: dict[str, Plan] = {}
        for job, gang in asked:
            fitting = plan_alone(self._alone(job, plans), gang, Effort())
            if fitting is not None:
                plans[gang.name] = fitting
                self._reserve(fitting, (job, gang))
        return plans

    def _alone(self, job: Job, plans: Mapping[str, Plan]) -> Site:
        """Cliques that no other job of its kind has, planned or running."""
        site = self._with_rooms(self._seen_by(job), self._kinds(job))
        taken = {clique for plan in plans.values() for clique in plan.cliques}
        return free_of_others(without_cliques(site, taken), self._found, job)

    def _reserve(self, plan: Plan, of: tuple[Job, Gang]) -> None:
        site = self._seen_by(of[0])
        self._holds = reserved(site, of[1], plan).holds
        self._planned.append((*of, plan, site))

    def _answer(self, job: Job, gang: Gang, plans: Mapping[str, Plan]) -> Answer:
        asked, plan = self._asked, plans.get(gang.name)
        site = self._with_rooms(self._seen_by(job), self._kinds(job))
        if plan is None and asked.alone:
            site = self._alone(job, plans)
            if (refused := refused_alone(job, gang, site)) is not None:
                return refused
        if plan is None:
            return _refusal(job, gang, site, plans, asked.labels)
        down = DOWN if asked.down is None else asked.down
        notes = (*notes_on(job, gang, plan, site, asked.labels, down), *self._kept_off(job, plan))
        more = (*(notes_alone(gang) if asked.alone else ()), *self._classes.notes(job))
        return Answer(job=job.name, plan=plan, notes=(*notes, *more))

    def _with_rooms(self, site: Site, kinds: Kinds) -> Site:
        if not kinds:
            return site
        # The CEL library takes longer to load than a plan without claims takes to make.
        from rackloom.claim.place.reading.rooms import with_rooms

        # What was in use before the moves says whose devices they free.
        before = Site(site.trays, self._observed)
        found = with_rooms(before, self._found.devices, kinds, self._asked.labels)
        return Site(found.trays, site.holds)

    def _seen_by(self, job: Job) -> Site:
        """As the members with devices may use it."""
        kinds = kinds_of_where(job, self._avoided[job.name])
        sites = {where: self._site(team, job.name) for where, team in kinds.items()}
        seen = sites[""] if "" in sites else seen_together(sites) if sites else self._site(None, job.name)
        return closed_to(seen, self._asked.drain, "drained")

    def _kept_off(self, job: Job, plan: Plan) -> Iterator[str]:
        """Launchers have a template of their own, which may lack what lets the workers in."""
        for team in (one for one in job.teams if not one.need.takes_devices):
            shut = {tray.name: tray.shut for tray in self._site(team, job.name).trays}
            tray = next(seat.tray for seat in plan.seats if seat.group == team.name)
            if shut[tray]:
                yield f"{team.name} may not run beside the first member on {tray} ({shut[tray]})"

    def _gang(self, job: Job) -> Gang:
        """As it is by what it avoids now."""
        if job.name not in self._gangs:
            self._gangs[job.name] = self._made_gang(job)
        return self._gangs[job.name]

    def _made_gang(self, job: Job) -> Gang:
        asked = self._asked
        gang = gang_of(
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

    def _claimed(self, kinds: Kinds) -> dict[str, int]:
        """GPUs of a member by kind."""
        if not kinds:
            return {}
        from rackloom.claim.place.reading.rooms import gpus_given

        devices, labels = self._found.devices, self._asked.labels
        return {kind: gpus_given(devices, claims, labels) for kind, claims in kinds.items()}

    def _site(self, team: Team | None, job: str, tolerations: tuple[Toleration, ...] = ()) -> Site:
        """As pods of a team may use it, without the trays that are left out."""
        labels = self._asked.labels
        site = site_of(
            self._found.nodes,
            (),
            labels,
            tolerations=team.need.tolerations if team else tolerations,
            rule=team.need.rule if team else NodeRule(),
            avoided=self._avoided.get(job, {}).get(team.name) if team else None,
            published=self._found.devices.gpus_of_nodes(labels),
        )
        return closed_to(Site(site.trays, self._holds), self._asked.without, "left out")


def _lacks_templates(jobs: Sequence[Job], documents: Sequence[Document]) -> bool:
    """Whether a job claims by a template that none of its files has."""
    known = channel_templates([one.value for one in documents])
    known |= {(one.metadata.namespace or "default", one.metadata.name) for one in gathered(documents).claims}
    return _claimed(jobs, known)


def _claimed(jobs: Sequence[Job], channels: Collection[Template]) -> bool:
    """Whether a member claims a device: of channels each tray is known to have one."""
    return any(
        (team.known.namespace, name) not in channels
        for job in jobs
        for team in job.teams
        for name in (*team.need.templates, *team.need.claims)
    )


def _check_names(jobs: Sequence[Job]) -> None:
    """Jobs are told apart by their names, here and on the trays that they hold."""
    for name, count in Counter(job.name for job in jobs).items():
        if count > 1:
            raise Refused(
                f"{count} jobs are called {name}", nearest_fix="rename them, or place them one by one"
            )


def _refusal(job: Job, gang: Gang, site: Site, plans: Mapping[str, Plan], labels: Labels) -> Answer:
    """What blocks it where `plans` are in the way, too, and what helps."""
    # What explains takes as long to load as what plans.
    from rackloom.claim.place.refusal.fixes import fixes
    from rackloom.claim.place.refusal.shortage import has_cliques, shortage
    from rackloom.claim.place.search.ground import ground_of

    effort = Effort()
    ground = ground_of(_without_lower(site, gang, plans, effort), gang)
    label = f"let the nodes carry {labels.clique}, or name what they carry with --label clique=KEY"
    ask = "change its nodeSelector or affinity: no node is what it asks for"
    first = [ask] * all(tray.is_unfit for tray in site.trays) + [label] * (not has_cliques(site))
    found = (*first, *(one.text for one in islice(fixes(ground, gang, effort), FIXES)))
    return Answer(job=job.name, plan=None, blocked=shortage(ground, gang, labels.clique), fixes=found)


def _without_lower(site: Site, gang: Gang, plans: Mapping[str, Plan], effort: Effort) -> Site:
    """What stood in the way of a gang was not what was planned at a lower priority."""
    holds = tuple(one for one in site.holds if one.owner not in plans or one.priority >= gang.priority)
    rest = Site(site.trays, holds)
    return site if try_gang(rest, gang, effort) is not None else rest
