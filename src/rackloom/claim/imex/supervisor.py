"""Keeping nvidia-imex running: start, reload and restart as its peers and certificates change.

The loop is level-triggered: at every wake it compares the peers that the daemon runs with to those
of now and takes the one step that `next_step` names. nvidia-imex reads its node file once, at start. With
DNS names a peer that moves is found again by SIGUSR1, which resolves the names again. With addresses in
the file every change is a restart. A changed own index is always a restart: peers refuse exports of a
daemon with a stale index as invalid handles.

A daemon that ends unexpectedly, or cannot be started, is started again after 1 s, then after twice as
long each time, up to 30 s, even if members join or leave. The delay starts over once it ran for 30 s.
How it ended is kept until it was seen READY. nvidia-imex ignores a SIGUSR1 within 5 s of another, so
signals are 6 s apart. A signal that comes before its handler is installed would end it, so the start counts
as a signal.

At the end the daemon gets SIGTERM, so that it signs off at its peers, and is waited for. The pod's
grace period bounds the wait.

Invariant: the node file and the hosts file that the running daemon has read are those of `running.peers`.
They are written before the start and before each signal, and `peers` are copied before the start, since they
may change while the program starts.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from signal import SIGTERM, SIGUSR1
from typing import Literal

import structlog

from rackloom.claim.imex.config import (
    ImexFiles,
    ImexTls,
    NodeFileMode,
    daemon_host,
    nodes_text,
    tls_fingerprint,
)
from rackloom.claim.imex.nvidia_imex import ImexChild, how_it_ended
from rackloom.errors import Refused

# The decision. Pure.


StepAction = Literal["wait", "start", "reload", "restart", "nothing"]


@dataclass(frozen=True, slots=True)
class Peers:
    """The daemons of one clique: index to address, this daemon's own included once it has joined.

    `unusable` are members whose entry cannot be used, each with the reason, in words.
    """

    own_index: int | None
    addresses: Mapping[int, str]
    unusable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerLayout:
    """How the daemon gets its peers. `max_nodes` is the most nodes that a domain may have.

    `quorum` (`ip` mode only) is the number of nodes that must have joined before any daemon starts.
    """

    mode: NodeFileMode
    max_nodes: int
    quorum: int = 0


@dataclass(frozen=True, slots=True)
class SupervisorStep:
    """The action, and the reason. `nodes` is the node file that the daemon is to run with."""

    action: StepAction
    reason: str
    nodes: str = ""


def next_step(layout: PeerLayout, running: Peers | None, now: Peers) -> SupervisorStep:
    """The step from the peers that the daemon runs with (None: it does not run) to those of now."""
    if now.own_index is None:
        return SupervisorStep("wait", "this node has not joined its clique yet")
    # In mode `ip` each change of the node file is a restart: wait until all have joined and start once.
    if layout.mode == "ip" and len(now.addresses) != layout.quorum:
        return SupervisorStep("wait", f"{len(now.addresses)} of {layout.quorum} nodes have joined")
    nodes = _node_file(layout, now)
    if running is None:
        return SupervisorStep("start", "all that it needs is known", nodes)
    if running.own_index != now.own_index:
        # The index is the daemon's identity: exports of a daemon that runs under a stale one are refused
        # by its peers as invalid handles.
        return SupervisorStep("restart", f"its index went from {running.own_index} to {now.own_index}", nodes)
    # In mode `dns` the node file holds fixed names, so only their addresses have to be resolved again.
    if dict(running.addresses) == dict(now.addresses):
        return SupervisorStep("nothing", "no peer has changed", nodes)
    return SupervisorStep("reload" if layout.mode == "dns" else "restart", "peers have changed", nodes)


def _node_file(layout: PeerLayout, peers: Peers) -> str:
    if layout.mode == "dns":
        return nodes_text([daemon_host(index) for index in range(layout.max_nodes)])
    return nodes_text([address for _, address in sorted(peers.addresses.items())])


# The loop.


RELOAD_INTERVAL = 6.0
"""Seconds: nvidia-imex ignores a SIGUSR1 within 5 of another, counted from when it took the other, which may
be later than when it was sent. One that comes before its handler is installed would end it, so the start
counts as a signal too."""
RESTART_DELAY, LONGEST_RESTART_DELAY = 1.0, 30.0
"""Seconds between an unexpected end and the next start: doubled while the daemon does not run for longer than
the longest of them."""
CREDENTIALS_DELAY = 1.0
"""Seconds between looks at a certificate that is not there yet."""

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _RunningChild:
    child: ImexChild
    ended: asyncio.Task[int]
    peers: Peers
    credentials: str
    started_at: float
    signalled_at: float


@dataclass(eq=False)
class Supervisor:
    """Keeps one daemon running with the newest peers and credentials. `spawn` starts the program."""

    layout: PeerLayout
    files: ImexFiles
    tls: ImexTls | None
    spawn: Callable[[], Awaitable[ImexChild]]
    _peers: Peers = field(default_factory=lambda: Peers(own_index=None, addresses={}), init=False)
    _running: _RunningChild | None = field(default=None, init=False)
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _logged: str = field(default="", init=False)
    _delay: float = field(default=0.0, init=False)
    _not_before: float = field(default=float("-inf"), init=False)
    """Loop time of the next start after one that failed."""
    failure: str = field(default="", init=False)
    """How the daemon ended last, in one line. Empty once it was READY since."""

    @property
    def running_with(self) -> Peers | None:
        """The peers that the daemon was last given, or None while it does not run."""
        return None if self._running is None else self._running.peers

    def set_peers(self, peers: Peers) -> None:
        """The daemons of the clique are now these."""
        if peers != self._peers:
            self._peers = peers
            self._changed.set()

    def note_ready(self) -> None:
        """The daemon is READY."""
        self.failure = ""

    def recheck(self) -> None:
        """A file may have changed: take the next step."""
        self._changed.set()

    async def run(self) -> None:
        """Supervise until cancelled. Then end the daemon and wait for it."""
        try:
            while True:
                # Cleared before the step: a change during the step wakes the loop again.
                self._changed.clear()
                delay = await self._take_step()
                with suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await self._changed.wait()
        finally:
            await self._stop()

    async def _take_step(self) -> float | None:
        """Take the next step. Returns the seconds until another is due without a wake, or None if none is."""
        if self._running is not None and self._running.ended.done():
            running, self._running = self._running, None
            self._failed(
                how_it_ended(running.ended.result(), running.child.complaint), _now() - running.started_at
            )
        step = next_step(self.layout, self.running_with, self._peers)
        self._log_step(step)
        match step.action:
            case "start":
                return await self._start(step)
            case "restart":
                await self._stop()
                return 0.0
            case "reload":
                self.files.write_hosts(self._peers.addresses)
                return self._reload()
            case "nothing" | "wait":
                return self._reload() if self._credentials_are_new() else None

    def _log_step(self, step: SupervisorStep) -> None:
        if step.action != "nothing" and step.reason != self._logged:
            _log.info(f"imex.{step.action}", reason=step.reason)
        self._logged = step.reason

    def _failed(self, how: str, lasted: float) -> None:
        self._delay = 0.0 if lasted >= LONGEST_RESTART_DELAY else self._delay
        self._delay = min(max(2 * self._delay, RESTART_DELAY), LONGEST_RESTART_DELAY)
        self._not_before = _now() + self._delay
        self.failure = how
        _log.warning("imex.ended", how=how, again_in=self._delay)

    async def _start(self, step: SupervisorStep) -> float | None:
        wait = self._not_before - _now()
        if wait > 0:
            return wait
        credentials = tls_fingerprint(self.tls)
        if credentials is None:
            _log.info("imex.wait", reason="its certificate has not been issued yet")
            return CREDENTIALS_DELAY
        peers = self._peers  # they may change while the program is started: it knows these
        # Before the start: from the names it learns which line of the node file is its own.
        self.files.write_hosts(peers.addresses)
        self.files.write_nodes(step.nodes)
        try:
            child = await self.spawn()
        except Refused as refused:
            self._failed(str(refused), 0.0)
            return self._delay
        ended = asyncio.create_task(child.wait())
        ended.add_done_callback(lambda _: self._changed.set())
        self._running = _RunningChild(child, ended, peers, credentials, _now(), _now())
        return None

    def _credentials_are_new(self) -> bool:
        found = tls_fingerprint(self.tls)
        return self._running is not None and found is not None and found != self._running.credentials

    def _reload(self) -> float | None:
        running = self._running
        credentials = tls_fingerprint(self.tls)
        if running is None or credentials is None:
            return CREDENTIALS_DELAY
        # A signal too soon after another is ignored, and its change would be lost: come back then.
        wait = running.signalled_at + RELOAD_INTERVAL - _now()
        if wait > 0:
            return wait
        running.child.send_signal(SIGUSR1)
        running.signalled_at = _now()
        running.peers, running.credentials = self._peers, credentials
        return None

    async def _stop(self) -> None:
        """SIGTERM, so that it signs off at its peers. Only the pod's grace period bounds the wait."""
        running, self._running = self._running, None
        if running is not None:
            if running.child.returncode is None:
                running.child.send_signal(SIGTERM)
            await running.ended


def _now() -> float:
    return asyncio.get_running_loop().time()
