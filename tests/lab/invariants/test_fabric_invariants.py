"""Each invariant of a fabric is checked, and another writer's change is not blamed on the service."""

import pytest

from rackloom.lab.invariants.fabric import FabricInvariants, foreign_change
from rackloom.lab.switches.fabric import FabricPartition, SeededNames, fabrics_of
from rackloom.topology import profiles
from rackloom.topology.rack import build_site


@pytest.fixture
def fabric():
    site = build_site(profiles.load_rack("gb200-nvl72"), 1, SeededNames("ground"))
    (fabric,) = fabrics_of(site, "ground")
    fabric.delete(32766)
    return fabric


@pytest.fixture
def holder():
    return {}


@pytest.fixture
def invariants(fabric, holder):
    return FabricInvariants([fabric], holder)


def guids(fabric, tray):
    return tuple(sorted(gpu.guid for gpu in fabric.gpus.values() if gpu.tray_index == tray))


def give(fabric, holder, tray, tenant):
    gpu = fabric.gpus[guids(fabric, tray)[0]]
    holder[f"{gpu.chassis_serial}-{gpu.slot}".lower()] = tenant


def test_gpus_of_one_tenant_may_be_together(fabric, holder, invariants):
    give(fabric, holder, 0, "red")
    give(fabric, holder, 1, "red")
    fabric.create("job", guids(fabric, 0) + guids(fabric, 1))
    assert (invariants.checks, invariants.broken) == (1, [])


def test_gpus_of_two_tenants_in_what_the_service_made_break_s2(fabric, holder, invariants):
    give(fabric, holder, 0, "red")
    give(fabric, holder, 1, "blue")
    fabric.create("job", guids(fabric, 0) + guids(fabric, 1))
    assert invariants.broken == ["S2: 'job' holds GPUs of blue, red"]


def test_two_tenants_in_what_a_hand_made_are_not_the_service_s_doing(fabric, holder, invariants):
    give(fabric, holder, 0, "red")
    give(fabric, holder, 1, "blue")
    with foreign_change():
        fabric.create("theirs", guids(fabric, 0) + guids(fabric, 1))
    assert invariants.broken == []


def test_a_gpu_in_two_partitions_breaks_s1_whoever_did_it(fabric, invariants):
    fabric.create("one", guids(fabric, 0))
    fabric.partitions[7] = FabricPartition(id=7, name="two", guids=guids(fabric, 0))
    with foreign_change():
        fabric.create("three", guids(fabric, 1))
    assert invariants.broken == ["S1: 4 GPUs of 'two' are in another partition too"]


@pytest.mark.parametrize("change", ["delete", "take"])
def test_changing_what_somebody_made_by_hand_breaks_s4(fabric, invariants, change):
    with foreign_change():
        number = fabric.create("theirs", guids(fabric, 0))
    invariants.foreign["theirs"] = fabric, fabric.partitions[number]
    if change == "delete":
        fabric.delete(number)
    else:
        fabric.remove(number, guids(fabric, 0)[:1])
    assert invariants.broken == ["S4: the service changed 'theirs', which somebody made by hand"]
