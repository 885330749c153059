"""Work beside other work, and its end."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager


async def end(task: "asyncio.Task[None]") -> None:
    """Cancel a task and wait for it; its outcome is of no interest, but our own cancellation still is."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


@asynccontextmanager
async def beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Do `work` while the context is entered; how it ends does not matter."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await end(task)


class Background:
    """Work that only ends by failing."""

    def __init__(self, tasks: "list[asyncio.Task[None]]") -> None:
        self._tasks = tasks

    async def fails(self) -> None:
        """Wait for the first failure, and raise it."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        self.check()

    def check(self) -> None:
        """Raise the failure if there was one."""
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()


@asynccontextmanager
async def background(*work: Coroutine[None, None, None]) -> AsyncIterator[Background]:
    """Do endless work while the context is entered; what failed meanwhile is raised at the end."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield Background(tasks)
        Background(tasks).check()
    finally:
        # All before any is awaited: a second cancellation while we wait must not leave one of them at work.
        for task in tasks:
            task.cancel()
        for task in tasks:
            await end(task)
