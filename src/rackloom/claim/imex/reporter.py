"""What is seen of the running daemon, told to the cluster when it changes."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from rackloom.claim.imex.control import ImexControl
from rackloom.claim.imex.status import READY, Mesh, NotUnderstood, mesh_of
from rackloom.claim.imex.steps import Peers
from rackloom.claim.kube.api import KubeError
from rackloom.errors import Retry

EAGER, MESHING, CALM = 0.5, 2.0, 10.0
"""Seconds between looks: until the daemon is ready, until it reaches all peers, and once all is well. Told of
the whole domain a daemon asks every peer: a rack that waits for one node must not do that twice a second."""

_log = structlog.get_logger(__name__)


class Reporter:
    """Looks at the daemon and passes on what is new: `tell_ready(bool)`, `tell_mesh(json)`."""

    def __init__(
        self,
        control: ImexControl,
        peers: Callable[[], Peers | None],
        tell_ready: Callable[[bool], Awaitable[None]],
        tell_mesh: Callable[[str], Awaitable[None]],
    ) -> None:
        self._control = control
        self._peers = peers
        self._tell_ready = tell_ready
        self._tell_mesh = tell_mesh
        self._ready: bool | None = None
        self._mesh: Mesh | None = None

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            well = await self.look()
            await asyncio.sleep(CALM if well else MESHING if self._ready else EAGER)

    async def look(self) -> bool:
        """Look once; true if the daemon is ready and reaches all its peers."""
        ready = await self._is_ready()
        if ready != self._ready:
            await self._tell_ready(ready)
            self._ready = ready
        mesh = await self._seen_mesh() if ready else None
        if mesh is not None and mesh != self._mesh and not await self._tell(mesh):
            return False
        return mesh is not None and mesh.complete

    async def _tell(self, mesh: Mesh) -> bool:
        """Whether it was taken. An API server that is away must not end the daemon, and jobs with it."""
        try:
            await self._tell_mesh(msgspec.json.encode(mesh).decode())
        except KubeError as error:
            _log.warning("imex.mesh_untold", reason=error.message)
            return False
        self._mesh = mesh
        return True

    async def _is_ready(self) -> bool:
        try:
            return await self._control.local_status() == READY
        except (Retry, NotUnderstood) as reason:
            _log.debug("imex.not_ready", reason=str(reason))
            return False

    async def _seen_mesh(self) -> Mesh | None:
        peers = self._peers()
        if peers is None or peers.own_index is None:
            return None
        try:
            return mesh_of(await self._control.domain(), peers.own_index, peers.addresses)
        except (Retry, NotUnderstood) as reason:
            _log.warning("imex.mesh_unknown", reason=str(reason))
            return None
