"""A scenario reads the GPUs of each tray from the true fabrics."""

import msgspec
import pytest

from rackloom.lab.scenario.model import NotObserved
from rackloom.lab.scenario.stage import Truth
from rackloom.lab.switches.fabric import SeededNames, fabrics_of
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
    return Truth(site, [Switch(fabric)], {})


def guids(ground, tray):
    fabric = ground.rack("rack-01").fabric
    return tuple(sorted(gpu.guid for gpu in fabric.gpus.values() if gpu.tray_index == tray))


def test_a_seat_knows_its_gpus_until_they_are_pulled(ground):
    fabric = ground.rack("rack-01").fabric
    gpu = fabric.gpus[guids(ground, 3)[0]]
    machine = f"{gpu.chassis_serial}-{gpu.slot}".lower()
    switch, gpus = ground.locate(machine)
    assert switch is ground.rack("rack-01")
    assert [gpu.module_id for gpu in gpus] == [1, 2, 3, 4]
    fabric.remove_gpus(guids(ground, 3))
    with pytest.raises(NotObserved, match="no fabric shows a GPU"):
        ground.locate(machine)
    fabric.insert_gpus(msgspec.structs.replace(gpu, guid=gpu.guid + 1) for gpu in gpus)
    assert len(ground.locate(machine)[1]) == 4
