"""HTTP servers that run beside each other in one process, and end when they are told to.

The server library would handle signals itself, one server against the other; here the process does.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn

from rackloom.app.config_values import split_listen
from rackloom.errors import Refused
from rackloom.http_server import BoundedServer, Bounds, Ended, HttpServer, bound_socket

_OPTIONS: dict[str, Any] = {
    "log_config": None,
    "access_log": False,
    "lifespan": "off",
    # Event streams never end by themselves.
    "timeout_graceful_shutdown": 5,
    "limit_concurrency": 1000,
    "h11_max_incomplete_event_size": 16384,
}


@asynccontextmanager
async def listening(
    app: Any,
    listen: str,
    *,
    cert: Path | None = None,
    key: Path | None = None,
    tls: ssl.SSLContext | None = None,
    keep_alive: int = 5,
    bounds: Bounds | None = None,
    ended: Ended = lambda _: None,
) -> AsyncIterator[int]:
    """Serve an ASGI application at `host:port` while the context is entered; gives the port.

    For TLS, either files, or a context whose certificate its owner may change meanwhile. A connection that is
    idle for `keep_alive` seconds is closed. With `bounds` nobody who connects can exhaust the process, and
    `ended` hears of each connection that they cost.
    """
    try:
        options = {**_OPTIONS, "timeout_keep_alive": keep_alive}
        config = uvicorn.Config(app, ssl_certfile=cert, ssl_keyfile=key, **options)
        server = HttpServer(config) if bounds is None else BoundedServer(config, bounds, ended)
        server.config.load()
        server.config.ssl = tls or server.config.ssl
    except OSError as error:
        raise Refused(
            f"cannot use certificate {cert} with key {key}: {error}",
            nearest_fix="name a certificate and its own key, both as PEM",
        ) from error
    with _bound(listen) as bound:
        task = asyncio.create_task(server.serve(sockets=[bound]))
        try:
            await server.answering.wait()
            yield int(bound.getsockname()[1])
        finally:
            server.should_exit = True
            await task


def _bound(listen: str) -> socket.socket:
    try:
        host, port = split_listen(listen)
    except ValueError as error:
        raise Refused(f"{listen!r} is not HOST:PORT", nearest_fix="write it as 127.0.0.1:8080") from error
    try:
        return bound_socket(host, port)
    except (OSError, OverflowError) as error:
        told = getattr(error, "strerror", None) or str(error)
        raise Refused(
            f"cannot listen on {listen}: {told.partition(' (while attempting')[0]}",
            nearest_fix="stop the program that uses the port, or choose another port",
        ) from error
