"""What `rackloom place` prints: the report, prices of segment sizes, objects for schedulers.

The report starts with the moves that come first, then each job: where it goes and why, or what blocks it
with the nearest fixes. The price of a segment size is the trays of a clique that no segment takes, and
the share of trays that whole segments use with some trays down. A segment that no group fills, or that is
larger than any empty clique, is refused. Rendered jobs are printed with the other objects of their files,
those that several jobs need once.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from rackloom.claim.manifests.documents import Document
from rackloom.cli.common import columns
from rackloom.core.place.job_moves import JobMove
from rackloom.core.place.jobs import Job
from rackloom.core.place.placement_values import FreeRegionCount, Gang, GangPlan, PlacementSite, list_names
from rackloom.core.place.plan_notes import usable_share
from rackloom.errors import Refused

if TYPE_CHECKING:
    from rackloom.core.place.rendering import RenderedJob


# The report.


class JobAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one job, or what blocks it."""

    job: str
    plan: GangPlan | None
    blocked: str | None = None
    fixes: tuple[str, ...] = ()
    """Nearest first; each was planned."""
    notes: tuple[str, ...] = ()


class SegmentPrice(msgspec.Struct, frozen=True, kw_only=True):
    """What segments of one size use of a clique."""

    trays: int
    outside: int
    """Trays of a clique that is whole which no segment takes."""
    usable: float
    """Share (0 to 1) of all trays that whole segments use, with some of them down."""


class PlacementReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that is printed."""

    moves: tuple[JobMove, ...]
    """What has to move first."""
    jobs: tuple[JobAnswer, ...]
    segments: tuple[SegmentPrice, ...] = ()
    """Only with --down."""


def report_page(report: PlacementReport, *, seats: bool = True) -> str:
    """Moves first, then each job: where it goes and why, or what blocks it. `seats`: tray by tray."""
    parts = ["\n".join(_move_line(move) for move in report.moves)] if report.moves else []
    parts += [_jobs_line(report.jobs)] if len(report.jobs) > 1 else []
    parts += ["\n".join(_job_lines(job, seats)) for job in report.jobs]
    parts += [columns(("SEGMENT", "OUTSIDE", "USABLE"), map(_segment_row, report.segments))] * bool(
        report.segments
    )
    return "\n\n".join(parts) or "nothing has to move"


def _move_line(move: JobMove) -> str:
    """What it costs and what it opens."""
    gain = move.gain()
    return f"first {move.describe()}: {gain}" if gain else f"first {move.describe()}"


def _segment_row(segment_price: SegmentPrice) -> tuple[str, str, str]:
    return str(segment_price.trays), str(segment_price.outside), f"{segment_price.usable:.1%}"


def _jobs_line(jobs: Sequence[JobAnswer]) -> str:
    """How many of several jobs fit beside each other."""
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


# Segment sizes.


def segment_prices(site: PlacementSite, down: float) -> tuple[SegmentPrice, ...]:
    """Every size up to the largest clique of the site, in cliques of that size."""
    trays = max(Counter(tray.sharing for tray in site.trays).values(), default=0)
    return tuple(
        SegmentPrice(trays=size, outside=trays % size, usable=usable_share(trays, size, down))
        for size in range(1, trays + 1)
    )


def check_segment(gang: Gang, site: PlacementSite) -> None:
    """Refuse a segment that no group fills, or that is larger than any clique when it is empty."""
    serious = [group for group in gang.groups if not group.is_helper]
    if gang.segment is None or not serious:
        return
    largest = max(serious, key=lambda group: group.members)
    if gang.segment > largest.members:
        raise Refused(
            f"{gang.name}: a segment of {gang.segment} members, and {largest.name} has {largest.members}",
            nearest_fix="leave --segment out: all of them share a clique then",
        )
    room = Counter[str]()
    for tray in site.trays:
        room[tray.sharing] += tray.gpus // largest.gpus if largest.gpus else gang.segment
    most = max(room.values(), default=0)
    if gang.segment > most:
        raise Refused(
            f"{gang.name}: a segment of {gang.segment} {largest.name}, and the largest clique takes {most}"
            " when it is empty",
            nearest_fix=f"use --segment {most} or less" if most else "name a site with GPUs",
        )


# Rendered jobs.


_SITE_KINDS = ("Node", "Pod", "ResourceSlice")


def rendered_manifests(done: "Sequence[RenderedJob]", beside: Iterable[Any]) -> str:
    """Scripts first, then all objects, those that several jobs need once."""
    scripts = "\n".join(rendered.script for rendered in done if rendered.script)
    objects: list[Any] = []
    for value in (*beside, *(value for rendered in done for value in rendered.objects)):
        if value not in objects:
            objects.append(value)
    return scripts + "---\n".join(yaml.safe_dump(value, sort_keys=False) for value in objects)


def objects_beside(documents: Iterable[Document], jobs: Sequence[Job]) -> Iterator[dict[str, Any]]:
    """What the files have beside the jobs (claim templates, ComputeDomains), unless it describes the site."""
    placed = {id(value) for job in jobs for value in job.objects}
    for document in documents:
        if id(document.value) not in placed and not _is_site_object(document.value):
            yield document.value


def _is_site_object(value: dict[str, Any]) -> bool:
    allocated = (value.get("status") or {}).get("allocation")
    return value.get("kind") in _SITE_KINDS or (value.get("kind") == "ResourceClaim" and bool(allocated))
