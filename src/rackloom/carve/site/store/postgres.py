"""PostgreSQL: several replicas of the service on one database.

Record functions run through `run_sync` over asyncpg, in the event loop of the service; surveys of the whole
site in one of their own.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from rackloom.carve.site.migrate import upgrade
from rackloom.carve.site.store import postgres_notify
from rackloom.carve.site.store.beside import OtherLoop
from rackloom.carve.site.store.postgres_transactions import MIGRATE, READ, WRITE, transact
from rackloom.errors import Refused

T = TypeVar("T")

CONNECT_SECONDS = 5.0
COMMAND_SECONDS = 10.0
"""No statement of ours takes a tenth of that: a server that is silent for so long is gone."""
MIGRATION_LOCK = 0x5241434B4C4F4F4D
"""Advisory lock that lets one replica migrate while the others wait: the letters RACKLOOM."""

_SESSION = {
    "application_name": "rackloom",
    # Milliseconds. A replica that stops inside a transaction must not keep the others from writing.
    "idle_in_transaction_session_timeout": "2000",
    "lock_timeout": "5000",
}
_SURVEY = {**_SESSION, "idle_in_transaction_session_timeout": "60000"}
"""Between two statements a survey makes values of thousands of rows, and it keeps nobody from writing."""


class PostgresBackend:
    """One database that replicas share. Use it in the event loop that connected it."""

    is_shared = True

    def __init__(self, engine: AsyncEngine, surveyed: AsyncEngine) -> None:
        self._engine = engine
        self._surveyed = surveyed
        self._beside = OtherLoop("site-survey")
        self._writing = asyncio.Lock()
        self._under_way: set[asyncio.Task[Any]] = set()

    @classmethod
    async def connect(cls, url: str) -> "PostgresBackend":
        """Connect to `url` and migrate it. Raises Refused for another kind of URL, Retry if out of reach."""
        engine = engine_of(url)
        try:
            await transact(engine, _migrate, MIGRATE)
        except BaseException:
            await engine.dispose()
            raise
        return cls(engine, engine_of(url, _SURVEY))

    async def transact(self, work: Callable[[sa.Connection], T], *, write: bool) -> T:
        """Run `work` in one transaction, and again while PostgreSQL undoes it. Raises Retry in the end."""
        running = asyncio.ensure_future(self._write(work) if write else transact(self._engine, work, READ))
        self._under_way.add(running)
        running.add_done_callback(self._under_way.discard)
        return await asyncio.shield(running)

    async def survey(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` on a connection and in a thread of its own: making values of many rows takes long."""
        return await self._beside.do(transact(self._surveyed, work, READ))

    def changes(self) -> AsyncGenerator[str | None, None]:
        """Domains whose intent any replica changed; None after each (re)connection."""
        return postgres_notify.changes(self._engine)

    async def close(self) -> None:
        """Finish what is under way and close the connections."""
        await asyncio.gather(*self._under_way, return_exceptions=True)
        await self._beside.close(self._surveyed.dispose)
        await self._engine.dispose()

    async def _write(self, work: Callable[[sa.Connection], T]) -> T:
        # Waiting here instead of for the table lock leaves the connections to those who read.
        async with self._writing:
            return await transact(self._engine, work, WRITE)


def engine_of(url: str, session: Mapping[str, str] = _SESSION) -> AsyncEngine:
    """Connections to `url`, each made when it is wanted. Raises Refused for another kind of URL."""
    return create_async_engine(
        _parse(url),
        connect_args={
            "server_settings": dict(session),
            "timeout": CONNECT_SECONDS,
            "command_timeout": COMMAND_SECONDS,
        },
    )


def _parse(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        parsed = None
    if parsed is None or parsed.get_backend_name() not in ("postgresql", "postgres"):
        # The URL is not repeated: it may hold a password.
        raise Refused(
            "the database URL is not one of PostgreSQL",
            nearest_fix="use postgresql://USER:PASSWORD@HOST:PORT/DATABASE",
        )
    return parsed.set(drivername="postgresql+asyncpg")


def _migrate(conn: sa.Connection) -> None:
    conn.execute(sa.select(sa.func.pg_advisory_xact_lock(MIGRATION_LOCK)))
    upgrade(conn)
