"""Rackloom's controllers in the twin: killed where they stand, begun anew, and in two places at once."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rackloom.claim.kube.api import KubeApi
from rackloom.twin.claims.life import Life
from rackloom.twin.claims.steps import Steps, stepped

Lead = Callable[[KubeApi], Coroutine[Any, Any, None]]
"""Controls until it is cancelled."""
RESTART_SECONDS = 1.0


class OurControllers:
    """One life of the controllers after the other. `api` is the server as they ask it."""

    def __init__(self, lead: Lead, api: KubeApi) -> None:
        self.ended = 0
        """Lives that were ended."""
        self._lead = lead
        self._api = api
        self._steps = Steps(self._strike)
        self._life = Life("controllers")
        self._term: asyncio.Task[None] | None = None
        self._down = RESTART_SECONDS
        self._point = self._lives = self._due = 0
        self._second: asyncio.Task[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Control until cancelled. Raises what controlling fails with."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            await self._keep()

    async def kill(self, down: float) -> None:
        """They die now; `down` seconds later others take over, who know what the API server knows."""
        self._down = down
        self._life.kill()
        if self._term is not None:
            await asyncio.wait({self._term})

    def die(self, point: int, lives: int) -> None:
        """Let this life, and those after it, end at their `point`-th step from here: `lives` in all.

        Steps are counted before each write is sent, and after it was carried out.
        """
        self._point, self._lives, self._down = point, lives, RESTART_SECONDS
        self._set_fuse()

    def double(self) -> None:
        """Others begin beside these, who believe that they lead."""
        if self._tasks is not None and self._second is None:
            self._second = self._tasks.create_task(OurControllers(self._lead, self._api).run())

    async def single(self) -> None:
        """The others end."""
        if self._second is not None:
            self._second.cancel()
            await asyncio.wait({self._second})
            self._second = None

    async def _keep(self) -> None:
        while True:
            self._life = Life("controllers")
            self._set_fuse()
            self._term = self._life.spawn(self._lead(stepped(self._api, self._life, self._steps)))
            try:
                await asyncio.wait({self._term})
                if self._life.is_alive:
                    return self._term.result()
            finally:
                self._life.kill()
            self.ended += 1
            await asyncio.sleep(self._down)

    def _set_fuse(self) -> None:
        self._due = self._steps.taken + self._point if self._lives else 0

    def _strike(self, step: int, _: str) -> None:
        if step == self._due:
            self._lives -= 1
            self._life.kill()
