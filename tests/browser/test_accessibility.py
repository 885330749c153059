"""axe-core finds nothing on the map, in light and in dark, on a wide screen and on a phone."""

import pytest
from tests.browser.axe import violations
from tests.browser.conftest import OPERATOR, serving
from tests.browser.test_rack_map import GPU, story

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("racks", "width"), [(8, 1500), (8, 390), (60, 1280), (1000, 1280)])
def test_nothing_is_lacking(open_map, racks, width, scheme):
    with open_map(story(racks), scheme=scheme, width=width, height=900) as (page, _):
        assert violations(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("mode", ["health", "tenant", "workload"])
def test_nothing_is_lacking_in_any_colours(open_map, mode, scheme):
    with open_map(story(20), scheme=scheme, width=1280) as (page, served):
        page.goto(f"{served.url}/?by={mode}&rack=rack-03")
        page.wait_for_selector("#live[data-state=live]")
        assert violations(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_lacking_while_one_searches_or_reads_details(open_map, scheme):
    with open_map(story(), scheme=scheme) as (page, _):
        page.locator(GPU).nth(9).click()
        page.wait_for_selector("#chain table")
        page.keyboard.press("/")
        page.keyboard.type("blue")
        page.wait_for_selector("#found [role=option]")
        assert violations(page) == []
        page.keyboard.type("nothing")
        page.wait_for_selector("#found p")
        assert violations(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_lacking_beside_the_map(chromium, scheme):
    with serving(story(1)) as served:
        context = chromium.new_context(color_scheme=scheme)
        page = context.new_page()
        page.goto(served.url + "/")
        assert violations(page) == []
        page.fill("input[name=org]", "provider")
        page.fill("input[name=token]", OPERATOR)
        with page.expect_navigation():
            page.click("button")
        for path in ("/map/runbook/gpu-health", "/map/runbook/none"):
            page.goto(served.url + path)
            assert violations(page) == []
        context.close()
