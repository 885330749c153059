"""The work of `rackloom place`: read files and a site, plan (`core.place.site_planner`), print the report.

Templates that the jobs name and their files lack are read from the cluster. Jobs without device claims
never load the CEL library. The report starts with the necessary moves. Then it gives the trays of each job
and the reason, or its blockers and the nearest fixes. Rendered jobs are printed with the other objects of
their files. An object that several jobs need is printed once.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from msgspec.structs import replace

from rackloom.claim.manifests.documents import Document, read_documents
from rackloom.claim.manifests.read import manifests_of
from rackloom.cli.common import Format, columns, emit, note, progress, with_progress
from rackloom.cli.place_options import SiteParameters
from rackloom.cli.place_site import (
    TEMPLATE_KINDS,
    labels_of_served_pod_groups,
    priority_classes,
    read_cluster_objects,
    require_one_site,
    site_objects,
)
from rackloom.core.cluster.claims import is_allocated
from rackloom.core.cluster.jobs import Job, TemplateName, channel_templates, read_jobs
from rackloom.core.cluster.objects import list_names
from rackloom.core.cluster.trays import FreeRegionCount, GangPlan
from rackloom.core.cluster.workload_kinds import JOB_KINDS
from rackloom.core.place.job_moves import JobMove
from rackloom.core.place.kueue_topology import (
    TopologyAttempt,
    first_that_fits,
    shared_topology,
    topology_attempts,
)
from rackloom.core.place.site_planner import (
    JobAnswer,
    PlacementReport,
    PlanRequest,
    SegmentPrice,
    SitePlanner,
)
from rackloom.errors import Misuse, Refused


def answer_placement(
    files: Sequence[Path],
    source: SiteParameters,
    request: PlanRequest,
    target: str | None,
    output: Format,
) -> int:
    """Print the answer. Returns 1 if a job does not fit."""
    if request.down is not None and not 0 <= request.down < 1:
        raise Misuse(f"--down {request.down} is no share of trays", nearest_fix="0.01 is 1 %")
    require_one_site(source)
    if not files and not _is_about_trays(request):
        fix = "name it, as in: rackloom place job.yaml --profile gb200-nvl72"
        raise Misuse("no file with a job is named", nearest_fix=fix)
    with progress("reading the jobs"):
        documents = [document for path in files for document in read_documents(path)]
    jobs = read_jobs([document.value for document in documents], request.labels)
    if not jobs and not _is_about_trays(request):
        kinds = list_names(dict.fromkeys(str(document.value.get("kind")) for document in documents), most=8)
        raise Refused(
            f"there is no job in the files ({kinds or 'nothing'})",
            nearest_fix=f"name a manifest with {', '.join(JOB_KINDS)}",
        )
    with progress("reading the site"):
        if target == "podgroup":
            request = replace(request, labels=labels_of_served_pod_groups(source, request.labels))
        # True if a job claims by a template that none of its files contains.
        known = channel_templates([document.value for document in documents])
        known |= {
            (claim.metadata.namespace or "default", claim.metadata.name)
            for claim in manifests_of(documents).claims
        }
        cluster = read_cluster_objects(source, templates=_claims_devices(jobs, known))
    makers = [document for document in cluster.documents if document.value.get("kind") in TEMPLATE_KINDS]
    sources = [*makers, *documents]
    jobs = read_jobs([document.value for document in sources], request.labels) if makers else jobs
    channels = channel_templates([document.value for document in sources])
    with progress("looking at the trays"):
        found = site_objects(
            source,
            [*documents, *cluster.documents],
            request.labels,
            with_devices=_claims_devices(jobs, channels),
        )
        classes = priority_classes([*cluster.documents, *documents], from_cluster=cluster.has_classes)
        claims = manifests_of(sources).claims

    def plan(attempt: TopologyAttempt) -> tuple[SitePlanner, PlacementReport]:
        with progress("looking at the trays"):
            state = replace(found.state, nodes=tuple(filter(attempt.takes, found.state.nodes)))
            planner = SitePlanner(replace(found, state=state), claims, channels, classes, attempt.request)
        return planner, planner.report(jobs, each=with_progress)

    attempts = topology_attempts(shared_topology(jobs, request), request, found.state.nodes)
    _, planner, report = first_that_fits(attempts, plan)
    refused = [job for job in report.jobs if job.plan is None]
    if target is not None and report.jobs and not refused:
        others = [] if target == "slurm" else objects_beside(documents, jobs)
        # Print scripts first, then all objects. Print an object that several jobs need once.
        done = planner.rendered(target)
        scripts = "\n".join(rendered.script for rendered in done if rendered.script)
        objects: list[Any] = []
        for value in (*others, *(value for rendered in done for value in rendered.objects)):
            if value not in objects:
                objects.append(value)
        print(scripts + "---\n".join(yaml.safe_dump(value, sort_keys=False) for value in objects), end="")
        note(report_page(report, seats=False))
    else:
        emit(report, output, lambda: report_page(report))
    return int(bool(refused))


def _is_about_trays(request: PlanRequest) -> bool:
    """True if there is something to plan without a job."""
    return bool(request.drain or request.defrag or request.down is not None)


def _claims_devices(jobs: Sequence[Job], channels: Collection[TemplateName]) -> bool:
    """True if a member claims a device other than a channel. Each tray is known to have one channel."""
    return any(
        (group.identity.namespace, name) not in channels
        for job in jobs
        for group in job.groups
        for name in (*group.need.templates, *group.need.claims)
    )


# The report.


def report_page(report: PlacementReport, *, seats: bool = True) -> str:
    """The moves, then each job with its trays and the reason, or its blockers. `seats` adds each tray."""
    parts = ["\n".join(_move_line(move) for move in report.moves)] if report.moves else []
    parts += [_jobs_line(report.jobs)] if len(report.jobs) > 1 else []
    parts += ["\n".join(_job_lines(job, seats)) for job in report.jobs]
    parts += [columns(("SEGMENT", "OUTSIDE", "USABLE"), map(_segment_row, report.segments))] * bool(
        report.segments
    )
    return "\n\n".join(parts) or "nothing has to move"


def _move_line(move: JobMove) -> str:
    """A move, with its cost and gain."""
    gain = move.gain()
    return f"first {move.describe()}: {gain}" if gain else f"first {move.describe()}"


def _segment_row(segment_price: SegmentPrice) -> tuple[str, str, str]:
    return str(segment_price.trays), str(segment_price.outside), f"{segment_price.usable:.1%}"


def _jobs_line(jobs: Sequence[JobAnswer]) -> str:
    """How many of several jobs fit together."""
    plans = [job.plan for job in jobs if job.plan is not None]
    refused = list_names([job.job for job in jobs if job.plan is None], most=8)
    if not refused:
        return f"{len(jobs)} jobs fit together"
    return f"{len(plans)} of {len(jobs)} jobs fit together; refused: {refused}"


def _job_lines(job_answer: JobAnswer, seats: bool) -> Iterator[str]:
    if job_answer.plan is None:
        yield f"refused: {job_answer.blocked}"
        yield f"nearest fix: {job_answer.fixes[0] if job_answer.fixes else 'none was found'}"
        yield from (f"or: {fix}" for fix in job_answer.fixes[1:])
        return
    yield f"{job_answer.job}: {job_answer.plan.reason}"
    if seats:
        yield columns(("GROUP", "MEMBERS", "TRAY"), _tray_rows(job_answer.plan))
    if job_answer.plan.spares:
        yield f"spare trays: {', '.join(job_answer.plan.spares)}"
    if job_answer.plan.price:
        yield f"price: {', '.join(_hole_text(hole) for hole in job_answer.plan.price)}"
    yield from (f"note: {note}" for note in job_answer.notes)


def _tray_rows(plan: GangPlan) -> Iterator[tuple[str, str, str]]:
    """One row for each tray, with its members."""
    seats: dict[tuple[str, str], list[int]] = {}
    for seat in plan.seats:
        seats.setdefault((seat.group, seat.tray), []).append(seat.member)
    for (group, tray), members in seats.items():
        yield group, list_names([str(member) for member in members], most=8), tray


def _hole_text(hole: FreeRegionCount) -> str:
    return f"{hole.before - hole.after} fewer of {hole.trays} trays ({hole.before} -> {hole.after})"


# Rendered jobs.


_SITE_KINDS = ("Node", "Pod", "ResourceSlice")


def objects_beside(documents: Iterable[Document], jobs: Sequence[Job]) -> Iterator[dict[str, Any]]:
    """The files' objects besides the jobs (claim templates, ComputeDomains), except those of the site."""
    placed = {id(value) for job in jobs for value in job.objects}
    for document in documents:
        if id(document.value) not in placed and not _is_site_object(document.value):
            yield document.value


def _is_site_object(value: dict[str, Any]) -> bool:
    return value.get("kind") in _SITE_KINDS or (value.get("kind") == "ResourceClaim" and is_allocated(value))
