"""Places: their number, their order, and the effect of a slow one on the others."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rackloom.carve.reconcile import loop as module
from rackloom.carve.reconcile.loop import ConcurrencySlots

Begun = list[str]
Worker = Callable[..., Coroutine[Any, Any, None]]


def _worker(slots: ConcurrencySlots, begun: Begun, ends: asyncio.Event) -> Worker:
    async def work(key: str, *orgs: str) -> None:
        async with slots.acquire(key, orgs=orgs):
            begun.append(key)
            await ends.wait()

    return work


async def _settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_the_awaited_come_first_and_the_due_in_their_order() -> None:
    async def story() -> Begun:
        slots, ends = ConcurrencySlots(1), asyncio.Event()
        begun: Begun = []
        work = _worker(slots, begun, ends)
        async with asyncio.TaskGroup() as tasks:
            for key in ("first", "due a", "due b", "due c"):
                tasks.create_task(work(key))
            tasks.create_task(work("awaited", "org"))
            await _settled()
            slots.prioritize("due c", "org")
            slots.prioritize("first", "org")
            assert begun == ["first"]
            ends.set()
        return begun

    assert asyncio.run(story()) == ["first", "awaited", "due c", "due a", "due b"]


def test_no_more_begin_than_there_are_places() -> None:
    async def story() -> None:
        slots, ends = ConcurrencySlots(3), asyncio.Event()
        begun: Begun = []
        work = _worker(slots, begun, ends)
        async with asyncio.TaskGroup() as tasks:
            for number in range(9):
                tasks.create_task(work(str(number)))
            await _settled()
            assert len(begun) == 3
            ends.set()
        assert len(begun) == 9

    asyncio.run(story())


def test_who_is_cancelled_takes_no_place_along() -> None:
    async def story() -> None:
        slots, ends = ConcurrencySlots(1), asyncio.Event()
        begun: Begun = []
        work = _worker(slots, begun, ends)
        async with slots.acquire("one"):
            waiting, handed = (asyncio.create_task(work(key)) for key in ("two", "three"))
            await _settled()
            waiting.cancel()
            await _settled()
        # The third has the place now, and is cancelled before it can begin.
        handed.cancel()
        await asyncio.gather(waiting, handed, return_exceptions=True)
        ends.set()
        await work("four")
        assert begun == ["four"]

    asyncio.run(story())


def test_one_that_is_slow_gives_its_place_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SLOT_SECONDS", 0.0)

    async def story() -> None:
        slots, ends = ConcurrencySlots(1), asyncio.Event()
        begun: Begun = []
        work = _worker(slots, begun, ends)
        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for key in ("slow", "next"):
                tasks.create_task(work(key))
            while len(begun) < 2:
                await asyncio.sleep(0)
            ends.set()
        monkeypatch.setattr(module, "MAX_SLOT_SECONDS", 60.0)
        ends.clear()
        async with asyncio.TaskGroup() as tasks:
            for key in ("third", "fourth"):
                tasks.create_task(work(key))
            await _settled()
            assert begun == ["slow", "next", "third"]
            ends.set()

    asyncio.run(story())


def test_no_organisation_waits_for_all_domains_of_another() -> None:
    async def story() -> Begun:
        slots, ends = ConcurrencySlots(1), asyncio.Event()
        begun: Begun = []
        work = _worker(slots, begun, ends)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(work("first"))
            for number in range(6):
                tasks.create_task(work(f"busy {number}", "busy"))
            tasks.create_task(work("shared", "busy"))
            tasks.create_task(work("quiet", "quiet"))
            await _settled()
            # Another waits for a domain that is far behind in the line of the first.
            slots.prioritize("shared", "third")
            ends.set()
        return begun

    begun = asyncio.run(story())
    assert set(begun[:4]) == {"first", "busy 0", "quiet", "shared"}
    assert len(begun) == len(set(begun)) == 9


def test_domains_that_are_only_due_are_not_starved() -> None:
    async def story() -> Begun:
        slots, ends = ConcurrencySlots(1), asyncio.Event()
        begun: Begun = []
        work = _worker(slots, begun, ends)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(work("first"))
            tasks.create_task(work("due"))
            for number in range(20):
                tasks.create_task(work(f"awaited {number}", f"org {number % 3}"))
            await _settled()
            ends.set()
        return begun

    assert asyncio.run(story()).index("due") == 1 + module.MAX_AWAITED_IN_A_ROW
