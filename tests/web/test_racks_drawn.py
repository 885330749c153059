"""Racks as markup: well formed, complete, and honest about unknown state."""

import re
import xml.etree.ElementTree as ET
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.web.snapshots import GPUS, NIC_DRIVER, examined, snapshot

from rackloom.core.diagnosis.findings import Level
from rackloom.core.diagnosis.snapshot import DeviceUse, Layer, LayerStatus
from rackloom.web.frames import GROUP_MODES, ColourMode, GpuState, MapColours, rack_frames
from rackloom.web.live import LiveReading
from rackloom.web.model import site_map
from rackloom.web.painters import Painter
from rackloom.web.racks import DrawnRack, drawing, drawn_rack
from rackloom.web.render import render_rack as rendered

HOLDERS = ("acme", "acme", None, "blue")


def drawn(seen, mode=ColourMode.PARTITION) -> tuple[DrawnRack, ...]:
    colours = MapColours()
    return tuple(drawn_rack(frame, mode, colours) for frame in rack_frames(site_map(examined(seen))).values())


def cells(markup):
    drawn = ET.fromstring(markup)  # noqa: S314 - our own
    return [cell for cell in drawn.iter("rect") if cell.get("role") == "gridcell"]


def without(seen, layer):
    lost = tuple(
        LayerStatus(layer=status.layer, unknown_since=1.0) if status.layer is layer else status
        for status in seen.layers
    )
    return msgspec.structs.replace(seen, layers=lost)


@settings(max_examples=30)
@given(trays=st.integers(1, 19), switches=st.integers(0, 9), mode=st.sampled_from(ColourMode))
def test_every_gpu_is_drawn_once_and_the_markup_is_well_formed(trays, switches, mode):
    (rack,) = drawn(snapshot(1, trays, HOLDERS), mode)
    found = cells(rendered(rack, switches))
    assert len(found) == trays * GPUS
    assert set(Counter(cell.get("id") for cell in found).values()) == {1}
    assert all(cell.get("aria-label") for cell in found)


def test_compute_trays_stand_around_the_switches_as_they_are_built():
    (rack,) = drawn(snapshot(1, 18))
    assert [tray.slot for tray in rack.above] == list(range(17, 7, -1))
    assert [tray.slot for tray in rack.below] == list(range(7, -1, -1))
    placed = drawing(rack, 9)
    heights = [line.y for line in placed.lines]
    assert heights == sorted(heights)
    assert len(placed.switches) == 9
    assert heights[9] < placed.switches[0] < placed.switches[-1] < heights[10]


LAYER = {
    ColourMode.PARTITION: Layer.FABRIC,
    ColourMode.TENANT: Layer.SITE,
    ColourMode.CLIQUE: Layer.CLUSTER,
    ColourMode.WORKLOAD: Layer.CLUSTER,
}


@given(mode=st.sampled_from(GROUP_MODES))
def test_what_is_unknown_is_hatched_and_keeps_the_letter_it_had(mode):
    (rack,) = drawn(without(snapshot(1, 4, HOLDERS), LAYER[mode]), mode)
    assert {cell.state for tray in rack.trays for cell in tray.cells} == {GpuState.UNKNOWN}
    markup = rendered(rack, 9)
    assert {cell.get("class", "").split()[0] for cell in cells(markup)} == {"q"}
    assert 'class="dim"' in markup
    assert "unknown, last known" in markup


@given(mode=st.sampled_from(GROUP_MODES), other=st.sampled_from(Layer))
def test_only_the_layer_that_says_it_makes_it_unknown(mode, other):
    (rack,) = drawn(without(snapshot(1, 4, HOLDERS), other), mode)
    unknown = any(cell.state is GpuState.UNKNOWN for tray in rack.trays for cell in tray.cells)
    assert unknown == (other is LAYER[mode])


def test_a_silent_domain_hatches_its_own_rack_only():
    seen = snapshot(2, 4, HOLDERS)
    silent = (msgspec.structs.replace(seen.domains[0], unknown_since=1.0), seen.domains[1])
    first, second = drawn(msgspec.structs.replace(seen, domains=silent))
    assert {cell.state for tray in first.trays for cell in tray.cells} == {GpuState.UNKNOWN}
    assert GpuState.UNKNOWN not in {cell.state for tray in second.trays for cell in tray.cells}
    assert (first.switches, second.switches) == (Level.UNKNOWN, None)


def test_a_gpu_about_which_a_controller_contradicts_itself_is_unknown_alone():
    seen = snapshot(1, 2)
    first, *rest = seen.fabric_gpus
    doubtful = msgspec.structs.replace(
        seen, fabric_gpus=(msgspec.structs.replace(first, uncertain=True), *rest)
    )
    (rack,) = drawn(doubtful)
    states = Counter(cell.state for tray in rack.trays for cell in tray.cells)
    assert states[GpuState.UNKNOWN] == 1
    seats = site_map(examined(doubtful)).gpus
    assert [seat.chain.fabric.guid for seat in seats if seat.taken is None] == [first.guid]


CONTROLLER = "The switch controller of rack-00 cannot be believed or read"


def told_of(**domain):
    """The drawing and the markup of the rack of a domain."""
    seen = snapshot(1, 2, HOLDERS)
    domains = (msgspec.structs.replace(seen.domains[0], **domain),)
    (rack,) = drawn(msgspec.structs.replace(seen, domains=domains))
    return rack.switches, rendered(rack, 9)


@pytest.mark.parametrize(
    ("domain", "level", "title"),
    [
        ({"unknown_since": 1.0, "disputed": True, "problem": "A and B list the same"}, "unknown", CONTROLLER),
        ({"paused": True}, "degraded", "The NVLink domain of rack-00 is paused"),
        ({"paused": True, "unknown_since": 1.0}, "unknown", CONTROLLER),
    ],
)
def test_the_switches_are_marked_by_the_worst_finding_of_their_domain(domain, level, title):
    switches, markup = told_of(**domain)
    assert switches == level
    assert f"NVLink {level}" in markup
    assert f"; {title}" in markup


def test_switches_without_a_finding_have_no_mark():
    assert "NVLink" not in told_of()[1].replace("NVLink switches", "")


HOSTILE = '<script>alert("x")</script>&\'<img src=x onerror=y>'


def test_names_cannot_become_markup():
    seen = snapshot(1, 2, ("acme",))
    named = msgspec.structs.replace(
        seen,
        logicals=tuple(msgspec.structs.replace(logical, name=HOSTILE) for logical in seen.logicals),
        machines=tuple(
            msgspec.structs.replace(machine, id=HOSTILE, rack=HOSTILE) for machine in seen.machines
        ),
        compute_domains=tuple(
            msgspec.structs.replace(domain, name=HOSTILE) for domain in seen.compute_domains
        ),
    )
    sheet = Painter(None, ColourMode.PARTITION, 9).follow(
        LiveReading(number=1, whole=site_map(examined(named)))
    )
    page = "".join(markup for _, markup in sheet.all())
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    (part,) = sheet.racks.values()
    assert len(cells(part.markup)) == 2 * GPUS


def test_nics_have_a_shape_for_each_level():
    seen = snapshot(1, 1, ("acme",))
    changes = {"acme-nic-1": {"numa": 1}, "acme-nic-2": {"link": "unknown"}}
    devices = [msgspec.structs.replace(device, **changes.get(device.name, {})) for device in seen.devices]
    devices = [device for device in devices if device.name != "acme-nic-3"]
    (rack,) = drawn(msgspec.structs.replace(seen, devices=tuple(devices)))
    assert [cell.nic for cell in rack.trays[0].cells] == ["well", "degraded", "unknown", "none"]
    assert re.findall(r'class="nic (\w+)"', rendered(rack, 9)) == ["well", "degraded", "unknown", "none"]
    used = DeviceUse(driver=NIC_DRIVER, pool="acme-node-0-0", device="acme-nic-0", claim="a/b", pods=())
    down = msgspec.structs.replace(devices[1], link="down")
    seen = msgspec.structs.replace(seen, devices=(devices[0], down, *devices[2:]), uses=(*seen.uses, used))
    (rack,) = drawn(seen)
    assert rack.trays[0].cells[0].nic == "critical"


@pytest.mark.parametrize(("effect", "reported"), [("NoSchedule", True), ("NoExecute", True), ("None", False)])
def test_a_gpu_that_its_plugin_keeps_workloads_off_is_sick_too(effect, reported):
    seen = snapshot(1, 1)
    gpu = next(device for device in seen.devices if device.kind == "gpu")
    tainted = msgspec.structs.replace(gpu, taints=(f"gpu.nvidia.com/gpu-lost:{effect}",))
    devices = tuple(tainted if device is gpu else device for device in seen.devices)
    (rack,) = drawn(msgspec.structs.replace(seen, devices=devices))
    assert ("degraded" in rendered(rack, 9)) is reported


def test_a_sick_gpu_and_a_cordoned_tray_are_told_in_words_too():
    seen = snapshot(1, 2, ("acme",))
    sick = (msgspec.structs.replace(seen.fabric_gpus[0], healthy=False), *seen.fabric_gpus[1:])
    cordoned = tuple(msgspec.structs.replace(machine, cordoned=True) for machine in seen.machines)
    (rack,) = drawn(msgspec.structs.replace(seen, fabric_gpus=sick, machines=cordoned))
    markup = rendered(rack, 9)
    assert ": acme-training, critical, used by a pod" in markup
    assert markup.count("cordoned") == 2


@pytest.mark.parametrize(("ready", "level"), [(False, "critical"), (None, "unknown")])
def test_a_lost_node_marks_its_tray(ready, level):
    seen = snapshot(1, 2, ("acme",))
    nodes = (msgspec.structs.replace(seen.nodes[0], ready=ready), *seen.nodes[1:])
    (rack,) = drawn(msgspec.structs.replace(seen, nodes=nodes))
    assert [tray.level for tray in rack.trays] == [None, level]
    assert rendered(rack, 9).count(f'<rect class="tray {level}"') == 1
    assert {cell.level for cell in rack.trays[1].cells} == {level}
    (unread,) = drawn(without(msgspec.structs.replace(seen, nodes=nodes), Layer.CLUSTER))
    assert {tray.level for tray in unread.trays} == {"unknown"}, "of nodes that cannot be read"


@pytest.mark.parametrize("mode", GROUP_MODES)
def test_a_gpu_in_no_group_is_not_called_free(mode):
    seen = snapshot(1, 1, ("acme",))
    machines = tuple(msgspec.structs.replace(machine, tenant=None) for machine in seen.machines)
    gpus = tuple(msgspec.structs.replace(gpu, partition=None) for gpu in seen.fabric_gpus)
    nodes = tuple(msgspec.structs.replace(node, clique=None) for node in seen.nodes)
    devices = tuple(msgspec.structs.replace(device, clique=None) for device in seen.devices)
    seen = msgspec.structs.replace(
        seen, machines=machines, fabric_gpus=gpus, nodes=nodes, devices=devices, uses=()
    )
    sheet = Painter(None, mode, 9).follow(LiveReading(number=1, whole=site_map(examined(seen))))
    (part,) = sheet.racks.values()
    assert all(f": no {mode}, " in cell.get("aria-label") for cell in cells(part.markup))
    assert f"<span>no {mode}</span>" in sheet.panels["legend"].markup


def test_what_somebody_elses_seat_is_called_that_nobody_has():
    whole = site_map(examined(snapshot(1, 1)))
    sheet = Painter("acme", ColourMode.WORKLOAD, 9).follow(LiveReading(number=1, whole=whole))
    (part,) = sheet.racks.values()
    assert all(cell.get("aria-label").endswith(": free") for cell in cells(part.markup))
    assert "<span>no workload, or free</span>" in sheet.panels["legend"].markup


def test_the_legend_says_what_frames_of_one_number_have_in_common():
    whole = site_map(examined(snapshot(1, 4, ("acme", "blue"))))
    legend = (
        Painter(None, ColourMode.PARTITION, 9)
        .follow(LiveReading(number=1, whole=whole))
        .panels["legend"]
        .markup
    )
    assert "All frames with one number are one ComputeDomain" in legend


def test_trays_of_one_compute_domain_that_stand_together_share_an_outline():
    (rack,) = drawn(snapshot(1, 4, ("acme", "acme", "blue", None)))
    assert [(outline.name, outline.height) for outline in drawing(rack, 0).outlines] == [
        ("blue-ns/blue-domain", 19),
        ("acme-ns/acme-domain", 39 + 10),
    ]


def test_a_group_keeps_its_colour_when_others_come():
    painter = Painter(None, ColourMode.TENANT, 9)
    before = painter.follow(LiveReading(number=1, whole=site_map(examined(snapshot(2, 3, ("zebra",))))))
    grown = site_map(examined(snapshot(2, 3, ("zebra", "zebra", "zebra", "ant", "zebra", "zebra"))))
    after = painter.follow(LiveReading(number=2, whole=grown))
    assert next(iter(after.racks)) in before.racks
    changed = [id_ for id_, _ in after.since(1) if id_ in after.racks]
    assert len(changed) == 1


def test_nothing_is_drawn_again_that_did_not_change():
    painter = Painter(None, ColourMode.PARTITION, 9)
    whole = site_map(examined(snapshot(3, 3, HOLDERS)))
    painter.follow(LiveReading(number=1, whole=whole))
    seen = snapshot(3, 3, HOLDERS)
    sick = (msgspec.structs.replace(seen.fabric_gpus[0], healthy=False), *seen.fabric_gpus[1:])
    again = painter.follow(LiveReading(number=2, whole=site_map(examined(seen))))
    assert list(again.since(1)) == []
    changed = painter.follow(
        LiveReading(number=3, whole=site_map(examined(msgspec.structs.replace(seen, fabric_gpus=sick))))
    )
    assert [id_ for id_, _ in changed.since(2)] == [next(iter(changed.racks)), "summary", "findings"]
