"""Many maps in one browser: it opens six connections to a server, and pages need some of them."""

from contextlib import contextmanager

import pytest
from tests.browser.axe import violations
from tests.browser.conftest import OPERATOR, serving
from tests.browser.test_filter import story_with_another_holder
from tests.browser.test_rack_map import story

pytestmark = pytest.mark.slow

PAGES = 8
FOLLOWING = 4


@contextmanager
def signed_in(chromium, served):
    context = chromium.new_context()
    page = context.new_page()
    page.goto(served.url + "/map/login")
    page.fill("input[name=org]", "provider")
    page.fill("input[name=token]", OPERATOR)
    with page.expect_navigation():
        page.click("button")
    page.close()
    try:
        yield context
    finally:
        context.close()


def state(page):
    return page.get_attribute("#live", "data-state")


def test_the_eighth_page_opens_and_the_oldest_make_room(chromium):
    with serving(story(2)) as served, signed_in(chromium, served) as context:
        pages = []
        for _ in range(PAGES):
            page = context.new_page()
            page.set_default_timeout(20_000)
            page.goto(f"{served.url}/?by=tenant")
            page.wait_for_selector("#live[data-state=live]")
            pages.append(page)
        for page in pages[: PAGES - FOLLOWING]:
            page.wait_for_selector("#live[data-state=paused]")
        assert [state(page) for page in pages[-FOLLOWING:]] == ["live"] * FOLLOWING
        first = pages[0]
        assert "Paused" in first.inner_text("#lost")
        assert violations(first) == []
        # A paused page catches up when it is used again.
        served.show(story_with_another_holder(2))
        pages[-1].wait_for_selector("#legend li:nth-child(5)")
        assert first.locator("#legend button").count() == 4
        first.mouse.click(400, 20)
        first.wait_for_selector("#live[data-state=live]")
        first.wait_for_selector("#legend li:nth-child(5)")
        assert not first.is_visible("#lost")
        pages[PAGES - FOLLOWING].wait_for_selector("#live[data-state=paused]")
        # A page that is closed leaves its place to others.
        for page in pages[-3:]:
            page.close()
        for page in pages[1:3]:
            page.mouse.click(400, 20)
            page.wait_for_selector("#live[data-state=live]")
        assert state(first) == "live"


def test_a_hidden_page_follows_when_it_is_shown(chromium):
    hidden = """
      let hidden = true;
      Object.defineProperty(document, "hidden", { get: () => hidden });
      const becomes = (value) => {
        hidden = value;
        document.dispatchEvent(new Event("visibilitychange"));
      };
      window.addEventListener("show-page", () => becomes(false));
      window.addEventListener("hide-page", () => becomes(true));
    """
    with serving(story(2)) as served, signed_in(chromium, served) as context:
        page = context.new_page()
        asked = []
        page.on("request", lambda request: asked.append(request.url))
        page.add_init_script(hidden)
        page.goto(f"{served.url}/?by=tenant")
        page.wait_for_timeout(500)
        assert not [url for url in asked if "/map/live" in url]
        page.evaluate("window.dispatchEvent(new Event('show-page'))")
        page.wait_for_selector("#live[data-state=live]")
        page.evaluate("window.dispatchEvent(new Event('hide-page'))")
        page.wait_for_selector("#live[data-state=paused]")
        served.show(story_with_another_holder(2))
        page.wait_for_timeout(1000)
        assert page.locator("#legend button").count() == 4
        page.evaluate("window.dispatchEvent(new Event('show-page'))")
        page.wait_for_selector("#legend li:nth-child(5)")
        assert state(page) == "live"
