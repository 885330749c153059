"""The map and the doctor tell one story of NICs, however many serve a GPU."""

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.web.pictures import AT, picture

from rackloom.prove.doctor import names
from rackloom.prove.doctor.examine import examine
from rackloom.prove.doctor.findings import State as Found
from rackloom.topology.facts import Fact, Source
from rackloom.topology.identity import GpuKey
from rackloom.web.colouring import Colours, Mode
from rackloom.web.details import objections, said
from rackloom.web.frames import frames
from rackloom.web.racks import drawn_rack
from rackloom.web.reading import Reading
from rackloom.web.render import chain, rack
from rackloom.web.scene import scene

OWN, OTHER = "0000:a1:00.0", "0000:a2:00.0"


def two_nics(own="up", other="up"):
    """A tray whose first GPU has two NICs, of which it names the second as its own."""
    seen = picture(1, 1, ("acme",))
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
        ("up", "up", "aligned"),
        ("down", "up", "down"),
        ("up", "down", "down"),
        ("unknown", "up", "unknown"),
        ("up", "unknown", "unknown"),
        ("unknown", "down", "down"),
    ],
)
def test_the_worst_link_of_two_is_drawn_and_both_are_named(own, other, drawn):
    seen = two_nics(own, other)
    whole = scene(Reading(picture=seen))
    (frame,) = frames(whole).values()
    found = drawn_rack(frame, Mode.TENANT, Colours())
    assert [cell.nic for cell in found.trays[0].cells] == [drawn, "aligned", "aligned", "aligned"]
    assert f"NIC {drawn}" in re.findall('aria-label="([^"]*)"', rack(found, 1))[1]
    seat = whole.seats[0]
    links = {value: note for one in said(whole, seat) for label, value, note in one.links if label == "NIC"}
    assert list(links) == ["mlx5_1", "mlx5_0"]
    assert [("its link is down" in note) for note in links.values()] == [own == "down", other == "down"]
    assert "mlx5_0" in chain(seat, said(whole, seat))


@pytest.mark.parametrize(("rate", "drawn"), [(400, "aligned"), (200, "slow"), (None, "aligned")])
def test_a_link_that_is_slower_than_those_beside_it_is_drawn_and_named(rate, drawn):
    seen = two_nics()
    fast = [msgspec.structs.replace(one, gbps=400) if one.kind == "nic" else one for one in seen.devices]
    fast[2] = msgspec.structs.replace(fast[2], gbps=rate)
    seen = msgspec.structs.replace(seen, devices=tuple(fast))
    whole = scene(Reading(picture=seen, findings=examine(seen), examined_at=AT))
    (frame,) = frames(whole).values()
    found = drawn_rack(frame, Mode.TENANT, Colours())
    assert [cell.nic for cell in found.trays[0].cells] == [drawn, "aligned", "aligned", "aligned"]
    assert f'class="nic {drawn}"' in rack(found, 1)
    told = {(one.check, one.state) for one in objections(whole, whole.seats[0])}
    assert ((names.NIC_LINK, Found.FAILS) in told) == (drawn == "slow")
    page = chain(whole.seats[0], said(whole, whole.seats[0]))
    assert ("it runs at 200 Gb/s, its siblings at 400" in page) == (drawn == "slow")


LINKS = st.sampled_from(["up", "ACTIVE", "down", "unknown", None])
RATES, PLACES = st.sampled_from([None, 200, 400]), st.sampled_from([None, 0, 1])
NICS = st.fixed_dictionaries({"link": LINKS, "numa": PLACES, "gbps": RATES})


@given(own=NICS, other=NICS, numa=PLACES, path=st.sampled_from([None, "SYS", "NODE"]))
def test_what_the_doctor_objects_to_in_a_nic_is_drawn_and_nothing_else(own, other, numa, path):
    seen = two_nics()
    gpu, one, two, *rest = seen.devices
    devices = (
        msgspec.structs.replace(gpu, numa=numa, pcie_root="coupled", partner_class=path),
        msgspec.structs.replace(one, **own),
        msgspec.structs.replace(two, **other),
        *rest,
    )
    seen = msgspec.structs.replace(seen, devices=devices)
    whole = scene(Reading(picture=seen, findings=examine(seen), examined_at=AT))
    told = {(one.check, one.state) for one in objections(whole, whole.seats[0])}
    (frame,) = frames(whole).values()
    drawn = drawn_rack(frame, Mode.TENANT, Colours()).trays[0].cells[0].nic
    broken, untold, apart = (
        (names.NIC_LINK, Found.FAILS) in told,
        (names.NIC_LINK, Found.UNKNOWN) in told,
        (names.NIC_ALIGNED, Found.FAILS) in told,
    )
    assert (drawn in ("down", "slow")) == broken
    if not broken:
        assert (drawn == "astray") == (apart and not untold)
        assert not untold or drawn == "unknown"
