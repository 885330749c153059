"""The stand-in for nvidia-imex without sockets: thousands of daemons in one process, a network between them.

What it says of its peers is what is so: a peer is connected when its daemon runs, knows this one, trusts the
same authority, and nobody has cut the link.
"""

import asyncio
import signal
from dataclasses import dataclass, field
from pathlib import Path

from rackloom.claim.imex.control import ImexControl
from rackloom.claim.imex.status import CONNECTED, READY, ImexConnection, ImexDomain, ImexNode
from rackloom.errors import Retry
from rackloom.twin.imex.settings import Settings, Surroundings, read_settings


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
            return ImexNode("UNAVAILABLE", host=address or "")
        return ImexNode(READY, host=other.address, connections={str(index): _link(self.links(other, asking))})


class MemoryImex:
    """A daemon that `Supervisor` may take for its child process."""

    def __init__(self, config: Path, around: Surroundings, network: ImexNetwork) -> None:
        self._config = config
        self._around = around
        self._network = network
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        settings = read_settings(config, around)
        self.address = settings.bind_ip
        self.authority = _authority(settings)
        self._learn(settings)
        network.running[self.address] = self

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._ended.result() if self._ended.done() else None

    def send_signal(self, number: int) -> None:
        """SIGUSR1 has it read its peers again; any other ends it."""
        if self._ended.done():
            return
        if number == signal.SIGUSR1:
            self._learn(read_settings(self._config, self._around))
            return
        self._network.running.pop(self.address, None)
        self._ended.set_result(-number if number == signal.SIGKILL else 0)

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        return await asyncio.shield(self._ended)

    def domain(self) -> ImexDomain:
        """As the control tool prints it: of peers, only what they say of this daemon."""
        places = list(enumerate(self._addresses))
        own = next(index for index, address in places if address == self.address)
        rows = {index: self._network.row(address, own, self.address) for index, address in places}
        links = {str(index): self._link(address) for index, address in places}
        rows[own] = ImexNode(READY, host=self.address, connections=links)
        whole = all(link.status == CONNECTED for link in links.values())
        return ImexDomain("UP" if whole else "DEGRADED", {str(index): row for index, row in rows.items()})

    def _link(self, address: str | None) -> ImexConnection:
        return _link(address == self.address or self._network.links(self, address))

    def _learn(self, settings: Settings) -> None:
        self._addresses = [self._around.resolve(node) for node in settings.nodes]
        self.peers = {address for address in self._addresses if address is not None}


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
        return self._daemon().domain()

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
