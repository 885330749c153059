"""Playing a scenario: its steps in order of time, each with its observation.

The player waits for a step's time, carries it out, and repeats an expectation until it holds or its
time is over. The last check begins after the deadline, so that a slow check is not missed. It stops at
the first step that does not come about. After the last step `require_end` checks that every requested
fault has struck something.

`play_while_running` ends the play when the site under it ends. The transcript is in `played`.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from rackloom.claim.kube.api import KubeError
from rackloom.errors import Refused
from rackloom.lab.scenario.every_layer import require_end
from rackloom.lab.scenario.model import Action, Expectation, NotObserved, Scenario, Step
from rackloom.lab.scenario.played import PlayedScenario, PlayedStep, Speed
from rackloom.lab.scenario.stage import Stage

# The player.


POLL_SECONDS: dict[Speed, float] = {"real": 0.05, "virtual": 0.5}
"""Seconds between two checks of an expectation."""


async def play_steps(
    scenario: Scenario, speed: Speed, stage: Stage, report: Callable[[PlayedStep], None]
) -> PlayedScenario:
    """Play every step on the stage, up to the first that does not come about.

    An end that does not come about (a fault that struck nothing) has a separate line.
    """
    player = StepPlayer(speed, stage)
    lines: list[PlayedStep] = []
    for number, step in enumerate(scenario.steps, 1):
        lines.append(await player.play(number, step))
        report(lines[-1])
        if not lines[-1].ok:
            break
    else:
        if (end := player.play_end(len(lines) + 1)) is not None:
            lines.append(end)
            report(end)
    return PlayedScenario(
        scenario=scenario.name,
        title=scenario.title,
        speed=speed,
        ok=len(lines) == len(scenario.steps) and all(line.ok for line in lines),
        expected=sum(isinstance(step, Expectation) for step in scenario.steps),
        observed=sum(
            line.ok and isinstance(step, Expectation)
            for line, step in zip(lines, scenario.steps, strict=False)
        ),
        lines=tuple(lines),
    )


async def play_while_running(
    work: "asyncio.Task[None]", playing: Coroutine[Any, Any, PlayedScenario]
) -> PlayedScenario:
    """Play while `work` runs the site. Raises the error that ends `work`: nothing can be observed then."""
    task = asyncio.create_task(playing)
    await asyncio.wait((task, work), return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        work.result()
        raise RuntimeError("what the scenario is played on has ended")
    return task.result()


class StepPlayer:
    """Plays steps on a stage. Times count from the moment at which it is made."""

    def __init__(self, speed: Speed, stage: Stage) -> None:
        self._pause = POLL_SECONDS[speed]
        self._stage = stage
        self._start = asyncio.get_running_loop().time()

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._start

    async def play(self, number: int, step: Step) -> PlayedStep:
        """Wait for the step's time, and play it."""
        if step.at is not None:
            await asyncio.sleep(max(0.0, step.at - self._now()))
        began = self._now()
        # From here on `previous` is fixed: all checks of this step compare with the same values.
        self._stage.begin_step()
        try:
            ok, seen = True, await self._come_about(step)
        except NotObserved as missing:
            ok, seen = False, str(missing)
        except Refused as refused:
            ok, seen = False, f"refused: {refused}"
        return self._line(number, began, describe_step(step), ok=ok, seen=seen)

    def play_end(self, number: int) -> PlayedStep | None:
        """A line for an end that does not come about, or None if it does."""
        try:
            require_end(self._stage)
        except NotObserved as missing:
            return self._line(number, self._now(), "the end", ok=False, seen=str(missing))
        return None

    def _line(self, number: int, began: float, what: str, *, ok: bool, seen: str) -> PlayedStep:
        ended = round(self._now(), 3)
        return PlayedStep(step=number, began=round(began, 3), ended=ended, what=what, ok=ok, seen=seen)

    async def _come_about(self, step: Step) -> str:
        if not isinstance(step, Expectation):
            return await self._run(step)
        seen = await self._until_observed(step)
        return await self._while_it_stays(step, seen) if step.stays else seen

    async def _until_observed(self, step: Expectation) -> str:
        deadline = self._now() + step.within
        while True:
            # The last check begins after the deadline, so that a slow one is not missed.
            is_last = self._now() >= deadline
            try:
                return await self._run(step)
            except NotObserved:
                if is_last:
                    raise
            await asyncio.sleep(self._pause)

    async def _while_it_stays(self, step: Expectation, seen: str) -> str:
        until = self._now() + step.stays
        while self._now() < until:
            await asyncio.sleep(self._pause)
            try:
                seen = await self._run(step)
            except NotObserved as missing:
                raise NotObserved(f"it did not stay so for {step.stays:g} s: {missing}") from missing
        return f"{seen}; for {step.stays:g} s"

    async def _run(self, step: Step) -> str:
        try:
            return await step.run(self._stage)
        except KubeError as error:
            raise NotObserved(f"the API server says {error.code} {error.reason}: {error.message}") from error


def describe_step(step: Step) -> str:
    """A step in one line: its kind, and the keys that its file gives."""
    shown = msgspec.to_builtins(step)
    kind = shown.pop("do" if isinstance(step, Action) else "expect")
    unsaid = {field.encode_name: field.default for field in msgspec.structs.fields(step)}
    fields = [f"{key} {_one_line(value)}" for key, value in shown.items() if value != unsaid[key]]
    verb = "" if isinstance(step, Action) else "expect "
    return " ".join([f"{verb}{kind}", *fields])


def _one_line(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(_one_line, value))
    first, *others = str(value).strip().splitlines() or [""]
    return f"{first}..." if others else first
