"""Both ends as real processes. Those marked nixl move real data."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.waiting import PATIENCE, until_seen

from rackloom.core.transfer.values import EndConfig, Promise, TransferSpec, UcxPins
from rackloom.errors import Refused, Retry
from rackloom.prove.transfer import processes
from rackloom.prove.transfer.processes import BeInitiator, BeTarget, Done, EndProcess, Listening, TurnedAway
from rackloom.prove.transfer.run import EndLocation, Lane, run_lanes

SECRET = "0123456789abcdef"
SMALL = TransferSpec(block_size=1 << 20, iters=3, warmup_iters=1, timeout_seconds=PATIENCE)
LONG = TransferSpec(block_size=1 << 20, iters=100_000, warmup_iters=0, timeout_seconds=PATIENCE)
TARGET = BeTarget("127.0.0.1", 0, EndConfig(), once=True, timeout_seconds=PATIENCE)
SABOTAGE = (sys.executable, str(Path(__file__).with_name("sabotage.py")))


def soon() -> float:
    return time.monotonic() + PATIENCE


def gone(pid: int) -> bool:
    """Whether a process has ended. A zombie of another parent counts as ended."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.slow
@pytest.mark.nixl
def test_a_read_of_many_blocks_over_a_pinned_device_is_counted_there() -> None:
    place = EndLocation(config=EndConfig(ucx=UcxPins(("tcp",), ("lo",))))
    spec = TransferSpec(
        op="READ", block_size=1 << 16, batch_size=16, iters=2, warmup_iters=0, timeout_seconds=PATIENCE
    )
    (report,) = run_lanes(spec, [Lane(place, place, Promise("lo"))])
    assert report.verified
    assert report.path.verdict == "holds", report.path
    assert report.path.protocols == ("tcp/lo",)


@pytest.mark.slow
@pytest.mark.nixl
def test_one_flipped_bit_in_the_target_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "END_PROGRAM", (*SABOTAGE, "corrupt"))
    (report,) = run_lanes(SMALL, [Lane()])
    assert not report.verified


@pytest.mark.slow
@pytest.mark.nixl
def test_a_target_that_dies_in_the_middle_ends_the_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "END_PROGRAM", (*SABOTAGE, "die"))
    with pytest.raises(Retry, match=r"target ended|broke off|closed|stopped|NIXL reported|ended without"):
        run_lanes(LONG, [Lane()])


@pytest.mark.slow
@pytest.mark.nixl
def test_a_target_of_the_wrong_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "END_PROGRAM", (*SABOTAGE, "stunted"))
    spec = TransferSpec(block_size=4096, batch_size=2, iters=1, warmup_iters=0, timeout_seconds=PATIENCE)
    with pytest.raises(Refused, match="registered 4096 bytes where 8192 were asked for"):
        run_lanes(spec, [Lane()])


@pytest.mark.slow
@pytest.mark.nixl
def test_a_device_that_does_not_exist_is_refused_with_what_ucx_said() -> None:
    place = EndLocation(config=EndConfig(ucx=UcxPins(("tcp",), ("absent0",))))
    with pytest.raises(Refused, match="UCX could not be started") as refused:
        run_lanes(SMALL, [Lane(place, place)])
    assert refused.value.nearest_fix is not None


@pytest.mark.slow
@pytest.mark.nixl
def test_a_transport_that_carries_no_messages_is_refused_with_its_companion() -> None:
    alone, beside = (
        EndLocation(config=EndConfig(ucx=UcxPins(names))) for names in (("cma",), ("cma", "tcp"))
    )
    with pytest.raises(Refused, match="UCX needs a companion for cma") as refused:
        run_lanes(SMALL, [Lane(alone, alone)])
    assert "--transport tcp" in (refused.value.nearest_fix or "")
    (report,) = run_lanes(SMALL, [Lane(beside, beside)])
    assert report.verified
    assert report.path.protocols == ("cma/memory",)


@pytest.mark.slow
@pytest.mark.nixl
def test_more_memory_than_the_host_has_is_refused() -> None:
    spec = TransferSpec(block_size=1 << 40, iters=1, warmup_iters=0, timeout_seconds=PATIENCE)
    with pytest.raises(Refused, match="are available"):
        run_lanes(spec, [Lane()])


def test_strangers_and_wrong_secrets_are_turned_away_and_the_target_lives_on() -> None:
    with EndProcess((), SECRET, TARGET) as target:
        port = target.expect(Listening, soon()).port
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert "does not speak" in target.expect(TurnedAway, soon()).reason
        wrong = BeInitiator("127.0.0.1", port, EndConfig(), SMALL)
        with (
            EndProcess((), SECRET[::-1], wrong) as initiator,
            pytest.raises(Refused, match="different secrets"),
        ):
            initiator.expect(Done, soon())
        assert "different secrets" in target.expect(TurnedAway, soon()).reason
        with socket.create_connection(("127.0.0.1", port)):
            pass
        assert "closed" in target.expect(TurnedAway, soon()).reason


def test_a_secret_is_in_no_command_line_and_no_environment() -> None:
    with EndProcess((), SECRET, TARGET) as target:
        target.expect(Listening, soon())
        for file in ("cmdline", "environ"):
            assert SECRET.encode() not in Path("/proc", str(target.pid), file).read_bytes()


def test_a_taken_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        order = BeTarget(
            "127.0.0.1", taken.getsockname()[1], EndConfig(), once=True, timeout_seconds=PATIENCE
        )
        with EndProcess((), SECRET, order) as target, pytest.raises(Refused, match="cannot listen"):
            target.expect(Listening, soon())


def test_a_target_nobody_comes_to_gives_up() -> None:
    order = BeTarget("127.0.0.1", 0, EndConfig(), once=True, timeout_seconds=0.1)
    with EndProcess((), SECRET, order) as target, pytest.raises(Retry, match="no initiator came"):
        target.expect(Done, soon())


def test_an_end_that_says_nothing_is_given_up_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "END_PROGRAM", (*SABOTAGE, "silent"))
    with EndProcess((), SECRET, TARGET) as target, pytest.raises(Retry, match="said nothing in time"):
        target.event(time.monotonic() + 0.1)
    until_seen(lambda: gone(target.pid), "the end has ended")


def test_the_last_words_of_an_end_that_crashed_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "END_PROGRAM", (*SABOTAGE, "crash"))
    with (
        EndProcess((), SECRET, TARGET) as target,
        pytest.raises(Retry, match="without a result: the reason it crashed"),
    ):
        target.event(soon())


PARENT = f"""
import sys, time
from rackloom.prove.transfer.processes import BeTarget, EndProcess, Listening
from rackloom.core.transfer.values import EndConfig
order = BeTarget("127.0.0.1", 0, EndConfig(), once=True, timeout_seconds=60)
with EndProcess((), {SECRET!r}, order) as target:
    target.expect(Listening, time.monotonic() + 30)
    print(target.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_end_outlives_the_one_who_started_it(how: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(parent.pid, how)
        parent.wait(PATIENCE)
    until_seen(lambda: gone(pid), "the end has ended")
