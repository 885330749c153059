"""Emulated pods. No assertion here is about how fast this machine is."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from tests.waiting import PATIENCE

from rackloom.core.transfer.values import TransferReport, TransferSpec
from rackloom.errors import Refused
from rackloom.prove.transfer import emulation, run

SPEC = TransferSpec(block_size=4 << 20, iters=3, warmup_iters=1, timeout_seconds=PATIENCE)


def namespaces(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(f"rackloom-{pid}-")]


def inside(prefix: tuple[str, ...], *command: str) -> str:
    return subprocess.run([*prefix, *command], capture_output=True, text=True, check=True).stdout


@pytest.mark.root
def test_each_end_of_each_nic_is_held_to_its_declared_rate() -> None:
    with emulation.emulate(2.0, 1.41) as pods:
        for prefix in (pods.prefix_a, pods.prefix_b):
            for device, gigabits in zip(("rdma0", "rdma1"), pods.gigabits, strict=True):
                (shaper,) = json.loads(inside(prefix, "tc", "-json", "qdisc", "show", "dev", device))
                assert shaper["kind"] == "tbf"
                assert shaper["options"]["rate"] * 8 == pytest.approx(gigabits * 1e9)
                (link,) = json.loads(inside(prefix, "ip", "-json", "link", "show", device))
                assert (link["mtu"], link["operstate"]) == (9000, "UP")


@pytest.mark.root
def test_pods_are_removed_after_use_and_after_a_failure() -> None:
    with emulation.emulate():
        assert len(namespaces(os.getpid())) == 2
    with pytest.raises(ZeroDivisionError), emulation.emulate():
        _ = 1 / 0
    assert namespaces(os.getpid()) == []


CHILD = """
import time
from rackloom.prove.transfer.emulation import emulate
with emulate():
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.mark.root
def test_pods_are_removed_on_sigterm_and_swept_after_sigkill() -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"up\n"
            assert len(namespaces(child.pid)) == 2
            os.kill(child.pid, how)
            child.wait(PATIENCE)
        if how == signal.SIGTERM:
            assert namespaces(child.pid) == []
    # The next emulation sweeps the leftovers of the killed one. It may be in a test beside this one.
    with emulation.emulate():
        assert namespaces(child.pid) == []


@pytest.mark.root
def test_the_pods_of_a_living_process_are_not_swept() -> None:
    with emulation.emulate():
        emulation.remove_stale_namespaces()
        assert len(namespaces(os.getpid())) == 2


def within_shaper(report: TransferReport) -> bool:
    """Whether no more was sent than a token bucket allows: its rate, and a burst after each pause."""
    assert report.declared_gigabits is not None
    seconds = report.avg_seconds * report.iters
    allowed = report.declared_gigabits * 1e9 / 8 * seconds + (1 << 20) * report.iters
    return report.total_bytes * report.iters <= allowed


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.nixl
def test_each_arm_is_carried_by_its_own_nic_and_stays_under_its_shaper() -> None:
    report = run.run_alignment(SPEC, runs=1, aligned_gigabits=2.0, unaligned_gigabits=1.41)
    assert report.emulated
    assert "emulated" in report.label
    assert report.proved, report.verdict
    assert report.declared_ratio == pytest.approx(2.0 / 1.41)
    assert report.aligned is not None
    assert report.unaligned is not None
    for arm, mine, other in ((report.aligned, "rdma0", "rdma1"), (report.unaligned, "rdma1", "rdma0")):
        for measured in arm.runs:
            assert measured.emulated
            assert measured.verified
            sent = {device.name: device.sent_bytes for device in measured.path.initiator}
            assert sent[mine] >= SPEC.timed_bytes
            assert sent.get(other, 0) < SPEC.timed_bytes // 100
            assert within_shaper(measured)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.nixl
def test_a_swapped_nic_is_found_by_its_counters_where_the_rates_are_equal() -> None:
    with emulation.emulate(2.0, 2.0) as pods:
        report = run.run_emulated(SPEC, pods, "rdma1", promised="rdma0")
    assert report.verified
    assert report.path.verdict == "does not hold"
    assert report.path.carried_by == ("rdma1",)


@pytest.mark.slow
@pytest.mark.nixl
def test_where_pods_are_not_possible_one_plain_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    report = run.run_alignment(SPEC, runs=2)
    assert not report.emulated
    assert "not emulated" in report.label
    assert "root" in report.label
    assert report.proved
    (measured,) = report.runs
    assert measured.verified
    assert not measured.emulated
    assert (measured.backend, measured.op, measured.total_bytes) == ("UCX", "WRITE", SPEC.total_bytes)
    assert measured.path.verdict == "no promise"
    assert measured.path.protocols
    assert 0 < measured.min_seconds <= measured.p50_seconds <= measured.p99_seconds
    assert measured.environment.initiator.nixl == measured.environment.target.nixl


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    reason = emulation.can_emulate()
    assert reason is not None
    assert reason.endswith("is not installed")


def test_without_nixl_the_label_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rackloom.prove.transfer.installation.find_spec", lambda _: None)
    for attempt in (run.run_alignment, run.run_plain, lambda spec: run.run_lanes(spec, [])):
        with pytest.raises(Refused, match="NIXL is not installed; `rackloom nixl install` adds it"):
            attempt(SPEC)
