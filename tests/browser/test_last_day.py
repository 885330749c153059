"""The last day in a real browser: charts, the slider by keys and by mouse, and the page of a past time."""

import time

import msgspec
import pytest
from tests.browser.axe import violations
from tests.browser.conftest import serving, signed_in_without_script
from tests.browser.test_rack_map import CLIPPED, GPU, story

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import examine
from rackloom.web.model import SiteReading

pytestmark = pytest.mark.slow


def later(reading: SiteReading, minutes: int) -> SiteReading:
    """The reading some minutes later, with one more sick GPU for each minute."""
    seen = reading.snapshot
    gpus = tuple(
        msgspec.structs.replace(gpu, healthy=False) if number < minutes else gpu
        for number, gpu in enumerate(seen.fabric_gpus)
    )
    seen = msgspec.structs.replace(seen, at=seen.at + 60 * minutes, fabric_gpus=gpus)
    found = (finding for finding in examine(seen) if finding.check == Check.GPU_HEALTH)
    return msgspec.structs.replace(reading, snapshot=seen, findings=(*(reading.findings or ()), *found))


def let_pass(served, racks, minutes, look=lambda: None):
    """Show a reading for each minute, and wait until it was read. `look` triggers the read."""
    for minute in range(1, minutes + 1):
        served.show(later(story(racks), minute))
        deadline = time.monotonic() + 30
        while served.live.history.maps[-1].at < story(racks).snapshot.at + 60 * minute:
            assert time.monotonic() < deadline, "it was not read"
            look()
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("racks", "width", "scheme"), [(2, 1500, "light"), (60, 1280, "dark"), (2, 390, "light")]
)
def test_the_slider_leads_to_the_past_and_back(open_map, pictures_folder, racks, width, scheme):
    with open_map(story(racks), width=width, height=900, scheme=scheme) as (page, served):
        let_pass(served, racks, 6)
        page.reload()
        page.wait_for_selector("#live[data-state=live]")
        page.wait_for_selector("#trends .trend >> nth=2")
        slider = page.locator("#when")
        assert int(slider.get_attribute("max")) - int(slider.get_attribute("min")) == 360
        assert slider.input_value() == slider.get_attribute("max")
        page.locator("#history").scroll_into_view_if_needed()
        page.screenshot(path=pictures_folder / f"last-day-{racks}-{width}.png")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CLIPPED) == []
        # To the beginning, by keys.
        slider.focus()
        page.keyboard.press("Home")
        with page.expect_navigation():
            page.keyboard.press("Enter")
        assert "/map/at/" in page.url
        page.wait_for_selector("#trends .mark >> nth=0", state="attached")
        page.screenshot(path=pictures_folder / f"past-{racks}-{width}.png", full_page=True)
        assert page.locator(".past").is_visible()
        assert page.locator("#live").get_attribute("data-state") == "past"
        assert violations(page) == []
        assert page.evaluate(CLIPPED) == []
        if racks == 2:
            assert page.locator(f"{GPU}.s").count() == 1
            page.locator(GPU).first.click()
            page.wait_for_selector("#chain table")
            page.keyboard.press("Escape")
        page.click("header nav a:text-is('health')")
        page.wait_for_selector("header nav a[aria-current]:text-is('health')")
        assert "/map/at/" in page.url
        page.click(".past a")
        page.wait_for_selector("#live[data-state=live]")
        assert "/map/at/" not in page.url
        assert page.locator("header nav a[aria-current]").inner_text() == "health"
        assert page.complaints == []
        assert all(url.startswith(served.url) for url in page.asked)


def test_a_past_time_is_named_and_left_without_a_script(chromium):
    with serving(story(2)) as served, signed_in_without_script(chromium, served) as page:
        at = story(2).snapshot.at
        let_pass(served, 2, 2, page.reload)
        shown = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at + 30))
        page.fill("input[name=time]", shown)
        with page.expect_navigation():
            page.click(".when button")
        assert page.url.startswith(f"{served.url}/map/at/{shown}Z")
        assert page.locator(".past").is_visible()
        with page.expect_navigation():
            page.click(".past a")
        assert page.locator(".past").count() == 0
