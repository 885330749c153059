"""The rate expected from the wiring: bounded by the line, ordered by the class, never called measured."""

import pytest

from rackloom.core.transfer.model import MODEL_LABEL, model_transfers
from rackloom.errors import Refused
from rackloom.topology import profiles
from rackloom.topology.machine import Machine, PathClass

H100 = "azure-nd96isr-h100-v5"
GIB = 1 << 30


@pytest.mark.parametrize("name", profiles.machine_names())
def test_no_pair_is_faster_than_its_line_and_none_that_is_farther_is_faster(name: str) -> None:
    machine = profiles.load_machine(name)
    if not machine.gpus or all(nic.excluded for nic in machine.nics):
        with pytest.raises(Refused, match="there is no pair"):
            model_transfers(machine, GIB)
        return
    for pair in model_transfers(machine, GIB).pairs:
        if pair.alone is not None:
            assert pair.line_rate_gigabits is not None
            assert 0 < pair.alone.low_GBps <= pair.alone.high_GBps <= pair.line_rate_gigabits / 8
            assert pair.alone.best_ms == pytest.approx(GIB / pair.alone.high_GBps / 1e6)
        if pair.together is not None and pair.alone is not None:
            assert pair.own
            assert pair.together.high_GBps <= pair.alone.high_GBps


def test_the_two_published_arms_come_out_as_they_were_published() -> None:
    found = model_transfers(profiles.load_machine(H100), GIB)
    rates = [(pair.path_class, pair.alone) for pair in found.pairs if pair.gpu == 0]
    near = [alone.high_GBps for where, alone in rates if where is not PathClass.SYS and alone]
    far = [alone.high_GBps for where, alone in rates if where is PathClass.SYS and alone]
    assert near == pytest.approx([39.07] * 4)
    assert far == pytest.approx([27.54] * 4)


def test_every_gpu_has_one_nic_of_its_own_on_a_machine_with_as_many() -> None:
    found = model_transfers(profiles.load_machine(H100), GIB)
    own = [(pair.gpu, pair.nic) for pair in found.pairs if pair.own]
    assert len(own) == len({nic for _, nic in own}) == 8


def test_gpus_on_one_nic_divide_its_line() -> None:
    whole = profiles.load_machine(H100)
    machine = Machine(name="one-nic", note="", origin=(), gpus=whole.gpus[:2], nics=whole.nics[:1])
    together = [pair.together for pair in model_transfers(machine, GIB).pairs]
    assert [rate.high_GBps for rate in together if rate] == [25.0, 25.0]


def test_a_line_that_is_not_known_is_not_guessed() -> None:
    gpu, nic = profiles.load_machine(H100).gpus[0], profiles.load_machine("gke-a4-highgpu-8g-b200").nics
    unknown = [nic_ for nic_ in nic if nic_.line_rate_gbps is None][:1]
    if not unknown:
        pytest.skip("every NIC of this profile has a line rate")
    machine = Machine(name="no-rate", note="", origin=(), gpus=(gpu,), nics=(unknown[0],))
    (pair,) = model_transfers(machine, GIB).pairs
    assert pair.alone is None
    assert pair.line_rate_gigabits is None


def test_a_machine_without_pairs_is_refused_and_the_label_says_what_it_is() -> None:
    whole = profiles.load_machine(H100)
    with pytest.raises(Refused, match="0 NICs for data"):
        model_transfers(Machine(name="blind", note="", origin=(), gpus=whole.gpus, nics=()), GIB)
    assert "nothing was moved" in MODEL_LABEL == model_transfers(whole, GIB).label
