"""Verdicts, comparisons and the gate, on records of plain numbers."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.transfer.transfer_values import nic, paired, record, run

from rackloom.core.transfer.comparison import BaselineFinding, check_baseline, compare_records, judge_record
from rackloom.core.transfer.pairing import GpuNicPair
from rackloom.core.transfer.records import TransferRecord
from rackloom.core.transfer.values import Promise
from rackloom.errors import Refused
from rackloom.topology.profiles import load_machine

STEADY = (39.07, 39.06, 39.05)
SLOW = (27.54, 27.55, 27.53)
MACHINE = load_machine("azure-nd96isr-h100-v5")
BASELINE = record([run(rate) for rate in STEADY])


def gate(now: TransferRecord, baseline: TransferRecord = BASELINE) -> BaselineFinding:
    (found,) = judge_record(now, baseline)
    return found


def test_the_published_arms_are_judged_by_the_line_rate() -> None:
    """39.07 GB/s is 78% of a 400 Gb/s NIC and 27.54 is 55%."""
    met, short = run(39.07).expectation, run(27.54).expectation
    assert (met.outcome, met.gigabits) == ("met", 400.0)
    assert met.share == pytest.approx(0.781, abs=1e-3)
    assert short.outcome == "short"
    assert "nothing that was observed explains it" in short.sentence


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ({"carried": "mlx5_4"}, "wrong rail"),
        ({"cpu": 6.0}, "contention"),
        ({"links": [nic("mlx5_0", pcie="16.0 GT/s x8", pcie_best="32.0 GT/s x16")]}, "degraded link"),
        ({"links": [nic("mlx5_0", state="DOWN")]}, "degraded link"),
        ({"promise": Promise("mlx5_0", path_class="SYS", nearest_class="NODE")}, "misalignment"),
    ],
)
def test_a_shortfall_names_its_cause(how: dict[str, object], cause: str) -> None:
    expectation = run(20.0, **how).expectation  # type: ignore[arg-type]
    assert expectation.outcome == "short"
    assert expectation.causes == (cause,)
    assert cause in expectation.sentence


def test_without_a_line_rate_nothing_is_promised() -> None:
    assert run(20.0, links=[nic("mlx5_7")]).expectation.outcome == "unknown"
    assert run(20.0, promise=Promise()).expectation.share is None


def test_the_same_rates_hold() -> None:
    found = gate(record([run(rate) for rate in STEADY]))
    assert (found.outcome, found.node, found.device) == ("holds", "alpha to beta", "mlx5_0")


def test_a_loss_beyond_noise_regresses_and_names_node_and_device() -> None:
    found = gate(record([run(rate) for rate in SLOW]))
    assert (found.outcome, found.node, found.device) == ("regressed", "alpha to beta", "mlx5_0")
    assert "-29.5%" in found.reason
    assert "nothing that was observed explains it" in found.reason


def test_noise_is_not_a_regression() -> None:
    noisy = record([run(rate) for rate in (39.9, 38.0, 36.6)])
    assert gate(noisy).outcome == "holds"
    assert "within noise" in gate(noisy).reason


def test_too_much_noise_is_not_a_success() -> None:
    found = gate(record([run(rate) for rate in (39.0, 20.0, 60.0)]))
    assert found.outcome == "unknown"
    assert "noise hides" in found.reason
    assert gate(record([run(39.07)])).outcome == "unknown"


def test_a_slower_link_is_degraded_bandwidth() -> None:
    found = gate(record([run(rate, links=[nic("mlx5_0", 200.0)]) for rate in (19.5, 19.4, 19.6)]))
    assert found.outcome == "regressed"
    assert "degraded link on alpha, mlx5_0:1 came up at 200 Gb/s where it had 400" in found.reason


def test_a_farther_nic_is_misalignment_whatever_the_rate() -> None:
    near = paired([STEADY], [GpuNicPair("cuda:0", "mlx5_0:1", "NODE", "NODE")])
    far = paired([SLOW], [GpuNicPair("cuda:0", "mlx5_4:1", "SYS", "NODE")])
    alone, together = judge_record(far, near)
    for found in (alone, together):
        assert found.outcome == "regressed"
        assert found.reason == "misalignment: SYS where the baseline was NODE"
        assert found.device == "mlx5_4:1"


def test_contention_leaves_a_loss_unknown_and_data_is_never_excused() -> None:
    found = gate(record([run(rate, cpu=5.0) for rate in SLOW]))
    assert found.outcome == "unknown"
    assert "contended" in found.reason
    assert gate(record([run(50.0, intact=False)] * 3)).outcome == "regressed"
    assert "wrong rail" in gate(record([run(50.0, carried="mlx5_4")] * 3)).reason


def test_a_gpu_that_was_not_measured_is_unknown() -> None:
    """A node that lost a GPU must not pass on the seven that are left."""
    pairs = [GpuNicPair("cuda:0", "mlx5_0:1"), GpuNicPair("cuda:1", "mlx5_1:1")]
    both, single = paired([STEADY, STEADY], pairs), paired([STEADY], pairs[:1])
    missing = [found for found in judge_record(single, both) if found.outcome != "holds"]
    assert [found.device for found in missing] == ["mlx5_1:1", "mlx5_1:1"]
    assert all(found.outcome == "unknown" and "not measured" in found.reason for found in missing)


@settings(max_examples=25)
@given(st.lists(st.floats(30, 40), min_size=3, max_size=5), st.floats(0.3, 0.7))
def test_a_gate_never_passes_less_than_three_quarters(rates: list[float], factor: float) -> None:
    baseline = record([run(rate) for rate in rates])
    assert gate(record([run(rate * factor) for rate in rates]), baseline).outcome != "holds"
    assert gate(baseline, baseline).outcome != "regressed"


def test_other_machines_and_other_measurements_are_refused() -> None:
    here = record([run(rate) for rate in STEADY], MACHINE)
    renamed = msgspec.structs.replace(MACHINE, name="node-7")
    assert gate(msgspec.structs.replace(here, machine=renamed), here).outcome == "holds"
    for other in (load_machine("gke-a4-highgpu-8g-b200"), load_machine("alibaba-ecs.gn8is-2x.8xlarge"), None):
        with pytest.raises(Refused, match="another topology"):
            judge_record(msgspec.structs.replace(here, machine=other), here)
    reading = msgspec.structs.replace(BASELINE, spec=msgspec.structs.replace(BASELINE.spec, op="READ"))
    with pytest.raises(Refused, match="op WRITE against READ"):
        judge_record(reading, BASELINE)


@pytest.mark.parametrize(
    ("flawed", "problem"),
    [
        (record([run(39.0)]), "1 runs"),
        (record([run(39.0, cpu=5.0)] * 3), "contended"),
        (record([run(39.0, carried="mlx5_4")] * 3), "does not hold"),
        (record([run(39.0)] * 3, incomplete="the target ended"), "incomplete"),
    ],
)
def test_a_flawed_record_is_no_baseline(flawed: TransferRecord, problem: str) -> None:
    with pytest.raises(Refused, match=problem):
        check_baseline(flawed)


def test_two_records_are_compared_arm_by_arm() -> None:
    pairs = [GpuNicPair("cuda:0", "mlx5_0:1"), GpuNicPair("cuda:1", "mlx5_1:1")]
    compared = compare_records(paired([STEADY, STEADY], pairs), paired([SLOW, STEADY], pairs))
    assert [arm.name for arm in compared] == [
        "cuda:0 over mlx5_0:1",
        "cuda:1 over mlx5_1:1",
        "cuda:0 over mlx5_0:1, all at once",
        "cuda:1 over mlx5_1:1, all at once",
    ]
    assert compared[0].sentence.startswith("differs (x0.705, 95%")
    assert compared[1].sentence.startswith("no difference beyond noise")


def test_what_has_nothing_in_common_is_not_compared() -> None:
    a, b = (paired([STEADY], [GpuNicPair(gpu, "mlx5_0:1")]) for gpu in ("cuda:0", "cuda:1"))
    assert compare_records(a, a)
    with pytest.raises(Refused, match="no arm in common"):
        compare_records(BASELINE, b)
    single = compare_records(BASELINE, record([run(20.0)]))
    assert single[0].sentence.startswith("cannot be told")
