"""A whole visit with only the keyboard: the focus is always visible, and is where a user expects it."""

import msgspec
import pytest
from tests.browser.conftest import OPERATOR, serving
from tests.browser.test_last_day import later, let_pass
from tests.browser.test_rack_map import GPU, story

from rackloom.web.overview import cell_id
from rackloom.web.racks import rack_id

pytestmark = pytest.mark.slow

MOST_STOPS = 120
STOP = """() => {
  const at = document.activeElement;
  if (!at || at === document.body) return "nothing has the focus";
  const name = at.outerHTML.slice(0, 120);
  const box = [...at.getClientRects()].find((one) => one.width > 0 && one.height > 0);
  if (!box) return "it has no size: " + name;
  const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
  if (x < 0 || y < 0 || x > innerWidth || y > innerHeight) return "it is off the screen: " + name;
  const there = document.elementFromPoint(x, y);
  if (at !== there && !at.contains(there)) return `it lies below ${there?.outerHTML.slice(0, 120)}: ${name}`;
  const style = getComputedStyle(at);
  const probe = document.body.appendChild(document.createElement("p"));
  probe.style.color = "var(--focus)";
  const colour = getComputedStyle(probe).color;
  probe.remove();
  const wide = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
  const outlined = wide && style.outlineColor === colour;
  const stroked = style.stroke === colour && parseFloat(style.strokeWidth) >= 3;
  return outlined || stroked ? null : "nothing marks it: " + name;
}"""


class Keyboard:
    """Somebody without a mouse: after every key, the focus must be seen."""

    def __init__(self, page) -> None:
        self.page = page

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)
            self.look(key)

    def look(self, after: str) -> None:
        problem = self.page.evaluate(STOP)
        assert problem is None, f"after {after}: {problem}"

    def is_at(self, selector: str) -> bool:
        return self.page.evaluate("(wanted) => document.activeElement.matches(wanted)", selector)

    def tab_to(self, selector: str, key: str = "Tab") -> None:
        """Walk to the next stop of this kind."""
        for _ in range(MOST_STOPS):
            self.press(key)
            if self.is_at(selector):
                return
        raise AssertionError(f"no stop of {MOST_STOPS} is {selector}")

    def follow(self, key: str = "Enter") -> None:
        """Follow the focused link to another page of the map."""
        with self.page.expect_navigation():
            self.page.keyboard.press(key)
        self.page.wait_for_selector("#live:is([data-state=live], [data-state=past])")

    def expect(self, selector: str) -> None:
        """The focus comes to this, and can be seen there."""
        self.page.wait_for_function(
            "(wanted) => document.activeElement.matches(wanted)", arg=selector, timeout=10_000
        )
        self.look(f"waiting for {selector}")


@pytest.fixture(params=[(1280, 800, "light"), (390, 844, "dark")], ids=["wide", "phone"])
def visit(chromium, request):
    """A page at the door of a large site with a history, and its keyboard."""
    width, height, scheme = request.param
    with serving(story(60)) as served:
        context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
        page = context.new_page()
        page.complaints = []
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.goto(served.url)
        yield page, Keyboard(page), served
        context.close()
        assert page.complaints == []


def sign_in(page, keys):
    assert keys.is_at("input[name=org]"), "one may begin to type"
    page.keyboard.type("provider")
    keys.press("Tab")
    page.keyboard.type(OPERATOR)
    keys.follow()


def test_a_visit_by_the_keyboard_alone(visit):
    page, keys, served = visit
    sign_in(page, keys)
    let_pass(served, 60, 6, lambda: page.evaluate("showHistory()"))
    reading = later(story(60), 7)
    found = tuple(msgspec.structs.replace(finding, runbook="gpu-health") for finding in reading.findings)
    served.show(msgspec.structs.replace(reading, findings=found))
    page.wait_for_selector("#findings a[href*=runbook]")
    page.reload()
    page.wait_for_selector("#trends #when")

    # The first stop leads past the header.
    keys.press("Tab")
    assert keys.is_at("a.skip")
    page.keyboard.press("Enter")
    keys.press("Tab")
    assert page.evaluate("document.querySelector('main').contains(document.activeElement)")

    # Other colours.
    keys.tab_to("header nav a:nth-child(2)", "Shift+Tab")
    keys.follow()
    assert "by=health" in page.url

    # The heat map: what a mouse reads in tooltips is written out.
    keys.tab_to("#overview a")
    keys.press("ArrowRight", "ArrowRight")
    assert page.inner_text("#hint").startswith("rack-02: ")
    keys.follow()
    opened = rack_id("rack-02")
    keys.expect(f"#{opened}-0-0")

    # A rack, its trays and GPUs, then the details of one GPU, and back to it.
    keys.press("ArrowDown", "ArrowDown", "ArrowRight")
    assert keys.is_at(f"#{opened}-2-1")
    assert page.inner_text("#hint").startswith("rack-02/slot-15/gpu-1: ")
    keys.press("Enter")
    page.wait_for_selector("#chain table")
    keys.look("Enter")
    assert "slot-15" in page.inner_text("#chain h3")
    keys.press("Tab")
    assert keys.is_at("a.close")
    keys.tab_to("#chain .copy")
    keys.press("Escape")
    assert keys.is_at(f"#{opened}-2-1")
    assert page.locator("#chain table").count() == 0

    # Search, from anywhere, to another rack.
    keys.press("/")
    page.keyboard.type("blue-node-41")
    page.wait_for_selector("#found [role=option]")
    keys.press("ArrowDown", "ArrowUp")
    keys.follow()
    keys.expect(f"{GPU}[id^={rack_id('rack-41')}]")
    page.wait_for_selector("#chain table")

    # Racks are closed again, and the focus stays among all racks.
    keys.tab_to(".open a", "Shift+Tab")
    keys.follow()
    keys.expect(f"#{cell_id('rack-41')}")

    # Open a rack by its name.
    keys.tab_to(".open input[name=rack]")
    page.keyboard.type("rack-07")
    keys.follow()
    assert page.locator(f"#{rack_id('rack-07')}").count() == 1

    # Findings: their places, commands and runbooks.
    keys.tab_to("#findings .copy")
    keys.press("Enter")
    page.wait_for_selector("#findings .copy:text-is('copied')")
    keys.tab_to("#findings a[href*=runbook]")
    with page.expect_navigation():
        page.keyboard.press("Enter")
    assert "/map/runbook/" in page.url
    keys.tab_to("nav a")
    keys.follow()

    # The meaning of the signs.
    keys.tab_to("#signs summary")
    keys.press("Enter")
    assert page.locator("#signs ul").first.is_visible()

    # The last day: keys move the slider, Enter goes to its time, and the slider keeps the focus.
    page.wait_for_selector("#when")
    keys.tab_to("#when")
    keys.press("ArrowLeft", "ArrowLeft", "PageDown", "ArrowRight")
    assert "/map/at/" not in page.url
    keys.press("End", "ArrowLeft", "ArrowLeft")
    keys.follow()
    assert "/map/at/" in page.url
    keys.expect("#when")
    keys.tab_to(".past a", "Shift+Tab")
    keys.follow()
    assert "/map/at/" not in page.url

    # A time by its name, too.
    keys.tab_to(".when input[name=time]")
    keys.tab_to(".when button")

    # Export, and the theme.
    for stop, file in (("footer a", "rackloom-gpus.csv"), ("#svg", "rackloom-map.svg")):
        keys.tab_to(stop)
        with page.expect_download() as download:
            page.keyboard.press("Enter")
        assert download.value.suggested_filename == file
    keys.tab_to("#theme")
    page.keyboard.type("dark")
    page.wait_for_function("document.documentElement.dataset.theme === 'dark'")
    keys.look("choosing a theme")

    # Out.
    keys.tab_to("header form:not(.search) button", "Shift+Tab")
    with page.expect_navigation():
        page.keyboard.press("Enter")
    assert keys.is_at("input[name=org]")
