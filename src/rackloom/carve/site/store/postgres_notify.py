"""LISTEN: how a change of intent on one replica wakes the others. A wake-up, never a fact.

PostgreSQL delivers a notification only when the transaction that made it commits, and drops it for a
listener that is away: after every connection anything may have been missed.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import sqlalchemy as sa
import structlog
from sqlalchemy.ext.asyncio import AsyncEngine

from rackloom.carve.site.revisions import CHANNEL

log = structlog.get_logger(__name__)

FIRST_DELAY, MAX_DELAY = 0.1, 5.0
"""Seconds before a lost connection is taken up again; doubled until one holds."""
QUIET_SECONDS = 5.0
"""After so long without a notification the server is asked whether it is still there: a peer that vanished
without a word would else never be missed."""


async def changes(engine: AsyncEngine) -> AsyncGenerator[str | None, None]:
    """The domains that are notified; None after each (re)connection. Never ends."""
    delay = FIRST_DELAY
    while True:
        try:
            async with _listening(engine) as (connection, heard):
                yield None
                delay = FIRST_DELAY
                while True:
                    yield await _next(connection, heard)
        except (sa.exc.DBAPIError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError) as error:
            log.warning("store.listen-lost", reason=str(error), again_in=delay)
        await asyncio.sleep(delay)
        delay = min(2 * delay, MAX_DELAY)


@asynccontextmanager
async def _listening(engine: AsyncEngine) -> AsyncIterator[tuple[Any, "asyncio.Queue[str | None]"]]:
    """A connection of its own that listens, and what it hears; None when it is lost."""
    heard: asyncio.Queue[str | None] = asyncio.Queue()
    async with engine.connect() as pooled:
        connection: Any = (await pooled.get_raw_connection()).driver_connection
        connection.add_termination_listener(lambda _: heard.put_nowait(None))
        await connection.add_listener(CHANNEL, lambda _c, _pid, _channel, domain: heard.put_nowait(domain))
        try:
            yield connection, heard
        finally:
            # Never back to the pool: it would go on listening there.
            await pooled.invalidate()


async def _next(connection: Any, heard: "asyncio.Queue[str | None]") -> str:
    while True:
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                domain = await heard.get()
        except TimeoutError:
            await connection.execute("SELECT 1", timeout=QUIET_SECONDS)
            continue
        if domain is None:
            raise ConnectionError("the server closed the connection")
        return domain
