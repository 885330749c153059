"""What this node knows of its fabric, how long ago it looked, and when that changes."""

import asyncio
from collections.abc import Callable

import structlog

from rackloom.claim.node.driver import DRIVER_SECONDS
from rackloom.claim.node.imex.fabric import NodeFabric, clique_of
from rackloom.errors import Refused, Retry

log = structlog.get_logger(__name__)


class FabricView:
    """The newest fabric that could be read, and the clique that follows from it."""

    def __init__(self, read: Callable[[], NodeFabric], wall: Callable[[], float]) -> None:
        self._read = read
        self._wall = wall
        self._clique: str | None = None
        self._looked = False
        self._tell: Callable[[], None] = lambda: None
        self.fabric = NodeFabric()
        self.observed_at = 0.0
        self.trouble: str | None = "the fabric was not looked at yet"
        """Why the newest look told nothing; None when it did."""
        self.missing: str | None = None
        """What has to appear before this node has a fabric: a driver, or a newer one. None for nothing."""

    async def clique(self) -> str:
        """The clique of this node, "" for none. Raises `Retry` until it was known, and without a driver."""
        if self._clique is None:
            await self.look()
        await self.need_driver()
        if self._clique is None:
            raise Retry(self.trouble or "", after=1.0)
        return self._clique

    async def need_driver(self) -> None:
        """Raise `Retry` while the newest look missed something."""
        if not self._looked:
            await self.look()
        if self.missing is not None:
            raise Retry(self.missing, after=DRIVER_SECONDS)

    def when_changed(self, tell: Callable[[], None]) -> None:
        """Have `tell` called whenever the clique becomes another one, or a driver comes or goes."""
        self._tell = tell

    async def look(self) -> None:
        """Read again.

        What was known stays when it cannot be read: a GPU that is being reset has not left its rack. Nor does
        a clique that was known become none, since jobs run on it.
        """
        self._looked = True
        try:
            fabric = await asyncio.to_thread(self._read)
        except Refused as refused:
            self.trouble = str(refused)
            self._lack(str(refused))
            return
        except Retry as retry:
            self._unknown(retry)
            return
        self._lack(None)
        try:
            clique = clique_of(fabric)
        except Retry as retry:
            self._unknown(retry)
            return
        self.fabric, self.observed_at, self.trouble = fabric, self._wall(), None
        if clique == self._clique or (self._clique and not clique):
            return
        log.info("imex.clique", clique=clique, before=self._clique)
        self._clique = clique
        self._tell()

    def _unknown(self, retry: Retry) -> None:
        self.trouble = retry.reason
        log.warning("imex.fabric-unknown", reason=retry.reason)

    def _lack(self, missing: str | None) -> None:
        if missing != self.missing:
            log.warning("imex.driver", missing=missing)
            self.missing = missing
            self._tell()
