"""The fixtures of the REST application, and a site that runs in a thread as `rackloom up` runs it."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.app.embedded_site import embedded_site
from tests.carve.api.conftest import api, served
from tests.carve.conftest import database, portal, site_template, small_site

from rackloom.app.home import Home

__all__ = ["api", "database", "portal", "served", "site_template", "small_site"]


class RunningSite(msgspec.Struct, frozen=True):
    home: Path
    url: str


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningSite]:
    """One rack on loopback, with the reconciler that makes instances ready."""
    home = tmp_path_factory.mktemp("home")
    running: list[Any] = []
    begun = threading.Event()

    async def run() -> None:
        stop = asyncio.Event()
        async with embedded_site(Home(home), port=0, racks=1, profile="gb200-nvl72") as made:
            running.extend((made.url, asyncio.get_running_loop(), stop))
            begun.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert begun.wait(60)
        url = running[0]
        yield RunningSite(home, url)
    finally:
        if running:
            running[1].call_soon_threadsafe(running[2].set)
        thread.join(30)
