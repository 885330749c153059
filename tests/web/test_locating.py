"""Findings and operations link to their subjects, and a tenant's links lead only to its objects."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.web.snapshots import AT, snapshot

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.findings import fails
from rackloom.core.diagnosis.index import (
    at_domain,
    at_gpu,
    at_logical,
    at_machine,
    at_node,
    at_partition,
    places_around,
)
from rackloom.web.frames import ColourMode
from rackloom.web.live import LiveReading
from rackloom.web.model import SiteMap, SiteReading, TimelineEntry, site_map
from rackloom.web.painters import Painter
from rackloom.web.places import RackPlaces, locate, places_named
from rackloom.web.racks import find_gpu, rack_id
from rackloom.web.render import shorten_uuids

HOLDERS = ("acme", "acme", None, "blue")
UUID = "4ee58484-58e7-47c7-a32b-89833e58daf4"


def led(whole: SiteMap, *where: str):
    return locate(where, places_named(map(RackPlaces, whole.racks), where))


def seat_of(whole: SiteMap, id_: str):
    rack, tray, gpu = id_.split("-")
    return find_gpu(whole, (rack, int(tray), int(gpu)))


@given(number=st.integers(0, 31))
def test_what_is_about_a_gpu_leads_to_that_gpu(number):
    whole = site_map(SiteReading(snapshot=snapshot(2, 4, HOLDERS)))
    seat = whole.gpus[number]
    assert seat.chain is not None
    (link,) = led(whole, *places_around((seat.chain,))).named
    assert seat_of(whole, link.id) is seat
    assert link.words == str(seat.place.name)


@pytest.mark.parametrize("name", [at_node("acme-node-1-0"), at_machine("acme-machine-1-0")])
def test_what_is_about_a_tray_leads_to_the_tray(name):
    whole = site_map(SiteReading(snapshot=snapshot(2, 4, HOLDERS)))
    (link,) = led(whole, at_domain("domain-1"), name).named
    assert (link.words, seat_of(whole, link.id).place.name.gpu) == ("rack-01/slot-0", 0)


def test_what_is_about_a_domain_or_a_partition_leads_to_its_racks():
    whole = site_map(SiteReading(snapshot=snapshot(2, 4, (*HOLDERS, *HOLDERS[1:], "lonely"))))
    for name in (at_domain("domain-1"), at_partition("domain-1", "acme-1-nvl"), at_logical("lonely-lp-1")):
        (link,) = led(whole, name).named
        assert (link.id, link.words) == (rack_id("rack-01"), "rack-01")


def test_every_name_of_a_gpu_leads_to_all_racks_that_have_it():
    whole = site_map(SiteReading(snapshot=snapshot(2, 4, HOLDERS)))
    racks = [RackPlaces(rack) for rack in whole.racks]
    names = {name for rack in racks for name in rack.by_name}
    assert {name.split(" ")[0] for name in names} == {
        *("gpu", "device", "pod", "node", "machine", "partition", "logical", "domain")
    }
    for name in names:
        spots = [spot for rack in racks for spot in rack.by_name.get(name, ())]
        assert places_named(racks, {name}) == {name: spots}


def test_of_many_places_the_first_are_named_and_the_rest_is_counted():
    whole = site_map(SiteReading(snapshot=snapshot(1, 9)))
    found = led(whole, *(at_machine(f"free-machine-0-{slot}") for slot in range(9)))
    assert ([chain.words for chain in found.named], found.more) == (
        ["rack-00/slot-0", "rack-00/slot-1", "rack-00/slot-2"],
        6,
    )
    assert led(whole, at_node("gone"), "a host") == locate((), {})


def test_a_finding_of_the_doctor_shows_its_check_and_where_it_is():
    seen = snapshot(2, 4, HOLDERS)
    down = tuple(
        msgspec.structs.replace(device, link="down")
        if (device.node, device.name) == ("acme-node-1-1", "acme-nic-2")
        else device
        for device in seen.devices
    )
    seen = msgspec.structs.replace(seen, devices=down)
    (found,) = [finding for finding in examine(seen) if finding.check == Check.NIC_LINK]
    whole = site_map(SiteReading(snapshot=seen, findings=(found,), examined_at=AT))
    panel = (
        Painter(None, ColourMode.PARTITION, 9)
        .follow(LiveReading(number=1, whole=whole))
        .panels["findings"]
        .markup
    )
    assert f'<span class="check">{Check.NIC_LINK}</span>' in panel
    (link,) = re.findall('<a href="[^"]+#([^"]+)" data-shows="([^"]+)">([^<]+)</a>', panel)
    assert link[0] == link[1]
    assert link[2] == "rack-01/slot-1/gpu-2"
    assert seat_of(whole, link[0]).chain.nics[0].link == "down"


def links(panel):
    return set(re.findall('data-shows="([^"]+)"', panel))


@pytest.mark.slow
@given(holders=st.lists(st.sampled_from(["acme", "blue", None]), min_size=1, max_size=6).map(tuple))
def test_a_tenant_is_led_to_its_own_gpus_and_racks_alone(holders):
    seen = snapshot(2, 3, holders)
    everything = tuple(
        {
            *places_around(site_map(SiteReading(snapshot=seen)).gpus[n].chain for n in range(24)),
            *(at_domain(f"domain-{rack}") for rack in range(2)),
            at_gpu("domain-0", 1),
        }
    )
    happenings = tuple(
        TimelineEntry(at=AT, tenant="acme", what="", where="", places=(place,), outcome="done")
        for place in everything
    )
    found = fails("check", "all", "is wrong", "mend", where=everything)
    whole = site_map(SiteReading(snapshot=seen, findings=(found,), examined_at=AT, happenings=happenings))
    sheet = Painter("acme", ColourMode.TENANT, 9).follow(LiveReading(number=1, whole=whole))
    own = {
        id_
        for rack in sheet.whole.racks
        for tray, seats in enumerate(rack.trays)
        for gpu, seat in enumerate(seats)
        if seat.chain is not None
        for id_ in (rack_id(rack.name), f"{rack_id(rack.name)}-{tray}-{gpu}")
    }
    for panel in sheet.panels.values():
        assert links(panel.markup) <= own
    assert all("domain-" not in part.markup for part in sheet.racks.values())


def test_an_operation_says_when_how_long_and_where_and_shortens_ids():
    happened = TimelineEntry(
        at=AT, seconds=2.25, tenant="acme", what=f"add gpus rl-{UUID}: asked", where=f"domain {UUID}",
        places=(at_domain("domain-1"),), outcome="done",
    )  # fmt: skip
    whole = site_map(SiteReading(snapshot=snapshot(2, 1, ("acme",)), happenings=(happened,)))
    panel = (
        Painter(None, ColourMode.PARTITION, 9)
        .follow(LiveReading(number=1, whole=whole))
        .panels["timeline"]
        .markup
    )
    assert "2026-09-21 14:13:20 UTC" in panel
    assert "took 2.2 s" in panel
    assert f'rl-<abbr title="{UUID}">4ee58484</abbr>: asked' in panel
    assert links(panel) == {rack_id("rack-01")}


def test_only_ids_are_shortened_and_nothing_becomes_markup():
    assert (
        shorten_uuids(f"<b>{UUID}</b> 4ee58484")
        == f'&lt;b&gt;<abbr title="{UUID}">4ee58484</abbr>&lt;/b&gt; 4ee58484'
    )


def test_operators_read_the_domain_of_a_rack_in_its_caption():
    whole = site_map(SiteReading(snapshot=snapshot(1, 1, ("acme",))))
    caption = '<figcaption title="domain domain-0">'
    for org, count in ((None, 1), ("acme", 0)):
        sheet = Painter(org, ColourMode.PARTITION, 9).follow(LiveReading(number=1, whole=whole))
        assert "".join(part.markup for part in sheet.racks.values()).count(caption) == count
