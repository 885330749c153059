"""A played scenario for people: one step after another, with its time and what was observed."""

import textwrap

from rackloom.twin.scenario.player import Line, Played

WIDTH = 110
_INDENT = " " * 17


def line(played: Line) -> str:
    """One step: when it began, how it went, what was seen."""
    mark = "ok    " if played.ok else "FAILED"
    seen = textwrap.fill(played.seen, WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return f"{played.began:8.1f}s {mark} {played.what}\n{seen}"


def summary(played: Played) -> str:
    """What came of it all."""
    seconds = played.lines[-1].ended if played.lines else 0.0
    verdict = "as it must be" if played.ok else "NOT as it must be"
    return (
        f"{played.scenario}: {played.observed} of {played.expected} expectations observed"
        f" in {seconds:.1f} s of {played.speed} time: {verdict}"
    )
