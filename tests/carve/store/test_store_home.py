"""Promises of a store in a home directory alone: one process, one thread, and a durable file."""

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rackloom.carve.store import journal
from rackloom.carve.store.database import Store
from rackloom.carve.store.schema import tenant


@pytest.mark.slow
def test_a_second_process_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    store = Store.inline(tmp_path)
    script = (
        "import sys; from pathlib import Path; from rackloom.carve.store.database import Store\n"
        "from rackloom.errors import Refused\n"
        "try: Store.open(Path(sys.argv[1]))\n"
        "except Refused as refusal: print(refusal)"
    )
    second = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    asyncio.run(store.close())
    assert f"{tmp_path} is in use by process {os.getpid()}" in second.stdout


def test_a_closed_home_can_be_opened_again(tmp_path: Path) -> None:
    async def grow() -> int:
        store = Store.open(tmp_path)
        await store.run(journal.increment_revisions, ["d"])
        found = await store.read(journal.current_revision, "d")
        await store.close()
        return found

    assert asyncio.run(grow()) == 1
    assert asyncio.run(grow()) == 2


def test_a_home_whose_database_cannot_be_opened_is_not_left_locked(tmp_path: Path) -> None:
    (tmp_path / "site.db").write_text("this is no database, but long enough to be looked at" * 50)
    for _ in range(2):
        with pytest.raises(sa.exc.DatabaseError):
            Store.open(tmp_path)


def test_an_open_store_works_on_one_thread_that_is_not_the_callers(tmp_path: Path) -> None:
    async def threads() -> set[int]:
        store = Store.open(tmp_path)
        found = await asyncio.gather(*(store.read(lambda _: threading.get_ident()) for _ in range(10)))
        await store.close()
        return set(found)

    (worker,) = asyncio.run(threads())
    assert worker != threading.get_ident()


def test_an_inline_store_never_suspends() -> None:
    store = Store.inline()
    for coroutine in (
        store.run(journal.increment_revisions, ["d"]),
        store.read(journal.current_revision, "d"),
        store.survey(lambda conn: journal.current_revision(conn, "d")),
        store.close(),
    ):
        with pytest.raises(StopIteration):
            coroutine.send(None)


def test_the_journal_is_durable_and_keys_are_enforced(tmp_path: Path) -> None:
    def pragmas(conn: sa.Connection) -> list[object]:
        names = ("journal_mode", "synchronous", "foreign_keys")
        return [conn.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names]

    async def look() -> object:
        store = Store.open(tmp_path)
        found = await store.read(pragmas)
        await store.close()
        return found

    assert asyncio.run(look()) == ["wal", 2, 1]


@pytest.mark.slow
def test_an_acknowledged_write_survives_a_killed_process(tmp_path: Path) -> None:
    script = (
        "import asyncio, os, signal, sys; from pathlib import Path\n"
        "from rackloom.carve.store.database import Store; from rackloom.carve.tenancy import entitlements\n"
        "async def main():\n"
        "    store = Store.open(Path(sys.argv[1]))\n"
        "    await store.run(entitlements.ensure_tenant, 'demo', 1.0, lambda: 'some-id')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)

    async def look() -> object:
        store = Store.inline(tmp_path)
        found = await store.read(lambda conn: conn.execute(sa.select(tenant.c.org)).scalars().all())
        await store.close()
        return found

    assert asyncio.run(look()) == ["demo"]


def test_a_broken_read_connection_is_replaced(tmp_path: Path) -> None:
    async def scenario() -> int:
        store = Store.open(tmp_path)
        try:
            connection: Any = await store.read(lambda conn: conn.connection.dbapi_connection)
            connection.close()
            with pytest.raises((sa.exc.ProgrammingError, sqlite3.ProgrammingError)):
                await store.read(journal.current_revision, "d")
            return await store.read(journal.current_revision, "d")
        finally:
            await store.close()

    assert asyncio.run(scenario()) == 0
