"""What a body may be, how large, and how long it may take, answered in the error body of this API.

A client that sends its body a byte at a time would otherwise hold a connection for as long as it likes.
"""

import asyncio

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rackloom.carve.api import respond

MAX_BODY = 1 << 20
"""Bytes. The largest body that means anything names every GPU of a domain, which is some 100 KiB."""

BODY_SECONDS = 20.0
"""A body of that size takes a second on the slowest link that anybody manages racks over."""
NOT_JSON = "Request body is not JSON: send it with Content-Type: application/json"
TOO_LARGE = f"Request body is larger than {MAX_BODY} bytes"


class BodyLimit:
    """ASGI middleware: at most MAX_BODY bytes of JSON, all of them within BODY_SECONDS."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif _announced(scope) > MAX_BODY:
            await respond.problem(413, TOO_LARGE)(scope, receive, send)
        elif _has_body(scope) and not _is_json(scope):
            await respond.problem(415, NOT_JSON)(scope, receive, send)
        else:
            await self.app(scope, _Counted(receive), send)


def _announced(scope: Scope) -> int:
    length = Headers(scope=scope).get("content-length", "0")
    # The server has refused anything else that is not a number.
    return int(length) if length.isdecimal() else 0


def _has_body(scope: Scope) -> bool:
    return _announced(scope) > 0 or "transfer-encoding" in Headers(scope=scope)


def _is_json(scope: Scope) -> bool:
    kind, _, _ = Headers(scope=scope).get("content-type", "").partition(";")
    main, _, sub = kind.strip().lower().partition("/")
    return main == "application" and (sub == "json" or sub.endswith("+json"))


class _Counted:
    """Receives the messages of one request, as long as they keep the limits."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.size = 0
        self.complete = False
        self.until = asyncio.get_running_loop().time() + BODY_SECONDS

    async def __call__(self) -> Message:
        if self.complete:
            # What comes now is the end of the connection, for which streams wait without limit.
            return await self.receive()
        try:
            async with asyncio.timeout_at(self.until):
                message = await self.receive()
        except TimeoutError:
            raise HTTPException(408, f"Request body took over {BODY_SECONDS:g} seconds") from None
        self.complete = message["type"] != "http.request" or not message.get("more_body", False)
        self.size += len(message.get("body", b""))
        if self.size > MAX_BODY:
            raise HTTPException(413, TOO_LARGE)
        return message
