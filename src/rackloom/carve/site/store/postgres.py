"""PostgreSQL: several replicas of the service on one database.

Record functions run through `run_sync` over asyncpg. There is one writer at a time, as on SQLite: record
functions read widely before they write, and serializable transactions that run beside each other then undo
one another nearly always (16 writers got a quarter of the throughput of one). Transactions are serializable
all the same, for the sake of whoever writes into the database by other means.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, TypeVar

import asyncpg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncTransaction, create_async_engine

from rackloom.carve.site.migrate import upgrade
from rackloom.carve.site.store import postgres_notify
from rackloom.errors import Refused, Retry, Unknown

T = TypeVar("T")

ATTEMPTS = 12
FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.5
"""Seconds before a transaction is run again: doubled each time and drawn at random up to that, so that
replicas which met do not meet again. All attempts together take about two seconds."""
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
_WRITE: Mapping[str, Any] = {"isolation_level": "SERIALIZABLE"}
_READ: Mapping[str, Any] = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
_MIGRATE: Mapping[str, Any] = {"isolation_level": "READ COMMITTED"}
"""Who waited for the migration lock must see what its holder did."""

_ONE_WRITER = "LOCK TABLE alembic_version IN EXCLUSIVE MODE"
"""Taken before a write transaction's snapshot, so each one sees what those before it did, on any replica.
The table is the one that nothing ever changes but a migration, which writers must not overtake either."""

_UNDONE = {"40001", "40P01", "55P03"}
"""SQLSTATE serialization_failure, deadlock_detected and lock_not_available: nothing is left of the
transaction, and it may be repeated."""
_NOT_NOW = {"57P01", "57P02", "57P03", "53300"}
"""SQLSTATE of a server that shuts down, crashed, starts, or has no connection left for us."""


class PostgresBackend:
    """One database that replicas share. Use it in the event loop that connected it."""

    is_shared = True

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._writing = asyncio.Lock()
        self._under_way: set[asyncio.Task[Any]] = set()

    @classmethod
    async def connect(cls, url: str) -> "PostgresBackend":
        """Connect to `url` and migrate it. Raises Refused for another kind of URL, Retry if out of reach."""
        engine = engine_of(url)
        backend = cls(engine)
        try:
            await backend._run(_migrate, _MIGRATE)
        except BaseException:
            await engine.dispose()
            raise
        return backend

    async def transact(self, work: Callable[[sa.Connection], T], *, write: bool) -> T:
        """Run `work` in one transaction, and again while PostgreSQL undoes it. Raises Retry in the end."""
        running = asyncio.ensure_future(self._write(work) if write else self._run(work, _READ))
        self._under_way.add(running)
        running.add_done_callback(self._under_way.discard)
        return await asyncio.shield(running)

    async def survey(self, work: Callable[[sa.Connection], T]) -> T:
        """On a connection of its own, as any reading; what is made of the rows takes its turn of the loop."""
        return await self.transact(work, write=False)

    def changes(self) -> AsyncGenerator[str | None, None]:
        """Domains whose intent any replica changed; None after each (re)connection."""
        return postgres_notify.changes(self._engine)

    async def close(self) -> None:
        """Finish what is under way and close the connections."""
        await asyncio.gather(*self._under_way, return_exceptions=True)
        await self._engine.dispose()

    async def _write(self, work: Callable[[sa.Connection], T]) -> T:
        # Waiting here instead of for the table lock leaves the connections to those who read.
        async with self._writing:
            return await self._run(work, _WRITE)

    async def _run(self, work: Callable[[sa.Connection], T], options: Mapping[str, Any]) -> T:
        longest, reason = FIRST_PAUSE, ""
        for _ in range(ATTEMPTS):
            try:
                return await self._once(work, options)
            except (sa.exc.DBAPIError, asyncpg.PostgresError, OSError) as error:
                if not _left_nothing(error):
                    raise
                reason = str(getattr(error, "orig", error))
            await asyncio.sleep(random.uniform(0, longest))  # noqa: S311 - spreads load, guards nothing
            longest = min(2 * longest, LONGEST_PAUSE)
        raise Retry(f"the database did not take the transaction: {reason}", after=LONGEST_PAUSE)

    async def _once(self, work: Callable[[sa.Connection], T], options: Mapping[str, Any]) -> T:
        async with self._engine.connect() as base:
            conn = await base.execution_options(**options)
            transaction = await conn.begin()
            if options is _WRITE:
                await conn.exec_driver_sql(_ONE_WRITER)
            result = await conn.run_sync(work)
            await _commit(transaction)
            return result


async def _commit(transaction: AsyncTransaction) -> None:
    try:
        await transaction.commit()
    except (sa.exc.DBAPIError, OSError) as error:
        if _sqlstate(error) in _UNDONE:
            raise
        # Whether it is durable cannot be known, so running it again could do it twice.
        raise Unknown(f"the database went away during a commit: {error}", since=time.time()) from error


def _left_nothing(error: Exception) -> bool:
    """Whether a transaction that failed this way, before its commit was answered, may be run again."""
    lost = isinstance(error, OSError) or getattr(error, "connection_invalidated", False)
    return lost or _sqlstate(error) in _UNDONE | _NOT_NOW


def _sqlstate(error: Exception) -> str | None:
    return getattr(getattr(error, "orig", error), "sqlstate", None)


def engine_of(url: str) -> AsyncEngine:
    """Connections to `url`, each made when it is wanted. Raises Refused for another kind of URL."""
    return create_async_engine(
        _parse(url),
        connect_args={
            "server_settings": _SESSION,
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
