"""Around the map in a real browser: theme, copying, ages of times, export, and the empty site's page."""

import csv
import io
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from tests.browser.conftest import serving, signed_in_without_script
from tests.browser.test_rack_map import GPU, story, style
from tests.web.snapshots import AT

from rackloom.core.diagnosis.snapshot import SiteSnapshot
from rackloom.web.model import SiteReading

pytestmark = pytest.mark.slow


def is_dark(page):
    return sum(map(int, style(page, "body", "backgroundColor")[4:-1].split(","))) < 300


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_is_the_systems_until_one_is_chosen_and_stays(open_map, pictures_folder, scheme):
    other = "dark" if scheme == "light" else "light"
    with open_map(story(1), scheme=scheme) as (page, served):
        assert is_dark(page) == (scheme == "dark")
        assert page.input_value("#theme") == "system"
        page.select_option("#theme", other)
        assert is_dark(page) == (other == "dark")
        page.screenshot(path=pictures_folder / f"theme-{other}-on-{scheme}.png", full_page=True)
        page.reload()
        assert is_dark(page) == (other == "dark")
        page.goto(f"{served.url}/map/runbook/gpu-health")
        assert is_dark(page) == (other == "dark")
        page.screenshot(path=pictures_folder / f"runbook-{other}.png")
        page.goto(served.url)
        page.select_option("#theme", "system")
        assert is_dark(page) == (scheme == "dark")
        assert page.complaints == []


def test_without_a_script_the_systems_theme_counts_and_no_dead_button_is_shown(chromium):
    with serving(story(1)) as served, signed_in_without_script(chromium, served, color_scheme="dark") as page:
        assert is_dark(page)
        assert page.locator("button.copy:visible, #theme:visible, #svg:visible").count() == 0
        assert page.locator("footer a:visible").count() == 1
        # The search works too.
        page.fill("#find", "blue-node-0")
        with page.expect_navigation():
            page.press("#find", "Enter")
        assert page.locator("#found [role=option]").count() > 1


# A new user has the first command of a repair in the clipboard after a click on its button.
def test_ids_and_commands_are_copied(open_map):
    with open_map(story(1)) as (page, served):
        page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=served.url)
        page.locator("#findings .steps .copy").first.click()
        # The browser writes to its clipboard asynchronously, and the button shows when it is done.
        page.wait_for_selector("#findings .copy:text-is('copied')")
        assert page.evaluate("navigator.clipboard.readText()") == "rackloom admin partition list"
        page.locator(GPU).first.click()
        page.wait_for_selector("#chain table")
        page.click("#chain .copy[aria-label='Copy Node']")
        page.wait_for_selector("#chain .copy[aria-label='Copy Node']:text-is('copied')")
        assert "-node-0-17" in page.evaluate("navigator.clipboard.readText()")
        assert page.complaints == []


def test_a_browser_without_a_clipboard_for_scripts_copies_all_the_same(open_map):
    with open_map(story(1)) as (page, served):
        page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=served.url)
        page.evaluate("Object.defineProperty(navigator.clipboard, 'writeText', { value: undefined })")
        page.locator("#findings .steps .copy").first.click()
        page.wait_for_selector("#findings .copy:text-is('copied')")
        assert page.evaluate("navigator.clipboard.readText()") == "rackloom admin partition list"


def test_times_say_how_long_ago_it_was(open_map):
    with open_map(story(1)) as (page, served):
        age = page.locator("#findings li time").first.get_attribute("data-ago")
        assert age.endswith(" d")
        shown = "getComputedStyle(document.querySelector('#findings li time'), '::after').content"
        assert age in page.evaluate(shown)
        assert page.locator("#reading time").first.get_attribute("title").endswith("ago")
        assert page.locator("#reading time[data-ago]").count() == 0
        served.show(story(2))
        page.wait_for_selector(".rack >> nth=1")
        page.wait_for_selector("#findings li time[data-ago$=' d']")
        assert page.evaluate("[0, 42, 240, 9000, 400000].map(ageText)") == [
            "now", "42 s", "4 min", "3 h", "5 d",
        ]  # fmt: skip


def exported(page, selector):
    with page.expect_download() as expected:
        page.click(selector)
    return expected.value.suggested_filename, Path(expected.value.path()).read_bytes().decode()


@pytest.mark.parametrize("racks", [2, 60])
def test_what_is_shown_is_exported_as_a_drawing_and_as_a_table(open_map, chromium, pictures_folder, racks):
    with open_map(story(racks), width=1280, height=900) as (page, served):
        if racks > 8:
            page.goto(f"{served.url}/?by=tenant&rack=rack-01&rack=rack-02")
            page.wait_for_selector("#live[data-state=live]")
        name, drawing = exported(page, "#svg")
        assert name == "rackloom-map.svg"
        root = ET.fromstring(drawing)  # noqa: S314 - our own page
        cells = root.findall(".//*[@role='gridcell']")
        assert len(cells) == 2 * 72
        fills = {
            style.partition("fill: ")[2].partition(";")[0] for cell in cells if (style := cell.get("style"))
        }
        assert len(fills) > 2
        file = pictures_folder / f"export-{racks}.svg"
        file.write_text(drawing)
        other = chromium.new_page()
        other.goto(file.as_uri())
        other.screenshot(path=pictures_folder / f"export-{racks}.png")
        other.close()
        name, table = exported(page, "footer a")
        assert name == "rackloom-gpus.csv"
        rows = list(csv.DictReader(io.StringIO(table)))
        assert len(rows) == 2 * 72
        assert {row["tenant"] for row in rows} == {"acme", "blue", "crimson", ""}
        assert page.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_empty_site_says_what_to_do(open_map, pictures_folder, scheme):
    with open_map(SiteReading(snapshot=SiteSnapshot(at=AT, layers=())), scheme=scheme) as (page, served):
        assert "rackloom admin endpoint create" in page.inner_text("#racks")
        page.screenshot(path=pictures_folder / f"empty-{scheme}.png")
        served.breaks(True)
        page.wait_for_selector("#reading.stale")
        assert "read again every few seconds" in page.inner_text("#reading")
