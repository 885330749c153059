"""The pages of the site service for probes and Prometheus: /metrics, /healthz and /readyz."""

import asyncio
from collections.abc import Callable

import sqlalchemy as sa
from starlette.responses import Response

from rackloom.app import site_counts
from rackloom.app.metrics import SiteMetrics
from rackloom.app.plain_pages import PlainPages, metrics, unwell, well
from rackloom.carve.site.store import Store
from rackloom.errors import Retry, Unknown


class MetricsPage(PlainPages):
    """An ASGI application on what is counted, and on the records."""

    def __init__(self, counted: SiteMetrics, store: Store, clock: Callable[[], float]) -> None:
        super().__init__({"/metrics": self._page, "/healthz": self._alive, "/readyz": self._ready})
        self._metrics = counted
        self._store = store
        self._clock = clock
        self._history = 0
        # Two scrapes at once would count the same turns to Ready twice.
        self._one_at_a_time = asyncio.Lock()

    async def begin(self) -> None:
        """Count from now on."""
        self._history = await self._store.read(site_counts.newest_history)

    async def _page(self) -> Response:
        async with self._one_at_a_time:
            counts = await self._store.read(site_counts.count, self._history)
            self._history = counts.newest_history
            page = self._metrics.page(counts, self._clock())
        return metrics(page)

    async def _alive(self) -> Response:
        return well()

    async def _ready(self) -> Response:
        """Ready when the records can be read: requests can be answered though a switch cannot be reached."""
        try:
            await self._store.read(lambda conn: conn.execute(sa.select(1)).scalar_one())
        except (Retry, Unknown) as trouble:
            return unwell(trouble.reason)
        return well()
