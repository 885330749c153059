"""The judge of a scenario's fabrics finds each promise that is broken, and blames no hand for the service."""

import msgspec
import pytest

from rackloom.lab.scenario.model import NotObserved
from rackloom.lab.scenario.stage import Truth
from rackloom.lab.switches.fabric import FabricPartition, SeededNames, fabrics_of
from rackloom.lab.switches.faults import NmxcFaults
from rackloom.topology import profiles
from rackloom.topology.rack import build_site


class Switch:
    def __init__(self, fabric):
        self.fabric = fabric
        self.faults = NmxcFaults()


@pytest.fixture
def ground():
    site = build_site(profiles.load_rack("gb200-nvl72"), 1, SeededNames("ground"))
    (fabric,) = fabrics_of(site, "ground")
    fabric.delete(32766)
    return Truth([Switch(fabric)], {})


def guids(ground, tray):
    fabric = ground.rack(1).fabric
    return tuple(sorted(gpu.guid for gpu in fabric.gpus.values() if gpu.tray_index == tray))


def give(ground, tray, tenant):
    gpu = ground.rack(1).fabric.gpus[guids(ground, tray)[0]]
    ground._holder[f"{gpu.chassis_serial}-{gpu.slot}".lower()] = tenant


def test_gpus_of_one_tenant_may_be_together(ground):
    give(ground, 0, "red")
    give(ground, 1, "red")
    ground.rack(1).fabric.create("job", guids(ground, 0) + guids(ground, 1))
    assert (ground.judged, ground.broken) == (1, [])


def test_gpus_of_two_tenants_in_what_the_service_made_break_s2(ground):
    give(ground, 0, "red")
    give(ground, 1, "blue")
    ground.rack(1).fabric.create("job", guids(ground, 0) + guids(ground, 1))
    assert ground.broken == ["S2: 'job' holds GPUs of blue, red"]


def test_two_tenants_in_what_a_hand_made_are_not_the_service_s_doing(ground):
    give(ground, 0, "red")
    give(ground, 1, "blue")
    with ground.another_writer():
        ground.rack(1).fabric.create("theirs", guids(ground, 0) + guids(ground, 1))
    assert ground.broken == []


def test_a_gpu_in_two_partitions_breaks_s1_whoever_did_it(ground):
    fabric = ground.rack(1).fabric
    fabric.create("one", guids(ground, 0))
    fabric.partitions[7] = FabricPartition(id=7, name="two", guids=guids(ground, 0))
    with ground.another_writer():
        fabric.create("three", guids(ground, 1))
    assert ground.broken == ["S1: 4 GPUs of 'two' are in another partition too"]


@pytest.mark.parametrize("change", ["delete", "take"])
def test_changing_what_somebody_made_by_hand_breaks_s4(ground, change):
    fabric = ground.rack(1).fabric
    with ground.another_writer():
        number = fabric.create("theirs", guids(ground, 0))
    ground.foreign["theirs"] = fabric, fabric.partitions[number]
    if change == "delete":
        fabric.delete(number)
    else:
        fabric.remove(number, guids(ground, 0)[:1])
    assert ground.broken == ["S4: the service changed 'theirs', which somebody made by hand"]


def test_a_seat_knows_its_gpus_until_they_are_pulled(ground):
    fabric = ground.rack(1).fabric
    gpu = fabric.gpus[guids(ground, 3)[0]]
    machine = f"{gpu.chassis_serial}-{gpu.slot}".lower()
    switch, gpus = ground.locate(machine)
    assert switch is ground.rack(1)
    assert [one.module_id for one in gpus] == [1, 2, 3, 4]
    fabric.remove_gpus(guids(ground, 3))
    with pytest.raises(NotObserved, match="no fabric shows a GPU"):
        ground.locate(machine)
    fabric.insert_gpus(msgspec.structs.replace(one, guid=one.guid + 1) for one in gpus)
    assert len(ground.locate(machine)[1]) == 4
