"""Repeated and concurrent work of a plugin: retries up to a deadline, background retries, tasks.

`persist` repeats one attempt until it succeeds, is refused, or the deadline of the caller comes. Pauses
double from 0.25 s to 3 s (exponential backoff) and are at least as long as `Retry` asks. A change that
the driver reports ends a pause early. Nothing is locked during a pause.

kubelet waits 45 s for an answer. What has not succeeded by then goes to `BackgroundRetries`, which
repeats it for up to 900 s, so that the plugin knows when kubelet's next call would succeed. A refused
claim is repeated too, since a node label, a role or a kernel module may be put right; but seldom, because
each attempt asks the API server and a tenant can create many claims that will never be prepared. At most
512 claims, of which at most 128 refused, are retried at once, and refused claims share a rate of four
attempts a second.

`run_background` and `beside` run tasks for as long as a context is entered. All tasks are cancelled
before any of them is awaited: a second cancellation during the wait must not leave one running.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

import structlog

from rackloom.claim.kube.api import KubeError
from rackloom.claim.node.plugin import ClaimRef
from rackloom.claim.node.prepare import ObsoleteClaim
from rackloom.errors import Refused, Retry

# Tasks whose lifetime is a context manager.


async def cancel_and_wait(task: "asyncio.Task[None]") -> None:
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
        await cancel_and_wait(task)


class BackgroundTasks:
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
async def run_background(*work: Coroutine[None, None, None]) -> AsyncIterator[BackgroundTasks]:
    """Do endless work while the context is entered; what failed meanwhile is raised at the end."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield BackgroundTasks(tasks)
        BackgroundTasks(tasks).check()
    finally:
        # All before any is awaited: a second cancellation while we wait must not leave one of them at work.
        for task in tasks:
            task.cancel()
        for task in tasks:
            await cancel_and_wait(task)


# Retrying up to a deadline, and after it.


T = TypeVar("T")
RetryWork = Callable[[ClaimRef], Awaitable[None]]
log = structlog.get_logger(__name__)

FIRST_PAUSE, LAST_PAUSE = 0.25, 3.0
"""Seconds between attempts: doubling from the first to the last."""
REFUSED_PAUSE = 6.0
"""Seconds between attempts at a claim that is refused."""
REFUSED_GAP = 0.25
"""Seconds between attempts at refused claims altogether: each of more than 24 is tried less often."""
MOST_REFUSED = 128
"""Refused claims that are retried at once, so that they leave room for others."""
NO_ATTEMPT_ENDED = "the first attempt did not end in time"
UNASKED_SECONDS = 900.0
"""How long a claim is retried for which kubelet does not call: while a pod waits, it calls every 90 s."""
MOST_CLAIMS = 512
"""Claims that are retried at once. A node takes 110 pods by default; the claims of more wait for kubelet."""


async def persist(
    attempt: Callable[[], Awaitable[T]], *, deadline: float, changes: AsyncIterator[None] | None = None
) -> T:
    """Call `attempt` until it returns; at `deadline` (loop time) raise the last `Retry` that it raised.

    Any other error is raised at once. Each of `changes`, which are listened to from the first failure on,
    ends a pause early. Nothing is held while it pauses.
    """
    trouble = Retry(NO_ATTEMPT_ENDED, after=0.0)
    pauses = _pauses()
    limit = asyncio.timeout_at(deadline)
    try:
        async with limit, AsyncExitStack() as stack:
            woken: asyncio.Event | None = None
            while True:
                try:
                    return await attempt()
                except Retry as retry:
                    trouble = retry
                if woken is None:
                    woken = await stack.enter_async_context(_waking(changes))
                await _pause(max(next(pauses), trouble.after), woken)
    except TimeoutError:
        if limit.expired():
            raise trouble from None
        raise


def _pauses() -> Iterator[float]:
    pause = FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, LAST_PAUSE)


@asynccontextmanager
async def _waking(changes: AsyncIterator[None] | None) -> AsyncIterator[asyncio.Event]:
    """An event that is set for each of `changes` while the context is entered."""
    woken = asyncio.Event()
    async with beside(_listen(changes, woken)):
        yield woken


async def _listen(changes: AsyncIterator[None] | None, woken: asyncio.Event) -> None:
    if changes is None:
        return
    try:
        async for _ in changes:
            woken.set()
    except (KubeError, Retry) as trouble:
        # The pauses end without it too.
        log.info("node.watch-ended", reason=str(trouble))


async def _pause(seconds: float, woken: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await woken.wait()
    woken.clear()


class BackgroundRetries:
    """Claims that are to be prepared although no call of kubelet waits for them, each in a task.

    `work` is one round for a claim, which ends when nothing is left to do for it. It raises `Retry` where the
    next round may have a chance, after pauses of its own, `Refused` where something has to change before, and
    `Obsolete` where no round has a chance.
    """

    def __init__(self, work: RetryWork) -> None:
        self._work = work
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._refused: set[str] = set()

    def begin(self, ref: ClaimRef, *, refused: bool = False) -> None:
        """Retry a claim until that succeeds, nobody can want it any more, or `stop`."""
        self.stop(ref.uid)
        self._refused.discard(ref.uid)
        if len(self._tasks) >= MOST_CLAIMS or (refused and len(self._refused) >= MOST_REFUSED):
            about = {**_claim_fields(ref), "retried": len(self._tasks), "refused": len(self._refused)}
            log.warning("node.claim-not-retried", **about, reason="as many as may be are being retried")
            return
        if refused:
            self._refused.add(ref.uid)
        task = self._tasks[ref.uid] = asyncio.create_task(self._retry(ref))
        task.add_done_callback(partial(self._forget, ref.uid))

    def stop(self, uid: str) -> bool:
        """Leave a claim to whoever comes now; returns whether it was being retried."""
        task = self._tasks.get(uid)
        return task is not None and task.cancel()

    async def close(self) -> None:
        """Stop all, and wait until they have ended."""
        tasks = [*self._tasks.values()]
        # All before any is awaited: a second cancellation while we wait must not leave one of them at work.
        for task in tasks:
            task.cancel()
        for task in tasks:
            await cancel_and_wait(task)

    def _forget(self, uid: str, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(uid) is task:
            del self._tasks[uid]
            self._refused.discard(uid)

    async def _retry(self, ref: ClaimRef) -> None:
        loop = asyncio.get_running_loop()
        deadline, reported = loop.time() + UNASKED_SECONDS, ""
        if ref.uid in self._refused:
            await self._pause_refused()
        while loop.time() < deadline:
            try:
                await self._work(ref)
            except Retry:
                self._refused.discard(ref.uid)
                await asyncio.sleep(FIRST_PAUSE)
            except ObsoleteClaim as obsolete:
                log.info("node.claim-not-retried", **_claim_fields(ref), reason=str(obsolete))
                return
            except Refused:
                self._refused.add(ref.uid)
                await self._pause_refused()
            except Exception as error:
                # A full disk, for example: it may pass as well, and each kind is worth one report.
                if repr(error) != reported:
                    log.exception("node.claim-broke", operation="retry", **_claim_fields(ref))
                reported = repr(error)
                await asyncio.sleep(LAST_PAUSE)
            else:
                return

    async def _pause_refused(self) -> None:
        await asyncio.sleep(max(REFUSED_PAUSE, len(self._refused) * REFUSED_GAP))


def _claim_fields(ref: ClaimRef) -> dict[str, str]:
    return {"claim": f"{ref.namespace}/{ref.name}", "uid": ref.uid}
