"""Rackloom's controllers in the twin, which can be killed where they stand and started anew."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class OurControllers:
    """`lead` controls until it is cancelled; it is begun again after each death."""

    def __init__(self, lead: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._lead = lead
        self._term: asyncio.Task[None] | None = None
        self._down = 0.0

    async def run(self) -> None:
        """Control until cancelled. Raises what controlling fails with."""
        while True:
            self._term = asyncio.create_task(self._lead())
            try:
                await asyncio.wait({self._term})
            finally:
                self._term.cancel()
            if not self._term.cancelled():
                return self._term.result()
            await asyncio.sleep(self._down)

    async def kill(self, down: float) -> None:
        """They die now; `down` seconds later others take over, who know what the API server knows."""
        self._down = down
        if self._term is not None:
            self._term.cancel()
            await asyncio.wait({self._term})
