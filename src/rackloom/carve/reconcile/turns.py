"""One at a time within a domain: endpoints that answer with one domain uuid are one domain.

What was planned from a look at a domain is worth nothing once somebody else acted there after that look.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Who of this process may act in which domain."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._acted: Counter[str] = Counter()

    def before_looking(self) -> Counter[str]:
        """How often each domain was acted in; for `act`, taken before the domain is looked at."""
        return self._acted.copy()

    @asynccontextmanager
    async def act(self, domain: str, before: Counter[str]) -> AsyncIterator[bool]:
        """Wait for the domain; gives whether nobody acted in it since `before`."""
        async with self._locks[domain]:
            try:
                yield before[domain] == self._acted[domain]
            finally:
                self._acted[domain] += 1
