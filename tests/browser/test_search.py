"""Search in a real browser: from the keyboard to the GPU, and back, on a small and on a large site."""

import pytest
from tests.browser.test_rack_map import CLIPPED, GPU, focused, story

from rackloom.web.racks import rack_id

pytestmark = pytest.mark.slow

RESULT = "#found [role=option]"


def search_for(page, text):
    page.keyboard.press("/")
    assert focused(page) == "find"
    page.keyboard.type(text)
    page.wait_for_selector(f"{RESULT}, #found p")


# A new user finds a tenant's GPUs, or the rack of a node: type the name, press Enter.
@pytest.mark.parametrize(
    ("scheme", "width", "height"), [("light", 1280, 800), ("dark", 1280, 800), ("light", 390, 844)]
)
def test_a_name_leads_to_its_rack_and_gpu(open_map, pictures_folder, scheme, width, height):
    with open_map(story(60), scheme=scheme, width=width, height=height) as (page, served):
        search_for(page, "blue-node-41")
        page.screenshot(path=pictures_folder / f"search-{scheme}-{width}.png")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(CLIPPED) == []
        box = page.locator("#found").bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        page.keyboard.press("Enter")
        page.wait_for_selector(f"#{rack_id('rack-41')}")
        page.wait_for_selector("#chain table")
        assert "blue-node-41" in page.inner_text("#chain")
        assert page.locator("[role=gridcell][aria-selected=true]").count() == 1
        assert page.complaints == []
        assert all(url.startswith(served.url) for url in page.asked)


def test_the_arrows_choose_and_escape_leads_back(open_map):
    with open_map(story(), width=1280, height=800) as (page, _):
        page.locator(GPU).nth(5).focus()
        at = focused(page)
        search_for(page, "acme-node")
        chosen = lambda: page.locator(f"{RESULT}[aria-selected=true]").get_attribute("id")  # noqa: E731
        assert chosen() == "found-0"
        for key, id_ in (("ArrowDown", "found-1"), ("ArrowUp", "found-0"), ("ArrowUp", "found-11")):
            page.keyboard.press(key)
            assert chosen() == id_, key
            assert page.locator("#find").get_attribute("aria-activedescendant") == id_
        page.keyboard.press("Escape")
        assert page.locator(RESULT).count() == 0
        assert page.input_value("#find") == ""
        assert focused(page) == at
        # A slash within a name is an ordinary character.
        search_for(page, "acme-ns/acme-job")
        assert page.input_value("#find") == "acme-ns/acme-job"
        assert page.complaints == []


def test_what_is_drawn_already_is_chosen_without_a_new_page(open_map):
    with open_map(story(), width=1280, height=800) as (page, _):
        page.evaluate("window.same = true")
        search_for(page, "GPU-blue-5-")
        name = page.locator(f"{RESULT} b").first.inner_text()
        page.keyboard.press("Enter")
        page.wait_for_selector("#chain table")
        assert name in page.inner_text("#chain")
        assert page.evaluate("window.same")
        assert page.locator(RESULT).count() == 0
        page.keyboard.press("Escape")
        assert page.locator("#chain table").count() == 0


def test_enter_waits_for_the_results_of_what_is_typed(open_map):
    with open_map(story(60), width=1280, height=800) as (page, _):
        search_for(page, "rack-0")
        page.keyboard.type("9")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"#{rack_id('rack-09')}")
        assert page.locator(".rack").count() == 1


def test_a_click_leads_there_and_nothing_found_says_what_to_do(open_map):
    with open_map(story(60), width=1280, height=800) as (page, _):
        search_for(page, "no such thing")
        assert "Search for a part of the name" in page.inner_text("#found")
        page.fill("#find", "")
        assert not page.locator("#found").is_visible()
        page.fill("#find", "rack-33 slot 4")
        page.locator(RESULT).first.click()
        page.wait_for_selector(f"#{rack_id('rack-33')}")
        assert "rack-33/slot-4" in page.inner_text("#chain h3")


def test_a_tenant_does_not_find_others(open_map):
    with open_map(story(), org="acme", token="acme-token") as (page, _):
        search_for(page, "blue")
        assert page.locator(RESULT).count() == 0
