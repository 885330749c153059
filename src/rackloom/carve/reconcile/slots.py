"""How many domains are worked on at once, and which of them comes first.

One that somebody waits for goes before those that are only due, and one whose controller is slow to answer
gives its place up: neither crowds nor failures elsewhere delay it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

LENT_SECONDS = 1.0
"""How long a place is kept: many times what a pass takes whose controller answers."""

Turn = asyncio.Future[None]


class Slots:
    """Places for `count` domains, each known by a key that waits for one place at a time."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._urgent: OrderedDict[Hashable, Turn] = OrderedDict()
        self._due: OrderedDict[Hashable, Turn] = OrderedDict()

    @asynccontextmanager
    async def taken(self, key: Hashable, *, urgent: bool) -> AsyncIterator[None]:
        """Wait for a place, and give it back at the end, or when it was kept for long enough."""
        await self._take(key, urgent)
        place = _Place(self)
        late = asyncio.get_running_loop().call_later(LENT_SECONDS, place.leave)
        try:
            yield
        finally:
            late.cancel()
            place.leave()

    def hurry(self, key: Hashable) -> None:
        """Somebody waits for `key` now: if it is still without a place, it goes before those that are due."""
        turn = self._due.pop(key, None)
        if turn is not None:
            self._urgent[key] = turn

    def give(self) -> None:
        """A place is free."""
        while waiting := self._urgent or self._due:
            _, turn = waiting.popitem(last=False)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    async def _take(self, key: Hashable, urgent: bool) -> None:
        if self._free:
            self._free -= 1
            return
        turn: Turn = asyncio.get_running_loop().create_future()
        (self._urgent if urgent else self._due)[key] = turn
        try:
            await turn
        except asyncio.CancelledError:
            # Whoever is cancelled with the place already in hand passes it on.
            if not turn.cancelled():
                self.give()
            raise


class _Place:
    """A place that is given back once, whoever does it first."""

    def __init__(self, slots: Slots) -> None:
        self._slots: Slots | None = slots

    def leave(self) -> None:
        """Give it back, if that was not done."""
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.give()
