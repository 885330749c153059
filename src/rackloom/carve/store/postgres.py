"""PostgreSQL backend: replicas share one database, one writer at a time, LISTEN/NOTIFY wake-ups.

Locks, in the order in which a write transaction takes them. There is no other order, so replicas do not
deadlock:

1. An exclusive lock on the table `alembic_version`, before the snapshot and until the commit. It makes write
   transactions of all replicas serial, so that each sees every earlier one. Every rule that record functions
   check rests on it: quotas, one instance a tray, plans against intent revisions, epochs of leases, events
   numbered without a gap. Readers do not wait for it.
2. Row locks of what the transaction changes. Under the first lock nobody else waits for them.

Record functions read widely before they write; serializable transactions side by side then abort each other
nearly always. The isolation level is SERIALIZABLE all the same, to protect against writers that use the
database by other means. A transaction that the server rolled back (serialization failure, deadlock, lock
timeout), or that could not be served, runs again with exponential backoff and random delay; after the last
attempt the caller gets `StoreUnavailable`, as it does at once where the database is read-only or has no room.
A connection lost during a commit raises `Unknown`: running the transaction again could apply it twice.

Groups: the writes of a process that wait share one transaction (`group_commit`), and take turns by
organisation. What the server rolls back is repeated for the whole group; a write that fails for a reason of
its own is rolled back to its savepoint, and harms no other. Replicas take turns at the table lock, in the
order in which they asked for it, one group each. While the database is out of reach, what waits behind a
group that gave up is refused with it. `postgres_hosts` chooses among several servers.

Migrations: an advisory lock lets one replica migrate while the others wait, however long it takes. Statements
of a migration have no time limit either, because they may rewrite a large table; each waits only so long for
the locks of others.

Notifications: a change of intent notifies the other replicas when it commits. PostgreSQL drops
notifications for a listener that is away, so `listen_for_intent_changes` yields None after each
connection: anything may have been missed. A notification is a wake-up, never a fact.

Surveys run on separate connections, in the event loop of a separate thread (`BackgroundLoop`), so that
they do not delay the service's event loop.
"""

import asyncio
import random
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import asyncpg
import sqlalchemy as sa
import structlog
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from rackloom.carve.store.failures import StoreFault, StoreUnavailable, postgres_fault
from rackloom.carve.store.group_commit import CommitGroup, Outcome, PendingTransaction, TransactionQueue
from rackloom.carve.store.journal import CAUSE_CHANNEL, INTENT_CHANNEL
from rackloom.carve.store.migrate import migrate_to_head
from rackloom.carve.store.postgres_hosts import PostgresServers
from rackloom.carve.store.prepared import PreparedCommand, defer_changes, run_changes
from rackloom.errors import Retry, Unknown

# Transactions with retries.


log = structlog.get_logger(__name__)

T = TypeVar("T")

UNKNOWN_COMMIT = (
    "the database went away during a commit: whether the change was made is not known, so read the object"
    " before you try again"
)
MAX_ATTEMPTS = 12
FIRST_RETRY_DELAY, MAX_RETRY_DELAY = 0.002, 0.5
"""Seconds before a transaction is run again: doubled each time and drawn at random up to that, so that
replicas which met do not meet again. All delays together take about two seconds."""
ATTEMPT_SECONDS = 10.0
"""After that no attempt begins: a server that is silent costs each one its whole timeout."""
WRITE_OPTIONS: Mapping[str, Any] = {"isolation_level": "AUTOCOMMIT"}
"""`_write_once` sends the commands of a transaction itself, because it sends several of them at a time."""
READ_OPTIONS: Mapping[str, Any] = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
MIGRATE_OPTIONS: Mapping[str, Any] = {"isolation_level": "READ COMMITTED"}
"""A replica that waited for the migration lock must see the migrated schema."""

_BEGIN = PreparedCommand("BEGIN ISOLATION LEVEL SERIALIZABLE; LOCK TABLE alembic_version IN EXCLUSIVE MODE")
"""The lock comes before the snapshot: each transaction sees what those before it did, on any replica.
The table is the one that nothing ever changes but a migration, which writers must not overtake either."""

_ROLLED_BACK = {"40001", "40P01", "55P03"}
"""SQLSTATE serialization_failure, deadlock_detected and lock_not_available: nothing is left of the
transaction, and it may be repeated."""
_SERVER_UNAVAILABLE = {"57P01", "57P02", "57P03", "53300"}
"""SQLSTATE of a server that shuts down, crashed, starts, or has no connection left for us."""


async def run_with_retries(
    engine: AsyncEngine, work: Callable[[sa.Connection], T], options: Mapping[str, Any]
) -> T:
    """Run `work` in one transaction, and again while PostgreSQL rolls it back.

    `options` are those for writing, reading or migrating. Raises Retry in the end, and Unknown where the
    connection was lost during the commit.
    """
    longest = FIRST_RETRY_DELAY
    last: Exception | None = None
    clock = asyncio.get_running_loop().time
    gives_up = clock() + ATTEMPT_SECONDS
    for _ in range(MAX_ATTEMPTS):
        try:
            return await _run_once(engine, work, options)
        except sa.exc.TimeoutError as error:
            # Every connection of the pool is in use, and stayed so for `POOL_SECONDS`.
            raise StoreUnavailable(StoreFault.BUSY, error) from error
        except (sa.exc.DBAPIError, asyncpg.PostgresError, OSError) as error:
            if fault := postgres_fault(error, write=options is not READ_OPTIONS):
                raise fault from error
            if not _is_retryable(error):
                raise
            last = error
        if clock() >= gives_up:
            break
        await asyncio.sleep(random.uniform(0, longest))  # noqa: S311 - spreads load, guards nothing
        longest = min(2 * longest, MAX_RETRY_DELAY)
    contended = last is not None and _sqlstate(last) in _ROLLED_BACK
    why = StoreFault.BUSY if contended else StoreFault.UNREACHABLE
    raise StoreUnavailable(why, getattr(last, "orig", last)) from last


async def _run_once(engine: AsyncEngine, work: Callable[[sa.Connection], T], options: Mapping[str, Any]) -> T:
    async with engine.connect() as base:
        conn = await base.execution_options(**options)
        if options is WRITE_OPTIONS:
            return await conn.run_sync(_write_once, work)
        transaction = await conn.begin()
        result = await conn.run_sync(work)
        await transaction.commit()  # what a lost reading or migration leaves undone is done again
        return result


def _write_once(conn: sa.Connection, work: Callable[[sa.Connection], T]) -> T:
    defer_changes(conn)
    conn.info[_HAS_SAVEPOINT] = False
    try:
        _BEGIN.run(conn)
        result = work(conn)
        run_changes(conn)
    except BaseException:
        _roll_back(conn)
        raise
    _commit(conn)
    return result


def _roll_back(conn: sa.Connection) -> None:
    try:
        defer_changes(conn)
        _ROLL_BACK.run(conn)
    except (sa.exc.SQLAlchemyError, OSError):
        # The server rolls back what a lost connection has not committed.
        conn.invalidate()


def _commit(conn: sa.Connection) -> None:
    try:
        done = _COMMIT.run(conn)
    except (sa.exc.DBAPIError, OSError) as error:
        if _sqlstate(error) in _ROLLED_BACK or postgres_fault(error, write=True):
            raise
        # Whether it is durable cannot be known, so running it again could do it twice.
        log.error("store.commit-unknown", detail=str(error))
        conn.invalidate()
        raise Unknown(UNKNOWN_COMMIT, since=time.time()) from error
    if done != "COMMIT":
        # PostgreSQL commits nothing after an error, and says so in this way only.
        raise sa.exc.InvalidRequestError("a statement failed, and the work went on")


def _is_retryable(error: Exception) -> bool:
    """Whether a transaction that failed before its commit was sent may run again."""
    lost = isinstance(error, OSError) or getattr(error, "connection_invalidated", False)
    return lost or _sqlstate(error) in _ROLLED_BACK | _SERVER_UNAVAILABLE


def _sqlstate(error: Exception) -> str | None:
    return getattr(getattr(error, "orig", error), "sqlstate", None)


# LISTEN: wake-ups from other replicas.


FIRST_RECONNECT_DELAY, MAX_RECONNECT_DELAY = 0.1, 5.0
"""Seconds before a lost connection is opened again; doubled until one holds."""
QUIET_SECONDS = 5.0
"""After so long without a notification, a query checks the connection: TCP does not report a peer that
vanished."""


async def listen_for_intent_changes(engine: AsyncEngine) -> AsyncGenerator[str | None, None]:
    """The changes that are notified, or None after each (re)connection. Never ends."""
    delay = FIRST_RECONNECT_DELAY
    while True:
        try:
            async with _listening(engine) as (connection, notified):
                yield None
                delay = FIRST_RECONNECT_DELAY
                while True:
                    yield await _next_notification(connection, notified)
        except Exception as error:  # whatever the driver or the pool raises: this never ends
            log.warning("store.listen-lost", reason=str(error) or repr(error), again_in=delay)
        await asyncio.sleep(delay)
        delay = min(2 * delay, MAX_RECONNECT_DELAY)


@asynccontextmanager
async def _listening(engine: AsyncEngine) -> AsyncIterator[tuple[Any, "asyncio.Queue[str | None]"]]:
    """A separate connection that listens, and the changes it is notified of, or None if it is lost."""
    notified: asyncio.Queue[str | None] = asyncio.Queue()
    async with engine.connect() as pooled:
        connection: Any = (await pooled.get_raw_connection()).driver_connection
        connection.add_termination_listener(lambda _: notified.put_nowait(None))
        for channel in (INTENT_CHANNEL, CAUSE_CHANNEL):
            await connection.add_listener(
                channel, lambda _c, _pid, _channel, change: notified.put_nowait(change)
            )
        try:
            yield connection, notified
        finally:
            # Not back to the pool: it would go on listening there.
            await pooled.invalidate()


async def _next_notification(connection: Any, notified: "asyncio.Queue[str | None]") -> str:
    while True:
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                domain = await notified.get()
        except TimeoutError:
            await connection.execute("SELECT 1", timeout=QUIET_SECONDS)
            continue
        if domain is None:
            raise ConnectionError("the server closed the connection")
        return domain


# A second event loop in a thread, for surveys.


DRAIN_SECONDS = 5.0
"""At `close`, work that has not ended within that is cancelled."""
CLOSE_SECONDS = 10.0
"""At `close`, cancelled work that has not ended within that is left to end with the process."""
CLOSING_REASON = "the store is closing"


class BackgroundLoop:
    """An event loop in a thread, for coroutines that only read. Use it from one event loop; `close` it."""

    def __init__(self, name: str) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._is_closing = False
        self._requested: set[Future[Any]] = set()
        self._running: set[asyncio.Task[Any]] = set()
        """Used in the thread only."""
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` there. Cancelling the caller does not cancel it, as with a thread that has begun.

        Raises Retry when this is closed before `work` has ended.
        """
        if self._is_closing:
            work.close()
            raise Retry(CLOSING_REASON, after=1.0)
        return await self._submit(self._until_closed(work))

    async def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Wait for running work, cancel the rest, run `last` there, and stop."""
        self._is_closing = True
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._submit(self._end(last))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, CLOSE_SECONDS)
        for future in self._requested:
            if not future.done():
                future.set_exception(Retry(CLOSING_REASON, after=1.0))

    def _serve(self) -> None:
        with self._runner:
            self._loop.run_forever()

    async def _submit(self, work: Coroutine[Any, Any, T]) -> T:
        requested = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._requested.add(requested)
        running = asyncio.wrap_future(requested)
        running.add_done_callback(_retrieve_exception)
        running.add_done_callback(lambda _: self._requested.discard(requested))
        return await asyncio.shield(running)

    async def _until_closed(self, work: Coroutine[Any, Any, T]) -> T:
        running = asyncio.ensure_future(work)
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        try:
            return await running
        except asyncio.CancelledError:
            # Only `close` cancels this task. The caller itself was not cancelled.
            raise Retry(CLOSING_REASON, after=1.0) from None

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        running = set(self._running)
        if running:
            await asyncio.wait(running, timeout=DRAIN_SECONDS)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await last()


def _retrieve_exception(done: "asyncio.Future[Any]") -> None:
    """Mark the exception as retrieved: asyncio reports a failure whose caller went away otherwise."""
    if not done.cancelled():
        done.exception()


# Members of a group.


GROUP_SECONDS = 0.05
"""After that nobody joins a group: the other replicas wait for it, and so does the renewal of a lease."""


def _run_member(conn: sa.Connection, job: PendingTransaction) -> Outcome:
    """Run `job` in a savepoint. Raises what leaves nothing of the transaction, or of the connection."""
    if not conn.info[_HAS_SAVEPOINT]:
        _SAVEPOINT.run(conn)
        conn.info[_HAS_SAVEPOINT] = True
    try:
        result = job.work(conn)
        run_changes(conn)
        # Fails where the work swallowed an error of a statement, after which PostgreSQL commits nothing.
        _NEXT_SAVEPOINT.run(conn)
    except Exception as error:
        if postgres_fault(error, write=True) or _is_retryable(error):
            raise
        defer_changes(conn)
        conn.exec_driver_sql("ROLLBACK TO part")
        return None, error
    return result, None


_HAS_SAVEPOINT = "has_savepoint"
_SAVEPOINT = PreparedCommand("SAVEPOINT part")
_NEXT_SAVEPOINT = PreparedCommand("RELEASE part; SAVEPOINT part")
_COMMIT, _ROLL_BACK = PreparedCommand("COMMIT"), PreparedCommand("ROLLBACK")


# The backend.


COMMAND_SECONDS = 10.0
"""No statement takes a tenth of that: a server that is silent for so long is gone."""
POOL_SECONDS = 10.0
"""How long a transaction waits for a connection of the pool, which those before it have."""
MIGRATION_LOCK = 0x5241434B4C4F4F4D
"""Advisory lock that lets one replica migrate while the others wait: the letters RACKLOOM."""

_SESSION = {
    "application_name": "rackloom",
    # Milliseconds. A replica that stops inside a transaction must not keep the others from writing.
    "idle_in_transaction_session_timeout": "2000",
    "lock_timeout": "5000",
    # Rows of one tenant are found by an index, in memory or on a disk without a head. A merge walks over all.
    "random_page_cost": "1.1",
    "enable_mergejoin": "off",
}
_SURVEY_SESSION = {**_SESSION, "idle_in_transaction_session_timeout": "60000"}
"""Between two statements a survey converts thousands of rows, and it holds no lock that writers need. A
migration may convert as many."""


class PostgresBackend:
    """One database that replicas share. Use it in the event loop that connected it."""

    is_shared = True

    def __init__(self, engine: AsyncEngine, survey_engine: AsyncEngine) -> None:
        self._engine = engine
        self._survey_engine = survey_engine
        self._survey_loop = BackgroundLoop("site-survey")
        self._waiting = TransactionQueue()
        self._writer: asyncio.Task[None] | None = None
        self._under_way: set[asyncio.Task[Any]] = set()

    @classmethod
    async def connect(cls, url: str) -> "PostgresBackend":
        """Connect to `url` and migrate it. Raises Refused for another kind of URL, Retry if out of reach."""
        migrating = _engine(url, _SURVEY_SESSION, command_seconds=None)
        try:
            await run_with_retries(migrating, _migrate, MIGRATE_OPTIONS)
        finally:
            await migrating.dispose()
        return cls(engine_of(url), engine_of(url, _SURVEY_SESSION))

    async def transact(self, work: Callable[[sa.Connection], T], *, write: bool, org: str = "") -> T:
        """Run `work` in one transaction, and again while PostgreSQL undoes it. Raises Retry in the end."""
        if write:
            return await self._write(work, org)
        running = asyncio.ensure_future(run_with_retries(self._engine, work, READ_OPTIONS))
        self._under_way.add(running)
        running.add_done_callback(self._under_way.discard)
        return await asyncio.shield(running)

    async def survey(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` on separate connections and in a separate thread: converting many rows takes long."""
        return await self._survey_loop.do(run_with_retries(self._survey_engine, work, READ_OPTIONS))

    def changes(self) -> AsyncGenerator[str | None, None]:
        """Domains whose intent any replica changed, or None after each (re)connection."""
        return listen_for_intent_changes(self._engine)

    async def close(self) -> None:
        """Finish running transactions and close the connections."""
        await asyncio.gather(*self._under_way, return_exceptions=True)
        await self._survey_loop.close(self._survey_engine.dispose)
        await self._engine.dispose()

    async def _write(self, work: Callable[[sa.Connection], T], org: str) -> T:
        # Waiting here, and not for the table lock, leaves the pooled connections to readers.
        result: Future[T] = self._waiting.add(work, write=True, org=org)
        if self._writer is None:
            self._writer = asyncio.ensure_future(self._write_what_waits())
            self._under_way.add(self._writer)
            self._writer.add_done_callback(self._under_way.discard)
        return await asyncio.wrap_future(result)

    async def _write_what_waits(self) -> None:
        """One group after another, until nothing waits."""
        try:
            while (
                group := CommitGroup.begin(
                    self._waiting, _run_member, write=True, spares_savepoint=True, longest=GROUP_SECONDS
                )
            ) is not None:
                try:
                    await run_with_retries(self._engine, group.work, WRITE_OPTIONS)
                except BaseException as error:
                    group.fail(error)
                    if isinstance(error, StoreUnavailable) and error.fault is StoreFault.UNREACHABLE:
                        # No other write waits for a server that was out of reach just now.
                        while (job := self._waiting.begin(write=True)) is not None:
                            job.result.set_exception(error)
                    if not isinstance(error, Exception):
                        raise
                else:
                    group.resolve()
        finally:
            self._writer = None


def engine_of(url: str, session: Mapping[str, str] = _SESSION) -> AsyncEngine:
    """Connections to `url`, each made when it is wanted. Raises Refused for another kind of URL."""
    return _engine(url, session, command_seconds=COMMAND_SECONDS)


def _engine(url: str, session: Mapping[str, str], command_seconds: float | None) -> AsyncEngine:
    options = {"server_settings": dict(session), "command_timeout": command_seconds}
    servers = PostgresServers(url, options)
    engine = create_async_engine(
        "postgresql+asyncpg://", async_creator=servers.connect, pool_timeout=POOL_SECONDS
    )
    sa.event.listen(engine.sync_engine, "before_cursor_execute", lambda conn, *_: run_changes(conn))
    return engine


def _migrate(conn: sa.Connection) -> None:
    conn.exec_driver_sql("SET LOCAL lock_timeout = 0")
    conn.execute(sa.select(sa.func.pg_advisory_xact_lock(MIGRATION_LOCK)))
    conn.exec_driver_sql("SET LOCAL lock_timeout TO DEFAULT")
    migrate_to_head(conn)
    # Writes a row even where nothing is to be migrated: a server that takes no writes is noticed here.
    conn.exec_driver_sql("UPDATE alembic_version SET version_num = version_num")
