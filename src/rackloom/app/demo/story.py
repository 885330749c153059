"""Steps of the demonstration: run in order, timed, and verified by their observations.

A step returns the evidence that it saw, or raises `NotObserved` with the contrary evidence. Any other error
fails the step too. After a failure, steps that build on it are reported as not attempted. A step that showed
less than its name promises, because something is missing here, is degraded: its evidence gives the reason
and the remedy. `wait_until` polls the cluster until an observation holds, for a minute at most.

`example_directory` finds the manifests under examples/.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from rackloom.runtime.shipped_files import shipped_path

# Example manifests.


def example_directory(name: str) -> Path:
    """The directory of one example."""
    return shipped_path("examples") / name


# Steps and their report.


Evidence = dict[str, Any]
DEGRADED = "degraded"
"""The key of evidence for the part that a step could not show, with the reason."""


class NotObserved(Exception):
    """The effect of a step was not observed. Carries the evidence that was seen instead."""

    def __init__(self, reason: str, **evidence: Any) -> None:
        super().__init__(reason)
        self.evidence: Evidence = {"reason": reason, **evidence}


class DemoStep(msgspec.Struct, frozen=True):
    """One step of the story. `seconds` is wall time."""

    name: str
    ok: bool
    """Whether its effect was verified. Also true of a degraded step."""
    degraded: str | None
    """The effects that a verified step could not show here, with the reason, or None."""
    seconds: float
    evidence: Evidence


class DemoReport(msgspec.Struct, frozen=True):
    """The whole story. It is ok only if every step was verified by observation."""

    ok: bool
    degraded: bool
    """Whether a step could not show all that it should."""
    steps: tuple[DemoStep, ...]
    doctor: str
    """The last line of the doctor at the end, when all is released."""


def step_mark(step: DemoStep) -> str:
    """The word in front of a step that is printed, padded."""
    return "FAILED" if not step.ok else "ok    " if step.degraded is None else DEGRADED


class DemoStory:
    """Runs steps one after another. After a step fails, those that need it are not attempted."""

    def __init__(self, report: Callable[[DemoStep], None]) -> None:
        self.steps: list[DemoStep] = []
        self._report = report

    @property
    def holds(self) -> bool:
        """Whether every step so far was verified."""
        return all(step.ok for step in self.steps)

    async def step(self, name: str, act: Callable[[], Awaitable[Evidence]]) -> None:
        """Run `act`, which returns its observation or raises."""
        began = time.perf_counter()
        try:
            ok, evidence = True, await act()
        except NotObserved as missing:
            ok, evidence = False, missing.evidence
        except Exception as error:
            ok, evidence = False, {"reason": f"{type(error).__name__}: {error}"}
        less = evidence.pop(DEGRADED, None) if ok else None
        step = DemoStep(name, ok, less, round(time.perf_counter() - began, 3), evidence)
        self.steps.append(step)
        self._report(step)

    async def step_if_holding(self, name: str, act: Callable[[], Awaitable[Evidence]]) -> None:
        """A step that needs all steps before it: not attempted once one of them has failed."""
        await self.step(name, act if self.holds else _not_attempted)

    def report(self, doctor: str) -> DemoReport:
        """The story so far, with the last line of the doctor at its end."""
        degraded = any(step.degraded is not None for step in self.steps)
        return DemoReport(self.holds, degraded, tuple(self.steps), doctor)


async def _not_attempted() -> Evidence:
    raise NotObserved("not attempted: an earlier step failed")


# Waiting for an observation.


OBSERVATION_SECONDS = 60.0
"""Seconds until something in the cluster must have been seen."""
_POLL_SECONDS = 0.1


async def wait_until(
    look: Callable[[], Awaitable[Any]],
    complaint: str,
    seconds: float = OBSERVATION_SECONDS,
    pause: float = _POLL_SECONDS,
) -> Any:
    """The first true result of `look`, called after each pause. Raises NotObserved after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (seen := await look()):
        if time.monotonic() > deadline:
            raise NotObserved(f"{complaint} within {seconds:.0f} s")
        await asyncio.sleep(pause)
    return seen
