"""What is seen of the running daemon, written to the cluster when it changes."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
import structlog

from rackloom.claim.imex.control import ImexControl
from rackloom.claim.imex.status import READY, Mesh, NotUnderstood, mesh_of
from rackloom.claim.imex.steps import Peers
from rackloom.claim.kube.api import KubeError
from rackloom.errors import Retry

FIRST, EAGER, MESHING, CALM = 0.05, 0.5, 2.0, 10.0
"""Seconds between looks: until the daemon is ready (from `FIRST` on, each half as long again as the one
before, at most `EAGER`: nvidia-imex is READY 0.23 s after its start, and a job waits for it), until it
reaches all peers (or runs at all), and once all is well. Asked for the whole domain a daemon asks every peer:
a rack that waits for a node must not do that twice a second."""

_log = structlog.get_logger(__name__)


class Daemon(Protocol):
    """What the supervisor knows of the daemon."""

    @property
    def running_with(self) -> Peers | None:
        """The peers that the daemon was last told of; None while it does not run."""
        ...

    @property
    def failure(self) -> str:
        """How it ended last; empty if it was READY since."""
        ...

    def note_ready(self) -> None:
        """It was seen READY."""
        ...


class _Report(msgspec.Struct, frozen=True):
    """What the pod says; None: nothing."""

    mesh: Mesh | None
    error: str | None


class Reporter:
    """Looks at the daemon and passes on what is new.

    `tell_ready(bool)` is for the entry in the clique, `report(mesh as JSON, error)` for the pod. `entered` is
    called once, when the entry says what this process saw, and not a process before it. A report replaces the
    one before it: a daemon that has ended reaches nobody, and one that is READY has no error.
    """

    def __init__(
        self,
        control: ImexControl,
        daemon: Daemon,
        tell_ready: Callable[[bool], Awaitable[None]],
        report: Callable[[str | None, str | None], Awaitable[None]],
        entered: Callable[[], None] = lambda: None,
    ) -> None:
        self._entered = entered
        self._control = control
        self._daemon = daemon
        self._tell_ready = tell_ready
        self._report = report
        self._ready: bool | None = None
        self._told: _Report | None = None
        """None until something was reported: what the pod says of a daemon before this one is not known."""

    async def run(self) -> None:
        """Look until cancelled."""
        eager = FIRST
        while True:
            well = await self.look()
            if self._ready or self._daemon.failure:
                eager = FIRST
                await asyncio.sleep(CALM if well else MESHING)
            else:
                await asyncio.sleep(eager)
                # Before it runs a look costs nothing.
                eager = FIRST if self._daemon.running_with is None else min(1.5 * eager, EAGER)

    async def look(self) -> bool:
        """Look once; true if the daemon is ready and reaches all its peers."""
        ready = await self._is_ready()
        if ready:
            self._daemon.note_ready()
        if ready != self._ready:
            await self._tell_ready(ready)
            if self._ready is None:
                self._entered()
            self._ready = ready
        mesh = await self._seen_mesh() if ready else None
        report = self._now(ready, mesh)
        if report is not None and report != self._told and not await self._tell(report):
            return False
        return mesh is not None and mesh.complete

    def _now(self, ready: bool, mesh: Mesh | None) -> _Report | None:
        """What the pod should say; None: as it does."""
        if ready:
            known = None if self._told is None else self._told.mesh
            return _Report(mesh or known, None)
        return _Report(None, self._daemon.failure) if self._daemon.failure else None

    async def _tell(self, report: _Report) -> bool:
        """Whether it was taken. An API server that is away must not end the daemon, and jobs with it."""
        mesh = None if report.mesh is None else msgspec.json.encode(report.mesh).decode()
        try:
            await self._report(mesh, report.error)
        except KubeError as error:
            _log.warning("imex.report_lost", reason=error.message)
            return False
        self._told = report
        return True

    async def _is_ready(self) -> bool:
        if self._daemon.running_with is None:
            return False
        try:
            return await self._control.local_status() == READY
        except (Retry, NotUnderstood) as reason:
            _log.debug("imex.not_ready", reason=str(reason))
            return False

    async def _seen_mesh(self) -> Mesh | None:
        peers = self._daemon.running_with
        if peers is None or peers.own_index is None:
            return None
        try:
            mesh = mesh_of(await self._control.domain(), peers.own_index, peers.addresses)
        except (Retry, NotUnderstood) as reason:
            _log.warning("imex.mesh_unknown", reason=str(reason))
            return None
        count = mesh.peers + len(peers.unusable)
        missing = (*mesh.missing, *peers.unusable)
        return Mesh(complete=not missing, peers=count, missing=missing)
