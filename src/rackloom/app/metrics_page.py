"""The plain HTTP pages for machines that watch this one: /metrics, /healthz and /readyz."""

import asyncio
from collections.abc import Callable

import sqlalchemy as sa
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from rackloom.app import site_counts
from rackloom.app.metrics import SiteMetrics
from rackloom.carve.site.store import Store
from rackloom.errors import Retry, Unknown


class MetricsPage:
    """An ASGI application. `started` is set once the reconciler knows its share of the site."""

    def __init__(
        self, metrics: SiteMetrics, store: Store, clock: Callable[[], float], started: asyncio.Event
    ) -> None:
        self._metrics = metrics
        self._store = store
        self._clock = clock
        self._started = started
        self._history = 0
        # Two scrapes at once would count the same turns to Ready twice.
        self._one_at_a_time = asyncio.Lock()

    async def begin(self) -> None:
        """Count from now on."""
        self._history = await self._store.read(site_counts.newest_history)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive)
        pages = {"/metrics": self._page, "/healthz": self._alive, "/readyz": self._ready}
        page = pages.get(request.url.path)
        reply = PlainTextResponse("not found\n", 404) if page is None else await page()
        await reply(scope, receive, send)

    async def _page(self) -> Response:
        async with self._one_at_a_time:
            counts = await self._store.read(site_counts.count, self._history)
            self._history = counts.newest_history
            page = self._metrics.page(counts, self._clock())
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    async def _alive(self) -> Response:
        return PlainTextResponse("ok\n")

    async def _ready(self) -> Response:
        """Ready when the records can be read: requests can be answered though a switch cannot be reached."""
        try:
            await self._store.read(lambda conn: conn.execute(sa.select(1)).scalar_one())
        except (Retry, Unknown) as trouble:
            return PlainTextResponse(f"{trouble.reason}\n", 503)
        return PlainTextResponse("ok\n")
