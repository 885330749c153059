"""Accepts connections within limits, before any client has authenticated.

`Acceptor` accepts the connections of a listening socket, performs the TLS handshake in limited time, and
hands each connection to a protocol. A connection has a share of the limit from the moment of `accept`.
`FairShare` shares a limit between the addresses of clients. While there is enough, every request is granted.
Then the oldest idle share of the address that holds most is evicted for an address that holds less (longest
queue drop: Suter, Lakshman, Stiliadis, Choudhury, INFOCOM 1998). `address_key` names the owner: an IPv6
client counts as its /64 network, because one host may use all its addresses. If no share is left:

1. If another address holds more, its oldest idle connection is closed.
2. If the client's address has reached the limit of one address, the oldest connection of that address is
   closed if it has been idle for `SPARED_SECONDS`. So silent connections do not lock out a client at the
   same address, and a flood of new connections gets only as many handshakes as this rule allows.
3. Otherwise the new connection is refused.

A connection is idle until its protocol marks it as needed, which it does once a request has arrived
completely. Refused and closed connections get a reset, so that the kernel keeps no state of them.

CPU time spent on accepting and closing connections is not limited.
"""

import asyncio
import errno
import ipaddress
import socket
import ssl
import struct
import traceback
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import suppress

from rackloom.serving.limits import ConnectionLimits

SPARED_SECONDS = 1.0
"""The least idle time after which a connection is closed for a new one from its address."""
_ACCEPT_BATCH = 16
"""Connections that are accepted in a row, before the event loop serves others again."""
_BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted."""
_ACCEPT_RETRY_SECONDS = 0.5
_TLS_SHUTDOWN_SECONDS = 1.0
_LINGER_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with 0 seconds: `close` sends a reset, and the kernel keeps no state of the connection."""
_OUT_OF_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

END_REASONS = ("full", "evicted", "handshake", "head", "body", "answer", "unread")
"""Why a connection was refused or closed. From `handshake` on, the reason is a wait that took too long."""
ConnectionEnded = Callable[[str], None]
"""Called with the reason."""


def bound_socket(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Port 0 takes a free port, and `::` is every address, also of IPv4.

    Raises OSError, or OverflowError if the port is not valid.
    """
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"  # noqa: S104 (all addresses were requested, and there is no IPv6)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.create_server((host, port), family=family, dualstack_ipv6=host == "::")
    # Connections inherit this option. asyncio sets it only on sockets that name their protocol (uvloop on
    # all), and without it an answer of two writes waits 40 ms for a delayed acknowledgement.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def split_listen(listen: str) -> tuple[str, int]:
    """Host and port of a checked `host:port`."""
    host, _, port = listen.rpartition(":")
    return host.strip("[]"), int(port)


# Shares of a limit, by address.


class HeldShare:
    """The part of a `FairShare` that one connection holds, until it is released or evicted."""

    def __init__(self, of: "FairShare", owner: str, amount: int, evict: Callable[[], None]) -> None:
        self.owner = owner
        self.amount = amount
        self.evict = evict
        self.is_needed = False
        """Whether the connection is busy, and must not be evicted."""
        self.idle_since = 0.0
        """By the clock of the holder."""
        self._of = of

    def release(self) -> None:
        """Release it. A second call changes nothing."""
        self._of.give_back(self)

    def renew(self) -> None:
        """Count as the youngest of its owner, because it was just used."""
        self._of.renew(self)


class FairShare:
    """See the module. Invariant: an address that requests an equal part, or less, gets it.

    `most` is the limit of one address, even while the rest is free.
    """

    def __init__(self, total: int, most: int) -> None:
        self._total = total
        self._most = most
        self._held: dict[str, int] = defaultdict(int)
        self._shares: dict[str, OrderedDict[HeldShare, None]] = defaultdict(OrderedDict)
        self.held = 0
        """The total of all owners."""

    def take(self, owner: str, amount: int, evict: Callable[[], None]) -> HeldShare | None:
        """A share of `amount`, or None if its owner already has its part. An eviction calls `evict`."""
        if amount > self._total or self._held.get(owner, 0) + amount > self._most:
            return None
        while self.held + amount > self._total:
            victim = self._victim(self._held.get(owner, 0))
            if victim is None:
                return None
            victim.release()
            victim.evict()
        share = HeldShare(self, owner, amount, evict)
        self.held += amount
        self._held[owner] += amount
        self._shares[owner][share] = None
        return share

    def give_back(self, share: HeldShare) -> None:
        """Free the amount of the share."""
        owned = self._shares.get(share.owner)
        if owned is None or share not in owned:
            return
        del owned[share]
        self.held -= share.amount
        self._held[share.owner] -= share.amount
        if not owned:
            del self._shares[share.owner], self._held[share.owner]

    def renew(self, share: HeldShare) -> None:
        """Make it the last share that its owner would lose."""
        owned = self._shares.get(share.owner)
        if owned is not None and share in owned:
            owned.move_to_end(share)

    def oldest_idle(self, owner: str) -> HeldShare | None:
        """The share that `owner` would lose first, or None if it has none or needs all of them."""
        return next((share for share in self._shares.get(owner, ()) if not share.is_needed), None)

    def _victim(self, more_than: int) -> HeldShare | None:
        """The oldest idle share of the address that holds most, or None if no address exceeds `more_than`."""
        for owner, amount in sorted(self._held.items(), key=lambda item: -item[1]):
            if amount <= more_than:
                return None
            found = self.oldest_idle(owner)
            if found is not None:
                return found
        return None


def plain_address(host: str) -> str:
    """The address in one form for every listener: an IPv4 address that is mapped into IPv6 becomes IPv4.

    A listener on `::` sees its IPv4 clients as mapped. A text that is not an address is returned unchanged.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return host if mapped is None else str(mapped)


def address_key(host: str) -> str:
    """The address as a key of `FairShare`: an IPv4 address, or the IPv6 network of one link (64 bits)."""
    try:
        address = ipaddress.ip_address(plain_address(host.partition("%")[0]))
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(ipaddress.ip_network((address, 64), strict=False))


# Connections.


class AcceptedConnection:
    """A connection and its share. First a task opens it, then a protocol owns its transport."""

    def __init__(self, ended: ConnectionEnded, clock: Callable[[], float]) -> None:
        self.transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._share: HeldShare | None = None
        self._ended = ended
        self._clock = clock

    def open(self, share: HeldShare, task: "asyncio.Task[None]") -> None:
        """Note the share of the connection, and the task that opens it."""
        self._share, self._task = share, task
        share.idle_since = self._clock()

    def need(self) -> None:
        """Do not close it for another client."""
        if self._share is not None:
            self._share.is_needed = True

    def rest(self) -> None:
        """It waits for its client now, so it may be closed, after the older ones of its address."""
        if self._share is not None:
            self._share.is_needed = False
            self._share.idle_since = self._clock()
            self._share.renew()

    def evict(self) -> None:
        """Close it for another one."""
        self.end("evicted")

    def end(self, reason: str) -> None:
        """Close it at once, without a TLS or TCP shutdown."""
        self._ended(reason)
        if self.transport is not None:
            self.transport.abort()
        elif self._task is not None:
            self._task.cancel()

    def lost(self) -> None:
        """It is closed. Its parts no longer refer to one another, so its buffers are freed at once."""
        if self._share is not None:
            self._share.release()
        self._task = self._share = None


class Acceptor:
    """Accepts connections within `limits` from its creation until it is closed."""

    def __init__(
        self,
        listener: socket.socket,
        limits: ConnectionLimits,
        make: Callable[[AcceptedConnection], asyncio.Protocol],
        *,
        tls: ssl.SSLContext | None = None,
        ended: ConnectionEnded = lambda _: None,
    ) -> None:
        self._listener = listener
        self._limits = limits
        self._make = make
        self._tls = tls
        self._ended = ended
        self._connections = FairShare(limits.connections, limits.connections_of_an_address)
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
        accepted = AcceptedConnection(self._ended, self._loop.time)
        share = self._connections.take(owner, 1, accepted.evict)
        if share is None and self._displace(owner):
            share = self._connections.take(owner, 1, accepted.evict)
        if share is None:
            self._ended("full")
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
            connection.close()
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._open(connection, accepted))
        accepted.open(share, task)
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _displace(self, owner: str) -> bool:
        """Close the oldest idle connection of `owner`, if it has been idle for long enough."""
        oldest = self._connections.oldest_idle(owner)
        if oldest is None or self._loop.time() - oldest.idle_since < SPARED_SECONDS:
            return False
        oldest.release()
        oldest.evict()
        return True

    async def _open(self, connection: socket.socket, accepted: AcceptedConnection) -> None:
        """Perform the handshake. Then the protocol owns the share."""
        try:
            options: dict[str, float] = {}
            if self._tls is not None:
                options["ssl_handshake_timeout"] = self._limits.handshake_seconds
                options["ssl_shutdown_timeout"] = _TLS_SHUTDOWN_SECONDS
            await self._loop.connect_accepted_socket(
                lambda: self._make(accepted), connection, ssl=self._tls, **options
            )
        except BaseException as error:
            accepted.lost()
            # The frames of a failed handshake hold one another, and 0.3 MiB of buffers. Without this they
            # would stay until the garbage collector runs.
            traceback.clear_frames(error.__traceback__)
            if not isinstance(error, OSError):
                raise
            if isinstance(error, ConnectionAbortedError):
                # asyncio raises this when a handshake takes too long.
                self._ended("handshake")
