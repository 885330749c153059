"""A simulated NMX-M on a real loopback socket, which can go away and come back."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import uvicorn

from rackloom.lab.switches.fabric import SimulatedFabric
from rackloom.lab.switches.faults import NmxmFaults
from rackloom.lab.switches.nmxm import NMXM_BASE, NmxmService
from rackloom.lab.switches.servers import LOOPBACK
from rackloom.serving.acceptor import bound_socket
from rackloom.serving.http_server import HttpServer
from rackloom.serving.limits import SIMULATED_NMX_M


class NmxmServer:
    """An async context manager that serves `fabrics`. `port` 0 takes a free one and keeps it.

    `cert` and `key` are PEM files, for https. Operations take `seconds`.
    """

    def __init__(
        self,
        fabrics: Sequence[SimulatedFabric],
        *,
        username: str = "rw-user",
        password: str = "simulated",  # noqa: S107 - of a simulation on loopback
        seconds: float = 0.0,
        port: int = 0,
        cert: Path | None = None,
        key: Path | None = None,
    ) -> None:
        self.fabrics = fabrics
        self.service = NmxmService(fabrics, username=username, password=password, seconds=seconds)
        self._port = port
        self._cert, self._key = cert, key
        self._server: HttpServer | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def faults(self) -> NmxmFaults:
        """The planned faults."""
        return self.service.faults

    @property
    def origin(self) -> str:
        """Scheme, host and port. Known once the context was entered."""
        return f"{'https' if self._cert else 'http'}://{LOOPBACK}:{self._port}"

    @property
    def url(self) -> str:
        """The URL that an operator registers."""
        return self.origin + NMXM_BASE

    async def __aenter__(self) -> Self:
        """Begin to listen."""
        await self.come_back()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop."""
        await self.go_away()
        await self.service.operations.close()

    async def come_back(self) -> None:
        """Listen on its earlier port, if it had one."""
        bound = bound_socket(LOOPBACK, self._port)
        self._port = bound.getsockname()[1]
        config = uvicorn.Config(
            self.service,
            ssl_certfile=self._cert,
            ssl_keyfile=self._key,
            log_config=None,
            lifespan="off",
        )
        self._server = HttpServer(config, SIMULATED_NMX_M)
        self._task = asyncio.create_task(self._server.serve(sockets=[bound]))
        await self._server.answering.wait()

    async def go_away(self) -> None:
        """End every connection and stop listening. The fabrics keep their state."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._task
            self._server = None
