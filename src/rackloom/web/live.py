"""The newest reading, kept fresh while somebody looks, and which racks changed since which revision.

Those who look share one reading: it is begun when something changed, and also without a change every
`AT_LEAST` seconds, because what is known grows old by itself. Between two readings there is a pause of half
as long as the last took, so that a large site does more than be looked at; at least `PAUSE` seconds, and at
most `LONGEST_PAUSE`, because a change waits for its end. Who asks while it is kept fresh gets what is known:
a page that is told of a change asks for its chosen GPU.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
import structlog

from rackloom.errors import Retry, Unknown
from rackloom.web.reading import Source
from rackloom.web.scene import Scene, Seated, next_scene

log = structlog.get_logger(__name__)

Expected = (Retry, Unknown, OSError)
PAUSE = 0.1
LONGEST_PAUSE = 0.2
AT_LEAST = 5.0


class Now(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown now."""

    number: int
    """Of the reading; 0: nothing was read yet."""
    whole: Scene
    unread_since: float | None = None
    """Since when the site cannot be read; None: it can."""
    problem: str = ""


class Live:
    """Readings of one source. `clock` gives seconds since the epoch."""

    def __init__(self, source: Source, clock: Callable[[], float]) -> None:
        self._source = source
        self._clock = clock
        self._now = Now(number=0, whole=Scene(at=0.0))
        self._seated = Seated()
        self._read_at = -AT_LEAST
        self._took = 0.0
        self._kept = False
        """Whether the watch has read, and goes on reading."""
        self._lock = asyncio.Lock()
        self._news = asyncio.Condition()
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None

    async def fresh(self) -> Now:
        """What is known while somebody watches; else a reading no older than the pause between two.

        When the site cannot be read: what there is.
        """
        if not self._kept:
            await self._read_unless_resting()
        return self._now

    async def after(self, number: int) -> Now:
        """Wait for something newer than reading `number`. Only within `watched`."""
        async with self._news:
            await self._news.wait_for(lambda: self._now.number != number)
        return self._now

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Keep the readings coming while the context is entered."""
        self._watchers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self._watchers -= 1
            if self._watchers == 0:
                self._task.cancel()
                self._task = None
                self._kept = False

    async def _watch(self) -> None:
        await self._read_unless_resting()
        while True:
            self._kept = True
            # Nothing may end this loop: a source that cannot say whether it changed is read, and tells why.
            with suppress(Exception):
                async with asyncio.timeout(AT_LEAST):
                    await self._source.changed()
            await asyncio.sleep(self._read_at + self._rest() - asyncio.get_running_loop().time())
            async with self._lock:
                await self._read()

    async def _read_unless_resting(self) -> None:
        async with self._lock:
            if asyncio.get_running_loop().time() - self._read_at > self._rest():
                await self._read()

    def _rest(self) -> float:
        return min(max(PAUSE, self._took / 2), LONGEST_PAUSE)

    async def _read(self) -> None:
        begun = asyncio.get_running_loop().time()
        number = self._now.number + 1
        try:
            reading = await self._source.read()
            # In a thread: a first reading is made of everything there is, and REST wants to answer meanwhile.
            whole, self._seated = await asyncio.to_thread(next_scene, reading, self._seated)
        except Exception as trouble:
            # Whatever went wrong: the page must say that it is not current rather than stand still.
            log.warning("map.not-read", reason=str(trouble), exc_info=not isinstance(trouble, Expected))
            since = self._now.unread_since or self._clock()
            self._now = msgspec.structs.replace(
                self._now, number=number, unread_since=since, problem=str(trouble)
            )
        else:
            self._now = Now(number=number, whole=whole)
        self._read_at = asyncio.get_running_loop().time()
        self._took = self._read_at - begun
        async with self._news:
            self._news.notify_all()
