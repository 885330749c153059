"""Bugs in the times and places of passes over a domain."""

import asyncio
from typing import Any

import pytest
from tests.simulation.carving.run import LoadPlan as SimPlan
from tests.simulation.planted.plans import BUSY, CALM, DARK, PROMPT, WATCHFUL, Bug

from rackloom.carve.partitions import intent
from rackloom.carve.reconcile import domain_pass, loop


def one_domain_is_skipped(patch: pytest.MonkeyPatch) -> None:
    run = domain_pass.DomainPass.run
    first: list[str] = []

    async def early(self: Any) -> bool:
        first.append(self.endpoint.url)
        return await run(self) if self.endpoint.url == min(first) else True

    patch.setattr(domain_pass.DomainPass, "run", early)


def wake_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loop.Reconciler, "wake", lambda *_: None)


def wake_cleared_after_the_pass(patch: pytest.MonkeyPatch) -> None:
    pass_ = loop.EndpointLoop._pass

    async def deaf(self: Any) -> bool:
        settled = await pass_(self)
        self.woken.clear()
        return settled

    patch.setattr(loop.EndpointLoop, "_pass", deaf)
    wait = loop.EndpointLoop._wait

    async def sleepy(self: Any, seconds: float) -> None:
        await asyncio.sleep(0.5)  # "let things calm down first"
        self.woken.clear()
        await wait(self, max(seconds, 60.0))

    patch.setattr(loop.EndpointLoop, "_wait", sleepy)


def one_slow_domain_holds_up_the_others(patch: pytest.MonkeyPatch) -> None:
    run = domain_pass.DomainPass.run
    gates: dict[Any, asyncio.Lock] = {}

    async def in_turn(self: Any) -> bool:
        async with gates.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            return await run(self)

    patch.setattr(domain_pass.DomainPass, "run", in_turn)


def pause_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(intent, "pause_reason", lambda *_: None)


BUGS: dict[Bug, SimPlan] = {
    one_domain_is_skipped: CALM,
    wake_lost: PROMPT,
    wake_cleared_after_the_pass: BUSY,
    one_slow_domain_holds_up_the_others: DARK,
    pause_ignored: WATCHFUL,
}
