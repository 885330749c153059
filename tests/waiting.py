"""Waiting for what others do, with a deadline that ends a hang and measures nothing."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

PATIENCE = 300.0
"""Seconds. Nothing here takes as long; a machine that others share may stand still for a while."""
T = TypeVar("T")


async def until(look: Callable[[], Awaitable[T]], what: str, within: float = PATIENCE) -> T:
    """The first answer of `look` that is true; in virtual time where the event loop has that.

    Raises:
        AssertionError: there was none in time; it says what was waited for, and the last answer.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + within
    while not (answer := await look()):
        assert clock() < deadline, _too_late(what, within, answer)
        await asyncio.sleep(0.05)
    return answer


async def until_so(holds: Callable[[], T], what: str, within: float = PATIENCE) -> T:
    """`until` for what is seen without awaiting."""

    async def look() -> T:
        return holds()

    return await until(look, what, within)


def until_seen(look: Callable[[], T], what: str, within: float = PATIENCE) -> T:
    """`until` for what others than this event loop do: processes, threads."""
    deadline = time.monotonic() + within
    while not (answer := look()):
        assert time.monotonic() < deadline, _too_late(what, within, answer)
        time.sleep(0.05)
    return answer


def _too_late(what: str, within: float, answer: object) -> str:
    return f"{what}: not within {within:.0f} s; last seen: {answer!r}"
