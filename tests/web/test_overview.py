"""The site on one screen: numbers that never exceed the known state, and a cell for each rack."""

import re

import msgspec
import pytest
from tests.web.snapshots import AT, GPUS, examined, snapshot
from tests.web.test_pages_served import events, parts, position, sick, sign_in, visit

from rackloom.core.diagnosis.findings import fails
from rackloom.core.diagnosis.snapshot import Layer, LayerStatus
from rackloom.web.frames import ColourMode, preferred_hue
from rackloom.web.live import LiveReading, unread_map
from rackloom.web.model import site_map
from rackloom.web.overview import cell_id
from rackloom.web.painters import OVERVIEW_ID, RACKS_ID, Painter
from rackloom.web.racks import rack_id
from rackloom.web.view import MAX_OPENED, WHOLE_RACKS

MANY = WHOLE_RACKS + 4
HOLDERS = ("acme", None, "blue", "acme")
NUMBERS = ("Needs attention", "GPUs in use", "Healthy", "Largest job that fits", "Fastest proved path")
OWN_NUMBERS = ("Needs attention", "Your GPUs used by pods", "Your healthy GPUs", *NUMBERS[3:])


def sheet_of(seen, org=None, mode=ColourMode.USE, opened=(), **reading):
    whole = site_map(examined(seen, **reading))
    return Painter(org, mode, 9).follow(LiveReading(number=1, whole=whole), opened)


def text(markup):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", "", markup)).strip()


def summary(sheet):
    """The sentence, and value and note of each number."""
    markup = sheet.panels["summary"].markup
    sentence = text(markup[: markup.index("<dl")].partition(">")[2])
    found = re.findall(r"<dt>([^<]+)</dt><dd><b>([^<]+)</b> <i>(.*?)</i>", markup)
    return sentence, {label: (value, text(note)) for label, value, note in found}


def doubtful(seen, *layers):
    found = tuple(
        LayerStatus(layer=status.layer, at=AT, unknown_since=AT - 60) if status.layer in layers else status
        for status in seen.layers
    )
    return msgspec.structs.replace(seen, layers=found)


FILTERED_BY = re.compile(r" (k[0-9a-f]{8}|x[a-z])(?![^ ])")


def cells(sheet):
    """Style, mark and words of each rack, without the classes by which filters find it."""
    found = [
        re.search(r'class="([^"]*)".*?title="([^"]*)".*?(?:<b>(.)</b>)?</a>', part.markup)
        for part in sheet.cells.values()
    ]
    return [(FILTERED_BY.sub("", cell[1]), cell[3] or "", cell[2].partition(": ")[2]) for cell in found]


def test_a_site_where_all_is_well_says_so_in_a_sentence_and_five_numbers():
    sentence, numbers = summary(sheet_of(snapshot(2, 4, HOLDERS), findings=(), examined_at=AT))
    assert sentence == "Nothing needs attention: all 32 GPUs in 2 racks are healthy."
    assert numbers == {
        "Needs attention": ("0", "at 14:13:20 UTC"),
        "GPUs in use": ("24", "of 32"),
        "Healthy": ("32", "of 32"),
        "Largest job that fits": ("4 GPUs", "1 trays of one domain"),
        "Fastest proved path": ("46.2 GB/s", "by mlx5_0:1 at 14:08:20 UTC"),
    }


def test_what_is_wrong_comes_first():
    found = fails("check", "node n", "is wrong", "mend it")
    sentence, numbers = summary(sheet_of(snapshot(1, 2, HOLDERS), findings=(found, found), examined_at=AT))
    assert sentence == "2 things need attention, first: node n."
    assert numbers["Needs attention"][0] == "2"


def test_before_the_doctor_has_looked_nothing_is_called_well():
    sentence, numbers = summary(sheet_of(sick(snapshot(1, 2, HOLDERS)), findings=None))
    assert sentence == "The site has not been examined yet."
    assert numbers["Needs attention"] == ("unknown", "not examined yet")
    assert numbers["Healthy"] == ("unknown", "")
    _, numbers = summary(sheet_of(sick(snapshot(1, 2, HOLDERS))))
    assert numbers["Healthy"] == ("7", "of 8")


SINCE = "since 14:12:20 UTC"
DOUBTS = {
    Layer.FABRIC: {"GPUs in use": ("6", "of 8"), "Healthy": ("unknown", SINCE)},
    Layer.SITE: {},
    Layer.CLUSTER: {"Healthy": ("unknown", SINCE)},
    Layer.TRANSFER: {"Fastest proved path": ("unknown", SINCE)},
}


@pytest.mark.parametrize("layer", Layer)
def test_what_a_layer_does_not_say_is_unknown_since_then(layer):
    seen = snapshot(1, 2, ("acme", None))
    sentence, numbers = summary(sheet_of(doubtful(seen, layer)))
    assert sentence == f"One thing is unknown: Layer {layer} cannot be read {SINCE}"
    if layer is Layer.TRANSFER:
        assert numbers["Fastest proved path"] == ("unknown", SINCE)
        return
    assert numbers["GPUs in use"] == ("4", f"of 8, 4 unknown {SINCE}")
    assert numbers["Largest job that fits"] == ("unknown", f"1 trays {SINCE}")
    if layer in (Layer.FABRIC, Layer.CLUSTER):
        assert numbers["Healthy"] == ("unknown", SINCE)


def test_a_silent_domain_makes_its_own_gpus_unknown():
    seen = snapshot(2, 2, HOLDERS)
    silent = (msgspec.structs.replace(seen.domains[0], unknown_since=AT - 60), seen.domains[1])
    _, numbers = summary(sheet_of(msgspec.structs.replace(seen, domains=silent)))
    assert numbers["Healthy"] == ("8", f"of 16, 8 unknown {SINCE}")


def test_a_site_that_cannot_be_read_has_no_number():
    painter, whole = Painter(None, ColourMode.USE, 9), site_map(examined(snapshot(1, 2, HOLDERS)))
    painter.follow(LiveReading(number=1, whole=whole))
    lost = unread_map(whole, AT - 60, "busy")
    sheet = painter.follow(LiveReading(number=2, whole=lost, unread_since=AT - 60, problem="busy"))
    sentence, numbers = summary(sheet)
    layers = " and ".join(Layer)
    assert sentence == f"One thing is unknown: Layer {layers} cannot be read {SINCE}"
    assert {value for value, _ in numbers.values()} == {"unknown"}
    assert numbers["GPUs in use"] == ("unknown", f"last known: 4 {SINCE}")


# A new user reads the fastest proved path, or that there is none yet, in the fifth number.
def test_only_a_promise_that_was_kept_proves_a_path():
    seen = snapshot(1, 2, ("acme",))
    slow = msgspec.structs.replace(seen.transfers[0], gigabytes_per_second=20.0)
    fast = msgspec.structs.replace(seen.transfers[1], gigabytes_per_second=90.0, verdict="does not hold")
    _, numbers = summary(sheet_of(msgspec.structs.replace(seen, transfers=(slow, fast))))
    assert numbers["Fastest proved path"] == ("20.0 GB/s", "by mlx5_0:1 at 14:08:20 UTC")
    _, numbers = summary(sheet_of(msgspec.structs.replace(seen, transfers=(fast,))))
    assert numbers["Fastest proved path"][0] == "none yet"


def test_a_tenants_numbers_are_those_of_its_own_gpus():
    seen = sick(snapshot(2, 4, ("blue", "acme", "blue", None)))
    fast = tuple(
        msgspec.structs.replace(transfer, gigabytes_per_second=90.0)
        if transfer.node.startswith("blue")
        else transfer
        for transfer in seen.transfers
    )
    seen = msgspec.structs.replace(seen, transfers=fast)
    sentence, numbers = summary(sheet_of(seen, org="acme"))
    assert sentence == "Nothing needs attention: all your 8 GPUs are healthy."
    assert tuple(numbers) == OWN_NUMBERS
    assert numbers["Your GPUs used by pods"] == ("8", "of 8")
    assert numbers["Your healthy GPUs"] == ("8", "of 8")
    assert numbers["Needs attention"] == ("0", "at 14:13:20 UTC")
    assert numbers["Fastest proved path"][0] == "none yet", "its transfers are older than its records"
    sentence, _ = summary(sheet_of(seen, org="blue"))
    assert sentence == "One thing needs attention: rack-00/slot-0/gpu-0 is sick, by its switch controller."
    assert summary(sheet_of(seen, org="nobody"))[0] == "You have no GPUs here yet."


def test_a_site_of_few_racks_is_drawn_whole_and_a_larger_one_when_asked():
    few, many = sheet_of(snapshot(WHOLE_RACKS, 2)), sheet_of(snapshot(WHOLE_RACKS + 1, 2))
    assert (len(few.racks), len(few.cells)) == (WHOLE_RACKS, 0)
    assert (len(many.racks), len(many.cells)) == (0, WHOLE_RACKS + 1)
    opened = sheet_of(snapshot(WHOLE_RACKS + 1, 2), opened=[rack_id("rack-03"), "r-of-nowhere"])
    assert list(opened.racks) == [rack_id("rack-03")]


def test_a_cell_says_what_its_rack_holds():
    seen = sick(snapshot(MANY, 4, HOLDERS))
    silent = (
        seen.domains[0],
        msgspec.structs.replace(seen.domains[1], unknown_since=AT - 60),
        *seen.domains[2:],
    )
    seen = msgspec.structs.replace(seen, domains=silent)
    used, health, tenants = (
        cells(sheet_of(seen, mode=mode)) for mode in (ColourMode.USE, ColourMode.HEALTH, ColourMode.TENANT)
    )
    assert used[0] == ("u3 s", "!", "12 in use, 4 free, 1 with a problem")
    assert used[2] == ("u3", "", "12 in use, 4 free")
    assert [style for style, _, _ in health[:3]] == ["p s", "q v", "f"]
    assert health[1] == ("q v", "", "16 unknown")
    assert tenants[2][1:] == ("", "8 of acme, 4 of blue, 4 in no tenant, or free")


def test_a_full_rack_differs_from_one_with_room():
    full, room, free = (
        cells(sheet_of(snapshot(MANY, 18, holders)))[0][0]
        for holders in (("acme",), ("acme",) * 17 + (None,), (None,))
    )
    assert (full, room, free) == ("u4", "u3", "u0")


def test_fragmentation_shows_free_gpus_of_which_no_tray_can_be_had():
    seen = snapshot(MANY, 1, ("acme",))
    free = tuple(msgspec.structs.replace(machine, instance=None, tenant=None) for machine in seen.machines)
    one_used = tuple(use for use in seen.uses if use.device == "gpu-0" or "node-0" not in use.pool)
    found = cells(
        sheet_of(msgspec.structs.replace(seen, machines=free, uses=one_used), mode=ColourMode.FRAGMENTATION)
    )
    assert found[0] == ("w3", "", "1 in use, 3 stranded in partly taken trays")
    assert found[1] == ("w0", "", "4 in use")


def test_a_tenants_overview_shows_its_own_racks_and_names_nobody():
    seen = sick(snapshot(MANY, 4, ("acme", None, "blue", "blue")))
    found = cells(sheet_of(seen, org="acme", mode=ColourMode.TENANT))
    assert {cell[2] for cell in found[1:]} == {
        "4 of acme, 8 in use by somebody else, 4 in no tenant, or free"
    }
    assert all(style.startswith("h") for style, _, _ in found)
    assert "blue" not in "".join(part.markup for part in sheet_of(seen, org="acme").cells.values())
    # The sick GPU is acme's, and blue does not learn of it.
    health = cells(sheet_of(seen, org="blue", mode=ColourMode.HEALTH))
    assert {style for style, _, _ in health} == {"f"}
    free = snapshot(MANY, 2, (None, "acme", *[None] * 40))
    health = cells(sheet_of(free, org="blue", mode=ColourMode.HEALTH))
    assert [style for style, _, _ in health[:2]] == ["o", "f"], "in use by somebody else, and free"


def test_a_change_sends_one_cell_and_the_opened_racks_only():
    seen = snapshot(MANY, 2, HOLDERS)
    painter = Painter(None, ColourMode.HEALTH, 9)
    opened = [rack_id("rack-03")]
    painter.follow(LiveReading(number=1, whole=site_map(examined(seen))), opened)
    after = LiveReading(number=2, whole=site_map(examined(sick(seen))))
    assert [id_ for id_, _ in painter.follow(after, opened).since(1)] == [
        cell_id("rack-00"),
        "summary",
        "findings",
    ]
    mine = painter.follow(after, [rack_id("rack-00")])
    assert [id_ for id_, _ in mine.since(1)] == [
        rack_id("rack-00"),
        cell_id("rack-00"),
        "summary",
        "findings",
    ]


def test_when_most_racks_change_the_overview_is_sent_at_once():
    seen = snapshot(MANY, 2, HOLDERS)
    painter = Painter(None, ColourMode.HEALTH, 9)
    painter.follow(LiveReading(number=1, whole=site_map(examined(seen))))
    lost = doubtful(seen, Layer.FABRIC)
    after = painter.follow(LiveReading(number=2, whole=site_map(examined(lost))))
    ids = [id_ for id_, _ in after.since(1)]
    assert OVERVIEW_ID in ids
    assert not any(id_ in after.cells for id_ in ids)


@pytest.mark.parametrize("mode", [ColourMode.TENANT, ColourMode.PARTITION, ColourMode.WORKLOAD])
def test_a_tenant_has_the_colour_of_its_name_in_every_process(mode):
    assert [preferred_hue(name) for name in ("blue", "green-team", "Orange")] == [0, 2, 1]
    hues = []
    for holders in (("zebra", "blue"), ("blue", "ant", "zebra")):
        legend = sheet_of(snapshot(1, 6, holders), mode=mode).panels["legend"].markup
        hues.append(dict(re.findall(r'class="(h\d)".*?<span>([^<]+)</span>', legend)))
    assert all(found["h0"].startswith("blue") for found in hues), "whoever comes before it"


# Over a socket.


def test_the_page_of_a_large_site_has_cells_and_draws_what_its_address_opens():
    async def scenario(client, _):
        await sign_in(client)
        first = (await client.get("/")).text
        gpu = f"{rack_id('rack-02')}-0-1"
        opened = (await client.get(f"/?by=tenant&rack=rack-05&gpu={gpu}")).text
        return first, opened, gpu

    first, opened, gpu = visit(scenario, examined(snapshot(MANY, 3, HOLDERS)))
    assert 'aria-current="page">use' in first
    assert first.count('role="gridcell"') == 0
    assert len(re.findall(r'<a id="c\w+"', first)) == MANY
    assert opened.count('role="gridcell"') == 2 * 3 * GPUS
    assert "rack-02/slot-2/gpu-1" in opened, "the chosen GPU is on the page without a script"
    query = f"rack=rack-05&amp;rack=rack-02&amp;gpu={gpu}"
    assert f"/map/live?by=tenant&amp;{query}&amp;after=" in opened
    assert f'href="?by=health&amp;{query}"' in opened
    assert f'href="?by=tenant&amp;rack=rack-05#{cell_id("rack-02")}">close rack-02' in opened


@pytest.mark.parametrize(
    "query", ["rack=nowhere", "gpu=r0-0-0", "gpu=%00", "by=%3Cb%3E", "rack=%3Cscript%3E"]
)
def test_an_address_of_nothing_is_a_page_too(query):
    async def scenario(client, _):
        await sign_in(client)
        return await client.get(f"/?{query}")

    answer = visit(scenario, examined(snapshot(MANY, 1)))
    assert answer.status_code == 200
    assert "<script>" not in answer.text
    assert answer.text.count('role="gridcell"') == 0


def test_an_address_opens_few_racks_only():
    async def scenario(client, _):
        await sign_in(client)
        return (await client.get("/?" + "&".join(f"rack=rack-{n:02}" for n in range(MANY)))).text

    page = visit(scenario, examined(snapshot(MANY, 1)))
    assert page.count('class="rack"') == MAX_OPENED


def test_a_stream_sends_what_its_viewer_has_on_the_screen():
    seen = snapshot(MANY, 2, HOLDERS)

    def changed(query):
        async def scenario(client, site):
            await sign_in(client)
            at = position((await client.get(f"/?{query}")).text)
            async with client.stream("GET", f"/map/live?{query}&after={at}") as stream:
                site.show(examined(sick(seen)))
                return parts((await events(stream, 1))[0][1])

        return visit(scenario, examined(seen))

    overview, opened = changed("by=use"), changed("by=use&rack=rack-00")
    assert cell_id("rack-00") in overview
    assert rack_id("rack-00") not in overview
    assert {cell_id("rack-00"), rack_id("rack-00")} <= set(opened)
    assert RACKS_ID not in opened
