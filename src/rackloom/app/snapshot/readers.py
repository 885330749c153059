"""Read-only access to the site service's database, beside the service that owns it.

A home is locked against a second writer, but SQLite's WAL allows any number of readers. Where there is no
WAL file the database is opened as immutable: a reader that is not told so would create WAL files as the
user who runs the doctor, and the service might then be unable to open them. PostgreSQL is read in one
REPEATABLE READ transaction, repeated up to three times where the connection was lost; the SQLSTATE
decides whether trying again may help (Retry) or not (Refused).

`is_running` tests the lock of a home with a shared lock that it returns at once.
"""

import fcntl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar
from urllib.parse import quote

import sqlalchemy as sa
from sqlalchemy.pool import NullPool

from rackloom.carve.store.database import DATABASE
from rackloom.errors import Refused, Retry

T = TypeVar("T")
RETRY_SECONDS = 5.0
READ_ATTEMPTS = 3
"""Of one reading. On a busy machine a reader that was kept from running for two seconds loses its connection:
the server ends transactions that are idle for so long, whoever's they are."""
_TEMPORARY_SQLSTATES = ("08", "53", "57P")
"""Beginnings of the SQLSTATE of a server that is out of reach, out of resources, or starts or stops."""


class RecordReader(Protocol):
    """Whoever can run a function on one consistent state of the records."""

    async def read(self, fn: Callable[[sa.Connection], T]) -> T:
        """Run `fn(conn)`; writing is an error."""
        ...


class PostgresRecordReader:
    """A database that replicas of the service share."""

    def __init__(self, url: str) -> None:
        """`url` is postgresql://...; nothing is connected yet. Raises Refused for another kind of URL."""
        # Imported where it is wanted: a site on SQLite needs no PostgreSQL driver.
        from rackloom.carve.store.postgres import engine_of

        self._engine = engine_of(url)

    async def read(self, fn: Callable[[sa.Connection], T]) -> T:
        """Run `fn(conn)` in one read transaction, and again in another one where the connection was lost.

        Raises Retry when the server cannot be reached, Refused for a database that is none of ours.
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
        """Give the connection back."""
        await self._engine.dispose()


def _classify(error: sa.exc.DBAPIError) -> Retry | Refused:
    """Whether it may go well another time, by what the server said; a server that said nothing may."""
    cause = getattr(error.orig, "__cause__", None) or error.orig or error
    said = f"the database cannot be read: {_error_text(cause)}"
    state = getattr(error.orig, "sqlstate", None) or getattr(cause, "sqlstate", None)
    if state is None or state.startswith(_TEMPORARY_SQLSTATES):
        return Retry(said, after=RETRY_SECONDS)
    return Refused(
        said,
        nearest_fix="name the database of the site, or start the site once with this version, which brings "
        "its tables up to date",
    )


def _error_text(error: BaseException) -> str:
    """What an error says; where it says nothing, what it is called."""
    return str(error) or type(error).__name__


class SqliteRecordReader:
    """The `site.db` of a home."""

    def __init__(self, home: Path) -> None:
        """Raises Refused where there is none."""
        self._file = home / DATABASE
        if not self._file.is_file():
            raise Refused(
                f"there is no site in {home}", nearest_fix="name the home of `rackloom up` with --home"
            )
        query = {"mode": "ro", "uri": "true", **({} if _has_wal(self._file) else {"immutable": "1"})}
        url = sa.URL.create("sqlite", database=f"file:{quote(str(self._file))}", query=query)
        self._engine = sa.create_engine(url, poolclass=NullPool)

    async def read(self, fn: Callable[[sa.Connection], T]) -> T:
        """Run `fn(conn)` in one read transaction. Raises Refused for a database that is none of ours."""
        try:
            with self._engine.connect() as conn:
                return fn(conn)
        except sa.exc.DatabaseError as error:
            raise Refused(
                f"{self._file} cannot be read: {error.orig}",
                nearest_fix="start the site once with this version, which brings its tables up to date",
            ) from error


def _has_wal(file: Path) -> bool:
    """Whether there may be something in the WAL.

    After a clean stop there is none, and a reader that is not told so would make one: files of whoever runs
    the doctor, which the service might then not be able to open (sqlite.org, "Read-Only Databases").
    """
    return file.with_name(f"{file.name}-wal").exists()


def is_running(home: Path) -> bool:
    """Whether a process has the home's lock. The lock is shared for an instant, and given back."""
    try:
        with (home / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
