"""A loop in a separate thread: the fate of work that is under way, or arrives, when it is closed."""

import asyncio
import gc
import threading

import pytest

from rackloom.carve.store import postgres
from rackloom.carve.store.postgres import BackgroundLoop
from rackloom.errors import Retry


async def nothing() -> None:
    """Nothing is left to be done."""


async def answer() -> int:
    return 7


def test_work_under_way_ends_when_it_is_closed_and_later_work_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(postgres, "DRAIN_SECONDS", 0.05)

    async def main() -> None:
        other, began, ended = BackgroundLoop("test"), threading.Event(), threading.Event()

        async def endless() -> None:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        assert await other.do(answer()) == 7
        asked = asyncio.create_task(other.do(endless()))
        await asyncio.to_thread(began.wait)
        closing = asyncio.create_task(other.close(nothing))
        await asyncio.sleep(0)
        with pytest.raises(Retry, match="the store is closing"):
            await other.do(answer())
        await closing
        assert ended.is_set()
        with pytest.raises(Retry, match="the store is closing"):
            await asked
        with pytest.raises(Retry):
            await other.do(answer())

    asyncio.run(asyncio.wait_for(main(), 60.0))


def test_work_that_will_not_end_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "CLOSE_SECONDS", 0.1)

    async def main() -> None:
        other, began, let_go = BackgroundLoop("test"), threading.Event(), threading.Event()

        async def stuck() -> None:
            began.set()
            let_go.wait()

        asked = asyncio.create_task(other.do(stuck()))
        await asyncio.to_thread(began.wait)
        await other.close(nothing)
        with pytest.raises(Retry, match="the store is closing"):
            await asked
        let_go.set()

    asyncio.run(asyncio.wait_for(main(), 60.0))


def test_work_that_fails_after_its_caller_was_cancelled_is_not_told_as_overlooked() -> None:
    async def main() -> list[object]:
        outcomes: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: outcomes.append(context))
        other, began, let_go = BackgroundLoop("test"), threading.Event(), threading.Event()

        async def failing() -> None:
            began.set()
            while not let_go.is_set():
                await asyncio.sleep(0.001)
            raise ValueError("nobody waits for this")

        asked = asyncio.create_task(other.do(failing()))
        await asyncio.to_thread(began.wait)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        let_go.set()
        # It has ended before this has.
        await other.do(asyncio.sleep(0.05))
        await other.close(nothing)
        gc.collect()
        return outcomes

    assert asyncio.run(asyncio.wait_for(main(), 60.0)) == []
