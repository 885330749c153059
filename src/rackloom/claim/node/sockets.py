"""gRPC servers on unix sockets, which belong to root alone."""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import grpc.aio

from rackloom.errors import Refused

MAX_PATH = 107
"""Bytes of a unix socket's path: sockaddr_un has 108, of which the last is NUL."""
GRACE_SECONDS = 2.0
"""For calls under way when the plugin stops. What they began is in the checkpoint."""


@asynccontextmanager
async def serving(path: Path, handlers: tuple[grpc.GenericRpcHandler, ...]) -> AsyncIterator[None]:
    """Serve on the socket `path` while the context is entered; it is gone afterwards."""
    check_length(path)
    # A process that was killed leaves its socket behind.
    _vacate(path)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(handlers)
    with _private():
        try:
            server.add_insecure_port(f"unix:{path}")
        except RuntimeError as error:
            raise Refused(
                f"cannot listen on {path}",
                nearest_fix="does its directory exist, and may this user write to it?",
            ) from error
    try:
        await server.start()
        yield
    finally:
        # Nobody new may come in while calls under way are finished.
        _vacate(path)
        await server.stop(GRACE_SECONDS)


def check_length(path: Path) -> None:
    """Raise `Refused` for a path that no unix socket can have."""
    length = len(os.fsencode(path))
    if length > MAX_PATH:
        raise Refused(
            f"socket path {path} has {length} bytes; the kernel takes {MAX_PATH}",
            nearest_fix="choose a shorter plugins directory",
        )


def _vacate(path: Path) -> None:
    path.unlink(missing_ok=True)


@contextmanager
def _private() -> Iterator[None]:
    """Sockets that are bound in here get mode 0600."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)
