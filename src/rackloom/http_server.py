"""HTTP servers that share a process, and one that untrusted clients cannot exhaust.

`HttpServer` is uvicorn without signal handling, because several servers run in one process. It sets an
event when it accepts connections.

`BoundedServer` is for a server that anybody can reach although only some may use it, for example an
admission webhook whose caller presents no client certificate. Everything that a connection can hold has a
limit (`ConnectionLimits`) from the moment of `accept`: the number of connections, the time of the TLS
handshake, of the request head and of the request, and the size of the head. A deadline runs whenever the
server waits for the client. HTTP/1.1 pipelining and WebSockets are not supported.

Connections are shared per client address (an IPv6 client counts as its /64 network) by `FairShare`. While
there is room, every client gets what it asks for. Then the oldest connection of the address that holds
most is closed for an address that holds less (longest queue drop: Suter, Lakshman, Stiliadis, Choudhury,
INFOCOM 1998). A connection whose request has arrived completely is not closed for another client. CPU
time spent on accepting and closing connections is not limited.
"""

import asyncio
import errno
import ipaddress
import logging
import socket
import ssl
import struct
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_ACCEPT_BATCH = 16
"""Connections that are accepted at once, before the event loop serves others again."""
_BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted."""
_ACCEPT_RETRY_SECONDS = 0.5
_LINGER_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with 0 seconds: `close` sends a reset, and the kernel keeps no state of the connection."""
_SILENT_LOGGER = logging.getLogger("rackloom.http_server.strangers")
"""A line for each bad request would let an attacker fill the log: they are counted instead."""
_SILENT_LOGGER.setLevel(logging.CRITICAL)
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class HttpServer(uvicorn.Server):
    """uvicorn without signal handling; `answering` is set once it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answering = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process handles signals: several servers of uvicorn would each install a handler."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Set `answering` at the end."""
        await super().startup(sockets)
        self.answering.set()


def bound_socket(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises OSError, or OverflowError for no port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.create_server((host, port), family=family)
    # Connections inherit it. asyncio sets it only on sockets that name their protocol (uvloop on all), and
    # without it an answer of two writes waits 40 ms for a delayed acknowledgement.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


class HeldShare:
    """The part of a `FairShare` that one connection holds, until it is released or evicted."""

    def __init__(self, of: "FairShare", owner: str, amount: int, evict: Callable[[], None]) -> None:
        self.owner = owner
        self.amount = amount
        self.evict = evict
        self.is_needed = False
        """Whether it is busy, and must not be evicted."""
        self._of = of

    def release(self) -> None:
        """Release it; a second call changes nothing."""
        self._of.give_back(self)

    def renew(self) -> None:
        """Count as the youngest of its owner, because it was just used."""
        self._of.renew(self)


class FairShare:
    """A limited resource, shared by the addresses of the clients that ask for it.

    While there is enough, every request is granted. Then the oldest share of the address that holds most is
    evicted for an address that holds less (longest queue drop: Suter, Lakshman, Stiliadis, Choudhury, INFOCOM
    1998). Invariant: an address that asks for an equal part, or less, gets it. `most` is the limit of one
    address, even while no other asks.
    """

    def __init__(self, total: int, most: int) -> None:
        self._total = total
        self._most = most
        self._held: dict[str, int] = defaultdict(int)
        self._shares: dict[str, deque[HeldShare]] = defaultdict(deque)

    @property
    def held(self) -> int:
        """By all together."""
        return sum(self._held.values())

    def take(self, owner: str, amount: int, evict: Callable[[], None]) -> HeldShare | None:
        """A share of `amount`; None where its owner has its part already. An eviction calls `evict`."""
        if amount > self._total or self._held.get(owner, 0) + amount > self._most:
            return None
        while self.held + amount > self._total:
            victim = self._victim(self._held.get(owner, 0))
            if victim is None:
                return None
            victim.release()
            victim.evict()
        share = HeldShare(self, owner, amount, evict)
        self._held[owner] += amount
        self._shares[owner].append(share)
        return share

    def give_back(self, share: HeldShare) -> None:
        """Free what the share held."""
        with suppress(ValueError):
            self._shares[share.owner].remove(share)
            self._held[share.owner] -= share.amount
        if not self._shares[share.owner]:
            del self._shares[share.owner]
            self._held.pop(share.owner, None)

    def renew(self, share: HeldShare) -> None:
        """Make it the last share that its owner would lose."""
        with suppress(ValueError):
            self._shares[share.owner].remove(share)
            self._shares[share.owner].append(share)

    def _victim(self, more_than: int) -> HeldShare | None:
        """The oldest idle share of the address that holds most; None where none holds `more_than` so much."""
        for owner, amount in sorted(self._held.items(), key=lambda item: -item[1]):
            if amount <= more_than:
                return None
            found = next((share for share in self._shares[owner] if not share.is_needed), None)
            if found is not None:
                return found
        return None


def address_key(host: str) -> str:
    """The address as a key of `FairShare`: an IPv4 address, or the IPv6 network of one link (64 bits)."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


class ConnectionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of all connections together, and of each. Seconds, bytes."""

    connections: int = 256
    """A connection with TLS takes 0.3 MiB of this process (asyncio's buffer alone is 256 KiB)."""
    connections_of_an_address: int = 192
    handshake_seconds: float = 3.0
    head_seconds: float = 5.0
    """From the handshake, or the first byte of a further request, to the end of the request's head."""
    request_seconds: float = 20.0
    """From the end of the head to the end of the answer."""
    head_bytes: int = 16 << 10
    head_fields: int = 64


ConnectionEnded = Callable[[str], None]
"""Called with the reason why a connection was refused or closed: `full`, `evicted`, `handshake`, `head`,
`request`."""


class BoundedServer(HttpServer):
    """A server within `bounds`: HTTP/1.1 without pipelining, and no WebSocket."""

    def __init__(self, config: uvicorn.Config, bounds: ConnectionLimits, ended: ConnectionEnded) -> None:
        super().__init__(config)
        self._bounds = bounds
        self._ended = ended

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As in uvicorn, but `_Acceptor` accepts the connections."""
        await self.lifespan.startup()
        make = partial(
            BoundedProtocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        acceptors = [
            _Acceptor(listener, self.config.ssl, self._bounds, make, self._ended)
            for listener in sockets or ()
        ]
        self.servers = acceptors  # type: ignore[assignment]
        self.started = True
        self.answering.set()


class _Acceptor:
    """Accepts connections that get a share, and performs their TLS handshake."""

    def __init__(
        self,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        bounds: ConnectionLimits,
        make: Callable[..., "BoundedProtocol"],
        ended: ConnectionEnded,
    ) -> None:
        self._listener = listener
        self._tls = tls
        self._bounds = bounds
        self._make = make
        self._ended = ended
        self._connections = FairShare(bounds.connections, bounds.connections_of_an_address)
        self._opening: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._listen()

    def close(self) -> None:
        """Stop accepting, and cancel open handshakes."""
        self._loop.remove_reader(self._listener.fileno())
        for task in self._opening:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until no handshake is open."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPT_BATCH):
            try:
                connection, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF_FILES:
                    raise
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(_ACCEPT_RETRY_SECONDS, self._listen)
                return
            self._admit(connection, address_key(address[0]))

    def _admit(self, connection: socket.socket, owner: str) -> None:
        holder = _ConnectionHandle(self._ended)
        share = self._connections.take(owner, 1, holder.evict)
        if share is None:
            self._ended("full")
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
            connection.close()
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._open(connection, share, holder))
        holder.task = task
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket, share: HeldShare, holder: "_ConnectionHandle") -> None:
        """Perform the handshake; after it the protocol owns the share."""
        try:
            limits = {}
            if self._tls is not None:
                limits["ssl_handshake_timeout"] = self._bounds.handshake_seconds
                limits["ssl_shutdown_timeout"] = 1.0
            make = partial(self._make, bounds=self._bounds, share=share, holder=holder, ended=self._ended)
            await self._loop.connect_accepted_socket(make, connection, ssl=self._tls, **limits)
        except (OSError, ssl.SSLError) as error:
            share.release()
            if isinstance(error, ConnectionAbortedError):
                # asyncio raises this when a handshake takes too long.
                self._ended("handshake")
        except BaseException:
            share.release()
            raise


class _ConnectionHandle:
    """Closes a connection in either state: a task that opens it, then a transport."""

    def __init__(self, ended: ConnectionEnded) -> None:
        self.task: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport | None = None
        self._ended = ended

    def evict(self) -> None:
        """Close it at once, without a TLS or TCP shutdown."""
        self._ended("evicted")
        if self.transport is not None:
            self.transport.abort()
        elif self.task is not None:
            self.task.cancel()


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A deadline runs whenever the server waits for the client."""

    def __init__(
        self,
        *,
        bounds: ConnectionLimits,
        share: HeldShare,
        holder: _ConnectionHandle,
        ended: ConnectionEnded,
        **rest: Any,
    ) -> None:
        super().__init__(**rest)
        self.logger = _SILENT_LOGGER
        self._bounds = bounds
        self._share = share
        self._holder = holder
        self._ended = ended
        self._deadline: asyncio.TimerHandle | None = None
        self._in_head = False
        self._head_bytes = 0
        """Of fields that the parser has completed."""
        self._head_received = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The handshake is done: the request head is due."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._holder.transport = self.transport
        self._expect("head", self._bounds.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release its share."""
        super().connection_lost(exc)
        self._expect_nothing()
        self._share.release()

    def data_received(self, data: bytes) -> None:
        """Refuse a head that does not end: the parser buffers an incomplete field without a limit."""
        if self._deadline is None:
            self._expect("head", self._bounds.head_seconds)
        super().data_received(data)
        if self._in_head:
            self._head_received += len(data)
            if self._head_received > self._bounds.head_bytes and not self.transport.is_closing():
                self.send_400_response("The head of the request is too long.")

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._in_head, self._head_bytes, self._head_received = True, 0, 0

    def on_url(self, url: bytes) -> None:
        """Raises ValueError, which stops the parser."""
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Raises ValueError, which stops the parser."""
        self._count(name + value)
        if len(self.headers) >= self._bounds.head_fields:
            raise ValueError("too many fields")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request is passed on. Raises for one that comes before the last was answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            raise ValueError("a request before the last was answered")
        self._in_head = False
        self._expect("request", self._bounds.request_seconds)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """A complete request is answered: its connection is not evicted for another client."""
        self._share.is_needed = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """An idle connection may be evicted, after the older ones of its owner."""
        self._share.is_needed = False
        self._share.renew()
        self._expect_nothing()
        super().on_response_complete()

    def _count(self, part: bytes) -> None:
        self._head_bytes += len(part)
        if self._head_bytes > self._bounds.head_bytes:
            raise ValueError("the head is too long")

    def _expect(self, what: str, seconds: float) -> None:
        self._expect_nothing()
        self._deadline = self.loop.call_later(seconds, self._too_late, what)

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_late(self, what: str) -> None:
        self._ended(what)
        self.transport.abort()
