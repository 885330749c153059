"""The newest reading of the site, shared by all viewers and refreshed while a page is open.

All viewers share one reading. It starts when something changed, and without a change every `AT_LEAST`
seconds, because knowledge ages. Between two readings there is a pause of half as long as the last one took,
at least `PAUSE` and at most `LONGEST_PAUSE` seconds: a large site must have time for more than being drawn,
and a change waits for the end of the pause. A request while the reading is kept fresh gets the newest one.

Each reading is offered to the history of the last day (`history`). While no page is open, `record` reads
for it every 30 seconds, and a keeper saves it in a file (`history_keeper`).

If a reading fails, whatever the error, the site is shown as unread since the first failure: the page must
not look current when it is not. The only finding is then that the layers cannot be read.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import msgspec
import structlog

from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.snapshot import Layer, LayerStatus, NvlinkDomainRecord, SiteSnapshot
from rackloom.errors import Retry, Unknown
from rackloom.web.history import RECORD_SECONDS, SiteHistory
from rackloom.web.history_keeper import HistoryKeeper
from rackloom.web.model import ReadingSource, SiteMap, SiteMapCache, update_site_map

log = structlog.get_logger(__name__)

EXPECTED_ERRORS = (Retry, Unknown, OSError)
PAUSE = 0.1
LONGEST_PAUSE = 0.2
AT_LEAST = 5.0


class LiveReading(msgspec.Struct, frozen=True, kw_only=True):
    """The newest reading, and whether it is current."""

    number: int
    """The number of the reading, or 0 if nothing was read yet."""
    whole: SiteMap
    unread_since: float | None = None
    """The time since which the site cannot be read, or None if it can."""
    problem: str = ""


class LiveMap:
    """Readings of one source. `clock` gives seconds since the epoch."""

    def __init__(self, source: ReadingSource, clock: Callable[[], float]) -> None:
        self.history = SiteHistory()
        self.keeper: HistoryKeeper | None = None
        """The keeper of the history, or None if it is in memory only."""
        self._source = source
        self._clock = clock
        self._now = LiveReading(number=0, whole=SiteMap(at=0.0))
        self._cache = SiteMapCache()
        self._began = self._ended = float("-inf")
        """The times of the last reading, on the clock of the event loop."""
        self._kept = False
        """Whether the watch task has read and keeps the reading fresh."""
        self._lock = asyncio.Lock()
        self._news = asyncio.Condition()
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def newest(self) -> LiveReading:
        """The newest reading, whatever its age."""
        return self._now

    async def fresh(self) -> LiveReading:
        """The newest reading. Without a watch task, it began no earlier than a pause before this call.

        So it shows all changes before that. If the site cannot be read, it is the last successful reading.
        """
        if not self._kept:
            await self._read_unless_recent()
        return self._now

    async def after(self, number: int) -> LiveReading:
        """Wait for a newer reading than `number`. Only within `watched`."""
        async with self._news:
            await self._news.wait_for(lambda: self._now.number != number)
        return self._now

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Keep the reading fresh within the context."""
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

    async def record(self, keeper: HistoryKeeper | None = None) -> None:
        """Read for the history while no page is open, and have `keeper` save it. Never returns."""
        self.keeper = keeper
        await self.fresh()
        while keeper is not None and not self.history.maps:  # the keeper compares with the present
            await asyncio.sleep(RECORD_SECONDS)
            await self.fresh()
        keeping = None if keeper is None else asyncio.create_task(keeper.run(self.history))
        try:
            while True:
                await asyncio.sleep(RECORD_SECONDS)
                await self.fresh()
                if keeper is not None:
                    keeper.recorded()
        finally:
            if keeping is not None:
                keeping.cancel()
                # The keeper saves a last time.
                with suppress(asyncio.CancelledError):
                    await keeping

    async def _watch(self) -> None:
        await self._read_unless_recent()
        while True:
            self._kept = True
            # Nothing may end this loop: if `changed` fails, the reading fails too and shows why.
            with suppress(Exception):
                async with asyncio.timeout(AT_LEAST):
                    await self._source.changed()
            async with self._lock:
                await self._pause()
                await self._read()

    async def _read_unless_recent(self) -> None:
        asked = asyncio.get_running_loop().time()
        async with self._lock:
            # A reading that started before this call may not include the newest changes.
            if self._began < asked - self._rest():
                await self._pause()
                await self._read()

    async def _pause(self) -> None:
        """Wait until the pause after the last reading is over."""
        await asyncio.sleep(self._ended + self._rest() - asyncio.get_running_loop().time())

    def _rest(self) -> float:
        took = self._ended - self._began if self._now.number else 0.0
        return min(max(PAUSE, took / 2), LONGEST_PAUSE)

    async def _read(self) -> None:
        began = asyncio.get_running_loop().time()
        number = self._now.number + 1
        try:
            reading = await self._source.read()
            # Runs in a thread, because the first reading decodes everything and must not block REST.
            whole, self._cache = await asyncio.to_thread(update_site_map, reading, self._cache)
        except Exception as error:
            # After any error the page must show that it is not current.
            problem = str(error)
            log.warning("map.not-read", reason=problem, exc_info=not isinstance(error, EXPECTED_ERRORS))
            since = self._now.unread_since or self._clock()
            whole = unread_map(self._now.whole, since, problem)
            self._now = LiveReading(number=number, whole=whole, unread_since=since, problem=problem)
        else:
            self._now = LiveReading(number=number, whole=whole)
            self.history.add(whole)
        self._began, self._ended = began, asyncio.get_running_loop().time()
        async with self._news:
            self._news.notify_all()


def unread_map(last: SiteMap, since: float, problem: str) -> SiteMap:
    """The last map of a site that cannot be read, with the finding that reports it."""
    asked = [layer.layer for layer in last.layers] or [Layer.FABRIC, Layer.SITE]
    layers = [LayerStatus(layer=layer, unknown_since=since, problem=problem) for layer in asked]
    domains = [NvlinkDomainRecord(uuid=uuid) for uuid in last.domains]
    findings = examine(SiteSnapshot(at=since, layers=tuple(layers), domains=tuple(domains)))
    return msgspec.structs.replace(last, findings=findings, examined_at=since)
