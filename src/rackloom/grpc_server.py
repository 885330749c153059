"""A gRPC server that untrusted clients cannot exhaust.

gRPC's C core limits what a connection may hold: the time of its handshake, the metadata and the size of a
message, the calls under way, its idle time and its age (`GrpcLimits`). It cannot share connections between
the addresses of clients. So `GrpcServer` accepts them itself (`rackloom.acceptor`) and passes their bytes on,
unread, to gRPC, which listens on a Unix socket without a file (Linux's abstract namespace, under a random
name). TLS is between the client and gRPC: the server still sees the certificate of the client. The address of
the client is in the name of the Unix socket that speaks for it, which gRPC calls the peer: `client_address`
takes it from there.

Nobody but this machine's processes can reach the Unix socket. For them gRPC limits the connections in total.

A connection counts as idle while its client sends nothing: with an address that has all that it may have,
the connection that is silent for longest gives way.
"""

import asyncio
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast
from urllib.parse import unquote

import grpc
import grpc.aio

from rackloom.acceptor import AcceptedConnection, Acceptor, ConnectionEnded
from rackloom.limits import GrpcLimits

_CLOSE_SECONDS = 5.0
"""For what a client has not read yet when gRPC has closed the connection."""
_MILLISECONDS = 1000


def grpc_options(limits: GrpcLimits, connections: int) -> Sequence[tuple[str, int]]:
    """The options of a server that has at most so many connections."""
    options = {
        # Two servers never share a port: binding the second one fails.
        "grpc.so_reuseport": 0,
        "grpc.max_allowed_incoming_connections": connections,
        "grpc.server_handshake_timeout_ms": round(limits.handshake_seconds * _MILLISECONDS),
        "grpc.max_metadata_size": limits.metadata_bytes // 2,
        "grpc.absolute_max_metadata_size": limits.metadata_bytes,
        "grpc.max_receive_message_length": limits.message_bytes,
        "grpc.max_concurrent_streams": limits.streams,
    }
    if limits.idle_seconds is not None:
        options["grpc.max_connection_idle_ms"] = round(limits.idle_seconds * _MILLISECONDS)
    if limits.age_seconds is not None:
        options["grpc.max_connection_age_ms"] = round(limits.age_seconds * _MILLISECONDS)
        options["grpc.max_connection_age_grace_ms"] = round(limits.age_seconds * _MILLISECONDS)
    return tuple(options.items())


_CLIENT_MARK = "-client-"


def _name_of_client(address: str, peer: Any) -> str:
    """The name of the Unix socket that speaks for a client. No two clients have one address and port."""
    return f"{address}{_CLIENT_MARK}{peer[0]}-{peer[1]}"


def client_address(peer: str) -> str:
    """The address of the client, from what gRPC calls the peer of a call; empty if unknown."""
    _, _, name = unquote(peer).partition(_CLIENT_MARK)
    return name.rpartition("-")[0]


class GrpcServer:
    """Serves `handlers` within `limits`, with TLS where there are `credentials`."""

    def __init__(
        self,
        handlers: Sequence[grpc.GenericRpcHandler],
        limits: GrpcLimits,
        credentials: grpc.ServerCredentials | None = None,
        ended: ConnectionEnded = lambda _: None,
    ) -> None:
        self._limits = limits
        self._ended = ended
        name = f"rackloom-{secrets.token_hex(16)}"
        self._address = f"\0{name}"
        # Twice as many: a connection that has just given way may still be open here.
        self._server = grpc.aio.server(options=grpc_options(limits, 2 * limits.connections))
        self._server.add_generic_rpc_handlers(tuple(handlers))
        if credentials is None:
            self._server.add_insecure_port(f"unix-abstract:{name}")
        else:
            self._server.add_secure_port(f"unix-abstract:{name}", credentials)
        self._relays: set[_ClientSide] = set()
        self._listener: socket.socket | None = None
        self._acceptor: Acceptor | None = None

    async def start(self, listener: socket.socket) -> None:
        """Serve what connects to `listener`, which is closed at the end."""
        await self._server.start()
        self._listener = listener
        self._acceptor = Acceptor(listener, self._limits, self._relay, ended=self._ended)

    async def stop(self, grace: float) -> None:
        """Accept no more, finish the calls under way within `grace` seconds, and close all connections."""
        if self._acceptor is not None and self._listener is not None:
            self._acceptor.close()
            self._listener.close()
            await self._acceptor.wait_closed()
        await self._server.stop(grace)
        for relay in tuple(self._relays):
            relay.abort()

    def _relay(self, connection: AcceptedConnection) -> asyncio.Protocol:
        return _ClientSide(connection, self._address, self._relays)


class _ClientSide(asyncio.Protocol):
    """The connection of a client, joined to one to gRPC."""

    def __init__(self, connection: AcceptedConnection, address: str, relays: "set[_ClientSide]") -> None:
        self._connection = connection
        self._address = address
        self._relays = relays
        self._server_side: _ServerSide | None = None
        self._joining: asyncio.Task[None] | None = None
        self._early = bytearray()

    @property
    def transport(self) -> asyncio.Transport:
        """The connection to the client."""
        assert self._connection.transport is not None  # noqa: S101 (set when it was made)
        return self._connection.transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Read no more before there is a connection to gRPC."""
        # uvloop's transports are no subclasses of asyncio's.
        self._connection.transport = cast("asyncio.Transport", transport)
        self._relays.add(self)
        self.transport.pause_reading()
        self._joining = asyncio.get_running_loop().create_task(self._join())

    async def _join(self) -> None:
        joined = socket.socket(socket.AF_UNIX)
        try:
            # uvloop connects to no name that begins with NUL, but takes a socket. This does not wait.
            joined.setblocking(False)
            with suppress(OSError):
                # The name of a connection that ended may not be free again yet: then the address is unknown.
                joined.bind(_name_of_client(self._address, self.transport.get_extra_info("peername")))
            joined.connect(self._address)
            _, self._server_side = await asyncio.get_running_loop().create_unix_connection(
                lambda: _ServerSide(self), sock=joined
            )
        except OSError:
            joined.close()
            self.abort()
            return
        self._server_side.transport.write(bytes(self._early))
        self._early.clear()
        self.transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        self._connection.rest()
        if self._server_side is None:
            # uvloop reads once although reading is paused.
            self._early += data
        else:
            self._server_side.transport.write(data)

    def eof_received(self) -> bool:
        """The client sends no more, but may still read."""
        if self._server_side is not None:
            self._server_side.transport.write_eof()
        return True

    def pause_writing(self) -> None:
        """The client does not read."""
        if self._server_side is not None:
            self._server_side.transport.pause_reading()

    def resume_writing(self) -> None:
        """The client reads."""
        if self._server_side is not None:
            self._server_side.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """Close the other side."""
        self._relays.discard(self)
        if self._joining is not None:
            self._joining.cancel()
        if self._server_side is not None:
            self._server_side.transport.abort()
        self._connection.lost()

    def abort(self) -> None:
        """Close it at once."""
        self.transport.abort()


class _ServerSide(asyncio.Protocol):
    """The connection to gRPC."""

    transport: asyncio.Transport

    def __init__(self, client: _ClientSide) -> None:
        self._client = client

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is ready."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        self._client.transport.write(data)

    def pause_writing(self) -> None:
        """The server does not read."""
        self._client.transport.pause_reading()

    def resume_writing(self) -> None:
        """The server reads."""
        self._client.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """The server has closed the connection: so does this, once the client has read what is left."""
        self._client.transport.close()
        asyncio.get_running_loop().call_later(_CLOSE_SECONDS, self._client.abort)
