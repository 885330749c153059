"""An asyncio event loop with virtual time and a seeded order of callbacks.

This is discrete-event simulation: when no callback is ready, the clock jumps to the next timer.
Callbacks that become ready in the same tick run in an order that the seed shuffles, because a real
process has more than one source of events. The same seed therefore gives the same run, and another seed
gives another interleaving.

There are no sockets, threads or signals. Code that needs one fails at once, so a run never becomes
irreproducible. `run_in_executor` runs its function inline. A loop in which every task waits for ever
raises `Deadlock`.

Several processes may share one loop, each in its own `contextvars` context. `stop_whom` names those
that are stopped (SIGSTOP): their callbacks are set aside when their turn comes, and `resume` queues them
again, late.

`loop_wall_time` gives seconds since 1970 by the running loop, for every part of a simulated cluster.
"""

import asyncio
import contextvars
import gc
import itertools
import math
import random
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from datetime import UTC, datetime
from typing import Any, TypeVar

T = TypeVar("T")

TIMER_RESOLUTION = 1e-6
"""Seconds. Timers nearer than this to one another are due together: sums of floats are not exact."""
COLLECT_TICKS = 20_000
"""Ticks of a loop between two collections of cyclic garbage."""
FULL_COLLECTION_RUNS = 100
"""Simulations of a process between two collections that look at all objects."""


class Deadlock(RuntimeError):
    """Every task waits, and nothing is scheduled that could wake one."""


class _TimeJump:
    """The loop's selector: there is nothing to wait for but time, so time is advanced instead."""

    def __init__(self, arrived: Callable[[], None]) -> None:
        """`arrived` is called after each advance of time."""
        self.now = 0.0
        self.arrived = arrived

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Deadlock("nothing is ready and nothing is scheduled")
        # asyncio passes the time until the next timer: nothing can happen before it, so jump there.
        self.now += timeout
        self.arrived()
        return []


IsStopped = Callable[[contextvars.Context], bool]
"""True if the process of this context is stopped."""


class _ReadyQueue(deque[asyncio.Handle]):
    """Callbacks that are due. Those of a stopped process are set aside at their turn."""

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
        """Queue the callbacks that were set aside. Those of processes that are still stopped go back."""
        self.extend(self._aside)
        self._aside.clear()


class SimTask(asyncio.Task[T]):
    """A task. Its hash is its number in its loop.

    Sets of tasks, those of asyncio too, then have the same order in every run. By default the hash of an
    object is its address.
    """

    def __init__(
        self,
        work: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        loop: "SimLoop",
        context: contextvars.Context | None = None,
    ) -> None:
        self._number = next(loop.task_numbers)
        super().__init__(work, loop=loop, context=context)

    def __hash__(self) -> int:
        return self._number


class SimLoop(asyncio.BaseEventLoop):
    """Virtual time, seeded interleaving. `time()` is in seconds since the loop was made."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        nothing = asyncio.Handle(lambda: None, (), self)
        nothing.cancel()
        self._ready = _ReadyQueue(nothing)
        self._clock_resolution = math.ulp(0.0)
        self._selector = _TimeJump(self._reach_due_timers)
        self._order = random.Random(seed)  # noqa: S311 (reproducible on purpose)
        self._ticks = 0
        self.task_numbers = itertools.count()
        self.set_task_factory(lambda loop, work, context=None: SimTask(work, loop=self, context=context))

    def time(self) -> float:
        """Virtual seconds."""
        return self._selector.now

    def stop_whom(self, is_stopped: IsStopped) -> None:
        """Run nothing of a process if this is true for its context. Call `resume` when one goes on."""
        self._ready.is_stopped = is_stopped

    def resume(self) -> None:
        """Run the callbacks that were set aside for processes that are no longer stopped."""
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
        self._ticks += 1
        if self._ticks % COLLECT_TICKS == 0:
            # Collections count from 1 in one run. The first, second, fourth, eighth and so on look at all
            # objects, the others at those made since the last: a run that keeps its objects would otherwise
            # spend more on each collection, and most of its time.
            number = self._ticks // COLLECT_TICKS
            is_full = number & (number - 1) == 0
            gc.collect(2 if is_full else 1)
        super()._run_once()  # type: ignore[misc]

    def _reach_due_timers(self) -> None:
        """Advance the clock to the latest of the timers that are due together.

        A timer must not be early: its task would find the moment not reached and wait again, and time would
        stand still for ever if other tasks keep the loop busy.
        """
        timers, now = self._scheduled, self._selector.now  # type: ignore[attr-defined]
        at, until = [0], now + TIMER_RESOLUTION
        while at:
            number = at.pop()
            if number < len(timers) and timers[number].when() < until:
                now = max(now, timers[number].when())
                at += (2 * number + 1, 2 * number + 2)  # those below it in the heap are later
        self._selector.now = now
        self._clock_resolution = math.ulp(now)

    def _asyncgen_finalizer_hook(self, agen: AsyncGenerator[Any, Any]) -> None:
        # The base class schedules this from another thread. Here every generator is left in this one.
        self._asyncgens.discard(agen)  # type: ignore[attr-defined]
        if not self.is_closed():
            self.create_task(agen.aclose())

    def _process_events(self, event_list: list[Any]) -> None:
        """Nothing comes from outside."""

    def _write_to_self(self) -> None:
        raise RuntimeError("a thread calls into a simulation: what it does cannot be reproduced")


def run_simulation(seed: int, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main()` to its end in a fresh SimLoop.

    Python collects cycles after a number of new objects, from any source. An asynchronous generator that is
    collected schedules its end, so the trace would depend on earlier work of this process. Cycles are
    collected at fixed ticks of the loop instead.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    # Collect the garbage of earlier runs, and exempt the rest from collections. A collection looks at every
    # object of the process. If thousands of simulations run in a process that has loaded much, looking at
    # all objects each time would cost more than the simulations. Older objects that become cyclic garbage
    # later stay for up to `FULL_COLLECTION_RUNS` simulations.
    if next(_run_numbers) % FULL_COLLECTION_RUNS == 0:
        gc.unfreeze()
    gc.collect()
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=lambda: SimLoop(seed)) as runner:
            return runner.run(main())
    finally:
        if was_enabled:
            gc.enable()


_run_numbers = itertools.count()


# The wall clock of a simulated cluster.


CLUSTER_EPOCH = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
"""A loop's time 0 in seconds since 1970, because virtual time has no date."""


def loop_wall_time() -> float:
    """Seconds since 1970 by the running loop's clock."""
    return CLUSTER_EPOCH + asyncio.get_running_loop().time()
