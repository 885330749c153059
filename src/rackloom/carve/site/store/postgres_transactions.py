"""Transactions on PostgreSQL: one writer at a time, and again where the server undid one.

Record functions read widely before they write, and serializable transactions that run beside each other then
undo one another nearly always (16 writers got a quarter of the throughput of one). Transactions are
serializable all the same, for the sake of whoever writes into the database by other means.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import asyncpg
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncTransaction

from rackloom.errors import Retry, Unknown

T = TypeVar("T")

ATTEMPTS = 12
FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.5
"""Seconds before a transaction is run again: doubled each time and drawn at random up to that, so that
replicas which met do not meet again. All attempts together take about two seconds."""
WRITE: Mapping[str, Any] = {"isolation_level": "SERIALIZABLE"}
READ: Mapping[str, Any] = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
MIGRATE: Mapping[str, Any] = {"isolation_level": "READ COMMITTED"}
"""Who waited for the migration lock must see what its holder did."""

_ONE_WRITER = "LOCK TABLE alembic_version IN EXCLUSIVE MODE"
"""Taken before a write transaction's snapshot, so each one sees what those before it did, on any replica.
The table is the one that nothing ever changes but a migration, which writers must not overtake either."""

_UNDONE = {"40001", "40P01", "55P03"}
"""SQLSTATE serialization_failure, deadlock_detected and lock_not_available: nothing is left of the
transaction, and it may be repeated."""
_NOT_NOW = {"57P01", "57P02", "57P03", "53300"}
"""SQLSTATE of a server that shuts down, crashed, starts, or has no connection left for us."""


async def transact(engine: AsyncEngine, work: Callable[[sa.Connection], T], options: Mapping[str, Any]) -> T:
    """Run `work` in one transaction, and again while PostgreSQL undoes it.

    `options` are `WRITE`, `READ` or `MIGRATE`. Raises Retry in the end, and Unknown where the connection was
    lost during the commit.
    """
    longest, reason = FIRST_PAUSE, ""
    for _ in range(ATTEMPTS):
        try:
            return await _once(engine, work, options)
        except (sa.exc.DBAPIError, asyncpg.PostgresError, OSError) as error:
            if not _left_nothing(error):
                raise
            reason = str(getattr(error, "orig", error))
        await asyncio.sleep(random.uniform(0, longest))  # noqa: S311 - spreads load, guards nothing
        longest = min(2 * longest, LONGEST_PAUSE)
    raise Retry(f"the database did not take the transaction: {reason}", after=LONGEST_PAUSE)


async def _once(engine: AsyncEngine, work: Callable[[sa.Connection], T], options: Mapping[str, Any]) -> T:
    async with engine.connect() as base:
        conn = await base.execution_options(**options)
        transaction = await conn.begin()
        if options is WRITE:
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
