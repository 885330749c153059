"""Where record functions run: one transaction per call, on SQLite or on PostgreSQL.

Record functions are synchronous, `fn(conn, ...)`, and do not know which database they run on.
"""

from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa

from rackloom.carve.site.store.backend import Backend
from rackloom.carve.site.store.sqlite import SqliteBackend

P = ParamSpec("P")
T = TypeVar("T")


class Store:
    """The site's records. Made by `open` (a service), `inline` (a simulation) or `connect` (replicas)."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @classmethod
    def open(cls, home: Path) -> "Store":
        """Lock `home`, migrate `<home>/site.db` and serve it from one thread. Raises Refused if locked."""
        return cls(SqliteBackend.open(home))

    @classmethod
    def inline(cls, home: Path | None = None) -> "Store":
        """The same records without a thread; in memory when `home` is None."""
        return cls(SqliteBackend.inline(home))

    @classmethod
    async def connect(cls, url: str) -> "Store":
        """Migrate and serve the PostgreSQL database at `url` (postgresql://...), as one of several replicas.

        Raises Refused for a URL of anything else, and Retry when the server cannot be reached.
        """
        # Imported where it is wanted: a site on SQLite needs no PostgreSQL driver.
        from rackloom.carve.site.store.postgres import PostgresBackend

        return cls(await PostgresBackend.connect(url))

    @property
    def is_shared(self) -> bool:
        """Whether other processes may work on the same records."""
        return self._backend.is_shared

    async def run(
        self, fn: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `fn(conn, ...)` in a write transaction: durable when this returns, undone when it raises.

        Transactions are serializable: a rule that `fn` checked still holds when it commits. To that end `fn`
        may be run more than once, and only the last run counts, so it changes nothing but records.
        Cancelling the caller does not cancel a transaction that has begun.
        """
        return await self._backend.transact(lambda conn: fn(conn, *args, **kwargs), write=True)

    async def read(
        self, fn: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `fn(conn, ...)` on one consistent state; writing is an error."""
        return await self._backend.transact(lambda conn: fn(conn, *args, **kwargs), write=False)

    async def survey(self, fn: Callable[[sa.Connection], T]) -> T:
        """As `read`, for readings of the whole site; in a home, nobody who reads or writes waits for it."""
        return await self._backend.survey(fn)

    def changes(self) -> AsyncGenerator[str | None, None]:
        """The domain of each change of intent that any process commits; None when some may have been missed.

        It never ends. Where no other process can write, it never yields either.
        """
        return self._backend.changes()

    async def close(self) -> None:
        """Finish what is under way and give the database back."""
        await self._backend.close()
