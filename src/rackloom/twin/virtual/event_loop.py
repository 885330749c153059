"""An event loop in which no time passes and the order of things is drawn from a seed.

A run is a function of its seed: time jumps to the next timer when nothing is left to do, and callbacks that
are ready in the same tick run in an order that the seed shuffles, as a busy machine would. There are no
sockets, no threads and no signals in it; code that needs one fails at once instead of becoming
irreproducible.
"""

import asyncio
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

EPSILON = 1e-6
"""Seconds. Timers nearer than this to one another are due together: sums of floats are not exact."""


class Deadlock(RuntimeError):
    """Every task waits for something that nobody will do."""


class _Jump:
    """The loop's selector: there is nothing to wait for but time, so time is advanced instead."""

    def __init__(self) -> None:
        self.now = 0.0

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Deadlock("nothing is ready and nothing is scheduled")
        self.now += timeout
        return []


class SimLoop(asyncio.BaseEventLoop):
    """Virtual time, seeded interleaving. `time()` is in seconds since the loop was made."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._clock_resolution = EPSILON
        self._selector = _Jump()
        self._order = random.Random(seed)  # noqa: S311 (reproducible on purpose)

    def time(self) -> float:
        """Virtual seconds."""
        return self._selector.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        """Run `func` here and now: a thread has no virtual clock."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        # One tick of the base class, with its queue in another order: every order of callbacks that became
        # ready together is possible in a real process, which has more than one source of events.
        queue: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        ready = list(queue)
        self._order.shuffle(ready)
        queue.clear()
        queue.extend(ready)
        super()._run_once()  # type: ignore[misc]

    def _asyncgen_finalizer_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        # The base class goes by way of another thread's door; whoever leaves a generator here is in this one.
        self._asyncgens.discard(agen)  # type: ignore[attr-defined]
        if not self.is_closed():
            self.create_task(agen.aclose())

    def _process_events(self, event_list: list[Any]) -> None:
        """Nothing comes from outside."""

    def _write_to_self(self) -> None:
        raise RuntimeError("a thread calls into a simulation: what it does cannot be reproduced")


def run(seed: int, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main()` to its end in a fresh SimLoop."""
    with asyncio.Runner(loop_factory=lambda: SimLoop(seed)) as runner:
        return runner.run(main())
