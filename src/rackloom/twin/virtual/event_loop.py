"""An event loop in which no time passes and the order of things is drawn from a seed.

A run is a function of its seed: time jumps to the next timer when nothing is left to do, and callbacks that
are ready in the same tick run in an order that the seed shuffles, as a busy machine would. There are no
sockets, no threads and no signals in it; code that needs one fails at once instead of becoming
irreproducible.

Several processes may be played in one loop, each in a context of its own. One that is stopped (SIGSTOP) runs
no callback: what falls due meanwhile is set aside, and runs when it goes on, late.
"""

import asyncio
import contextvars
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


IsStopped = Callable[[contextvars.Context], bool]
"""Whether the process whose context this is runs nothing now."""


class _Ready(deque[asyncio.Handle]):
    """Callbacks whose time has come. Those of a stopped process are set aside when it is their turn."""

    def __init__(self, nothing: asyncio.Handle) -> None:
        super().__init__()
        self.is_stopped: IsStopped = lambda context: False
        self._aside: list[asyncio.Handle] = []
        self._nothing = nothing

    def popleft(self) -> asyncio.Handle:
        handle = super().popleft()
        context: contextvars.Context = handle._context  # type: ignore[attr-defined]
        if not self.is_stopped(context):
            return handle
        self._aside.append(handle)
        return self._nothing

    def release(self) -> None:
        """Queue again what was set aside: what is stopped still is set aside once more."""
        self.extend(self._aside)
        self._aside.clear()


class SimLoop(asyncio.BaseEventLoop):
    """Virtual time, seeded interleaving. `time()` is in seconds since the loop was made."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        nothing = asyncio.Handle(lambda: None, (), self)
        nothing.cancel()
        self._ready = _Ready(nothing)
        self._clock_resolution = EPSILON
        self._selector = _Jump()
        self._order = random.Random(seed)  # noqa: S311 (reproducible on purpose)

    def time(self) -> float:
        """Virtual seconds."""
        return self._selector.now

    def stop_whom(self, is_stopped: IsStopped) -> None:
        """Run nothing of processes for whose context this is true. Call `go_on` when one goes on."""
        self._ready.is_stopped = is_stopped

    def go_on(self) -> None:
        """Run what was set aside of processes that are not stopped any more."""
        self._ready.release()

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
        queue = self._ready
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
