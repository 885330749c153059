"""What `rackloom place` answers, and how it reads."""

from collections.abc import Iterator, Sequence

import msgspec

from rackloom.claim.place.refusal.moves import Move, listed
from rackloom.claim.place.values import Hole, Plan
from rackloom.cli.output import columns


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one job."""

    job: str
    plan: Plan | None
    blocked: str | None = None
    fixes: tuple[str, ...] = ()
    """Nearest first; each was planned."""
    notes: tuple[str, ...] = ()


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """What segments of one size use of a clique."""

    trays: int
    outside: int
    """Trays of a clique that is whole which no segment takes."""
    usable: float
    """Share (0 to 1) of all trays that whole segments use, with some of them down."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What is printed."""

    moves: tuple[Move, ...]
    """What has to move first."""
    jobs: tuple[Answer, ...]
    segments: tuple[Segment, ...] = ()
    """Where their price was asked for."""


def page(report: Report, *, seats: bool = True) -> str:
    """Moves first, then each job: where it goes and why, or what blocks it. `seats`: tray by tray."""
    parts = ["\n".join(_move(move) for move in report.moves)] if report.moves else []
    parts += [_together(report.jobs)] if len(report.jobs) > 1 else []
    parts += ["\n".join(_job(one, seats)) for one in report.jobs]
    parts += [columns(("SEGMENT", "OUTSIDE", "USABLE"), map(_segment, report.segments))] * bool(
        report.segments
    )
    return "\n\n".join(parts) or "nothing has to move"


def _move(move: Move) -> str:
    """What it costs and what it opens."""
    gain = move.gain()
    return f"first {move.told()}: {gain}" if gain else f"first {move.told()}"


def _segment(one: Segment) -> tuple[str, str, str]:
    return str(one.trays), str(one.outside), f"{one.usable:.1%}"


def _together(jobs: Sequence[Answer]) -> str:
    """How many of several jobs fit beside each other."""
    plans = [one.plan for one in jobs if one.plan is not None]
    refused = listed([one.job for one in jobs if one.plan is None], most=8)
    if not refused:
        return f"{len(jobs)} jobs fit together"
    return f"{len(plans)} of {len(jobs)} jobs fit together; refused: {refused}"


def _job(one: Answer, seats: bool) -> Iterator[str]:
    if one.plan is None:
        yield f"refused: {one.blocked}"
        yield f"nearest fix: {one.fixes[0] if one.fixes else 'none was found'}"
        yield from (f"or: {fix}" for fix in one.fixes[1:])
        return
    yield f"{one.job}: {one.plan.reason}"
    if seats:
        yield columns(("GROUP", "MEMBERS", "TRAY"), _rows(one.plan))
    if one.plan.spares:
        yield f"spare trays: {', '.join(one.plan.spares)}"
    if one.plan.price:
        yield f"price: {', '.join(_hole(hole) for hole in one.plan.price)}"
    yield from (f"note: {note}" for note in one.notes)


def _rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Members on one tray are one row."""
    seats: dict[tuple[str, str], list[int]] = {}
    for seat in plan.seats:
        seats.setdefault((seat.group, seat.tray), []).append(seat.member)
    for (group, tray), members in seats.items():
        yield group, listed([str(member) for member in members], most=8), tray


def _hole(hole: Hole) -> str:
    return f"{hole.before - hole.after} fewer of {hole.trays} trays ({hole.before} -> {hole.after})"
