"""Waiting for other tasks and processes, with a deadline that ends a hang and measures nothing."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

PATIENCE = 300.0
"""Seconds. Nothing here takes as long, but a shared machine may stall for a while."""
T = TypeVar("T")


async def until(look: Callable[[], Awaitable[T]], what: str, within: float = PATIENCE) -> T:
    """The first true answer of `look`. Runs in virtual time if the event loop has that.

    Raises:
        AssertionError: there was none in time. The message names the awaited event and the last answer.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + within
    while not (answer := await look()):
        assert clock() < deadline, _too_late(what, within, answer)
        await asyncio.sleep(0.05)
    return answer


async def until_so(holds: Callable[[], T], what: str, within: float = PATIENCE) -> T:
    """`until` for a condition that needs no await."""

    async def look() -> T:
        return holds()

    return await until(look, what, within)


def until_seen(look: Callable[[], T], what: str, within: float = PATIENCE) -> T:
    """`until` for work outside this event loop: processes, threads."""
    deadline = time.monotonic() + within
    while not (answer := look()):
        assert time.monotonic() < deadline, _too_late(what, within, answer)
        time.sleep(0.05)
    return answer


def _too_late(what: str, within: float, answer: object) -> str:
    return f"{what}: not within {within:.0f} s; last seen: {answer!r}"
