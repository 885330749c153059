"""The event loop of simulations: no time, seeded order, no way out."""

import asyncio
import gc
import threading
from collections.abc import Callable

import pytest

from rackloom.lab.virtual import event_loop


async def _race() -> list[tuple[int, int]]:
    order: list[tuple[int, int]] = []

    async def task(number: int) -> None:
        for step in range(4):
            await asyncio.sleep(number % 2)
            order.append((number, step))

    async with asyncio.TaskGroup() as tasks:
        for number in range(8):
            tasks.create_task(task(number))
    return order


def test_a_seed_gives_one_order_and_seeds_differ() -> None:
    orders = [event_loop.run_simulation(seed, _race) for seed in (1, 1, 2, 3, 4)]
    assert orders[0] == orders[1]
    assert len({tuple(order) for order in orders}) > 2


def test_time_passes_only_in_sleep_and_costs_nothing() -> None:
    async def sleep_for_a_year() -> tuple[float, float]:
        before = asyncio.get_running_loop().time()
        await asyncio.gather(*(asyncio.sleep(365 * 86400.0) for _ in range(10)))
        return before, asyncio.get_running_loop().time()

    assert event_loop.run_simulation(0, sleep_for_a_year) == (0.0, pytest.approx(365 * 86400.0))


def test_timeouts_events_and_cancellation_work() -> None:
    async def play() -> list[str]:
        order: list[str] = []
        event = asyncio.Event()

        async def wait() -> None:
            try:
                await event.wait()
                order.append("woken")
                await asyncio.sleep(100)
            finally:
                order.append("cancelled")

        waiting = asyncio.create_task(wait())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.shield(waiting)
        event.set()
        await asyncio.sleep(1)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        return order

    assert event_loop.run_simulation(7, play) == ["woken", "cancelled"]


def test_what_is_meant_for_a_thread_runs_in_place() -> None:
    async def where() -> int:
        return await asyncio.to_thread(threading.get_ident)

    assert event_loop.run_simulation(0, where) == threading.get_ident()


def test_an_error_in_place_of_a_thread_reaches_its_caller() -> None:
    async def fail() -> None:
        await asyncio.to_thread(int, "x")

    with pytest.raises(ValueError, match="invalid literal"):
        event_loop.run_simulation(0, fail)


def _for_ever() -> "asyncio.Future[None]":
    return asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("wait", [_for_ever, lambda: asyncio.Event().wait(), lambda: asyncio.Queue().get()])
def test_waiting_for_nobody_is_an_error(wait: Callable[[], object]) -> None:
    async def stuck() -> None:
        await wait()  # type: ignore[misc]

    with pytest.raises(event_loop.Deadlock, match="nothing is ready"):
        event_loop.run_simulation(0, stuck)


def test_another_thread_may_not_call_in() -> None:
    async def called() -> BaseException | None:
        loop, seen = asyncio.get_running_loop(), []

        def call() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except RuntimeError as error:
                seen.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return seen[0]

    assert "thread" in str(event_loop.run_simulation(0, called))


def test_a_long_run_rarely_looks_at_all_objects_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    collected: list[int] = []
    monkeypatch.setattr(event_loop, "COLLECT_TICKS", 10)

    async def ticks() -> None:
        monkeypatch.setattr(gc, "collect", lambda generation=2: collected.append(generation))
        for _ in range(640):
            await asyncio.sleep(1.0)

    event_loop.run_simulation(0, ticks)
    monkeypatch.undo()
    # The cost of a full collection grows with the objects that the run has made so far.
    assert len(collected) >= 64
    assert collected.count(2) <= 8


def test_a_timer_is_never_early_even_where_others_keep_the_loop_busy() -> None:
    looked = 0

    async def wait_until(moment: float, first: int) -> None:
        nonlocal looked
        loop = asyncio.get_running_loop()
        for _ in range(first):
            await asyncio.sleep(0)
        while loop.time() < moment:
            looked += 1
            assert looked < 1000, "time stands still"
            await asyncio.sleep(moment - loop.time())

    async def play() -> None:
        loop = asyncio.get_running_loop()
        moment = 1.0
        await asyncio.sleep(moment - event_loop.TIMER_RESOLUTION / 2)
        assert loop.time() < moment
        await asyncio.gather(*(wait_until(moment, first) for first in range(4)))
        assert loop.time() == pytest.approx(moment, abs=event_loop.TIMER_RESOLUTION)

    event_loop.run_simulation(0, play)
