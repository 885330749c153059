"""Waiting for what others do, with a deadline that a slow machine meets."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

_WITHIN = 120.0
"""Seconds."""
LEAVE = ("--wait=false", "--ignore-not-found")
"""For `kubectl delete` at the end: what is being collected already is no trouble."""
T = TypeVar("T")


async def until(look: Callable[[], Awaitable[T]], what: str, within: float = _WITHIN) -> T:
    """The first answer of `look` that is true.

    Raises:
        AssertionError: there was none in time; it says what was waited for, and the last answer.
    """
    deadline = time.monotonic() + within
    while not (answer := await look()):
        assert time.monotonic() < deadline, f"{what}: not within {within:.0f} s; last seen: {answer!r}"
        await asyncio.sleep(0.1)
    return answer
