"""Every GPU has one seat, in the place in which people would look for it."""

from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.web.snapshots import GPUS, snapshot

from rackloom.core.diagnosis.snapshot import Layer, LayerStatus
from rackloom.topology.join_key import GpuKey
from rackloom.web.model import NO_RACK, SiteReading, site_map

HOLDERS = st.lists(st.sampled_from(["acme", "blue", None]), min_size=1, max_size=7).map(tuple)


@given(racks=st.integers(1, 3), trays=st.integers(1, 6), holders=HOLDERS)
def test_every_gpu_has_one_seat(racks, trays, holders):
    whole = site_map(SiteReading(snapshot=snapshot(racks, trays, holders)))
    places = Counter((seat.place.rack, str(seat.place.name)) for seat in whole.gpus)
    assert len(places) == racks * trays * GPUS
    assert set(places.values()) == {1}


def test_a_gpu_that_only_the_controller_knows_sits_in_the_rack_of_its_chassis():
    seen = snapshot(1, 3)
    whole = site_map(SiteReading(snapshot=msgspec.structs.replace(seen, machines=seen.machines[:-1])))
    assert {seat.place.rack for seat in whole.gpus} == {"rack-00"}
    assert len(whole.gpus) == 3 * GPUS


def test_a_gpu_that_only_the_cluster_knows_stands_by_its_node():
    seen = snapshot(1, 2)
    whole = site_map(SiteReading(snapshot=msgspec.structs.replace(seen, machines=(), fabric_gpus=())))
    assert [(seat.place.rack, str(seat.place.name)) for seat in whole.gpus] == [
        (NO_RACK, f"free-node-0-{tray}/gpu-{gpu}") for tray in range(2) for gpu in range(GPUS)
    ]


def test_whether_a_gpu_is_taken_is_unknown_while_a_layer_that_would_say_so_is():
    seen = snapshot(1, 2, ("acme", None))
    lost = tuple(
        LayerStatus(layer=layer.layer, unknown_since=1.0) if layer.layer is Layer.CLUSTER else layer
        for layer in seen.layers
    )
    whole = site_map(SiteReading(snapshot=msgspec.structs.replace(seen, layers=lost)))
    assert {seat.taken for seat in whole.gpus if seat.place.name.slot == 0} == {True}
    assert {seat.taken for seat in whole.gpus if seat.place.name.slot == 1} == {None}


def test_a_gpu_is_not_free_while_a_layer_that_was_asked_was_not_read():
    seen = snapshot(1, 1)
    lost = tuple(
        LayerStatus(layer=layer.layer, unknown_since=1.0) if layer.layer is Layer.CLUSTER else layer
        for layer in seen.layers
    )
    unread = msgspec.structs.replace(seen, layers=lost, nodes=(), devices=())
    unasked = tuple(layer for layer in seen.layers if layer.layer is not Layer.CLUSTER)
    bare = msgspec.structs.replace(unread, layers=unasked)
    assert {seat.taken for seat in site_map(SiteReading(snapshot=unread)).gpus} == {None}
    assert {seat.taken for seat in site_map(SiteReading(snapshot=bare)).gpus} == {False}


def test_racks_stand_in_the_order_of_their_numbers_and_the_homeless_last():
    seen = snapshot(3, 1)
    names = {"rack-00": "row 9", "rack-01": "row 10", "rack-02": "z"}
    named = tuple(msgspec.structs.replace(machine, rack=names[machine.rack]) for machine in seen.machines)
    lost = msgspec.structs.replace(
        seen, machines=named, devices=(*seen.devices, msgspec.structs.replace(seen.devices[0], key=GpuKey()))
    )
    order = list(dict.fromkeys(seat.place.rack for seat in site_map(SiteReading(snapshot=lost)).gpus))
    assert order == ["row 9", "row 10", "z", NO_RACK]
