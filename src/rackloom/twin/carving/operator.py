"""The operator of a simulated site: pauses a domain, cordons or drains a tray, and ends it after a while."""

import asyncio
import math
import random
from collections.abc import Callable
from typing import Any

import msgspec

from rackloom.twin.carving.book import Book
from rackloom.twin.carving.tenants import Answered, Broken
from rackloom.twin.virtual.plane import SimPlane
from rackloom.twin.virtual.world import SimRack, SimWorld

ORG = "landlord"
DONE_OR_NEVER_BEGUN = (200, 201, 409)
ATTEMPTS = 60
TRY_AGAIN = 5.0
"""Seconds until what was not answered, or not possible yet, is asked for again."""


class Operator:
    """One step at a time, each with a reason. What is taken back is asked for until it is."""

    def __init__(
        self,
        token: str,
        world: SimWorld,
        plane: SimPlane,
        book: Book,
        rng: random.Random,
        answered: Answered,
    ) -> None:
        self.world = world
        self.plane = plane
        self.book = book
        self.rng = rng
        self.operations = 0
        self._token = token
        self._answered = answered

    async def work(self, until: float, think: float) -> None:
        """Step after step, `think` seconds apart on average."""
        while True:
            await asyncio.sleep(self.rng.expovariate(1 / think))
            if self.plane.tell_now() >= until:
                return
            step = self.rng.choice((self._pause, self._cordon, self._drain, self._drain))
            await step()
            self.operations += 1

    async def _pause(self) -> None:
        rack = self.rng.choice(self.world.racks)
        if await self._ask(self._domain(rack, "pause")) == 200:
            self.book.paused[rack.name] = self.plane.tell_now()
        await self._for_a_while()
        self.book.paused.pop(rack.name, None)
        await self._until_done(lambda: self._domain(rack, "resume"))

    async def _cordon(self) -> None:
        machine = self._any_machine()
        await self._ask(f"machine/{machine}/cordon")
        await self._for_a_while()
        await self._until_done(lambda: f"machine/{machine}/uncordon")

    async def _drain(self) -> None:
        machine = self._any_machine()
        self.book.drained_until[machine] = math.inf
        await self._ask(f"machine/{machine}/drain")
        await self._for_a_while()
        await self._until_done(lambda: f"machine/{machine}/drain/end")
        self.book.drained_until[machine] = self.plane.tell_now()
        await self._until_done(lambda: f"machine/{machine}/uncordon")

    def _any_machine(self) -> str:
        return self.rng.choice(sorted(self.world.machines))

    def _domain(self, rack: SimRack, step: str) -> str:
        # The uuid may change at any time, and is asked for each time.
        return f"nvlink-domain/{rack.fabric.domain}/{step}"

    async def _for_a_while(self) -> None:
        await asyncio.sleep(self.rng.uniform(5, 60))

    async def _until_done(self, path: Callable[[], str]) -> None:
        for _ in range(ATTEMPTS):
            if await self._ask(path()) in DONE_OR_NEVER_BEGUN:
                return
            await asyncio.sleep(TRY_AGAIN)
        raise Broken(f"S10 {path()}: not possible in {ATTEMPTS} attempts")

    async def _ask(self, path: str) -> int | None:
        """The status of the answer; None when the connection was lost."""
        body = msgspec.json.encode({"reason": "simulated maintenance"})
        answer = await self.plane.call("POST", f"/v2/org/{ORG}/nico/{path}", self._token, body)
        status, content = answer if answer is not None else (0, b"")
        shown: Any = msgspec.json.decode(content) if content else None
        self._answered(ORG, "POST", path, status, shown)
        if status >= 500 or status in (400, 401, 403):
            raise Broken(f"S10 {path}: {status} {shown}")
        return status or None
