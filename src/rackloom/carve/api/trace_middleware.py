"""ASGI middleware: one span for each request with a verified caller.

It runs behind authentication, so strangers cannot fill a collector. The span has the template of the
route and never the path, because its ids and organisation reveal the caller and the object. A caller's
`traceparent` becomes a link.
"""

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rackloom.runtime.traces import SpanSide, Traces

FIRST_FAILURE = 500
"""A refusal is no failure of the service."""


class TraceMiddleware:
    """Opens the span that the rest of a request runs in."""

    def __init__(self, app: ASGIApp, traces: Traces) -> None:
        self.app = app
        self.traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http" or scope.get("state", {}).get("caller") is None:
            await self.app(scope, receive, send)
            return
        answered = [0]

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered[0] = message["status"]
            await send(message)

        method, sent = scope["method"], Headers(scope=scope).get("traceparent")
        causes, about = () if sent is None else (sent,), {"http.request.method": method}
        with self.traces.span(method, SpanSide.SERVER, causes=causes, attributes=about) as span:
            try:
                await self.app(scope, receive, send_and_note)
            finally:
                if isinstance(route := scope.get("route"), APIRoute):
                    span.rename(f"{method} {route.path}")
                    span.note({"http.route": route.path})
                if answered[0]:
                    span.note({"http.response.status_code": answered[0]})
                if answered[0] >= FIRST_FAILURE:
                    span.fail(str(answered[0]))
