"""HTTP listeners of a process, and plain endpoints for probes and Prometheus.

`serve_http` serves an ASGI application at `host:port` while its context is entered, and gives the port
that it is bound to. Connections, handshakes and requests are limited (`serving.http_server`), so that no
client can exhaust the process. `ended` is called with the reason for each connection that a limit closes.
TLS comes from files, or from an `SSLContext` with a certificate that its owner may replace at any time.

A port that is taken and a certificate that cannot be used raise `Refused` with the nearest fix.

`PlainEndpoints` answers requests by path, without reading any input: /metrics, /healthz, /readyz.
"""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from rackloom.errors import Refused, Retry, Unknown
from rackloom.serving.acceptor import ConnectionEnded, bound_socket, split_listen
from rackloom.serving.http_server import HttpServer
from rackloom.serving.limits import HttpLimits

_UVICORN_OPTIONS: dict[str, Any] = {
    "log_config": None,
    "access_log": False,
    "lifespan": "off",
    # Limits are per address: a client on this machine may not choose its own by X-Forwarded-For.
    "proxy_headers": False,
    # Event streams never end unless they are closed.
    "timeout_graceful_shutdown": 5,
}
DEFAULT_LIMITS = HttpLimits()


@asynccontextmanager
async def serve_http(
    app: Any,
    listen: str,
    *,
    cert: Path | None = None,
    key: Path | None = None,
    tls: ssl.SSLContext | None = None,
    limits: HttpLimits = DEFAULT_LIMITS,
    ended: ConnectionEnded = lambda _: None,
) -> AsyncIterator[int]:
    """Serve an ASGI application at `host:port` while the context is entered. Yields the port.

    For TLS, files, or a context. The owner of a context may change the certificate. `ended` gets the
    reason for each connection that a limit closes.
    """
    try:
        config = uvicorn.Config(app, ssl_certfile=cert, ssl_keyfile=key, **_UVICORN_OPTIONS)
        server = HttpServer(config, limits, ended)
        server.config.load()
        server.config.ssl = tls or server.config.ssl
    except OSError as error:
        raise Refused(
            f"cannot use certificate {cert} with key {key}: {error}",
            nearest_fix="name a certificate and its own key, both as PEM",
        ) from error
    with _bind(listen) as bound:
        task = asyncio.create_task(server.serve(sockets=[bound]))
        try:
            await server.answering.wait()
            yield int(bound.getsockname()[1])
        finally:
            server.should_exit = True
            await task


def _bind(listen: str) -> socket.socket:
    try:
        host, port = split_listen(listen)
    except ValueError as error:
        raise Refused(f"{listen!r} is not HOST:PORT", nearest_fix="write it as 127.0.0.1:8080") from error
    try:
        return bound_socket(host, port)
    except (OSError, OverflowError) as error:
        message = getattr(error, "strerror", None) or str(error)
        raise Refused(
            f"cannot listen on {listen}: {message.partition(' (while attempting')[0]}",
            nearest_fix="stop the program that uses the port, or choose another port",
        ) from error


EndpointHandler = Callable[[], Awaitable[Response]]


class PlainEndpoints:
    """An ASGI application that answers each path with a page, without reading any input.

    A page that cannot be made at present (`Retry`, `Unknown`) is answered 503 with the reason.
    """

    def __init__(self, pages: Mapping[str, EndpointHandler]) -> None:
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        page = self._pages.get(Request(scope, receive).url.path)
        try:
            reply = PlainTextResponse("not found\n", 404) if page is None else await page()
        except (Retry, Unknown) as error:
            reply = unavailable_response(error.reason)
        await reply(scope, receive, send)


def ok_response(*remarks: str) -> Response:
    """The response to a probe that succeeds. Remarks follow, a line each."""
    return PlainTextResponse("".join(f"{line}\n" for line in ("ok", *remarks)))


def unavailable_response(why: str) -> Response:
    """The response to a probe that fails."""
    return PlainTextResponse(f"{why}\n", 503)


def metrics_response(content: bytes) -> Response:
    """A page in the text format of Prometheus."""
    return Response(content, media_type=CONTENT_TYPE_LATEST)
