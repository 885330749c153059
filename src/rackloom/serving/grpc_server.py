"""A gRPC server that untrusted clients cannot exhaust.

gRPC's C core limits each connection: the time of its handshake, the metadata and the size of a message, the
concurrent calls, its idle time and its age (`GrpcLimits`). It cannot share connections between the addresses
of clients. So `GrpcServer` accepts them (`serving.acceptor`) and relays their bytes to gRPC, which listens on
a Unix socket in a new directory that only this user may enter. TLS is between the client and gRPC, so the
server still sees the certificate of the client. The address of the client is in the name of the Unix socket
of its relay, which gRPC calls the peer. `client_address` reads it from there.

If there is no room, these rules decide which connection gives way:

1. A connection is kept while its client waits for an answer, if the client has shown a certificate. gRPC
   identifies the connection of a call by its end of the Unix socket (`context.peer`), which has a unique
   name. This rule holds for calls with one request and one answer, because a stream may have no end.
2. Another connection counts as idle while its client sends nothing. The one that is silent for longest gives
   way first. Without TLS this rule holds for all connections, because every client can make a call.
"""

import asyncio
import os
import shutil
import socket
import tempfile
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote

import grpc
import grpc.aio

from rackloom.serving.acceptor import AcceptedConnection, Acceptor, ConnectionEnded, plain_address
from rackloom.serving.limits import GrpcLimits

_CLOSE_SECONDS = 5.0
"""The time that a client has to read the rest after gRPC has closed the connection."""
_MILLISECONDS = 1000
_SERVER_NAME = "grpc"
_LONGEST_BASE = 32
"""Bytes. A Unix socket's path has at most 107. The rest is for the names below, with an IPv6 address."""


def _private_directory() -> str:
    """A new directory, mode 0700, in the first place for temporary files that can have one.

    The file system may be read-only except for the memory that containers share. Raises OSError.
    """
    places = [os.environ.get("TMPDIR") or "/tmp", "/tmp", "/dev/shm"]  # noqa: S108 (mkdtemp is safe there)
    for place in places:
        if len(os.fsencode(place)) <= _LONGEST_BASE:
            with suppress(OSError):
                return tempfile.mkdtemp(prefix="rackloom-", dir=place)
    raise OSError(f"no directory for a socket can be made in any of {', '.join(places)}")


def grpc_options(limits: GrpcLimits, connections: int) -> Sequence[tuple[str, int]]:
    """The options of a server with at most `connections` connections."""
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


_NAME_ENDS = "@"


def client_address(peer: str) -> str:
    """The `plain_address` of the client, from the peer of a call in gRPC, or empty if unknown."""
    return plain_address(_own_name(peer).partition(_NAME_ENDS)[2])


def _own_name(peer: str) -> str:
    """The name of the connection, without its directory. gRPC writes the peer as a URL."""
    return unquote(peer).rpartition("/")[2]


class GrpcServer:
    """Serves `handlers` within `limits`, with TLS if `credentials` are given."""

    def __init__(
        self,
        handlers: Sequence[grpc.GenericRpcHandler],
        limits: GrpcLimits,
        credentials: grpc.ServerCredentials | None = None,
        ended: ConnectionEnded = lambda _: None,
    ) -> None:
        self._limits = limits
        self._ended = ended
        self._directory = _private_directory()
        # This also runs at the end of the process, for a server that is never stopped.
        self._remove = weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        self._connected = 0
        # Twice the limit: a connection that has just given way may still be open here.
        self._server = grpc.aio.server(
            options=grpc_options(limits, 2 * limits.connections), interceptors=(_KeptCalls(self._keep),)
        )
        self._server.add_generic_rpc_handlers(tuple(handlers))
        if credentials is None:
            self._server.add_insecure_port(f"unix:{self._directory}/{_SERVER_NAME}")
        else:
            self._server.add_secure_port(f"unix:{self._directory}/{_SERVER_NAME}", credentials)
        self._relays: dict[str, _ClientSide] = {}
        self._listener: socket.socket | None = None
        self._acceptor: Acceptor | None = None

    async def start(self, listener: socket.socket) -> None:
        """Serve the connections of `listener`, which is closed at the end."""
        await self._server.start()
        self._listener = listener
        self._acceptor = Acceptor(listener, self._limits, self._relay, ended=self._ended)

    async def stop(self, grace: float) -> None:
        """Stop accepting, finish the open calls within `grace` seconds, and close all connections."""
        if self._acceptor is not None and self._listener is not None:
            self._acceptor.close()
            self._listener.close()
            await self._acceptor.wait_closed()
        await self._server.stop(grace)
        for relay in tuple(self._relays.values()):
            relay.abort()
        self._remove()

    def _relay(self, connection: AcceptedConnection) -> asyncio.Protocol:
        self._connected += 1
        return _ClientSide(connection, self._directory, str(self._connected), self._relays)

    @contextmanager
    def _keep(self, context: Any) -> Iterator[None]:
        """Keep the connection of a call while it runs, if its client has shown a certificate."""
        relay = self._relays.get(_own_name(context.peer()))
        if relay is None or not context.peer_identities():
            yield
            return
        relay.begin_call()
        try:
            yield
        finally:
            relay.end_call()


class _KeptCalls(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Enters `keep` with the context of each call that has one request and one answer."""

    def __init__(self, keep: Callable[[Any], AbstractContextManager[None]]) -> None:
        self._keep = keep

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """The handler of the call, within `keep`."""
        found = await continuation(details)
        if found is None or found.unary_unary is None:
            return found

        async def answer(request: Any, context: Any) -> Any:
            with self._keep(context):
                return await found.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(
            answer, found.request_deserializer, found.response_serializer
        )


def _connect(joined: socket.socket, directory: str, name: str) -> None:
    """Connect to gRPC under this name, without waiting. Raises OSError, also if gRPC's backlog is full."""
    joined.setblocking(False)
    own_name = Path(directory, name)
    joined.bind(str(own_name))
    # The socket keeps its name without the file.
    own_name.unlink()
    joined.connect(f"{directory}/{_SERVER_NAME}")


class _ClientSide(asyncio.Protocol):
    """The connection of a client, joined to a connection to gRPC."""

    def __init__(
        self, connection: AcceptedConnection, directory: str, name: str, relays: "dict[str, _ClientSide]"
    ) -> None:
        self._connection = connection
        self._directory = directory
        self._name = name
        self._relays = relays
        self._calls = 0
        """The number of calls that keep the connection."""
        self._server_side: _ServerSide | None = None
        self._joining: asyncio.Task[None] | None = None
        self._early = bytearray()

    @property
    def transport(self) -> asyncio.Transport:
        """The connection to the client."""
        assert self._connection.transport is not None  # noqa: S101 (set when it was made)
        return self._connection.transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Stop reading until there is a connection to gRPC."""
        # uvloop's transports are not subclasses of asyncio's.
        self._connection.transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        if peer is None:
            # The client has already reset the connection.
            self.abort()
            self._connection.lost()
            return
        address, *_ = peer
        # Omit the scope of a link-local address, which may be long.
        self._name += f"{_NAME_ENDS}{address.partition('%')[0]}"
        self._relays[self._name] = self
        self.transport.pause_reading()
        self._joining = asyncio.get_running_loop().create_task(self._join())

    async def _join(self) -> None:
        joined = socket.socket(socket.AF_UNIX)
        try:
            _connect(joined, self._directory, self._name)
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
        if not self._calls:
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
        self._relays.pop(self._name, None)
        if self._joining is not None:
            self._joining.cancel()
        if self._server_side is not None:
            self._server_side.transport.abort()
        self._connection.lost()

    def begin_call(self) -> None:
        """Keep the connection until each call that began has ended."""
        self._calls += 1
        self._connection.need()

    def end_call(self) -> None:
        """Let the connection give way to others once it has no call."""
        self._calls -= 1
        if not self._calls:
            self._connection.rest()

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
        """The server has closed the connection. Close the client's once the client has read the rest."""
        self._client.transport.close()
        asyncio.get_running_loop().call_later(_CLOSE_SECONDS, self._client.abort)
