"""Signals: SIGTERM of a supervisor and SIGINT of a person end a process, SIGUSR2 asks what it does."""

import asyncio
import faulthandler
import signal
import sys
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any


def told_to_stop() -> asyncio.Event:
    """An event of the running loop that SIGTERM and SIGINT set; the process then ends in good order.

    SIGUSR2 prints all stacks to stderr, and the process goes on.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    _tell_stacks(loop)
    return stopped


async def work_until(stopped: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Let `work` go on until told to stop, and then end it. Raises what it fails with."""
    task = asyncio.create_task(work)
    await stopped_or_ended(stopped, task)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def stopped_or_ended(stopped: asyncio.Event, *work: "asyncio.Task[None]") -> None:
    """Return when told to stop, or when any of `work` has ended, however it did."""
    waiting = asyncio.create_task(_wait(stopped))
    await asyncio.wait({waiting, *work}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


def _tell_stacks(loop: asyncio.AbstractEventLoop) -> None:
    """Threads first, from the signal itself, which works while the loop hangs; then tasks, from the loop."""
    loop.add_signal_handler(signal.SIGUSR2, _print_tasks)
    if sys.__stderr__ is not None:
        faulthandler.register(signal.SIGUSR2, file=sys.__stderr__, all_threads=True, chain=True)


def _print_tasks() -> None:
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.__stderr__)
    print("end of stacks", file=sys.__stderr__, flush=True)
