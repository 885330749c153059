"""The IMEX stand-in in memory, for thousands of daemons of one process.

It gives the supervisor a child (with `returncode`, `send_signal` and `wait`) and an `ImexControl`.

`InMemoryImex` has no sockets. A daemon reports a peer as connected if that peer runs, knows this daemon
and trusts the same authority, and the link is not cut (`ImexNetwork.cut`). It refuses the same
configurations and takes the same times as the program, in the event loop's time.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL, SIGUSR1
from typing import Any

from rackloom.claim.imex.nvidia_imex import (
    CONNECTED,
    READY,
    ImexConnection,
    ImexControl,
    ImexDomain,
    ImexNode,
)
from rackloom.errors import Retry
from rackloom.lab.imex.service import (
    ABSENT_SECONDS,
    EXIT_REFUSED,
    RELOAD_SECONDS,
    RELOAD_WINDOW,
    STOP_SECONDS,
)
from rackloom.lab.imex.settings import ImexHost, ImexOptions, ImexRefusal, read_imex_options


class ImexTask:
    """A daemon as a task of this process, which `Supervisor` may take for its child process."""

    def __init__(self, work: Coroutine[Any, Any, int]) -> None:
        self.complaint = ""
        """Why it did not start."""
        self._running = asyncio.create_task(work)

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._code() if self._running.done() else None

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        await asyncio.wait({self._running})
        return self._code()

    def _code(self) -> int:
        return -SIGKILL if self._running.cancelled() else self._running.result()

    def _refuse(self, error: ImexRefusal | OSError) -> int:
        self.complaint = "; ".join(map(str, error.args)) if isinstance(error, ImexRefusal) else str(error)
        return EXIT_REFUSED


START_SECONDS = 0.23
"""From its start to READY, as observed."""


@dataclass(eq=False)
class ImexNetwork:
    """The network between daemons. `cut` holds the links that carry nothing, as pairs of addresses."""

    running: "dict[str, InMemoryImex]" = field(default_factory=dict)
    cut: set[frozenset[str]] = field(default_factory=set)

    def links(self, memory_imex: "InMemoryImex", address: str | None) -> bool:
        """Whether a daemon reaches the one at an address."""
        other = self.running.get(address or "")
        if other is None or frozenset((memory_imex.address, other.address)) in self.cut:
            return False
        return memory_imex.address in other.peers and memory_imex.authority == other.authority

    def row(self, address: str | None, index: int, asking: str) -> ImexNode:
        """The link to daemon `asking` (number `index`), as the daemon at `address` reports it."""
        other = self.running.get(address or "")
        if other is None or other.address == asking:
            return ImexNode("UNAVAILABLE", address or "", connections={str(index): ImexConnection("INVALID")})
        return ImexNode(
            READY, host=other.address, connections={str(index): _connection(self.links(other, asking))}
        )


class InMemoryImex(ImexTask):
    """A daemon without sockets."""

    def __init__(self, config: Path, host: ImexHost, network: ImexNetwork) -> None:
        self.address = ""
        self.authority = b""
        self.peers: set[str] = set()
        self._config = config
        self._host = host
        self._network = network
        self._own = 0
        self._addresses: list[str | None] = []
        self._reloaded = float("-inf")
        self._reloading: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        super().__init__(self._run())

    def send_signal(self, signal: int) -> None:
        """SIGUSR1 makes it read its peers again. Any other signal ends it."""
        if signal == SIGUSR1:
            self._asked_to_reload()
        elif signal == SIGKILL:
            self._running.cancel()
        else:
            self._stopped.set()

    async def _run(self) -> int:
        seconds = self._host.seconds
        try:
            self._start(read_imex_options(self._config, self._host))
        except ImexRefusal as refusal:
            return self._refuse(refusal)
        await asyncio.sleep(seconds(START_SECONDS))
        self._network.running[self.address] = self
        try:
            await self._stopped.wait()
        finally:
            if self._network.running.get(self.address) is self:
                del self._network.running[self.address]
        await asyncio.sleep(seconds(STOP_SECONDS))
        return 0

    def _start(self, settings: ImexOptions) -> None:
        self._own, self.address = settings.own(lambda *_: None)
        self.authority = _trusted_authority(settings)
        self._learn([self._host.resolve(node) for node in settings.nodes])

    def _asked_to_reload(self) -> None:
        if _loop_time() - self._reloaded >= self._host.seconds(RELOAD_WINDOW):
            self._reloaded = _loop_time()
            self._reloading = asyncio.create_task(self._reload())

    async def _reload(self) -> None:
        settings = read_imex_options(self._config, self._host)
        authority = _trusted_authority(settings)
        addresses = [self._host.resolve(node) for node in settings.nodes]
        await asyncio.sleep(self._host.seconds(RELOAD_SECONDS))
        self.authority = authority
        self._learn(addresses)

    def _learn(self, addresses: list[str | None]) -> None:
        self._addresses = addresses
        self.peers = {address for address in addresses if address is not None}

    async def domain(self) -> ImexDomain:
        """As the control tool prints it: from each peer only its link to this daemon."""
        places = list(enumerate(self._addresses))
        rows = {index: self._network.row(address, self._own, self.address) for index, address in places}
        links = {str(index): self._link(address) for index, address in places}
        rows[self._own] = ImexNode(READY, host=self.address, connections=links)
        up = all(row.status == READY for row in rows.values())
        if not up:
            await asyncio.sleep(self._host.seconds(ABSENT_SECONDS))
        return ImexDomain("UP" if up else "DEGRADED", {str(index): row for index, row in rows.items()})

    def _link(self, address: str | None) -> ImexConnection:
        return _connection(address == self.address or self._network.links(self, address))


class InMemoryImexControl(ImexControl):
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

    def _daemon(self) -> InMemoryImex:
        found = self._network.running.get(self._address)
        if found is None:
            raise Retry("the IMEX daemon does not answer", after=1.0)
        return found


def _connection(connected: bool) -> ImexConnection:
    return ImexConnection(CONNECTED if connected else "DISCONNECTED")


def _trusted_authority(settings: ImexOptions) -> bytes:
    """The authority that it trusts. Empty without authentication."""
    file = settings.options.get("IMEX_SERVER_CERT_AUTH") if settings.authenticated else None
    return Path(file).read_bytes() if file else b""


def _loop_time() -> float:
    return asyncio.get_running_loop().time()
