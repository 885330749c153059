"""How large a body may be and how long it may take, answered in the error body of this API.

A client that sends its body a byte at a time would otherwise hold a connection for as long as it likes.
"""

import asyncio

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rackloom.carve.api import respond

TOO_LARGE = "Request body is larger than {limit} bytes"


class BodyLimit:
    """ASGI middleware: at most `limit` bytes of body, all of them within `seconds`."""

    def __init__(self, app: ASGIApp, *, limit: int, seconds: float) -> None:
        self.app = app
        self.limit = limit
        self.seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif self._announced(scope) > self.limit:
            await respond.problem(413, TOO_LARGE.format(limit=self.limit))(scope, receive, send)
        else:
            await self.app(scope, _Counted(self, receive), send)

    def _announced(self, scope: Scope) -> int:
        length = Headers(scope=scope).get("content-length", "0")
        # The server has refused anything else that is not a number.
        return int(length) if length.isdecimal() else 0


class _Counted:
    """Receives the messages of one request, as long as they keep the limits."""

    def __init__(self, limits: BodyLimit, receive: Receive) -> None:
        self.limits = limits
        self.receive = receive
        self.size = 0
        self.complete = False
        self.until = asyncio.get_running_loop().time() + limits.seconds

    async def __call__(self) -> Message:
        if self.complete:
            # What comes now is the end of the connection, for which streams wait without limit.
            return await self.receive()
        try:
            async with asyncio.timeout_at(self.until):
                message = await self.receive()
        except TimeoutError:
            raise HTTPException(
                408, f"Request body took longer than {self.limits.seconds:g} seconds"
            ) from None
        self.complete = message["type"] != "http.request" or not message.get("more_body", False)
        self.size += len(message.get("body", b""))
        if self.size > self.limits.limit:
            raise HTTPException(413, TOO_LARGE.format(limit=self.limits.limit))
        return message
