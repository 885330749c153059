"""Repeating an attempt until it succeeds, is refused, or its caller goes away."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TypeVar

import structlog

from rackloom.claim.kube.api import KubeError
from rackloom.claim.node.tasks import beside
from rackloom.errors import Retry

T = TypeVar("T")
log = structlog.get_logger(__name__)

FIRST_PAUSE, LAST_PAUSE = 0.25, 3.0
"""Seconds between attempts: doubling from the first to the last."""
NOT_ANSWERED = "the first attempt did not end in time"


async def persist(
    attempt: Callable[[], Awaitable[T]], *, deadline: float, changes: AsyncIterator[None] | None = None
) -> T:
    """Call `attempt` until it returns; at `deadline` (loop time) raise the last `Retry` that it raised.

    Any other error is raised at once. Each of `changes`, which are listened to from the first failure on,
    ends a pause early. Nothing is held while it pauses.
    """
    trouble = Retry(NOT_ANSWERED, after=0.0)
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
