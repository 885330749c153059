"""A work queue of keys, which name what to reconcile and not what happened.

A key that is added while it waits is one key. A key that is added while it is worked on is worked on
once more afterwards, never by two workers at once. A key whose work failed comes back with exponential
back-off and jitter. Time is the running event loop's.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from rackloom.claim.kube.api import KubeError
from rackloom.errors import Retry

K = TypeVar("K", bound=Hashable)


class WorkQueue(Generic[K]):
    """Keys to work on. Delays of failing keys double from `shortest` to `longest` (seconds), with jitter.

    `rng` draws the jitter, so that keys that failed together do not come back together.
    """

    def __init__(self, rng: random.Random, *, shortest: float = 0.05, longest: float = 60.0) -> None:
        self._random = rng
        self._shortest = shortest
        self._longest = longest
        self._ready: dict[K, None] = {}
        self._active: set[K] = set()
        self._again: set[K] = set()
        self._failures: dict[K, int] = {}
        self._timers: dict[K, asyncio.TimerHandle] = {}
        self._changed = asyncio.Event()
        self._stopping = False

    def __len__(self) -> int:
        """The number of keys that wait for a worker, without delayed keys and those being worked on."""
        return len(self._ready)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, is delayed or is worked on."""
        return not (self._ready or self._active or self._again or self._timers)

    def add(self, key: K) -> None:
        """Have `key` worked on as soon as a worker is free; a pending delay for it is cancelled."""
        self._unschedule(key)
        if self._stopping:
            return
        if key in self._active:
            self._again.add(key)
        else:
            self._ready[key] = None
        self._changed.set()

    def add_after(self, key: K, seconds: float) -> None:
        """Have `key` worked on in `seconds`, or earlier if an earlier time is pending."""
        if seconds <= 0:
            self.add(key)
            return
        loop = asyncio.get_running_loop()
        planned = self._timers.get(key)
        if self._stopping or (planned is not None and planned.when() <= loop.time() + seconds):
            return
        self._unschedule(key)
        self._timers[key] = loop.call_later(seconds, self.add, key)

    def retry(self, key: K, *, at_least: float = 0.0) -> float:
        """Have `key` worked on again after its back-off, or `at_least` (seconds); returns that delay."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        # Equal jitter (half fixed, half random) keeps keys that failed together from returning together.
        ceiling = min(self._longest, self._shortest * 2.0 ** min(failures - 1, 32))
        seconds = max(ceiling * self._random.uniform(0.5, 1.0), at_least)
        self.add_after(key, seconds)
        return seconds

    def forget(self, key: K) -> None:
        """Reset the back-off of `key`."""
        self._failures.pop(key, None)

    def failures(self, key: K) -> int:
        """The number of times that `key` failed in a row."""
        return self._failures.get(key, 0)

    async def work(self, do: Callable[[K], Awaitable[float | None]], *, workers: int = 1) -> None:
        """Call `do(key)` for what is added, with at most so many at once, until `stop`.

        `do` returns the seconds after which the key is due again, or None. After `Retry` it is due when that
        says, after `KubeError` when its back-off has passed. Any other error is a defect and ends the work.
        """
        async with asyncio.TaskGroup() as tasks:
            for _ in range(workers):
                tasks.create_task(self._worker(do))

    async def _worker(self, do: Callable[[K], Awaitable[float | None]]) -> None:
        while (key := await self._next()) is not None:
            try:
                await self._do(do, key)
            finally:
                self._finish(key)

    async def _next(self) -> K | None:
        while not self._stopping:
            if self._ready:
                key = next(iter(self._ready))
                del self._ready[key]
                self._active.add(key)
                return key
            self._changed.clear()
            await self._changed.wait()
        return None

    async def _do(self, do: Callable[[K], Awaitable[float | None]], key: K) -> None:
        try:
            delay = await do(key)
        except Retry as error:
            self.add_after(key, error.after)
        except KubeError as error:
            self.retry(key, at_least=error.retry_after or 0.0)
        else:
            self.forget(key)
            if delay is not None:
                self.add_after(key, delay)

    def _finish(self, key: K) -> None:
        # A key that was added while it was worked on is due once more, so no change is lost.
        self._active.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)
        self._changed.set()

    def _unschedule(self, key: K) -> None:
        planned = self._timers.pop(key, None)
        if planned is not None:
            planned.cancel()

    def stop(self) -> None:
        """Let workers finish their current keys and take no others; `work` then returns."""
        self._stopping = True
        for key in list(self._timers):
            self._unschedule(key)
        self._ready.clear()
        self._again.clear()
        self._changed.set()
