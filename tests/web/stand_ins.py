"""A source that tests change, and a doorman that knows three users, one of them by two tokens."""

import asyncio

from rackloom.errors import Retry
from rackloom.web.model import SiteReading
from rackloom.web.viewers import Viewer

FAR = 4_000_000_000.0
PEOPLE = {
    ("operator-token", "provider"): Viewer("provider", "ops", True, FAR),
    ("renewed-token", "provider"): Viewer("provider", "ops", True, FAR + 1.0),
    ("acme-token", "acme"): Viewer("acme", "ann", False, FAR),
    ("blue-token", "blue"): Viewer("blue", "bob", False, FAR),
}


async def doorman(token: str, org: str) -> Viewer | None:
    return PEOPLE.get((token, org))


class ShownSite:
    """A site whose `read` returns the reading that was last shown. `broken` makes reading fail."""

    def __init__(self, reading: SiteReading) -> None:
        self.reading = reading
        self.broken = False
        self.reads = 0
        self.followed = asyncio.Event()
        """Set once a reader waits for changes."""
        self._news = asyncio.Event()

    def show(self, reading: SiteReading) -> None:
        self.reading = reading
        self._news.set()

    def breaks(self, broken: bool) -> None:
        self.broken = broken
        self._news.set()

    async def read(self) -> SiteReading:
        self.reads += 1
        if self.broken:
            raise Retry("the store is busy", after=1)
        return self.reading

    async def changed(self) -> None:
        self.followed.set()
        if self.broken:
            raise Retry("the store is busy", after=1)
        await self._news.wait()
        self._news.clear()
