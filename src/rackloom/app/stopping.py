"""How a process is told to end: SIGTERM from a supervisor, SIGINT from a person."""

import asyncio
import signal


def told_to_stop() -> asyncio.Event:
    """An event of the running loop that either signal sets; the process then ends in good order."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    return stopped
