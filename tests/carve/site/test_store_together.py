"""What waits together shares a commit, and nothing else."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from rackloom.carve.site.store import Store
from rackloom.carve.site.store.together import MOST, Waiting, do_together
from rackloom.carve.site.tables import replica
from rackloom.errors import Retry


def _put(conn: sa.Connection, name: str, fails: bool = False) -> str:
    conn.execute(sa.insert(replica).values(holder=name, until=0.0))
    if fails:
        raise ValueError(name)
    return name


def _names(conn: sa.Connection) -> list[str]:
    return list(conn.execute(sa.select(replica.c.holder).order_by(replica.c.holder)).scalars())


def _in_store(folder: Path, work: Callable[[Store], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        store = Store.open(folder)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


@settings(max_examples=8, deadline=None)
@given(fates=st.lists(st.booleans(), min_size=1, max_size=2 * MOST + 3))
def test_a_write_that_fails_takes_no_other_with_it(
    fates: list[bool], tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.mktemp("home")
    names = [f"{number:03}" for number in range(len(fates))]

    async def work(store: Store) -> Any:
        asked = (store.run(_put, name, fails) for name, fails in zip(names, fates, strict=True))
        return await asyncio.gather(*asked, return_exceptions=True), await store.read(_names)

    told, _ = _in_store(home, work)
    kept = [name for name, fails in zip(names, fates, strict=True) if not fails]
    assert [one for one in told if isinstance(one, str)] == kept
    assert [str(one) for one in told if isinstance(one, ValueError)] == [
        name for name, fails in zip(names, fates, strict=True) if fails
    ]
    assert _in_store(home, lambda store: store.read(_names)) == kept


def test_nobody_is_told_of_success_before_the_commit(tmp_path: Path) -> None:
    waiting = Waiting()
    futures = [waiting.add(lambda _: "done", write=True) for _ in range(3)]
    writes, _ = waiting.take()

    def transact(work: Callable[[sa.Connection], None]) -> None:
        with sa.create_engine("sqlite://").connect() as conn:
            work(conn)
        assert not any(future.done() for future in futures)
        raise OSError("the disk is gone")

    do_together(writes, transact)
    assert all(isinstance(future.exception(), OSError) for future in futures)


def test_a_change_that_undoes_the_whole_transaction_fails_the_others_too(tmp_path: Path) -> None:
    """SQLite rolls back everything when, for one, the disk is full."""

    def ruin(conn: sa.Connection) -> None:
        _put(conn, "ruin")
        conn.connection.dbapi_connection.rollback()  # type: ignore[union-attr]
        raise OSError("database or disk is full")

    async def work(store: Store) -> Any:
        asked = [store.run(_put, "before"), store.run(ruin), store.run(_put, "after")]
        blocked = asyncio.gather(*asked, return_exceptions=True)
        return await blocked, await store.read(_names)

    told, names = _in_store(tmp_path, work)
    assert names == [one for one in told if isinstance(one, str)]
    assert all(isinstance(one, str | OSError | Retry) for one in told)


def test_who_stopped_waiting_before_it_began_is_not_served() -> None:
    waiting = Waiting()
    gone, there = waiting.add(lambda _: 1, write=True), waiting.add(lambda _: 2, write=False)
    assert gone.cancel()
    writes, reads = waiting.take()
    assert [job.told for job in writes + reads] == [there]
