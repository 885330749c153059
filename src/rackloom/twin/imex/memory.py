"""The stand-in for nvidia-imex without sockets: thousands of daemons in one process, a network between them.

What it says of its peers is what is so: a peer is connected when its daemon runs, knows this one, trusts the
same authority, and nobody has cut the link. It refuses what NVIDIA's program refuses, and takes as long, in
the event loop's time.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGUSR1

from rackloom.claim.imex.control import ImexControl
from rackloom.claim.imex.status import CONNECTED, READY, ImexConnection, ImexDomain, ImexNode
from rackloom.errors import Retry
from rackloom.twin.imex.service import (
    ABSENT_SECONDS,
    REFUSED,
    RELOAD_SECONDS,
    RELOAD_WINDOW,
    STOP_SECONDS,
)
from rackloom.twin.imex.settings import Refusal, Settings, Surroundings, read_settings

START_SECONDS = 0.23
"""From its start to READY, as observed."""


@dataclass(eq=False)
class ImexNetwork:
    """Where daemons meet. `cut` are links that carry nothing: pairs of addresses."""

    running: "dict[str, MemoryImex]" = field(default_factory=dict)
    cut: set[frozenset[str]] = field(default_factory=set)

    def links(self, one: "MemoryImex", address: str | None) -> bool:
        """Whether a daemon reaches the one at an address."""
        other = self.running.get(address or "")
        if other is None or frozenset((one.address, other.address)) in self.cut:
            return False
        return one.address in other.peers and one.authority == other.authority

    def row(self, address: str | None, index: int, asking: str) -> ImexNode:
        """What the daemon at an address says of its link to the one that is asking, which has `index`."""
        other = self.running.get(address or "")
        if other is None or other.address == asking:
            return ImexNode("UNAVAILABLE", address or "", connections={str(index): ImexConnection("INVALID")})
        return ImexNode(READY, host=other.address, connections={str(index): _link(self.links(other, asking))})


class MemoryImex:
    """A daemon that `Supervisor` may take for its child process."""

    def __init__(self, config: Path, around: Surroundings, network: ImexNetwork) -> None:
        self.address = ""
        self.authority = b""
        self.peers: set[str] = set()
        self.complaint = ""
        """Why it did not start."""
        self._config = config
        self._around = around
        self._network = network
        self._own = 0
        self._addresses: list[str | None] = []
        self._reloaded = float("-inf")
        self._reloading: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._running = asyncio.create_task(self._run())

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._code() if self._running.done() else None

    def send_signal(self, signal: int) -> None:
        """SIGUSR1 has it read its peers again; any other ends it."""
        if signal == SIGUSR1:
            self._asked_to_reload()
        elif signal == SIGKILL:
            self._running.cancel()
        else:
            self._stopped.set()

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        await asyncio.wait({self._running})
        return self._code()

    def _code(self) -> int:
        return -SIGKILL if self._running.cancelled() else self._running.result()

    async def _run(self) -> int:
        seconds = self._around.seconds
        try:
            self._start(read_settings(self._config, self._around))
        except Refusal as refusal:
            self.complaint = "; ".join(map(str, refusal.args))
            return REFUSED
        await asyncio.sleep(seconds(START_SECONDS))
        self._network.running[self.address] = self
        try:
            await self._stopped.wait()
        finally:
            if self._network.running.get(self.address) is self:
                del self._network.running[self.address]
        await asyncio.sleep(seconds(STOP_SECONDS))
        return 0

    def _start(self, settings: Settings) -> None:
        self._own, self.address = settings.own(lambda *_: None)
        self.authority = _authority(settings)
        self._learn([self._around.resolve(node) for node in settings.nodes])

    def _asked_to_reload(self) -> None:
        if _now() - self._reloaded >= self._around.seconds(RELOAD_WINDOW):
            self._reloaded = _now()
            self._reloading = asyncio.create_task(self._reload())

    async def _reload(self) -> None:
        settings = read_settings(self._config, self._around)
        authority = _authority(settings)
        addresses = [self._around.resolve(node) for node in settings.nodes]
        await asyncio.sleep(self._around.seconds(RELOAD_SECONDS))
        self.authority = authority
        self._learn(addresses)

    def _learn(self, addresses: list[str | None]) -> None:
        self._addresses = addresses
        self.peers = {address for address in addresses if address is not None}

    async def domain(self) -> ImexDomain:
        """As the control tool prints it: of peers, only what they say of this daemon."""
        places = list(enumerate(self._addresses))
        rows = {index: self._network.row(address, self._own, self.address) for index, address in places}
        links = {str(index): self._link(address) for index, address in places}
        rows[self._own] = ImexNode(READY, host=self.address, connections=links)
        up = all(row.status == READY for row in rows.values())
        if not up:
            await asyncio.sleep(self._around.seconds(ABSENT_SECONDS))
        return ImexDomain("UP" if up else "DEGRADED", {str(index): row for index, row in rows.items()})

    def _link(self, address: str | None) -> ImexConnection:
        return _link(address == self.address or self._network.links(self, address))


class MemoryControl(ImexControl):
    """Asks such a daemon where the control tool would."""

    def __init__(self, config: Path, address: str, network: ImexNetwork) -> None:
        super().__init__((), config)
        self._address = address
        self._network = network

    async def local_status(self) -> str:
        """READY once it runs. Raises `Retry`."""
        self._daemon()
        return READY

    async def domain(self) -> ImexDomain:
        """The domain as the daemon sees it. Raises `Retry`."""
        return await self._daemon().domain()

    def _daemon(self) -> MemoryImex:
        found = self._network.running.get(self._address)
        if found is None:
            raise Retry("the IMEX daemon does not answer", after=1.0)
        return found


def _link(connected: bool) -> ImexConnection:
    return ImexConnection(CONNECTED if connected else "DISCONNECTED")


def _authority(settings: Settings) -> bytes:
    """Whom it trusts; nothing without authentication."""
    file = settings.options.get("IMEX_SERVER_CERT_AUTH") if settings.authenticated else None
    return Path(file).read_bytes() if file else b""


def _now() -> float:
    return asyncio.get_running_loop().time()
