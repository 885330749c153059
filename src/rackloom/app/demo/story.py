"""How a story is told: steps in order, each timed, each ending in what was seen."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

Evidence = dict[str, Any]


class NotSeen(Exception):
    """A step was asked for and not observed to have happened; carries what was seen instead."""

    def __init__(self, reason: str, **evidence: Any) -> None:
        super().__init__(reason)
        self.evidence: Evidence = {"reason": reason, **evidence}


class Step(msgspec.Struct, frozen=True):
    """One step of the story; `seconds` is wall time."""

    name: str
    ok: bool
    seconds: float
    evidence: Evidence


class Report(msgspec.Struct, frozen=True):
    """The whole story; ok only if every step was verified by observation."""

    ok: bool
    steps: tuple[Step, ...]


class Story:
    """Runs steps one after another; after one fails, those that build on it are not pretended."""

    def __init__(self, tell: Callable[[Step], None]) -> None:
        self.steps: list[Step] = []
        self._tell = tell

    @property
    def holds(self) -> bool:
        """Whether every step so far was verified."""
        return all(step.ok for step in self.steps)

    async def step(self, name: str, act: Callable[[], Awaitable[Evidence]]) -> None:
        """Run `act`, which returns what it observed or raises."""
        began = time.perf_counter()
        try:
            ok, evidence = True, await act()
        except NotSeen as missing:
            ok, evidence = False, missing.evidence
        except Exception as error:
            ok, evidence = False, {"reason": f"{type(error).__name__}: {error}"}
        step = Step(name, ok, round(time.perf_counter() - began, 3), evidence)
        self.steps.append(step)
        self._tell(step)

    async def step_if_holding(self, name: str, act: Callable[[], Awaitable[Evidence]]) -> None:
        """A step that stands on all before it: not attempted, and so not verified, once one failed."""
        await self.step(name, act if self.holds else _not_attempted)

    def report(self) -> Report:
        """The story so far."""
        return Report(self.holds, tuple(self.steps))


async def _not_attempted() -> Evidence:
    raise NotSeen("not attempted: an earlier step failed")
