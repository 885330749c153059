"""HTTP pages for machines that watch this one: text, without input and without TLS."""

from collections.abc import Awaitable, Callable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

Page = Callable[[], Awaitable[Response]]


class PlainPages:
    """An ASGI application of these pages, by their path."""

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self._pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        page = self._pages.get(Request(scope, receive).url.path)
        reply = PlainTextResponse("not found\n", 404) if page is None else await page()
        await reply(scope, receive, send)


def well() -> Response:
    """What a probe hears when all is well."""
    return PlainTextResponse("ok\n")


def unwell(why: str) -> Response:
    """What a probe hears when it is not."""
    return PlainTextResponse(f"{why}\n", 503)


def metrics(content: bytes) -> Response:
    """A page as Prometheus reads it."""
    return Response(content, media_type=CONTENT_TYPE_LATEST)
