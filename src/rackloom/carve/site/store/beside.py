"""An event loop in a thread of its own, for what would keep the service's own from answering."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from rackloom.errors import Retry

T = TypeVar("T")

END_SECONDS = 5.0
"""Work that has not ended by itself within that when this is closed is cancelled."""
CLOSE_SECONDS = 10.0
"""Work that has not ended within that, though it was cancelled, is left to end with the process."""
CLOSING = "the store is closing"


class OtherLoop:
    """Runs coroutines that only read, and share nothing with the loop they are awaited in.

    Use it in one event loop, and `close` it in the end.
    """

    def __init__(self, name: str) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._is_closing = False
        self._asked: set[Future[Any]] = set()
        self._under_way: set[asyncio.Task[Any]] = set()
        """Touched in the thread only."""
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` there. Cancelling the caller does not cancel it, as with a thread that has begun.

        Raises Retry when this is closed before `work` has ended.
        """
        if self._is_closing:
            work.close()
            raise Retry(CLOSING, after=1.0)
        return await self._submit(self._until_closed(work))

    async def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Let what is under way end, or cancel it in the end; do `last` there, and stop."""
        self._is_closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._submit(self._end(last))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)
        for one in self._asked:
            if not one.done():
                one.set_exception(Retry(CLOSING, after=1.0))

    def _serve(self) -> None:
        with self._runner:
            self._loop.run_forever()

    async def _submit(self, work: Coroutine[Any, Any, T]) -> T:
        asked = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._asked.add(asked)
        running = asyncio.wrap_future(asked)
        running.add_done_callback(_look_at)
        running.add_done_callback(lambda _: self._asked.discard(asked))
        return await asyncio.shield(running)

    async def _until_closed(self, work: Coroutine[Any, Any, T]) -> T:
        running = asyncio.ensure_future(work)
        self._under_way.add(running)
        running.add_done_callback(self._under_way.discard)
        try:
            return await running
        except asyncio.CancelledError:
            # Nobody else cancels here. The caller was not cancelled, and is told so.
            raise Retry(CLOSING, after=1.0) from None

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        under_way = set(self._under_way)
        if under_way:
            await asyncio.wait(under_way, timeout=END_SECONDS)
        for one in under_way:
            one.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        await last()


def _look_at(done: "asyncio.Future[Any]") -> None:
    """A failure that nobody waits for any more is none that was overlooked."""
    if not done.cancelled():
        done.exception()
