"""The transfer without NIXL: the same bytes between two processes over a plain TCP socket.

It shows that data moves and arrives intact on this host: a random buffer is sent several times to a child
process, and both compute its blake2b digest. It proves nothing about NIXL, UCX or
RDMA, as its label states.
"""

import hashlib
import mmap
import multiprocessing
import secrets
import socket
import time
from multiprocessing.connection import Connection

import msgspec

from rackloom.prove.transfer.buffers import page_aligned

FALLBACK_LABEL = "plain TCP socket, not NIXL"
_TIMEOUT_SECONDS = 30.0
_CHUNK_BYTES = 1 << 20


class SocketReport(msgspec.Struct, frozen=True, kw_only=True):
    """One plain run: bytes per iteration, mean seconds, and whether the last buffer arrived intact."""

    total_bytes: int
    iters: int
    avg_seconds: float
    verified: bool


def run_over_sockets(total_bytes: int, iters: int) -> SocketReport:
    """Send a buffer `iters` times to a child process and compare digests at the end."""
    buffer = page_aligned(total_bytes)
    buffer[:] = secrets.token_bytes(total_bytes)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(_TIMEOUT_SECONDS)
        target = context.Process(
            target=_receive, args=(listener.getsockname()[1], total_bytes, iters, theirs), daemon=True
        )
        target.start()
        try:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(_TIMEOUT_SECONDS)
                seconds = [_send(connection, buffer) for _ in range(iters)]
                digest = ours.recv() if ours.poll(_TIMEOUT_SECONDS) else None
        finally:
            target.terminate()
            target.join()
    return SocketReport(
        total_bytes=total_bytes,
        iters=iters,
        avg_seconds=sum(seconds) / iters,
        verified=digest == _digest(buffer),
    )


def _send(connection: socket.socket, buffer: mmap.mmap) -> float:
    """Seconds until the other end has confirmed that it has all of it."""
    began = time.perf_counter()
    connection.sendall(buffer)
    connection.recv(1)
    return time.perf_counter() - began


def _receive(port: int, total_bytes: int, iters: int, report: Connection) -> None:
    sink = page_aligned(total_bytes)
    view = memoryview(sink)
    with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_SECONDS) as connection:
        for _ in range(iters):
            _receive_into(connection, view)
            connection.sendall(b".")
        report.send(_digest(sink))


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        received = connection.recv_into(view[:_CHUNK_BYTES])
        if received == 0:
            raise ConnectionResetError("the sender is gone")
        view = view[received:]


def _digest(buffer: mmap.mmap) -> str:
    return hashlib.blake2b(buffer, digest_size=32).hexdigest()
