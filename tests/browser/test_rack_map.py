"""The map in a real browser: what it shows, by mouse and by keys, in light and in dark, as it changes."""

import base64
from collections import Counter

import msgspec
import pytest
from tests.web.snapshots import AT, examined, snapshot

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.findings import fails, unknown
from rackloom.core.diagnosis.incremental import JoinedShares, join_shares
from rackloom.core.diagnosis.index import at_domain, places_around
from rackloom.web.model import SiteReading, TimelineEntry

pytestmark = pytest.mark.slow

GPU = "rect[role=gridcell]"
HOLDERS = ("acme",) * 10 + (None,) * 3 + ("blue",) * 4 + ("crimson",) * 6


TWO_SAY_SO = "switch controllers A of domain-6 and B of domain-9 contradict one another: both list 72 GPUs"
DOUBTS = {
    "domain-3": {"unknown_since": AT - 90, "problem": "Hello: UNAVAILABLE"},
    "domain-5": {"paused": True},
    "domain-6": {"unknown_since": AT - 30, "disputed": True, "problem": TWO_SAY_SO},
}


def story(racks=8):
    """A site with something of everything."""
    seen = snapshot(racks, 18, HOLDERS, spread=True)
    silent = tuple(msgspec.structs.replace(domain, **DOUBTS.get(domain.uuid, {})) for domain in seen.domains)
    sick = tuple(
        msgspec.structs.replace(gpu, healthy=False) if number == 9 else gpu
        for number, gpu in enumerate(seen.fabric_gpus)
    )
    wired = {"acme-node-0-2": {"pcie_root": "pci0000:ff", "numa": 1}, "acme-node-0-6": {"link": "down"}}
    devices = tuple(
        msgspec.structs.replace(device, **wired.get(device.node, {}))
        if device.name.endswith("nic-1")
        else device
        for device in seen.devices
    )
    seen = msgspec.structs.replace(seen, domains=silent, fabric_gpus=sick, devices=devices)
    findings = (
        fails(
            "clique-label", "node acme-node-0-2", "its label names another partition than the fabric",
            "rackloom admin partition list", evidence=("Kubernetes: domain-0.12", "switch controller: 407"),
            since=AT - 600,
        ),
        unknown("controller", "domain domain-3", "it does not answer", "rackloom admin endpoint list"),
    )  # fmt: skip
    found = [finding for finding in examine(seen) if finding.check != Check.LOGICAL_SPREAD]
    happenings = tuple(
        TimelineEntry(
            at=AT - 30 * n, tenant="acme", what=f"add gpus acme-{n}", where="domain 0", outcome="done"
        )
        for n in range(4)
    )
    return SiteReading(snapshot=seen, findings=(*findings, *found), happenings=happenings)


def style(page, selector, name):
    return page.eval_on_selector(selector, f"one => getComputedStyle(one).{name}")


COUNT = """async (png) => {
  const bytes = Uint8Array.from(atob(png), (one) => one.charCodeAt(0));
  const image = await createImageBitmap(new Blob([bytes], {type: "image/png"}));
  const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
  canvas.drawImage(image, 0, 0);
  const data = canvas.getImageData(0, 0, image.width, image.height).data, found = {};
  for (let at = 0; at < data.length; at += 4) {
    const colour = `rgb(${data[at]}, ${data[at + 1]}, ${data[at + 2]})`;
    found[colour] = (found[colour] || 0) + 1;
  }
  return found;
}"""


def colours(page, path):
    """The number of pixels of each colour in the picture of the racks."""
    page.locator("#racks").screenshot(path=path)
    return Counter(page.evaluate(COUNT, base64.b64encode(path.read_bytes()).decode()))


def rgb(text):
    return tuple(int(part) for part in text.removeprefix("rgb(").removesuffix(")").split(","))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_what_is_on_the_page_is_on_the_screen(open_map, pictures_folder, scheme):
    with open_map(story(), scheme=scheme) as (page, served):
        page.click(f"{GPU} >> nth=53")
        page.wait_for_selector("#chain table")
        page.screenshot(path=pictures_folder / f"rack-map-{scheme}.png")
        found = colours(page, pictures_folder / f"racks-{scheme}.png")
        groups = page.locator("#legend rect[class^=h]").evaluate_all(
            "all => [...new Set(all.map((one) => one.getAttribute('class')))]"
        )
        assert len(groups) == 3
        for group in groups:
            assert found[style(page, f"rect.{group}[role=gridcell]", "fill")] > 2000, group
        ground = rgb(style(page, "body", "backgroundColor"))
        assert (sum(ground) > 600) == (scheme == "light")
        assert page.locator(GPU).count() == 8 * 18 * 4
        assert page.locator(f"{GPU}.q").count() == 2 * 18 * 4
        assert "#hatch" in style(page, f"{GPU}.q", "fill")
        assert page.complaints == []
        assert all(url.startswith(served.url) for url in page.asked)


STATES = {3: "NVLink unknown", 5: "NVLink degraded", 6: "NVLink unknown"}


def test_a_rack_says_in_words_what_is_wrong_with_its_fabric(open_map, pictures_folder):
    with open_map(story(), height=1300) as (page, _):
        racks = page.locator(".rack")
        assert {n: racks.nth(n).locator(".state").inner_text() for n in STATES} == STATES
        assert racks.locator(".state").count() == len(STATES)
        fills = {n: racks.nth(n).locator(".switches rect").first for n in (0, *STATES)}
        looks = {n: fill.evaluate(LOOK) for n, fill in fills.items()}
        assert len(set(looks.values())) == 3, looks
        assert looks[3] == looks[6]
        # Racks stand on one floor, no matter how many lines of text are above them.
        floors = {n: box["y"] + box["height"] for n in (0, 3) if (box := racks.nth(n).bounding_box())}
        assert abs(floors[0] - floors[3]) < 1
        racks.nth(6).locator(GPU).first.click()
        page.wait_for_selector("#chain table")
        assert TWO_SAY_SO in page.inner_text("#chain .findings")
        assert page.evaluate(CLIPPED) == []
        page.screenshot(path=pictures_folder / "rack-map-disputed.png")


CLIPPED = """[...document.querySelectorAll("aside, aside .panel, header, figcaption")]
  .filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.textContent)"""
LOOK = "one => getComputedStyle(one).fill + getComputedStyle(one).stroke"


def test_letters_can_be_read_on_every_colour(open_map):
    with open_map(story(1)) as (page, _):
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            ink, *fills = page.evaluate(PALETTE)
            assert min(contrast(ink, fill) for fill in fills) > 4.5


PALETTE = """["on", "h0", "h1", "h2", "h3", "h4", "h5", "h6", "h7"].map((name) =>
  getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim())"""


def contrast(first, other):
    """The contrast ratio of WCAG 2."""

    def luminance(colour):
        parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(first), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def focused(page):
    return page.evaluate("document.activeElement.id")


def test_the_whole_map_can_be_walked_by_keys(open_map):
    with open_map(story(2)) as (page, _):
        for _ in range(12):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.matches('rect[role=gridcell]')"):
                break
        rack = focused(page).split("-")[0]
        walk = {
            "ArrowRight": "0-1",
            "ArrowDown": "1-1",
            "ArrowLeft": "1-0",
            "ArrowUp": "0-0",
        }
        for key, spot in walk.items():
            page.keyboard.press(key)
            assert focused(page) == f"{rack}-{spot}"
        assert style(page, ":focus", "strokeWidth") == "3.5px"
        page.keyboard.press("PageDown")
        assert focused(page).split("-")[0] != rack
        page.keyboard.press("End")
        assert focused(page).endswith("-17-3")
        page.keyboard.press("Home")
        page.keyboard.press("Enter")
        page.wait_for_selector("#chain table")
        assert "slot-17" in page.inner_text("#chain h3")
        assert page.locator("[aria-selected=true]").get_attribute("id") == f"{rack}-0-0"
        assert page.locator("rect[tabindex='0']").count() == 1


LINKS = [
    "Tenant", "VPC", "Instance", "Machine", "Asked into", "Logical partition", "Partition", "Fabric GPU",
    "Place",
    "GPU", "Clique", "Node", "Claim", "Pod", "ComputeDomain", "Channel", "NIC", "Last transfer",
]  # fmt: skip


def test_a_click_shows_the_whole_chain(open_map):
    with open_map(story(1)) as (page, _):
        page.click(f"{GPU} >> nth=71")
        page.wait_for_selector("#chain table")
        labels = page.locator("#chain tbody th[scope=row]").all_inner_texts()
        assert labels == LINKS
        assert page.locator("#chain time").count() == 4


def test_a_change_appears_by_itself_and_takes_neither_focus_nor_choice(open_map):
    reading = story(2)
    with open_map(reading) as (page, served):
        first = page.locator(GPU).first.get_attribute("id")
        page.click(f"{GPU} >> nth=0")
        page.wait_for_selector("#chain table")
        assert page.locator(f"#{first}.s").count() == 0
        seen = reading.snapshot
        sick = tuple(
            msgspec.structs.replace(gpu, healthy=False) if gpu.place.slot == 17 else gpu
            for gpu in seen.fabric_gpus
        )
        served.show(examined(msgspec.structs.replace(seen, fabric_gpus=sick)))
        page.wait_for_selector(f"#{first}.s")
        page.wait_for_selector("#chain >> text=GPU health")
        assert focused(page) == first
        assert page.locator("[aria-selected=true]").get_attribute("id") == first
        assert page.complaints == []


def test_racks_that_come_and_go_are_drawn(open_map):
    with open_map(story(1)) as (page, served):
        served.show(story(3))
        page.wait_for_selector(".rack:nth-child(3)")
        served.show(story(2))
        page.wait_for_selector(".rack:nth-child(3)", state="detached")
        assert page.locator(".rack").count() == 2


def test_the_page_says_when_it_is_not_current(open_map, pictures_folder):
    with open_map(story(1)) as (page, served):
        served.breaks(True)
        page.wait_for_selector(".reading.stale")
        page.screenshot(path=pictures_folder / "rack-map-not-current.png")
        assert "the store is busy" in page.inner_text("#reading")
        served.breaks(False)
        page.wait_for_selector(".reading:not(.stale)")


def test_the_page_says_when_nobody_feeds_it(open_map):
    with open_map(story(1)) as (page, _):
        page.context.set_offline(True)
        page.evaluate("htmx.find('#stream')._htmx.sse.reader.cancel()")
        page.wait_for_selector("#live[data-state=lost]")
        assert page.inner_text("#lost").startswith("Not live since ")
        assert "grayscale" in style(page, ".stage", "filter")


def test_a_tenant_sees_its_own_and_signs_out(open_map, pictures_folder):
    with open_map(story(2), org="blue", token="blue-token") as (page, served):
        page.screenshot(path=pictures_folder / "rack-map-tenant.png")
        assert page.locator(f"{GPU}.o").count() > 0
        assert "acme" not in page.content()
        page.click("text=Sign out")
        page.wait_for_selector("input[name=token]")
        page.goto(served.url + "/")
        assert page.url.endswith("/map/login")


SEEN = """one => {
  const box = one.getBoundingClientRect();
  const at = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  return one === at || one.contains(at);
}"""


def test_a_narrow_screen_holds_it_without_a_sideways_scroll(open_map, pictures_folder):
    with open_map(story(4), width=390, height=844) as (page, _):
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert page.locator(".gpu").evaluate("one => getComputedStyle(one).position") == "static"
        assert min(page.evaluate(SIZES)) >= 24, "a finger needs as much (WCAG 2.2, 2.5.8)"
        page.click(f"{GPU} >> nth=5")
        page.wait_for_selector("#chain table")
        page.screenshot(path=pictures_folder / "rack-map-narrow.png")
        assert page.locator("#chain h3").evaluate(SEEN), "what was chosen is told where nobody looks"
        assert page.evaluate(CLIPPED) == []


SIZES = """[...document.querySelectorAll("rect[role=gridcell]")].flatMap((one) => {
  const box = one.getBoundingClientRect();
  return [box.width, box.height];
})"""
WHOLLY_SEEN = """one => {
  const box = one.getBoundingClientRect();
  return box.top >= 0 && box.bottom <= innerHeight && box.left >= 0 && box.right <= innerWidth;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("racks", [1, 2, 3])
def test_few_racks_fill_the_screen_and_a_chosen_gpu_hides_nothing(open_map, pictures_folder, racks, scheme):
    # More findings make the column beside the racks longer than the screen.
    reading = story(racks)
    few = msgspec.structs.replace(reading, findings=reading.findings[:2])
    with open_map(few, scheme=scheme) as (page, _):
        page.click(f"{GPU} >> nth=5")
        page.wait_for_selector("#chain table")
        page.screenshot(path=pictures_folder / f"rack-map-{racks}-racks-{scheme}.png")
        for seen in ("#room", "#legend", *(f".rack:nth-child({n + 1}) svg" for n in range(racks))):
            assert page.locator(seen).evaluate(WHOLLY_SEEN), seen
        gpu, room, rack = (
            page.locator(selector).bounding_box() for selector in (".gpu", "#room", ".rack:last-child")
        )
        assert rack["x"] + rack["width"] <= gpu["x"] < gpu["x"] + gpu["width"] <= room["x"]
        assert min(page.evaluate(SIZES)) > 17, "as small as in a room of a hundred racks"
        assert page.evaluate(CLIPPED) == []


# A new user finds out which job a fault affects: the finding names it.
def test_a_finding_leads_to_its_gpu_by_mouse_and_by_keys(open_map):
    reading = story(2)
    chains = join_shares(reading.snapshot, JoinedShares()).chains
    there = next(chain for chain in chains if chain.machine.id == "acme-machine-0-6")
    broken = fails("GPU health", "rack-00/slot-6/gpu-0", "is sick", "mend it", where=places_around((there,)))
    paused = unknown(
        "domain at work", "domain domain-1", "is paused", "go on", where=(at_domain("domain-1"),)
    )
    with open_map(msgspec.structs.replace(reading, findings=(broken, paused), examined_at=AT)) as (
        page,
        served,
    ):
        links = page.locator("#findings a")
        assert links.all_inner_texts() == ["rack-00/slot-6/gpu-0", "rack-01"]
        links.nth(0).click()
        page.wait_for_selector("#chain >> text=acme-machine-0-6")
        first = page.locator("[aria-selected=true]").get_attribute("id")
        assert focused(page) == first
        assert "rack-00/slot-6/gpu-0" in page.locator(f"#{first}").get_attribute("aria-label")
        links.nth(1).focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.closest('.rack').getAttribute('id')") == page.locator(
            ".rack"
        ).nth(1).get_attribute("id")
        links.nth(0).focus()
        page.keyboard.press("Enter")
        assert focused(page) == first
        assert page.complaints == []
        assert all(url.startswith(served.url) for url in page.asked)


def test_the_signs_stay_unfolded_when_the_colours_change(open_map):
    with open_map(story(1)) as (page, served):
        assert not page.locator("#signs ul").first.is_visible()
        page.click("#signs summary")
        served.show(story(2))
        page.wait_for_selector(".rack:nth-child(2)")
        assert page.locator("#signs ul").first.is_visible()


@pytest.mark.parametrize(("width", "height"), [(1500, 700), (390, 844)])
def test_what_is_walked_to_is_seen(open_map, width, height):
    with open_map(story(4), width=width, height=height) as (page, _):
        page.locator(GPU).first.focus()
        for key in ("End", "ArrowUp", "ArrowUp", "PageUp", "Enter", *["ArrowUp"] * 12, "Home", "PageDown"):
            page.keyboard.press(key)
            assert page.locator(":focus").evaluate(SEEN), key


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (1000, 700), (390, 844)])
def test_the_details_are_where_the_user_looks_and_close_with_escape(open_map, pictures_folder, width, height):
    with open_map(story(8), width=width, height=height) as (page, _):
        page.evaluate("scrollTo(0, 0)")
        # The panels beside the racks were read to their end.
        page.evaluate("document.querySelector('aside').scrollTop = 9999")
        last = page.locator(".rack").last.locator(GPU).nth(24)
        last.scroll_into_view_if_needed()
        before = page.evaluate("scrollY")
        last.click()
        page.wait_for_selector("#chain table")
        page.wait_for_timeout(300)
        page.screenshot(path=pictures_folder / f"details-{width}.png")
        assert page.locator("#chain h3").evaluate(SEEN)
        assert page.locator("a.close").evaluate(SEEN)
        assert page.evaluate("scrollY") == before
        page.keyboard.press("Escape")
        assert page.locator("#chain table").count() == 0
        assert page.locator("[aria-selected=true]").count() == 0
        assert focused(page) == last.get_attribute("id")
        assert page.evaluate("scrollY") == before
        page.keyboard.press("Enter")
        page.wait_for_selector("#chain table")
        page.click("a.close")
        assert page.locator("#chain table").count() == 0
        assert focused(page) == last.get_attribute("id")
        assert abs(page.evaluate("scrollY") - before) <= 1
