"""Work that would block other requests, in a thread beside the event loop: one piece at a time.

A thread cannot be interrupted. If a client goes away, the thread still finishes the piece of its request
before the next piece begins, so that the pieces may share state that is not thread-safe.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class SerialThread:
    """Runs pieces of work one after the other, in the order of the calls."""

    def __init__(self) -> None:
        self._busy = asyncio.Lock()

    async def run(self, work: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """The result of `work`, or its exception. Cancelling the call does not end the work."""
        await self._busy.acquire()
        running = asyncio.get_running_loop().run_in_executor(None, partial(work, *args, **options))
        # Only the end of the thread releases the lock.
        running.add_done_callback(lambda _: self._busy.release())
        return await asyncio.shield(running)
