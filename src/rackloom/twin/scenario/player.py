"""Playing a scenario: its steps in order of time, each ending in what was observed."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from rackloom.errors import Refused
from rackloom.twin.scenario.stage import NotSeen
from rackloom.twin.scenario.values import Action, End, Expectation, Scenario, Speed, Step

LOOK_AGAIN: dict[Speed, float] = {"real": 0.05, "virtual": 0.5}
"""Seconds between two looks at the same thing."""

Do = Callable[[Any], Awaitable[str]]
"""Carries out a step, or looks once; returns what was observed, or raises NotSeen."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One step that was played. Times are seconds since the site first answered."""

    step: int
    began: float
    ended: float
    what: str
    ok: bool
    seen: str


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario that was played; ok only if every step came about and every expectation was observed."""

    scenario: str
    title: str
    speed: Speed
    ok: bool
    expected: int
    """Expectations in the file."""
    observed: int
    """Of these, how many were seen."""
    lines: tuple[Line, ...]


async def play(
    scenario: Scenario, speed: Speed, hands: dict[type[Step], Do], tell: Callable[[Line], None]
) -> Played:
    """Play every step with its hand, up to the first that does not come about.

    An end that does not come about (a fault that struck nothing) has a line of its own.
    """
    player = _Player(LOOK_AGAIN[speed], hands)
    lines: list[Line] = []
    for number, step in enumerate(scenario.steps, 1):
        lines.append(await player.play(number, step))
        tell(lines[-1])
        if not lines[-1].ok:
            break
    else:
        end = await player.play(len(lines) + 1, End())
        if not end.ok:
            lines.append(end)
            tell(end)
    expected = sum(isinstance(step, Expectation) for step in scenario.steps)
    observed = sum(
        line.ok and isinstance(step, Expectation) for line, step in zip(lines, scenario.steps, strict=False)
    )
    return Played(
        scenario=scenario.name,
        title=scenario.title,
        speed=speed,
        ok=len(lines) == len(scenario.steps) and all(line.ok for line in lines),
        expected=expected,
        observed=observed,
        lines=tuple(lines),
    )


async def while_working(work: "asyncio.Task[None]", playing: Coroutine[Any, Any, Played]) -> Played:
    """Play beside what the site runs on. Raises what ends that: nothing is observed of a stage that fell."""
    task = asyncio.create_task(playing)
    await asyncio.wait((task, work), return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        work.result()
        raise RuntimeError("what the scenario is played on has ended")
    return task.result()


class _Player:
    def __init__(self, look_again: float, hands: dict[type[Step], Do]) -> None:
        self._look_again = look_again
        self._hands = hands
        self._start = asyncio.get_running_loop().time()

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self._start

    async def play(self, number: int, step: Step) -> Line:
        if step.at is not None:
            await asyncio.sleep(max(0.0, step.at - self._now()))
        began = self._now()
        try:
            ok, seen = True, await self._come_about(step)
        except NotSeen as missing:
            ok, seen = False, str(missing)
        except Refused as refused:
            ok, seen = False, f"refused: {refused}"
        return Line(
            step=number,
            began=round(began, 3),
            ended=round(self._now(), 3),
            what=told(step),
            ok=ok,
            seen=seen,
        )

    async def _come_about(self, step: Step) -> str:
        hand = self._hands[type(step)]
        if not isinstance(step, Expectation):
            return await hand(step)
        seen = await self._until(lambda: hand(step), self._now() + step.within)
        return await self._stays(lambda: hand(step), seen, step.stays) if step.stays else seen

    async def _until(self, look: Callable[[], Awaitable[str]], deadline: float) -> str:
        """Look until it is seen. The last look begins after the deadline: a slow one is not missed."""
        while True:
            late = self._now() >= deadline
            try:
                return await look()
            except NotSeen:
                if late:
                    raise
            await asyncio.sleep(self._look_again)

    async def _stays(self, look: Callable[[], Awaitable[str]], seen: str, seconds: float) -> str:
        until = self._now() + seconds
        while self._now() < until:
            await asyncio.sleep(self._look_again)
            try:
                seen = await look()
            except NotSeen as missing:
                raise NotSeen(f"it did not stay so for {seconds:g} s: {missing}") from missing
        return f"{seen}; for {seconds:g} s"


def told(step: Step) -> str:
    """A step in one line: its kind, and what its file says of it."""
    if isinstance(step, End):
        return "the end"
    shown = msgspec.to_builtins(step)
    kind = shown.pop("do" if isinstance(step, Action) else "expect")
    unsaid = {field.encode_name: field.default for field in msgspec.structs.fields(step)}
    fields = [f"{key} {_flat(value)}" for key, value in shown.items() if value != unsaid[key]]
    verb = "" if isinstance(step, Action) else "expect "
    return " ".join([f"{verb}{kind}", *fields])


def _flat(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(_flat, value))
    first, *others = str(value).strip().splitlines() or [""]
    return f"{first}..." if others else first
