"""The writes of one process on PostgreSQL take turns by organisation; so do those of a store on either."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rackloom.carve.inventory.endpoints import register_endpoint
from rackloom.carve.reconcile.loop import Reconciler
from rackloom.carve.store.database import Store
from rackloom.carve.store.postgres import WriteTurns


async def _settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_one_write_at_a_time_in_turns_by_organisation() -> None:
    async def story() -> list[str]:
        turns, begun, seconds = WriteTurns(lambda: float(len(begun))), [], asyncio.Event()

        async def write(org: str) -> None:
            async with turns.turn(org):
                begun.append(org)
                await seconds.wait()

        async with asyncio.TaskGroup() as tasks:
            for org in ["busy"] * 8 + ["quiet"] * 2:
                tasks.create_task(write(org))
            await _settled()
            assert begun == ["busy"]
            seconds.set()
        return begun

    order = asyncio.run(story())
    assert order[:5].count("quiet") == 2
    assert len(order) == 10


def test_who_is_cancelled_takes_no_turn_along() -> None:
    async def story() -> None:
        turns, ends, begun = WriteTurns(), asyncio.Event(), []

        async def write(org: str) -> None:
            async with turns.turn(org):
                begun.append(org)
                await ends.wait()

        first, waiting, handed, last = (asyncio.create_task(write(org)) for org in "abcd")
        await _settled()
        waiting.cancel()
        ends.set()
        await asyncio.sleep(0)
        handed.cancel()
        await asyncio.gather(first, waiting, handed, last, return_exceptions=True)
        assert begun[-1] == "d"
        await write("e")

    asyncio.run(story())


def test_a_quiet_organisation_is_served_before_the_backlog_of_a_busy_one(tmp_path: Path) -> None:
    async def story() -> list[str]:
        store, order = Store.open(tmp_path), []
        busy, quiet = store.on_behalf_of("busy"), store.on_behalf_of("quiet")

        async def write(to: Store, org: str) -> None:
            await to.run(lambda conn: conn.execute(sa.select(1)).scalar_one())
            order.append(org)

        everybody_waits = threading.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(store.run(lambda _: everybody_waits.wait(60)))
            for _ in range(32):
                tasks.create_task(write(busy, "busy"))
            tasks.create_task(write(quiet, "quiet"))
            await _settled()
            everybody_waits.set()
        await store.close()
        return order

    assert asyncio.run(story()).index("quiet") <= 1


def test_a_lease_is_renewed_before_the_backlog_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the site's own work too: a replica whose renewal waits loses its domains."""

    def nobody(_: object) -> Any:
        raise AssertionError("no endpoint is registered")

    async def story() -> list[str]:
        store, order = Store.open(tmp_path), []
        await store.run(register_endpoint, "http://switch", ["CHASSIS"], 1.0, lambda: "endpoint")
        reconciler, asked = Reconciler(store, nobody, lambda: 1.0), asyncio.Event()
        renewing = reconciler._lease_store.run

        async def run(*words: Any) -> Any:
            asked.set()
            return await renewing(*words)

        monkeypatch.setattr(reconciler._lease_store, "run", run)

        async def write(to: Store, who: str) -> None:
            await to.run(lambda conn: conn.execute(sa.select(1)).scalar_one())
            order.append(who)

        async def renew() -> None:
            assert len(await reconciler._share()) == 1
            order.append("lease")

        everybody_waits = threading.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(store.run(lambda _: everybody_waits.wait(60)))
            for _ in range(16):
                tasks.create_task(write(store.on_behalf_of("busy"), "busy"))
                tasks.create_task(write(store, "site"))
            tasks.create_task(renew())
            await asked.wait()
            await _settled()
            everybody_waits.set()
        await store.close()
        return order

    assert asyncio.run(story()).index("lease") <= 3
