"""An embedded site that opens its home."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rackloom.app.home import Home
from rackloom.app.twin.site import EmbeddedSite, embedded_service, open_embedded_home
from rackloom.runtime.traces import NO_TRACES, Traces


@asynccontextmanager
async def embedded_site(
    home: Home, *, port: int, racks: int, profile: str, traces: Traces = NO_TRACES
) -> AsyncIterator[EmbeddedSite]:
    """A site that answers while the context is entered. Refused before any file is written."""
    opened = open_embedded_home(home, racks=racks, profile=profile)
    async with opened as (store, twin), embedded_service(home, store, twin, port, traces) as running:
        yield running
