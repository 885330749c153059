"""A process under simulation: its life, its sudden end, and the records as it reaches them."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

import sqlalchemy as sa

from rackloom.carve.site.store.backend import Backend
from rackloom.carve.site.tables import domain_revision

T = TypeVar("T")


class Killed(BaseException):
    """The process is gone: nothing after this line happens."""


class Life:
    """One process, from its start to its end. `fuse` is the number of the point at which it is killed."""

    def __init__(self, rng: random.Random, fuse: int | None) -> None:
        self.alive = True
        self.ended_at: float | None = None
        self.ended = asyncio.Event()
        self.points = 0
        self.fuse = fuse
        self.rng = rng
        self.tasks: list[asyncio.Task[Any]] = []

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run something that ends with the process."""
        task = asyncio.create_task(work)
        self.tasks.append(task)
        return task

    def checkpoint(self) -> None:
        """A point at which the process may be killed; a dead process gets no further."""
        self.points += 1
        if self.points == self.fuse:
            self.kill()
        if not self.alive:
            raise Killed

    def kill(self) -> None:
        """End the process where it stands."""
        if self.alive:
            self.ended_at = asyncio.get_running_loop().time()
        self.alive = False
        self.ended.set()

    async def bury(self) -> None:
        """Take away what is left of it."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class Bulletin:
    """Which domains' intent has changed, told to every replica, as PostgreSQL tells those that listen."""

    def __init__(self, records: Backend) -> None:
        self._records = records
        self._told: dict[str, int] = {}
        self._listeners: list[asyncio.Queue[str | None]] = []

    async def post(self) -> None:
        """Tell of what the transaction that has just ended changed."""
        now = await self._records.transact(_revisions, write=False)
        changed = [domain for domain, revision in now.items() if self._told.get(domain) != revision]
        self._told = now
        for listener in self._listeners:
            for domain in changed:
                listener.put_nowait(domain)

    async def listen(self) -> AsyncGenerator[str | None, None]:
        """Each change from now on; first None, since earlier ones were missed."""
        mine: asyncio.Queue[str | None] = asyncio.Queue()
        self._listeners.append(mine)
        try:
            yield None
            while True:
                yield await mine.get()
        finally:
            self._listeners.remove(mine)


class MortalBackend:
    """The records as one process reaches them: other tasks run meanwhile, and the process may end there.

    With a bulletin the records are shared with other processes. Their transactions come one after another, as
    those of PostgreSQL do behind the lock that every writer takes.
    """

    def __init__(self, records: Backend, life: Life, bulletin: Bulletin | None = None) -> None:
        self.is_shared = bulletin is not None
        self._records = records
        self._life = life
        self._bulletin = bulletin

    async def transact(self, work: Callable[[sa.Connection], T], *, write: bool) -> T:
        """As the real one, with a point of death on both sides of every write."""
        await self._elsewhere()
        self._die_here(write)
        result = await self._records.transact(work, write=write)
        if write and self._bulletin is not None:
            await self._bulletin.post()
        self._die_here(write)
        await self._elsewhere()
        return result

    async def survey(self, work: Callable[[sa.Connection], T]) -> T:
        """As any reading."""
        return await self.transact(work, write=False)

    def changes(self) -> AsyncGenerator[str | None, None]:
        """What other processes write, where there are any."""
        return self._records.changes() if self._bulletin is None else self._bulletin.listen()

    async def close(self) -> None:
        """The records outlive the process."""

    def _die_here(self, write: bool) -> None:
        if write:
            self._life.checkpoint()
        elif not self._life.alive:
            raise Killed

    async def _elsewhere(self) -> None:
        for _ in range(self._life.rng.randrange(3)):
            await asyncio.sleep(0)


def _revisions(conn: sa.Connection) -> dict[str, int]:
    return {row.domain: row.revision for row in conn.execute(sa.select(domain_revision))}
