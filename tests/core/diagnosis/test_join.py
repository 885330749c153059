"""GPUs are joined through the join key only, one machine at a time, in linear work."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.diagnosis.healthy import GPUS, healthy, node, place, serial, slot, with_changed, without
from tests.core.diagnosis.plain_join import PlainIdentities, plain_chain
from tests.core.diagnosis.test_shares import changed, changes

from rackloom.core.diagnosis import join
from rackloom.core.diagnosis.join import fabric_key, gpu_chains
from rackloom.core.diagnosis.snapshot import DeviceRecord, LayerStatus, SiteSnapshot
from rackloom.topology import join_key
from rackloom.topology.join_key import Fact, GpuKey, SlotKey, Source, joins


def test_every_gpu_has_one_chain_through_all_layers():
    found = gpu_chains(healthy(racks=2, trays=3))
    assert len(found) == 2 * 3 * GPUS
    for chain in found:
        assert chain.conflicts == ()
        tray = chain.machine.tray_index
        rack = int(chain.machine.id.split("-")[1])
        assert chain.key.place.value == place(rack, tray, chain.wanted.module_id)
        assert chain.fabric.guid == chain.key.fabric_guid.value
        assert chain.partition.logical == chain.logical.id == chain.wanted.logical
        assert chain.node.name == chain.device.node == node(rack, tray)
        assert chain.use.pods == (f"team-{rack}/worker-{tray}",)
        assert chain.compute_domain.key == f"team-{rack}/job"
        assert chain.channel == "channel-0"
        (nic,) = chain.nics
        assert nic.node == chain.node.name
        assert nic.partner == chain.key.pci_address.value
        assert (chain.transfer is not None) == (chain.wanted.module_id == 1)


def test_they_are_sorted_by_domain_tray_and_module():
    whole = healthy(racks=2, trays=3)
    shuffled = msgspec.structs.replace(
        whole, fabric_gpus=whole.fabric_gpus[::-1], machines=whole.machines[::-1], devices=whole.devices[::-1]
    )
    names = [
        (chain.fabric.domain, chain.fabric.tray_index, chain.fabric.place.module_id)
        for chain in gpu_chains(shuffled)
    ]
    assert names == sorted(names)
    assert names == [
        (chain.fabric.domain, chain.fabric.tray_index, chain.fabric.place.module_id)
        for chain in gpu_chains(whole)
    ]


def test_a_layer_that_was_not_read_leaves_its_part_open():
    whole = healthy(racks=1, trays=2)
    only_site = msgspec.structs.replace(whole, nodes=(), devices=(), uses=(), transfers=())
    assert all(chain.device is None and chain.fabric is not None for chain in gpu_chains(only_site))
    only_cluster = SiteSnapshot(at=0, layers=(), nodes=whole.nodes, devices=whole.devices, uses=whole.uses)
    found = gpu_chains(only_cluster)
    assert len(found) == 2 * GPUS
    assert all(chain.fabric is None and chain.machine is None and chain.use is not None for chain in found)


def test_a_gpu_without_a_place_is_joined_by_its_uuid_alone_and_sorted_last():
    whole = healthy(racks=1, trays=1)
    stranger = DeviceRecord(
        driver="gpu.nvidia.com",
        pool="vm",
        name="gpu-0",
        node="vm",
        kind="gpu",
        key=GpuKey(gpu_uuid=Fact("GPU-x", Source.NVML)),
    )
    found = gpu_chains(msgspec.structs.replace(whole, devices=(stranger, *whole.devices)))
    assert len(found) == GPUS + 1
    assert found[-1].device == stranger


def test_a_gpu_that_contradicts_its_place_is_not_attached_and_both_sides_are_told():
    whole = healthy(racks=1, trays=2)
    first = place(0, 0, 1)
    broken = with_changed(whole, "fabric_gpus", lambda record: record.place == first, guid=0xBAD)
    chain = next(
        gpu_chain
        for gpu_chain in gpu_chains(broken)
        if gpu_chain.fabric is not None and gpu_chain.fabric.guid == 0xBAD
    )
    assert chain.device is None
    assert chain.machine is None
    reported = " ".join(chain.conflicts)
    assert "switch controller of domain d0ma1n-0" in reported
    assert "record of machine m-0-0" in reported
    assert f"node {node(0, 0)}" in reported
    assert "0xbad" in reported
    assert "0xa000000000000001" in reported


def listed_too(snapshot, domain, change):
    """Another domain's controller lists the same GPUs, each changed. It comes first in the snapshot."""
    wrong = tuple(msgspec.structs.replace(change(gpu), domain=domain) for gpu in snapshot.fabric_gpus)
    return msgspec.structs.replace(snapshot, fabric_gpus=(*wrong, *snapshot.fabric_gpus))


@pytest.mark.parametrize("site_knows_guids", [True, False])
def test_a_controller_that_lists_other_gpus_in_the_places_of_machines_takes_none_off_the_site(
    site_knows_guids,
):
    whole = healthy(racks=2, trays=2)
    if not site_knows_guids:
        bare = [tuple(GpuKey(place=key.place) for key in machine.gpus) for machine in whole.machines]
        machines = (
            msgspec.structs.replace(machine, gpus=gpus)
            for machine, gpus in zip(whole.machines, bare, strict=True)
        )
        whole = msgspec.structs.replace(whole, machines=tuple(machines))
    lied = listed_too(whole, "0-first", lambda gpu: msgspec.structs.replace(gpu, guid=gpu.guid + 0xBAD00))
    found = gpu_chains(lied)
    assert all("0-first" in " ".join(chain.conflicts) for chain in found)
    assert [msgspec.structs.replace(chain, conflicts=()) for chain in found] == list(gpu_chains(whole))


def test_nor_does_it_while_the_controller_of_their_domain_was_never_read():
    whole = healthy(racks=1, trays=2)
    lied = listed_too(whole, "0-first", lambda gpu: msgspec.structs.replace(gpu, guid=gpu.guid + 0xBAD00))
    lied = without(lied, "fabric_gpus", lambda record: record.domain != "0-first")
    found = gpu_chains(lied)
    assert [chain.machine is not None and chain.fabric is None for chain in found] == [True] * 2 * GPUS


def test_a_controller_that_lists_the_gpus_of_machines_in_other_places_takes_no_device_from_them():
    whole = healthy(racks=1, trays=2)
    nameless = tuple(
        msgspec.structs.replace(device, key=msgspec.structs.replace(device.key, place=None))
        for device in whole.devices
    )
    whole = msgspec.structs.replace(whole, devices=nameless)
    moved = listed_too(
        whole,
        "0-first",
        lambda gpu: msgspec.structs.replace(
            gpu, place=SlotKey(f"far-{gpu.place.chassis_serial}", gpu.place.slot, gpu.place.module_id)
        ),
    )
    held = [chain for chain in gpu_chains(moved) if chain.machine is not None]
    assert [(chain.device is not None, chain.fabric.domain) for chain in held] == [
        (True, chain.fabric.domain) for chain in gpu_chains(whole)
    ]


def test_what_another_gpu_driver_publishes_of_the_same_address_on_another_node_is_another_gpu():
    whole = healthy(racks=1, trays=2)
    bare = with_changed(
        whole,
        "devices",
        lambda record: record.kind == "gpu",
        key=GpuKey(pci_address=Fact("0001:01:00.0", Source.SYSFS)),
    )
    found = gpu_chains(bare)
    assert all(chain.device is None for chain in found if chain.fabric is not None)
    assert len([chain for chain in found if chain.device is not None]) == 2 * GPUS


keys = st.builds(
    GpuKey,
    place=st.none()
    | st.builds(
        lambda s, slot, module: Fact(SlotKey(s, slot, module), Source.NMX),
        st.sampled_from(["a", "b"]),
        st.integers(1, 2),
        st.integers(1, 2),
    ),
    fabric_guid=st.none()
    | st.builds(Fact, st.integers(1, 4), st.sampled_from([Source.NMX, Source.SYSFS, Source.DECLARED])),
    gpu_uuid=st.none() | st.sampled_from(["u", "v"]).map(lambda uuid: Fact(uuid, Source.NVML)),
    pci_address=st.none()
    | st.sampled_from(["0000:01:00.0", "0000:02:00.0"]).map(lambda at: Fact(at, Source.SYSFS)),
)


@given(st.lists(keys, max_size=12))
def test_no_record_is_put_to_a_gpu_that_its_key_contradicts(found):
    joined = join.GpuIdentities()
    for number, key in enumerate(found):
        joined.add(f"record {number}", key, key)
    for gpu in joined.gpus:
        assert all(joins(gpu.key, key) is not False for _, key in gpu.records)
        places = {key.place.value for _, key in gpu.records if key.place is not None}
        assert len(places) <= 1
    taken = [gpu.key.place.value for gpu in joined.gpus if gpu.key.place is not None]
    assert len(taken) == len(set(taken))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(keys, max_size=14))
def test_records_are_put_together_as_by_comparing_each_with_all_others(found):
    joined, plain = join.GpuIdentities(), PlainIdentities()
    for number, key in enumerate(found):
        joined.add(f"record {number}", key, number)
        plain.add(f"record {number}", key, number)
    assert [(gpu.key, gpu.records, gpu.conflicts) for gpu in joined.gpus] == [
        (gpu.key, gpu.records, gpu.conflicts) for gpu in plain.gpus
    ]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(changes(), max_size=12))
def test_the_join_of_a_site_is_what_its_definition_says(story):
    snapshot = healthy(racks=3, trays=2)
    for change in story:
        snapshot = changed(snapshot, change)
    plain = PlainIdentities()
    for source, key, record in join._records(snapshot):
        plain.add(source, key, record)
    expected = sorted((plain_chain(gpu, snapshot) for gpu in plain.gpus), key=join.chain_order)
    assert list(gpu_chains(snapshot)) == expected


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_whatever_is_missing_or_exchanged_no_chain_crosses_machines(data):
    snapshot = healthy(racks=2, trays=2)
    devices = list(snapshot.devices)
    for _ in range(data.draw(st.integers(1, 4))):
        here = data.draw(st.integers(0, len(devices) - 1))
        there = data.draw(st.integers(0, len(devices) - 1))
        changed = msgspec.structs.replace(devices[here], key=devices[there].key)
        devices[here] = changed if devices[here].kind == devices[there].kind == "gpu" else devices[here]
    found = gpu_chains(msgspec.structs.replace(snapshot, devices=tuple(devices)))
    for chain in found:
        if chain.machine is not None and chain.fabric is not None:
            assert (chain.machine.chassis_serial, chain.machine.slot) == (
                chain.fabric.place.chassis_serial,
                chain.fabric.place.slot,
            )
        if chain.device is not None and chain.device.key.place is not None:
            assert chain.key.place == chain.device.key.place or (
                chain.key.place.value == chain.device.key.place.value
            )
        assert all(nic.node == chain.device.node for nic in chain.nics)


def test_the_work_grows_with_the_records_and_not_with_their_pairs(monkeypatch):
    asked = []
    real = join_key.merged_if_agreed
    monkeypatch.setattr(join, "merged_if_agreed", lambda *keys: asked.append(1) or real(*keys))

    def work(racks):
        asked.clear()
        gpu_chains(healthy(racks=racks, trays=2))
        return len(asked)

    assert work(8) == 8 * work(1)


def test_a_fabric_gpu_is_known_by_place_and_guid():
    snapshot = healthy(racks=1, trays=1)
    key = fabric_key(snapshot.fabric_gpus[0])
    assert key.place.value == SlotKey(serial(0), slot(0), 1)
    assert key.gpu_uuid is None


def test_the_builder_refuses_a_change_of_nothing():
    snapshot = healthy(racks=1, trays=1)
    for change in (
        lambda: with_changed(snapshot, "nodes", lambda record: False),
        lambda: without(snapshot, "nodes", lambda record: False),
    ):
        try:
            change()
        except AssertionError:
            continue
        raise AssertionError("a change of nothing went through")
    assert isinstance(snapshot.layers[0], LayerStatus)
