"""Attacks of unauthenticated clients on a listener. Loopback only, and each attack ends."""

import asyncio
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2

from rackloom.app.process import allow_open_files
from rackloom.serving.limits import ConnectionLimits, GrpcLimits, HttpLimits

STRANGER = "127.0.0.2"
"""Loopback is a network: the server and its client have another address."""
PATIENCE = 10.0
Ask = Callable[[], Awaitable[object]]
"""Whether a client that is no stranger is answered."""
HALF_A_REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n"
HTTP2_START = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
"""The preface, and settings without a value."""


def connected(port: int, address: str = STRANGER) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE, source_address=(address, 0))


def encrypted(raw: socket.socket) -> ssl.SSLSocket:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(raw)


@contextmanager
def crowd(port: int, count: int, say: bytes = b"", address: str = STRANGER) -> Iterator[list[socket.socket]]:
    """`count` connections, each of which sends `say` and nothing more. Some may be refused."""
    with ExitStack() as stack:
        found = []
        for _ in range(count):
            with suppress(OSError):
                connection = stack.enter_context(connected(port, address))
                connection.sendall(say)
                found.append(connection)
        yield found


@asynccontextmanager
async def crowded(*words: Any, **more: Any) -> AsyncIterator[list[socket.socket]]:
    """`crowd`, from a thread: the server runs in this event loop."""
    gathered = crowd(*words, **more)
    found = await asyncio.to_thread(gathered.__enter__)
    try:
        yield found
    finally:
        await asyncio.to_thread(gathered.__exit__, None, None, None)


def endless(connection: socket.socket, first: bytes, part: bytes, most: int) -> int:
    """The number of bytes, up to `most`, that a server accepts of an endless message."""
    taken = 0
    with connection, suppress(OSError, TimeoutError):
        connection.sendall(first)
        while taken < most:
            connection.sendall(part)
            taken += len(part)
    return taken


def endless_fields(connection: socket.socket, most: int) -> int:
    """A request with ever more header fields."""
    return endless(connection, HALF_A_REQUEST, b"X-Field: 0123456789\r\n" * 3000, most)


def endless_field(connection: socket.socket, most: int) -> int:
    """A request with a header field that does not end."""
    return endless(connection, HALF_A_REQUEST + b"X: ", b"y" * (1 << 16), most)


def endless_metadata(connection: socket.socket, most: int) -> int:
    """A gRPC call with endless metadata: HEADERS, then CONTINUATION after CONTINUATION."""
    value = b"v" * 16000
    # A field that is not indexed. Lengths above 126 take further bytes of 7 bits each.
    rest = len(value) - 127
    field = b"\0\x03x-n\x7f" + bytes([rest & 0x7F | 0x80, rest >> 7]) + value

    def frame(kind: int) -> bytes:
        return struct.pack("!I", len(field))[1:] + bytes([kind, 0]) + struct.pack("!I", 1) + field

    return endless(connection, HTTP2_START + frame(1), frame(9) * 4, most)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed the connection. Reads its earlier output first."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


# Attacks that a listener must withstand.


MOST = 8 << 20
"""Bytes that a stranger tries to send as a head."""
KERNEL = 6 << 20
"""Bytes that buffers of the kernel may take although the server does not read them."""
MOST_GROWTH = 40.0
"""MiB of this process, half of the bytes that are sent to gRPC."""
FILES = 4096
"""Both ends of all connections are in this process."""


async def answers_others_in_a_crowd(port: int, limits: ConnectionLimits, ask: Ask, say: bytes = b"") -> None:
    """More connections than there may be, all of them waiting: another address is answered, each time.

    The crowd has one address, and keeps one address's share. It came before the others, so once one of these
    is answered, all of the crowd has been accepted or refused.
    """
    allow_open_files(FILES)
    async with crowded(port, limits.connections + 40, say) as gathered:
        for _ in range(3):
            async with asyncio.timeout(PATIENCE):
                assert await ask()
            kept = sum(not is_closed(connection) for connection in gathered)
            assert kept <= limits.connections_of_an_address


async def cuts_endless_heads(port: int, *, tls: bool = False) -> None:
    """Neither a field that does not end is taken, nor fields that do not."""
    for kind in (endless_fields, endless_field):

        def attack(kind: Callable[[socket.socket, int], int] = kind) -> int:
            connection = connected(port)
            return kind(encrypted(connection) if tls else connection, MOST)

        taken = await asyncio.to_thread(attack)
        assert taken < KERNEL, (kind.__name__, taken)


async def http_is_bounded(
    port: int, limits: HttpLimits, path: str = "/", tls: ssl.SSLContext | None = None
) -> None:
    """An HTTP listener withstands all of these attacks."""
    url = f"{'https' if tls else 'http'}://localhost:{port}{path}"

    async def ask() -> bool:
        async with httpx2.AsyncClient(verify=tls or ssl.create_default_context()) as http:
            return (await http.get(url)).status_code < 500

    await cuts_endless_heads(port, tls=tls is not None)
    await answers_others_in_a_crowd(port, limits, ask, b"" if tls else HALF_A_REQUEST)


async def grpc_is_bounded(port: int, limits: GrpcLimits, ask: Ask) -> None:
    """A gRPC listener without TLS withstands all of these attacks. It keeps no part of endless metadata."""
    growths = []
    # Other work of this process takes memory, too. A server that keeps metadata grows each time.
    while not growths or (min(growths) >= MOST_GROWTH and len(growths) < 3):
        before = resident(os.getpid())
        with connected(port) as connection:
            await asyncio.to_thread(endless_metadata, connection, 10 * MOST)
            growths.append(resident(os.getpid()) - before)
    assert min(growths) < MOST_GROWTH, growths
    await answers_others_in_a_crowd(port, limits, ask)


def resident(pid: int, which: str = "VmRSS") -> float:
    """Memory of a process in MiB: now, or with `VmHWM` at most so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(which))
