"""Ten states of the screen look as they did, and axe-core finds nothing in any of them.

`make screens` compares all ten, and `make screens UPDATE=yes` keeps the present looks as references. Other
runs compare three, to be cheap. The browser's clock stands still, so that no age or time differs.
"""

import os
from collections.abc import Callable
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from tests.browser.axe import violations
from tests.browser.conftest import OPERATOR, serving
from tests.browser.pictures import blocks_of, different_blocks, reference_blocks
from tests.browser.test_rack_map import GPU, story
from tests.web.snapshots import AT, snapshot

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.snapshot import SiteSnapshot
from rackloom.topology.join_key import SlotKey
from rackloom.web.model import SiteReading

pytestmark = pytest.mark.slow

REFERENCES = Path(__file__).parent / "screens"
WANTED = os.environ.get("RACKLOOM_SCREENS", "")
"""`all` compares all states, `update` writes the references."""
HAS_FONT = """() => {
  const width = (font) => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d");
    canvas.font = `20px ${font}`;
    return canvas.measureText("Rackloom 0123").width;
  };
  return ["serif", "monospace"].every((other) => width(`"DejaVu Sans", ${other}`) !== width(other))
    || width("serif") === width('"DejaVu Sans"');
}"""
STYLE = """(text) => {
  const sheet = new CSSStyleSheet();
  sheet.replaceSync(text);
  document.adoptedStyleSheets = [sheet];
}"""
SICK = SlotKey("serial-0", 13, 1)
FONT = "body { font-family: 'DejaVu Sans' !important; }"


def demo(*, sick: bool) -> SiteReading:
    """Two racks as after the demo: one tenant has all of the first, another a part of the second."""
    seen = snapshot(2, 18, ("blue",) * 18 + ("green",) * 6 + (None,) * 12, spread=True)
    if not sick:
        return SiteReading(snapshot=seen, findings=(), examined_at=AT)
    gpus = tuple(msgspec.structs.replace(gpu, healthy=gpu.place != SICK) for gpu in seen.fabric_gpus)
    seen = msgspec.structs.replace(seen, fabric_gpus=gpus)
    findings = (finding for finding in examine(seen) if finding.check == Check.GPU_HEALTH)
    return SiteReading(snapshot=seen, findings=tuple(findings), examined_at=AT)


def choose_the_sick_gpu(page, _served) -> None:
    page.click("#findings a[data-shows]")
    page.wait_for_selector("#chain table")


def choose_a_gpu(page, _served) -> None:
    page.locator(GPU).nth(9).click()
    page.wait_for_selector("#chain table")


def open_a_rack(page, served) -> None:
    page.goto(f"{served.url}/?by=health&rack=rack-00")
    page.wait_for_selector("#live[data-state=live]")


def lose_the_server(page, _served) -> None:
    page.context.set_offline(True)
    page.evaluate("htmx.find('#stream')._htmx.sse.reader.cancel()")
    page.wait_for_selector("#live[data-state=lost]")


class Screen(msgspec.Struct, frozen=True, kw_only=True):
    """One state of the screen."""

    reading: Callable[[], SiteReading]
    size: tuple[int, int] = (1280, 800)
    scheme: str = "light"
    who: tuple[str, str] | None = ("provider", OPERATOR)
    """Organisation and token, or None for no sign-in."""
    then: Callable = lambda _page, _served: None
    """Runs before the screenshot."""
    often: bool = False
    """Whether the comparison runs with every change."""


SCREENS = {
    "empty": Screen(reading=lambda: SiteReading(snapshot=SiteSnapshot(at=AT, layers=()))),
    "demo": Screen(reading=lambda: demo(sick=False)),
    "fault": Screen(reading=lambda: demo(sick=True), then=choose_the_sick_gpu, often=True),
    "100-racks": Screen(reading=lambda: story(100), then=open_a_rack, often=True),
    "1000-racks": Screen(reading=lambda: story(1000)),
    "phone": Screen(reading=lambda: story(4), size=(390, 844), then=choose_a_gpu, often=True),
    "dark": Screen(reading=lambda: story(8), scheme="dark", then=choose_a_gpu),
    "tenant": Screen(reading=lambda: demo(sick=True), who=("blue", "blue-token"), then=choose_the_sick_gpu),
    "sign-in": Screen(reading=lambda: story(1), who=None),
    "offline": Screen(reading=lambda: demo(sick=False), then=lose_the_server),
}
COMPARED = [name for name, screen in SCREENS.items() if screen.often or WANTED]


@contextmanager
def shown(chromium, screen: Screen):
    """A page in that state."""
    with serving(screen.reading()) as served:
        width, height = screen.size
        context = chromium.new_context(
            color_scheme=screen.scheme, viewport={"width": width, "height": height}
        )
        page = context.new_page()
        page.clock.set_fixed_time(datetime.fromtimestamp(AT + 60, UTC))
        page.goto(served.url)
        if screen.who is not None:
            org, token = screen.who
            page.fill("input[name=org]", org)
            page.fill("input[name=token]", token)
            page.click("button")
            page.wait_for_selector("#live[data-state=live]")
        screen.then(page, served)
        page.evaluate(STYLE, FONT)
        if screen.who is not None:
            page.wait_for_selector("#trends *")
        page.mouse.move(0, 0)
        page.wait_for_timeout(200)
        try:
            yield page
        finally:
            context.close()


@pytest.mark.parametrize("name", COMPARED)
def test_a_state_looks_as_it_did_and_lacks_nothing(chromium, pictures_folder, name):
    with shown(chromium, SCREENS[name]) as page:
        picture = page.screenshot(path=pictures_folder / f"{name}.png")
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= SCREENS[name].size[0]
        if not page.evaluate(HAS_FONT):
            pytest.skip("NO DEJAVU SANS: nothing was compared, because every line has another length")
        found, reference = blocks_of(page, picture), REFERENCES / f"{name}.png"
        if WANTED == "update":
            reference.write_bytes(found.png)
        assert different_blocks(found, reference_blocks(page, reference)) == []


NOISE = (
    "main { transform: translateX(.4px); }",
    "main { transform: translate(.5px, .5px); }",
    "body { text-rendering: geometricPrecision; letter-spacing: .01px; }",
)
CHANGES = (
    "#findings { display: none; }",
    "main { transform: translateX(8px); }",
    "rect.s { stroke: none; }",
    ".sentence { display: none; }",
    "#racks { --h0: #2f7d4f; }",
)


def test_what_is_compared_is_the_look_and_not_the_edges_of_letters(chromium):
    with shown(chromium, SCREENS["fault"]) as page:
        before = blocks_of(page, page.screenshot())

        def different(style):
            page.evaluate(STYLE, FONT + style)
            return different_blocks(blocks_of(page, page.screenshot()), before)

        assert {style: blocks for style in NOISE if (blocks := different(style))} == {}
        assert [style for style in CHANGES if not different(style)] == []
