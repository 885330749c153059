"""The store, which runs record functions as transactions, and its SQLite backend with group commit.

A record function is synchronous, has the form `fn(conn, ...)`, and does not know which database it runs
on. `Store.run` runs it in a serializable write transaction: durable when the call returns, rolled back
when it raises. The function may run more than once and only the last run counts, so it changes nothing
but records. `Store.read` gives one consistent state and refuses writes. `Store.survey` is for reads of
the whole site that must not delay other work. `Store.changes` reports domains with an intent that another
process changed.

SQLite belongs to one process. `HomeDirectoryLock` takes an flock on the home directory and refuses a
second process by the pid of the first. The kernel drops an flock when its process ends. A service uses
one connection for writes, one for reads and one for surveys, each on its own thread: the event loop
never waits for the disk, and the write-ahead log (WAL) lets a read begin while a commit waits for it. A read
sees every write that was acknowledged before it was requested. `Store.inline` uses no thread, for
simulations under virtual time. With `synchronous=FULL` a commit survives a power loss.

Group commit and the turns of organisations are in `group_commit`: writes that wait share one transaction,
each in its own savepoint. When SQLite rolls the whole transaction back, for example on a full disk,
every member fails with `Retry`.

A database that does not serve (no room, read-only, locked by another program, out of reach) raises
`StoreUnavailable`, also a `Retry`, which `failures` defines. `Store` logs it, once for all callers. Opening
a database writes to it: one that takes no writes is noticed at the start.

PostgreSQL, which replicas share, is in `postgres`. `Store.connect` imports it when it is wanted.
"""

import asyncio
import fcntl
import os
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from rackloom.carve.store.failures import StoreUnavailable, log_store_failure, sqlite_fault
from rackloom.carve.store.group_commit import CommitGroup, Outcome, PendingTransaction, TransactionQueue
from rackloom.carve.store.migrate import migrate_to_head
from rackloom.errors import Refused, Retry

# Exclusive use of the home directory.


class HomeDirectoryLock:
    """An exclusive lock on a home directory, held until `release` or the end of the process."""

    def __init__(self, home: Path) -> None:
        """Take the lock. Raises Refused with the process that has it."""
        home.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise Refused(
                f"{home} is in use by process {holder}",
                nearest_fix="stop that process, or choose another home directory",
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock."""
        os.close(self._fd)


# Members of a group on SQLite.


class _GroupRolledBack(Retry):
    """The shared transaction was rolled back, with the work of its earlier members."""


UNDONE_REASON = "undone together with a change that failed"
ENDED_GROUP = (_GroupRolledBack, StoreUnavailable)
"""After one of these no member of the group is done."""
RunTransaction = Callable[[Callable[[sa.Connection], None]], None]
"""Runs its argument in a transaction: durable when it returns, rolled back when it raises."""


def run_group_commit(
    waiting: TransactionQueue,
    transact: RunTransaction,
    *,
    write: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Run a group of waiting writes, or reads, in one transaction, then resolve the future of each."""
    group = CommitGroup.begin(waiting, _run_member, write=write, spares_savepoint=True, clock=clock)
    if group is None:
        return
    try:
        transact(group.work)
    except BaseException as error:
        group.fail(error)
    else:
        group.resolve()


def _run_member(conn: sa.Connection, job: PendingTransaction) -> Outcome:
    try:
        return (_in_savepoint(conn, job.work) if job.write else job.work(conn)), None
    except ENDED_GROUP:
        raise
    except BaseException as error:
        return None, sqlite_fault(error, write=job.write) or error


def _in_savepoint(conn: sa.Connection, work: Callable[[sa.Connection], Any]) -> Any:
    # Straight to the driver: a savepoint of SQLAlchemy costs more than most of the work inside it.
    connection: Any = conn.connection.dbapi_connection
    connection.execute("SAVEPOINT part")
    try:
        result = work(conn)
        # Fails where `work` swallowed an error that rolled back the whole transaction.
        connection.execute("RELEASE part")
    except BaseException as error:
        if not connection.in_transaction:
            # SQLite rolls the whole transaction back on a full disk: no member may be reported as done.
            raise sqlite_fault(error, write=True) or _GroupRolledBack(UNDONE_REASON, after=1.0) from error
        connection.execute("ROLLBACK TO part")
        connection.execute("RELEASE part")
        raise
    return result


# The SQLite backend.


T = TypeVar("T")

DATABASE = "site.db"
LOCK_MILLISECONDS = 1000
"""The longest wait of a write for a lock. Only tools also write here, and reads wait behind the write."""
_PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON")


class SqliteBackend:
    """`site.db` in a home directory, or a database in memory."""

    is_shared = False

    def __init__(
        self,
        engine: sa.Engine,
        lock: HomeDirectoryLock | None,
        thread: ThreadPoolExecutor | None,
        reader: "_ReadConnection | None" = None,
        surveyor: "_ReadConnection | None" = None,
    ) -> None:
        self._engine = engine
        self._lock = lock
        self._thread = thread
        self._reader = reader
        self._surveyor = surveyor
        self._waiting = TransactionQueue()

    @classmethod
    def open(cls, home: Path) -> "SqliteBackend":
        """Lock `home` and use its database from a thread. Raises Refused if locked."""
        lock = HomeDirectoryLock(home)
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="site-store")
        try:
            engine = thread.submit(_migrated_engine, home / DATABASE).result()
        except BaseException:
            thread.shutdown()
            lock.release()
            raise
        reader, surveyor = (_ReadConnection(home / DATABASE, name) for name in ("reads", "survey"))
        return cls(engine, lock, thread, reader, surveyor)

    @classmethod
    def inline(cls, home: Path | None) -> "SqliteBackend":
        """The same without a thread, and in memory if `home` is None."""
        if home is None:
            return cls(_migrated_engine(None), None, None)
        lock = HomeDirectoryLock(home)
        try:
            return cls(_migrated_engine(home / DATABASE), lock, None)
        except BaseException:
            lock.release()
            raise

    async def transact(self, work: Callable[[sa.Connection], T], *, write: bool, org: str = "") -> T:
        """Run `work` in one transaction. Writes are serial, and so are reads."""
        if self._thread is None or self._reader is None:
            return self._transact(work, write)
        result: Future[T] = self._waiting.add(work, write=write, org=org)
        # A call for each request. It finds nothing when an earlier one took its request into a group.
        if write:
            self._thread.submit(run_group_commit, self._waiting, self._write, write=True)
        else:
            self._reader.submit(run_group_commit, self._waiting, self._reader.transact, write=False)
        return await asyncio.wrap_future(result)

    async def survey(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` on the survey connection, if there are threads."""
        if self._surveyor is None:
            return self._transact(work, write=False)
        return await self._surveyor.read(work)

    async def changes(self) -> AsyncGenerator[str | None, None]:
        """Yields nothing: the lock on the home directory keeps other writers out."""
        await asyncio.Event().wait()
        yield None

    async def close(self) -> None:
        """Finish running transactions and release the home directory."""
        for readers in (self._reader, self._surveyor):
            if readers is not None:
                await readers.close()
        await self._call(self._engine.dispose)
        if self._thread is not None:
            self._thread.shutdown()
        if self._lock is not None:
            self._lock.release()

    async def _call(self, work: Callable[[], T]) -> T:
        if self._thread is None:
            return work()
        future: Future[T] = self._thread.submit(work)
        return await asyncio.wrap_future(future)

    def _write(self, work: Callable[[sa.Connection], None]) -> None:
        self._transact(work, write=True)

    def _transact(self, work: Callable[[sa.Connection], T], write: bool) -> T:
        return _run_transaction(self._engine, work, write)


class _ReadConnection:
    """Another connection, which only reads, on its own thread.

    It stays checked out of SQLAlchemy's pool: to get it for each transaction costs more than most reads.
    After an error of the database, the next transaction has a new one, even if the old one still works.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._engine = _create_engine(path)
        self._conn: sa.Connection | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"site-{name}")
        self.submit = self._thread.submit

    def transact(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in a transaction, on the thread that calls."""
        with _naming_faults(write=False):
            if self._conn is None:
                self._conn = self._engine.connect().execution_options(site_write=False)
            try:
                with self._conn.begin():
                    return work(self._conn)
            except (sa.exc.DBAPIError, sqlite3.Error):
                self._drop()
                raise

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` in a transaction, after those that were submitted before."""
        return await asyncio.wrap_future(self._thread.submit(self.transact, work))

    async def close(self) -> None:
        """Close the connection, after the running read."""
        await asyncio.wrap_future(self._thread.submit(self._dispose))
        self._thread.shutdown()

    def _drop(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            with suppress(sa.exc.SQLAlchemyError, sqlite3.Error):
                conn.invalidate()
                conn.close()

    def _dispose(self) -> None:
        if self._conn is not None:
            self._conn.close()
        self._engine.dispose()


def _run_transaction(engine: sa.Engine, work: Callable[[sa.Connection], T], write: bool) -> T:
    with _naming_faults(write), engine.connect() as base:
        conn = base.execution_options(site_write=write)
        with conn.begin():
            return work(conn)


@contextmanager
def _naming_faults(write: bool) -> Iterator[None]:
    """Turn an error of SQLite into its meaning for the caller."""
    try:
        yield
    except (sa.exc.DBAPIError, sqlite3.Error) as error:
        fault = sqlite_fault(error, write=write)
        if fault is None:
            raise
        raise fault from error


def _create_engine(path: Path | None) -> sa.Engine:
    url = sa.URL.create("sqlite", database=None if path is None else str(path))
    engine = sa.create_engine(url, poolclass=StaticPool, connect_args={"check_same_thread": False})
    sa.event.listen(engine, "connect", _set_pragmas)
    sa.event.listen(engine, "begin", _begin_transaction)
    return engine


def _migrated_engine(path: Path | None) -> sa.Engine:
    engine = _create_engine(path)
    try:
        _run_transaction(engine, _migrate_and_write, write=True)
    except BaseException:
        engine.dispose()
        raise
    return engine


def _migrate_and_write(conn: sa.Connection) -> None:
    migrate_to_head(conn)
    # Writes a page even where nothing is to be migrated: a disk without room is noticed here.
    conn.exec_driver_sql("PRAGMA user_version = 1")


def _set_pragmas(connection: Any, _record: object) -> None:
    # The driver must not open transactions: `_begin_transaction` decides which kind.
    connection.isolation_level = None
    for pragma in (f"busy_timeout={LOCK_MILLISECONDS}", *_PRAGMAS):
        connection.execute(f"PRAGMA {pragma}")


def _begin_transaction(conn: sa.Connection) -> None:
    # Straight to the driver: a statement of SQLAlchemy costs more than most reads.
    driver: Any = conn.connection.dbapi_connection
    write = bool(conn.get_execution_options().get("site_write", False))
    if conn.info.get("site_write") is not write:
        driver.execute(f"PRAGMA query_only={'OFF' if write else 'ON'}")
        conn.info["site_write"] = write
    driver.execute("BEGIN IMMEDIATE" if write else "BEGIN")


# The interface of a backend.


class DatabaseBackend(Protocol):
    """A database behind `Store`. The methods of `Store` document the guarantees of these."""

    is_shared: bool

    async def transact(self, work: Callable[[sa.Connection], T], *, write: bool, org: str = "") -> T:
        """Run `work` in one serializable (or read-only) transaction, in the turn of `org`."""

    async def survey(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work`, a large read, without delaying other transactions."""

    def changes(self) -> AsyncGenerator[str | None, None]:
        """Domains with a changed intent, or None if some may have been missed."""

    async def close(self) -> None:
        """Finish and release everything."""


# The store.


P = ParamSpec("P")


class Recorder(Protocol):
    """Runs a function in its transaction, and records beside it that it ran."""

    def __call__(self, conn: sa.Connection, work: Callable[[sa.Connection], T], /) -> T:
        """Run `work` and return its result."""


@contextmanager
def _logging_failures() -> Iterator[None]:
    try:
        yield
    except StoreUnavailable as failure:
        log_store_failure(failure)
        raise


class Store:
    """The site's records. Made by `open` (a service), `inline` (a simulation) or `connect` (replicas)."""

    def __init__(self, backend: DatabaseBackend, org: str = "", record: Recorder | None = None) -> None:
        """`org` is the organisation for which transactions run, or empty for the site itself."""
        self._backend = backend
        self._org = org
        self._record = record

    @classmethod
    def open(cls, home: Path) -> "Store":
        """Lock `home`, migrate `<home>/site.db` and serve it. Raises Refused if locked."""
        return cls(SqliteBackend.open(home))

    @classmethod
    def inline(cls, home: Path | None = None) -> "Store":
        """The same records without a thread, and in memory if `home` is None."""
        return cls(SqliteBackend.inline(home))

    @classmethod
    async def connect(cls, url: str) -> "Store":
        """Migrate and serve the PostgreSQL database at `url` (postgresql://...), as one of several replicas.

        Raises Refused for a URL of anything else, and Retry when the server cannot be reached.
        """
        # Imported here: a site on SQLite needs no PostgreSQL driver.
        from rackloom.carve.store.postgres import PostgresBackend

        return cls(await PostgresBackend.connect(url))

    def on_behalf_of(self, org: str) -> "Store":
        """The same records. Transactions that have to wait take turns with those of other organisations."""
        return Store(self._backend, org)

    def recorded_by(self, record: Recorder) -> "Store":
        """The same records. `record` runs each function that writes, within its transaction."""
        return Store(self._backend, self._org, record)

    @property
    def is_shared(self) -> bool:
        """Whether other processes may work on the same records."""
        return self._backend.is_shared

    async def run(
        self, fn: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `fn(conn, ...)` in a write transaction: durable when this returns, rolled back when it raises.

        Transactions are serializable: a rule that `fn` checked still holds when it commits. To that end `fn`
        may be run more than once, and only the last run counts, so it changes nothing but records.
        Cancelling the caller does not cancel a transaction that has begun.
        """

        def work(conn: sa.Connection) -> T:
            return fn(conn, *args, **kwargs)

        record = self._record
        with _logging_failures():
            return await self._backend.transact(
                work if record is None else lambda conn: record(conn, work), write=True, org=self._org
            )

    async def read(
        self, fn: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `fn(conn, ...)` on one consistent state. Writing is an error."""
        with _logging_failures():
            return await self._backend.transact(
                lambda conn: fn(conn, *args, **kwargs), write=False, org=self._org
            )

    async def survey(self, fn: Callable[[sa.Connection], T]) -> T:
        """As `read`, for reads of the whole site, without delaying other transactions."""
        with _logging_failures():
            return await self._backend.survey(fn)

    def changes(self) -> AsyncGenerator[str | None, None]:
        """The domain of each change of intent that any process commits, or None if some may have been missed.

        It never ends. Where no other process can write, it never yields either.
        """
        return self._backend.changes()

    async def close(self) -> None:
        """Finish running transactions and release the database."""
        await self._backend.close()
