"""A database that takes no writes: what callers read of it, and that reads go on."""

import asyncio
import errno
import sqlite3
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from structlog.testing import capture_logs
from tests.carve.store.test_store_postgres import END_OTHERS

from rackloom.carve.store.database import DATABASE, Store
from rackloom.carve.store.failures import StoreFault, StoreUnavailable
from rackloom.carve.store.schema import replica
from rackloom.errors import Retry

Work = Callable[[Store], Coroutine[Any, Any, Any]]


def put(conn: sa.Connection, name: str) -> str:
    conn.execute(sa.insert(replica).values(holder=name, until=0.0))
    return name


def names(conn: sa.Connection) -> list[str]:
    return list(conn.execute(sa.select(replica.c.holder).order_by(replica.c.holder)).scalars())


def in_store(opened: Callable[[], Any], work: Work) -> Any:
    async def run() -> Any:
        made = opened()
        store = await made if asyncio.iscoroutine(made) else made
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(run())


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Callable[[], sqlite3.Connection]]:
    """Lets another program lock the database in `tmp_path` for writing."""
    with closing(sqlite3.connect(tmp_path / DATABASE, isolation_level=None)) as other:

        def lock() -> sqlite3.Connection:
            other.execute("BEGIN IMMEDIATE")
            return other

        yield lock


@pytest.mark.slow
def test_a_locked_database_is_read_and_takes_no_writes_until_the_lock_ends(
    tmp_path: Path, locked: Callable[[], sqlite3.Connection]
) -> None:
    async def work(store: Store) -> Any:
        await store.run(put, "before")
        other = locked()
        attempts = [store.run(put, "alone")], [store.run(put, name) for name in ("with", "others")]
        failures = [await asyncio.gather(*group, return_exceptions=True) for group in attempts]
        seen = await store.read(names), await store.survey(names)
        other.execute("ROLLBACK")
        await store.run(put, "then")
        return [failure for group in failures for failure in group], seen, await store.read(names)

    failures, seen, after = in_store(lambda: Store.open(tmp_path), work)
    assert [failure.fault for failure in failures] == [StoreFault.LOCKED] * 3
    assert seen == (["before"], ["before"])
    assert after == ["before", "then"]


@pytest.mark.parametrize("together", [1, 5])
def test_a_full_database_says_so_to_everybody(tmp_path: Path, together: int) -> None:
    async def work(store: Store) -> Any:
        await store.run(lambda conn: conn.exec_driver_sql("PRAGMA max_page_count=1"))  # as few as it has
        # More than the pages that a migration has freed.
        asked = [store.run(put, f"{number}{'x' * 90_000}") for number in range(together)]
        return await asyncio.gather(*asked, return_exceptions=True)

    with capture_logs() as logs:
        failures = in_store(lambda: Store.open(tmp_path), work)
    assert {failure.fault for failure in failures} == {StoreFault.FULL}
    assert {(entry["event"], entry["reason"]) for entry in logs} == {
        ("store.unavailable", "the site's database has no room")
    }


def test_an_undone_group_is_told_the_cause(tmp_path: Path) -> None:
    """One change finds the disk full, and takes the whole transaction along."""

    async def work(store: Store) -> Any:
        await store.run(lambda conn: conn.exec_driver_sql("PRAGMA max_page_count=1"))
        asked = [store.run(put, name) for name in ("first", "small", "x" * 20_000, "last")]
        return await asyncio.gather(*asked, return_exceptions=True), await store.read(names)

    outcomes, kept = in_store(lambda: Store.open(tmp_path), work)
    assert kept == sorted(outcome for outcome in outcomes if isinstance(outcome, str))
    assert all(isinstance(outcome, str | Retry) for outcome in outcomes)
    assert any(isinstance(outcome, StoreUnavailable) for outcome in outcomes)


@pytest.mark.slow
def test_a_locked_database_is_not_opened(tmp_path: Path, locked: Callable[[], sqlite3.Connection]) -> None:
    in_store(lambda: Store.open(tmp_path), lambda store: store.run(put, "before"))
    locked()
    for _ in range(2):  # nor is the home left locked
        with pytest.raises(StoreUnavailable) as failure:
            Store.open(tmp_path)
        assert failure.value.fault is StoreFault.LOCKED


def test_writing_in_a_read_is_a_defect_and_no_fault_of_the_database(tmp_path: Path) -> None:
    with pytest.raises(sa.exc.OperationalError, match="readonly"):
        in_store(lambda: Store.open(tmp_path), lambda store: store.read(put, "x"))


def read_only(server: Any, url: str) -> None:
    """Make a database read-only, for the connections that there are too."""
    name = sa.make_url(url).database

    def work() -> None:
        server.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        server.execute(END_OTHERS.format(name))

    # `execute` runs its own loop, which a running one does not allow in its thread.
    worker = threading.Thread(target=work)
    worker.start()
    worker.join()


def test_a_read_only_server_is_read_and_refuses_writes_at_once(
    postgres_server: Any, postgres_url: str
) -> None:
    async def work(store: Store) -> Any:
        await store.run(put, "before")
        read_only(postgres_server, postgres_url)
        failure = (await asyncio.gather(store.run(put, "after"), return_exceptions=True))[0]
        return failure, await store.read(names), await store.survey(names)

    failure, *seen = in_store(lambda: Store.connect(postgres_url), work)
    assert isinstance(failure, StoreUnavailable)
    assert failure.fault is StoreFault.READ_ONLY
    assert seen == [["before"], ["before"]]


@pytest.mark.slow
def test_a_server_that_is_gone_is_named_without_its_address(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable) as failure:
        asyncio.run(Store.connect(f"postgresql://nobody@/none?host={tmp_path}"))
    assert failure.value.fault is StoreFault.UNREACHABLE
    assert str(tmp_path) not in failure.value.reason


@pytest.mark.parametrize("fault", StoreFault)
def test_anyone_may_read_the_reason(fault: StoreFault) -> None:
    failure = StoreUnavailable(fault, f"[Errno {errno.ECONNREFUSED}] 10.0.0.7:5432 /var/lib/site.db")
    assert "10.0.0.7" not in failure.reason
    assert "Errno" not in failure.reason
    assert "/" not in failure.reason
    assert "the operator of the site must" in failure.reason
