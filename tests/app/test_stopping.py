"""A process works until it gets a signal, its work ends, or it fails."""

import asyncio

import pytest

from rackloom.app.process import run_until_stopped
from rackloom.errors import Refused


def test_work_ends_in_good_order_when_told_to_stop():
    left = []

    async def scenario():
        stopped = asyncio.Event()

        async def work():
            try:
                stopped.set()
                await asyncio.Event().wait()
            finally:
                left.append("cleaned up")

        await run_until_stopped(stopped, work())

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert left == ["cleaned up"]


def test_what_work_fails_with_is_raised():
    async def work():
        raise Refused("no channel")

    with pytest.raises(Refused, match="no channel"):
        asyncio.run(asyncio.wait_for(run_until_stopped(asyncio.Event(), work()), 60))


def test_work_that_is_over_ends_the_process():
    asyncio.run(asyncio.wait_for(run_until_stopped(asyncio.Event(), asyncio.sleep(0)), 60))
