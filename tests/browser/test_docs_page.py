"""The page at /docs in a real browser, over a running site: to read, and to try requests with a token."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
from tests.app.embedded_site import embedded_site
from tests.browser.conftest import PATIENCE_MS

from rackloom.app.home import Home
from rackloom.app.twin.site import EmbeddedSite

pytestmark = pytest.mark.slow

CREATE = "#create-nvlink-logical-partition"
COUNT = """async () => {
  const { paths } = await (await fetch("/openapi.json")).json();
  return Object.values(paths).reduce((sum, methods) => sum + Object.keys(methods).length, 0);
}"""


@pytest.fixture(scope="module")
def site(chromium, tmp_path_factory) -> Iterator[EmbeddedSite]:
    """An embedded site, in its own thread."""
    ready, up, stop = [], threading.Event(), []

    async def serve() -> None:
        stop.append((asyncio.get_running_loop(), asyncio.Event()))
        home = Home(tmp_path_factory.mktemp("site") / "home")
        async with embedded_site(home, port=0, racks=1, profile="gb200-nvl72") as running:
            ready.append(running)
            up.set()
            await stop[0][1].wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert up.wait(60), "the site does not answer"
    yield ready[0]
    stop[0][0].call_soon_threadsafe(stop[0][1].set)
    thread.join(60)


@pytest.fixture
def open_docs(chromium, site):
    contexts = []

    def opened(scheme="light", width=1300, height=1000, fragment="", roles=("TENANT_ADMIN",)):
        context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.asked, page.complaints = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.goto(f"{site.url}/docs{fragment}")
        page.wait_for_selector("details")
        if roles:
            page.fill("#org", "demo")
            page.fill("#token", site.issuer.mint("demo", list(roles), time.time(), 600))
        return page

    yield opened
    for context in contexts:
        context.close()


def send(page, box):
    page.click(f"{box} button:text('Send')")
    page.wait_for_selector(f"{box} .status")
    return page.inner_text(f"{box} .status")


def body_of(page, box):
    return page.inner_text(f"{box} [aria-live] pre")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_operation_is_shown_and_can_be_tried(open_docs, site, pictures_folder, scheme):
    page = open_docs(scheme)
    described = page.evaluate(COUNT)
    assert page.locator("details[data-words]").count() == described > 70
    page.click(f"{CREATE} > summary")
    assert "TENANT_ADMIN" in page.inner_text(f"{CREATE} > summary")
    page.click("#get-all-site > summary")
    assert send(page, "#get-all-site").startswith("200")
    assert '"X-Pagination' not in body_of(page, "#get-all-site")
    identity = page.evaluate("text => JSON.parse(text)[0].id", body_of(page, "#get-all-site"))
    page.fill(f"{CREATE} textarea", f'{{"name": "lp {scheme}", "siteId": "{identity}"}}')
    assert send(page, CREATE).startswith("201")
    assert f'"name": "lp {scheme}"' in body_of(page, CREATE)
    page.locator(CREATE).scroll_into_view_if_needed()
    page.screenshot(path=pictures_folder / f"docs-{scheme}.png")
    assert page.complaints == []
    assert all(url.startswith(site.url) for url in page.asked)


def test_a_refusal_is_shown(open_docs):
    page = open_docs(roles=())
    page.click("#get-all-vpc > summary")
    assert send(page, "#get-all-vpc") == "Name the organisation first."
    page.fill("#org", "demo")
    page.click("#get-all-vpc button:text('Send')")
    page.wait_for_selector("#get-all-vpc .status:text('401')")
    assert "missing authorization header" in body_of(page, "#get-all-vpc")


def test_parameters_go_where_they_belong(open_docs, site):
    page = open_docs(roles=("PROVIDER_VIEWER",))
    page.click("#get-all-machine > summary")
    row = "#get-all-machine tr:has(code:text-is('{}'))"
    page.select_option(f"{row.format('includeMetadata')} select", "true")
    page.fill(f"{row.format('status')} input, {row.format('status')} select", "Ready, InUse")
    page.fill(f"{row.format('pageSize')} input", "2")
    assert "only PROVIDER_ADMIN, PROVIDER_VIEWER" in page.inner_text(row.format("includeMetadata"))
    assert send(page, "#get-all-machine").startswith("200")
    asked = page.asked[-1].partition("?")[2].split("&")
    assert sorted(asked) == ["includeMetadata=true", "pageSize=2", "status=InUse", "status=Ready"]
    assert '"total":18' in page.inner_text("#get-all-machine .note:text('X-Pagination')")


def test_what_is_answered_is_text_and_never_markup(open_docs, site):
    page = open_docs()
    page.click("#create-vpc > summary")
    page.click("#get-all-site > summary")
    send(page, "#get-all-site")
    identity = page.evaluate("text => JSON.parse(text)[0].id", body_of(page, "#get-all-site"))
    markup = "<img src=x onerror=alert(1)>"
    page.fill("#create-vpc textarea", f'{{"name": "{markup}", "siteId": "{identity}"}}')
    assert send(page, "#create-vpc").startswith("201")
    assert markup in body_of(page, "#create-vpc")
    assert page.locator("img").count() == 0
    assert page.complaints == []


def test_a_stream_is_shown_until_it_is_stopped(open_docs):
    page = open_docs(fragment="#stream-event")
    assert send(page, "#stream-event").startswith("200")
    page.click("#stream-event button:text('Stop')")
    page.wait_for_selector("#stream-event .status:text('Stopped.')")


def test_operations_are_found_by_word(open_docs):
    page = open_docs(roles=())
    page.fill("#find", "post vpc")
    assert page.locator("details[data-words]:visible").evaluate_all("all => all.map((one) => one.id)") == [
        "create-vpc"
    ]


def test_a_narrow_screen_needs_no_sideways_scroll(open_docs, pictures_folder):
    page = open_docs(width=390, height=844, fragment="#get-all-instance")
    page.wait_for_selector("#get-all-instance table")
    page.screenshot(path=pictures_folder / "docs-narrow.png")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
