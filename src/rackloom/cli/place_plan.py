"""The work of `rackloom place`: files and a site in, plans or refusals out."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import msgspec
import yaml

from rackloom.claim.allocate.objects import ResourceClaim
from rackloom.claim.manifests.documents import Document, read_documents
from rackloom.claim.manifests.read import gathered
from rackloom.claim.place.labels import Labels
from rackloom.claim.place.many.batch import plan_batch
from rackloom.claim.place.notes import notes_on
from rackloom.claim.place.reading.asks import claims_by_kind, gang_of
from rackloom.claim.place.reading.devices import Kinds
from rackloom.claim.place.reading.jobs import KINDS, Job, channel_templates, jobs_of, part
from rackloom.claim.place.reading.observed import site_of
from rackloom.claim.place.reading.pods import PodNeed
from rackloom.claim.place.refusal.moves import Move, closed_to, listed
from rackloom.claim.place.reserve import reserved
from rackloom.claim.place.search.effort import Effort
from rackloom.claim.place.search.fit import try_gang
from rackloom.claim.place.values import Gang, Plan, Site
from rackloom.cli.output import Format, emit
from rackloom.cli.place_page import Answer, Report, page
from rackloom.cli.place_site import Found, Source, found_in
from rackloom.errors import Refused

_PRIORITY = "PriorityClass"
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
    down: float


def answer(files: Sequence[Path], source: Source, asked: Asked, target: str | None, output: Format) -> int:
    """Print the answer. 1 where a job does not fit."""
    if not 0 <= asked.down < 1:
        raise Refused(f"--down {asked.down} is no share of trays", nearest_fix="0.01 is 1 %")
    documents = [one for path in files for one in read_documents(path)]
    jobs = jobs_of([one.value for one in documents], asked.labels)
    if not jobs and not (asked.drain or asked.defrag):
        kinds = listed(dict.fromkeys(str(one.value.get("kind")) for one in documents), most=8)
        raise Refused(
            f"there is no job in the files ({kinds or 'nothing'})",
            nearest_fix=f"name a manifest with {', '.join(KINDS)}",
        )
    claimed = _claimed(jobs, channel_templates([one.value for one in documents]))
    desk = Desk(documents, found_in(source, documents, asked.labels, with_devices=claimed), asked)
    report = desk.report(jobs)
    refused = [one for one in report.jobs if one.plan is None]
    if target is not None and not refused:
        print(desk.rendering(target), end="")
    else:
        emit(report, output, lambda: page(report))
    return int(bool(refused))


class Desk:
    """A site on which jobs are placed beside each other."""

    def __init__(self, documents: Sequence[Document], found: Found, asked: Asked) -> None:
        self._asked = asked
        self._found = found
        self._channels = channel_templates([one.value for one in documents])
        claims = gathered(documents).claims
        self._claims = {(one.metadata.namespace or "default", one.metadata.name): one for one in claims}
        self._priorities = dict(_priority(one) for one in documents if one.value.get("kind") == _PRIORITY)
        pods = site_of(found.nodes, found.pods, asked.labels).holds
        self._observed = (*pods, *found.devices.holds(asked.labels))
        self._holds = self._observed
        self._planned: list[tuple[Job, Gang, Plan, Site]] = []

    def report(self, jobs: Sequence[Job]) -> Report:
        """The moves that come first, then each job, the most urgent first."""
        _check_names(jobs)
        moves = self._rearranged()
        gangs = [self._gang(job) for job in jobs]
        asked = sorted(zip(jobs, gangs, strict=True), key=lambda one: -one[1].priority)
        plans = self._plans(asked)
        return Report(moves=moves, jobs=tuple(self._answer(job, gang, plans) for job, gang in asked))

    def rendering(self, target: str) -> str:
        """The jobs that were placed, for a scheduler."""
        from rackloom.claim.place.render.targets import rendered

        done = [rendered(target, *one, self._asked.labels) for one in self._planned]
        return "\n".join(one.script for one in done if one.script) + "---\n".join(
            yaml.safe_dump(value, sort_keys=False) for one in done for value in one.objects
        )

    def _rearranged(self) -> tuple[Move, ...]:
        asked = self._asked
        if not (asked.without or asked.drain or asked.defrag):
            return ()
        from rackloom.claim.place.defrag import check_tray, defragmented, drained

        site = self._site(None)
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
        """Of the jobs that fit: together where all may use the same trays, else one by one."""
        trays = [self._seen_by(job).trays for job, _ in asked]
        if all(one == trays[0] for one in trays):
            kinds = {kind: claims for job, _ in asked for kind, claims in self._kinds(job).items()}
            site = self._with_rooms(Site(trays[0], self._holds), kinds) if trays else Site(())
            found = plan_batch(site, [gang for _, gang in asked]).plans
            for plan in found:
                self._reserve(plan, next(one for one in asked if one[1].name == plan.gang))
            return {plan.gang: plan for plan in found}
        plans: dict[str, Plan] = {}
        for job, gang in asked:
            site = self._with_rooms(self._seen_by(job), self._kinds(job))
            fitting = try_gang(site, gang, Effort())
            if fitting is not None:
                plans[gang.name] = fitting
                self._reserve(fitting, (job, gang))
        return plans

    def _reserve(self, plan: Plan, of: tuple[Job, Gang]) -> None:
        site = self._seen_by(of[0])
        self._holds = reserved(site, of[1], plan).holds
        self._planned.append((*of, plan, site))

    def _answer(self, job: Job, gang: Gang, plans: Mapping[str, Plan]) -> Answer:
        asked, plan = self._asked, plans.get(gang.name)
        site = self._with_rooms(self._seen_by(job), self._kinds(job))
        if plan is None:
            return _refusal(job, gang, site, plans)
        notes = (*notes_on(job, gang, plan, site, asked.labels, asked.down), *self._kept_off(job, plan))
        return Answer(job=job.name, plan=plan, notes=notes)

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
        need = next((team.need for team in job.teams if team.need.takes_devices), None)
        return closed_to(self._site(need), self._asked.drain, "drained")

    def _kept_off(self, job: Job, plan: Plan) -> Iterator[str]:
        """Launchers have a template of their own, which may lack what lets the workers in."""
        for team in (one for one in job.teams if not one.need.takes_devices):
            shut = {tray.name: tray.shut for tray in self._site(team.need).trays}
            tray = next(seat.tray for seat in plan.seats if seat.group == team.name)
            if shut[tray]:
                yield f"{team.name} may not run beside the first member on {tray} ({shut[tray]})"

    def _gang(self, job: Job) -> Gang:
        asked = self._asked
        return gang_of(
            job,
            self._claimed(self._kinds(job)),
            priorities=self._priorities,
            segment=asked.segment,
            spares=asked.spares,
            exclusive=asked.exclusive,
            apart=asked.apart,
        )

    def _kinds(self, job: Job) -> dict[str, tuple[ResourceClaim, ...]]:
        return claims_by_kind(job, self._claims, self._channels)

    def _claimed(self, kinds: Kinds) -> dict[str, int]:
        """GPUs of a member by kind."""
        if not kinds:
            return {}
        from rackloom.claim.place.reading.rooms import gpus_given

        devices, labels = self._found.devices, self._asked.labels
        return {kind: gpus_given(devices, claims, labels) for kind, claims in kinds.items()}

    def _site(self, need: PodNeed | None) -> Site:
        """As pods with that need may use it, without the trays that are left out."""
        site = site_of(
            self._found.nodes,
            (),
            self._asked.labels,
            tolerations=need.tolerations if need else (),
            selector=need.selector if need else {},
            published=self._found.devices.gpus_of_nodes(self._asked.labels),
        )
        return closed_to(Site(site.trays, self._holds), self._asked.without, "left out")


def _priority(one: Document) -> tuple[str, int]:
    """Of a PriorityClass, its name and value."""
    name, value = part(one.value, ("metadata", "name")), one.value.get("value", 0)
    if not isinstance(name, str) or not isinstance(value, int):
        raise Refused(
            f"{one.where(('value',))}: a {_PRIORITY} has the name {name!r} and the value {value!r}",
            nearest_fix="give it a name, and a whole number as value",
        )
    return name, value


def _claimed(jobs: Sequence[Job], channels: Collection[str]) -> bool:
    """Whether a member claims a device: channels are had on every tray."""
    return any(
        {*team.need.templates, *team.need.claims}.difference(channels) for job in jobs for team in job.teams
    )


def _check_names(jobs: Sequence[Job]) -> None:
    """Jobs are told apart by their names, here and on the trays that they hold."""
    for name, count in Counter(job.name for job in jobs).items():
        if count > 1:
            raise Refused(
                f"{count} jobs are called {name}", nearest_fix="rename them, or place them one by one"
            )


def _refusal(job: Job, gang: Gang, site: Site, plans: Mapping[str, Plan]) -> Answer:
    """What blocks it where `plans` are in the way, too, and what helps."""
    # What explains takes as long to load as what plans.
    from rackloom.claim.place.refusal.fixes import fixes
    from rackloom.claim.place.refusal.shortage import shortage
    from rackloom.claim.place.search.ground import ground_of

    effort = Effort()
    ground = ground_of(_without_lower(site, gang, plans, effort), gang)
    found = tuple(one.text for one in islice(fixes(ground, gang, effort), FIXES))
    return Answer(job=job.name, plan=None, blocked=shortage(ground, gang), fixes=found)


def _without_lower(site: Site, gang: Gang, plans: Mapping[str, Plan], effort: Effort) -> Site:
    """What stood in the way of a gang was not what was planned at a lower priority."""
    holds = tuple(one for one in site.holds if one.owner not in plans or one.priority >= gang.priority)
    rest = Site(site.trays, holds)
    return site if try_gang(rest, gang, effort) is not None else rest
