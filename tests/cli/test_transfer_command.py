import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.core.transfer.transfer_values import nic, paired, record, run
from tests.ports import reserved_ports
from tests.waiting import PATIENCE

from rackloom.cli.transfer import app
from rackloom.cli.transfer_options import parse_address, parse_size, read_secret
from rackloom.core.transfer.pairing import GpuNicPair
from rackloom.core.transfer.values import AlignmentReport, Promise
from rackloom.errors import Refused, Retry
from rackloom.prove.transfer.installation import nixl_missing_reason
from rackloom.prove.transfer.record_files import load_record, save_record
from rackloom.prove.transfer.run import RunObserver
from rackloom.topology.machine import Machine

SMALL = ("--block-size", "256KiB", "--iters", "2", "--warmup", "0")
STEADY, SLOW = (39.07, 39.06, 39.05), (27.54, 27.55, 27.53)
NVBANDWIDTH = (
    '{"nvbandwidth": {"testcases": [{"name": "device_local_copy", "status": "Passed", '
    '"bandwidth_matrix": [["2051.5"]]}]}}'
)


def call(*words: str) -> object:
    return app(list(words), result_action="return_value", exit_on_error=False)


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("64MiB", 64 << 20), ("1GiB", 1 << 30), ("1 gb", 10**9), ("2kib", 2048), ("7B", 7)],
)
def test_sizes_are_read_with_their_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5GiB", "1TB", "0x10", "1GiB1"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="is not a size"):
        parse_size(text)


def test_addresses_need_host_and_port() -> None:
    assert parse_address("10.0.0.1:5555") == ("10.0.0.1", 5555)
    assert parse_address("[fd00::1]:5555") == ("fd00::1", 5555)
    for text in ("10.0.0.1", ":5555", "10.0.0.1:", "10.0.0.1:http", "10.0.0.1:70000"):
        with pytest.raises(Refused, match="HOST:PORT"):
            parse_address(text)


def test_the_secret_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RACKLOOM_TRANSFER_SECRET", raising=False)
    with pytest.raises(Refused, match="no shared secret"):
        read_secret(None)
    monkeypatch.setenv("RACKLOOM_TRANSFER_SECRET", "from the environment")
    assert read_secret(None) == "from the environment"
    (tmp_path / "secret").write_text("from the file\n")
    assert read_secret(tmp_path / "secret") == "from the file"
    with pytest.raises(Refused, match="cannot be read"):
        read_secret(tmp_path / "absent")


def test_emulation_does_not_take_devices_or_a_target() -> None:
    for words in (["--target", "10.0.0.1:1"], ["--net-device", "lo"], ["--transport", "tcp"]):
        with pytest.raises(Refused, match="--emulate makes both ends"):
            call("run", "--emulate", *words)


def test_nonsense_sizes_do_not_start_anything() -> None:
    with pytest.raises(Refused, match="block size: 0"):
        call("run", "--block-size", "0")


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.skipif(nixl_missing_reason() is not None, reason=str(nixl_missing_reason()))
def test_a_run_prints_a_result_line_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("run", *SMALL, "--runs", "1", "--transport", "tcp", "--net-device", "lo") == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[0].removeprefix("RESULT "))
    assert result["verified"] is True
    assert result["block_size"] == 256 << 10
    assert lines[3].split()[:2] == ["plain", "lo"]
    assert lines[-1].startswith("data verified, path proved")


def test_a_host_that_cannot_be_discovered_is_measured_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def undiscoverable() -> Machine:
        raise Refused("no /sys here")

    monkeypatch.setattr("rackloom.topology.discovery.discover.discover_machine", undiscoverable)
    fine = AlignmentReport(emulated=False, label="here", proved=True, verdict="fine")
    monkeypatch.setattr("rackloom.prove.transfer.run.run_plain", lambda *_, **__: fine)
    assert call("run", "--net-device", "lo") == 0


def test_a_promise_that_breaks_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = AlignmentReport(emulated=False, label="here", proved=False, verdict="swapped")
    monkeypatch.setattr("rackloom.prove.transfer.run.run_plain", lambda *_, **__: broken)
    metrics = tmp_path / "run.prom"
    assert call("run", "--net-device", "lo", "--textfile", str(metrics)) == 1
    assert "rackloom_transfer_proved 0.0" in metrics.read_text()


def test_json_is_one_document(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fine = AlignmentReport(emulated=True, label="here", proved=True, verdict="fine")
    monkeypatch.setattr("rackloom.prove.transfer.run.run_alignment", lambda *_, **__: fine)
    assert call("run", "--emulate", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "fine"


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.skipif(nixl_missing_reason() is not None, reason=str(nixl_missing_reason()))
def test_a_saved_run_has_its_environment_and_becomes_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, html = tmp_path / "run.json", tmp_path / "run.html"
    call("run", *SMALL, "--runs", "2", "--transport", "tcp", "--net-device", "lo", "--save", str(kept))
    saved = load_record(kept).report.runs[0]
    assert saved.verified
    host = saved.environment.initiator
    assert host.ucx_version is not None
    assert host.visible.netdevs == tuple(link.name for link in host.links if link.kind == "netdev")
    call("report", str(kept), "-o", "html", "--to", str(html))
    assert html.read_text().startswith("<!doctype html>")
    capsys.readouterr()
    call("report", str(kept), "--model", "Llama-3.1-8B", "--prefill-ms", "200")
    output = capsys.readouterr().out
    assert "Student" in output
    assert "Llama-3.1-8B" in output
    assert "Llama-3.1-70B" not in output


@pytest.mark.slow
@pytest.mark.nixl
@pytest.mark.skipif(nixl_missing_reason() is not None, reason=str(nixl_missing_reason()))
def test_pairs_are_served_on_ports_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    with reserved_ports(2) as port:
        serve_and_run(port, secret)
    results = [line for line in capsys.readouterr().out.splitlines() if line.startswith("RESULT ")]
    assert [json.loads(line.removeprefix("RESULT "))["verified"] for line in results] == [True] * 2


def serve_and_run(port: int, secret: Path) -> None:
    ends = ("--pair", "cpu=lo", "--pair", "cpu=lo", "--transport", "tcp", "--secret-file", str(secret))
    server = [sys.executable, "-m", "rackloom.cli.main", "transfer", "serve", "--listen", f"127.0.0.1:{port}"]
    with subprocess.Popen([*server, *ends], stdout=subprocess.PIPE, text=True) as serving:
        assert serving.stdout is not None
        try:
            assert [serving.stdout.readline() for _ in range(2)] == [
                f"listening on 127.0.0.1 port {port + k} for cpu over lo\n" for k in range(2)
            ]
            # Two pairs on one device are not driven at once.
            assert call("run", *SMALL, "--runs", "1", "--target", f"127.0.0.1:{port}", *ends) == 0
        finally:
            serving.terminate()
            serving.wait(PATIENCE)


@pytest.mark.parametrize("text", ["cuda:0", "=lo", "cpu=", ""])
def test_what_is_no_pair_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="is not DEVICE=NIC"):
        call("run", "--pair", text)


def test_every_gpu_needs_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> None:
        raise Refused("there is no CUDA driver here")

    monkeypatch.setattr("rackloom.prove.transfer.buffers.CudaDriver.__init__", absent)
    with pytest.raises(Refused, match="no CUDA driver"):
        call("run", "--every-gpu")


def test_runs_before_a_failure_are_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object, watch: RunObserver, **__: object) -> None:
        watch.finished(run(39.0))
        raise Retry("the target ended in the middle of the transfer", after=1.0)

    monkeypatch.setattr("rackloom.prove.transfer.run.run_plain", breaks)
    kept = tmp_path / "run.json"
    metrics = tmp_path / "run.prom"
    with pytest.raises(Retry, match="in the middle"):
        call("run", "--save", str(kept), "--textfile", str(metrics))
    assert "rackloom_transfer_proved 0.0" in metrics.read_text()
    assert load_record(kept).incomplete == "the target ended in the middle of the transfer"
    assert len(load_record(kept).report.runs) == 1
    with pytest.raises(Refused, match="incomplete"):
        call("baseline", str(kept), str(tmp_path / "base.json"))


def test_a_gate_passes_the_same_and_fails_a_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / f"{name}.json" for name in ("good", "base", "slow", "weak")}
    save_record(record([run(rate) for rate in STEADY]), files["good"])
    save_record(record([run(rate) for rate in SLOW]), files["slow"])
    save_record(
        record([run(rate, links=[nic("mlx5_0", 200.0)]) for rate in (19.5, 19.4, 19.6)]), files["weak"]
    )
    call("baseline", str(files["good"]), str(files["base"]))
    assert call("gate", str(files["good"]), "--baseline", str(files["base"])) == 0
    assert "HOLDS" in capsys.readouterr().out
    assert call("gate", str(files["slow"]), "--baseline", str(files["base"])) == 1
    output = capsys.readouterr().out
    for word in ("REGRESSED", "alpha to beta", "mlx5_0", "-29.5%"):
        assert word in output
    assert call("gate", str(files["weak"]), "--baseline", str(files["base"]), "-o", "json") == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert "degraded link on alpha" in found["reason"]


def test_a_comparison_states_its_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rates in (("a", STEADY), ("b", SLOW)):
        save_record(record([run(rate) for rate in rates]), tmp_path / name)
    call("compare", str(tmp_path / "a"), str(tmp_path / "b"))
    output = capsys.readouterr().out
    assert "plain  39.06   27.54   0.100      differs (x0.705" in output
    assert "Welch's t-test" in output


def test_evidence_of_other_tools_joins_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_record(record([run(39.0)]), tmp_path / "one.json")
    (tmp_path / "nv.json").write_text(NVBANDWIDTH)
    call("evidence", str(tmp_path / "one.json"), "--nvbandwidth", str(tmp_path / "nv.json"))
    assert capsys.readouterr().out == "nvbandwidth: 1 figures\n"
    call("report", str(tmp_path / "one.json"))
    assert "2051.50 GB/s" in capsys.readouterr().out
    with pytest.raises(Refused, match="nothing to add"):
        call("evidence", str(tmp_path / "one.json"))


def test_the_matrix_is_an_svg(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_record(paired([STEADY], [GpuNicPair("cuda:0", "mlx5_0:1", "PIX", "PIX")]), tmp_path / "one.json")
    call("report", str(tmp_path / "one.json"), "-o", "svg")
    assert capsys.readouterr().out.startswith("<svg ")
    save_record(record([run(39.0, promise=Promise())]), tmp_path / "plain.json")
    with pytest.raises(Refused, match="no run of this record had a device promised"):
        call("report", str(tmp_path / "plain.json"), "-o", "svg")


def test_a_model_needs_no_host_and_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    call("model", "azure-nd96isr-h100-v5", "--block-size", "1GiB")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "GPU  NIC     CLASS  Gb/s  ALONE GB/s      ALONE ms        TOGETHER GB/s",
        "0*   mlx5_0  PIX    400   39.07           27.48           39.07",
        "0    mlx5_1  NODE   400   27.54 to 39.07  27.48 to 38.99",
    ]
    assert lines[-1] == "modelled from the wiring and two published shares of line rate; nothing was moved"
