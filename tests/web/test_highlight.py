"""The filter of the legend: the parts that keep their colours, and drawings that do not depend on it."""

import re

import pytest
from tests.web.snapshots import examined, snapshot
from tests.web.test_overview import sheet_of
from tests.web.test_pages_served import sign_in, visit

from rackloom.web.frames import ColourMode
from rackloom.web.highlight import MARK, filter_style, group_mark

HOLDERS = ("acme", "acme", "blue", None)
RACKS = 10
"""More racks than the map draws in full, so it has an overview."""


def classes(markup, selector):
    """The sets of classes of the elements that begin so."""
    return [set(found.split()) for found in re.findall(rf'<{selector}[^>]* class="([^"]*)"', markup)]


def entries(sheet):
    """Mark and text of each entry of the legend."""
    markup = sheet.panels["legend"].markup
    return dict(
        re.findall(r'<button form="filter" name="only" value="([^"]*)"[^>]*>.*?<span>([^<]*)</span>', markup)
    )


def test_a_group_is_found_in_every_rack_where_it_has_a_gpu():
    # Two trays of acme hide the one of blue in the colours of the rack's cell.
    sheet = sheet_of(snapshot(RACKS, 4, HOLDERS), mode=ColourMode.TENANT)
    marks = {name: mark for mark, name in entries(sheet).items()}
    assert set(marks) == {"acme", "blue", "no tenant"}
    found = classes("".join(part.markup for part in sheet.cells.values()), "a")
    assert len(found) == RACKS
    for rack in found:
        assert {marks["acme"], marks["blue"], "xf"} <= rack
    assert {mark: choice.name for mark, choice in sheet.choices.items()} == entries(sheet)


@pytest.mark.parametrize("mode", list(ColourMode))
def test_every_entry_of_the_legend_is_found_where_it_is_drawn(mode):
    seen = snapshot(2, 4, HOLDERS)
    sheet = sheet_of(seen, mode=mode)
    rects = classes("".join(rack.markup for rack in sheet.racks.values()), "rect")
    # Nothing is wrong here, no tray is partly taken, and every GPU has a clique.
    absent = {"p", "g", "w"} | ({"f"} if mode in (ColourMode.CLIQUE, ColourMode.WORKLOAD) else set())
    for mark in entries(sheet):
        assert MARK.fullmatch(mark)
        assert mark in sheet.choices
        assert mark in absent or any(mark in rect for rect in rects)


def test_the_mark_of_a_group_does_not_depend_on_the_process_or_on_others():
    all_groups = entries(sheet_of(snapshot(RACKS, 4, HOLDERS), mode=ColourMode.TENANT))
    other = entries(sheet_of(snapshot(RACKS, 4, ("blue", None, None, None)), mode=ColourMode.TENANT))
    assert other.items() <= all_groups.items()


def test_a_tenant_finds_its_own_groups_only():
    sheet = sheet_of(snapshot(RACKS, 4, HOLDERS), org="acme", mode=ColourMode.TENANT)
    assert set(entries(sheet).values()) == {"acme", "no tenant, or free"}
    others = [mark for mark in sheet.choices if mark not in entries(sheet)]
    assert others == []
    whole = "".join([*(part.markup for part in sheet.cells.values()), *(text for _, text in sheet.all())])
    assert set(re.findall(r"\bk[0-9a-f]{8}\b", whole)) == {
        mark for mark, name in entries(sheet).items() if name == "acme"
    }


def get(*paths, reading=None):
    async def scenario(client, site):
        await sign_in(client)
        answers = [await client.get(path) for path in paths]
        return answers, site.reads

    return visit(scenario, reading)


def test_the_address_keeps_the_filter_and_the_page_says_what_it_shows():
    mark = group_mark("acme-id")
    ((page,), _) = get(f"/?by=tenant&only={mark}&rack=rack-00")
    assert f'<link id="only" rel="stylesheet" href="/map/only/{mark}.css?hue=' in page.text
    assert re.search(r'<p id="filtered"[^>]*role="status">Only <b>acme</b> is in colour', page.text)
    link = re.search(r'<a href="([^"]*)">Show all</a>', page.text)
    assert link is not None
    assert link[1] == "?by=tenant&amp;rack=rack-00"
    # The rest of the view stays with the filter, and the filter with its colours only.
    assert (
        f'<form id="filter" method="get" data-only="{mark}"><input type="hidden" name="by" value="tenant">'
        in page.text
    )
    assert 'href="?by=health&amp;rack=rack-00"' in page.text


def test_a_page_of_a_filter_is_drawn_by_the_same_painter_as_any_other():
    paths = ["/?by=tenant", f"/?by=tenant&only={group_mark('acme-id')}", "/?by=tenant&only=f"]
    pages, _ = get(*paths)
    drawn = [re.findall(r"<figure.*?</figure>", page.text, re.DOTALL) for page in pages[0:3]]
    assert drawn[0] == drawn[1] == drawn[2] != []
    legends = {re.search(r'<section id="legend".*?</section>', page.text, re.DOTALL)[0] for page in pages}
    assert len(legends) == 1


@pytest.mark.parametrize(
    "only", ["x", "K12345678", "k1234567", "k123456789", "f f", "f,#legend", "<b>", "f{}", "../f", "%00"]
)
def test_what_is_no_mark_filters_nothing(only):
    (page, sheet), _ = get(f"/?only={only}", f"/map/only/{only}.css")
    assert (page.status_code, sheet.status_code) == (200, 404)
    assert 'id="only"' not in page.text
    assert '<p id="filtered" class="filtered" role="status" hidden>' in page.text


def test_a_group_that_is_gone_is_said_to_be():
    ((page,), _) = get(f"/?only={group_mark('nobody')}")
    assert "Only <b>what is not on the map now</b> is in colour" in page.text


def test_the_style_sheet_says_nothing_of_the_site_and_is_kept_for_an_hour():
    async def scenario(client, site):
        return await client.get(f"/map/only/{group_mark('acme-id')}.css?hue=3"), site.reads

    sheet, reads = visit(scenario, examined(snapshot(1, 2, ("acme",))))
    assert (sheet.status_code, reads) == (200, 0)
    assert sheet.headers["content-type"].startswith("text/css")
    assert sheet.headers["cache-control"] == "max-age=3600"
    assert sheet.text == filter_style(group_mark("acme-id"), 3)


@pytest.mark.parametrize("hue", ["8", "-1", "0)", "{}", "00", "٣"])
def test_a_hue_is_one_of_eight(hue):
    ((sheet,), _) = get(f"/map/only/f.css?hue={hue}")
    assert sheet.status_code == 404
