"""Signals: SIGTERM of a supervisor and SIGINT of a person end a process, SIGUSR2 asks what it does."""

import asyncio
import faulthandler
import signal
import sys


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


def _tell_stacks(loop: asyncio.AbstractEventLoop) -> None:
    """Threads first, from the signal itself, which works while the loop hangs; then tasks, from the loop."""
    loop.add_signal_handler(signal.SIGUSR2, _print_tasks)
    if sys.__stderr__ is not None:
        faulthandler.register(signal.SIGUSR2, file=sys.__stderr__, all_threads=True, chain=True)


def _print_tasks() -> None:
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.__stderr__)
    print("end of stacks", file=sys.__stderr__, flush=True)
