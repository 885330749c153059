"""HTTP servers that run beside each other in one process, and end when they are told to.

The server library would handle signals itself, one server against the other; here the process does.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from rackloom.app.config import split_listen
from rackloom.errors import Refused

_OPTIONS: dict[str, Any] = {
    "log_config": None,
    "access_log": False,
    "lifespan": "off",
    # Event streams never end by themselves.
    "timeout_graceful_shutdown": 5,
    "limit_concurrency": 1000,
    "h11_max_incomplete_event_size": 16384,
}


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answering = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.answering.set()


@asynccontextmanager
async def listening(
    app: Any,
    listen: str,
    *,
    cert: Path | None = None,
    key: Path | None = None,
    tls: ssl.SSLContext | None = None,
    keep_alive: int = 5,
) -> AsyncIterator[int]:
    """Serve an ASGI application at `host:port` while the context is entered; gives the port.

    For TLS, either files, or a context whose certificate its owner may change meanwhile. A connection that is
    idle for `keep_alive` seconds is closed.
    """
    try:
        options = {**_OPTIONS, "timeout_keep_alive": keep_alive}
        server = _Server(uvicorn.Config(app, ssl_certfile=cert, ssl_keyfile=key, **options))
        server.config.load()
        server.config.ssl = tls or server.config.ssl
    except OSError as error:
        raise Refused(f"cannot use certificate {cert} with key {key}: {error}") from error
    with _bound(listen) as bound:
        task = asyncio.create_task(server.serve(sockets=[bound]))
        try:
            await server.answering.wait()
            yield int(bound.getsockname()[1])
        finally:
            server.should_exit = True
            await task


def _bound(listen: str) -> socket.socket:
    host, port = split_listen(listen)
    try:
        bound = socket.create_server((host, port), family=_family(host))
    except (OSError, OverflowError) as error:
        raise Refused(
            f"cannot listen on {listen}: {getattr(error, 'strerror', None) or error}",
            nearest_fix="stop the program that uses the port, or choose another",
        ) from error
    # Connections inherit it. asyncio sets it only on sockets that name their protocol (uvloop on all), and
    # without it an answer of two writes waits 40 ms for a delayed acknowledgement.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
