"""The result of a played scenario, as values and as a transcript. It imports nothing of a site."""

import textwrap
from typing import Literal

import msgspec

Speed = Literal["real", "virtual"]
"""In real time (over sockets), or in virtual time."""


class PlayedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step that was played. Times are seconds since the site first answered."""

    step: int
    began: float
    ended: float
    what: str
    ok: bool
    seen: str


class PlayedScenario(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario that was played. `ok` only if every step came about and every expectation was observed."""

    scenario: str
    title: str
    speed: Speed
    ok: bool
    expected: int
    """Expectations in the file."""
    observed: int
    """Of these, how many were seen."""
    lines: tuple[PlayedStep, ...]


# The transcript.


TRANSCRIPT_WIDTH = 110
_INDENT = " " * 17


def render_step(played: PlayedStep) -> str:
    """One step: when it began, how it went, and the observation."""
    mark = "ok    " if played.ok else "FAILED"
    seen = textwrap.fill(played.seen, TRANSCRIPT_WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return f"{played.began:8.1f}s {mark} {played.what}\n{seen}"


def render_summary(played: PlayedScenario) -> str:
    """The result of the whole scenario."""
    seconds = played.lines[-1].ended if played.lines else 0.0
    verdict = "as it must be" if played.ok else "NOT as it must be"
    return (
        f"{played.scenario}: {played.observed} of {played.expected} expectations observed"
        f" in {seconds:.1f} s of {played.speed} time: {verdict}"
    )
