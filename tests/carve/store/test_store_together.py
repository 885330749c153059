"""Writes that wait together share a commit, and nothing else."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from rackloom.carve.store.database import Store, run_group_commit
from rackloom.carve.store.group_commit import MAX_GROUP_SIZE, TransactionQueue
from rackloom.carve.store.schema import replica
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
@given(fates=st.lists(st.booleans(), min_size=1, max_size=2 * MAX_GROUP_SIZE + 3))
def test_a_write_that_fails_takes_no_other_with_it(
    fates: list[bool], tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.mktemp("home")
    names = [f"{number:03}" for number in range(len(fates))]

    async def work(store: Store) -> Any:
        asked = (store.run(_put, name, fails) for name, fails in zip(names, fates, strict=True))
        return await asyncio.gather(*asked, return_exceptions=True), await store.read(_names)

    outcomes, _ = _in_store(home, work)
    kept = [name for name, fails in zip(names, fates, strict=True) if not fails]
    assert [outcome for outcome in outcomes if isinstance(outcome, str)] == kept
    assert [str(outcome) for outcome in outcomes if isinstance(outcome, ValueError)] == [
        name for name, fails in zip(names, fates, strict=True) if fails
    ]
    assert _in_store(home, lambda store: store.read(_names)) == kept


def test_nobody_is_told_of_success_before_the_commit(tmp_path: Path) -> None:
    waiting = TransactionQueue()
    futures = [waiting.add(lambda _: "done", write=True, org="") for _ in range(3)]

    def transact(work: Callable[[sa.Connection], None]) -> None:
        with sa.create_engine("sqlite://").connect() as conn:
            work(conn)
        assert not any(future.done() for future in futures)
        raise OSError("the disk is gone")

    run_group_commit(waiting, transact, write=True)
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

    outcomes, names = _in_store(tmp_path, work)
    # After the rollback the others may be tried again, in any order.
    assert sorted(names) == sorted(outcome for outcome in outcomes if isinstance(outcome, str))
    assert all(isinstance(outcome, str | OSError | Retry) for outcome in outcomes)


def test_a_change_that_hides_such_an_end_fails_the_others_too(tmp_path: Path) -> None:
    def ruin(conn: sa.Connection) -> str:
        conn.connection.dbapi_connection.rollback()  # type: ignore[union-attr]
        return "all is well"

    async def work(store: Store) -> Any:
        # The first is done alone, and those that arrive during it are done together.
        asked = [store.run(_put, name) for name in ("first", "before")] + [store.run(ruin)]
        outcomes = await asyncio.gather(*asked, store.run(_put, "after"), return_exceptions=True)
        return outcomes, await store.read(_names)

    outcomes, names = _in_store(tmp_path, work)
    assert names == sorted(outcome for outcome in outcomes if outcome in ("first", "before", "after"))


@pytest.mark.parametrize("together", [1, 2, 40])
def test_a_full_disk_loses_nothing_that_was_acknowledged(tmp_path: Path, together: int) -> None:
    async def work(store: Store) -> Any:
        await store.run(lambda conn: conn.exec_driver_sql("PRAGMA max_page_count=1"))  # as few as it has
        names = [f"{number:03}-{'x' * 3000}" for number in range(200)]
        outcomes: list[Any] = []
        for start in range(0, len(names), together):
            asked = [store.run(_put, name) for name in names[start : start + together]]
            outcomes += await asyncio.gather(*asked, return_exceptions=True)
        kept = await store.read(_names)
        await store.run(lambda conn: conn.exec_driver_sql("PRAGMA max_page_count=1000000"))
        await store.run(_put, "when there is room again")
        return outcomes, kept

    outcomes, kept = _in_store(tmp_path, work)
    assert [outcome for outcome in outcomes if isinstance(outcome, str)] == kept
    assert any(isinstance(outcome, sa.exc.OperationalError | Retry) for outcome in outcomes)
    after = _in_store(tmp_path, lambda store: store.read(_names))
    assert after == [*kept, "when there is room again"]


def test_who_stopped_waiting_before_it_began_is_not_served() -> None:
    waiting = TransactionQueue()
    gone, there = (waiting.add(lambda _: None, write=True, org="") for _ in range(2))
    assert gone.cancel()
    begun = waiting.begin(write=True)
    assert begun is not None
    assert begun.result is there
    assert waiting.begin(write=True) is None


@pytest.mark.slow
def test_what_was_acknowledged_together_survives_a_killed_process(tmp_path: Path) -> None:
    script = """
import asyncio, os, signal, sys, threading
from pathlib import Path
import sqlalchemy as sa
from rackloom.carve.store.database import Store
from rackloom.carve.store.schema import replica

def put(conn, name):
    conn.execute(sa.insert(replica).values(holder=name, until=0.0))

async def one(store, name):
    await store.run(put, name)
    os.write(1, f"{name}\\n".encode())

async def main():
    store = Store.open(Path(sys.argv[1]))
    asking = [asyncio.create_task(one(store, f"{number:04}")) for number in range(2000)]
    while sum(task.done() for task in asking) < int(sys.argv[2]):
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    for life, acknowledged in enumerate((1, 70, 300)):
        home = tmp_path / str(life)
        home.mkdir()
        died = subprocess.run(
            [sys.executable, "-c", script, str(home), str(acknowledged)],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert died.returncode == -signal.SIGKILL, died.stderr
        lines = died.stdout.split()
        assert len(lines) >= acknowledged
        assert set(lines) <= set(_in_store(home, lambda store: store.read(_names)))


def test_who_is_cancelled_in_the_middle_takes_nobody_along(tmp_path: Path) -> None:
    async def work(store: Store) -> Any:
        asking = {
            f"{number:03}": asyncio.create_task(store.run(_put, f"{number:03}", number % 7 == 3))
            for number in range(300)
        }
        await asyncio.sleep(0)
        for number, task in enumerate(asking.values()):
            if number % 3 == 0:
                task.cancel()
        outcomes = await asyncio.gather(*asking.values(), return_exceptions=True)
        assert await store.run(_put, "and it goes on") == "and it goes on"
        return [outcome for outcome in outcomes if isinstance(outcome, str)], await store.read(_names)

    outcomes, kept = _in_store(tmp_path, work)
    assert len(outcomes) >= 150
    assert set(outcomes) <= set(kept)
    assert not {name for name in kept if name.isdigit() and int(name) % 7 == 3}


class _Groups:
    """Runs groups on a connection that is never written to. Records each member's organisation."""

    def __init__(self) -> None:
        self.waiting = TransactionQueue()
        self.groups: list[list[str]] = []
        self.seconds = 0.0

    def ask(self, org: str, *, then: Callable[[], object] = lambda: None) -> None:
        def work(_: sa.Connection) -> None:
            self.groups[-1].append(org)
            self.seconds += 1.0
            then()

        self.waiting.add(work, write=True, org=org)

    def run(self) -> list[list[str]]:
        while self.waiting.has(write=True):
            run_group_commit(self.waiting, self._transact, write=True, clock=lambda: self.seconds)
        return self.groups

    def _transact(self, work: Callable[[sa.Connection], None]) -> None:
        self.groups.append([])
        with sa.create_engine("sqlite://").connect() as conn:
            conn.exec_driver_sql("BEGIN")
            work(conn)


def test_an_organisation_alone_shares_commits_among_all_its_writes() -> None:
    groups = _Groups()
    for _ in range(MAX_GROUP_SIZE + 3):
        groups.ask("busy")
    assert [len(group) for group in groups.run()] == [MAX_GROUP_SIZE, 3]


def test_nobody_waits_for_the_backlog_of_another() -> None:
    groups = _Groups()
    for _ in range(6):
        groups.ask("busy")
    for _ in range(2):
        groups.ask("quiet")
    assert groups.run() == [["busy", "quiet"], ["busy", "quiet"], ["busy"] * 4]


def test_a_newcomer_shares_the_commit_of_a_group_that_has_begun() -> None:
    groups = _Groups()
    groups.ask("busy", then=lambda: groups.ask("quiet"))
    for _ in range(5):
        groups.ask("busy")
    assert groups.run()[0] == ["busy", "quiet"]


def test_no_read_waits_for_a_write(tmp_path: Path) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def work(conn: sa.Connection) -> None:
        _put(conn, "new")
        begun.set()
        assert goes_on.wait(60)

    async def story(store: Store) -> list[list[str]]:
        writing = asyncio.create_task(store.run(work))
        await asyncio.to_thread(begun.wait, 60)
        before = await store.read(_names)
        goes_on.set()
        await writing
        return [before, await store.read(_names)]

    assert _in_store(tmp_path, story) == [[], ["new"]]


@pytest.mark.parametrize("writers", [1, 8])
def test_a_read_sees_every_write_that_was_acknowledged(tmp_path: Path, writers: int) -> None:
    async def write_and_look(store: Store, name: str) -> bool:
        await store.run(_put, name)
        return name in await store.read(_names)

    async def story(store: Store) -> list[bool]:
        names = [f"{number:03}" for number in range(120)]
        seen = []
        for first in range(0, len(names), writers):
            group = names[first : first + writers]
            seen += await asyncio.gather(*(write_and_look(store, name) for name in group))
        return seen

    assert all(_in_store(tmp_path, story))


def test_who_asks_for_long_transactions_has_fewer_of_them() -> None:
    groups = _Groups()

    def long() -> None:
        groups.seconds += 9.0

    for _ in range(10):
        groups.ask("long", then=long)
    for _ in range(60):
        groups.ask("short")
    order = [org for group in groups.run() for org in group]
    assert order[:44].count("long") <= 6
