"""A simulated switch controller on a real socket, which can go away and come back."""

from typing import Self

import grpc
import grpc.aio
import msgspec

from rackloom.twin.switches.fabric import SimulatedFabric, standby_of
from rackloom.twin.switches.faults import Faults
from rackloom.twin.switches.nmxc_service import NmxcService

LOOPBACK = "127.0.0.1"
GRACE_SECONDS = 0.2
"""For calls under way when the controller goes away; then they are cut."""

_OPTIONS = (
    # Two controllers never share a port: the second is told.
    ("grpc.so_reuseport", 0),
)


class ServerTls(msgspec.Struct, frozen=True, kw_only=True):
    """PEM contents."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None = None
    """Where given, a client must show a certificate of this authority."""


class NmxcServer:
    """An async context manager that serves `fabric`; `port` 0 takes a free one and keeps it.

    `faults` mistreats calls; the fabric itself may be changed from outside at any time.
    """

    def __init__(self, fabric: SimulatedFabric, *, port: int = 0, tls: ServerTls | None = None) -> None:
        self.fabric = fabric
        self.faults = Faults()
        self._port = port
        self._tls = tls
        self._service = NmxcService(fabric, self.faults)
        self._server: grpc.aio.Server | None = None
        self._standby: NmxcServer | None = None

    @property
    def url(self) -> str:
        """Where it listens; known once it was entered."""
        return f"{'https' if self._tls else 'http'}://{LOOPBACK}:{self._port}"

    async def __aenter__(self) -> Self:
        """Begin to listen."""
        await self.come_back()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop."""
        await self.go_away()
        if self._standby is not None:
            await self._standby.go_away()

    async def come_back(self) -> None:
        """Listen, on the port that it had before if it had one; nothing happens where it listens."""
        if self._server is not None:
            return
        server = grpc.aio.server(options=_OPTIONS)
        server.add_generic_rpc_handlers((self._service.handlers(),))
        address = f"{LOOPBACK}:{self._port}"
        self._port = (
            server.add_secure_port(address, _credentials(self._tls))
            if self._tls
            else server.add_insecure_port(address)
        )
        await server.start()
        self._server = server

    async def go_away(self) -> None:
        """End every subscription and connection and stop listening; the fabric keeps its state."""
        if self._server is not None:
            self._service.hang_up()
            await self._server.stop(grace=GRACE_SECONDS)
            self._server = None

    async def stand_by(self) -> str:
        """Have the controller of another switch tray ready to lead; returns its URL. It lists no GPU."""
        if self._standby is None:
            self._standby = NmxcServer(standby_of(self.fabric), tls=self._tls)
            await self._standby.come_back()
        return self._standby.url

    async def move(self) -> None:
        """Lead from where the standby is: nobody listens any more where this one did."""
        await self.stand_by()
        standby, self._standby = self._standby, None
        assert standby is not None  # noqa: S101 (it was made ready)
        await standby.go_away()
        await self.go_away()
        self._port = standby._port
        await self.come_back()

    def heart_beat(self) -> None:
        """Send a heart beat to every subscriber now."""
        self._service.heart_beat()


def _credentials(tls: ServerTls) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials(
        [(tls.key, tls.certificate)],
        root_certificates=tls.client_ca,
        require_client_auth=tls.client_ca is not None,
    )
