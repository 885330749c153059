"""Simulated switch controllers on real loopback sockets, which can go away and come back.

`NmxcServer` serves one fabric over gRPC, with or without TLS. It keeps its port while it is away. A
standby can take over at another port. The former leader can return at the old port with the state that
it remembers, or with no GPUs once it has learned that another one leads. Two controllers never share a port.
"""

from typing import Self

import grpc
import msgspec

from rackloom.lab.switches.fabric import SimulatedFabric, former_leader_fabric, standby_fabric
from rackloom.lab.switches.faults import NmxcFaults
from rackloom.lab.switches.nmxc import NmxcService
from rackloom.serving.acceptor import bound_socket
from rackloom.serving.grpc_server import GrpcServer
from rackloom.serving.limits import SIMULATED_NMX_C

LOOPBACK = "127.0.0.1"
GRACE_SECONDS = 0.2
"""Time for calls under way when the controller goes away, before they are cut."""


class NmxcServerTls(msgspec.Struct, frozen=True, kw_only=True):
    """PEM contents."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None = None
    """If given, a client must show a certificate of this authority."""


class NmxcServer:
    """An async context manager that serves `fabric`. `port` 0 takes a free one and keeps it.

    `faults` are applied to calls. The fabric itself may be changed from outside at any time.
    """

    def __init__(self, fabric: SimulatedFabric, *, port: int = 0, tls: NmxcServerTls | None = None) -> None:
        self.fabric = fabric
        self.faults = NmxcFaults()
        self._port = port
        self._tls = tls
        self._service = NmxcService(fabric, self.faults)
        self._server: GrpcServer | None = None
        self._standby: NmxcServer | None = None
        self._old: NmxcServer | None = None
        """The controller at the address of the previous leader."""
        self._memory: SimulatedFabric | None = None
        """The fabric as the old leader remembers it."""

    @property
    def url(self) -> str:
        """The URL at which it listens, known once it was entered."""
        return f"{'https' if self._tls else 'http'}://{LOOPBACK}:{self._port}"

    async def __aenter__(self) -> Self:
        """Begin to listen."""
        await self.come_back()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop."""
        for server in (self, self._standby, self._old):
            if server is not None:
                await server.go_away()

    async def come_back(self) -> None:
        """Listen, on its previous port if it had one. Does nothing if it listens already."""
        if self._server is not None:
            return
        listener = bound_socket(LOOPBACK, self._port)
        self._port = listener.getsockname()[1]
        credentials = None if self._tls is None else _server_credentials(self._tls)
        server = GrpcServer((self._service.handlers(),), SIMULATED_NMX_C, credentials)
        await server.start(listener)
        self._server = server

    async def go_away(self) -> None:
        """End every subscription and connection and stop listening. The fabric keeps its state."""
        if self._server is not None:
            self._service.hang_up()
            await self._server.stop(GRACE_SECONDS)
            self._server = None

    async def stand_by(self) -> str:
        """Have the controller of another switch tray ready to lead, and return its URL. It lists no GPU."""
        if self._standby is None:
            self._standby = NmxcServer(standby_fabric(self.fabric), tls=self._tls)
            await self._standby.come_back()
        return self._standby.url

    async def move(self) -> None:
        """Lead from the address of the standby. Nothing answers at the previous one."""
        await self.stand_by()
        standby, self._standby = self._standby, None
        assert standby is not None  # noqa: S101 (it was made ready)
        await standby.go_away()
        await self.go_away()
        self._memory = former_leader_fabric(self.fabric)
        await self._put_in_old_place(NmxcServer(self._memory, port=self._port, tls=self._tls))
        self._port = standby._port
        await self.come_back()

    async def old_leader_returns(self) -> str:
        """Let the former leader answer again at its URL, as leader, with the state it remembers."""
        if self._old is None or self._memory is None:
            raise RuntimeError("the leader never moved")
        await self._put_in_old_place(NmxcServer(self._memory, port=self._old._port, tls=self._tls))
        await self._old.come_back()
        return self._old.url

    async def old_leader_yields(self) -> None:
        """The former leader has learned that another one leads, and lists no GPU any more."""
        if self._old is not None and self._old._server is not None:
            fabric = standby_fabric(self.fabric)
            await self._put_in_old_place(NmxcServer(fabric, port=self._old._port, tls=self._tls))
            await self._old.come_back()

    async def _put_in_old_place(self, server: "NmxcServer") -> None:
        if self._old is not None:
            await self._old.go_away()
        self._old = server

    def heart_beat(self) -> None:
        """Send a heart beat to every subscriber now."""
        self._service.heart_beat()


def _server_credentials(tls: NmxcServerTls) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials(
        [(tls.key, tls.certificate)],
        root_certificates=tls.client_ca,
        require_client_auth=tls.client_ca is not None,
    )
