"""Read-only access to the site service's database, beside the service that owns it.

A home is locked against a second writer, but SQLite's WAL allows any number of readers. Where there is no
WAL file the database is opened as immutable: a reader without that option would create WAL files as the
user who runs the doctor, and the service might then be unable to open them. PostgreSQL is read in one
REPEATABLE READ transaction, repeated up to three times if the connection was lost. The SQLSTATE
decides whether trying again may help (Retry) or not (Refused).

`is_running` tests the lock of a home with a shared lock that it returns at once.
"""

import fcntl
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.pool import NullPool

from rackloom.app.home import existing_database
from rackloom.errors import Refused, Retry

T = TypeVar("T")
RETRY_SECONDS = 5.0
READ_ATTEMPTS = 3
"""Attempts of one reading. The server ends transactions that are idle for two seconds, and on a busy machine
a reader may be kept from running that long."""
_TEMPORARY_SQLSTATES = ("08", "53", "57P")
"""Prefixes of the SQLSTATE of a server that cannot be reached, lacks resources, or starts or stops."""


class RecordReader(Protocol):
    """Runs a function on one consistent state of the records."""

    async def read(self, fn: Callable[[sa.Connection], T]) -> T:
        """Run `fn(conn)`. Writing is an error."""
        ...


class PostgresRecordReader:
    """A database that replicas of the service share."""

    def __init__(self, url: str) -> None:
        """`url` is postgresql://... It is not connected yet. Raises Refused for another kind of URL."""
        # Imported on use: a site on SQLite needs no PostgreSQL driver.
        from rackloom.carve.store.postgres import engine_of

        self._engine = engine_of(url)

    async def read(self, fn: Callable[[sa.Connection], T]) -> T:
        """Run `fn(conn)` in one read transaction, and again in a new one if the connection was lost.

        Raises Retry if the server cannot be reached, Refused for a database that is not a site's.
        """
        for _ in range(READ_ATTEMPTS - 1):
            with suppress(Retry):
                return await self._once(fn)
        return await self._once(fn)

    async def _once(self, fn: Callable[[sa.Connection], T]) -> T:
        try:
            async with self._engine.connect() as conn:
                await conn.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
                return await conn.run_sync(fn)
        except (OSError, TimeoutError) as error:
            raise Retry(f"the database cannot be read: {_error_text(error)}", after=RETRY_SECONDS) from error
        except sa.exc.DBAPIError as error:
            raise _classify(error) from error

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()


def _classify(error: sa.exc.DBAPIError) -> Retry | Refused:
    """Whether another attempt may succeed, by the SQLSTATE. Without one it may."""
    cause = getattr(error.orig, "__cause__", None) or error.orig or error
    problem = f"the database cannot be read: {_error_text(cause)}"
    state = getattr(error.orig, "sqlstate", None) or getattr(cause, "sqlstate", None)
    if state is None or state.startswith(_TEMPORARY_SQLSTATES):
        return Retry(problem, after=RETRY_SECONDS)
    return Refused(
        problem,
        nearest_fix="name the database of the site, or start the site once with this version, which brings "
        "its tables up to date",
    )


def _error_text(error: BaseException) -> str:
    return str(error) or type(error).__name__


class SqliteRecordReader:
    """The `site.db` of a home."""

    def __init__(self, home: Path) -> None:
        """Raises Refused if there is none."""
        self._file = existing_database(home)
        # After a clean stop there is no WAL, and an ordinary reader would create WAL files as the user who
        # runs the doctor. The service might then be unable to open them (sqlite.org, "Read-Only Databases").
        wal = self._file.with_name(f"{self._file.name}-wal")
        query = {"mode": "ro", "uri": "true", **({} if wal.exists() else {"immutable": "1"})}
        url = sa.URL.create("sqlite", database=f"file:{quote(str(self._file))}", query=query)
        self._engine = sa.create_engine(url, poolclass=NullPool)

    async def read(self, fn: Callable[[sa.Connection], T]) -> T:
        """Run `fn(conn)` in one read transaction. Raises Refused for a database that is not a site's."""
        try:
            with self._engine.connect() as conn:
                return fn(conn)
        except (sa.exc.DatabaseError, sqlite3.Error) as error:
            # Prepared statements go to the driver, and SQLAlchemy does not wrap its errors.
            raise Refused(
                f"{self._file} cannot be read: {getattr(error, 'orig', error)}",
                nearest_fix="start the site once with this version, which brings its tables up to date",
            ) from error


def is_running(home: Path) -> bool:
    """Whether a process holds the home's lock, tested with a shared lock that closing the file releases."""
    try:
        with (home / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
