"""The work of `rackloom place`: files and a site in, plans or refusals out."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec
import yaml

from rackloom.claim.allocate.objects import ResourceClaim
from rackloom.claim.manifests.documents import Document, read_documents
from rackloom.claim.manifests.read import gathered
from rackloom.claim.place.asks import claims_by_kind, gang_of
from rackloom.claim.place.defrag import defragmented, drained
from rackloom.claim.place.devices import Kinds
from rackloom.claim.place.fit import try_gang
from rackloom.claim.place.fixes import fixes
from rackloom.claim.place.jobs import KINDS, Job, channel_templates, jobs_of
from rackloom.claim.place.labels import Labels
from rackloom.claim.place.moves import Move, closed_to
from rackloom.claim.place.notes import notes_on
from rackloom.claim.place.observed import site_of
from rackloom.claim.place.pods import PodNeed
from rackloom.claim.place.render.targets import rendered
from rackloom.claim.place.reserve import reserved
from rackloom.claim.place.shortage import shortage
from rackloom.claim.place.values import Gang, Plan, Site
from rackloom.cli.output import Format, emit
from rackloom.cli.place_page import Answer, Report, page
from rackloom.cli.place_site import Found, Source, found_in
from rackloom.errors import Refused

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
    documents = [one for path in files for one in read_documents(path)]
    jobs = jobs_of([one.value for one in documents], asked.labels)
    if not jobs and not (asked.drain or asked.defrag):
        raise Refused("there is no job in the files", nearest_fix=f"name a manifest with {', '.join(KINDS)}")
    desk = Desk(documents, found_in(source, documents, asked.labels), asked)
    report = desk.report(jobs)
    refused = [one for one in report.jobs if one.plan is None]
    if target is not None and not refused:
        print(desk.rendering(target), end="")
    else:
        emit(report, output, lambda: page(report))
    return int(bool(refused))


class Desk:
    """A site on which jobs are placed one after another, highest priority first."""

    def __init__(self, documents: Sequence[Document], found: Found, asked: Asked) -> None:
        self._asked = asked
        self._found = found
        self._channels = channel_templates([one.value for one in documents])
        self._claims = {one.metadata.name: one for one in gathered(documents).claims}
        self._priorities = {
            one.value["metadata"]["name"]: int(one.value.get("value", 0))
            for one in documents
            if one.value.get("kind") == "PriorityClass"
        }
        pods = site_of(found.nodes, found.pods, asked.labels).holds
        self._holds = (*pods, *found.devices.holds(asked.labels))
        self._planned: list[tuple[Job, Gang, Plan, Site]] = []

    def report(self, jobs: Sequence[Job]) -> Report:
        """The moves that come first, then each job."""
        moves = self._rearranged()
        gangs = {job.name: self._gang(job) for job in jobs}
        by_priority = sorted(jobs, key=lambda job: -gangs[job.name].priority)
        return Report(moves=moves, jobs=tuple(self._placed(job, gangs[job.name]) for job in by_priority))

    def rendering(self, target: str) -> str:
        """The jobs that were placed, for a scheduler."""
        done = [rendered(target, *one, self._asked.labels) for one in self._planned]
        return "\n".join(one.script for one in done if one.script) + "---\n".join(
            yaml.safe_dump(value, sort_keys=False) for one in done for value in one.objects
        )

    def _rearranged(self) -> tuple[Move, ...]:
        site = self._site(None)
        moves: list[Move] = []
        for tray in self._asked.drain:
            step = drained(site, tray)
            site, moves = step.site, [*moves, *step.moves]
        if self._asked.defrag:
            step = defragmented(site)
            site, moves = step.site, [*moves, *step.moves]
        self._holds = site.holds
        return tuple(moves)

    def _placed(self, job: Job, gang: Gang) -> Answer:
        asked = self._asked
        site = self._with_rooms(self._site(_device_need(job)), self._kinds(job))
        site = closed_to(site, asked.drain, "drained")
        plan = try_gang(site, gang)
        if plan is None:
            found = tuple(one.text for one in islice(fixes(site, gang), FIXES))
            return Answer(job=job.name, plan=None, blocked=shortage(site, gang), fixes=found)
        self._holds = reserved(site, gang, plan).holds
        self._planned.append((job, gang, plan, site))
        notes = (*notes_on(job, gang, plan, site, asked.labels, asked.down), *self._kept_off(job, plan))
        return Answer(job=job.name, plan=plan, notes=notes)

    def _with_rooms(self, site: Site, kinds: Kinds) -> Site:
        if not kinds:
            return site
        # The CEL library takes longer to load than a plan without claims takes to make.
        from rackloom.claim.place.rooms import with_rooms

        return with_rooms(site, self._found.devices, kinds)

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
            self._kinds(job),
            asked.labels,
            priorities=self._priorities,
            segment=asked.segment,
            spares=asked.spares,
            exclusive=asked.exclusive,
            apart=asked.apart,
        )

    def _kinds(self, job: Job) -> dict[str, tuple[ResourceClaim, ...]]:
        return claims_by_kind(job, self._claims, self._channels)

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


def _device_need(job: Job) -> PodNeed | None:
    """Of the members for whom the trays are chosen."""
    return next((team.need for team in job.teams if team.need.takes_devices), None)
