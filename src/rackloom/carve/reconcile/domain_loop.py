"""When passes over one endpoint run: woken by a change of intent, by the fabric itself, and by a timer."""

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from zlib import crc32

import structlog

from rackloom.carve.reconcile.domain import DomainPass

log = structlog.get_logger(__name__)

FIRST_RETRY = 0.5
"""Seconds until a failed pass is tried again; doubled each time up to the interval."""


class DomainLoop:
    """The passes over one endpoint, one after another."""

    def __init__(self, work: DomainPass, interval: float) -> None:
        self.work = work
        self.interval = interval
        self.woken = asyncio.Event()
        self.first_pass = asyncio.Event()
        self._is_awaited = False
        """Whether somebody waits for what the next pass does."""

    def wake(self) -> None:
        """Start a pass now, before those that nobody waits for."""
        self._is_awaited = True
        self.woken.set()
        slots = self.work.hooks.slots
        if slots is not None:
            slots.hurry(self)

    async def run(self) -> None:
        """Run until cancelled, then release the connection."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen())
                await self._work()
        except* Exception:
            # Whoever started this sees that it ended, and starts it again; no other domain is concerned.
            log.exception("domain.loop-failed", endpoint=self.work.endpoint.id)
        finally:
            self.first_pass.set()
            await self.work.driver.close()

    async def _work(self) -> None:
        retry, rest = FIRST_RETRY, self._first_rest()
        while True:
            async with self._place():
                self.woken.clear()
                self._is_awaited = False
                settled = await self._pass()
            self.first_pass.set()
            retry = FIRST_RETRY if settled else min(2 * retry, self.interval)
            await self._wait(rest if settled else retry)
            rest = self.interval if settled else rest

    def _first_rest(self) -> float:
        """Shorter by another share for each endpoint: loops begun together do not all wake together."""
        return self.interval * crc32(self.work.endpoint.id.encode()) / 2**32

    def _place(self) -> AbstractAsyncContextManager[None]:
        slots = self.work.hooks.slots
        return nullcontext() if slots is None else slots.taken(self, urgent=self._is_awaited)

    async def _pass(self) -> bool:
        try:
            return await self.work.run()
        except Exception:
            # A defect in one domain's pass must not end the loop, nor that of any other domain.
            log.exception("domain.pass-failed", endpoint=self.work.endpoint.id)
            return False

    async def _wait(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.woken.wait()
        except TimeoutError:
            return

    async def _listen(self) -> None:
        async for _ in self.work.driver.notifications():
            self.woken.set()
