"""A tenant carves, orders and releases with the keyboard alone, on a running site."""

import pytest
from tests.browser.axe import violations
from tests.browser.conftest import PATIENCE_MS
from tests.browser.test_keyboard import Keyboard

from rackloom.testing import start_site
from rackloom.web.viewers import COOKIE

pytestmark = pytest.mark.slow

MOST_PLANS = 10
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def site():
    with start_site(racks=1, seed="forms") as running:
        yield running


class Visit:
    """A tenant at the map. On each page, axe finds nothing, and nothing is wider than the screen."""

    def __init__(self, page, pictures_folder) -> None:
        self.page = page
        self.keyboard = Keyboard(page)
        self.pictures_folder = pictures_folder

    def look(self, name: str) -> None:
        assert violations(self.page) == [], name
        wider = self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert wider == 0, name
        width = self.page.viewport_size["width"]
        self.page.screenshot(path=str(self.pictures_folder / f"actions-{name}-{width}.png"), full_page=True)

    def enter(self, selector: str) -> None:
        """Walk to a link or a button and press it."""
        self.keyboard.tab_to(selector)
        with self.page.expect_navigation():
            self.page.keyboard.press("Enter")

    def click(self, selector: str) -> None:
        """Follow a link or send a form."""
        with self.page.expect_navigation():
            self.page.click(selector)

    def type(self, selector: str, text: str) -> None:
        self.keyboard.tab_to(selector)
        self.page.keyboard.type(text)

    @property
    def text(self) -> str:
        return self.page.inner_text("main")


@pytest.fixture
def tenant_at(chromium, site, pictures_folder):
    contexts = []

    def arrive(org: str, viewport, **options) -> Visit:
        context = chromium.new_context(viewport=viewport, **options)
        contexts.append(context)
        context.add_cookies([{"name": COOKIE, "value": f"{org}:{site.token(org)}", "url": site.url}])
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.complaints = []
        page.on("console", lambda message: page.complaints.append(message.text))
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        return Visit(page, pictures_folder)

    yield arrive
    for context in contexts:
        context.close()


@pytest.mark.parametrize(
    ("org", "viewport", "options"),
    [
        ("blue", WIDE, {}),
        ("green", PHONE, {"color_scheme": "dark"}),
        ("red", WIDE, {"java_script_enabled": False}),
    ],
)
def test_from_the_map_to_machines_and_back_by_the_keyboard(tenant_at, site, org, viewport, options):
    visit = tenant_at(org, viewport, **options)
    scripted = options.get("java_script_enabled", True)
    look = visit.look if scripted else lambda _: None
    visit.page.goto(site.url + "/")
    if not scripted:
        visit.enter, visit.type = visit.click, visit.page.fill
    visit.enter("header .act")
    look("empty")
    visit.type("#carve-name", "training")
    visit.enter("#carve button")
    look("plan-carve")
    assert "rackloom vpc create training --partition training" in visit.text
    visit.enter(".confirm button")
    assert "Logical partition training and VPC training are made" in visit.text
    visit.type("#batch-name", "job")
    visit.type("#batch-count", "4")
    visit.enter("#batch button")
    look("plan-batch")
    assert "4 machines of type" in visit.text
    visit.enter(".confirm button")
    assert "4 instances ordered" in visit.text
    # A reload sends nothing again.
    visit.page.reload()
    assert visit.page.locator("#release input").count() == 4
    look("done")
    for number in range(2):
        if scripted:
            visit.keyboard.tab_to("#release input")
            visit.page.keyboard.press("Space")
        else:
            visit.page.locator("#release input").nth(number).check()
    visit.enter("#release button")
    look("plan-release")
    assert "2 instances to be released" in visit.text
    assert "destructive" in visit.text
    visit.enter(".confirm button")
    assert visit.text.count("is being released.") == 2
    look("released")
    assert visit.page.complaints == []


def test_a_plan_that_holds_no_longer_is_shown_anew(tenant_at, site):
    first, second = (tenant_at(org, WIDE) for org in ("cyan", "olive"))
    for visit in (first, second):
        visit.page.goto(site.url + "/map/actions")
        visit.page.fill("#carve-name", "net")
        visit.click("#carve button")
        visit.click(".confirm button")
        visit.page.fill("#batch-name", "job")
        visit.page.fill("#batch-count", "2")
        visit.click("#batch button")
    second.click(".confirm button")
    assert "2 instances ordered" in second.text
    first.click(".confirm button")
    assert "this is the plan now" in first.text
    first.look("stale")
    # Machines that other tests released may become free at any time and change the plan again.
    for _ in range(MOST_PLANS):
        first.click(".confirm button")
        if "2 instances ordered" in first.text:
            return
        assert "this is the plan now" in first.text
    raise AssertionError("each plan was another one")
