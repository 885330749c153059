"""The map and the doctor agree about NICs, even if several serve one GPU."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.web.snapshots import AT, examined, findings_on, snapshot

from rackloom.core.diagnosis.catalogue import Check
from rackloom.core.diagnosis.examination import examine
from rackloom.core.diagnosis.findings import CheckState as Found
from rackloom.topology.join_key import Fact, GpuKey, Source
from rackloom.web.chain import layer_reports
from rackloom.web.frames import ColourMode, MapColours, rack_frames
from rackloom.web.model import site_map
from rackloom.web.racks import drawn_rack
from rackloom.web.render import render_chain, render_rack

OWN, OTHER = "0000:a1:00.0", "0000:a2:00.0"


def two_nics(own="up", other="up"):
    """A tray whose first GPU has two NICs and names the second as its partner."""
    seen = snapshot(1, 1, ("acme",))
    gpu, nic = seen.devices[:2]
    pair = [
        msgspec.structs.replace(nic, name=name, link=link, key=GpuKey(pci_address=Fact(at, Source.SYSFS)))
        for name, link, at in (("mlx5_0", other, OTHER), ("mlx5_1", own, OWN))
    ]
    named = msgspec.structs.replace(gpu, partner="mlx5_1", partner_address=OWN)
    return msgspec.structs.replace(seen, devices=(named, *pair, *seen.devices[2:]))


@pytest.mark.parametrize(
    ("own", "other", "drawn"),
    [
        ("up", "up", "well"),
        ("down", "up", "degraded"),
        ("up", "down", "degraded"),
        ("unknown", "up", "unknown"),
        ("up", "unknown", "unknown"),
        ("unknown", "down", "degraded"),
    ],
)
def test_the_worst_link_of_two_is_drawn_and_both_are_named(own, other, drawn):
    seen = two_nics(own, other)
    whole = site_map(examined(seen))
    (frame,) = rack_frames(whole).values()
    found = drawn_rack(frame, ColourMode.TENANT, MapColours())
    assert [cell.nic for cell in found.trays[0].cells] == [drawn, "well", "well", "well"]
    assert f"NIC {drawn}" in re.findall('aria-label="([^"]*)"', render_rack(found, 1))[1]
    seat = whole.gpus[0]
    links = {
        value: note
        for report in layer_reports(whole, seat)
        for label, value, note in report.links
        if label == "NIC"
    }
    # The names count by PCI address, and the device's own name stands beside each.
    assert [name.rpartition("/")[2] for name in links] == ["nic-3", "nic-4"]
    assert [note.split(",")[0] for note in links.values()] == ["mlx5_1", "mlx5_0"]
    assert [("link down" in note) for note in links.values()] == [own == "down", other == "down"]
    assert "mlx5_0" in render_chain(seat, layer_reports(whole, seat))


@pytest.mark.parametrize(("rate", "drawn"), [(400, "well"), (200, "degraded"), (None, "well")])
def test_a_link_that_is_slower_than_those_beside_it_is_drawn_and_named(rate, drawn):
    seen = two_nics()
    fast = [
        msgspec.structs.replace(device, gbps=400) if device.kind == "nic" else device
        for device in seen.devices
    ]
    fast[2] = msgspec.structs.replace(fast[2], gbps=rate)
    seen = msgspec.structs.replace(seen, devices=tuple(fast))
    whole = site_map(examined(seen, findings=examine(seen), examined_at=AT))
    (frame,) = rack_frames(whole).values()
    found = drawn_rack(frame, ColourMode.TENANT, MapColours())
    assert [cell.nic for cell in found.trays[0].cells] == [drawn, "well", "well", "well"]
    assert f'class="nic {drawn}"' in render_rack(found, 1)
    reported = {(finding.check, finding.state) for finding in findings_on(whole, whole.gpus[0])}
    assert ((Check.NIC_LINK, Found.FAILS) in reported) == (drawn == "degraded")
    found = findings_on(whole, whole.gpus[0])
    page = render_chain(whole.gpus[0], layer_reports(whole, whole.gpus[0]), found)
    assert ("it runs at 200 Gb/s, its siblings at 400" in page) == (drawn == "degraded")


LINKS = st.sampled_from(["up", "ACTIVE", "down", "unknown", None])
RATES, PLACES = st.sampled_from([None, 200, 400]), st.sampled_from([None, 0, 1])
NICS = st.fixed_dictionaries({"link": LINKS, "numa": PLACES, "gbps": RATES})


@given(own=NICS, other=NICS, numa=PLACES, path=st.sampled_from([None, "SYS", "NODE"]))
def test_what_the_doctor_objects_to_in_a_nic_is_drawn_and_nothing_else(own, other, numa, path):
    seen = two_nics()
    gpu, first, two, *rest = seen.devices
    devices = (
        msgspec.structs.replace(gpu, numa=numa, pcie_root="coupled", partner_class=path),
        msgspec.structs.replace(first, **own),
        msgspec.structs.replace(two, **other),
        *rest,
    )
    seen = msgspec.structs.replace(seen, devices=devices)
    whole = site_map(examined(seen, findings=examine(seen), examined_at=AT))
    reported = {(finding.check, finding.state) for finding in findings_on(whole, whole.gpus[0])}
    (frame,) = rack_frames(whole).values()
    drawn = drawn_rack(frame, ColourMode.TENANT, MapColours()).trays[0].cells[0].nic
    wrong = {(Check.NIC_LINK, Found.FAILS), (Check.NIC_ALIGNED, Found.FAILS)} & reported
    untold = (Check.NIC_LINK, Found.UNKNOWN) in reported
    assert drawn == ("degraded" if wrong else "unknown" if untold else "well")
