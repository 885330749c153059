"""The writes of one process on PostgreSQL take turns by organisation; so do those of a store on either."""

import asyncio
import threading
from pathlib import Path

import sqlalchemy as sa

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
