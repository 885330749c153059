import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.transfer.transfer_values import RESULT_FIELDS

from rackloom.core.transfer.pairing import lack_of_processors
from rackloom.core.transfer.report import alignment_report, build_report, result_line, single_report
from rackloom.core.transfer.values import (
    DeviceTraffic,
    EndRecord,
    EndUsage,
    HostFacts,
    Measurement,
    Promise,
    TransferReport,
    TransferSpec,
    UcxPins,
)
from rackloom.errors import Refused

SPEC = TransferSpec(block_size=1 << 20, batch_size=2, iters=4, warmup_iters=1)


def end(digest: str, device: str, sent: int, received: int, cpu: float = 10.0) -> EndRecord:
    return EndRecord(
        digest=digest,
        traffic=(DeviceTraffic(device, "netdev", sent, received),),
        usage=EndUsage(10.0, cpu, 1, 2),
        host=HostFacts("node", "Linux", 4, 4, 0.1, "3.11", "1.5.1", UcxPins()),
    )


def measured(
    seconds: float = 0.001, device: str = "rdma0", digest: str = "aa", cpu: float = 10.0
) -> Measurement:
    payload = SPEC.timed_bytes
    return Measurement(
        backend="UCX",
        connect_seconds=0.01,
        first_seconds=0.02,
        seconds=(seconds,) * SPEC.iters,
        post_seconds=(seconds / 4,) * SPEC.iters,
        protocols=(f"tcp/{device}",),
        initiator=end("aa", device, payload, 0, cpu),
        target=end(digest, device, 0, payload),
    )


def run(promised: str = "rdma0", **how: object) -> TransferReport:
    return build_report(SPEC, measured(**how), Promise(promised, 16.0, emulated=True))  # type: ignore[arg-type]


def test_the_result_line_starts_with_the_fields_of_the_example_in_its_order() -> None:
    line = result_line(run())
    assert line.startswith("RESULT {")
    fields = json.loads(line.removeprefix("RESULT "))
    assert list(fields)[: len(RESULT_FIELDS)] == RESULT_FIELDS
    assert fields["total_bytes"] == 2 << 20
    assert fields["avg_GBps"] == pytest.approx((2 << 20) / 0.001 / 1e9)
    assert fields["avg_post_seconds"] + fields["avg_transfer_seconds"] == pytest.approx(fields["avg_seconds"])


def test_a_report_survives_being_written_and_read() -> None:
    report = run()
    assert msgspec.json.decode(msgspec.json.encode(report), type=TransferReport) == report


def test_verified_comes_from_the_comparison_alone() -> None:
    assert run(digest="aa").verified
    assert not run(digest="ab").verified


def test_corrupt_data_is_never_proved_however_fast() -> None:
    result = alignment_report([run(digest="ab")], [run("rdma1", device="rdma1")], (16.0, 11.28))
    assert not result.proved
    assert "NOT arrive intact" in result.verdict


def test_a_swapped_device_is_not_proved_at_an_equal_rate() -> None:
    result = alignment_report([run("rdma0", device="rdma1")], [run("rdma1", device="rdma1")], (16.0, 16.0))
    assert result.measured_ratio == pytest.approx(1.0)
    assert not result.proved
    assert "does not hold" in result.verdict


@given(st.floats(0.1, 400), st.floats(0.1, 400))
def test_rates_that_follow_the_shapers_come_out_in_the_declared_ratio(fast: float, slow: float) -> None:
    def at(gigabits: float, device: str) -> TransferReport:
        return run(device, device=device, seconds=SPEC.total_bytes * 8 / (gigabits * 1e9))

    result = alignment_report([at(fast, "rdma0")], [at(slow, "rdma1")], (fast, slow))
    assert result.measured_ratio == pytest.approx(result.declared_ratio)
    assert result.proved
    assert "emulated" in result.label
    assert "emulated" in result.verdict


def test_runs_average_and_their_spread_is_kept() -> None:
    arm = alignment_report(
        [run(seconds=0.001), run(seconds=0.002)], [run("rdma1", device="rdma1")], (2.0, 1.0)
    ).aligned
    assert arm is not None
    assert arm.mean_GBps == pytest.approx((2.097152 + 1.048576) / 2)
    assert arm.spread == pytest.approx(1.048576 / arm.mean_GBps)


def test_contention_is_said_beside_the_rate_and_leaves_the_proof_alone() -> None:
    quiet, busy = single_report("plain", [run()], "here"), single_report("plain", [run(cpu=6.0)], "here")
    assert "NOT reliable" not in quiet.verdict
    assert "NOT reliable" in busy.verdict
    assert busy.proved


def test_ends_of_one_host_need_a_processor_each() -> None:
    assert lack_of_processors([measured(), measured()]) is None
    lacking = lack_of_processors([measured(), measured(), measured()])
    assert lacking == "2 of 6 polling ends on node have no processor of their own"


def test_no_runs_is_refused() -> None:
    with pytest.raises(Refused, match="at least one run"):
        single_report("plain", [], "here")


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 0},
        {"batch_size": 0},
        {"batch_size": 10_000},
        {"iters": 0},
        {"warmup_iters": -1},
        {"timeout_seconds": 0},
        {"seed": -1},
    ],
)
def test_a_spec_out_of_range_says_what_to_give(wrong: dict[str, int]) -> None:
    with pytest.raises(Refused, match="give"):
        TransferSpec(**wrong)  # type: ignore[arg-type]
