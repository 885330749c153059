"""Where record functions run: one SQLite connection, one transaction per call.

Record functions are synchronous, `fn(conn, ...)`. A service runs them on one dedicated thread, so that
the event loop never waits for the disk; a simulation under virtual time runs the very same functions
inline, because a thread has no virtual clock.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from rackloom.carve.site.lock import HomeLock
from rackloom.carve.site.migrate import upgrade

P = ParamSpec("P")
T = TypeVar("T")

DATABASE = "site.db"


class Store:
    """The site's records. Made by `open` (a service) or `inline` (a simulation)."""

    def __init__(self, engine: sa.Engine, lock: HomeLock | None, thread: ThreadPoolExecutor | None) -> None:
        self._engine = engine
        self._lock = lock
        self._thread = thread

    @classmethod
    def open(cls, home: Path) -> "Store":
        """Lock `home`, migrate `<home>/site.db` and serve it from one thread. Raises Refused if locked."""
        lock = HomeLock(home)
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="site-store")
        try:
            engine = thread.submit(_engine, home / DATABASE).result()
        except BaseException:
            thread.shutdown()
            lock.release()
            raise
        return cls(engine, lock, thread)

    @classmethod
    def inline(cls, home: Path | None = None) -> "Store":
        """The same records without a thread; in memory when `home` is None."""
        if home is None:
            return cls(_engine(None), None, None)
        lock = HomeLock(home)
        try:
            return cls(_engine(home / DATABASE), lock, None)
        except BaseException:
            lock.release()
            raise

    async def run(
        self, fn: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `fn(conn, ...)` in a write transaction: durable when this returns, undone when it raises.

        Cancelling the caller does not cancel a transaction that has begun.
        """
        return await self._call(partial(self._transact, True, fn, *args, **kwargs))

    async def read(
        self, fn: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `fn(conn, ...)` on one consistent state; writing is an error."""
        return await self._call(partial(self._transact, False, fn, *args, **kwargs))

    async def close(self) -> None:
        """Finish what is under way and give the home directory back."""
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

    def _transact(self, write: bool, fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        with self._engine.connect() as base:
            conn = base.execution_options(site_write=write)
            with conn.begin():
                return fn(conn, *args, **kwargs)


def _engine(path: Path | None) -> sa.Engine:
    url = sa.URL.create("sqlite", database=None if path is None else str(path))
    engine = sa.create_engine(url, poolclass=StaticPool, connect_args={"check_same_thread": False})
    sa.event.listen(engine, "connect", _prepare)
    sa.event.listen(engine, "begin", _begin)
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
    write = bool(conn.get_execution_options().get("site_write", False))
    conn.exec_driver_sql(f"PRAGMA query_only={'OFF' if write else 'ON'}")
    conn.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")
