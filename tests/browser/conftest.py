"""A headless Chromium on the real pages, served over a real socket."""

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.web.snapshots import AT
from tests.web.stand_ins import ShownSite, doorman

from rackloom.app.listeners import serve_http
from rackloom.web.live import LiveMap
from rackloom.web.model import SiteReading
from rackloom.web.pages import create_pages
from rackloom.web.provider_sign_in import ProviderSignIn

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
PATIENCE_MS = 60_000
OPERATOR = "operator-token"


@pytest.fixture(scope="module")
def chromium():
    # No longer than a module: while it runs, no other test of this process can have an event loop.
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="NO PLAYWRIGHT: the rack map was not tried in a browser"
    )
    program = os.environ.get("RACKLOOM_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("NO CHROMIUM (apt install chromium): the rack map was not tried in a browser")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def pictures_folder(tmp_path) -> Path:
    """The folder for screenshots. Set RACKLOOM_SCREENSHOTS to keep them."""
    folder = Path(os.environ.get("RACKLOOM_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


class Served:
    """The map of a `ShownSite`, in its own thread."""

    def __init__(self, url: str, site: ShownSite, live: LiveMap, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self.site = site
        self.live = live
        self._loop = loop

    def show(self, reading: SiteReading) -> None:
        self._loop.call_soon_threadsafe(self.site.show, reading)

    def breaks(self, broken: bool) -> None:
        self._loop.call_soon_threadsafe(self.site.breaks, broken)


@contextmanager
def serving(reading: SiteReading, port: int = 0, providers: ProviderSignIn | None = None) -> Iterator[Served]:
    ready: list[Served] = []
    up = threading.Event()
    stop: list[asyncio.Event] = []

    async def serve() -> None:
        site = ShownSite(reading)
        stop.append(asyncio.Event())
        live = LiveMap(site, lambda: AT)
        pages = create_pages(live, doorman, lambda: AT, switch_trays=9, providers=providers)
        async with serve_http(pages, f"127.0.0.1:{port}") as bound:
            ready.append(Served(f"http://127.0.0.1:{bound}", site, live, asyncio.get_running_loop()))
            up.set()
            await stop[0].wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert up.wait(60), "the map does not answer"
    try:
        yield ready[0]
    finally:
        ready[0]._loop.call_soon_threadsafe(stop[0].set)
        thread.join(60)


@pytest.fixture
def open_map(chromium):
    """Opens the map of a reading, signed in. Yields the page and its `Served`."""

    @contextmanager
    def opened(
        reading: SiteReading, *, org="provider", token=OPERATOR, scheme="light", width=1500, height=1000
    ):
        with serving(reading) as served:
            context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
            page = context.new_page()
            page.set_default_timeout(PATIENCE_MS)
            page.asked, page.complaints = [], []
            page.on("request", lambda request: page.asked.append(request.url))
            page.on("console", lambda message: page.complaints.append(message.text))
            page.on("pageerror", lambda error: page.complaints.append(str(error)))
            page.goto(served.url + "/")
            page.fill("input[name=org]", org)
            page.fill("input[name=token]", token)
            page.click("button")
            page.wait_for_selector("#live[data-state=live]")
            try:
                yield page, served
            finally:
                context.close()

    return opened


@contextmanager
def signed_in_without_script(chromium, served: Served, **options):
    """A page of a browser that runs no scripts, signed in as operator."""
    context = chromium.new_context(java_script_enabled=False, **options)
    page = context.new_page()
    page.goto(served.url + "/")
    page.fill("input[name=org]", "provider")
    page.fill("input[name=token]", OPERATOR)
    with page.expect_navigation():
        page.click("button")
    try:
        yield page
    finally:
        context.close()
