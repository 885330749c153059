"""Trouble around a transfer ends in a clear message, within the timeout."""

import os
import sys
import time
from pathlib import Path

import pytest
from tests.waiting import PATIENCE

from rackloom.core.transfer.pairing import GpuNicPair
from rackloom.core.transfer.values import AllocatedDevices, EndConfig, TransferReport, TransferSpec, UcxPins
from rackloom.errors import Refused, Retry
from rackloom.prove.transfer import emulation, installation, processes, run
from rackloom.prove.transfer.processes import BeInitiator, Done, EndProcess
from rackloom.prove.transfer.run import EndLocation, Lane, RemoteTarget, run_lanes

SPEC = TransferSpec(block_size=1 << 20, iters=3, warmup_iters=1, timeout_seconds=PATIENCE)
SABOTAGE = (sys.executable, str(Path(__file__).with_name("sabotage.py")))
needs_nixl = pytest.mark.skipif(
    installation.nixl_missing_reason() is not None, reason=str(installation.nixl_missing_reason())
)


def test_a_nixl_that_cannot_be_imported_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel for other hardware, or one without its libraries: the demo goes on without it."""
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl/__init__.py").write_text(
        "raise ImportError('libfoo.so.1: cannot open shared object file')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(installation, "find_spec", lambda _: True)
    installation._import_problem.cache_clear()
    try:
        reason = installation.nixl_missing_reason()
        assert reason is not None
        assert reason.startswith("NIXL is installed, but cannot be imported")
        assert "libfoo.so.1" in reason
        with pytest.raises(Refused, match="cannot be imported"):
            run.run_plain(SPEC)
    finally:
        installation._import_problem.cache_clear()


def test_an_import_that_kills_its_process_is_missing_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl/__init__.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(installation, "find_spec", lambda _: True)
    installation._import_problem.cache_clear()
    try:
        assert "the import ended with -6" in str(installation.nixl_missing_reason())
    finally:
        installation._import_problem.cache_clear()


@pytest.mark.slow
def test_a_target_that_nobody_serves_is_given_up_in_time() -> None:
    spec = TransferSpec(block_size=4096, iters=1, timeout_seconds=1)
    began = time.monotonic()
    with (
        EndProcess((), "0123456789abcdef", BeInitiator("127.0.0.1", 1, EndConfig(), spec)) as end,
        pytest.raises(Retry, match="port 1 does not answer"),
    ):
        end.expect(Done, began + 60)


@pytest.mark.slow
@pytest.mark.root
def test_no_route_is_told() -> None:
    with emulation.emulate() as pods:
        order = BeInitiator("198.51.100.1", 5555, EndConfig(), TransferSpec(iters=1, timeout_seconds=1))
        with (
            EndProcess(pods.prefix_a, "0123456789abcdef", order) as end,
            pytest.raises(Retry, match="unreachable"),
        ):
            end.expect(Done, time.monotonic() + 60)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.nixl
@needs_nixl
def test_ends_pinned_to_devices_that_cannot_meet_give_up_in_time() -> None:
    """rdma0 and rdma1 are two networks, as with a wrong rail at one end."""
    spec = TransferSpec(block_size=1 << 20, iters=1, warmup_iters=0, timeout_seconds=10)
    with emulation.emulate() as pods:
        here, there = (EndConfig(ucx=UcxPins(("tcp",), (device,))) for device in ("rdma0", "rdma1"))
        lane = Lane(EndLocation(pods.prefix_a, "", here), EndLocation(pods.prefix_b, pods.address_b, there))
        with pytest.raises((Retry, Refused)):
            run_lanes(spec, [lane])


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.nixl
@needs_nixl
@pytest.mark.parametrize(
    ("allocated", "problem"),
    [
        (("eth0", "rdma0"), "sees rdma1, which its claim did not allocate"),
        (("eth0", "rdma0", "rdma1", "rdma2"), "does not see rdma2, which its claim allocated"),
    ],
)
def test_an_end_that_sees_other_devices_than_its_claim_refuses(
    allocated: tuple[str, ...], problem: str
) -> None:
    with emulation.emulate() as pods:
        configs = [
            EndConfig(allocated=AllocatedDevices(names)) for names in (allocated, ("eth0", "rdma0", "rdma1"))
        ]
        for mine, theirs in (configs, configs[::-1]):
            lane = Lane(
                EndLocation(pods.prefix_a, "", mine), EndLocation(pods.prefix_b, pods.address_b, theirs)
            )
            with pytest.raises(Refused, match=problem):
                run_lanes(SPEC, [lane])


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.nixl
@needs_nixl
def test_emulated_pairs_are_each_proved_alone_and_at_once() -> None:
    heard: list[TransferReport] = []
    report = run.run_emulated_pairs(SPEC, (2.0, 1.41), runs=1, watch=run.RunObserver(finished=heard.append))
    assert report.proved, report.verdict
    assert report.emulated
    assert [(arm.device, arm.together) for arm in report.pairs] == [
        ("rdma0", False),
        ("rdma1", False),
        ("rdma0", True),
        ("rdma1", True),
    ]
    assert heard == list(report.runs)
    assert all(report.verified for report in heard)
    crowded = len(os.sched_getaffinity(0)) < 4
    for arm in report.pairs:
        assert arm.overlap is None or 0 <= arm.overlap <= 1
        contention = str(arm.runs[0].environment.contention)
        assert ("of 4 polling ends" in contention) == (crowded and arm.together)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.nixl
@needs_nixl
def test_two_pairs_on_one_nic_are_not_proved() -> None:
    """Both at once over rdma0, the second promised rdma1: counters of the first must not stand in for it."""
    with emulation.emulate(2.0, 2.0) as pods:
        lanes = [
            run.emulated_lane(pods, "rdma0"),
            run.emulated_lane(pods, "rdma0", promised="rdma1"),
        ]
        first, second = run_lanes(SPEC, lanes)
    assert first.path.verdict == "holds"
    assert second.path.verdict != "holds"


@pytest.mark.slow
@pytest.mark.nixl
@needs_nixl
def test_runs_before_a_failure_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[TransferReport] = []

    def step(name: str) -> None:
        if "run 2" in name:
            monkeypatch.setattr(processes, "END_PROGRAM", (*SABOTAGE, "crash"))

    with pytest.raises(Retry, match="the reason it crashed"):
        run.run_plain(SPEC, watch=run.RunObserver(step, heard.append))
    (report,) = heard
    assert report.verified


@pytest.mark.slow
@pytest.mark.nixl
@needs_nixl
def test_pairs_that_share_a_nic_are_measured_alone_on_their_own_processors() -> None:
    report = run.run_pairs(
        SPEC, [GpuNicPair("cpu", "lo")] * 2, None, config=EndConfig(ucx=UcxPins(("tcp",))), runs=1
    )
    assert report.proved, report.verdict
    assert [(arm.name, arm.together) for arm in report.pairs] == [("cpu over lo", False)] * 2
    ends = report.runs[0].environment
    if len(os.sched_getaffinity(0)) > 1:
        assert ends.initiator.cores
        assert not set(ends.initiator.cores) & set(ends.target.cores)
    else:
        assert "1 of 2 polling ends" in str(ends.contention)


def test_a_remote_target_keeps_its_secret_to_itself() -> None:
    assert "hush" not in repr(RemoteTarget("10.0.0.1", 5555, "hush"))
