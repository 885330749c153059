"""The work queue, under virtual time."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.claim.cluster.controller_runtime import WorkQueue
from rackloom.claim.kube.api import KubeError
from rackloom.errors import Retry
from rackloom.lab.virtual import event_loop

Do = Callable[[str], Awaitable[float | None]]


def queue() -> WorkQueue[str]:
    return WorkQueue(random.Random(0), shortest=1.0, longest=60.0)


async def worked(keys: WorkQueue[str], do: Do, *, seconds: float, workers: int = 1) -> None:
    working = asyncio.create_task(keys.work(do, workers=workers))
    await asyncio.sleep(seconds)
    keys.stop()
    await working


def test_a_key_that_waits_is_one_key() -> None:
    async def run() -> None:
        keys, done = queue(), []

        async def do(key: str) -> None:
            done.append(key)

        for key in ("a", "b", "a", "a"):
            keys.add(key)
        assert len(keys) == 2
        await worked(keys, do, seconds=1)
        assert done == ["a", "b"]

    event_loop.run_simulation(0, run)


@given(
    added=st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 20)), max_size=30),
    workers=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_no_key_is_worked_on_twice_at_once_and_the_last_word_is_heard(
    added: list[tuple[str, float]], workers: int, seed: int
) -> None:
    async def run() -> None:
        keys, loop = queue(), asyncio.get_running_loop()
        active: set[str] = set()
        begun: dict[str, float] = {}
        most = 0

        async def do(key: str) -> None:
            nonlocal most
            assert key not in active
            active.add(key)
            most = max(most, len(active))
            begun[key] = loop.time()
            await asyncio.sleep(1.5)
            active.discard(key)

        for key, at in added:
            loop.call_later(at, keys.add, key)
        await worked(keys, do, seconds=200, workers=workers)
        assert most <= workers
        assert keys.is_idle
        for key, at in added:
            assert begun[key] >= at - event_loop.TIMER_RESOLUTION

    event_loop.run_simulation(seed, run)


def test_failures_come_back_later_and_later_and_success_forgets() -> None:
    async def run() -> None:
        keys, times, loop = queue(), [], asyncio.get_running_loop()

        async def do(key: str) -> None:
            times.append(loop.time())
            if len(times) < 6:
                raise KubeError(503, "ServiceUnavailable", "not now")

        keys.add("a")
        await worked(keys, do, seconds=300)
        gaps = [later - earlier for earlier, later in pairwise(times)]
        assert len(times) == 6
        assert all(0.5 * 2**n <= gap <= 2**n for n, gap in enumerate(gaps))
        assert keys.failures("a") == 0

    event_loop.run_simulation(0, run)


def test_the_server_says_when_to_come_back() -> None:
    async def run() -> None:
        keys, times, loop = queue(), [], asyncio.get_running_loop()
        answers: list[Exception] = [
            KubeError(429, "TooManyRequests", "slow down", retry_after=30.0),
            Retry("not ready", after=7.0),
        ]

        async def do(key: str) -> float | None:
            times.append(loop.time())
            if answers:
                raise answers.pop(0)
            return 100.0 if len(times) == 3 else None

        keys.add("a")
        await worked(keys, do, seconds=300)
        assert times == pytest.approx([0.0, 30.0, 37.0, 137.0])

    event_loop.run_simulation(0, run)


def test_the_earliest_of_several_delays_counts() -> None:
    async def run() -> None:
        keys, times, loop = queue(), [], asyncio.get_running_loop()

        async def do(key: str) -> None:
            times.append(loop.time())

        keys.add_after("a", 50.0)
        keys.add_after("a", 10.0)
        keys.add_after("a", 30.0)
        await worked(keys, do, seconds=100)
        assert times == pytest.approx([10.0])

    event_loop.run_simulation(0, run)


def test_stopping_lets_work_finish_and_starts_none() -> None:
    async def run() -> None:
        keys, ended = queue(), []

        async def do(key: str) -> None:
            await asyncio.sleep(5)
            ended.append(key)

        keys.add("a")
        keys.add("b")
        await worked(keys, do, seconds=1)
        assert ended == ["a"]
        keys.add("c")
        assert keys.is_idle

    event_loop.run_simulation(0, run)


def test_a_defect_ends_the_work() -> None:
    async def run() -> None:
        keys = queue()

        async def do(key: str) -> None:
            raise ZeroDivisionError

        keys.add("a")
        with pytest.raises(ExceptionGroup) as error:
            await keys.work(do, workers=2)
        assert error.group_contains(ZeroDivisionError)

    event_loop.run_simulation(0, run)


def test_a_key_wakes_one_of_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    call_soon = event_loop.SimLoop.call_soon

    def counting(loop: event_loop.SimLoop, *args: Any, **options: Any) -> asyncio.Handle:
        nonlocal calls
        calls += 1
        return call_soon(loop, *args, **options)

    async def work(workers: int) -> int:
        keys, done = queue(), list[str]()

        async def do(key: str) -> None:
            done.append(key)

        working = asyncio.create_task(keys.work(do, workers=workers))
        await asyncio.sleep(1.0)
        before = calls
        for number in range(50):
            keys.add(f"{number}")
            await asyncio.sleep(1.0)
        needed = calls - before
        keys.stop()
        await working
        assert done == [f"{number}" for number in range(50)]
        return needed

    monkeypatch.setattr(event_loop.SimLoop, "call_soon", counting)
    few, many = (event_loop.run_simulation(0, lambda n=n: work(n)) for n in (2, 100))  # type: ignore[misc]
    assert many <= few
