"""A limit on how fast one client asks, so that a fault of ours is not a flood for the API server."""

import asyncio


class Pace:
    """At most `burst` requests at once, and `rate` per second after that. Time is the running loop's."""

    def __init__(self, rate: float, burst: int) -> None:
        self._interval = 1.0 / rate
        self._slack = self._interval * (burst - 1)
        self._next = float("-inf")

    async def step(self) -> None:
        """Wait for this request's turn."""
        now = asyncio.get_running_loop().time()
        turn = max(self._next, now - self._slack)
        self._next = turn + self._interval
        if turn > now:
            await asyncio.sleep(turn - now)
