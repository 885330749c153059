"""An event loop in a thread of its own, for what would keep the service's own from answering."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class OtherLoop:
    """Runs coroutines that share nothing with the loop they are awaited in. `close` it in the end."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` there. Cancelling the caller does not cancel it, as with a thread that has begun."""
        return await asyncio.shield(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop)))

    async def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Stop, once what is under way has ended and `last` was done there."""
        await self.do(_after_others(last))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()


async def _after_others(last: Callable[[], Coroutine[Any, Any, None]]) -> None:
    mine = asyncio.current_task()
    await asyncio.gather(*(one for one in asyncio.all_tasks() if one is not mine), return_exceptions=True)
    await last()
