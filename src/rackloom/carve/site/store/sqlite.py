"""SQLite: one process owns it.

A service uses one connection from a dedicated thread, so that the event loop never waits for the disk, and a
second one for surveys, which the WAL lets read meanwhile. A simulation under virtual time uses it inline,
because a thread has no virtual clock.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from rackloom.carve.site.lock import HomeLock
from rackloom.carve.site.migrate import upgrade
from rackloom.carve.site.store.together import Waiting, do_together

T = TypeVar("T")

DATABASE = "site.db"


class SqliteBackend:
    """`site.db` in a home directory, or a database in memory."""

    is_shared = False

    def __init__(
        self,
        engine: sa.Engine,
        lock: HomeLock | None,
        thread: ThreadPoolExecutor | None,
        surveyor: "_Surveyor | None" = None,
    ) -> None:
        self._engine = engine
        self._lock = lock
        self._thread = thread
        self._surveyor = surveyor
        self._waiting = Waiting()

    @classmethod
    def open(cls, home: Path) -> "SqliteBackend":
        """Lock `home` and use its database from a thread. Raises Refused if locked."""
        lock = HomeLock(home)
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="site-store")
        try:
            engine = thread.submit(_engine, home / DATABASE).result()
        except BaseException:
            thread.shutdown()
            lock.release()
            raise
        return cls(engine, lock, thread, _Surveyor(home / DATABASE))

    @classmethod
    def inline(cls, home: Path | None) -> "SqliteBackend":
        """The same without a thread; in memory when `home` is None."""
        if home is None:
            return cls(_engine(None), None, None)
        lock = HomeLock(home)
        try:
            return cls(_engine(home / DATABASE), lock, None)
        except BaseException:
            lock.release()
            raise

    async def transact(self, work: Callable[[sa.Connection], T], *, write: bool) -> T:
        """Run `work` in one transaction; with one connection every one is serial."""
        if self._thread is None:
            return self._transact(work, write)
        told: Future[T] = self._waiting.add(work, write=write)
        self._thread.submit(self._work_off)
        return await asyncio.wrap_future(told)

    async def survey(self, work: Callable[[sa.Connection], T]) -> T:
        """Run `work` on a connection of its own, where there are threads."""
        if self._surveyor is None:
            return self._transact(work, write=False)
        return await self._surveyor.read(work)

    async def changes(self) -> AsyncGenerator[str | None, None]:
        """Nothing, ever: the lock on the home directory keeps other writers out."""
        await asyncio.Event().wait()
        yield None

    async def close(self) -> None:
        """Finish what is under way and give the home directory back."""
        if self._surveyor is not None:
            await self._surveyor.close()
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

    def _work_off(self) -> None:
        """Do what waits; nothing, when an earlier turn took it along."""
        writes, reads = self._waiting.take()
        do_together(writes, lambda work: self._transact(work, write=True))
        do_together(reads, lambda work: self._transact(work, write=False))

    def _transact(self, work: Callable[[sa.Connection], T], write: bool) -> T:
        return _transact(self._engine, work, write)


class _Surveyor:
    """A second connection, from a thread of its own, that only reads."""

    def __init__(self, path: Path) -> None:
        self._engine = _connecting(path)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="site-survey")

    async def read(self, work: Callable[[sa.Connection], T]) -> T:
        future: Future[T] = self._thread.submit(_transact, self._engine, work, write=False)
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Once what is under way has ended."""
        await asyncio.wrap_future(self._thread.submit(self._engine.dispose))
        self._thread.shutdown()


def _transact(engine: sa.Engine, work: Callable[[sa.Connection], T], write: bool) -> T:
    with engine.connect() as base:
        conn = base.execution_options(site_write=write)
        with conn.begin():
            return work(conn)


def _connecting(path: Path | None) -> sa.Engine:
    url = sa.URL.create("sqlite", database=None if path is None else str(path))
    engine = sa.create_engine(url, poolclass=StaticPool, connect_args={"check_same_thread": False})
    sa.event.listen(engine, "connect", _prepare)
    sa.event.listen(engine, "begin", _begin)
    return engine


def _engine(path: Path | None) -> sa.Engine:
    engine = _connecting(path)
    try:
        with engine.connect() as base, base.execution_options(site_write=True).begin():
            upgrade(base)
    except BaseException:
        engine.dispose()
        raise
    return engine


def _prepare(connection: Any, _record: object) -> None:
    # The driver must not open transactions by itself: `_begin` says which kind is wanted.
    connection.isolation_level = None
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=5000"):
        connection.execute(f"PRAGMA {pragma}")


def _begin(conn: sa.Connection) -> None:
    # Straight to the driver: a statement of the library costs more than most of what is read in between.
    driver: Any = conn.connection.dbapi_connection
    write = bool(conn.get_execution_options().get("site_write", False))
    if conn.info.get("site_write") is not write:
        driver.execute(f"PRAGMA query_only={'OFF' if write else 'ON'}")
        conn.info["site_write"] = write
    driver.execute("BEGIN IMMEDIATE" if write else "BEGIN")
