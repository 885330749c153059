"""nvidia-imex and its supervisor as a model: READY a while after its peers are known, and then connected."""

import asyncio
from collections.abc import Callable

from rackloom.claim.imex.status import CONNECTED, READY, ImexConnection, ImexDomain, ImexNode
from rackloom.claim.imex.steps import Peers
from rackloom.errors import Retry


class Imex:
    """Stands in for both `Supervisor` and `ImexControl` of one daemon.

    `ready_after` is in seconds; `on_ready` is called when it is READY.
    """

    def __init__(self, ready_after: float, on_ready: Callable[[], None]) -> None:
        self.running_with: Peers | None = None
        self.failure = ""
        self.is_ready = asyncio.Event()
        self._ready_after = ready_after
        self._on_ready = on_ready
        self._started = asyncio.Event()

    def set_peers(self, peers: Peers) -> None:
        """The peers' names are resolved anew; nothing is restarted (`dns` mode)."""
        self.running_with = peers
        self._started.set()

    def look_again(self) -> None:
        """Its certificate is as it was."""

    def note_ready(self) -> None:
        """It never fails."""

    async def run(self) -> None:
        """Start, and be READY later."""
        await self._started.wait()
        await asyncio.sleep(self._ready_after)
        self.is_ready.set()
        self._on_ready()
        await asyncio.Event().wait()

    async def local_status(self) -> str:
        """As `nvidia-imex-ctl -q` prints it."""
        if not self.is_ready.is_set():
            raise Retry("not READY yet", after=0.1)
        return READY

    async def domain(self) -> ImexDomain:
        """As `nvidia-imex-ctl -N -j` prints it."""
        peers = self.running_with.addresses if self.running_with else {}
        links = {str(peer): ImexConnection(CONNECTED) for peer in peers}
        return ImexDomain("UP", {str(peer): ImexNode(READY, connections=links) for peer in peers})
