"""The overview of a large site in a real browser: one screen, by mouse and by keys, without a script too."""

import msgspec
import pytest
from tests.browser.test_rack_map import CLIPPED, GPU, SEEN, focused, story, style
from tests.web.snapshots import examined

from rackloom.web.overview import cell_id
from rackloom.web.racks import rack_id

pytestmark = pytest.mark.slow

CELL = "#overview a"
SIZES = [(1280, 800), (390, 844)]
BOTTOM = "document.querySelector('#overview').getBoundingClientRect().bottom"


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("racks", [100, 1000])
def test_a_whole_site_fits_on_one_screen(open_map, pictures_folder, racks, width, height):
    with open_map(story(racks), width=width, height=height) as (page, served):
        page.screenshot(path=pictures_folder / f"overview-{racks}-{width}.png")
        assert page.locator(CELL).count() == racks
        assert page.locator(GPU).count() == 0
        if (racks, width) != (100, 390):
            assert page.evaluate(BOTTOM) <= height
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CLIPPED) == []
        assert page.locator(".numbers dt").count() == 5
        assert page.complaints == []
        assert all(url.startswith(served.url) for url in page.asked)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("mode", ["use", "health", "fragmentation", "tenant"])
def test_red_is_for_problems_alone(open_map, pictures_folder, mode, scheme):
    with open_map(story(40), width=1280, height=800, scheme=scheme) as (page, _):
        page.click(f"header nav a:text-is('{mode}')")
        page.wait_for_selector(f"header nav a[aria-current]:text-is('{mode}')")
        page.wait_for_selector("#live[data-state=live]")
        page.screenshot(path=pictures_folder / f"overview-{mode}-{scheme}.png")
        bad = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--bad').trim()")
        problem = f"#{cell_id('rack-00')}"
        red = style(page, problem, "borderTopColor")
        assert red == "rgb" + str(tuple(int(bad[n : n + 2], 16) for n in (1, 3, 5)))
        framed = page.locator(CELL).evaluate_all(
            """(all, red) => all.filter((one) => getComputedStyle(one).borderTopColor === red)
              .map((one) => one.id)""",
            red,
        )
        assert framed == [cell_id("rack-00")]
        assert page.locator(f"{problem} b").inner_text() == "!"


# A new user shares the view with a colleague: choose a GPU, copy the address.
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_rack_is_opened_and_its_gpu_chosen_and_the_view_is_a_link(open_map, pictures_folder, width, height):
    with open_map(story(60), width=width, height=height) as (page, served):
        page.click(f"#{cell_id('rack-41')}")
        page.wait_for_selector(f"#{rack_id('rack-41')}")
        page.wait_for_selector("#live[data-state=live]")
        assert page.locator(".rack").count() == 1
        assert page.locator(f"#{cell_id('rack-41')}").get_attribute("aria-current") == "true"
        assert page.locator(f"#{rack_id('rack-41')} figcaption").evaluate(SEEN)
        page.locator(GPU).nth(9).click()
        page.wait_for_selector("#chain table")
        page.wait_for_timeout(200)
        page.screenshot(path=pictures_folder / f"opened-{width}.png")
        assert page.locator("#chain h3").evaluate(SEEN)
        chosen = page.locator("[aria-selected=true]").get_attribute("id")
        address = page.url
        assert f"gpu={chosen}" in address
        # The link shows another person the same view, and keeps the choice in other colours.
        page.goto(served.url)
        page.goto(address)
        page.wait_for_selector(f"#{chosen}[aria-selected=true]")
        assert "rack-41" in page.inner_text("#chain h3")
        page.click("header nav a:text-is('health')")
        page.wait_for_selector("header nav a[aria-current]:text-is('health')")
        assert "rack-41" in page.inner_text("#chain h3")
        page.wait_for_selector(f"#{chosen}[aria-selected=true]")
        page.keyboard.press("Escape")
        assert "gpu=" not in page.url
        assert page.locator("#chain table").count() == 0
        page.go_back()
        page.wait_for_selector("header nav a[aria-current]:text-is('use')")


def test_the_overview_is_walked_by_keys(open_map):
    with open_map(story(60), width=1280, height=800) as (page, _):
        page.locator(CELL).first.focus()
        cell = lambda n: cell_id(f"rack-{n:02}")  # noqa: E731
        columns = page.evaluate(
            """[...document.querySelectorAll('#overview a')]
              .filter((one, _, all) => one.offsetTop === all[0].offsetTop).length"""
        )
        for key, at in (
            ("ArrowRight", 1),
            ("ArrowDown", 1 + columns),
            ("ArrowLeft", columns),
            ("ArrowUp", 0),
            ("End", 59),
        ):
            page.keyboard.press(key)
            assert focused(page) == cell(at), key
        assert page.locator(f"{CELL}[tabindex='0']").count() == 1
        page.keyboard.press("Enter")
        page.wait_for_selector(f"#{rack_id('rack-59')}")


def test_a_change_reaches_the_cell_and_the_opened_rack(open_map):
    reading = story(20)
    with open_map(reading, width=1280, height=800) as (page, served):
        page.goto(f"{served.url}/?by=health&rack=rack-09")
        page.wait_for_selector("#live[data-state=live]")
        assert page.locator(f"#{cell_id('rack-09')}.s").count() == 0
        seen = reading.snapshot
        sick = tuple(
            msgspec.structs.replace(gpu, healthy=False) if gpu.domain == "domain-9" else gpu
            for gpu in seen.fabric_gpus
        )
        page.locator(f"#{cell_id('rack-12')}").focus()
        served.show(examined(msgspec.structs.replace(seen, fabric_gpus=sick)))
        page.wait_for_selector(f"#{cell_id('rack-09')}.s")
        page.wait_for_selector(f"#{rack_id('rack-09')} .p")
        assert focused(page) == cell_id("rack-12")
        assert page.locator(f"#{cell_id('rack-09')}").get_attribute("aria-current") == "true"
        assert page.complaints == []


def test_everything_is_shown_without_a_script(chromium):
    from tests.browser.conftest import serving, signed_in_without_script

    with serving(story(20)) as served, signed_in_without_script(chromium, served) as page:
        assert page.locator(CELL).count() == 20
        page.fill(".open input[name=rack]", "rack-07")
        with page.expect_navigation():
            page.click(".open button")
        assert page.locator(GPU).count() == 72
        # The number of a slot leads to the first GPU of its tray.
        with page.expect_navigation():
            page.locator(".rack a").nth(3).click()
        assert "rack-07/slot-14/gpu-0" in page.inner_text("#chain h3")
        with page.expect_navigation():
            page.click("a.close")
        assert page.locator("#chain table").count() == 0
        with page.expect_navigation():
            page.click("text=close rack-07")
        assert page.locator(GPU).count() == 0
