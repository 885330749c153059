"""Work in the background ends with its context, however often it is cancelled."""

import asyncio

import pytest

from rackloom.claim.node.tasks import run_background


async def _cancelled_twice() -> list[str]:
    """The work that ended once the context was cancelled, and again while it waited for its work to end."""
    ended: list[str] = []
    may_end = asyncio.Event()

    async def work(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await may_end.wait()
            ended.append(name)

    async def serve() -> None:
        async with run_background(work("first"), work("second")) as beside:
            await beside.fails()

    task = asyncio.create_task(serve())
    for _ in range(2):
        await _let_all_run()
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    may_end.set()
    await _let_all_run()
    return list(ended)


async def _let_all_run() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_second_cancellation_leaves_none_of_the_work_running() -> None:
    assert asyncio.run(_cancelled_twice()) == ["first", "second"]
