"""nvidia-imex as a child: started when its peers are known, told of changes, restarted when it dies.

Level-triggered: whatever wakes the loop, it compares what the daemon runs with to what is known now and takes
the one step that `next_step` names. Nothing here decides anything else.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from signal import SIGTERM, SIGUSR1
from typing import Protocol

import structlog

from rackloom.claim.imex.credentials import Credentials
from rackloom.claim.imex.files import ImexFiles
from rackloom.claim.imex.steps import Layout, Peers, Step, next_step

RELOAD_INTERVAL = 5.0
"""Seconds: nvidia-imex ignores a SIGUSR1 that follows another sooner. One that comes before its handler is
installed would end it, so the start counts as a signal too."""
RESTART_DELAY = 1.0
"""Seconds between an unexpected end and the next start."""

_log = structlog.get_logger(__name__)


class Child(Protocol):
    """The part of `asyncio.subprocess.Process` that is used."""

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        ...

    def send_signal(self, signal: int) -> None:
        """Signal it; nothing once it has ended."""
        ...

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        ...


@dataclass(slots=True)
class _Running:
    child: Child
    ended: asyncio.Task[int]
    peers: Peers
    credentials: str
    signalled_at: float


class Supervisor:
    """Keeps one daemon running with the newest peers and credentials; `spawn` starts the program."""

    def __init__(
        self,
        layout: Layout,
        files: ImexFiles,
        credentials: Credentials,
        spawn: Callable[[], Awaitable[Child]],
    ) -> None:
        self._layout = layout
        self._files = files
        self._credentials = credentials
        self._spawn = spawn
        self._peers = Peers(own_index=None, addresses={})
        self._running: _Running | None = None
        self._changed = asyncio.Event()
        self._told = ""

    @property
    def running_with(self) -> Peers | None:
        """The peers that the daemon was last told of; None while it does not run."""
        return None if self._running is None else self._running.peers

    def set_peers(self, peers: Peers) -> None:
        """The daemons of the clique are now these."""
        if peers != self._peers:
            self._peers = peers
            self._changed.set()

    def look_again(self) -> None:
        """Something that is read from the disk may have changed."""
        self._changed.set()

    async def run(self) -> None:
        """Supervise until cancelled; then the daemon is told to end, and waited for."""
        try:
            while True:
                self._changed.clear()
                delay = await self._take_step()
                await self._wait(delay)
        finally:
            await self._stop()

    async def _take_step(self) -> float | None:
        """Take the next step; seconds until another is due whatever happens, None for no such time."""
        if self._running is not None and self._running.ended.done():
            _log.warning("imex.ended", code=self._running.ended.result())
            self._running = None
            return RESTART_DELAY
        step = next_step(self._layout, self.running_with, self._peers)
        self._tell(step)
        match step.action:
            case "start":
                return await self._start(step)
            case "restart":
                await self._stop()
                return 0.0
            case "reload":
                self._files.write_hosts(self._peers.addresses)
                return self._reload()
            case _:
                return self._reload() if self._credentials_are_new() else None

    def _tell(self, step: Step) -> None:
        if step.action != "nothing" and step.reason != self._told:
            _log.info(f"imex.{step.action}", reason=step.reason)
        self._told = step.reason

    async def _start(self, step: Step) -> float | None:
        credentials = self._credentials.fingerprint()
        if credentials is None:
            _log.info("imex.wait", reason="its certificate has not been issued yet")
            return RESTART_DELAY
        peers = self._peers  # they may change while the program is started: it knows these
        self._files.write_hosts(peers.addresses)
        self._files.write_nodes(step.nodes)
        child = await self._spawn()
        ended = asyncio.create_task(child.wait())
        ended.add_done_callback(lambda _: self._changed.set())
        self._running = _Running(child, ended, peers, credentials, _now())
        return None

    def _credentials_are_new(self) -> bool:
        found = self._credentials.fingerprint()
        return self._running is not None and found is not None and found != self._running.credentials

    def _reload(self) -> float | None:
        running = self._running
        credentials = self._credentials.fingerprint()
        if running is None or credentials is None:
            return RESTART_DELAY
        wait = running.signalled_at + RELOAD_INTERVAL - _now()
        if wait > 0:
            return wait
        running.child.send_signal(SIGUSR1)
        running.signalled_at = _now()
        running.peers, running.credentials = self._peers, credentials
        return None

    async def _wait(self, delay: float | None) -> None:
        try:
            async with asyncio.timeout(delay):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _stop(self) -> None:
        """SIGTERM, so that it takes leave of its peers; the pod's grace period bounds the wait, not we."""
        running, self._running = self._running, None
        if running is not None:
            if running.child.returncode is None:
                running.child.send_signal(SIGTERM)
            await running.ended


def _now() -> float:
    return asyncio.get_running_loop().time()
