"""Pairs on the machines that ship with Rackloom."""

from collections.abc import Sequence
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackloom.core.transfer.pairing import (
    GpuNicPair,
    are_disjoint,
    describe_pair,
    device_indices,
    every_pair,
    pair_up,
    pinned_config,
    spread_cores,
    without_core,
)
from rackloom.core.transfer.values import EndConfig, UcxPins
from rackloom.errors import Refused
from rackloom.topology.affinity import classes, guest_view
from rackloom.topology.machine import Machine, PathClass
from rackloom.topology.profiles import load_machine, machine_names

AZURE = load_machine("azure-nd96isr-h100-v5")


def test_each_gpu_gets_the_nic_behind_its_own_switch() -> None:
    """The vendor's file pairs GPU k with NIC k. The guest alone would see four equal NICs."""
    pairs = pair_up(AZURE, range(8), range(8))
    for pair, gpu, nic in zip(pairs, AZURE.gpus, AZURE.nics, strict=True):
        assert pair == GpuNicPair(f"cuda:{gpu.pci_address}", f"{nic.rdma_device}:1", "PIX", "PIX")


def test_a_claim_of_remote_nics_is_seen_to_be_farther_than_need_be() -> None:
    pairs = pair_up(AZURE, range(4), range(4, 8))
    assert {(pair.path_class, pair.nearest_class) for pair in pairs} == {("SYS", "PIX")}


@pytest.mark.parametrize("name", machine_names())
def test_every_gpu_of_every_machine_gets_a_nic_of_its_own(name: str) -> None:
    machine = load_machine(name)
    usable = [nic.index for nic in machine.nics if nic.excluded is None and (nic.rdma_device or nic.if_name)]
    gpus = range(min(len(machine.gpus), len(usable)))
    pairs = pair_up(machine, gpus, usable)
    assert len({pair.nic for pair in pairs}) == len(gpus)


@pytest.mark.parametrize("machine", [AZURE, load_machine("gke-a4-highgpu-8g-b200"), guest_view(AZURE)])
@given(data=st.data())
def test_no_other_pairing_is_nearer(machine: Machine, data: st.DataObject) -> None:
    nics = data.draw(st.lists(st.sampled_from(range(8)), min_size=1, max_size=5, unique=True))
    gpus = data.draw(st.permutations(range(8)))[: len(nics)]
    matrix, rank = classes(machine), list(PathClass).index

    def farthest_first(chosen: Sequence[int]) -> list[int]:
        pairs = zip(gpus, chosen, strict=True)
        return sorted((rank(matrix[gpu][nic].path_class) for gpu, nic in pairs), reverse=True)

    names = {f"{nic.rdma_device}:1": nic.index for nic in machine.nics}
    found = farthest_first([names[pair.nic] for pair in pair_up(machine, gpus, nics)])
    assert found == min(farthest_first(order) for order in permutations(nics))


def test_the_whole_matrix_is_not_driven_at_once() -> None:
    pairs = every_pair(AZURE, range(8), range(8))
    assert [pair.path_class for pair in pairs].count("PIX") == 8
    assert len(set(pairs)) == 64
    assert not are_disjoint(pairs)
    assert are_disjoint(pair_up(AZURE, range(8), range(8)))
    assert are_disjoint([GpuNicPair("cpu", "rdma0"), GpuNicPair("cpu", "rdma1")])
    assert not are_disjoint([GpuNicPair("cpu", "rdma0")])


def test_too_few_nics_and_unknown_devices_are_refused() -> None:
    with pytest.raises(Refused, match="4 GPUs and 2 NICs"):
        pair_up(AZURE, range(4), range(2))
    with pytest.raises(Refused, match="no device 9"):
        pair_up(AZURE, [9], range(8))
    with pytest.raises(Refused, match="has no mlx5_99"):
        device_indices(AZURE, [], ["mlx5_99"])


def test_devices_are_found_by_any_of_their_names() -> None:
    first, second = AZURE.nics[0], AZURE.nics[1]
    assert first.rdma_device is not None
    assert second.pci_address is not None
    gpu = AZURE.gpus[3].pci_address
    assert gpu is not None
    assert device_indices(AZURE, [gpu], [first.rdma_device, second.pci_address]) == ([3], [0, 1])
    assert device_indices(AZURE, [], None)[1] == list(range(8))


def test_a_pair_that_somebody_chose_keeps_its_names() -> None:
    gpu = AZURE.gpus[0].pci_address
    assert describe_pair(AZURE, "cuda:5", gpu, "mlx5_4:1") == GpuNicPair("cuda:5", "mlx5_4:1", "SYS", "PIX")
    assert describe_pair(AZURE, "cpu", None, "eth0") == GpuNicPair("cpu", "eth0")
    assert describe_pair(None, "cuda:0", gpu, "mlx5_0:1") == GpuNicPair("cuda:0", "mlx5_0:1")


@given(st.integers(1, 16), st.integers(0, 48))
def test_ends_never_share_a_processor_while_there_are_enough(ends: int, more: int) -> None:
    parts = spread_cores(ends, range(ends + more))
    assert len(parts) == ends
    assert len({core for part in parts for core in part}) == sum(map(len, parts))
    assert all(parts)
    assert without_core(parts) == 0


def test_where_processors_are_too_few_the_scheduler_chooses() -> None:
    assert spread_cores(3, range(2)) == [(), (), ()]


def test_a_pair_pins_memory_and_nic_and_keeps_the_rest() -> None:
    shared = EndConfig(ucx=UcxPins(("rc",), ("mlx5_9:1",)), cores=(3,))
    pinned = pinned_config(shared, GpuNicPair("cuda:0", "mlx5_0:1"))
    assert pinned == EndConfig(ucx=UcxPins(("rc",), ("mlx5_0:1",)), device="cuda:0", cores=(3,))


def test_ends_that_must_share_are_told() -> None:
    assert without_core([(0, 1)] * 4) == 2
    assert without_core([(0,), (0,), (1, 2)]) == 1
    assert without_core([(0, 1), (0,), (1, 2)]) == 0
    assert without_core([]) == 0
