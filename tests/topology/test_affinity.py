import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.errors import Refused
from rackloom.topology.affinity import (
    Cell,
    classes,
    classify,
    guest_view,
    nearest,
    own_gpus,
    own_nics,
    partner,
)
from rackloom.topology.join_key import Fact, Source, directness
from rackloom.topology.machine import ClassRow, Gpu, Machine, Nic, PathClass, PciePath, numa_of
from rackloom.topology.profiles import load_machine, machine_names

PUBLISHED = json.loads((Path(__file__).parent / "published_matrices.json").read_text())
NEARNESS = list(PathClass)


def letters(matrix, width):
    return [" ".join(cell.path_class for cell in row[:width]) for row in matrix]


def distance(machine, cell):
    here, there = numa_of(machine.gpus[cell.gpu]), numa_of(machine.nics[cell.nic])
    return NEARNESS.index(cell.path_class), here != there


def matrix_of(name, view):
    machine = load_machine(name)
    if view == "declared":
        return [" ".join(row.classes) for row in machine.declared_classes]
    rows = PUBLISHED[name][view]
    return letters(classes(guest_view(machine) if view == "guest" else machine), len(rows[0].split()))


@pytest.mark.parametrize(("name", "view"), [(name, view) for name in PUBLISHED for view in PUBLISHED[name]])
def test_the_matrix_is_the_published_one(name, view):
    assert matrix_of(name, view) == PUBLISHED[name][view]


def test_every_published_matrix_is_compared():
    assert sum(len(views) for views in PUBLISHED.values()) == 12


def test_a_hidden_switch_is_restored_from_the_vendor_file():
    machine = load_machine("azure-nd96isr-h100-v5")
    for gpu, row in enumerate(classes(machine)):
        assert row[gpu].source is Source.VENDOR_FILE
        assert row[gpu].reason == f"common switch ffff:ff:0{gpu + 1}.0"
        assert {cell.source for nic, cell in enumerate(row) if nic != gpu} == {Source.SYSFS}


def test_a_printed_matrix_beats_what_numa_nodes_suggest_and_numa_still_finds_the_partners():
    machine = load_machine("oci-bm.gpu.gb200-v3.4")
    assert letters(classes(machine), 8) == ["SYS " * 7 + "SYS"] * 4
    assert {cell.source for row in classes(machine) for cell in row[:8]} == {Source.DECLARED}
    near = [[cell.nic for cell in partner(machine, gpu)] for gpu in range(4)]
    assert near == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2


def test_the_vendor_file_alone_gives_four_numa_nodes():
    rows = classes(load_machine("azure-nd96asr-a100-v4"))
    for gpu, row in enumerate(rows):
        assert [cell.nic for cell in row if cell.path_class is PathClass.PIX] == [
            gpu // 2 * 2,
            gpu // 2 * 2 + 1,
        ]
        assert {cell.path_class for cell in row} == {PathClass.PIX, PathClass.SYS}


def test_a_root_alone_proves_no_more_than_the_host_bridge():
    cell = classes(load_machine("aws-p4d.24xlarge-a100x8-dranet-slices"))[0][0]
    assert (cell.path_class, cell.reason) == (PathClass.PHB, "common root pci0000:10, bridges not known")
    far = classes(load_machine("aws-p4d.24xlarge-a100x8-dranet-slices"))[0][1]
    assert (far.path_class, far.source) == (PathClass.UNKNOWN, None)
    assert far.reason == "no common root known, nor the NUMA node of GPU"


@pytest.mark.parametrize("name", machine_names())
def test_the_guest_view_names_guest_sources_only(name):
    sources = {cell.source for row in classes(guest_view(load_machine(name))) for cell in row}
    assert sources <= {Source.SYSFS, Source.NVML, None}


@pytest.mark.parametrize("name", machine_names())
def test_partners_are_the_nearest_usable_nics(name):
    machine = load_machine(name)
    for gpu, row in enumerate(classes(machine)):
        partners = partner(machine, gpu)
        chosen = {cell.nic for cell in partners}
        assert all(machine.nics[nic].excluded is None for nic in chosen)
        others = [cell for cell in row if cell.nic not in chosen and machine.nics[cell.nic].excluded is None]
        for cell in partners:
            assert all(distance(machine, cell) < distance(machine, other) for other in others)


def test_partners_leave_out_management_nics_of_the_same_switch():
    assert [cell.nic for cell in partner(load_machine("aws-p6-b200.48xlarge-b200x8-efa"), 4)] == [4, 5]


def test_no_partner_where_nothing_is_known():
    assert partner(load_machine("alibaba-ecs.gn8is-2x.8xlarge"), 0) == ()


@pytest.mark.parametrize("index", [-1, 8])
def test_a_gpu_that_is_not_there_is_refused(index):
    with pytest.raises(Refused) as refused:
        partner(load_machine("azure-nd96isr-h100-v5"), index)
    assert refused.value.nearest_fix == "use an index below 8"


def test_a_machine_without_gpus_has_no_fix_to_offer():
    empty = Machine(name="cpu-only", note="", origin=(), gpus=(), nics=())
    with pytest.raises(Refused) as refused:
        partner(empty, 0)
    assert refused.value.nearest_fix is None


def test_several_bridges_below_the_common_one_are_pxb():
    def device(kind, *bridges):
        return kind(index=0, pcie=PciePath("pci0000:00", bridges, Source.SYSFS))

    assert classify(device(Gpu, "a", "b"), device(Nic, "a", "c")).path_class is PathClass.PIX
    assert classify(device(Gpu, "a", "b", "d"), device(Nic, "a")).path_class is PathClass.PXB
    assert classify(device(Gpu, "a"), device(Nic, "b")).path_class is PathClass.PHB


def test_a_declared_matrix_brings_a_pair_nearer_and_never_farther():
    machine = load_machine("azure-nd96isr-h100-v5")
    stated = ClassRow(gpu=0, classes=(PathClass.SYS, PathClass.PIX))
    row = classes(msgspec.structs.replace(machine, declared_classes=(stated,)))[0]
    assert (row[0].path_class, row[0].source) == (PathClass.PIX, Source.VENDOR_FILE)
    assert (row[1].path_class, row[1].source) == (PathClass.PIX, Source.DECLARED)
    assert (row[2].path_class, row[2].source) == (PathClass.NODE, Source.SYSFS)


BRIDGES = st.none() | st.lists(st.sampled_from("ab"), max_size=3).map(tuple)
SOURCES = st.sampled_from([Source.SYSFS, Source.NVML, Source.VENDOR_FILE, Source.DECLARED])
PATHS = st.builds(PciePath, st.sampled_from(["pci0000:00", "pci0000:80"]), BRIDGES, SOURCES)
SWITCHES = st.builds(Fact, st.sampled_from(["x", "y"]), st.just(Source.VENDOR_FILE))
PLACES = st.fixed_dictionaries(
    {
        "pcie": st.none() | PATHS,
        "numa_node": st.none() | st.builds(Fact, st.integers(-1, 2), SOURCES),
        "vendor_switch": st.none() | SWITCHES,
    }
)


def pair(gpu_place, nic_place):
    return classify(Gpu(index=0, **gpu_place), Nic(index=0, **nic_place))


def renamed(place):
    """The same place with other names for every root, bridge, switch and NUMA node."""
    path, numa, switch = place["pcie"], place["numa_node"], place["vendor_switch"]
    bridges = path and path.bridges and tuple(f"new-{bridge}" for bridge in path.bridges)
    return {
        "pcie": path and PciePath(f"new-{path.root}", bridges, path.source),
        "numa_node": numa and Fact(numa.value if numa.value < 0 else 7 - numa.value, numa.source),
        "vendor_switch": switch and Fact(f"new-{switch.value}", switch.source),
    }


@given(PLACES, PLACES)
def test_names_do_not_matter(gpu_place, nic_place):
    before, after = pair(gpu_place, nic_place), pair(renamed(gpu_place), renamed(nic_place))
    assert (before.path_class, before.source) == (after.path_class, after.source)


@given(PLACES, PLACES)
def test_which_of_the_two_is_the_gpu_does_not_matter(first, other):
    before, after = pair(first, other), pair(other, first)
    assert (before.path_class, before.source) == (after.path_class, after.source)


@given(PLACES, PLACES)
def test_seeing_more_of_the_tree_never_moves_a_pair_away(gpu_place, nic_place):
    more = pair(gpu_place, nic_place)
    for hidden in ("vendor_switch", "pcie"):
        less = pair(gpu_place | {hidden: None}, nic_place)
        assert NEARNESS.index(more.path_class) <= NEARNESS.index(less.path_class)


TAILS = st.lists(st.sampled_from("ab"), max_size=2).map(tuple)
NODES = st.none() | st.builds(Fact, st.integers(-1, 2), SOURCES)


def below(*bridges):
    return PciePath("pci0000:00", bridges, Source.SYSFS)


@given(TAILS, TAILS, NODES, NODES)
def test_no_numa_node_undoes_a_common_bridge(gpu_tail, nic_tail, gpu_node, nic_node):
    gpu, nic = {"pcie": below("top", *gpu_tail)}, {"pcie": below("top", *nic_tail)}
    assert pair(gpu | {"numa_node": gpu_node}, nic | {"numa_node": nic_node}) == pair(gpu, nic)


@pytest.mark.parametrize(("node", "found"), [(0, PathClass.PHB), (1, PathClass.SYS), (-1, PathClass.PHB)])
def test_numa_nodes_that_differ_undo_a_common_root(node, found):
    gpu = {"pcie": below(), "numa_node": Fact(0, Source.SYSFS)}
    assert pair(gpu, {"pcie": below(), "numa_node": Fact(node, Source.SYSFS)}).path_class is found


@given(PLACES, PLACES, st.sampled_from([None, Fact(-1, Source.SYSFS)]))
def test_an_unknown_numa_node_is_never_node_or_sys(gpu_place, nic_place, unknown):
    cell = pair(gpu_place | {"numa_node": unknown}, nic_place)
    assert cell.path_class not in (PathClass.NODE, PathClass.SYS)


@given(PLACES, PLACES)
def test_a_class_has_a_source_that_its_facts_have(gpu_place, nic_place):
    cell = pair(gpu_place, nic_place)
    facts = [fact.source for fact in (*gpu_place.values(), *nic_place.values()) if fact is not None]
    assert (cell.source in facts) if cell.path_class is not PathClass.UNKNOWN else cell.source is None


CELLS = st.builds(
    Cell,
    gpu=st.just(0),
    nic=st.just(0),
    path_class=st.sampled_from(NEARNESS[:-1]),
    source=SOURCES,
    reason=st.just("drawn"),
)


@given(st.lists(CELLS, min_size=1), st.randoms(use_true_random=False))
def test_the_nearest_answer_wins_in_any_order(answers, random):
    shuffled = random.sample(answers, len(answers))
    best = nearest(shuffled)
    assert best == nearest(answers)
    assert best in answers
    for answer in answers:
        assert NEARNESS.index(best.path_class) <= NEARNESS.index(answer.path_class)
        if answer.path_class is best.path_class:
            assert directness(best.source) <= directness(answer.source)


@pytest.mark.parametrize("name", machine_names())
def test_a_gpu_and_a_nic_agree_that_they_belong_together(name):
    machine = load_machine(name)
    nics, gpus = own_nics(machine), own_gpus(machine)
    assert all(nic in gpus for nic in (cell.nic for cell in nics.values()))
    one_to_one = len({cell.nic for cell in nics.values()}) == len(nics)
    if one_to_one:
        assert all(gpus[cell.nic].gpu == gpu for gpu, cell in nics.items())


def test_gpus_that_are_equally_near_to_the_same_nics_do_not_take_the_same_one():
    nics = own_nics(load_machine("azure-nd96isr-mi300x-v5"))
    assert len({cell.nic for cell in nics.values()}) == len(nics) == 8
