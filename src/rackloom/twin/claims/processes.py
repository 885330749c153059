"""Processes that are kept: whoever ends or is killed comes back, as kubelet restarts a container."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rackloom.twin.claims.life import Life

GRACE = 30.0
"""Seconds until a process that does not end when it is asked to is killed (terminationGracePeriodSeconds)."""
Serve = Callable[[Life], Coroutine[Any, Any, None]]


class Kept:
    """One process after the other under one name. `life` is the newest.

    `may_fail` are the errors with which it may end by itself, to be started again after `restart_s` seconds;
    any other is told to `defects`.
    """

    def __init__(
        self,
        life: Life,
        serve: Serve,
        restart_s: float,
        defects: list[str],
        may_fail: tuple[type[Exception], ...] = (),
    ) -> None:
        self.life = life
        self._serve = serve
        self._defects = defects
        self._restart_s = restart_s
        self._may_fail = may_fail

    async def run(self) -> None:
        """Keep it until cancelled, which lets it take leave."""
        while True:
            task = self.life.spawn(self._serve(self.life))
            try:
                await asyncio.wait({task})
            finally:
                task.cancel()
                await asyncio.wait({task}, timeout=GRACE)
                if not task.done():
                    self.life.kill()
                    await asyncio.wait({task})
            self._judge(task)
            self.life.kill()
            await asyncio.sleep(self._restart_s)
            self.life = Life(self.life.name, self.life.tray)

    def _judge(self, task: "asyncio.Task[None]") -> None:
        failed = None if task.cancelled() else task.exception()
        if self.life.is_alive and failed is not None and not self._is_allowed(failed):
            self._defects.append(f"{self.life.name} ended: {failed!r}")

    def _is_allowed(self, failed: BaseException) -> bool:
        if isinstance(failed, BaseExceptionGroup):
            return all(self._is_allowed(one) for one in failed.exceptions)
        return isinstance(failed, self._may_fail)
