"""Keeps the history of the last day in a file beside the event loop.

`run` reads the file once and puts its maps before the readings of this process. It then saves whenever
`recorded` is called, which is every half minute, and a last time when it is cancelled. A process that is
killed loses the readings after its last save. All of this happens in a thread, so that a slow disk delays
neither readings nor pages.

No error of the file stops the map. While saves fail (a full disk, a directory that cannot be written, a
file that another process has), `unkept_since` is the time of the first failure. Each save tries to save all.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Sequence

import structlog

from rackloom.web.history import SiteHistory, sharing_racks
from rackloom.web.history_file import DAMAGED, HistoryFile
from rackloom.web.model import SiteMap
from rackloom.web.serial_thread import SerialThread

log = structlog.get_logger(__name__)

_FILE_ERRORS = (OSError, sqlite3.Error)


class HistoryKeeper:
    """Keeps `history` in `file`. `clock` gives seconds since the epoch."""

    def __init__(self, file: HistoryFile, clock: Callable[[], float]) -> None:
        self.unkept_since: float | None = None
        """The time since which the history cannot be saved, or None if it can."""
        self._file = file
        self._clock = clock
        self._thread = SerialThread()
        self._recorded = asyncio.Event()

    def recorded(self) -> None:
        """The history has a reading more: `run` saves it."""
        self._recorded.set()

    async def run(self, history: SiteHistory) -> None:
        """Restore the history, which has at least one map, then save it again and again. Never returns."""
        await self._restore(history)
        try:
            while True:
                await self.save(history)
                await self._recorded.wait()
                self._recorded.clear()
        finally:
            await self.save(history)
            await self._thread.run(self._file.close)

    async def save(self, history: SiteHistory) -> None:
        """Save the history now. A failure is logged once, and again when it is over."""
        error = await self._thread.run(self._save, history.maps)
        if error is not None:
            self._failed(error)
            return
        if self.unkept_since is not None:
            log.info("map.history-kept-again", file=str(self._file.path))
        self.unkept_since = None

    def _save(self, maps: Sequence[SiteMap]) -> Exception | None:
        """The reason why the maps could not be saved, or None if they were."""
        try:
            self._file.save(maps)
        except Exception as error:
            # After any error the map goes on, and shows that its history is not kept.
            return error
        return None

    async def _restore(self, history: SiteHistory) -> None:
        try:
            found = await self._thread.run(self._file.load)
        except Exception as error:
            self._failed(error)
            return
        if found.damaged:
            log.warning(
                "map.history-damaged",
                file=str(self._file.path),
                readable=len(found.maps),
                set_aside=f"{self._file.path}{DAMAGED}",
            )
        # The present was read before: the racks that did not change since are the same objects then.
        maps = await self._thread.run(sharing_racks, found.maps, history.maps[0])
        history.restore(maps)

    def _failed(self, error: Exception) -> None:
        if self.unkept_since is None:
            self.unkept_since = self._clock()
            log.warning(
                "map.history-not-kept",
                file=str(self._file.path),
                reason=str(error),
                exc_info=not isinstance(error, _FILE_ERRORS),
            )
