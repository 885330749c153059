"""Tasks that live as long as a context manager, and pauses that an event ends."""

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def cancel_and_wait(task: "asyncio.Task[None]") -> None:
    """Cancel a task and wait for it. Its outcome is dropped, but not a cancellation of the caller."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()


@asynccontextmanager
async def beside(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run `work` while the context is entered. Its result is ignored."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await cancel_and_wait(task)


async def cancel_all(tasks: "Collection[asyncio.Task[None]]") -> None:
    """Cancel all before any is awaited: a second cancellation in between must not leave one running."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        await cancel_and_wait(task)


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Wait until `work` has ended. If the caller is cancelled, the cancellation is raised only then.

    For work that cannot be cut off, such as a thread: the next step must not overlap it.
    """
    task = asyncio.create_task(work)
    cancelled = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:
            break
    if cancelled is not None:
        # Its outcome is dropped with the caller.
        task.exception()
        raise cancelled
    return task.result()


class TaskSet:
    """Tasks without a waiter. The event loop has weak references only, so they could be garbage collected."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """Cancel all that run."""
        for task in self._tasks:
            task.cancel()


class BackgroundTasks:
    """Work that ends only by failing."""

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
async def run_background(*work: Coroutine[None, None, None]) -> AsyncIterator[BackgroundTasks]:
    """Run endless work while the context is entered. Its failures are raised at the end."""
    tasks = [asyncio.create_task(coroutine) for coroutine in work]
    try:
        yield BackgroundTasks(tasks)
        BackgroundTasks(tasks).check()
    finally:
        await cancel_all(tasks)


async def pause_until(woken: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, `seconds` at most, and clear it. Returns whether it was set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await woken.wait()
    was_set = woken.is_set()
    woken.clear()
    return was_set
