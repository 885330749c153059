"""The legend filters: by a click, by the keyboard, from a link, and without a script."""

from urllib.parse import parse_qs, urlsplit

import msgspec
import pytest
from tests.browser.axe import violations
from tests.browser.conftest import serving, signed_in_without_script
from tests.browser.test_keyboard import Keyboard
from tests.browser.test_rack_map import story

from rackloom.web.highlight import group_mark

pytestmark = pytest.mark.slow

BLUE = group_mark("blue-id")
ENTRY = f"#legend button[value={BLUE}]"
PLAIN = """(selector) => {
  const probe = document.body.appendChild(document.createElement("p"));
  probe.style.background = "var(--ground)";
  const ground = getComputedStyle(probe).backgroundColor;
  probe.remove();
  const colour = (one) => getComputedStyle(one)[one.matches("rect") ? "fill" : "backgroundColor"];
  const all = [...document.querySelectorAll(selector)];
  return all.filter((one) => colour(one) === ground).length / all.length;
}"""
GPUS = "rect[role=gridcell]"


def wait_for_style(page):
    """Until the style sheet has come. The policy of the page forbids Playwright's own waiting."""
    for _ in range(600):
        if page.evaluate("Boolean(document.querySelector('link#only')?.sheet)"):
            return
        page.wait_for_timeout(100)
    raise AssertionError("no style sheet came")


def plain(page, selector):
    """The share of elements that have given up their colours."""
    return page.evaluate(PLAIN, selector)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_entry_of_the_legend_filters_and_is_taken_away_again(open_map, pictures_folder, scheme):
    with open_map(story(), scheme=scheme) as (page, served):
        page.goto(f"{served.url}/?by=tenant")
        page.wait_for_selector("#live[data-state=live]")
        assert page.get_attribute(ENTRY, "aria-pressed") == "false"
        assert plain(page, f"{GPUS}:not(.{BLUE})") < 0.5
        page.click(ENTRY)
        wait_for_style(page)
        assert plain(page, f"{GPUS}.{BLUE}") == 0
        assert plain(page, f"{GPUS}:not(.{BLUE})") == 1
        assert f"only={BLUE}" in page.url
        assert page.get_attribute(ENTRY, "aria-pressed") == "true"
        assert page.inner_text("#filtered").startswith("Only blue is in colour.")
        assert violations(page) == []
        page.screenshot(path=pictures_folder / f"filter-{scheme}.png")
        # Updates from the stream are filtered too, and the legend stays pressed.
        served.show(story_with_another_holder())
        page.wait_for_selector("#legend li:nth-child(5)")
        assert plain(page, f"{GPUS}:not(.{BLUE})") == 1
        assert page.get_attribute(ENTRY, "aria-pressed") == "true"
        page.reload()
        page.wait_for_selector("#live[data-state=live]")
        assert plain(page, f"{GPUS}:not(.{BLUE})") == 1
        page.click("#filtered a")
        assert "only=" not in page.url
        assert not page.is_visible("#filtered")
        assert plain(page, f"{GPUS}:not(.{BLUE})") < 0.5
        assert page.complaints == []


def test_the_keyboard_filters_and_stays_where_it_is(open_map):
    with open_map(story()) as (page, served):
        page.goto(f"{served.url}/?by=health")
        page.wait_for_selector("#live[data-state=live]")
        keyboard = Keyboard(page)
        keyboard.tab_to("#legend button[value=p]")
        page.keyboard.press("Enter")
        wait_for_style(page)
        keyboard.look("Enter")
        assert keyboard.is_at("#legend button[value=p][aria-pressed=true]")
        assert plain(page, f"{GPUS}.p") == 0
        assert plain(page, f"{GPUS}:not(.p)") == 1
        page.keyboard.press("Space")
        assert keyboard.is_at("#legend button[value=p][aria-pressed=false]")
        assert plain(page, f"{GPUS}.p") == 0
        assert page.evaluate("document.getElementById('only')") is None
        # Other colours have another legend.
        keyboard.press("Enter")
        with page.expect_navigation():
            page.click("header nav a >> text=use")
        assert "only=" not in page.url


@pytest.mark.parametrize("racks", [60, 1000])
def test_among_many_racks_those_of_one_tenant_are_left(open_map, pictures_folder, racks):
    with open_map(story(racks), width=1280) as (page, served):
        page.goto(f"{served.url}/?by=tenant&only={BLUE}")
        page.wait_for_selector("#live[data-state=live]")
        cells = "#overview a:not(.s)"
        assert page.locator(f"{cells}.{BLUE}").count() > 0
        if racks == 60:
            assert plain(page, f"#overview i:not(.{BLUE})") == 1
            assert plain(page, f"#overview i.{BLUE}") == 0
        else:
            # A cell shows the holder of most of its rack. Under the filter it is drawn for the chosen group.
            look = "all => [...new Set(all.map((one) => getComputedStyle(one).backgroundColor))]"
            assert len(page.locator(f"{cells}.{BLUE}").evaluate_all(look)) == 1
            assert plain(page, f"{cells}.{BLUE}") == 0
        assert plain(page, f"{cells}:not(.{BLUE})") == 1
        assert violations(page) == []
        page.screenshot(path=pictures_folder / f"filter-{racks}.png")
        # A cell opens its rack in the same view.
        with page.expect_navigation():
            page.locator(f"{cells}.{BLUE}").first.click()
        assert f"only={BLUE}" in page.url
        assert "rack=" in page.url
        assert page.is_visible("#filtered")


def test_without_a_script_an_entry_leads_to_the_filtered_page(chromium):
    with (
        serving(story()) as served,
        signed_in_without_script(chromium, served) as page,
    ):
        page.goto(f"{served.url}/?by=tenant&rack=rack-02")
        with page.expect_navigation():
            page.click(ENTRY)
        wanted = {"by": ["tenant"], "rack": ["rack-02"], "only": [BLUE]}
        assert parse_qs(urlsplit(page.url).query) == wanted
        assert page.inner_text("#filtered").startswith("Only blue is in colour.")
        with page.expect_navigation():
            page.click("#filtered a")
        assert page.url == f"{served.url}/?by=tenant&rack=rack-02"


def story_with_another_holder(racks=8):
    """The same site, in which another tenant got a tray."""
    reading = story(racks)
    seen = reading.snapshot
    machines = list(seen.machines)
    free = next(number for number, machine in enumerate(machines) if machine.tenant is None)
    machines[free] = msgspec.structs.replace(machines[free], tenant="new-id", instance="i")
    tenants = {**seen.tenants, "new-id": "newcomer"}
    changed = msgspec.structs.replace(seen, machines=tuple(machines), tenants=tenants)
    return msgspec.structs.replace(reading, snapshot=changed)
